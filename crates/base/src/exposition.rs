//! Metrics in the Prometheus text format: each name once, with help and type, then its samples.

use std::{
    collections::HashSet,
    fmt::{Display, Write as _},
};

use crate::histogram::Latency;

/// Names and values of labels, in order.
pub type Labels<'a> = [(&'a str, &'a str)];

/// A metric that all rows of a type have.
#[derive(Debug)]
pub struct Metric<R> {
    /// Its name, or the end of it.
    pub name: &'static str,
    kind: &'static str,
    /// One sentence about it.
    pub help: &'static str,
    label: Option<(&'static str, &'static str)>,
    value: Value<R>,
}

/// How the value of a metric is read from a row.
#[derive(Debug)]
enum Value<R> {
    Whole(fn(&R) -> u64),
    Seconds(fn(&R) -> f64),
}

impl<R> Metric<R> {
    /// Declares a gauge.
    pub const fn gauge(name: &'static str, help: &'static str, value: fn(&R) -> u64) -> Self {
        Self { name, kind: "gauge", help, label: None, value: Value::Whole(value) }
    }

    /// Declares a counter.
    pub const fn counter(name: &'static str, help: &'static str, value: fn(&R) -> u64) -> Self {
        Self { kind: "counter", ..Self::gauge(name, help, value) }
    }

    /// Declares a gauge in seconds.
    pub const fn seconds(name: &'static str, help: &'static str, value: fn(&R) -> f64) -> Self {
        Self { name, kind: "gauge", help, label: None, value: Value::Seconds(value) }
    }

    /// Declares a counter of seconds.
    pub const fn total_seconds(
        name: &'static str,
        help: &'static str,
        value: fn(&R) -> f64,
    ) -> Self {
        Self { kind: "counter", ..Self::seconds(name, help, value) }
    }

    /// Adds a label, which all samples of the metric have behind those of their rows.
    pub const fn labelled(self, label: &'static str, text: &'static str) -> Self {
        Self { label: Some((label, text)), ..self }
    }

    /// Returns the value of a row and its name in a dictionary, without the ending of counters.
    /// Seconds are cut off.
    pub fn entry(&self, row: &R) -> (&'static str, u64) {
        let value = match self.value {
            Value::Whole(value) => value(row),
            Value::Seconds(value) => value(row) as u64,
        };
        (self.name.trim_end_matches("_total"), value)
    }
}

/// A builder of the text.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
    names: HashSet<String>,
}

impl Exposition {
    /// Writes help and type of a metric; its samples follow.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        self.names.insert(name.to_owned());
    }

    /// Writes a gauge with one sample.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.head(name, "gauge", help);
        self.sample(name, &[], value);
    }

    /// Writes a counter with one sample.
    pub fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.head(name, "counter", help);
        self.sample(name, &[], value);
    }

    /// Writes metrics one after the other, each with the samples of all rows. The prefix is that of
    /// their names. Metrics with the same name follow each other, and have the help of the first.
    pub fn rows<R>(
        &mut self,
        prefix: &str,
        metrics: &[Metric<R>],
        rows: &[(Vec<(&str, &str)>, &R)],
    ) {
        for metric in metrics {
            self.metric(&format!("{prefix}{}", metric.name), metric, rows);
        }
    }

    /// Writes a metric under another name than its own, with the samples of all rows.
    pub fn metric<R>(&mut self, name: &str, metric: &Metric<R>, rows: &[(Vec<(&str, &str)>, &R)]) {
        if !self.has(name) {
            self.head(name, metric.kind, metric.help);
        }
        for (labels, row) in rows {
            let labels = [&labels[..], metric.label.as_slice()].concat();
            match metric.value {
                Value::Whole(value) => self.sample(name, &labels, value(row)),
                Value::Seconds(value) => self.sample(name, &labels, value(row)),
            }
        }
    }

    /// Writes metrics one after the other, each with the sample of one row without labels.
    pub fn row<R>(&mut self, prefix: &str, metrics: &[Metric<R>], row: &R) {
        self.rows(prefix, metrics, &[(Vec::new(), row)]);
    }

    /// Writes a histogram of durations in seconds, with the samples of all rows.
    pub fn durations<'a>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Vec<(&'a str, &'a str)>, &'a Latency)>,
    ) {
        self.head(name, "histogram", help);
        for (labels, latency) in rows {
            let seconds = |micros: u64| micros as f64 / 1e6;
            let classes = latency.octaves().into_iter();
            let classes = classes.map(|(end, count)| (end.map(seconds), count));
            self.histogram(name, &labels, classes, latency.sum().as_secs_f64());
        }
    }

    /// Writes one sample, with its labels in order.
    pub fn sample(&mut self, name: &str, labels: &Labels<'_>, value: impl Display) {
        self.text.push_str(name);
        for (at, (label, value)) in labels.iter().enumerate() {
            let open = if at == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{open}{label}=\"{}\"", escape(value));
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    /// Writes the samples of one histogram, from the upper bound of each bucket (`None` for the last)
    /// and its own count, not cumulated.
    pub fn histogram<B: Display>(
        &mut self,
        name: &str,
        labels: &Labels<'_>,
        classes: impl IntoIterator<Item = (Option<B>, u64)>,
        sum: impl Display,
    ) {
        let mut count = 0;
        let bucket = format!("{name}_bucket");
        for (end, values) in classes {
            count += values;
            let end = end.map_or_else(|| "+Inf".to_owned(), |end| end.to_string());
            self.sample(&bucket, &[labels, &[("le", &end)]].concat(), count);
        }
        self.sample(&format!("{name}_sum"), labels, sum);
        self.sample(&format!("{name}_count"), labels, count);
    }

    /// Returns whether the text has a metric with this name.
    pub fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Returns the text written so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the complete text.
    pub fn finish(self) -> String {
        self.text
    }
}

