//! The calls to the master, one row each: what the client, the master and their metrics need to know of a
//! call besides its messages.
//!
//! A call that has no row does not compile, and neither does a row without a call.

use bytes::Bytes;
use mooncake_base::Result;

use crate::{
    items::{self, Keys},
    v1::{self, Caller, request, response},
};

/// A call as a request message, with the message that answers it.
pub trait Rpc: Sized {
    /// The message of the answer.
    type Answer;

    /// Which call it is.
    const METHOD: Method;

    /// Wraps the request for sending.
    fn into_call(self) -> request::Call;

    /// Unwraps the answer; `None` if it is that to another call.
    fn answer(reply: response::Call) -> Option<Self::Answer>;
}

/// What a repetition of a call does, and thereby how it is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repetition {
    /// A second execution does no harm.
    Harmless,
    /// A second execution would count or remove something else: the call carries a number by which the
    /// master knows a repetition.
    Numbered,
    /// The call carries an id of its own; without one it is sent once.
    StartsPut,
    /// The call names versions, which no other put has.
    ClosesPut,
    /// The call finds out whether the master can be reached. Its caller wants to know at once that it
    /// cannot.
    Probe,
}

/// Writes what is said of each call in `for_each_call!` into types and functions.
macro_rules! calls {
    ($(
        $method:ident($request:ident -> $response:ident) $name:ident, $metric:literal, $repetition:ident,
        |$r:ident| items: $items:expr, keys: $keys:expr;
    )+) => {
        /// Which call it is.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Method {
            $(#[doc = concat!("`", stringify!($name), "`.")] $method,)+
        }

        impl Method {
            /// All calls, in the order of their discriminants.
            pub const ALL: [Self; [$(stringify!($name)),+].len()] = [$(Self::$method),+];

            /// Returns the name in the logs and metrics of the master, which is that of the message.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$method => stringify!($name),)+ }
            }

            /// Returns the name in the metrics of clients: upstream's where there is one.
            pub const fn metric_name(self) -> &'static str {
                match self { $(Self::$method => $metric,)+ }
            }

            /// Returns what a repetition of the call does.
            pub const fn repetition(self) -> Repetition {
                match self { $(Self::$method => Repetition::$repetition,)+ }
            }
        }

        impl request::Call {
            /// Returns which call it is.
            pub const fn method(&self) -> Method {
                match self { $(Self::$method(_) => Method::$method,)+ }
            }

            /// Returns the caller field of the message.
            pub fn caller(&self) -> Option<&Caller> {
                match self { $(Self::$method(r) => r.caller.as_ref(),)+ }
            }

            /// Returns the caller field of the message, to be changed.
            pub fn caller_mut(&mut self) -> &mut Option<Caller> {
                match self { $(Self::$method(r) => &mut r.caller,)+ }
            }

            /// Returns the number of items; 0 for calls without items.
            pub fn items(&self) -> usize {
                match self { $(Self::$method($r) => { let _ = $r; $items })+ }
            }

            /// Returns the keys of the items; none for calls that name their items otherwise.
            fn packed_keys(&self) -> Keys<'_> {
                match self { $(Self::$method($r) => { let _ = $r; $keys })+ }
            }
        }

        $(
            impl Rpc for v1::$request {
                type Answer = v1::$response;

                const METHOD: Method = Method::$method;

                fn into_call(self) -> request::Call {
                    request::Call::$method(self)
                }

                fn answer(reply: response::Call) -> Option<Self::Answer> {
                    match reply {
                        response::Call::$method(answer) => Some(answer),
                        _ => None,
                    }
                }
            }
        )+
    };
}

