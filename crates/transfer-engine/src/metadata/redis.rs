//! Redis, in its own protocol, on a connection for each exchange.

mod resp;

use std::net::TcpStream;

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};

use self::resp::{Reply, RespStream};
use super::{
    MetadataSettings, RedisLogin,
    keyed::{Claim, KeyValueServer},
};
use crate::handshake::{DeadlineStream, dial};

#[cfg(test)]
pub(super) use self::resp::fuzz_target;

/// The port of a server that is named without one.
const PORT: u16 = 6379;

/// How often a transaction is tried whose entry changes under it.
const TRIES: usize = 4;

/// A server.
#[derive(Debug)]
pub(super) struct RedisServer {
    address: String,
    endpoint: Endpoint,
    login: RedisLogin,
    settings: MetadataSettings,
}

/// One connection, logged in, with its database chosen.
struct Session<'a> {
    server: &'a RedisServer,
    stream: RespStream<DeadlineStream<TcpStream>>,
}

impl RedisServer {
    /// The server at `[user[:password]@]host[:port][/database]`; what the address does not say is
    /// taken from the settings.
    ///
    /// # Errors
    /// The text is no address.
    pub(super) fn new(address: &str, settings: &MetadataSettings) -> Result<Self> {
        let (user, place) = match address.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, address),
        };
        // What stands before the @ is a secret, and not repeated.
        let bad = |text| Error::invalid(text).with("address", place);
        let mut login = settings.redis.clone();
        if let Some(user) = user {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            name.clone_into(&mut login.username);
            password.clone_into(&mut login.password);
        }
        let (host, database) = place.split_once('/').unwrap_or((place, ""));
        if !database.is_empty() {
            let number = database.trim_end_matches('/').parse();
            login.database = number.map_err(|_| bad("a Redis database is a number"))?;
        }
        let endpoint: Endpoint =
            host.parse().map_err(|_| bad("not the address of a Redis server"))?;
        let endpoint = endpoint.or_port(PORT);
        let address = format!("redis://{endpoint}/{}", login.database);
        Ok(Self { address, endpoint, login, settings: settings.clone() })
    }

    fn open(&self, deadline: Moment) -> Result<Session<'_>> {
        let until = deadline.min(SystemClock.now() + self.settings.connect_timeout);
        let stream = dial(&self.endpoint, until).map_err(|error| {
            let code = match error.code() {
                ErrorCode::RPC_TIMEOUT => ErrorCode::RPC_TIMEOUT,
                _ => ErrorCode::RPC_FAIL,
            };
            Error::new(code, "the metadata server cannot be reached")
                .with("url", &self.address)
                .caused_by(error)
        })?;
        // Without it a request may wait for an acknowledgement; a refusal costs speed only.
        let _ = stream.set_nodelay(true);
        let mut session = Session {
            server: self,
            stream: RespStream::new(DeadlineStream::new(stream, deadline)),
        };
        let login = &self.login;
        if !login.username.is_empty() {
            session.ask(&[b"AUTH", login.username.as_bytes(), login.password.as_bytes()])?;
        } else if !login.password.is_empty() {
            session.ask(&[b"AUTH", login.password.as_bytes()])?;
        }
        if login.database != 0 {
            session.ask(&[b"SELECT", login.database.to_string().as_bytes()])?;
        }
        Ok(session)
    }

    fn failed(&self, text: &str, what: &str) -> Error {
        let url = &self.address;
        Error::new(ErrorCode::RPC_FAIL, text).with("url", url).with("answer", what)
    }
}

impl Session<'_> {
    /// Asks, and reads an answer that is none of a refusal.
    fn ask(&mut self, words: &[&[u8]]) -> Result<Reply> {
        let server = self.server;
        let reply = self.stream.ask(words).map_err(|error| error.with("url", &server.address))?;
        match reply {
            Reply::Refusal(text) => Err(server.failed("the Redis server refused", &text)),
            reply => Ok(reply),
        }
    }

    fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.ask(&[b"GET", key.as_bytes()])? {
            Reply::Bytes(value) => Ok(Some(value)),
            Reply::Nothing => Ok(None),
            other => Err(self.odd(&other)),
        }
    }

    /// Does something on the condition that an entry says what it should; whether it does.
    fn run_if_unchanged(&mut self, claim: Claim<'_>, steps: &[&[&[u8]]]) -> Result<bool> {
        for _ in 0..TRIES {
            self.ask(&[b"WATCH", claim.key.as_bytes()])?;
            if self.get(claim.key)?.as_deref() != Some(claim.value) {
                self.ask(&[b"UNWATCH"])?;
                return Ok(false);
            }
            self.ask(&[b"MULTI"])?;
            for step in steps {
                self.ask(step)?;
            }
            match self.ask(&[b"EXEC"])? {
                // Somebody changed the entry between the look and the steps.
                Reply::Nothing => {}
                Reply::List(replies) => {
                    let refusal = replies.into_iter().find_map(|reply| match reply {
                        Reply::Refusal(text) => Some(text),
                        _ => None,
                    });
                    return match refusal {
                        None => Ok(true),
                        Some(text) => Err(self.server.failed("the Redis server refused", &text)),
                    };
                }
                other => return Err(self.odd(&other)),
            }
        }
        Err(self.server.failed("the entry changes without pause", claim.key))
    }

    fn odd(&self, reply: &Reply) -> Error {
        self.server.failed("the Redis server answered something else", &format!("{reply:?}"))
    }
}

impl KeyValueServer for RedisServer {
    fn address(&self) -> &str {
        &self.address
    }

    fn supports_compare_and_swap(&self) -> bool {
        true
    }

    fn get(&self, key: &str, deadline: Moment) -> Result<Option<Vec<u8>>> {
        self.open(deadline)?.get(key)
    }

    fn claim(
        &self,
        claim: Claim<'_>,
        expected: Option<&[u8]>,
        deadline: Moment,
    ) -> Result<Option<Vec<u8>>> {
        let mut session = self.open(deadline)?;
        let (key, value) = (claim.key.as_bytes(), claim.value);
        let is_ours = match expected {
            Some(old) => {
                let old = Claim { key: claim.key, value: old };
                session.run_if_unchanged(old, &[&[b"SET", key, value]])?
            }
            None => session.ask(&[b"SET", key, value, b"NX"])? != Reply::Nothing,
        };
        if is_ours {
            return Ok(None);
        }
        // Not ours, and gone a moment later: an empty entry tells of nobody.
        Ok(Some(session.get(claim.key)?.unwrap_or_default()))
    }

    fn put(&self, claim: Claim<'_>, key: &str, value: &[u8], deadline: Moment) -> Result<bool> {
        let set: &[&[u8]] = &[b"SET", key.as_bytes(), value];
        self.open(deadline)?.run_if_unchanged(claim, &[set])
    }

    fn release(&self, claim: Claim<'_>, key: &str, deadline: Moment) -> Result<()> {
        let delete: &[&[u8]] = &[b"DEL", key.as_bytes(), claim.key.as_bytes()];
        self.open(deadline)?.run_if_unchanged(claim, &[delete]).map(drop)
    }
}
