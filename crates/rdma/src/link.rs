//! Transfers to one peer, over all pairs of devices that reach it.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::{Error, ErrorCode, Moment, Result};
use mooncake_os::{call_limit, threads};
use mooncake_verbs::Operation;
use smallvec::SmallVec;

use crate::{
    devices::Devices,
    endpoint::{Connection, Ended, Endpoint},
    hello::nic_path,
    peer_memory::{PeerDescription, PeerMemory},
    rail_choice::{RAILS_INLINE, RailChoice, RailState, RailView},
    rails::Rails,
    registration::local_memory::LocalMemory,
    round::{Failure, Progress, Reason, Round},
    send_queue::Posted,
    slices::{Entry, MemoryRange, Slice, Unregistered},
};

/// Longest wait between two looks at deadlines and stalled connections.
const TICK: Duration = Duration::from_millis(50);

/// How long requests of a failed queue pair may take to be flushed before it is destroyed.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How long requests that are in flight at the deadline may take to end by themselves. Connections are
/// given up for those that do not, with the requests of other transfers.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a connection may take while others work.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest pause of all pairs of devices that a transfer waits for. After longer ones it fails, so that
/// another transport can move the bytes.
const PAUSE_WAIT_MAX: Duration = Duration::from_millis(500);

/// Sends messages to the peer's handshake socket.
pub type PeerExchange = Arc<dyn Fn(&[u8], Moment) -> Result<Vec<u8>> + Send + Sync>;

/// Transfers to one peer.
pub struct PeerLink {
    devices: Arc<Devices>,
    memory: Arc<PeerMemory>,
    /// Pairs of devices, the preferred ones first.
    rails: Vec<Rail>,
    /// How many of the first rails are connected from the start: one for each device.
    primary: usize,
    /// A thread connects rails that failed.
    is_reconnecting: AtomicBool,
    exchange: PeerExchange,
    /// The peer has withdrawn or moved memory since it published it.
    is_outdated: AtomicBool,
    is_closed: AtomicBool,
}

/// A pair of devices of this process and of the peer.
struct Rail {
    endpoint: Arc<Endpoint>,
    /// Index of the peer's device.
    remote: usize,
}

/// The limits of a transfer.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The transfer ends at this moment or soon after it, whatever was moved.
    pub deadline: Moment,
    /// A pair of devices that the transfer uses is given up after this long without progress.
    pub stall: Option<Duration>,
}

/// Why an entry was not moved.
#[derive(Debug, Clone)]
pub enum EntryError {
    /// The local range is neither registered nor can it be; another transport may move the entry.
    NotRegistered,
    /// The peer has not published the remote range.
    NotPublished,
    /// The transfer failed.
    Failed(Error),
}

/// The result of posting what can be posted now.
enum Next {
    Posted(u32),
    /// Something has changed: choose again.
    ChooseAgain,
    /// No rail has a place.
    Full,
    /// No rail can be used before this moment.
    Paused(Moment),
}

