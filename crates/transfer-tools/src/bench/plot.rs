//! An HTML page with two plots of a run: throughput over time and the latency distribution.

use std::fmt::Write as _;

use super::outcome::{Outcome, QUANTILES};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 44.0;

const STYLE: &str = "
:root { --ink: #1c2733; --paper: #fff; --faint: #dfe5ea; --soft: #5c6b78; --line: #1565c0; --fill: #1565c022; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #12181f; --faint: #2b3640; --soft: #94a3b0; --line: #64b5f6; --fill: #64b5f622; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 800px; margin: 2em auto; padding: 0 20px; }
h1 { font-size: 1.35em; } h2 { font-size: 1.05em; margin: 2em 0 .4em; }
table { border-collapse: collapse; margin: 1em 0; } td, th { text-align: right; padding: .15em .9em .15em 0; font-weight: normal; }
th { color: var(--soft); text-align: left; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--faint); } .axis { stroke: var(--soft); }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; } .area { fill: var(--fill); stroke: none; }
.mean { stroke: var(--soft); stroke-dasharray: 5 4; }
";

/// An axis: its range, marks, and title.
struct Axis {
    low: f64,
    high: f64,
    marks: Vec<(f64, String)>,
    title: String,
}

/// Returns the page, which needs no other file and no script.
pub(super) fn page(outcome: &Outcome) -> String {
    let config = &outcome.config;
    let unit = format!("{}/s", outcome.unit().name);
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>transfer_engine_bench</title><style>{STYLE}</style></head><body>\n\
         <h1>{} over {}: {:.*} {unit}</h1>\n",
        outcome.operation(),
        outcome.transport,
        config.precision,
        outcome.throughput(),
    );
    let run = &outcome.circumstances;
    let rows = [
        ("host", escaped(&run.host)),
        ("started", run.started_at.clone()),
        ("version", run.version.to_owned()),
        ("arguments", escaped(&run.arguments.join(" "))),
        ("block", bytes(config.block_bytes)),
        ("blocks per batch", config.batch_size.to_string()),
        ("threads", config.threads.to_string()),
        ("memory on each side", bytes(config.buffer_bytes)),
        ("time", format!("{:.2} s", outcome.took.as_secs_f64())),
        ("batches", outcome.batches.count().to_string()),
        ("bytes", bytes(outcome.total_bytes())),
    ];
    table(&mut text, &rows);
    let _ = write!(text, "<h2>Throughput over time, {unit}</h2>\n{}", throughput(outcome, &unit));
    text.push_str("<h2>Latency of a batch</h2>\n");
    text.push_str(&latency(outcome));
    let mut rows = vec![("mean".to_owned(), micros(outcome.batches.mean_us()))];
    for (name, share) in QUANTILES {
        rows.push((name.replace('_', "."), micros(outcome.batches.quantile_us(share))));
    }
    rows.push(("max".to_owned(), micros(outcome.batches.max_us())));
    table(&mut text, &rows);
    text.push_str("</body></html>\n");
    text
}

fn throughput(outcome: &Outcome, unit: &str) -> String {
    let series = outcome.series();
    let end = series.last().map_or(1.0, |(at, _)| *at).max(1e-6);
    let most = series.iter().map(|(_, value)| *value).fold(1e-9, f64::max);
    let x = Axis::linear(end, "seconds");
    let y = Axis::linear(most * 1.05, unit);
    let mut begin = 0.0;
    let mut points = Vec::new();
    // A value applies to its whole interval.
    for (at, value) in &series {
        points.push((x.across(begin), y.up(*value)));
        points.push((x.across(*at), y.up(*value)));
        begin = *at;
    }
    let mut svg = frame(&x, &y, "Throughput over time");
    let path = path(&points);
    let (left, right, floor) = (x.across(0.0), x.across(end), y.up(0.0));
    let _ = write!(
        svg,
        "<path class=\"area\" d=\"{path} L{right:.1} {floor:.1} L{left:.1} {floor:.1} Z\"/>\
         <path class=\"line\" d=\"{path}\"/>",
    );
    let mean = y.up(outcome.throughput());
    // Above the plot: beside the line, the text would cover the curve.
    let _ = writeln!(
        svg,
        "<line class=\"mean\" x1=\"{left:.1}\" y1=\"{mean:.1}\" x2=\"{right:.1}\" y2=\"{mean:.1}\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">dashed: mean {:.2}</text></svg>",
        right,
        TOP - 5.0,
        outcome.throughput(),
    );
    svg
}

/// Plots latency by quantile on a logarithmic scale that stretches the tail.
fn latency(outcome: &Outcome) -> String {
    // The x axis counts nines: 0 is the minimum, 1 is 90 %, 2 is 99 %.
    let nines = (outcome.batches.count().max(10) as f64).log10();
    let marks = [
        (0.0, "0"),
        (std::f64::consts::LOG10_2, "50 %"),
        (1.0, "90 %"),
        (2.0, "99 %"),
        (3.0, "99.9 %"),
    ];
    let more = [(4.0, "99.99 %"), (5.0, "99.999 %"), (6.0, "99.9999 %")];
    let marks = marks.iter().chain(&more).filter(|(at, _)| *at <= nines);
    let x = Axis {
        low: 0.0,
        high: nines,
        marks: marks.map(|(at, name)| (*at, (*name).to_owned())).collect(),
        title: "share of batches".to_owned(),
    };
    let steps = 240;
    let at = |step: usize| nines * step as f64 / steps as f64;
    let values: Vec<_> = (0..=steps)
        .map(|step| {
            (at(step), outcome.batches.quantile_us((1.0 - 10_f64.powf(-at(step))).max(1e-9)))
        })
        .collect();
    let low = values.first().map_or(1.0, |(_, us)| *us).max(0.01);
    let y = Axis::decades(low, outcome.batches.max_us().max(low));
    let points: Vec<_> =
        values.iter().map(|(at, us)| (x.across(*at), y.up(us.max(low).log10()))).collect();
    let mut svg = frame(&x, &y, "Latency of a batch");
    let _ = writeln!(svg, "<path class=\"line\" d=\"{}\"/></svg>", path(&points));
    svg
}

