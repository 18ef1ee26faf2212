//! Redis, in its own protocol, with one connection per exchange.

use mooncake_base::{Moment, Result};
use mooncake_kv_client::{
    redis::{RedisAddress, RedisConnection},
    resp::Reply,
};

use super::{
    MetadataSettings, TEXTS,
    keyed::{KeyClaim, KeyValueServer},
};
use crate::discovery::descriptor::DESCRIPTOR_BYTES_MAX;

/// Maximum number of attempts of a transaction whose watched entry changes.
const TRIES: usize = 4;

/// A Redis server.
#[derive(Debug)]
pub(super) struct RedisServer {
    address: RedisAddress,
    /// The address without the login.
    url: String,
    settings: MetadataSettings,
}

/// A connection that is logged in to its database.
struct Session(RedisConnection);

impl RedisServer {
    /// Parses `[user[:password]@]host[:port][/database]`; missing parts are taken from the
    /// settings.
    ///
    /// # Errors
    /// The text is not an address.
    pub(super) fn new(address: &str, settings: &MetadataSettings) -> Result<Self> {
        let address = RedisAddress::parse(address, &settings.redis)?;
        Ok(Self { url: address.to_string(), address, settings: settings.clone() })
    }

    fn open(&self, deadline: Moment) -> Result<Session> {
        let timeout = self.settings.connect_timeout;
        RedisConnection::open(&self.address, timeout, DESCRIPTOR_BYTES_MAX, &TEXTS, deadline)
            .map(Session)
    }
}

impl Session {
    fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.0.ask(&[b"GET", key.as_bytes()])? {
            Reply::Bytes(value) => Ok(Some(value)),
            Reply::Null => Ok(None),
            other => Err(self.0.unexpected_reply(&other)),
        }
    }

    /// Runs a transaction on condition that an entry has the claimed value; returns whether it had.
    fn run_if_unchanged(&mut self, claim: KeyClaim<'_>, steps: &[&[&[u8]]]) -> Result<bool> {
        for _ in 0..TRIES {
            self.0.ask(&[b"WATCH", claim.key.as_bytes()])?;
            if self.get(claim.key)?.as_deref() != Some(claim.value) {
                self.0.ask(&[b"UNWATCH"])?;
                return Ok(false);
            }
            self.0.ask(&[b"MULTI"])?;
            for step in steps {
                self.0.ask(step)?;
            }
            match self.0.ask(&[b"EXEC"])? {
                // The entry changed between WATCH and EXEC.
                Reply::Null => {}
                Reply::Array(replies) => {
                    let refusal = replies.into_iter().find_map(|reply| match reply {
                        Reply::Error(text) => Some(text),
                        _ => None,
                    });
                    return match refusal {
                        None => Ok(true),
                        Some(text) => Err(self.0.failed("the Redis server refused", &text)),
                    };
                }
                other => return Err(self.0.unexpected_reply(&other)),
            }
        }
        Err(self.0.failed("the entry changes without pause", claim.key))
    }
}

impl KeyValueServer for RedisServer {
    fn address(&self) -> &str {
        &self.url
    }

    fn get(&self, key: &str, deadline: Moment) -> Result<Option<Vec<u8>>> {
        self.open(deadline)?.get(key)
    }

    fn claim(
        &self,
        claim: KeyClaim<'_>,
        expected: Option<&[u8]>,
        deadline: Moment,
    ) -> Result<Option<Vec<u8>>> {
        let mut session = self.open(deadline)?;
        let (key, value) = (claim.key.as_bytes(), claim.value);
        let is_ours = match expected {
            Some(old) => {
                let old = KeyClaim { key: claim.key, value: old };
                session.run_if_unchanged(old, &[&[b"SET", key, value]])?
            }
            None => session.0.ask(&[b"SET", key, value, b"NX"])? != Reply::Null,
        };
        if is_ours {
            return Ok(None);
        }
        // The claim failed, but the entry was deleted a moment later: an empty entry names no
        // holder.
        Ok(Some(session.get(claim.key)?.unwrap_or_default()))
    }

    fn put(&self, claim: KeyClaim<'_>, key: &str, value: &[u8], deadline: Moment) -> Result<bool> {
        let set: &[&[u8]] = &[b"SET", key.as_bytes(), value];
        self.open(deadline)?.run_if_unchanged(claim, &[set])
    }

    fn release(&self, claim: KeyClaim<'_>, key: &str, deadline: Moment) -> Result<()> {
        let delete: &[&[u8]] = &[b"DEL", key.as_bytes(), claim.key.as_bytes()];
        self.open(deadline)?.run_if_unchanged(claim, &[delete]).map(drop)
    }
}
