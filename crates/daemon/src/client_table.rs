//! Table of dummy clients, each with its process and its connections.

use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Moment, Result};
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
    /// The end of the last connection, while there is none.
    unconnected_since: Moment,
    standing: Standing,
    fences: FenceTracker,
}

/// What the master knows of a client, as far as its calls through this daemon tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It has only tried to register.
    Unregistered,
    /// It has registered, here or through the daemon before.
    Registered,
    /// It has left.
    Left,
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
            let text = "the daemon serves too many dummy clients; close stores that nobody uses, \
                        end their processes, or start another daemon for some of them";
            let error = Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text);
            return Err(error.with("limit", CLIENTS_MAX));
        }
        let entry = ClientEntry {
            process: process.cloned(),
            connections: 1,
            unconnected_since: Moment::default(),
            standing: Standing::Unregistered,
            fences: FenceTracker::default(),
        };
        self.by_id.insert(client, entry);
        Ok(())
    }

    /// Removes a connection of the client. Returns whether the client is gone without having left:
    /// for a client of unknown process, the last connection is the only sign of life.
    ///
    /// A registered client of known process stays: [`take_unconnected`](Self::take_unconnected).
    pub(crate) fn remove_connection(&mut self, now: Moment, client: ClientId) -> bool {
        let Some(entry) = self.by_id.get_mut(&client) else { return false };
        entry.connections = entry.connections.saturating_sub(1);
        if entry.connections > 0 {
            return false;
        }
        let is_registered = entry.standing == Standing::Registered;
        if is_registered && entry.process.is_some() {
            entry.unconnected_since = now;
            return false;
        }
        self.by_id.remove(&client);
        is_registered
    }

    /// Records that the master has registered the client.
    pub(crate) fn record_registration(&mut self, client: ClientId) {
        if let Some(entry) = self.by_id.get_mut(&client) {
            entry.standing = Standing::Registered;
        }
    }

    /// Records a call that only registered clients make. One that was under way when the client
    /// left changes nothing.
    pub(crate) fn record_use(&mut self, client: ClientId) {
        if let Some(entry) = self.by_id.get_mut(&client)
            && entry.standing == Standing::Unregistered
        {
            entry.standing = Standing::Registered;
        }
    }

    /// Records that the client has left. It goes with its last connection, over which it may
    /// register again.
    pub(crate) fn record_leave(&mut self, client: ClientId) {
        if let Some(entry) = self.by_id.get_mut(&client) {
            entry.standing = Standing::Left;
            entry.fences = FenceTracker::default();
        }
    }

    /// Removes a client whose process has exited. Returns its fences, unless the master knows
    /// nothing of it.
    pub(crate) fn remove(&mut self, client: ClientId) -> Option<FenceTracker> {
        let entry = self.by_id.remove(&client)?;
        (entry.standing == Standing::Registered).then_some(entry.fences)
    }

    /// Removes and returns the clients that have had no connection for this time. The process of
    /// each is alive, so the table would grow as long as it lives.
    pub(crate) fn take_unconnected(&mut self, now: Moment, time: Duration) -> Vec<ClientId> {
        let is_over = |_: &ClientId, entry: &mut ClientEntry| {
            entry.connections == 0 && (entry.unconnected_since + time).has_passed(now)
        };
        self.by_id.extract_if(is_over).map(|(client, _)| client).collect()
    }

    /// Returns since when the client that has been without a connection for longest is so.
    pub(crate) fn unconnected_since(&self) -> Option<Moment> {
        let unconnected = self.by_id.values().filter(|entry| entry.connections == 0);
        unconnected.map(|entry| entry.unconnected_since).min()
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

    /// Number of clients that have not left.
    pub(crate) fn count(&self) -> usize {
        self.by_id.values().filter(|entry| entry.standing != Standing::Left).count()
    }
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, Socket, Type};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const START: Moment = Moment::from_boot(SECOND);

    fn own() -> Process {
        let (here, _there) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        Process::of_peer(&here).unwrap()
    }

    fn registered(client: ClientId, process: Option<&Process>) -> ClientTable {
        let mut table = ClientTable::default();
        table.add_connection(client, process).unwrap();
        table.record_registration(client);
        table
    }

    #[test]
    fn client_of_unknown_process_ends_with_last_connection() {
        let client = ClientId::random();
        let mut table = registered(client, None);
        table.add_connection(client, None).unwrap();
        assert!(!table.remove_connection(START, client), "one connection is left");
        assert!(table.remove_connection(START, client));
        assert_eq!(table.count(), 0);
        assert!(!table.remove_connection(START, client), "it is removed once");
    }

    #[test]
    fn client_of_known_process_stays_without_connection_for_a_while() {
        let client = ClientId::random();
        let mut table = registered(client, Some(&own()));
        assert_eq!(
            (table.unconnected_since(), table.take_unconnected(START, SECOND)),
            (None, vec![])
        );
        assert!(!table.remove_connection(START, client));
        assert_eq!((table.processes().len(), table.unconnected_since()), (1, Some(START)));
        assert!(table.take_unconnected(START + SECOND / 2, SECOND).is_empty());
        table.add_connection(client, Some(&own())).unwrap();
        assert!(table.take_unconnected(START + SECOND, SECOND).is_empty(), "it is back");
        assert!(!table.remove_connection(START + SECOND, client));
        assert!(table.take_unconnected(START + SECOND, SECOND).is_empty());
        assert_eq!(table.take_unconnected(START + SECOND * 2, SECOND), [client]);
        assert_eq!((table.by_id.len(), table.unconnected_since()), (0, None));
    }

    #[test]
    fn client_that_never_registered_ends_with_last_connection() {
        for process in [None, Some(own())] {
            let (mut table, client) = (ClientTable::default(), ClientId::random());
            table.add_connection(client, process.as_ref()).unwrap();
            assert_eq!(table.count(), 1);
            assert!(!table.remove_connection(START, client), "the master knows nothing of it");
            assert!(table.by_id.is_empty());
        }
    }

    #[test]
    fn client_that_left_ends_with_last_connection() {
        for process in [None, Some(own())] {
            let client = ClientId::random();
            let mut table = registered(client, process.as_ref());
            table.record_leave(client);
            table.record_use(client);
            assert_eq!((table.count(), table.by_id.len()), (0, 1));
            assert!(!table.remove_connection(START, client), "it was released when it left");
            assert!(table.by_id.is_empty());
        }
    }

    #[test]
    fn client_may_register_again_over_its_connection() {
        let client = ClientId::random();
        let mut table = registered(client, None);
        table.record_leave(client);
        table.record_registration(client);
        assert_eq!(table.count(), 1);
        assert!(table.remove_connection(START, client));
    }

    #[test]
    fn exit_releases_only_what_the_master_knows() {
        let client = ClientId::random();
        let known = [
            |_: &mut ClientTable, _| {},
            ClientTable::record_use,
            ClientTable::record_registration,
            ClientTable::record_leave,
        ];
        for (record, is_known) in known.into_iter().zip([false, true, true, false]) {
            let mut table = ClientTable::default();
            table.add_connection(client, Some(&own())).unwrap();
            record(&mut table, client);
            assert_eq!(table.remove(client).is_some(), is_known);
            assert!(table.remove(client).is_none() && table.by_id.is_empty());
        }
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
    fn rejects_clients_above_limit_and_names_remedy() {
        let mut table = ClientTable::default();
        for _ in 0..CLIENTS_MAX {
            table.add_connection(ClientId::random(), None).unwrap();
        }
        let refused = table.add_connection(ClientId::random(), None).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
        assert!(refused.to_string().contains("close stores"), "{refused}");
        assert!(!refused.remedy().contains("master"), "{}", refused.remedy());
    }
}
