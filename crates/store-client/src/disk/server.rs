//! The record server: loads records into staging memory for readers in other processes.
//!
//! Each connection has a thread, and holds memory for one or a few loads: until the reader gives it
//! back, the connection ends, or the reader is silent for too long. A reader that has lost its memory
//! learns it, since its connection is closed: the bytes that it read do not count then.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Result, SegmentId, SystemClock, Token};
use mooncake_os::{
    acceptor::{Acceptor, ConnectionLimits, ConnectionPlace, Overflow, pause_accepting},
    threads::Threads,
};
use mooncake_proto::records::{
    CALL_BYTES_MAX, LoadRecords, Loaded, RecordAnswer, RecordCall, RecordsLoaded, RecordsReleased,
    Wanted,
};
use mooncake_transfer_engine::Engine;

use super::{
    owner::Owner,
    staging::{Staging, StagingRange},
    wire::Wire,
};

/// Limits of readers, and of connections that have not proved who they are.
const LIMITS: ConnectionLimits = ConnectionLimits {
    count: 512,
    overflow: Overflow::Close,
    greetings: 64,
    greeting_time: Duration::from_secs(5),
};

/// The maximum number of loads whose memory a reader holds.
const LEASES_MAX: usize = 4;

/// A reader that holds memory and says nothing for so long loses the memory and the connection.
const LEASE_TIME: Duration = Duration::from_secs(30);

/// A connection that holds no memory is closed after so long without a call.
const IDLE_TIME: Duration = Duration::from_secs(120);

/// Time limit for sending an answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest wait for staging memory.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// What a server serves.
#[derive(Debug)]
pub(crate) struct Served {
    /// The directories.
    pub(crate) owners: Arc<[Arc<Owner>]>,
    /// The memory that records are loaded into.
    pub(crate) staging: Arc<Staging>,
    /// The name of the engine that the memory is registered with.
    pub(crate) endpoint: String,
    /// The secret that readers prove.
    pub(crate) token: Option<Token>,
}

/// A running server. Stopped when dropped.
#[derive(Debug)]
pub(crate) struct RecordServer {
    endpoint: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    served: Served,
    acceptor: Acceptor,
    is_stopped: AtomicBool,
    /// One for each connection, and the one that accepts them.
    threads: Threads,
}

/// The memory that one connection holds.
#[derive(Debug, Default)]
struct Leases {
    next: u64,
    held: BTreeMap<u64, StagingRange>,
}

impl RecordServer {
    /// Listens on a port of the range of the engine, at the host that its peers come to.
    ///
    /// # Errors
    /// The system gives no port or no thread.
    pub(crate) fn start(engine: &Engine, served: Served) -> Result<Self> {
        let failed = |text: &'static str| {
            move |source: std::io::Error| Error::new(ErrorCode::RPC_FAIL, text).caused_by(source)
        };
        let host = engine.host();
        let listener = engine.listen_beside(bind_address(host)).or_else(|error| {
            tracing::warn!(
                %error, "records on disk are served on a port outside of the range of engines, which a \
                firewall may close to other processes"
            );
            TcpListener::bind((bind_address(host), 0))
                .map_err(failed("the server of records on disk cannot listen"))
        })?;
        let address = listener.local_addr().map_err(failed("a listener has no address"))?;
        let endpoint = Endpoint::new(host, address.port()).to_string();
        let shared = Arc::new(Shared {
            served,
            acceptor: Acceptor::new(listener, LIMITS),
            is_stopped: AtomicBool::new(false),
            threads: Threads::unbounded(),
        });
        let accepting = Arc::clone(&shared);
        let started = shared.threads.spawn("mc-disk-accept", move || accepting.accept());
        started.map_err(failed("cannot start the thread of the server of records on disk"))?;
        Ok(Self { endpoint, shared })
    }

    /// Returns the address that readers connect to.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Accepts no reader any more, and closes the connections of all.
    pub(crate) fn stop(&self) {
        let Shared { acceptor, is_stopped, threads, .. } = &*self.shared;
        if !threads.is_forked() && !is_stopped.swap(true, Ordering::AcqRel) {
            acceptor.close();
            acceptor.connections().close(Shutdown::Both);
        }
    }
}

