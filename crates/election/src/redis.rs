//! The lease in Redis: a hash that expires, a counter and the in-sync set, changed by one script each.
//!
//! The keys share a hash tag, so that one node of a Redis cluster has them. Redis must write its
//! append-only file with `appendfsync always`: a change of the set that it forgets in a crash would let
//! a member lead that lacks changes.

use std::{
    net::{Shutdown, TcpStream},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Clock, Error, Moment, Result, SystemClock, sync::Mutex};
use mooncake_kv_client::{
    redis::{RedisAddress, RedisConnection},
    resp::Reply,
};

use crate::{
    TEXTS,
    in_sync::InSyncSet,
    service::{
        Acquisition, Basis, Bid, CONNECT_TIMEOUT, Change, Hold, LeaseService, Snapshot,
        after_watch, view_of,
    },
    view::{ClusterId, Leader, LeaderAddress, Lease, OwnerToken},
};

/// Maximum length of a value.
const BYTES_MAX: usize = 64 << 10;

/// Interval at which a watch reads the values. Redis announces no expiry of a key to all of its
/// clients, and masters of other programs announce nothing.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Scripts. Keys: the hash of the leader, the counter of terms, the in-sync set.
const READ: &str = "\
    local leader = redis.call('HMGET', KEYS[1], 'leader_address', 'view_version', 'owner_token') \
    return {leader[1], leader[2], leader[3], redis.call('GET', KEYS[3])}";
/// Arguments: basis, set, value of the address, token, milliseconds. Returns the term, or 0.
const ACQUIRE: &str = "\
    if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end \
    local set = redis.call('GET', KEYS[3]) \
    if ARGV[1] == 'member' and set ~= ARGV[2] then return 0 end \
    if ARGV[1] == 'founder' and set then return 0 end \
    if ARGV[1] ~= 'member' then redis.call('SET', KEYS[3], ARGV[2]) end \
    local term = redis.call('INCR', KEYS[2]) \
    redis.call('HSET', KEYS[1], 'leader_address', ARGV[3], 'view_version', term, 'owner_token', ARGV[4]) \
    redis.call('PEXPIRE', KEYS[1], ARGV[5]) \
    redis.call('PUBLISH', KEYS[1], term) \
    return term";
/// The beginning of scripts for a leader. Arguments: token, term.
const IF_HELD: &str = "\
    local leader = redis.call('HMGET', KEYS[1], 'owner_token', 'view_version') \
    if leader[1] ~= ARGV[1] or leader[2] ~= ARGV[2] then return 0 end ";
const RENEW: &str = "redis.call('PEXPIRE', KEYS[1], ARGV[3]) return 1";
const ANNOUNCE: &str = "\
    redis.call('HSET', KEYS[1], 'leader_address', ARGV[3]) \
    redis.call('PUBLISH', KEYS[1], ARGV[2]) return 1";
const CHANGE: &str = "\
    if redis.call('GET', KEYS[3]) ~= ARGV[3] then return 0 end \
    redis.call('SET', KEYS[3], ARGV[4]) \
    redis.call('PUBLISH', KEYS[1], ARGV[2]) return 1";
const RELEASE: &str = "\
    redis.call('DEL', KEYS[1]) \
    redis.call('PUBLISH', KEYS[1], ARGV[2]) return 1";
const MARK_LOST: &str = "return redis.call('SETNX', KEYS[3], ARGV[1])";

/// A cluster's leader in Redis.
#[derive(Debug)]
pub struct RedisLease {
    address: RedisAddress,
    leader_key: String,
    term_key: String,
    in_sync_key: String,
    ttl_ms: String,
    connections: Connections,
}

/// The open sockets, so that closing ends the calls that run.
#[derive(Debug, Default)]
struct Connections {
    is_closed: AtomicBool,
    sockets: Mutex<Vec<Weak<TcpStream>>>,
}

