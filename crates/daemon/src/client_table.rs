//! Table of dummy clients, each with its process and its connections.

use mooncake_base::{ClientId, Error, ErrorCode, Result};
use rustc_hash::FxHashMap;

use crate::{fence_tracker::FenceTracker, process::Process};

/// Maximum number of dummy clients.
pub(crate) const CLIENTS_MAX: usize = 4096;

/// Dummy clients by id; each client chooses its own id.
#[derive(Debug, Default)]
pub(crate) struct ClientTable {
    by_id: FxHashMap<ClientId, ClientEntry>,
}

#[derive(Debug)]
struct ClientEntry {
    /// Unknown for clients that connect over TCP.
    process: Option<Process>,
    connections: usize,
    fences: FenceTracker,
}

impl ClientTable {
    /// Adds a connection of the client.
    ///
    /// # Errors
    /// Another process uses the id, or one of unknown process does over TCP; or there are too many
    /// clients.
    pub(crate) fn add_connection(
        &mut self,
        client: ClientId,
        process: Option<&Process>,
    ) -> Result<()> {
        if let Some(entry) = self.by_id.get_mut(&client) {
            // Any user of the host can connect over TCP, and could speak for the process.
            let is_known = |own: &Process| process.is_some_and(|other| own.is_same(other));
            if !entry.process.as_ref().is_none_or(is_known) {
                let text = "another process uses this client id";
                return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text).with("client", client));
            }
            if entry.process.is_none() {
                entry.process = process.cloned();
            }
            entry.connections += 1;
            return Ok(());
        }
        if self.by_id.len() >= CLIENTS_MAX {
            let error = Error::new(ErrorCode::RPC_FAIL, "the daemon serves too many dummy clients");
            return Err(error.with("limit", CLIENTS_MAX));
        }
        let fences = FenceTracker::default();
        let entry = ClientEntry { process: process.cloned(), connections: 1, fences };
        self.by_id.insert(client, entry);
        Ok(())
    }

    /// Removes a connection of the client. Returns whether the client is gone, too: for a client of
    /// unknown process, the last connection is the only sign of life.
    pub(crate) fn remove_connection(&mut self, client: ClientId) -> bool {
        let Some(entry) = self.by_id.get_mut(&client) else { return false };
        entry.connections = entry.connections.saturating_sub(1);
        let is_gone = entry.connections == 0 && entry.process.is_none();
        is_gone && self.remove(client).is_some()
    }

    /// Removes a client and returns its fences, if it was known.
    pub(crate) fn remove(&mut self, client: ClientId) -> Option<FenceTracker> {
        self.by_id.remove(&client).map(|entry| entry.fences)
    }

    /// Returns the client's fences.
    pub(crate) fn fences(&mut self, client: ClientId) -> Option<&mut FenceTracker> {
        self.by_id.get_mut(&client).map(|entry| &mut entry.fences)
    }

    /// Returns the clients whose processes can be watched.
    pub(crate) fn processes(&self) -> Vec<(ClientId, Process)> {
        let known = |(id, entry): (&ClientId, &ClientEntry)| Some((*id, entry.process.clone()?));
        self.by_id.iter().filter_map(known).collect()
    }

    /// Number of clients.
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
        Process::of_peer(&here).unwrap()
    }

    #[test]
    fn client_of_unknown_process_ends_with_last_connection() {
        let mut table = ClientTable::default();
        let client = ClientId::random();
        table.add_connection(client, None).unwrap();
        table.add_connection(client, None).unwrap();
        assert!(!table.remove_connection(client), "one connection is left");
        assert!(table.remove_connection(client));
        assert_eq!(table.count(), 0);
        assert!(!table.remove_connection(client), "it is removed once");
    }

    #[test]
    fn client_of_known_process_survives_without_connection() {
        let mut table = ClientTable::default();
        let client = ClientId::random();
        table.add_connection(client, Some(&own())).unwrap();
        assert!(!table.remove_connection(client));
        assert_eq!(table.processes().len(), 1);
        table.add_connection(client, Some(&own())).unwrap();
        assert!(table.remove(client).is_some() && table.remove(client).is_none());
    }

    #[test]
    fn tcp_caller_speaks_for_no_known_process() {
        let mut table = ClientTable::default();
        let client = ClientId::random();
        table.add_connection(client, Some(&own())).unwrap();
        let refused = table.add_connection(client, None).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::ILLEGAL_CLIENT);
        table.add_connection(client, Some(&own())).unwrap();
    }

    #[test]
    fn removed_client_is_not_removed_again() {
        let mut table = ClientTable::default();
        let client = ClientId::random();
        table.add_connection(client, None).unwrap();
        table.remove(client);
        assert!(!table.remove_connection(client));
    }

    #[test]
    fn rejects_clients_above_limit() {
        let mut table = ClientTable::default();
        for _ in 0..CLIENTS_MAX {
            table.add_connection(ClientId::random(), None).unwrap();
        }
        let refused = table.add_connection(ClientId::random(), None).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::RPC_FAIL);
    }
}