impl Drop for RecordServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    fn accept(self: &Arc<Self>) {
        while let Some((stream, place)) = self.acceptor.next(|| self.is_stopped()) {
            let shared = Arc::clone(self);
            let serve = move || {
                if let Err(error) = shared.serve(Wire::new(stream), place) {
                    tracing::debug!(%error, "a reader of records on disk is gone");
                }
            };
            if let Err(error) = self.threads.spawn("mc-disk-serve", serve) {
                tracing::warn!(%error, "cannot start a thread for a reader of records on disk");
                pause_accepting();
            }
        }
    }

    /// Serves one reader until it leaves.
    fn serve(&self, mut wire: Wire, place: ConnectionPlace) -> Result<()> {
        wire.welcome(self.served.token.as_ref(), place.greeting_deadline())?;
        place.end_greeting();
        let mut leases = Leases::default();
        loop {
            let patience = if leases.held.is_empty() { IDLE_TIME } else { LEASE_TIME };
            let call = wire.receive_next(CALL_BYTES_MAX, SystemClock.now() + patience);
            let Some(call) = call? else { return Ok(()) };
            let answer = self.answer(&call, &mut leases);
            wire.send(&answer, SystemClock.now() + SEND_TIMEOUT)?;
        }
    }

    fn answer(&self, call: &RecordCall, leases: &mut Leases) -> RecordAnswer {
        let failure =
            |error: &Error| RecordAnswer { failure: Some(error.into()), ..RecordAnswer::default() };
        match (&call.load, &call.release) {
            (Some(load), None) => match self.load(load, leases) {
                Ok(loaded) => RecordAnswer { loaded: Some(loaded), ..RecordAnswer::default() },
                Err(error) => failure(&error),
            },
            (None, Some(release)) => {
                let was_held = leases.held.remove(&release.lease).is_some();
                let released = Some(RecordsReleased { was_held });
                RecordAnswer { released, ..RecordAnswer::default() }
            }
            _ => failure(&Error::invalid("a call to the owner of a disk is empty or ambiguous")),
        }
    }

    /// Loads the first of the ranges, as many as there is memory for.
    fn load(&self, load: &LoadRecords, leases: &mut Leases) -> Result<RecordsLoaded> {
        let wanted = load.read()?;
        let Served { owners, staging, endpoint, .. } = &self.served;
        let id = SegmentId::from_bytes(&load.disk);
        let owner = owners.iter().find(|owner| Some(owner.id()) == id).ok_or_else(|| {
            let text = "this process does not own the directory any more";
            Error::new(ErrorCode::SEGMENT_NOT_FOUND, text)
        })?;
        if leases.held.len() >= LEASES_MAX {
            return Err(Error::invalid("a reader holds too much memory").with("limit", LEASES_MAX));
        }
        let (places, bytes) = places_of(&wanted, staging.share());
        let wait = Duration::from_millis(load.wait_ms).min(WAIT_MAX);
        let stage = staging.reserve(bytes, SystemClock.now() + wait)?;
        let mut outcomes = vec![Loaded::Later; wanted.len()];
        let mut addresses = vec![0; wanted.len()];
        let (mut lease, mut segment) = (0, Vec::new());
        if let Some(stage) = stage {
            segment = stage.segment().to_bytes().to_vec();
            let loaded = owner.load(&wanted[..places.len()], &places, &stage);
            for (at, outcome) in loaded.into_iter().enumerate() {
                outcomes[at] = outcome;
                if outcome == Loaded::Good {
                    addresses[at] = stage.address(places[at]);
                }
            }
            if outcomes.contains(&Loaded::Good) {
                leases.next += 1;
                lease = leases.next;
                leases.held.insert(lease, stage);
            }
        }
        let outcomes = outcomes.into_iter().map(i32::from).collect();
        Ok(RecordsLoaded { lease, endpoint: endpoint.clone(), outcomes, addresses, segment })
    }
}

/// Returns where the first ranges go within a part of the staging memory, as many as fit into the
/// limit and at least one, and the length of the part.
pub(crate) fn places_of(wanted: &[Wanted<'_>], limit: u64) -> (Vec<u64>, u64) {
    let mut places = Vec::with_capacity(wanted.len());
    let mut end = 0_u64;
    for wanted in wanted {
        // Long ranges begin on a page, so that a device can write there.
        let alignment = if wanted.length >= mooncake_disk::format::LARGE_BYTES { 4096 } else { 64 };
        let begin = end.next_multiple_of(alignment);
        let Some(next) = begin.checked_add(wanted.length) else { break };
        if next > limit && !places.is_empty() {
            break;
        }
        places.push(begin);
        end = next;
    }
    (places, end)
}

/// Returns the address to listen on: only loopback if peers come there, otherwise all addresses of
/// the family, since peers may come over any network.
fn bind_address(host: &str) -> IpAddr {
    match host.parse::<IpAddr>() {
        Ok(address) if address.is_loopback() => address,
        Ok(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        Ok(IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
        Err(_) if host == "localhost" => Ipv4Addr::LOCALHOST.into(),
        Err(_) => Ipv4Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests;
