//! Metric names of calls to the master: upstream's name where there is one, otherwise our own.

use mooncake_proto::v1::request::Call;

/// Metric name by call index.
pub(super) const CALLS: [&str; 30] = [
    "RegisterClient",
    "Ping",
    "UnregisterClient",
    "MountSegment",
    "UnmountSegment",
    "PutStart",
    "PutEnd",
    "PutRevoke",
    "GetReplicaList",
    "Verify",
    "ExistKey",
    "Remove",
    "RemoveByRegex",
    "ListObjects",
    "ListSegments",
    "Status",
    "CreateTasks",
    "QueryTask",
    "FetchTasks",
    "MarkTaskToComplete",
    "BatchReplicaClear",
    "CreateDrainJobs",
    "QueryDrainJobs",
    "CancelDrainJobs",
    "QueryQuotas",
    "SetQuotas",
    "Describe",
    "SetExpiry",
    "PutRenew",
    "Other",
];

/// Returns the index of a call in [`CALLS`].
#[allow(unreachable_patterns, reason = "a new call is counted as Other until it has a name here")]
pub(crate) const fn call_index(call: &Call) -> usize {
    match call {
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
        _ => 29,
    }
}

#[cfg(test)]
mod tests {
    use mooncake_proto::v1;

    use super::*;

    #[test]
    fn each_call_has_its_metric_name() {
        let name = |call: Call| CALLS[call_index(&call)];
        assert_eq!(name(Call::Heartbeat(v1::HeartbeatRequest::default())), "Ping");
        assert_eq!(name(Call::Locate(v1::LocateRequest::default())), "GetReplicaList");
        assert_eq!(name(Call::Status(v1::StatusRequest::default())), "Status");
        assert_eq!(name(Call::SetQuotas(v1::SetQuotasRequest::default())), "SetQuotas");
    }
}
