//! Sessions: the open connections of each client, and the time of its last heartbeat.
//!
//! A client has the connections over which it has called. While one of them is open, the process
//! lives. When the last one breaks, the client is suspect until it calls again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{ClientId, Moment};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::ExpiredClient;

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

    /// Returns whether the caller has a connection.
    pub(super) fn has_session(&self) -> bool {
        self.session.is_some()
    }

    /// Returns whether the caller runs on the master's host.
    pub fn is_local(&self) -> bool {
        self.is_local
    }
}

#[derive(Debug)]
struct Session {
    number: u64,
    /// The client that called last. A connection usually has one client, so that its calls need no
    /// lock that other connections share.
    last_caller: Mutex<Option<LastCaller>>,
    /// The clients that called over this connection; `None` once it is closed.
    clients: Mutex<Option<FxHashSet<ClientId>>>,
}

/// The client that called last over a connection.
#[derive(Debug, Clone, Copy)]
struct LastCaller {
    client: ClientId,
    /// The generation of [`Sessions`] at its first call.
    generation: u64,
    /// When the state heard of it over this connection.
    reported: Moment,
}

/// A client that called, and of which the state has to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SignOfLife {
    pub(super) client: ClientId,
    /// Whether it had no other connection.
    pub(super) is_reconnected: bool,
}

/// A client that has registered and not unregistered.
#[derive(Debug)]
struct RegisteredClient {
    name: String,
    /// The open connections; none for a client in this process.
    sessions: FxHashSet<u64>,
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
    /// Changes when a client joins or leaves, so that its connections are recorded anew.
    generation: AtomicU64,
    /// Locked after the clients of a session.
    clients: Mutex<FxHashMap<ClientId, RegisteredClient>>,
}

impl Sessions {
    pub(super) fn open(&self, is_local: bool) -> Origin {
        let number = self.last_number.fetch_add(1, Ordering::Relaxed) + 1;
        let clients = Mutex::new(Some(FxHashSet::default()));
        let session = Session { number, last_caller: Mutex::default(), clients };
        Origin { is_local, session: Some(Arc::new(session)) }
    }

    /// Closes a connection. Returns the clients that have no other.
    pub(super) fn close(&self, origin: &Origin) -> Vec<ClientId> {
        let Some(session) = &origin.session else { return Vec::new() };
        let clients = session.clients.lock().take().unwrap_or_default();
        let mut registered = self.clients.lock();
        let is_last = |client: &ClientId| {
            registered.get_mut(client).is_some_and(|known| {
                known.sessions.remove(&session.number) && known.sessions.is_empty()
            })
        };
        clients.into_iter().filter(is_last).collect()
    }

    pub(super) fn register(&self, client: ClientId, name: &str, origin: &Origin, now: Moment) {
        {
            let mut clients = self.clients.lock();
            let known = clients.entry(client).or_insert_with(|| {
                self.generation.fetch_add(1, Ordering::Relaxed);
                let (name, sessions) = (String::new(), FxHashSet::default());
                RegisteredClient { name, sessions, last_heartbeat: now }
            });
            name.clone_into(&mut known.name);
            known.last_heartbeat = now;
        }
        if let Some(session) = &origin.session {
            self.add_connection(client, session);
        }
    }

    /// Records the connection over which a client calls. Returns the client if it had no other
    /// connection, or if the last call that was returned is `interval` ago: any call shows that the
    /// client lives.
    pub(super) fn record_call(
        &self,
        client: &[u8],
        origin: &Origin,
        now: Moment,
        interval: Duration,
    ) -> Option<SignOfLife> {
        let session = origin.session.as_ref()?;
        let client = ClientId::from_bytes(client)?;
        let generation = self.generation.load(Ordering::Relaxed);
        let is_known = {
            let mut last = session.last_caller.lock();
            let known = last.filter(|last| (last.client, last.generation) == (client, generation));
            if known.is_some_and(|known| now.since(known.reported) < interval) {
                return None;
            }
            *last = Some(LastCaller { client, generation, reported: now });
            known.is_some()
        };
        if is_known {
            // A call that is executed after its connection closed may be that of a dead process.
            let is_open = session.clients.lock().is_some();
            return is_open.then_some(SignOfLife { client, is_reconnected: false });
        }
        let is_reconnected = self.add_connection(client, session)?;
        Some(SignOfLife { client, is_reconnected })
    }

    /// Adds a connection to those of a registered client. Returns whether it is the only one; `None`
    /// if the connection is closed or the client is not registered.
    fn add_connection(&self, client: ClientId, session: &Session) -> Option<bool> {
        let mut clients = session.clients.lock();
        let clients = clients.as_mut()?;
        let mut registered = self.clients.lock();
        let known = registered.get_mut(&client)?;
        clients.insert(client);
        Some(known.sessions.insert(session.number) && known.sessions.len() == 1)
    }

