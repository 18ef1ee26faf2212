//! Access to the caller of any call.

use crate::v1::{Caller, request::Call};

impl Call {
    /// Returns the caller field of the message.
    pub fn caller_mut(&mut self) -> &mut Option<Caller> {
        match self {
            Self::Register(r) => &mut r.caller,
            Self::Heartbeat(r) => &mut r.caller,
            Self::Unregister(r) => &mut r.caller,
            Self::Mount(r) => &mut r.caller,
            Self::Unmount(r) => &mut r.caller,
            Self::PutStart(r) => &mut r.caller,
            Self::PutEnd(r) => &mut r.caller,
            Self::PutRevoke(r) => &mut r.caller,
            Self::Locate(r) => &mut r.caller,
            Self::Verify(r) => &mut r.caller,
            Self::Probe(r) => &mut r.caller,
            Self::Remove(r) => &mut r.caller,
            Self::RemoveMatching(r) => &mut r.caller,
            Self::ListObjects(r) => &mut r.caller,
            Self::ListSegments(r) => &mut r.caller,
            Self::Status(r) => &mut r.caller,
            Self::CreateTasks(r) => &mut r.caller,
            Self::QueryTasks(r) => &mut r.caller,
            Self::FetchTasks(r) => &mut r.caller,
            Self::EndTasks(r) => &mut r.caller,
            Self::ClearReplicas(r) => &mut r.caller,
            Self::CreateDrainJobs(r) => &mut r.caller,
            Self::QueryDrainJobs(r) => &mut r.caller,
            Self::CancelDrainJobs(r) => &mut r.caller,
            Self::QueryQuotas(r) => &mut r.caller,
            Self::SetQuotas(r) => &mut r.caller,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1;

    #[test]
    fn caller_can_be_replaced() {
        let mut call = Call::Probe(v1::ProbeRequest::default());
        let caller = Caller { client: vec![7; 16].into(), tenant: "t".to_owned() };
        *call.caller_mut() = Some(caller.clone());
        assert_eq!(
            call,
            Call::Probe(v1::ProbeRequest { caller: Some(caller), ..Default::default() })
        );
    }
}
