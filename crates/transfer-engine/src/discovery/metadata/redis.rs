//! Redis, in its own protocol, with one connection per exchange.

mod resp;

use std::net::TcpStream;

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};

use self::resp::{Reply, RespStream};
use super::{
    MetadataSettings, RedisLogin,
    keyed::{Claim, KeyValueServer},
};
use mooncake_os::{DeadlineStream, dial};

#[cfg(test)]
pub(super) use self::resp::fuzz_target;

/// Default port of a server.
const PORT: u16 = 6379;

/// Maximum number of attempts of a transaction whose watched entry changes.
const TRIES: usize = 4;

/// A Redis server.
#[derive(Debug)]
pub(super) struct RedisServer {
    address: String,
    endpoint: Endpoint,
    login: RedisLogin,
    settings: MetadataSettings,
}

/// A connection that is logged in to its database.
struct Session<'a> {
    server: &'a RedisServer,
    stream: RespStream<DeadlineStream<TcpStream>>,
}

impl RedisServer {
    /// Parses `[user[:password]@]host[:port][/database]`; missing parts are taken from the
    /// settings.
    ///
    /// # Errors
    /// The text is not an address.
    pub(super) fn new(address: &str, settings: &MetadataSettings) -> Result<Self> {
        let (user, place) = match address.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, address),
        };
        // The part before the @ contains a secret and must not appear in errors.
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
                .with_remedy(super::REMEDY)
                .caused_by(error)
        })?;
        // Otherwise a request may wait for an acknowledgement. A failure only costs speed.
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
    /// Sends a command; an error reply becomes an error.
    fn ask(&mut self, words: &[&[u8]]) -> Result<Reply> {
        let server = self.server;
        let reply = self.stream.ask(words).map_err(|error| error.with("url", &server.address))?;
        match reply {
            Reply::Error(text) => Err(server.failed("the Redis server refused", &text)),
            reply => Ok(reply),
        }
    }

    fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.ask(&[b"GET", key.as_bytes()])? {
            Reply::Bytes(value) => Ok(Some(value)),
            Reply::Null => Ok(None),
            other => Err(self.unexpected_reply(&other)),
        }
    }

    /// Runs a transaction on condition that an entry has the claimed value; returns whether it had.
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
                // The entry changed between WATCH and EXEC.
                Reply::Null => {}
                Reply::Array(replies) => {
                    let refusal = replies.into_iter().find_map(|reply| match reply {
                        Reply::Error(text) => Some(text),
                        _ => None,
                    });
                    return match refusal {
                        None => Ok(true),
                        Some(text) => Err(self.server.failed("the Redis server refused", &text)),
                    };
                }
                other => return Err(self.unexpected_reply(&other)),
            }
        }
        Err(self.server.failed("the entry changes without pause", claim.key))
    }

    fn unexpected_reply(&self, reply: &Reply) -> Error {
        self.server.failed("the Redis server answered something else", &format!("{reply:?}"))
    }
}

impl KeyValueServer for RedisServer {
    fn address(&self) -> &str {
        &self.address
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
            None => session.ask(&[b"SET", key, value, b"NX"])? != Reply::Null,
        };
        if is_ours {
            return Ok(None);
        }
        // The claim failed, but the entry was deleted a moment later: an empty entry names no
        // holder.
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
