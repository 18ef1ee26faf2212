//! Metrics in the Prometheus text format: each name once, with help and type, then its samples.

use std::{
    collections::HashSet,
    fmt::{Display, Write as _},
};

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

    /// Writes one sample, with its labels in order.
    pub fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
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
        labels: &[(&str, &str)],
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
