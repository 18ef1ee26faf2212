//! A pair of devices, one of this process and one of a peer, and how the two are connected.
//!
//! Either side may begin. The one that begins sends its queue pair numbers, the other connects its own
//! queue pairs with them and answers with their numbers, the first connects as well and confirms. When both
//! begin at once, each answers with the queue pairs that it has offered itself, so that both end up with
//! the same pairs. A request with other numbers than the connected ones is from a peer that has started
//! again: the old queue pairs are given up.

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
use mooncake_verbs::{ConnectionSettings, Gid, PeerAddress, QueuePair};

use crate::{
    hello::{Attempt, Hello, format_gid, nic_path, parse_gid},
    nic::Nic,
    send_queue::{Load, Posted, SendQueue},
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
    state: Mutex<State>,
    changed: Condvar,
    load: Arc<Load>,
}

/// Names the requests of an engine.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) engine: String,
    attempts: AtomicU64,
}

#[derive(Debug)]
enum State {
    Unconnected,
    /// A request is under way, which offers these queue pairs.
    Opening(Vec<QueuePair>),
    Connected(Arc<Connection>),
}

/// Connected queue pairs.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) queues: Vec<Arc<SendQueue>>,
    own_numbers: Vec<u32>,
    peer_numbers: Vec<u32>,
    peer: Option<Attempt>,
    /// The peer is known to receive.
    is_confirmed: AtomicBool,
    since: Moment,
}

impl Identity {
    pub(crate) fn new(engine: String) -> Arc<Self> {
        Arc::new(Self { engine, attempts: AtomicU64::new(0) })
    }

