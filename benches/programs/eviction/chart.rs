//! Draws hit rate by pool size as an SVG, one panel per trace.

use std::fmt::Write;

use super::{POLICIES, Row};

const PANEL: (f64, f64) = (420.0, 300.0);
const MARGIN: f64 = 50.0;
/// One color per policy, then the optimum.
const COLORS: [&str; 4] = ["#888888", "#c08020", "#1060c0", "#208040"];

/// Draws the charts of all traces.
pub(super) fn draw(traces: &[(String, Vec<Row>)]) -> String {
    let (width, height) = PANEL;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n",
        height * traces.len() as f64
    );
    for (index, (name, rows)) in traces.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = writeln!(svg, "<g transform=\"translate(0 {})\">", height * index as f64);
        panel(&mut svg, name, rows);
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, name: &str, rows: &[Row]) {
    let (width, height) = (PANEL.0 - 2.0 * MARGIN, PANEL.1 - 2.0 * MARGIN);
    let log = |blocks: usize| (blocks.max(1) as f64).ln();
    let first = rows.first().map_or(0.0, |row| log(row.blocks));
    let span = rows.last().map_or(1.0, |row| log(row.blocks) - first).max(f64::EPSILON);
    let top = rows.iter().map(|row| row.optimum).fold(0.01, f64::max);
    let x = |blocks: usize| MARGIN + (log(blocks) - first) / span * width;
    let y = |rate: f64| MARGIN + (1.0 - rate / top) * height;
    let mut lines = Vec::new();
    let mut text = |x: f64, y: f64, anchor: &str, colour: &str, words: &str| {
        let _ = writeln!(
            svg,
            "<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{words}</text>"
        );
    };
    text(MARGIN, 20.0, "start", "black", &format!("{name}: prefix hit rate by blocks held"));
    for part in 0..=4 {
        let rate = top * f64::from(part) / 4.0;
        text(MARGIN - 6.0, y(rate) + 4.0, "end", "black", &format!("{rate:.2}"));
    }
    for row in rows {
        text(x(row.blocks), MARGIN + height + 16.0, "middle", "black", &row.blocks.to_string());
    }
    let names = POLICIES.iter().map(|(name, _)| *name).chain(["optimum"]);
    for (index, (name, colour)) in names.zip(COLORS).enumerate() {
        text(MARGIN + 80.0 * index as f64, 36.0, "start", colour, name);
        let rate = |row: &Row| row.rates.get(index).copied().unwrap_or(row.optimum);
        let points: Vec<String> =
            rows.iter().map(|row| format!("{:.1},{:.1}", x(row.blocks), y(rate(row)))).collect();
        lines.push(format!(
            "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"{colour}\" points=\"{}\"/>\n",
            points.join(" ")
        ));
    }
    svg.extend(lines);
}
