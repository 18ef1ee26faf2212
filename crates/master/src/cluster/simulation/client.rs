//! Clients: they put, remove and read at whichever member they believe leads, lend the pool's memory, and
//! remember what was acknowledged.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::{ClientId, Incarnation, KeyRef, Moment, SegmentId, TenantId, Version};
use mooncake_proto::v1::LogMark;

use super::{
    Simulation, TICK,
    bugs::Bug,
    history::{KEYS, PINNED, Value, key_name},
    node::{Part, leader_in},
    wire::{Message, is_call},
};
use crate::state::{
    LocateOptions, Place, Put, PutOptions, PutProgress, PutRef, PutStep, Rules, SegmentSpec,
    Started, State,
};

/// Number of clients.
pub(super) const CLIENTS: usize = 6;

/// Number of clients that lend memory.
const LENDERS: usize = 3;

/// Pages that each client lends.
const LENT_PAGES: u64 = 80;

/// Time within which an answer must come.
const TIMEOUT: Duration = Duration::from_millis(400);

/// Time that most writes take at most.
const QUICK_WRITE_MAX: Duration = Duration::from_millis(200);

/// Time for which a call that was refused is made again.
const REPEAT_MAX: Duration = Duration::from_secs(2);

/// Time within which the next leader grants memory after a leader has ended in order.
const TAKE_OVER_TIME: Duration = Duration::from_millis(700);

/// Time between signs of life.
const BEAT: Duration = Duration::from_millis(700);

/// A call.
#[derive(Debug, Clone)]
pub(super) enum Call {
    /// Registers the client, and announces its memory.
    Announce {
        mark: Option<LogMark>,
        spec: Box<SegmentSpec>,
        is_new: bool,
    },
    PutStart {
        key: usize,
        length: u64,
    },
    PutEnd {
        key: usize,
        version: Version,
    },
    Remove {
        key: usize,
    },
    Locate {
        key: usize,
    },
}

/// An answer.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    Announced {
        is_known: bool,
        mark: Option<LogMark>,
    },
    Started {
        version: Version,
        places: Vec<(u64, u64)>,
        /// The answer need not wait for the log.
        is_prepared: bool,
    },
    Done,
    Located {
        version: Version,
        places: Vec<(u64, u64)>,
        fence: Duration,
    },
    Absent,
    /// The call had no effect, or its effect is not known.
    Failed,
    /// This master does not lead.
    Refused,
    /// The call waits for memory, or until it is announced.
    Waiting,
}

/// A client.
#[derive(Debug)]
pub(super) struct Client {
    view: u64,
    target: Option<usize>,
    /// The view in which the memory was announced.
    session: Option<u64>,
    incarnation: u64,
    is_new_memory: bool,
    mark: Option<LogMark>,
    numbers: u64,
    /// The number of the awaited answer, the member that was asked, and when the client gives up.
    awaited: Option<OutstandingCall>,
    is_announcing: bool,
    /// The call of the operation, to be made again.
    last_call: Option<Call>,
    repeats: bool,
    /// The next call goes to any member.
    asks_any: bool,
    repeat_until: Moment,
    operation: Option<Operation>,
    reads: Vec<Read>,
    idle_until: Moment,
    beat_at: Moment,
    /// Answers that have arrived: number, view and content.
    pub(super) inbox: VecDeque<(u64, u64, Reply)>,
}

/// An answer that a client waits for.
#[derive(Debug, Clone, Copy)]
struct OutstandingCall {
    number: u64,
    /// The member that was asked, and the number of its process.
    to: usize,
    boot: u64,
    until: Moment,
}

#[derive(Debug, Clone)]
enum Operation {
    Start {
        key: usize,
        put: u32,
        asked: Moment,
    },
    Write {
        key: usize,
        put: u32,
        asked: Moment,
        at: Moment,
        version: Version,
        places: Vec<(u64, u64)>,
    },
    End {
        key: usize,
        put: u32,
    },
    Remove {
        key: usize,
    },
    Locate {
        key: usize,
        asked: Moment,
    },
}

/// The bytes of an object that are being read, beside other calls.
#[derive(Debug)]
struct Read {
    key: usize,
    at: Moment,
    /// The end of the fence.
    end: Moment,
    value: Value,
    places: Vec<(u64, u64)>,
}

