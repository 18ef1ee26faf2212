//! Samples of the last hour, taken at a fixed interval, for the charts of the page.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use mooncake_proto::calls::Method;

use crate::service::{Service, call_times::BOUNDS_US, op_metrics::Op};

/// The sampling interval.
pub(super) const STEP: Duration = Duration::from_secs(2);

/// The number of samples kept: one hour, 230 KB.
const SAMPLES_MAX: usize = 1800;

/// The number of calls by class of duration.
type Classes = [u64; BOUNDS_US.len() + 1];

/// One sample. Counters are cumulative; latencies are those of the calls since the sample before.
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
    disk_hits: u64,
    offloaded_bytes: u64,
    read_bytes: u64,
    put_bytes: u64,
    expired: u64,
    without_room: u64,
    refused: u64,
    /// `None` if there was no call.
    p50_us: Option<u64>,
    p99_us: Option<u64>,
}

/// The latest samples, oldest first.
#[derive(Debug, Default)]
pub(super) struct Samples {
    samples: VecDeque<Sample>,
    /// The calls up to the last sample.
    calls: Classes,
}

impl Samples {
    /// Takes a sample.
    pub(super) fn take(&mut self, service: &Service) {
        let totals = service.totals();
        let traffic = service.traffic();
        let count = |op: Op| service.op_metrics().count(op);
        let calls = classes_of_calls(service);
        let new: Classes =
            std::array::from_fn(|class| calls[class].saturating_sub(self.calls[class]));
        self.calls = calls;
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample {
            at_ms: now_ms(),
            used: totals.used,
            capacity: totals.capacity,
            keys: totals.keys,
            gets: traffic.gets,
            hits: traffic.hits,
            puts: count(Method::PutEnd.into()).all_items(),
            calls: Op::all().map(|(op, ..)| count(op).calls()).sum(),
            evicted: totals.counters.evicted_keys,
            disk_hits: traffic.disk_hits,
            offloaded_bytes: totals.counters.offloaded_bytes,
            read_bytes: traffic.hit_bytes,
            put_bytes: traffic.sizes.sum,
            expired: totals.counters.clients_expired,
            without_room: totals.counters.puts_without_room,
            refused: service.admission().map_or(0, crate::service::Admission::refused),
            p50_us: quantile(&new, 0.5),
            p99_us: quantile(&new, 0.99),
        });
    }

    /// Returns the samples later than `at_ms`, column by column.
    pub(super) fn since(&self, at_ms: u64) -> Value {
        let new = || self.samples.iter().filter(|sample| sample.at_ms > at_ms);
        let column = |pick: fn(&Sample) -> u64| -> Vec<u64> { new().map(pick).collect() };
        let times = |pick: fn(&Sample) -> Option<u64>| -> Vec<_> { new().map(pick).collect() };
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
            "disk_hits": column(|s| s.disk_hits),
            "offloaded_bytes": column(|s| s.offloaded_bytes),
            "read_bytes": column(|s| s.read_bytes),
            "put_bytes": column(|s| s.put_bytes),
            "expired": column(|s| s.expired),
            "without_room": column(|s| s.without_room),
            "refused": column(|s| s.refused),
            "p50_us": times(|s| s.p50_us),
            "p99_us": times(|s| s.p99_us),
        })
    }
}

/// Returns the number of calls by duration, without heartbeats.
fn classes_of_calls(service: &Service) -> Classes {
    let mut classes = Classes::default();
    let times = service.call_times().snapshot();
    for (_, time) in times.iter().filter(|(call, _)| *call != "heartbeat") {
        classes.iter_mut().zip(&time.counts).for_each(|(sum, calls)| *sum += calls);
    }
    classes
}

/// Returns the duration in microseconds that this share of the calls stays below, as if the calls of
/// a class were spread evenly over it.
fn quantile(classes: &Classes, share: f64) -> Option<u64> {
    let calls: u64 = classes.iter().sum();
    let wanted = calls as f64 * share;
    let mut below = 0.0;
    for (class, &count) in classes.iter().enumerate().filter(|(_, count)| **count > 0) {
        if below + count as f64 >= wanted {
            let low = if class == 0 { 0 } else { BOUNDS_US[class - 1] };
            // The last class has no upper bound.
            let high = BOUNDS_US.get(class).copied().unwrap_or(low);
            let part = (wanted - below) / count as f64;
            return Some(low + ((high - low) as f64 * part) as u64);
        }
        below += count as f64;
    }
    None
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

    #[test]
    fn quantile_lies_within_the_class_of_its_call() {
        let mut classes = Classes::default();
        assert_eq!(quantile(&classes, 0.5), None, "there was no call");
        classes[0] = 100;
        assert_eq!(quantile(&classes, 0.5), Some(12));
        classes[3] = 100;
        let p99 = quantile(&classes, 0.99).unwrap();
        assert!((BOUNDS_US[2]..=BOUNDS_US[3]).contains(&p99), "{p99}");
        classes[BOUNDS_US.len()] = 1000;
        assert_eq!(quantile(&classes, 0.99), Some(BOUNDS_US[BOUNDS_US.len() - 1]));
    }
}
