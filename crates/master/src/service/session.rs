//! Sessions: the connection on which each client registered, and the time of its last heartbeat.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{ClientId, Moment};
use rustc_hash::FxHashMap;

/// The origin of a call.
#[derive(Debug, Clone)]
pub struct Origin {
    is_local: bool,
    session: Option<Arc<Session>>,
}

impl Origin {
    /// Returns the origin of a caller in the master's own process, which has no connection.
    pub fn in_process() -> Self {
        Self { is_local: true, session: None }
    }

    /// Returns whether the caller runs on the master's host.
    pub fn is_local(&self) -> bool {
        self.is_local
    }
}

#[derive(Debug)]
struct Session {
    number: u64,
    /// The clients that registered on this connection; usually one.
    clients: Mutex<Vec<ClientId>>,
}

/// A client that has registered and not unregistered.
#[derive(Debug)]
struct RegisteredClient {
    name: String,
    /// The connection of the latest registration; `None` for a client in this process.
    session: Option<u64>,
    last_heartbeat: Moment,
}

/// A registered client, as the admin pages show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectedClient {
    /// The client id.
    pub id: ClientId,
    /// The client name, "host:port".
    pub name: String,
    /// The time since the last heartbeat.
    pub since_heartbeat: Duration,
}

/// All connections and their clients.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    last_number: AtomicU64,
    clients: Mutex<FxHashMap<ClientId, RegisteredClient>>,
}

impl Sessions {
    pub(super) fn open(&self, is_local: bool) -> Origin {
        let number = self.last_number.fetch_add(1, Ordering::Relaxed) + 1;
        let session = Session { number, clients: Mutex::default() };
        Origin { is_local, session: Some(Arc::new(session)) }
    }

    /// Closes a connection. Returns the clients whose latest registration came over it.
    pub(super) fn close(&self, origin: &Origin) -> Vec<ClientId> {
        let Some(session) = &origin.session else { return Vec::new() };
        let mut clients = std::mem::take(&mut *session.clients.lock());
        let registered = self.clients.lock();
        clients.retain(|client| {
            registered.get(client).is_some_and(|client| client.session == Some(session.number))
        });
        clients
    }

    pub(super) fn register(&self, client: ClientId, name: &str, origin: &Origin, now: Moment) {
        let session = origin.session.as_ref().map(|session| {
            let mut clients = session.clients.lock();
            if !clients.contains(&client) {
                clients.push(client);
            }
            session.number
        });
        let registered = RegisteredClient { name: name.to_owned(), session, last_heartbeat: now };
        self.clients.lock().insert(client, registered);
    }

    pub(super) fn record_heartbeat(&self, client: ClientId, now: Moment) {
        if let Some(registered) = self.clients.lock().get_mut(&client) {
            registered.last_heartbeat = now;
        }
    }

    pub(super) fn list(&self, now: Moment) -> Vec<ConnectedClient> {
        let registered = self.clients.lock();
        let mut clients: Vec<_> = registered
            .iter()
            .map(|(id, client)| ConnectedClient {
                id: *id,
                name: client.name.clone(),
                since_heartbeat: now.since(client.last_heartbeat),
            })
            .collect();
        clients.sort_by(|a, b| a.name.cmp(&b.name).then(a.id.to_bytes().cmp(&b.id.to_bytes())));
        clients
    }

    pub(super) fn forget(&self, client: ClientId) {
        self.clients.lock().remove(&client);
    }

    /// Removes clients that have expired in the state. Returns their names.
    pub(super) fn remove_expired(&self, expired: &[ClientId]) -> Vec<String> {
        if expired.is_empty() {
            return Vec::new();
        }
        let mut clients = self.clients.lock();
        expired.iter().filter_map(|id| clients.remove(id)).map(|client| client.name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_latest_connection_makes_client_suspect() {
        let sessions = Sessions::default();
        let client = ClientId::random();
        let (first, second) = (sessions.open(true), sessions.open(true));
        sessions.register(client, "a:1", &first, Moment::default());
        sessions.register(client, "a:1", &second, Moment::default());
        assert_eq!(sessions.close(&first), []);
        assert_eq!(sessions.close(&second), [client]);
        assert_eq!(sessions.close(&second), [], "a connection closes once");
    }

    #[test]
    fn unregistered_client_is_not_suspect() {
        let sessions = Sessions::default();
        let client = ClientId::random();
        let origin = sessions.open(false);
        sessions.register(client, "a:1", &origin, Moment::default());
        sessions.forget(client);
        assert_eq!(sessions.close(&origin), []);
    }

    #[test]
    fn expired_client_is_returned_once() {
        let sessions = Sessions::default();
        let client = ClientId::random();
        sessions.register(client, "a:1", &Origin::in_process(), Moment::default());
        assert!(sessions.remove_expired(&[ClientId::random()]).is_empty());
        assert_eq!(sessions.remove_expired(&[client]), ["a:1"]);
        assert!(sessions.remove_expired(&[client]).is_empty());
    }
}