impl Client {
    pub(super) fn new() -> Self {
        Self {
            view: 0,
            target: None,
            session: None,
            incarnation: 1,
            is_new_memory: true,
            mark: None,
            numbers: 0,
            awaited: None,
            is_announcing: false,
            last_call: None,
            repeats: false,
            asks_any: false,
            repeat_until: Moment::default(),
            operation: None,
            reads: Vec::new(),
            idle_until: Moment::default(),
            beat_at: Moment::default(),
            inbox: VecDeque::new(),
        }
    }

    /// Takes answers of any view from here on.
    pub(super) const fn restart_views(&mut self) {
        self.view = 0;
    }

    fn may_repeat(&self, now: Moment) -> bool {
        !self.is_announcing && self.operation.is_some() && !self.repeat_until.has_passed(now)
    }

    fn spec(&self, index: usize, page_bytes: u64) -> SegmentSpec {
        let name = format!("host-{index}:1");
        SegmentSpec {
            id: SegmentId::from_bits(index as u128 + 1),
            incarnation: Incarnation(self.incarnation),
            name: name.clone(),
            endpoint: name,
            base: (index as u64 + 1) << 40 | self.incarnation << 33,
            length: if index < LENDERS { LENT_PAGES * page_bytes } else { 0 },
            protocol: "tcp".to_owned(),
        }
    }
}

/// The rules of the masters.
pub(super) fn rules(write_window: Duration) -> Rules {
    Rules {
        client_ttl: Duration::from_secs(6),
        stop_max: Duration::from_secs(6),
        lease_ttl: Duration::from_millis(300),
        write_window,
        put_discard: write_window + Duration::from_millis(100),
        put_release: write_window + Duration::from_secs(12),
        resume_grace: Duration::from_secs(2),
        ..Rules::default()
    }
}

impl Call {
    /// Returns whether the answer waits for the log, as those of the service do. A put that starts in
    /// prepared memory does not wait either.
    pub(super) const fn waits_for_log(&self) -> bool {
        !matches!(self, Self::Locate { .. })
    }
}