impl PeerLink {
    /// Makes a link to a peer. `exchange` sends a message to the handshake socket of the peer.
    ///
    /// # Errors
    /// The peer has published no device, or what it has published is contradictory.
    pub fn new(
        devices: Arc<Devices>,
        published: &PeerDescription,
        exchange: PeerExchange,
    ) -> Result<Self> {
        let memory = Arc::new(PeerMemory::new(published)?);
        let Rails { pairs, primary } = devices.rails(&memory);
        let rails = pairs
            .into_iter()
            .map(|(local, remote)| {
                let path = nic_path(&memory.server, &memory.devices[remote].name);
                let endpoint = devices.endpoint(local, &path);
                Rail { endpoint, remote }
            })
            .collect();
        Ok(Self {
            devices,
            memory,
            rails,
            primary,
            is_reconnecting: AtomicBool::new(false),
            exchange,
            is_outdated: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Connects each device with one of the peer's.
    ///
    /// # Errors
    /// No pair can be connected; the error is that of the last one.
    pub fn connect(&self, deadline: Moment) -> Result<()> {
        let mut outcome = Err(self.error("no RDMA device is active"));
        for (index, rail) in self.rails.iter().enumerate() {
            let is_enough = outcome.is_ok() && index >= self.primary;
            if is_enough || deadline.has_passed(self.now()) {
                break;
            }
            if rail.endpoint.nic().is_active() {
                match self.connect_rail(rail, deadline) {
                    Ok(_) => outcome = Ok(()),
                    Err(error) if outcome.is_err() => outcome = Err(error),
                    Err(_) => {}
                }
            }
        }
        outcome
    }

    /// Returns whether the peer has published the whole range.
    pub fn reaches(&self, address: u64, length: u64) -> bool {
        self.memory.ranges.cover(address, length)
    }

    /// Returns false once the link is closed, or the peer's memory has changed since it was published:
    /// make another one from a new description.
    pub fn is_usable(&self) -> bool {
        !self.is_closed.load(Ordering::Acquire) && !self.is_outdated.load(Ordering::Acquire)
    }

    /// Refuses further transfers, and ends those in flight soon. The connections stay for other links to
    /// the same peer, except those whose requests have to be given up.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Moves entries, and passes the outcome of each to `each` with its index. Blocks; no device uses the
    /// memory of an entry after the return.
    ///
    /// # Safety
    /// Until the return each local range is mapped, nobody writes to the source of a write, and nobody
    /// uses the destination of a read.
    pub unsafe fn transfer(
        self: &Arc<Self>,
        operation: Operation,
        entries: &[Entry],
        limits: Limits,
        mut each: impl FnMut(usize, Result<(), EntryError>),
    ) {
        if self.is_ending() {
            let error = self.error("the path was closed");
            (0..entries.len())
                .for_each(|index| each(index, Err(EntryError::Failed(error.clone()))));
            return;
        }
        let mut outcomes: Vec<Option<EntryError>> = vec![None; entries.len()];
        // SAFETY: by the contract of the function; the memory is given back before the return.
        let (local, mut waiting) = unsafe { self.cut(operation, entries, &mut outcomes) };
        let progress = Arc::<Progress>::default();
        let mut ended = Ok(());
        loop {
            if !waiting.is_empty() {
                let round = Arc::new(Round {
                    operation,
                    slices: std::mem::take(&mut waiting),
                    local: Arc::clone(&local),
                    remote: Arc::clone(&self.memory),
                    progress: Arc::clone(&progress),
                });
                if let Err((error, from)) = self.run(&round, limits) {
                    for slice in &round.slices[from as usize..] {
                        let outcome = &mut outcomes[slice.entry as usize];
                        outcome.get_or_insert_with(|| EntryError::Failed(error.clone()));
                    }
                    ended = Err(error);
                }
            }
            self.finish(&progress, limits);
            let failures = progress.take_failures();
            if failures.is_empty() {
                break;
            }
            waiting = self.slices_to_retry(failures, &ended, &mut outcomes);
        }
        if ended.is_ok() {
            self.record_success();
        }
        for (index, outcome) in outcomes.into_iter().enumerate() {
            each(index, outcome.map_or(Ok(()), Err));
        }
    }

    /// Returns the slices that are tried again, over whatever pair of devices works. Others fail their
    /// entries.
    fn slices_to_retry(
        &self,
        failures: Vec<Failure>,
        ended: &Result<()>,
        outcomes: &mut [Option<EntryError>],
    ) -> Vec<Slice> {
        let mut slices = Vec::new();
        for Failure { slice, reason } in failures {
            let outcome = &mut outcomes[slice.entry as usize];
            if reason == Reason::Status(mooncake_verbs::Status::RemoteAccess) {
                self.is_outdated.store(true, Ordering::Release);
            }
            // An end on purpose says nothing about the path.
            let is_tried = reason != Reason::Interrupted;
            let tries = slice.tries.saturating_sub(u32::from(is_tried));
            let is_lost = reason.is_final() || tries == 0 || ended.is_err();
            match outcome {
                Some(_) => {}
                None if is_lost => *outcome = Some(EntryError::Failed(self.failure(reason, ended))),
                None => slices.push(Slice { tries, ..slice }),
            }
        }
        // An entry that is lost is not tried further.
        slices.retain(|slice| outcomes[slice.entry as usize].is_none());
        slices
    }

    /// Cuts entries into slices. Local memory that is not registered is, while the result lives; an entry
    /// whose memory cannot be gets an outcome.
    ///
    /// # Safety
    /// That of [`Self::transfer`].
    unsafe fn cut(
        &self,
        operation: Operation,
        entries: &[Entry],
        outcomes: &mut [Option<EntryError>],
    ) -> (Arc<LocalMemory>, Vec<Slice>) {
        let rule = self.devices.slice_rule();
        let mut slices = Vec::with_capacity(entries.len());
        let mut unregistered = Vec::new();
        let mut local = self.devices.memory();
        for (index, entry) in (0..).zip(entries) {
            let remote = &self.memory.ranges;
            match rule.cut(index, *entry, |at| local.at(at), remote, &mut slices) {
                Ok(()) => {}
                Err(Unregistered::Local) => unregistered.push(index),
                Err(side) => outcomes[index as usize] = Some(self.refusal(side)),
            }
        }
        if !unregistered.is_empty() {
            let wanted = unregistered.iter().map(|index| {
                let Entry { local, length, .. } = entries[*index as usize];
                MemoryRange { address: local, length }
            });
            let wanted = wanted.collect();
            // SAFETY: by the contract of the function.
            local = Arc::new(unsafe { self.devices.memory_with(&local, wanted, operation) });
        }
        for index in unregistered {
            let (entry, remote) = (entries[index as usize], &self.memory.ranges);
            let cut = rule.cut(index, entry, |at| local.at(at), remote, &mut slices);
            outcomes[index as usize] = cut.err().map(|side| self.refusal(side));
        }
        (local, slices)
    }

    /// Returns the outcome of an entry that is not registered on one side. A range that the peer has not
    /// published may have been registered since.
    fn refusal(&self, side: Unregistered) -> EntryError {
        match side {
            Unregistered::Local => EntryError::NotRegistered,
            Unregistered::Remote => {
                self.is_outdated.store(true, Ordering::Release);
                EntryError::NotPublished
            }
        }
    }

    /// Posts all slices of a round.
    ///
    /// # Errors
    /// The deadline passed or no device is left; the slices from the index on were not posted.
    fn run(self: &Arc<Self>, round: &Arc<Round>, limits: Limits) -> Result<(), (Error, u32)> {
        let count = u32::try_from(round.slices.len()).expect("a transfer has few slices");
        let progress = &round.progress;
        let mut next = 0;
        while next < count {
            if self.is_ending() {
                return Err((self.error("the path was closed"), next));
            }
            if limits.deadline.has_passed(self.now()) {
                let text = "the deadline passed before the bytes were moved";
                return Err((self.error(text), next));
            }
            match self.post(round, next, limits) {
                Ok(Next::Posted(posted)) => next += posted,
                Ok(Next::ChooseAgain) => {}
                Ok(Next::Full) => self.wait(progress, limits),
                Ok(Next::Paused(until))
                    if progress.open() > 0
                        || (until.left(self.now()) <= PAUSE_WAIT_MAX
                            && until <= limits.deadline) =>
                {
                    let left = until.left(self.now()).min(TICK);
                    progress.wait_below(progress.open(), left);
                    self.fail_stalled(progress, limits);
                }
                Ok(Next::Paused(_)) => {
                    return Err((self.error("no pair of RDMA devices works"), next));
                }
                Err(error) => return Err((error, next)),
            }
        }
        Ok(())
    }

    /// Posts slices from an index on over the rail that [`RailChoice`] names.
    fn post(self: &Arc<Self>, round: &Arc<Round>, from: u32, limits: Limits) -> Result<Next> {
        let now = self.now();
        let slice = &round.slices[from as usize];
        let near = (round.local.near(slice), round.remote.near(slice));
        let mut views: SmallVec<[RailView; RAILS_INLINE]> = SmallVec::new();
        let mut connections: SmallVec<[Option<Arc<Connection>>; RAILS_INLINE]> = SmallVec::new();
        for (index, rail) in self.rails.iter().enumerate() {
            let far_ends = u32::from(!near.0.contains(rail.endpoint.nic().index()))
                + u32::from(!near.1.contains(rail.remote));
            let (state, connection) = self.rail_state(rail, u64::from(slice.length), now);
            views.push(RailView { state, far_ends, is_primary: index < self.primary });
            connections.push(connection);
        }
        match RailChoice::of(&views) {
            RailChoice::Post { open, reconnect } => {
                if let Some(index) = reconnect {
                    self.reconnect(index);
                }
                let mut is_full = false;
                for index in open {
                    let (Some(connection), rail) = (&connections[index], &self.rails[index]) else {
                        continue;
                    };
                    match connection.post(rail.endpoint.nic(), rail.remote, round, from) {
                        Posted::Slices(count) => return Ok(Next::Posted(count)),
                        Posted::Busy => is_full = true,
                        Posted::Failed => {}
                    }
                }
                Ok(if is_full { Next::Full } else { Next::ChooseAgain })
            }
            RailChoice::Connect(index) => {
                let until = limits.deadline.min(now + CONNECT_TIMEOUT);
                // A failure sets the rail aside; the next choice is another one.
                let _ = self.connect_rail(&self.rails[index], until);
                Ok(Next::ChooseAgain)
            }
            RailChoice::Wait(until) => Ok(Next::Paused(until)),
            RailChoice::Fail => Err(self.error("no RDMA device is active")),
        }
    }

    /// Returns the state of a rail for a slice of that length, and its connection if it is open. A
    /// connection that has failed sets the rail aside.
    fn rail_state(
        &self,
        rail: &Rail,
        length: u64,
        now: Moment,
    ) -> (RailState, Option<Arc<Connection>>) {
        let nic = rail.endpoint.nic();
        if !nic.is_active() {
            // Looked at again soon: it is used again, or it has failed.
            let is_renewing = nic.is_renewing();
            let state =
                if is_renewing { RailState::Paused(now + TICK) } else { RailState::Inactive };
            return (state, None);
        }
        if let Some(connection) = rail.endpoint.connection() {
            let estimate = rail.endpoint.load().estimate(length, now);
            return (RailState::Open(estimate), Some(connection));
        }
        if rail.endpoint.drop_failed() == Some(Ended::Failed) {
            self.set_aside(rail);
        }
        let retry_at = rail.endpoint.health().lock().retry_at(now);
        (retry_at.map_or(RailState::Closed, RailState::Paused), None)
    }

    /// Connects a rail on another thread, while others move the bytes.
    fn reconnect(self: &Arc<Self>, index: usize) {
        if self.is_reconnecting.swap(true, Ordering::AcqRel) {
            return;
        }
        let link = Arc::clone(self);
        let connect = move || {
            // A failure sets the rail aside.
            let _ = link.connect_rail(&link.rails[index], link.now() + CONNECT_TIMEOUT);
            link.is_reconnecting.store(false, Ordering::Release);
        };
        if let Err(error) = threads::start_detached("rdma-connect", connect) {
            tracing::debug!(%error, "no thread can be started");
            self.is_reconnecting.store(false, Ordering::Release);
        }
    }

    /// Ends the pauses of pairs that have moved a slice since they were connected. A pair may connect and
    /// carry nothing: packets between two networks are dropped, or those of one size.
    fn record_success(&self) {
        let works =
            |rail: &&Rail| rail.endpoint.load().has_moved() && rail.endpoint.connection().is_some();
        let working = self.rails.iter().filter(works);
        working.for_each(|rail| rail.endpoint.health().lock().record_success());
    }

    fn connect_rail(&self, rail: &Rail, deadline: Moment) -> Result<Arc<Connection>> {
        let connected = rail.endpoint.connect(&*self.exchange, deadline);
        if let Err(error) = &connected {
            tracing::debug!(endpoint = ?rail.endpoint, %error, "devices are not connected");
            self.set_aside(rail);
        }
        connected
    }

    fn set_aside(&self, rail: &Rail) {
        let pause_max = self.devices.settings().pause_max;
        rail.endpoint.health().lock().record_failure(self.now(), pause_max);
    }

    /// Waits until a slice, or one of another transfer if none is in flight, has ended.
    fn wait(&self, progress: &Arc<Progress>, limits: Limits) {
        let left = limits.deadline.left(self.now()).min(TICK);
        match progress.open() {
            0 => self.rails[0].endpoint.nic().wait_for_places(left.min(Duration::from_millis(1))),
            open => progress.wait_below(open, left),
        }
        self.fail_stalled(progress, limits);
    }

    /// Waits until nothing is in flight, or a slice has failed and can be tried elsewhere. After the
    /// deadline, or once the link is closed, nothing is in flight: connections whose requests do not end
    /// are failed.
    fn finish(&self, progress: &Arc<Progress>, limits: Limits) {
        while progress.open() > 0 {
            let left = limits.deadline.left(self.now());
            if left.is_zero() || self.is_ending() {
                break;
            }
            if progress.has_failures() {
                return;
            }
            progress.wait_for_end(left.min(TICK));
            self.fail_stalled(progress, limits);
        }
        wait_until_ended(progress, DRAIN_TIMEOUT);
        for end in [Endpoint::interrupt, Endpoint::disconnect] {
            // Other pairs have other transfers.
            let of_transfer = self.rails.iter().filter(|rail| rail.endpoint.carries(progress));
            of_transfer.for_each(|rail| end(&rail.endpoint));
            wait_until_ended(progress, FLUSH_TIMEOUT);
        }
        if progress.open() > 0 {
            // Some are of a connection that was replaced meanwhile, and end as it is dropped.
            self.rails.iter().for_each(|rail| rail.endpoint.disconnect());
        }
    }

    /// Gives up connections without progress, and those whose device does not flush them.
    fn fail_stalled(&self, progress: &Arc<Progress>, limits: Limits) {
        let now = self.now();
        for rail in &self.rails {
            let stalled = rail.endpoint.load().stalled(now);
            let patience = rail.endpoint.nic().stall_timeout();
            if stalled < limits.stall.map_or(patience, |limit| limit.min(patience)) {
                continue;
            }
            // The limit of a caller is for its own requests.
            let stall = match limits.stall {
                Some(limit) if rail.endpoint.carries(progress) => limit,
                _ => patience,
            };
            if stalled >= stall + FLUSH_TIMEOUT {
                rail.endpoint.disconnect();
            } else if stalled >= stall && rail.endpoint.connection().is_some() {
                rail.endpoint.fail();
            }
        }
    }

    /// Returns whether transfers end now: the link is closed, or the caller was interrupted.
    fn is_ending(&self) -> bool {
        self.is_closed.load(Ordering::Acquire) || call_limit::is_interrupted()
    }

    fn failure(&self, reason: Reason, ended: &Result<()>) -> Error {
        let error = self.error("a transfer over RDMA failed").with("reason", reason);
        match ended {
            Ok(()) => error,
            Err(cause) => error.caused_by(cause.clone()),
        }
    }

    fn now(&self) -> Moment {
        self.devices.now()
    }

    fn error(&self, text: &str) -> Error {
        Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", &self.memory.server)
    }
}

/// Waits until nothing of a transfer is in flight, for a time of the machine: a clock that stands still ends
/// this, too.
fn wait_until_ended(progress: &Progress, timeout: Duration) {
    let until = Instant::now() + timeout;
    while progress.open() > 0 && Instant::now() < until {
        progress.wait_below(1, TICK);
    }
}

impl fmt::Debug for PeerLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerLink")
            .field("peer", &self.memory.server)
            .field("rails", &self.rails.len())
            .finish_non_exhaustive()
    }
}