    fn next(&self) -> Attempt {
        let number = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        Attempt { engine: self.engine.clone(), number }
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
            state: Mutex::new(State::Unconnected),
            changed: Condvar::default(),
            load: Arc::new(Load::new(nic.link_rate())),
        }
    }

    /// Returns the connection, if there is one that has not failed.
    pub(crate) fn connection(&self) -> Option<Arc<Connection>> {
        match &*self.state.lock() {
            State::Connected(connection) if !connection.is_failed() => Some(Arc::clone(connection)),
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
            match &*state {
                State::Connected(connection) if connection.is_failed() => {
                    drop(state);
                    self.drop_failed();
                    state = self.state.lock();
                }
                State::Connected(connection) => {
                    let confirm_until = connection.since + CONFIRMATION_TIMEOUT;
                    let left = confirm_until.min(deadline).left(self.nic.now());
                    if connection.is_confirmed.load(Ordering::Acquire) || left.is_zero() {
                        return Ok(Arc::clone(connection));
                    }
                    self.changed.wait_for(&mut state, left);
                }
                State::Opening(_) => {
                    let left = deadline.left(self.nic.now());
                    if left.is_zero() {
                        return Err(self.error("the deadline passed while devices were connected"));
                    }
                    self.changed.wait_for(&mut state, left.min(Duration::from_secs(3600)));
                }
                State::Unconnected => break,
            }
        }
        let queue_pairs = self.create_queue_pairs()?;
        if self.own_path == self.peer_path {
            let numbers: Vec<_> = queue_pairs.iter().map(QueuePair::number).collect();
            let peer = (self.nic.gid(), self.nic.lid(), numbers, None);
            let connection = self.join(queue_pairs, peer, true)?;
            *state = State::Connected(Arc::clone(&connection));
            return Ok(connection);
        }
        let numbers: Vec<_> = queue_pairs.iter().map(QueuePair::number).collect();
        *state = State::Opening(queue_pairs);
        drop(state);
        let opened = self.open(&numbers, exchange, deadline);
        let mut state = self.state.lock();
        if opened.is_err() && matches!(*state, State::Opening(_)) {
            *state = State::Unconnected;
        }
        drop(state);
        self.changed.notify_all();
        opened
    }

    /// Sends the request and connects with the answer, unless the peer's own request did that meanwhile.
    fn open(
        &self,
        numbers: &[u32],
        exchange: Exchange<'_>,
        deadline: Moment,
    ) -> Result<Arc<Connection>> {
        let request = self.hello(numbers, Some(false));
        let answer =
            exchange(&request.to_json(), deadline).and_then(|text| Hello::from_json(&text));
        let mut state = self.state.lock();
        if let State::Connected(connection) = &*state {
            // The peer has begun as well.
            let is_same =
                answer.as_ref().is_ok_and(|answer| answer.qp_num == connection.peer_numbers);
            let was_offered = connection.own_numbers == numbers;
            let connection = Arc::clone(connection);
            drop(state);
            if was_offered && is_same {
                self.confirm(&connection, exchange, deadline)?;
            }
            return Ok(connection);
        }
        let answer = self.check_answer(answer?)?;
        let State::Opening(queue_pairs) = std::mem::replace(&mut *state, State::Unconnected) else {
            return Err(self.error("the devices were disconnected while they were connected"));
        };
        let gid = parse_gid(&answer.local_gid)
            .ok_or_else(|| self.error("the peer's answer has no address"))?;
        let peer = (gid, answer.local_lid, answer.qp_num.clone(), answer.mooncake.clone());
        let connection = self.join(queue_pairs, peer, true)?;
        *state = State::Connected(Arc::clone(&connection));
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
        let confirmation = self.hello(&connection.own_numbers, Some(true));
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
        let queue_pairs = match &*state {
            State::Connected(connection) if connection.peer_numbers == request.qp_num => {
                return self.accepted(connection, request);
            }
            State::Connected(connection) if connection.is_newer_than(request) => {
                return Hello::refusal("a later request of this engine was answered before");
            }
            State::Opening(_) => None,
            State::Connected(_) | State::Unconnected => match self.create_queue_pairs() {
                Ok(queue_pairs) => Some(queue_pairs),
                Err(error) => return Hello::refusal(error.to_string()),
            },
        };
        let old = std::mem::replace(&mut *state, State::Unconnected);
        let (queue_pairs, old) = match (queue_pairs, old) {
            (None, State::Opening(queue_pairs)) => (queue_pairs, State::Unconnected),
            (queue_pairs, old) => (queue_pairs.unwrap_or_default(), old),
        };
        let peer = (gid, request.local_lid, request.qp_num.clone(), request.mooncake.clone());
        let answer = match self.join(queue_pairs, peer, !request.confirms()) {
            Ok(connection) => {
                let answer = self.accepted(&connection, request);
                *state = State::Connected(connection);
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
            State::Connected(connection) if connection.peer_numbers == request.qp_num => {
                connection.is_confirmed.store(true, Ordering::Release);
                Hello::default()
            }
            State::Connected(_) => {
                Hello::refusal("Received stale RDMA ready ACK with mismatched peer QP numbers")
            }
            _ => Hello::refusal("Received RDMA ready ACK for unconnected endpoint"),
        };
        drop(state);
        self.changed.notify_all();
        answer
    }

    fn accepted(&self, connection: &Connection, request: &Hello) -> Hello {
        self.hello(&connection.own_numbers, request.ready_ack.map(|_| false))
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

    fn hello(&self, numbers: &[u32], ready_ack: Option<bool>) -> Hello {
        Hello {
            local_gid: format_gid(self.nic.gid()),
            local_lid: self.nic.lid(),
            local_nic_path: self.own_path.clone(),
            peer_nic_path: self.peer_path.clone(),
            qp_num: numbers.to_vec(),
            ready_ack,
            mooncake: Some(self.identity.next()),
            ..Hello::default()
        }
    }

    fn create_queue_pairs(&self) -> Result<Vec<QueuePair>> {
        (0..self.queue_pairs).map(|_| self.nic.create_queue_pair()).collect()
    }

    /// Connects queue pairs with those of the peer.
    fn join(
        &self,
        queue_pairs: Vec<QueuePair>,
        (gid, lid, numbers, peer): (Gid, u16, Vec<u32>, Option<Attempt>),
        is_confirmed: bool,
    ) -> Result<Arc<Connection>> {
        let own_numbers = queue_pairs.iter().map(QueuePair::number).collect();
        let settings: &ConnectionSettings = self.nic.connection();
        let mut queues = Vec::new();
        for (queue_pair, number) in queue_pairs.into_iter().zip(&numbers) {
            let address = PeerAddress { gid, lid, queue_pair: *number };
            match queue_pair.connect(&address, settings) {
                Ok(connected) => queues.push(self.nic.add_queue(connected, &self.load)),
                Err(refused) => {
                    queues.iter().for_each(|queue| self.nic.remove_queue(queue));
                    return Err(self
                        .error("the devices cannot be connected")
                        .with("mtu", self.nic.mtu())
                        .caused_by(refused.error));
                }
            }
        }
        self.load.reset();
        let since = self.nic.now();
        let is_confirmed = AtomicBool::new(is_confirmed);
        let peer_numbers = numbers;
        Ok(Arc::new(Connection { queues, own_numbers, peer_numbers, peer, is_confirmed, since }))
    }

    /// Destroys the queue pairs of a connection that has failed. Returns whether there was one.
    pub(crate) fn drop_failed(&self) -> bool {
        let mut state = self.state.lock();
        let is_failed = matches!(&*state, State::Connected(connection) if connection.is_failed());
        if is_failed {
            let failed = std::mem::replace(&mut *state, State::Unconnected);
            drop(state);
            self.give_up(failed);
        }
        is_failed
    }

    /// Gives up the connection after a failure: what is in flight ends soon.
    pub(crate) fn fail(&self) {
        if let State::Connected(connection) = &*self.state.lock() {
            connection.queues.iter().for_each(|queue| queue.fail());
        }
    }

    /// Destroys the queue pairs: what is in flight ends at once.
    pub(crate) fn disconnect(&self) {
        let state = std::mem::replace(&mut *self.state.lock(), State::Unconnected);
        self.changed.notify_all();
        self.give_up(state);
    }

    fn give_up(&self, state: State) {
        if let State::Connected(connection) = state {
            connection.queues.iter().for_each(|queue| self.nic.remove_queue(queue));
        }
    }

    pub(crate) fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    pub(crate) fn load(&self) -> &Load {
        &self.load
    }

    /// Returns when the connection was made, if there is one.
    pub(crate) fn connected_since(&self) -> Option<Moment> {
        match &*self.state.lock() {
            State::Connected(connection) => Some(connection.since),
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

    /// Returns whether the request is of the same engine and was sent before the one that was answered.
    fn is_newer_than(&self, request: &Hello) -> bool {
        let attempts = self.peer.as_ref().zip(request.mooncake.as_ref());
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
