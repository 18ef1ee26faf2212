//! Who is served: each guest with its process and its connections.

use mooncake_base::{ClientId, Error, ErrorCode, Result};
use rustc_hash::FxHashMap;

use crate::{granted::Granted, process::Process};

/// The most guests at a time.
pub(crate) const MEMBERS_MAX: usize = 4096;

/// The guests by the ids that they gave themselves.
#[derive(Debug, Default)]
pub(crate) struct Members {
    by_id: FxHashMap<ClientId, Member>,
}

#[derive(Debug)]
struct Member {
    /// Not known of one that comes over TCP.
    process: Option<Process>,
    connections: usize,
    granted: Granted,
}

impl Members {
    /// A connection speaks for that guest from now on.
    ///
    /// # Errors
    /// Another process has that id, or there are too many guests.
    pub(crate) fn join(&mut self, client: ClientId, process: Option<&Process>) -> Result<()> {
        if let Some(member) = self.by_id.get_mut(&client) {
            let is_other = matches!((&member.process, process), (Some(a), Some(b)) if !a.is(b));
            if is_other {
                let text = "another process calls itself by this id";
                return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text).with("client", client));
            }
            if member.process.is_none() {
                member.process = process.cloned();
            }
            member.connections += 1;
            return Ok(());
        }
        if self.by_id.len() >= MEMBERS_MAX {
            let error = Error::new(ErrorCode::RPC_FAIL, "the daemon serves too many processes");
            return Err(error.with("limit", MEMBERS_MAX));
        }
        let granted = Granted::default();
        let member = Member { process: process.cloned(), connections: 1, granted };
        self.by_id.insert(client, member);
        Ok(())
    }

    /// A connection of the guest closed. Whether it is gone with it: the end of a process whose
    /// death is not seen otherwise.
    pub(crate) fn leave(&mut self, client: ClientId) -> bool {
        let Some(member) = self.by_id.get_mut(&client) else { return false };
        member.connections = member.connections.saturating_sub(1);
        let is_gone = member.connections == 0 && member.process.is_none();
        is_gone && self.forget(client).is_some()
    }

    /// Forgets a guest; what it was granted, if it was known.
    pub(crate) fn forget(&mut self, client: ClientId) -> Option<Granted> {
        self.by_id.remove(&client).map(|member| member.granted)
    }

    /// What the guest is granted.
    pub(crate) fn granted(&mut self, client: ClientId) -> Option<&mut Granted> {
        self.by_id.get_mut(&client).map(|member| &mut member.granted)
    }

    /// The guests whose processes can be watched.
    pub(crate) fn processes(&self) -> Vec<(ClientId, Process)> {
        let known = |(id, member): (&ClientId, &Member)| Some((*id, member.process.clone()?));
        self.by_id.iter().filter_map(known).collect()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.by_id.len()
    }
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, Socket, Type};

    use super::*;

    fn own() -> Process {
        let (here, _there) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        Process::behind(&here).unwrap()
    }

    #[test]
    fn a_guest_of_unknown_process_goes_with_its_last_connection() {
        let mut members = Members::default();
        let client = ClientId::random();
        members.join(client, None).unwrap();
        members.join(client, None).unwrap();
        assert!(!members.leave(client), "one connection is left");
        assert!(members.leave(client));
        assert_eq!(members.count(), 0);
        assert!(!members.leave(client), "it goes once");
    }

    #[test]
    fn a_guest_whose_process_is_watched_stays_between_connections() {
        let mut members = Members::default();
        let client = ClientId::random();
        members.join(client, Some(&own())).unwrap();
        assert!(!members.leave(client));
        assert_eq!(members.processes().len(), 1);
        members.join(client, Some(&own())).unwrap();
        assert!(members.forget(client).is_some() && members.forget(client).is_none());
    }

    #[test]
    fn one_that_left_is_not_gone_a_second_time() {
        let mut members = Members::default();
        let client = ClientId::random();
        members.join(client, None).unwrap();
        members.forget(client);
        assert!(!members.leave(client));
    }

    #[test]
    fn there_is_a_limit() {
        let mut members = Members::default();
        for _ in 0..MEMBERS_MAX {
            members.join(ClientId::random(), None).unwrap();
        }
        let refused = members.join(ClientId::random(), None).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::RPC_FAIL);
    }
}