impl RedisLease {
    /// Creates the client of a server.
    pub fn new(address: RedisAddress, cluster: &ClusterId, ttl: Duration) -> Self {
        let prefix = format!("mooncake-store/{{{}}}", cluster.as_str());
        Self {
            address,
            leader_key: format!("{prefix}/master_view"),
            term_key: format!("{prefix}/master_view_version"),
            in_sync_key: format!("{prefix}/in_sync"),
            ttl_ms: ttl.as_millis().to_string(),
            connections: Connections::default(),
        }
    }

    fn open(&self, deadline: Moment) -> Result<RedisConnection> {
        self.connections.check_open()?;
        let connection =
            RedisConnection::open(&self.address, CONNECT_TIMEOUT, BYTES_MAX, &TEXTS, deadline)?;
        self.connections.track(connection.socket())?;
        Ok(connection)
    }

    fn run(&self, script: &str, arguments: &[&[u8]], deadline: Moment) -> Result<Reply> {
        let keys = [&self.leader_key, &self.term_key, &self.in_sync_key].map(|key| key.as_bytes());
        let command: Vec<&[u8]> = [&b"EVAL"[..], script.as_bytes(), b"3"]
            .into_iter()
            .chain(keys)
            .chain(arguments.iter().copied())
            .collect();
        self.open(deadline)?.ask(&command)
    }

    fn run_if_held(
        &self,
        lease: &Lease,
        script: &str,
        arguments: &[&[u8]],
        deadline: Moment,
    ) -> Result<Hold> {
        let (owner, term) = (lease.owner.to_string(), lease.term().to_string());
        let arguments: Vec<&[u8]> = [owner.as_bytes(), term.as_bytes()]
            .into_iter()
            .chain(arguments.iter().copied())
            .collect();
        match self.run(&format!("{IF_HELD}{script}"), &arguments, deadline)? {
            Reply::Integer(1) => Ok(Hold::Held),
            Reply::Integer(0) => Ok(Hold::Lost),
            other => Err(self.unexpected(&other)),
        }
    }

    fn unexpected(&self, reply: &Reply) -> Error {
        Error::internal("Redis answered something else than the script returns")
            .with("url", &self.address)
            .with("answer", format_args!("{reply:?}"))
    }

    fn snapshot(&self, reply: &Reply) -> Result<Snapshot> {
        let Reply::Array(parts) = reply else { return Err(self.unexpected(reply)) };
        let field = |index: usize| match parts.get(index) {
            Some(Reply::Bytes(bytes)) => Ok(Some(&bytes[..])),
            Some(Reply::Null) | None => Ok(None),
            Some(_) => Err(self.unexpected(reply)),
        };
        let in_sync = field(3)?.map(InSyncSet::read).transpose()?;
        let text =
            |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or(b"")).into_owned();
        let leader = match field(0)? {
            None => None,
            Some(address) => Some(Leader {
                address: LeaderAddress::read(address)?,
                view: view_of(text(field(1)?).parse().unwrap_or(0), in_sync.as_ref()),
                owner: OwnerToken::parse(&text(field(2)?)),
            }),
        };
        Ok(Snapshot { leader, in_sync, mark: String::new() })
    }
}

impl LeaseService for RedisLease {
    fn address(&self) -> String {
        self.address.to_string()
    }

    fn read(&self, deadline: Moment) -> Result<Snapshot> {
        let reply = self.run(READ, &[], deadline)?;
        self.snapshot(&reply).map_err(|error| error.with("url", &self.address))
    }

    fn acquire(&self, bid: &Bid, deadline: Moment) -> Result<Acquisition> {
        let basis = match bid.basis {
            Basis::Member => "member",
            Basis::Founder => "founder",
            Basis::Forced => "forced",
        };
        let set = bid.set.value();
        let (value, owner) = (LeaderAddress::Warming.value(bid.owner), bid.owner.to_string());
        let arguments = [basis, &set, &value, &owner, &self.ttl_ms].map(str::as_bytes);
        match self.run(ACQUIRE, &arguments, deadline)? {
            Reply::Integer(0) => Ok(Acquisition::Refused),
            Reply::Integer(term) if term > 0 => Ok(Acquisition::Acquired(bid.view(term as u64))),
            other => Err(self.unexpected(&other)),
        }
    }

