//! Access to the caller of any call.

use crate::v1::{Caller, request::Call};

/// Evaluates to a reference to the caller field of any call.
macro_rules! caller_field {
    ($call:expr, $($reference:tt)+) => {
        match $call {
            Call::Register(r) => $($reference)+ r.caller,
            Call::Heartbeat(r) => $($reference)+ r.caller,
            Call::Unregister(r) => $($reference)+ r.caller,
            Call::Mount(r) => $($reference)+ r.caller,
            Call::Unmount(r) => $($reference)+ r.caller,
            Call::PutStart(r) => $($reference)+ r.caller,
            Call::PutEnd(r) => $($reference)+ r.caller,
            Call::PutRevoke(r) => $($reference)+ r.caller,
            Call::PutRenew(r) => $($reference)+ r.caller,
            Call::Locate(r) => $($reference)+ r.caller,
            Call::Verify(r) => $($reference)+ r.caller,
            Call::Probe(r) => $($reference)+ r.caller,
            Call::Remove(r) => $($reference)+ r.caller,
            Call::RemoveMatching(r) => $($reference)+ r.caller,
            Call::ListObjects(r) => $($reference)+ r.caller,
            Call::ListSegments(r) => $($reference)+ r.caller,
            Call::Status(r) => $($reference)+ r.caller,
            Call::CreateTasks(r) => $($reference)+ r.caller,
            Call::QueryTasks(r) => $($reference)+ r.caller,
            Call::FetchTasks(r) => $($reference)+ r.caller,
            Call::EndTasks(r) => $($reference)+ r.caller,
            Call::ClearReplicas(r) => $($reference)+ r.caller,
            Call::CreateDrainJobs(r) => $($reference)+ r.caller,
            Call::QueryDrainJobs(r) => $($reference)+ r.caller,
            Call::CancelDrainJobs(r) => $($reference)+ r.caller,
            Call::QueryQuotas(r) => $($reference)+ r.caller,
            Call::SetQuotas(r) => $($reference)+ r.caller,
            Call::Describe(r) => $($reference)+ r.caller,
            Call::SetExpiry(r) => $($reference)+ r.caller,
        }
    };
}

impl Call {
    /// Returns the caller field of the message.
    pub fn caller(&self) -> Option<&Caller> {
        caller_field!(self, &).as_ref()
    }

    /// Returns the caller field of the message, to be changed.
    pub fn caller_mut(&mut self) -> &mut Option<Caller> {
        caller_field!(self, &mut)
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
        assert_eq!(call.caller(), None);
        *call.caller_mut() = Some(caller.clone());
        assert_eq!(call.caller(), Some(&caller));
        assert_eq!(
            call,
            Call::Probe(v1::ProbeRequest { caller: Some(caller), ..Default::default() })
        );
    }
}