    /// Returns whether the client has an open connection.
    pub(super) fn is_connected(&self, client: ClientId) -> bool {
        let registered = self.clients.lock();
        registered.get(&client).is_some_and(|known| !known.sessions.is_empty())
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

    /// Returns the name of a registered client; empty if unknown.
    pub(super) fn name(&self, client: ClientId) -> String {
        self.clients.lock().get(&client).map(|known| known.name.clone()).unwrap_or_default()
    }

    /// Forgets a client that leaves. Returns its name, if it was known.
    pub(super) fn forget(&self, client: ClientId) -> Option<String> {
        let known = self.clients.lock().remove(&client);
        self.generation.fetch_add(1, Ordering::Relaxed);
        known.map(|known| known.name)
    }

    /// Removes clients that have expired in the state. Returns them with their names.
    pub(super) fn remove_expired(
        &self,
        expired: Vec<ExpiredClient>,
    ) -> Vec<(String, ExpiredClient)> {
        if expired.is_empty() {
            return Vec::new();
        }
        self.generation.fetch_add(1, Ordering::Relaxed);
        let mut clients = self.clients.lock();
        let named =
            expired.into_iter().filter_map(|gone| Some((clients.remove(&gone.id)?.name, gone)));
        named.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(1);

    /// Returns the client if it had no other connection.
    fn call(sessions: &Sessions, client: ClientId, origin: &Origin) -> Option<ClientId> {
        let sign = sessions.record_call(&client.to_bytes(), origin, Moment::default(), INTERVAL);
        sign.filter(|sign| sign.is_reconnected).map(|sign| sign.client)
    }

    #[test]
    fn any_call_is_a_sign_of_life_once_per_interval() {
        let sessions = Sessions::default();
        let client = ClientId::random();
        let origin = sessions.open(false);
        let call_at = |seconds| {
            let now = Moment::default() + INTERVAL * seconds;
            sessions.record_call(&client.to_bytes(), &origin, now, INTERVAL)
        };
        assert_eq!(call_at(0), None, "not registered yet");
        sessions.register(client, "a:1", &origin, Moment::default());
        let sign = Some(SignOfLife { client, is_reconnected: false });
        assert_eq!([1, 1, 2, 2].map(call_at), [sign, None, sign, None]);
        sessions.close(&origin);
        assert_eq!(call_at(3), None, "its process may be dead");
    }

    #[test]
    fn only_last_connection_makes_client_suspect() {
        let sessions = Sessions::default();
        let (client, other) = (ClientId::random(), ClientId::random());
        let [first, second, third] = [(); 3].map(|()| sessions.open(true));
        assert_eq!(call(&sessions, client, &second), None, "not registered yet");
        sessions.register(client, "a:1", &first, Moment::default());
        sessions.register(other, "b:1", &second, Moment::default());
        assert_eq!(call(&sessions, client, &second), None, "it has another connection");
        assert_eq!(sessions.close(&first), [], "the second is open");
        assert_eq!(call(&sessions, client, &first), None, "a late call over a closed connection");
        sessions.register(client, "a:1", &third, Moment::default());
        assert_eq!(sessions.close(&third), []);
        let mut closed = sessions.close(&second);
        closed.sort_by_key(|client| client.to_bytes());
        let mut both = [client, other];
        both.sort_by_key(|client| client.to_bytes());
        assert_eq!(closed, both, "both clients called over it");
        assert_eq!(sessions.close(&second), [], "a connection closes once");
        assert!(!sessions.is_connected(client));
        let fourth = sessions.open(false);
        assert_eq!(call(&sessions, client, &fourth), Some(client), "it is back");
        assert_eq!(call(&sessions, client, &fourth), None);
        assert!(sessions.is_connected(client));
        assert_eq!(sessions.close(&fourth), [client]);
    }

    #[test]
    fn connection_is_recorded_again_after_client_left_and_came_back() {
        let sessions = Sessions::default();
        let client = ClientId::random();
        let [first, second] = [(); 2].map(|()| sessions.open(true));
        sessions.register(client, "a:1", &first, Moment::default());
        assert_eq!(call(&sessions, client, &second), None);
        sessions.forget(client);
        sessions.register(client, "a:1", &first, Moment::default());
        assert_eq!(call(&sessions, client, &second), None);
        assert_eq!(sessions.close(&first), []);
        assert_eq!(sessions.close(&second), [client]);
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
        let gone = |id| vec![ExpiredClient { id, segments: 1, copies: 2, bytes: 3 }];
        assert!(sessions.remove_expired(gone(ClientId::random())).is_empty());
        let [named] = &gone(client)[..] else { unreachable!() };
        assert_eq!(sessions.remove_expired(gone(client)), [("a:1".to_owned(), *named)]);
        assert!(sessions.remove_expired(gone(client)).is_empty());
    }
}