/// Hands the rows of all calls to a macro that writes something of each.
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_call {
    ($write:ident) => {
        $write! {
            Register(RegisterRequest -> RegisterResponse) register, "RegisterClient", Probe,
                |r| items: 0, keys: Keys::None;
            Heartbeat(HeartbeatRequest -> HeartbeatResponse) heartbeat, "Ping", Probe,
                |r| items: 0, keys: Keys::None;
            Unregister(UnregisterRequest -> UnregisterResponse) unregister, "UnregisterClient", Probe,
                |r| items: 0, keys: Keys::None;
            Mount(MountRequest -> MountResponse) mount, "MountSegment", Harmless,
                |r| items: r.segments.len(), keys: Keys::None;
            Unmount(UnmountRequest -> UnmountResponse) unmount, "UnmountSegment", Numbered,
                |r| items: r.segments.len(), keys: Keys::None;
            PutStart(PutStartRequest -> PutStartResponse) put_start, "PutStart", StartsPut,
                |r| items: r.count(), keys: Keys::Column(r.key_column());
            PutEnd(PutEndRequest -> PutEndResponse) put_end, "PutEnd", ClosesPut,
                |r| items: items::count_refs(r.columns.as_ref()), keys: Keys::None;
            PutRevoke(PutRevokeRequest -> PutRevokeResponse) put_revoke, "PutRevoke", ClosesPut,
                |r| items: items::count_refs(r.columns.as_ref()), keys: Keys::None;
            PutRenew(PutRenewRequest -> PutRenewResponse) put_renew, "PutRenew", Harmless,
                |r| items: r.versions.len(), keys: Keys::None;
            Locate(LocateRequest -> LocateResponse) locate, "GetReplicaList", Harmless,
                |r| items: r.count(), keys: Keys::Column(r.keys.as_ref());
            Verify(VerifyRequest -> VerifyResponse) verify, "Verify", Harmless,
                |r| items: r.reads.len(), keys: Keys::Reads(&r.reads);
            Probe(ProbeRequest -> ProbeResponse) probe, "ExistKey", Harmless,
                |r| items: r.keys.len().saturating_mul(1 + r.suffixes.len()), keys: Keys::List(&r.keys);
            Remove(RemoveRequest -> RemoveResponse) remove, "Remove", Numbered,
                |r| items: r.keys.len(), keys: Keys::List(&r.keys);
            RemoveMatching(RemoveMatchingRequest -> RemoveMatchingResponse)
                remove_matching, "RemoveByRegex", Numbered,
                |r| items: 0, keys: Keys::None;
            ListObjects(ListObjectsRequest -> ListObjectsResponse) list_objects, "ListObjects", Harmless,
                |r| items: 0, keys: Keys::None;
            ListSegments(ListSegmentsRequest -> ListSegmentsResponse)
                list_segments, "ListSegments", Harmless,
                |r| items: 0, keys: Keys::None;
            Status(StatusRequest -> StatusResponse) status, "Status", Probe,
                |r| items: 0, keys: Keys::None;
            Describe(DescribeRequest -> DescribeResponse) describe, "Describe", Harmless,
                |r| items: r.keys.len(), keys: Keys::List(&r.keys);
            SetExpiry(SetExpiryRequest -> SetExpiryResponse) set_expiry, "SetExpiry", Numbered,
                |r| items: r.keys.len(), keys: Keys::List(&r.keys);
            CreateTasks(CreateTasksRequest -> CreateTasksResponse) create_tasks, "CreateTasks", Numbered,
                |r| items: r.tasks.len(), keys: Keys::None;
            QueryTasks(QueryTasksRequest -> QueryTasksResponse) query_tasks, "QueryTask", Harmless,
                |r| items: r.tasks.len(), keys: Keys::None;
            FetchTasks(FetchTasksRequest -> FetchTasksResponse) fetch_tasks, "FetchTasks", Harmless,
                |r| items: 0, keys: Keys::None;
            EndTasks(EndTasksRequest -> EndTasksResponse) end_tasks, "MarkTaskToComplete", Numbered,
                |r| items: r.ends.len(), keys: Keys::None;
            MountDisk(MountDiskRequest -> MountDiskResponse) mount_disk, "MountLocalDiskSegment", Numbered,
                |r| items: 0, keys: Keys::None;
            UnmountDisk(UnmountDiskRequest -> UnmountDiskResponse) unmount_disk, "UnmountLocalDiskSegment",
                Numbered, |r| items: 0, keys: Keys::None;
            FetchOffloads(FetchOffloadsRequest -> FetchOffloadsResponse) fetch_offloads,
                "OffloadObjectHeartbeat", Harmless, |r| items: 0, keys: Keys::None;
            ReportRecords(ReportRecordsRequest -> ReportRecordsResponse) report_records,
                "NotifyOffloadSuccess", Numbered, |r| items: items::count_records(r), keys: Keys::None;
            ClearReplicas(ClearReplicasRequest -> ClearReplicasResponse)
                clear_replicas, "BatchReplicaClear", Numbered,
                |r| items: r.keys.len(), keys: Keys::List(&r.keys);
            CreateDrainJobs(CreateDrainJobsRequest -> CreateDrainJobsResponse)
                create_drain_jobs, "CreateDrainJobs", Numbered,
                |r| items: r.jobs.len(), keys: Keys::None;
            QueryDrainJobs(QueryDrainJobsRequest -> QueryDrainJobsResponse)
                query_drain_jobs, "QueryDrainJobs", Harmless,
                |r| items: r.jobs.len(), keys: Keys::None;
            CancelDrainJobs(CancelDrainJobsRequest -> CancelDrainJobsResponse)
                cancel_drain_jobs, "CancelDrainJobs", Numbered,
                |r| items: r.jobs.len(), keys: Keys::None;
            QueryQuotas(QueryQuotasRequest -> QueryQuotasResponse) query_quotas, "QueryQuotas", Harmless,
                |r| items: r.tenants.len(), keys: Keys::None;
            SetQuotas(SetQuotasRequest -> SetQuotasResponse) set_quotas, "SetQuotas", Numbered,
                |r| items: r.quotas.len(), keys: Keys::None;
        }
    };
}

