//! A pair of devices, one of this process and one of a peer, and how the two are connected.
//!
//! Either side may begin. The one that begins sends its queue pair numbers, the other connects its own
//! queue pairs with them and answers with their numbers, the first connects as well and confirms. When both
//! begin at once, each answers with the queue pairs that it has offered itself, so that both end up with
//! the same pairs. A request for other queue pairs than the connected ones is from a peer that has started
//! again, or has connected anew: the old queue pairs are given up. Numbers do not tell, since a device may
//! use them again at once; engines of ours name each set of queue pairs.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Error, ErrorCode, Moment, Result};
use mooncake_os::call_limit::{self, INTERRUPTION_POLL};
use mooncake_verbs::{ConnectionSettings, Gid, PeerAddress, QueuePair};

use crate::{
    address::Address,
    health::Health,
    hello::{Attempt, Hello, format_gid, nic_path, parse_gid},
    load::Load,
    nic::Nic,
    round::Progress,
    send_queue::{Posted, SendQueue},
};

/// How long a side that was connected by its peer waits for the peer's confirmation before it posts.
/// Requests that arrive too early are tried again by the device.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(1);

/// Sends a message to the peer's handshake socket and returns the answer.
pub(crate) type Exchange<'a> = &'a (dyn Fn(&[u8], Moment) -> Result<Vec<u8>> + Sync);

/// A pair of devices.
pub(crate) struct Endpoint {
    nic: Arc<Nic>,
    /// Paths of the two devices, as messages name them.
    own_path: String,
    peer_path: String,
    queue_pairs: usize,
    identity: Arc<Identity>,
    state: Mutex<ConnectionState>,
    changed: Condvar,
    load: Arc<Load>,
    /// Of all links to the peer.
    health: Mutex<Health>,
}

/// Names the requests of an engine.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) engine: String,
    attempts: AtomicU64,
    sets: AtomicU64,
}

/// Queue pairs that are offered to a peer, and the address from which they are connected.
#[derive(Debug)]
struct Offer {
    queue_pairs: Vec<QueuePair>,
    set: u64,
    address: Arc<Address>,
}

/// The other end of a connection.
#[derive(Debug)]
struct PeerEnd {
    gid: Gid,
    lid: u16,
    numbers: Vec<u32>,
    /// None: the peer runs another implementation.
    attempt: Option<Attempt>,
}

/// How a connection ended that was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By a fault of the path or the peer.
    Failed,
    /// On purpose, since a transfer ran out of time.
    Interrupted,
}

#[derive(Debug)]
enum ConnectionState {
    Unconnected,
    /// A request is under way, which offers these queue pairs.
    Opening(Offer),
    Connected(Arc<Connection>),
}

/// What a message says of own queue pairs.
#[derive(Debug, Clone)]
struct Offered {
    numbers: Vec<u32>,
    set: u64,
    address: Arc<Address>,
}

/// Connected queue pairs.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) queues: Vec<Arc<SendQueue>>,
    own: Offered,
    peer: PeerEnd,
    /// The peer is known to receive.
    is_confirmed: AtomicBool,
    since: Moment,
}

impl Identity {
    pub(crate) fn new(engine: String) -> Arc<Self> {
        Arc::new(Self { engine, attempts: AtomicU64::new(0), sets: AtomicU64::new(0) })
    }

    fn next(&self, offered: &Offered) -> Attempt {
        let number = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let reads = offered.address.connection.incoming_reads;
        Attempt { engine: self.engine.clone(), number, set: offered.set, reads }
    }

