//! The results of a run, as a line, as JSON, and as series for the plots.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    circumstances::Circumstances,
    latency::Latencies,
    options::{BenchConfig, Unit},
    worker::WorkerResult,
};

/// The reported quantiles of latencies, with their names.
pub(super) const QUANTILES: [(&str, f64); 5] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999), ("p99_99", 0.9999)];

/// The merged results of all threads.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) config: BenchConfig,
    pub(super) circumstances: Circumstances,
    pub(super) transport: &'static str,
    pub(super) took: Duration,
    pub(super) batches: Latencies,
    /// Bytes moved in each interval of the run.
    pub(super) bytes: Vec<u64>,
}

impl Outcome {
    pub(super) fn new(
        config: &BenchConfig,
        circumstances: Circumstances,
        transport: &'static str,
        took: Duration,
        results: &[WorkerResult],
    ) -> Self {
        let mut batches = Latencies::default();
        let mut bytes: Vec<u64> = Vec::new();
        for result in results {
            batches.merge(&result.batches);
            bytes.resize(result.bytes.len(), 0);
            for (sum, part) in bytes.iter_mut().zip(&result.bytes) {
                *sum += part;
            }
        }
        Self { config: config.clone(), circumstances, transport, took, batches, bytes }
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }

    pub(super) fn unit(&self) -> Unit {
        self.config.unit
    }

    /// Returns the throughput in the configured unit per second.
    pub(super) fn throughput(&self) -> f64 {
        self.total_bytes() as f64 / self.took.as_secs_f64() / self.unit().bytes
    }

    /// Returns the end of each interval in seconds and the throughput in it.
    pub(super) fn series(&self) -> Vec<(f64, f64)> {
        let interval = self.config.duration.as_secs_f64() / self.bytes.len() as f64;
        let last = self.bytes.len() - 1;
        // Batches started in time may end later and count to a longer last interval.
        let tail = (self.took.as_secs_f64() - interval * last as f64).max(interval);
        let points = self.bytes.iter().enumerate().map(|(index, bytes)| {
            let length = if index == last { tail } else { interval };
            (interval * index as f64 + length, *bytes as f64 / length / self.unit().bytes)
        });
        points.collect()
    }

    pub(super) fn operation(&self) -> &'static str {
        if self.config.is_writing { "write" } else { "read" }
    }

    /// Returns the last line of output, in upstream's format.
    pub(super) fn closing_line(&self) -> String {
        format!(
            "Test completed: duration {:.2}, batch count {}, throughput {:.*} {}/s",
            self.took.as_secs_f64(),
            self.batches.count(),
            self.config.precision,
            self.throughput(),
            self.unit().name,
        )
    }

    pub(super) fn latency_line(&self) -> String {
        let quantiles = QUANTILES.map(|(name, share)| {
            format!("{} {:.1}", name.replace('_', "."), self.batches.quantile_us(share))
        });
        format!(
            "Latency of a batch in us over {}: mean {:.1}, {}, max {:.1}",
            self.transport,
            self.batches.mean_us(),
            quantiles.join(", "),
            self.batches.max_us(),
        )
    }

    pub(super) fn json(&self) -> Value {
        let mean = rounded(self.batches.mean_us());
        let mut latency = json!({ "mean": mean, "max": self.batches.max_us() });
        for (name, share) in QUANTILES {
            latency[name] = json!(self.batches.quantile_us(share));
        }
        let series = self.series().into_iter();
        let series = series.map(|(at, value)| json!([rounded(at), rounded(value)]));
        json!({
            "operation": self.operation(),
            "transport": self.transport,
            "block_size": self.config.block_bytes,
            "batch_size": self.config.batch_size,
            "threads": self.config.threads,
            "duration_s": rounded(self.took.as_secs_f64()),
            "batch_count": self.batches.count(),
            "bytes": self.total_bytes(),
            "throughput": rounded(self.throughput()),
            "unit": format!("{}/s", self.unit().name),
            "latency_us": latency,
            "series": series.collect::<Vec<_>>(),
            "run": self.circumstances.json(),
        })
    }
}

/// Rounds to six decimal places, so that no digit in a file is an error of the arithmetic.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench) fn outcome() -> Outcome {
        let config = BenchConfig { duration: Duration::from_secs(2), ..BenchConfig::default() };
        let mut batches = Latencies::default();
        for ms in [1, 2, 3] {
            batches.record(Duration::from_millis(ms));
        }
        let result = |bytes| WorkerResult { batches: batches.clone(), bytes };
        let results = [result(vec![1_000_000_000, 0]), result(vec![0, 2_000_000_000])];
        let circumstances = Circumstances::now(&["--report=<here>".to_owned()]);
        Outcome::new(&config, circumstances, "shm", Duration::from_secs(3), &results)
    }

    #[test]
    fn closing_line_has_the_format_of_upstream() {
        let wanted = "Test completed: duration 3.00, batch count 6, throughput 1.00 GB/s";
        assert_eq!(outcome().closing_line(), wanted);
        let mut other = outcome();
        other.config.unit = Unit { name: "MiB", bytes: 1048576.0 };
        other.config.precision = 0;
        assert!(other.closing_line().ends_with("throughput 954 MiB/s"));
    }

    #[test]
    fn json_has_no_digits_of_rounding_errors() {
        let mut long = outcome();
        long.config.duration = Duration::from_millis(100);
        long.took = long.config.duration;
        long.bytes = vec![3_000_000; 10];
        let json = long.json();
        assert_eq!(json["series"][2], json!([0.03, 0.3]));
        assert_eq!(json["series"][5], json!([0.06, 0.3]));
        assert_eq!(json["run"]["arguments"], json!(["--report=<here>"]));
    }

    #[test]
    fn json_contains_throughput_and_latencies() {
        let json = outcome().json();
        assert_eq!(json["throughput"], 1.0);
        assert_eq!(json["bytes"], 3_000_000_000_u64);
        assert_eq!(json["transport"], "shm");
        assert_eq!(json["series"], json!([[1.0, 1.0], [3.0, 1.0]]));
        let latency = &json["latency_us"];
        assert!((latency["mean"].as_f64().unwrap() - 2000.0).abs() < 1.0);
        assert!((latency["p50"].as_f64().unwrap() / 2000.0 - 1.0).abs() < 0.02);
        assert_eq!(latency["max"], 3000.0);
        assert!(outcome().latency_line().contains("p99.9 3000.0"), "{}", outcome().latency_line());
    }
}