for_each_call!(calls);

impl request::Call {
    /// Returns the first key, truncated to the bytes present; empty if there is none, or if the call
    /// names its items otherwise.
    pub fn first_key(&self) -> Bytes {
        self.packed_keys().first()
    }

    /// Returns the keys of the items; `None` if the call names its items otherwise.
    ///
    /// # Errors
    /// If the column of the keys is missing or inconsistent.
    pub fn keys(&self) -> Result<Option<Vec<&[u8]>>> {
        self.packed_keys().unpack()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::request::Call;

    const DEFINITION: &str = include_str!("../proto/mooncake/v1/master.proto");

    #[test]
    fn methods_are_named_as_in_the_definition() {
        for method in Method::ALL {
            let field = format!("{method:?}Request {} = ", method.name());
            assert!(DEFINITION.contains(&field), "{field}");
        }
    }

    #[test]
    fn caller_can_be_replaced() {
        let mut call = v1::ProbeRequest::default().into_call();
        let caller = Caller { client: vec![7; 16].into(), tenant: "t".to_owned() };
        assert_eq!(call.caller(), None);
        *call.caller_mut() = Some(caller.clone());
        assert_eq!(call.caller(), Some(&caller));
        let request = v1::ProbeRequest { caller: Some(caller), ..Default::default() };
        assert_eq!(call, Call::Probe(request));
    }

    #[test]
    fn answer_belongs_to_its_call() {
        let removed = v1::RemoveResponse::default();
        let reply = || response::Call::Remove(removed.clone());
        assert_eq!(v1::RemoveRequest::answer(reply()), Some(removed.clone()));
        assert_eq!(v1::ProbeRequest::answer(reply()), None);
    }

    #[test]
    fn call_tells_its_items_and_keys() {
        let keys = ["a", "bc"];
        let listed: Vec<Bytes> = keys.map(|key| Bytes::from_static(key.as_bytes())).to_vec();
        let column = Some(v1::KeyColumn::pack(keys));
        let puts = Some(v1::PutColumns::pack(keys.map(|key| (key, 1))));
        for call in [
            v1::LocateRequest { keys: column, ..Default::default() }.into_call(),
            v1::PutStartRequest { columns: puts, ..Default::default() }.into_call(),
            v1::RemoveRequest { keys: listed.clone(), ..Default::default() }.into_call(),
            v1::ClearReplicasRequest { keys: listed, ..Default::default() }.into_call(),
        ] {
            assert_eq!((call.items(), &call.first_key()[..]), (2, &b"a"[..]), "{call:?}");
            assert_eq!(call.keys().unwrap().unwrap(), [&b"a"[..], b"bc"], "{call:?}");
        }
        let columns = Some(v1::PutRefColumns { versions: vec![3, 4], ..Default::default() });
        for call in [
            v1::PutEndRequest { caller: None, columns: columns.clone() }.into_call(),
            v1::PutRevokeRequest { caller: None, columns }.into_call(),
            v1::CreateTasksRequest { tasks: vec![v1::NewTask::default(); 2], ..Default::default() }
                .into_call(),
            v1::EndTasksRequest { ends: vec![v1::TaskEnd::default(); 2], ..Default::default() }
                .into_call(),
            v1::QueryTasksRequest { tasks: vec![Bytes::new(); 2], ..Default::default() }
                .into_call(),
        ] {
            assert_eq!((call.items(), call.first_key().len()), (2, 0), "{call:?}");
            assert_eq!(call.keys().unwrap(), None, "{call:?}");
        }
    }

    #[test]
    fn call_without_columns_has_no_keys() {
        for call in
            [v1::LocateRequest::default().into_call(), v1::PutStartRequest::default().into_call()]
        {
            assert_eq!((call.items(), call.first_key().len()), (0, 0), "{call:?}");
            let refused = call.keys().unwrap_err();
            assert!(refused.to_string().contains("columns"), "{refused}");
        }
    }
}
