//! Samples of the last minutes, taken at a fixed interval, for the charts of the page.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use crate::service::{Service, op_metrics::Op};

/// The sampling interval.
pub(super) const STEP: Duration = Duration::from_secs(2);

/// The number of samples kept: ten minutes.
const SAMPLES_MAX: usize = 300;

/// One sample. Counters are cumulative.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at_ms: u64,
    used: u64,
    capacity: u64,
    keys: u64,
    gets: u64,
    hits: u64,
    puts: u64,
    calls: u64,
    evicted: u64,
}

/// The latest samples, oldest first.
#[derive(Debug, Default)]
pub(super) struct Samples(VecDeque<Sample>);

impl Samples {
    /// Takes a sample.
    pub(super) fn take(&mut self, service: &Service) {
        let totals = service.totals();
        let traffic = service.traffic();
        let count = |op| service.op_metrics().count(op);
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Sample {
            at_ms: now_ms(),
            used: totals.used,
            capacity: totals.capacity,
            keys: totals.keys,
            gets: traffic.gets,
            hits: traffic.hits,
            puts: count(Op::PutEnd).all_items(),
            calls: Op::ALL.iter().map(|(op, _, _)| count(*op).calls()).sum(),
            evicted: totals.counters.evicted_keys,
        });
    }

    /// Returns the samples later than `at_ms`, column by column.
    pub(super) fn since(&self, at_ms: u64) -> Value {
        let column = |pick: fn(&Sample) -> u64| -> Vec<u64> {
            self.0.iter().filter(|sample| sample.at_ms > at_ms).map(pick).collect()
        };
        json!({
            "at_ms": column(|s| s.at_ms),
            "used": column(|s| s.used),
            "capacity": column(|s| s.capacity),
            "keys": column(|s| s.keys),
            "gets": column(|s| s.gets),
            "hits": column(|s| s.hits),
            "puts": column(|s| s.puts),
            "calls": column(|s| s.calls),
            "evicted": column(|s| s.evicted),
        })
    }
}

/// Returns the present time in milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use mooncake_base::SystemClock;

    use super::*;
    use crate::state::Rules;

    #[test]
    fn keeps_latest_samples_and_returns_newer_ones() {
        let service = Service::new(Rules::default(), SystemClock::shared());
        let mut samples = Samples::default();
        for _ in 0..SAMPLES_MAX + 3 {
            samples.take(&service);
        }
        let length = |value: &Value| value["used"].as_array().unwrap().len();
        let all = samples.since(0);
        assert_eq!(length(&all), SAMPLES_MAX);
        let last = all["at_ms"][SAMPLES_MAX - 1].as_u64().unwrap();
        assert_eq!(length(&samples.since(last)), 0);
        assert!(length(&samples.since(last - 1)) >= 1);
    }
}