impl Axis {
    /// Creates an axis from 0 to `high` with round marks.
    fn linear(high: f64, title: &str) -> Self {
        let rough = high / 6.0;
        let power = 10_f64.powf(rough.log10().floor());
        let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough);
        let step = factor.unwrap_or(10.0) * power;
        let digits = if step >= 1.0 { 0 } else { (-step.log10()).ceil() as usize };
        let count = (high / step + 1e-9).floor() as usize;
        let mark =
            |index: usize| (index as f64 * step, format!("{:.digits$}", index as f64 * step));
        Self { low: 0.0, high, marks: (0..=count).map(mark).collect(), title: title.to_owned() }
    }

    /// Creates an axis of microseconds with a mark per power of ten; positions are logarithms.
    fn decades(low: f64, high: f64) -> Self {
        let (first, last) = (low.log10().floor(), high.log10().ceil());
        let last = if last > first { last } else { first + 1.0 };
        let mut marks = Vec::new();
        for decade in first as i32..=last as i32 {
            marks.push((f64::from(decade), micros(10_f64.powi(decade))));
        }
        Self { low: first, high: last, marks, title: String::new() }
    }

    fn share(&self, value: f64) -> f64 {
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    fn across(&self, value: f64) -> f64 {
        LEFT + self.share(value) * (WIDTH - LEFT - RIGHT)
    }

    fn up(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.share(value) * (HEIGHT - TOP - BOTTOM)
    }
}

/// Returns the beginning of the picture: grid, marks, and axes.
fn frame(x: &Axis, y: &Axis, label: &str) -> String {
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{label}\">");
    let (left, right, floor) = (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM);
    for (value, name) in &y.marks {
        let at = y.up(*value);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{left}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            left - 8.0,
            at + 4.0,
        );
    }
    for (value, name) in &x.marks {
        let at = x.across(*value);
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{at:.1}\" y1=\"{floor}\" x2=\"{at:.1}\" y2=\"{}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
            floor + 5.0,
            floor + 20.0,
        );
    }
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{left}\" y1=\"{floor}\" x2=\"{right}\" y2=\"{floor}\"/>\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
        right,
        HEIGHT - 6.0,
        x.title,
    );
    svg
}

fn path(points: &[(f64, f64)]) -> String {
    let mut text = String::new();
    for (index, (x, y)) in points.iter().enumerate() {
        let _ = write!(text, "{}{x:.1} {y:.1} ", if index == 0 { 'M' } else { 'L' });
    }
    text
}

fn table(text: &mut String, rows: &[(impl AsRef<str>, String)]) {
    text.push_str("<table>\n");
    for (name, value) in rows {
        let _ = writeln!(text, "<tr><th>{}</th><td>{value}</td></tr>", name.as_ref());
    }
    text.push_str("</table>\n");
}

/// Escapes text of the host or of the command line.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Formats a duration, given in microseconds, in a suitable unit.
fn micros(us: f64) -> String {
    let (value, unit) = match us {
        us if us >= 1e6 => (us / 1e6, "s"),
        us if us >= 1e3 => (us / 1e3, "ms"),
        us if us >= 1.0 => (us, "µs"),
        us => (us * 1e3, "ns"),
    };
    let digits = if value >= 100.0 || value.fract() == 0.0 { 0 } else { 2 };
    format!("{value:.digits$} {unit}")
}

fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value.fract() == 0.0 { 0 } else { 2 };
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::{super::outcome::tests::outcome, *};

    #[test]
    fn page_tells_how_the_run_was_made() {
        let outcome = outcome();
        let page = page(&outcome);
        for value in [&outcome.circumstances.started_at, "--report=&lt;here&gt;"] {
            assert!(page.contains(&format!("<td>{value}</td>")), "{value}");
        }
        assert!(!page.contains("<here>"));
    }

    #[test]
    fn text_of_the_mean_is_above_the_plot() {
        let page = page(&outcome());
        let (before, _) = page.split_once("dashed: mean 1.00").unwrap();
        let (_, y) = before.rsplit_once(" y=\"").unwrap();
        let y: f64 = y.split_once('"').unwrap().0.parse().unwrap();
        assert!(0.0 < y && y < TOP, "{y}");
    }

    #[test]
    fn axes_have_round_marks() {
        let names = |axis: Axis| axis.marks.into_iter().map(|(_, name)| name).collect::<Vec<_>>();
        assert_eq!(names(Axis::linear(10.0, "")), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(names(Axis::linear(0.5, "")), ["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"]);
        assert_eq!(names(Axis::linear(7.3, "")), ["0", "2", "4", "6"]);
        assert_eq!(names(Axis::decades(30.0, 4000.0)), ["10 µs", "100 µs", "1 ms", "10 ms"]);
    }

    #[test]
    fn quantities_use_suitable_units() {
        assert_eq!([micros(0.5), micros(2.0), micros(1234.5)], ["500 ns", "2 µs", "1.23 ms"]);
        assert_eq!([bytes(512), bytes(65536), bytes(3 << 29)], ["512 B", "64 KiB", "1.50 GiB"]);
    }
}