/// Escapes the value of a label.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_ordered_and_escaped() {
        let mut out = Exposition::default();
        out.counter("a_total", "Help.", 1);
        out.sample("b", &[("x", "1"), ("y", "a\"b\\c\nd")], 2.5);
        let text = "# HELP a_total Help.\n# TYPE a_total counter\na_total 1\n\
            b{x=\"1\",y=\"a\\\"b\\\\c\\nd\"} 2.5\n";
        assert_eq!(out.text(), text);
        assert!(out.has("a_total") && !out.has("b"));
    }

    #[test]
    fn rows_share_the_head_of_each_metric() {
        let metrics = [
            Metric::gauge("length", "Its length.", |row: &&str| row.len() as u64),
            Metric::counter("spaces", "Its spaces.", |row| row.matches(' ').count() as u64),
        ];
        let mut out = Exposition::default();
        out.rows("a_", &metrics, &[(vec![("row", "1")], &"x y"), (vec![("row", "2")], &"")]);
        assert_eq!(
            out.finish(),
            "# HELP a_length Its length.\n# TYPE a_length gauge\n\
             a_length{row=\"1\"} 3\na_length{row=\"2\"} 0\n\
             # HELP a_spaces Its spaces.\n# TYPE a_spaces counter\n\
             a_spaces{row=\"1\"} 1\na_spaces{row=\"2\"} 0\n"
        );
    }

    #[test]
    fn metrics_of_one_name_share_the_head_and_differ_by_label() {
        let metrics = [
            Metric::counter("it_total", "Both.", |row: &u64| *row).labelled("part", "one"),
            Metric::counter("it_total", "Not shown.", |row| *row + 1).labelled("part", "two"),
            Metric::total_seconds("time_total", "Its time.", |row| *row as f64 / 2.0),
        ];
        let mut out = Exposition::default();
        out.row("", &metrics, &1);
        assert_eq!(
            out.finish(),
            "# HELP it_total Both.\n# TYPE it_total counter\n\
             it_total{part=\"one\"} 1\nit_total{part=\"two\"} 2\n\
             # HELP time_total Its time.\n# TYPE time_total counter\ntime_total 0.5\n"
        );
    }

    #[test]
    fn durations_are_in_seconds() {
        let histogram = crate::histogram::Histogram::default();
        histogram.record(std::time::Duration::from_micros(700));
        let mut out = Exposition::default();
        out.durations("t", "Help.", [(vec![("row", "1")], &histogram.snapshot())]);
        for line in [
            "# TYPE t histogram",
            "t_bucket{row=\"1\",le=\"0.000512\"} 0",
            "t_bucket{row=\"1\",le=\"0.001024\"} 1",
            "t_sum{row=\"1\"} 0.0007",
            "t_count{row=\"1\"} 1",
        ] {
            assert!(out.text().lines().any(|found| found == line), "{line}\n{}", out.text());
        }
    }

    #[test]
    fn histogram_buckets_are_cumulative() {
        let mut out = Exposition::default();
        out.histogram("h", &[("op", "get")], [(Some(1), 2), (Some(2), 0), (None, 3)], 7);
        let lines: Vec<_> = out.text().lines().collect();
        let expected = [
            "h_bucket{op=\"get\",le=\"1\"} 2",
            "h_bucket{op=\"get\",le=\"2\"} 2",
            "h_bucket{op=\"get\",le=\"+Inf\"} 5",
            "h_sum{op=\"get\"} 7",
            "h_count{op=\"get\"} 5",
        ];
        assert_eq!(lines, expected);
    }
}