    fn renew(&self, lease: &Lease, deadline: Moment) -> Result<Hold> {
        self.run_if_held(lease, RENEW, &[self.ttl_ms.as_bytes()], deadline)
    }

    fn announce(&self, lease: &Lease, address: &str, deadline: Moment) -> Result<Hold> {
        self.run_if_held(lease, ANNOUNCE, &[address.as_bytes()], deadline)
    }

    fn change_in_sync(&self, change: &Change, deadline: Moment) -> Result<Hold> {
        let (from, to) = (change.from.value(), change.to.value());
        self.run_if_held(&change.lease, CHANGE, &[from.as_bytes(), to.as_bytes()], deadline)
    }

    fn mark_lost(&self, lost: &InSyncSet, deadline: Moment) -> Result<()> {
        self.run(MARK_LOST, &[lost.value().as_bytes()], deadline).map(drop)
    }

    fn release(&self, lease: &Lease, deadline: Moment) -> Result<()> {
        self.run_if_held(lease, RELEASE, &[], deadline).map(drop)
    }

    fn watch(&self, seen: &Snapshot, deadline: Moment) -> Result<Snapshot> {
        let mut subscription = self.open(deadline)?;
        subscription.ask(&[b"SUBSCRIBE", self.leader_key.as_bytes()])?;
        loop {
            // Changes after this read are announced to the subscription.
            let snapshot = self.read(after_watch(deadline))?;
            let left = deadline.left(SystemClock.now());
            if !snapshot.has_values_of(seen) || left.is_zero() {
                return Ok(snapshot);
            }
            let socket = Arc::clone(subscription.socket());
            let wait = left.min(POLL_INTERVAL).max(Duration::from_millis(1));
            let is_readable =
                socket.set_read_timeout(Some(wait)).and_then(|()| socket.peek(&mut [0]));
            match is_readable {
                Ok(0) => return Err(self.connections.check_open().err().unwrap_or_else(broken)),
                Ok(_) => {
                    subscription.set_deadline(SystemClock.now() + CONNECT_TIMEOUT);
                    subscription.receive()?;
                }
                // Nothing was announced.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken().caused_by(error)),
            }
        }
    }

    fn close(&self) {
        self.connections.close();
    }
}

impl Connections {
    fn check_open(&self) -> Result<()> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Error::closed("the lease service was closed"));
        }
        Ok(())
    }

    fn track(&self, socket: &Arc<TcpStream>) -> Result<()> {
        let mut sockets = self.sockets.lock();
        self.check_open()?;
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(socket));
        Ok(())
    }

    fn close(&self) {
        let mut sockets = self.sockets.lock();
        self.is_closed.store(true, Ordering::Release);
        for socket in sockets.drain(..).filter_map(|socket| socket.upgrade()) {
            // Fails if the server has already closed the connection.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn broken() -> Error {
    Error::new(mooncake_base::ErrorCode::RPC_FAIL, TEXTS.broken)
}

#[cfg(test)]
mod tests {
    use mooncake_kv_client::redis::RedisLogin;

    use super::*;
    use crate::view::View;

    #[test]
    fn keys_are_those_of_upstream_and_share_a_slot() {
        let address = RedisAddress::parse("h", &RedisLogin::default()).unwrap();
        let lease = RedisLease::new(address, &ClusterId::new("c").unwrap(), Duration::from_secs(5));
        assert_eq!(lease.leader_key, "mooncake-store/{c}/master_view");
        assert_eq!(lease.term_key, "mooncake-store/{c}/master_view_version");
        assert_eq!(lease.in_sync_key, "mooncake-store/{c}/in_sync");
        assert_eq!(lease.ttl_ms, "5000");
        let foreign = Reply::Array(vec![
            Reply::Bytes(b"10.0.0.1:50051".to_vec()),
            Reply::Bytes(b"7".to_vec()),
            Reply::Bytes(b"a-uuid".to_vec()),
            Reply::Null,
        ]);
        let leader = lease.snapshot(&foreign).unwrap().leader.unwrap();
        assert_eq!((leader.view, leader.owner), (View(7), None));
        lease.snapshot(&Reply::Integer(1)).unwrap_err();
    }
}
