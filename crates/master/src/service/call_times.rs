//! Histograms of the duration of calls, by kind.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_proto::v1::request::Call;

/// The upper bounds of the classes in microseconds. One more class has no upper bound.
pub const BOUNDS_US: [u64; 16] = [
    25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    1_000_000, 5_000_000, 30_000_000,
];

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallKind(usize);

/// The names of the kinds.
const NAMES: [&str; 30] = [
    "register",
    "heartbeat",
    "unregister",
    "mount",
    "unmount",
    "put_start",
    "put_end",
    "put_revoke",
    "locate",
    "verify",
    "probe",
    "remove",
    "remove_matching",
    "list_objects",
    "list_segments",
    "status",
    "create_tasks",
    "query_tasks",
    "fetch_tasks",
    "end_tasks",
    "clear_replicas",
    "create_drain_jobs",
    "query_drain_jobs",
    "cancel_drain_jobs",
    "query_quotas",
    "set_quotas",
    "describe",
    "set_expiry",
    "put_renew",
    "other",
];

impl CallKind {
    pub(super) fn of(call: &Call) -> Self {
        Self(match call {
            Call::Register(_) => 0,
            Call::Heartbeat(_) => 1,
            Call::Unregister(_) => 2,
            Call::Mount(_) => 3,
            Call::Unmount(_) => 4,
            Call::PutStart(_) => 5,
            Call::PutEnd(_) => 6,
            Call::PutRevoke(_) => 7,
            Call::Locate(_) => 8,
            Call::Verify(_) => 9,
            Call::Probe(_) => 10,
            Call::Remove(_) => 11,
            Call::RemoveMatching(_) => 12,
            Call::ListObjects(_) => 13,
            Call::ListSegments(_) => 14,
            Call::Status(_) => 15,
            Call::CreateTasks(_) => 16,
            Call::QueryTasks(_) => 17,
            Call::FetchTasks(_) => 18,
            Call::EndTasks(_) => 19,
            Call::ClearReplicas(_) => 20,
            Call::CreateDrainJobs(_) => 21,
            Call::QueryDrainJobs(_) => 22,
            Call::CancelDrainJobs(_) => 23,
            Call::QueryQuotas(_) => 24,
            Call::SetQuotas(_) => 25,
            Call::Describe(_) => 26,
            Call::SetExpiry(_) => 27,
            Call::PutRenew(_) => 28,
            #[allow(unreachable_patterns, reason = "calls that are new here have no name yet")]
            _ => NAMES.len() - 1,
        })
    }
}

/// The durations of the calls of each kind.
#[derive(Debug, Default)]
pub struct CallTimes([Durations; NAMES.len()]);

#[derive(Debug, Default)]
struct Durations {
    classes: [AtomicU64; BOUNDS_US.len() + 1],
    nanos: AtomicU64,
}

/// A snapshot of the durations of the calls of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTime {
    /// Name of the kind.
    pub call: &'static str,
    /// Number of calls by class. The counts are not cumulative.
    pub classes: [u64; BOUNDS_US.len() + 1],
    /// Duration of all calls together.
    pub sum: Duration,
}

impl CallTimes {
    /// Counts a call.
    pub(super) fn record(&self, kind: CallKind, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let class = BOUNDS_US.partition_point(|bound| bound * 1000 < nanos);
        let durations = &self.0[kind.0];
        durations.classes[class].fetch_add(1, Ordering::Relaxed);
        durations.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the kinds that were called at least once.
    pub fn snapshot(&self) -> Vec<CallTime> {
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let time = |(durations, call): (&Durations, &&'static str)| CallTime {
            call,
            classes: std::array::from_fn(|class| read(&durations.classes[class])),
            sum: Duration::from_nanos(read(&durations.nanos)),
        };
        let times = self.0.iter().zip(&NAMES).map(time);
        times.filter(|time| time.classes.iter().any(|&calls| calls > 0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use mooncake_proto::v1;

    use super::*;

    #[test]
    fn duration_at_bound_counts_in_lower_class() {
        let times = CallTimes::default();
        let kind = CallKind::of(&Call::Status(v1::StatusRequest::default()));
        for micros in [1, 25, 26, 31_000_000] {
            times.record(kind, Duration::from_micros(micros));
        }
        let [time] = &times.snapshot()[..] else { panic!() };
        assert_eq!(time.call, "status");
        assert_eq!((time.classes[0], time.classes[1], time.classes[16]), (2, 1, 1));
        assert_eq!(time.sum, Duration::from_micros(31_000_052));
    }

    #[test]
    fn kinds_have_their_names() {
        for (call, name) in [
            (Call::Register(v1::RegisterRequest::default()), "register"),
            (Call::Locate(v1::LocateRequest::default()), "locate"),
            (Call::Remove(v1::RemoveRequest::default()), "remove"),
            (Call::EndTasks(v1::EndTasksRequest::default()), "end_tasks"),
            (Call::SetQuotas(v1::SetQuotasRequest::default()), "set_quotas"),
        ] {
            assert_eq!(NAMES[CallKind::of(&call).0], name);
        }
    }
}