impl Simulation {
    /// Lets a client take its answers and do what is next.
    pub(super) fn step_client(&mut self, index: usize) -> Result<(), String> {
        self.end_reads(index)?;
        let takes_earlier = self.plan.has(Bug::TakesEarlierViews);
        while let Some((number, view, reply)) = self.clients[index].inbox.pop_front() {
            let client = &mut self.clients[index];
            if client.awaited.take_if(|awaited| awaited.number == number).is_none() {
                continue;
            }
            // An answer of an earlier view is none.
            let is_earlier = view < client.view && !takes_earlier;
            if matches!(reply, Reply::Refused) || is_earlier {
                self.refused(index)?;
                continue;
            }
            if matches!(reply, Reply::Waiting) && client.may_repeat(self.now) {
                client.repeats = true;
                continue;
            }
            if view != client.view {
                client.view = view;
                client.session = None;
            }
            self.answered(index, Some((view, reply)))?;
        }
        if let Some(OutstandingCall { number, to, boot, until }) = self.clients[index].awaited {
            // The connection ends with the process.
            if self.nodes[to].boots != boot && self.nodes[to].process.is_none() {
                self.clients[index].awaited = None;
                return self.refused(index);
            }
            if until.has_passed(self.now) && !self.may_be_executed(index, number, to) {
                self.clients[index].awaited = None;
                return self.answered(index, None);
            }
            return Ok(());
        }
        if self.clients[index].session.is_none() || self.clients[index].beat_at.has_passed(self.now)
        {
            self.announce_memory(index);
            return Ok(());
        }
        if std::mem::take(&mut self.clients[index].repeats)
            && let Some(call) = self.clients[index].last_call.clone()
        {
            self.repeat(index, call);
            return Ok(());
        }
        match self.clients[index].operation.take() {
            Some(operation) => self.go_on(index, operation),
            None if self.clients[index].idle_until.has_passed(self.now) => {
                self.begin_operation(index);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Returns whether a change that was given up may still be executed, so that another one of its key
    /// must not begin.
    fn may_be_executed(&self, caller: usize, number: u64, to: usize) -> bool {
        let client = &self.clients[caller];
        let is_change =
            matches!(client.operation, Some(Operation::End { .. } | Operation::Remove { .. }));
        if client.is_announcing || !is_change {
            return false;
        }
        let node = &self.nodes[to];
        let owes = node.process.as_ref().is_some_and(
            |process| matches!(&process.part, Part::Leading(leader) if leader.owes(caller, number)),
        );
        owes || self.wire.carries_call(caller, number)
            || node.inbox.iter().any(|message| is_call(message, caller, number))
    }

    /// Makes the call of an operation.
    fn call_first(&mut self, index: usize, call: Call) {
        let client = &mut self.clients[index];
        client.last_call = Some(call.clone());
        client.repeat_until = self.now + REPEAT_MAX;
        self.call(index, call);
    }

    /// Makes the call of an operation again. Fences and write windows count from here on.
    fn repeat(&mut self, index: usize, call: Call) {
        let now = self.now;
        if let Some(Operation::Start { asked, .. } | Operation::Locate { asked, .. }) =
            &mut self.clients[index].operation
        {
            *asked = now;
        }
        self.call(index, call);
    }

    /// Lets a client make a call again that was not answered because the master does not lead, or has ended.
    fn refused(&mut self, index: usize) -> Result<(), String> {
        let client = &mut self.clients[index];
        if client.may_repeat(self.now) {
            (client.session, client.repeats) = (None, true);
            return Ok(());
        }
        self.answered(index, None)
    }

    fn call(&mut self, index: usize, call: Call) {
        let (now, any) = (self.now, self.random.below(self.nodes.len()));
        let client = &mut self.clients[index];
        let Some(mut to) = client.target else { return };
        if std::mem::take(&mut client.asks_any) {
            to = any;
        }
        client.numbers += 1;
        let number = client.numbers;
        let boot = self.nodes[to].boots;
        client.awaited = Some(OutstandingCall { number, to, boot, until: now + TIMEOUT });
        self.send(Message::Call { client: index, to, boot, number, call });
    }

    fn announce_memory(&mut self, index: usize) {
        if self.clients[index].session.is_none() {
            // It asks the service, or any member.
            let known = leader_in(&self.service.snapshot(self.now));
            let any = self.random.below(self.nodes.len());
            let target = if self.chance(8) { any } else { known.unwrap_or(any) };
            self.clients[index].target = Some(target);
        }
        let page_bytes = self.plan.page_bytes;
        let client = &mut self.clients[index];
        client.is_announcing = true;
        client.beat_at = self.now + BEAT;
        let spec = Box::new(client.spec(index, page_bytes));
        let is_new = client.is_new_memory;
        let mark = client.mark;
        self.call(index, Call::Announce { mark, spec, is_new });
    }

    fn begin_operation(&mut self, index: usize) {
        let key = self.random.below(KEYS);
        let own = key / CLIENTS * CLIENTS + index;
        match self.random.below(10) {
            0..=4 => {
                let put = self.history.new_put();
                let asked = self.now;
                self.clients[index].operation = Some(Operation::Start { key: own, put, asked });
                // Memory is prepared for small objects only.
                let pages = if self.chance(6) { 1 } else { 10 + self.random.below(22) as u64 };
                let length = pages * self.plan.page_bytes;
                self.call_first(index, Call::PutStart { key: own, length });
            }
            5 => {
                self.history.allow(own, Value::Absent);
                self.clients[index].operation = Some(Operation::Remove { key: own });
                self.call_first(index, Call::Remove { key: own });
            }
            _ => {
                // The member that was asked last may not lead any more, and another one may.
                let asks_any = self.chance(6);
                let key = if asks_any { own } else { key };
                self.clients[index].asks_any = asks_any;
                self.history.begin_read(index, key);
                self.clients[index].operation = Some(Operation::Locate { key, asked: self.now });
                self.call_first(index, Call::Locate { key });
            }
        }
    }

    /// Compares the bytes that were read in time.
    fn end_reads(&mut self, index: usize) -> Result<(), String> {
        let now = self.now;
        let is_due = |read: &mut Read| read.at.has_passed(now);
        for read in self.clients[index].reads.extract_if(.., is_due) {
            if !read.end.has_passed(now) {
                self.history.check_bytes(&read.places, read.value)?;
                self.outcome.reads += 1;
            }
        }
        Ok(())
    }

    /// Goes on with an operation that waited for a moment.
    fn go_on(&mut self, index: usize, operation: Operation) -> Result<(), String> {
        let now = self.now;
        let Operation::Write { at, .. } = &operation else { return Ok(()) };
        let write_max = self.write_max();
        if !at.has_passed(now) {
            self.clients[index].operation = Some(operation);
            return Ok(());
        }
        match operation {
            Operation::Write { asked, .. } if (asked + write_max).has_passed(now) => {}
            Operation::Write { key, put, version, places, .. } => {
                self.history.write(&places, put);
                self.history.allow(key, Value::Put(put));
                self.clients[index].operation = Some(Operation::End { key, put });
                self.call_first(index, Call::PutEnd { key, version });
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the time within which a client writes what it puts, by its own clock.
    fn write_max(&self) -> Duration {
        self.plan.write_window * 9 / 10
    }

    /// Handles an answer; `None`: there is none.
    fn answered(&mut self, index: usize, answer: Option<(u64, Reply)>) -> Result<(), String> {
        let now = self.now;
        if std::mem::take(&mut self.clients[index].is_announcing) {
            self.announced(index, answer);
            return Ok(());
        }
        let is_answered = match answer {
            None => false,
            Some((_, Reply::Failed)) => self.chance(3),
            Some(_) => true,
        };
        if !is_answered {
            // Whom to ask, and whether the memory is known there, is found out anew.
            self.clients[index].session = None;
        }
        self.clients[index].idle_until = now + self.milliseconds(80);
        let Some(operation) = self.clients[index].operation.take() else { return Ok(()) };
        match (operation, answer.map(|(_, reply)| reply)) {
            (
                Operation::Start { key, put, asked },
                Some(Reply::Started { version, places, .. }),
            ) => {
                let recorded = self.history.record_version(version, put);
                self.history.record_places(put, &places);
                let starts_unlogged =
                    self.plan.has(Bug::ReusesUnconfirmed) || self.plan.has(Bug::StartsUnlogged);
                // With these bugs, puts start before the log has their versions.
                if !starts_unlogged {
                    recorded?;
                }
                let is_slow = self.chance(3);
                let longest = if is_slow { self.write_max() } else { QUICK_WRITE_MAX };
                let at = now + self.milliseconds(longest.as_millis() as usize);
                let write = Operation::Write { key, put, asked, at, version, places };
                self.clients[index].operation = Some(write);
            }
            (Operation::End { .. }, None | Some(Reply::Failed)) => self.outcome.failed_ends += 1,
            (Operation::End { key, put }, Some(Reply::Done)) => {
                self.acknowledged(index, key, Value::Put(put));
            }
            (Operation::Remove { key }, Some(Reply::Done)) => {
                self.acknowledged(index, key, Value::Absent);
            }
            (Operation::Locate { key, asked }, Some(Reply::Located { version, places, fence })) => {
                let value = self.history.end_read(index, Some(version))?;
                // Clocks of masters run at most a twentieth faster.
                let end = asked + fence * 9 / 10;
                let left = end.left(now).saturating_sub(TICK * 2);
                let is_longest = self.chance(2);
                let time = if is_longest {
                    left
                } else {
                    self.milliseconds(left.as_millis() as usize + 1)
                };
                self.clients[index].reads.push(Read { key, at: now + time, end, value, places });
            }
            (Operation::Locate { .. }, Some(Reply::Absent)) => {
                self.history.end_read(index, None)?;
                self.outcome.absent += 1;
            }
            _ => {}
        }
        Ok(())
    }

    fn acknowledged(&mut self, index: usize, key: usize, value: Value) {
        let now = self.now;
        self.history.acknowledge(key, value);
        (self.served, self.outcome.acknowledged) = (now, self.outcome.acknowledged + 1);
        let is_freed = |read: &Read| read.key == key && read.end.left(now) > TAKE_OVER_TIME;
        let is_read = self.clients.iter().any(|client| client.reads.iter().any(is_freed));
        if is_read
            && self.happens(self.plan.faults.reader_shutdown)
            && let Some(leader) = self.clients[index].target
        {
            let pause = self.milliseconds(1500);
            self.shut_down(leader, pause);
        }
    }

    fn announced(&mut self, index: usize, answer: Option<(u64, Reply)>) {
        let now = self.now;
        let pause = self.milliseconds(100);
        let client = &mut self.clients[index];
        match answer {
            Some((view, Reply::Announced { is_known: true, mark })) => {
                client.session = Some(view);
                client.is_new_memory = false;
                client.mark = mark.or(client.mark);
            }
            Some((_, Reply::Announced { is_known: false, .. })) => {
                // The master does not know the memory, or has used it for others since.
                client.incarnation += 1;
                client.is_new_memory = true;
                client.session = None;
            }
            _ => {
                client.session = None;
                client.beat_at = now + pause;
            }
        }
    }
}

/// Executes a call, as a master does.
pub(super) fn execute(state: &mut State, now: Moment, client: usize, call: &Call) -> Reply {
    let id = ClientId::from_bits(client as u128 + 1);
    let tenant = TenantId::default();
    match call {
        Call::Announce { spec, is_new, .. } => announce(state, now, id, spec, *is_new),
        Call::PutStart { key, length } => start(state, now, id, *key, *length),
        Call::PutEnd { key, version } => {
            let name = key_name(*key);
            let (key, version) = (name.as_bytes(), *version);
            let put = PutRef { key, version, failed_replicas: &[], checksum: None };
            match state.puts().put_end(now, id, &tenant, put) {
                Ok(()) => Reply::Done,
                Err(_) => Reply::Failed,
            }
        }
        Call::Remove { key } => match state.remove(now, &tenant, key_name(*key).as_bytes(), true) {
            Ok(()) => Reply::Done,
            Err(_) => Reply::Failed,
        },
        Call::Locate { key } => locate(state, now, *key),
    }
}

fn announce(
    state: &mut State,
    now: Moment,
    client: ClientId,
    spec: &SegmentSpec,
    is_new: bool,
) -> Reply {
    if state.register(now, client, &spec.name).is_err() {
        return Reply::Failed;
    }
    if spec.length == 0 {
        return Reply::Announced { is_known: true, mark: None };
    }
    let announced =
        if is_new { state.mount(now, client, spec.clone()) } else { state.resume(client, spec) };
    Reply::Announced { is_known: announced.is_ok(), mark: None }
}

fn start(state: &mut State, now: Moment, client: ClientId, key: usize, length: u64) -> Reply {
    let name = key_name(key);
    let options = PutOptions { is_hard_pinned: key < PINNED, ..PutOptions::default() };
    let put = Put {
        key: KeyRef::new(name.as_bytes()).expect("a short key"),
        length,
        group: b"",
        options: &options,
        is_replacing: true,
        if_version: None,
        request: 0,
    };
    let mut progress = PutProgress::default();
    let mut reply = Reply::Failed;
    for _ in 0..4 {
        let step = state.puts().put_step(now, client, &TenantId::default(), &put, &mut progress);
        match step {
            Ok(PutStep::Started(started)) => {
                let places = places(state, &started.places);
                let Started { version, is_prepared, .. } = started;
                return Reply::Started { version, places, is_prepared };
            }
            Ok(PutStep::Pending(_)) => {
                reply = Reply::Waiting;
            }
            Err(_) => {
                reply = Reply::Failed;
                break;
            }
        }
    }
    state.puts().cancel_put(progress);
    reply
}

fn locate(state: &mut State, now: Moment, key: usize) -> Reply {
    if state.is_recovering(now) {
        return Reply::Waiting;
    }
    let options = LocateOptions { has_lease: true, has_fence: true };
    let mut located = state.locate(now, &TenantId::default(), &[key_name(key)], options);
    match located.objects.pop() {
        Some(Ok(object)) => {
            let places = places(state, &object.places[..1]);
            Reply::Located { version: object.version, places, fence: located.fence }
        }
        Some(Err(error)) if error.code() == mooncake_base::ErrorCode::OBJECT_NOT_FOUND => {
            Reply::Absent
        }
        _ => Reply::Failed,
    }
}

fn places(state: &State, places: &[Place]) -> Vec<(u64, u64)> {
    let address = |place: &Place| state.segment(place.segment).spec.base + place.offset;
    places.iter().map(|place| (address(place), place.length)).collect()
}