    fn next_set(&self) -> u64 {
        self.sets.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Offer {
    fn offered(&self) -> Offered {
        let numbers = self.queue_pairs.iter().map(QueuePair::number).collect();
        Offered { numbers, set: self.set, address: Arc::clone(&self.address) }
    }
}

impl PeerEnd {
    /// Creates the end that sent a message, with its address.
    fn new(gid: Gid, message: &Hello) -> Self {
        let (lid, numbers) = (message.local_lid, message.qp_num.clone());
        Self { gid, lid, numbers, attempt: message.mooncake.clone() }
    }

    /// Returns whether a message is about the same queue pairs of the peer, at the same address.
    fn is_of(&self, message: &Hello) -> bool {
        // A confirmation need not repeat the address.
        let gid = parse_gid(&message.local_gid);
        let is_same_address =
            gid.is_none_or(|gid| (gid, message.local_lid) == (self.gid, self.lid));
        let is_same_set = match (&self.attempt, &message.mooncake) {
            (Some(own), Some(other)) => own.is_same_set(other),
            (None, None) => true,
            _ => false,
        };
        self.numbers == message.qp_num && is_same_address && is_same_set
    }
}

impl Endpoint {
    pub(crate) fn new(
        nic: &Arc<Nic>,
        own_server: &str,
        peer_path: &str,
        queue_pairs: usize,
        identity: &Arc<Identity>,
    ) -> Self {
        Self {
            own_path: nic_path(own_server, nic.name()),
            nic: Arc::clone(nic),
            peer_path: peer_path.to_owned(),
            queue_pairs,
            identity: Arc::clone(identity),
            state: Mutex::new(ConnectionState::Unconnected),
            changed: Condvar::default(),
            load: Arc::new(Load::new(nic.link_rate())),
            health: Mutex::default(),
        }
    }

    /// Returns the connection, if there is one that has not failed.
    pub(crate) fn connection(&self) -> Option<Arc<Connection>> {
        match &*self.state.lock() {
            ConnectionState::Connected(connection) if !connection.is_failed() => {
                Some(Arc::clone(connection))
            }
            _ => None,
        }
    }

    /// Returns the connection, and connects first if there is none.
    ///
    /// # Errors
    /// The peer cannot be reached or refuses, or the devices do not reach each other.
    pub(crate) fn connect(
        &self,
        exchange: Exchange<'_>,
        deadline: Moment,
    ) -> Result<Arc<Connection>> {
        let mut state = self.state.lock();
        loop {
            if call_limit::is_interrupted() {
                return Err(self.error("the caller no longer waits for the connection"));
            }
            match &*state {
                ConnectionState::Connected(connection) if connection.is_failed() => {
                    drop(state);
                    self.drop_failed();
                    state = self.state.lock();
                }
                ConnectionState::Connected(connection) => {
                    let confirm_until = connection.since + CONFIRMATION_TIMEOUT;
                    let left = confirm_until.min(deadline).left(self.nic.now());
                    if connection.is_confirmed.load(Ordering::Acquire) || left.is_zero() {
                        return Ok(Arc::clone(connection));
                    }
                    self.changed.wait_for(&mut state, left.min(INTERRUPTION_POLL));
                }
                ConnectionState::Opening(_) => {
                    let left = deadline.left(self.nic.now());
                    if left.is_zero() {
                        return Err(self.error("the deadline passed while devices were connected"));
                    }
                    self.changed.wait_for(&mut state, left.min(INTERRUPTION_POLL));
                }
                ConnectionState::Unconnected => break,
            }
        }
        let offer = self.offer()?;
        let offered = offer.offered();
        if self.own_path == self.peer_path {
            let address = &offered.address;
            let peer = PeerEnd {
                gid: address.gid(),
                lid: address.lid,
                numbers: offered.numbers.clone(),
                attempt: Some(self.identity.next(&offered)),
            };
            let connection = self.join(offer, peer, true)?;
            *state = ConnectionState::Connected(Arc::clone(&connection));
            return Ok(connection);
        }
        *state = ConnectionState::Opening(offer);
        drop(state);
        let opened = self.open(&offered, exchange, deadline);
        let mut state = self.state.lock();
        if opened.is_err() && matches!(*state, ConnectionState::Opening(_)) {
            *state = ConnectionState::Unconnected;
        }
        drop(state);
        self.changed.notify_all();
        opened
    }

    /// Sends the request and connects with the answer, unless the peer's own request did that meanwhile.
    fn open(
        &self,
        offered: &Offered,
        exchange: Exchange<'_>,
        deadline: Moment,
    ) -> Result<Arc<Connection>> {
        let request = self.hello(offered, Some(false));
        let answer =
            exchange(&request.to_json(), deadline).and_then(|text| Hello::from_json(&text));
        let mut state = self.state.lock();
        if let ConnectionState::Connected(connection) = &*state {
            // The peer has begun as well.
            let is_same = answer.as_ref().is_ok_and(|answer| connection.peer.is_of(answer));
            let was_offered = connection.own.set == offered.set;
            let connection = Arc::clone(connection);
            drop(state);
            if was_offered && is_same {
                self.confirm(&connection, exchange, deadline)?;
            }
            return Ok(connection);
        }
        let answer = self.check_answer(answer?)?;
        let ConnectionState::Opening(offer) =
            std::mem::replace(&mut *state, ConnectionState::Unconnected)
        else {
            return Err(self.error("the devices were disconnected while they were connected"));
        };
        let gid = parse_gid(&answer.local_gid)
            .ok_or_else(|| self.error("the peer's answer has no address"))?;
        let connection = self.join(offer, PeerEnd::new(gid, &answer), true)?;
        *state = ConnectionState::Connected(Arc::clone(&connection));
        drop(state);
        if answer.confirms() {
            self.confirm(&connection, exchange, deadline)?;
        }
        Ok(connection)
    }

    /// Tells the peer that this side receives.
    fn confirm(
        &self,
        connection: &Connection,
        exchange: Exchange<'_>,
        deadline: Moment,
    ) -> Result<()> {
        let confirmation = self.hello(&connection.own, Some(true));
        let answer = Hello::from_json(&exchange(&confirmation.to_json(), deadline)?)?;
        if !answer.reply_msg.is_empty() {
            return Err(self
                .error("the peer refused the confirmation")
                .with("answer", answer.reply_msg));
        }
        Ok(())
    }

    /// Answers a request or a confirmation of the peer.
    pub(crate) fn answer(&self, request: &Hello) -> Hello {
        if request.ready_ack == Some(true) {
            return self.record_confirmation(request);
        }
        let Some(gid) = parse_gid(&request.local_gid) else {
            return Hello::refusal(format!("Invalid peer GID: {}", request.local_gid));
        };
        if request.qp_num.len() != self.queue_pairs {
            return Hello::refusal(
                "QP count mismatch in peer and local endpoints, check MC_NUM_QP_PER_EP",
            );
        }
        let mut state = self.state.lock();
        let offer = match &*state {
            ConnectionState::Connected(connection)
                if connection.peer.is_of(request) && !connection.is_failed() =>
            {
                return self.accepted(connection, request);
            }
            ConnectionState::Connected(connection) if connection.is_newer_than(request) => {
                return Hello::refusal("a later request of this engine was answered before");
            }
            ConnectionState::Opening(_) => None,
            ConnectionState::Connected(_) | ConnectionState::Unconnected => match self.offer() {
                Ok(offer) => Some(offer),
                Err(error) => return Hello::refusal(error.to_string()),
            },
        };
        let old = std::mem::replace(&mut *state, ConnectionState::Unconnected);
        let (offer, old) = match (offer, old) {
            (Some(offer), old) => (offer, old),
            (None, ConnectionState::Opening(offer)) => (offer, ConnectionState::Unconnected),
            (None, _) => unreachable!("queue pairs are made in each other state"),
        };
        let answer = match self.join(offer, PeerEnd::new(gid, request), !request.confirms()) {
            Ok(connection) => {
                let answer = self.accepted(&connection, request);
                *state = ConnectionState::Connected(connection);
                answer
            }
            Err(error) => Hello::refusal(format!(
                "Failed to modify QP to RTR, check mtu, gid, peer lid, peer qp num: {error}"
            )),
        };
        drop(state);
        self.changed.notify_all();
        self.give_up(old);
        answer
    }

    fn record_confirmation(&self, request: &Hello) -> Hello {
        let state = self.state.lock();
        let answer = match &*state {
            ConnectionState::Connected(connection) if connection.peer.is_of(request) => {
                connection.is_confirmed.store(true, Ordering::Release);
                Hello::default()
            }
            ConnectionState::Connected(_) => {
                Hello::refusal("Received stale RDMA ready ACK with mismatched peer QP numbers")
            }
            _ => Hello::refusal("Received RDMA ready ACK for unconnected endpoint"),
        };
        drop(state);
        self.changed.notify_all();
        answer
    }

    fn accepted(&self, connection: &Connection, request: &Hello) -> Hello {
        self.hello(&connection.own, request.ready_ack.map(|_| false))
    }

    fn check_answer(&self, answer: Hello) -> Result<Hello> {
        if !answer.reply_msg.is_empty() {
            let text = "the peer refused to connect RDMA devices";
            return Err(self.error(text).with("answer", answer.reply_msg));
        }
        let is_mirrored =
            answer.local_nic_path == self.peer_path && answer.peer_nic_path == self.own_path;
        if !is_mirrored || answer.qp_num.len() != self.queue_pairs {
            return Err(self.error("the peer's answer is for other devices or queue pairs"));
        }
        Ok(answer)
    }

    fn hello(&self, offered: &Offered, ready_ack: Option<bool>) -> Hello {
        Hello {
            local_gid: format_gid(offered.address.gid()),
            local_lid: offered.address.lid,
            local_nic_path: self.own_path.clone(),
            peer_nic_path: self.peer_path.clone(),
            qp_num: offered.numbers.clone(),
            ready_ack,
            mooncake: Some(self.identity.next(offered)),
            ..Hello::default()
        }
    }

    /// Makes queue pairs to be connected from the address that the device has now.
    fn offer(&self) -> Result<Offer> {
        // Before the queue pairs: those of an older completion queue are found out by the generation.
        let address = self.nic.address();
        let queue_pairs = (0..self.queue_pairs).map(|_| self.nic.create_queue_pair());
        Ok(Offer {
            queue_pairs: queue_pairs.collect::<Result<_>>()?,
            set: self.identity.next_set(),
            address,
        })
    }

    /// Connects queue pairs with those of the peer.
    fn join(&self, offer: Offer, peer: PeerEnd, is_confirmed: bool) -> Result<Arc<Connection>> {
        let own = offer.offered();
        let own_settings = own.address.connection;
        // Upstream's engines serve as many reads as they begin.
        let served = peer.attempt.as_ref().map_or(0, |attempt| attempt.reads);
        let served = if served == 0 { own_settings.outgoing_reads } else { served };
        let settings = ConnectionSettings {
            outgoing_reads: own_settings.outgoing_reads.min(served),
            ..own_settings
        };
        self.load.reset(self.nic.now());
        let mut queues = Vec::new();
        for (queue_pair, number) in offer.queue_pairs.into_iter().zip(&peer.numbers) {
            let address = PeerAddress { gid: peer.gid, lid: peer.lid, queue_pair: *number };
            match queue_pair.connect(&address, &settings) {
                Ok(connected) => {
                    queues.push(self.nic.add_queue(connected, &self.load, &own.address));
                }
                Err(refused) => {
                    queues.iter().for_each(|queue| self.nic.remove_queue(queue));
                    return Err(self
                        .error("the devices cannot be connected")
                        .with("mtu", settings.mtu)
                        .caused_by(refused.error));
                }
            }
        }
        let since = self.nic.now();
        let is_confirmed = AtomicBool::new(is_confirmed);
        Ok(Arc::new(Connection { queues, own, peer, is_confirmed, since }))
    }

    /// Destroys the queue pairs of a connection that has failed. Returns how it ended, if there was one.
    pub(crate) fn drop_failed(&self) -> Option<Ended> {
        let mut state = self.state.lock();
        let ended = match &*state {
            ConnectionState::Connected(connection) if connection.is_failed() => connection.ended(),
            _ => return None,
        };
        let failed = std::mem::replace(&mut *state, ConnectionState::Unconnected);
        drop(state);
        self.give_up(failed);
        Some(ended)
    }

    /// Gives up the connection after a failure: what is in flight ends soon.
    pub(crate) fn fail(&self) {
        self.each_queue(SendQueue::fail);
    }

    /// Returns whether requests of a transfer are in flight.
    pub(crate) fn carries(&self, progress: &Arc<Progress>) -> bool {
        let queues = match &*self.state.lock() {
            ConnectionState::Connected(connection) => connection.queues.clone(),
            _ => return false,
        };
        queues.iter().any(|queue| queue.carries(progress))
    }

    /// Gives up the connection to end the requests of a transfer that ran out of time, soon. Others that
    /// have requests in flight here try them again.
    pub(crate) fn interrupt(&self) {
        self.each_queue(SendQueue::interrupt);
    }

    fn each_queue(&self, call: impl Fn(&SendQueue)) {
        if let ConnectionState::Connected(connection) = &*self.state.lock() {
            connection.queues.iter().for_each(|queue| call(queue));
        }
    }

    /// Asks the peer of a connection that was idle for long whether it is there. Returns whether there is no
    /// connection; one that has failed is given up if no link uses it.
    pub(crate) fn is_gone(&self, now: Moment, idle_max: Duration, is_unused: bool) -> bool {
        let Some(mut state) = self.state.try_lock() else { return false };
        let connection = match &*state {
            ConnectionState::Connected(connection) => Arc::clone(connection),
            ConnectionState::Unconnected => return true,
            ConnectionState::Opening(_) => return false,
        };
        if !connection.is_failed() && self.load.idle(now) >= idle_max {
            connection.queues.iter().for_each(|queue| queue.probe(&self.nic));
        }
        if !connection.is_failed() || !is_unused {
            return false;
        }
        let failed = std::mem::replace(&mut *state, ConnectionState::Unconnected);
        drop(state);
        self.give_up(failed);
        true
    }

    /// Destroys the queue pairs: what is in flight ends at once.
    pub(crate) fn disconnect(&self) {
        let state = std::mem::replace(&mut *self.state.lock(), ConnectionState::Unconnected);
        self.changed.notify_all();
        self.give_up(state);
    }

    fn give_up(&self, state: ConnectionState) {
        if let ConnectionState::Connected(connection) = state {
            connection.queues.iter().for_each(|queue| self.nic.remove_queue(queue));
        }
    }

    pub(crate) fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    pub(crate) fn health(&self) -> &Mutex<Health> {
        &self.health
    }

    pub(crate) fn load(&self) -> &Load {
        &self.load
    }

    /// Returns when the connection was made, if there is one.
    pub(crate) fn connected_since(&self) -> Option<Moment> {
        match &*self.state.lock() {
            ConnectionState::Connected(connection) => Some(connection.since),
            _ => None,
        }
    }

    fn error(&self, text: &str) -> Error {
        Error::new(ErrorCode::TRANSFER_FAIL, text)
            .with("device", &self.own_path)
            .with("peer", &self.peer_path)
    }
}

impl Connection {
    /// Posts slices of a round on the first queue that has a place.
    pub(crate) fn post(
        &self,
        nic: &Nic,
        remote: usize,
        round: &Arc<crate::round::Round>,
        from: u32,
    ) -> Posted {
        // Threads begin at different queues, so that they seldom meet.
        let begin = from as usize / 32 + thread_number();
        let mut outcome = Posted::Failed;
        for step in 0..self.queues.len() {
            let queue = &self.queues[(begin + step) % self.queues.len()];
            match queue.post(nic, remote, round, from) {
                Posted::Failed => return Posted::Failed,
                Posted::Busy => outcome = Posted::Busy,
                posted @ Posted::Slices(_) => return posted,
            }
        }
        outcome
    }

    fn is_failed(&self) -> bool {
        self.queues.iter().any(|queue| queue.is_failed())
    }

    fn ended(&self) -> Ended {
        if self.queues.iter().all(|queue| queue.is_interrupted()) {
            Ended::Interrupted
        } else {
            Ended::Failed
        }
    }

    /// Returns whether the request is of the same engine and was sent before the one that was answered.
    fn is_newer_than(&self, request: &Hello) -> bool {
        let attempts = self.peer.attempt.as_ref().zip(request.mooncake.as_ref());
        attempts.is_some_and(|(own, other)| own.engine == other.engine && own.number > other.number)
    }
}

/// Returns a number that differs between threads.
fn thread_number() -> usize {
    static LAST: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: usize = LAST.fetch_add(1, Ordering::Relaxed) as usize);
    NUMBER.with(|number| *number)
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.disconnect();
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("device", &self.own_path)
            .field("peer", &self.peer_path)
            .finish_non_exhaustive()
    }
}
