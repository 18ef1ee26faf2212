//! A process with a client: what it lends, what it is doing, and how it keeps known to the master.

use std::collections::BTreeMap;

use mooncake_base::{ClientId, ErrorCode, Incarnation, Moment, SegmentId};
use mooncake_master::state::SegmentSpec;

use crate::{
    call::{Answer, Call, Reply},
    get::Get,
    plan::{Bug, WORD_BYTES},
    put::Put,
    task::Carry,
    world::World,
};

/// A process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) client: ClientId,
    /// What it lends, or means to.
    pub(crate) segments: Vec<SegmentSpec>,
    /// Does nothing before then.
    pub(crate) stalled: Moment,
    /// Reaches no master before then.
    pub(crate) cut_off: Moment,
    /// What it is doing, by a number that is never used again.
    pub(crate) running: BTreeMap<u64, Running>,
    /// The master that knows it and its segments; 0: none.
    master: u64,
    /// The one it is making itself known to.
    greeted: u64,
    /// Which time that one came to know of it.
    registration: u64,
    /// How often it has announced its memory.
    pub(crate) turn: u64,
    /// The one thing that may speak for its session.
    session: Option<u64>,
}

/// Something a client is doing.
#[derive(Debug)]
pub(crate) struct Running {
    /// None while it is being looked at.
    pub(crate) op: Option<Op>,
    /// The call whose answer it waits for.
    pub(crate) attempt: u64,
    /// Whether its end is the beginning of something else.
    pub(crate) is_work: bool,
}

/// What a client may be doing.
#[derive(Debug)]
pub(crate) enum Op {
    Put(Put),
    Get(Get),
    Remove(Call),
    Session(Session),
    Remount(Remount),
    Wish(Call),
    Carry(Carry),
}

/// What something waited for.
#[derive(Debug)]
pub(crate) enum Input {
    Begin,
    Answer(Answer),
    TimedOut,
    Wrote(bool),
    Read(Option<Vec<u64>>),
}

/// What remains to be done; an error is something that must not be.
pub(crate) type Step = Result<Option<Op>, String>;

/// Keeping known: a heartbeat, and what follows if the master is another one or has forgotten.
#[derive(Debug)]
pub(crate) enum Session {
    Beating,
    Registering,
    /// Announcing the memory with that index as what it was.
    Resuming(usize),
    /// Lending the memory with that index.
    Mounting(usize),
    /// Saying that this is all.
    Ending,
}

/// Taking one segment back and lending another.
#[derive(Debug)]
pub(crate) enum Remount {
    Begin,
    Unmounting(SegmentId),
    Mounting(SegmentSpec),
}

impl Process {
    pub(crate) fn new(number: u64) -> Self {
        Self {
            client: ClientId::from_bytes(&u128::from(number).to_be_bytes())
                .expect("sixteen bytes are an id"),
            segments: Vec::new(),
            stalled: Moment::default(),
            cut_off: Moment::default(),
            running: BTreeMap::new(),
            master: 0,
            greeted: 0,
            registration: 0,
            turn: 0,
            session: None,
        }
    }
}

impl World {
    /// A segment of new memory of that process.
    pub(crate) fn lend(&mut self, process: u64) -> SegmentSpec {
        self.segments += 1;
        let words = self.plan.segment_words;
        let id = SegmentId::from_bytes(&u128::from(self.segments).to_be_bytes())
            .expect("sixteen bytes are an id");
        self.memories.lend(process, id, words);
        SegmentSpec {
            id,
            incarnation: Incarnation(1),
            name: format!("host-{process}:1"),
            endpoint: format!("host-{process}:1"),
            base: self.segments << 32,
            length: words * WORD_BYTES,
            protocol: "tcp".to_owned(),
        }
    }

    /// One step of what a process is doing.
    pub(crate) fn step(&mut self, me: (u64, u64), op: Op, input: Input) -> Step {
        match op {
            Op::Put(put) => put.step(self, me, input),
            Op::Get(get) => get.step(self, me, input),
            Op::Remove(call) => Ok(self.step_remove(me, call, input)),
            Op::Wish(call) => Ok(self.step_wish(me, call, input)),
            Op::Carry(carry) => carry.step(self, me, input),
            Op::Session(session) => {
                let next = self.next_of_session(me, session, input).map(Op::Session);
                Ok(self.keep_turn(me.0, next))
            }
            Op::Remount(remount) => {
                let next = self.next_of_remount(me, remount, input).map(Op::Remount);
                Ok(self.keep_turn(me.0, next))
            }
        }
    }

    fn keep_turn(&mut self, process: u64, next: Option<Op>) -> Option<Op> {
        if next.is_none()
            && let Some(process) = self.processes.get_mut(&process)
        {
            process.session = None;
        }
        next
    }

    /// Begins a heartbeat unless the process is at it.
    pub(crate) fn beat(&mut self, process: u64) -> Result<(), String> {
        self.take_turn(process, Op::Session(Session::Beating))
    }

    /// Begins to take one segment back and to lend another, unless the process announces already.
    pub(crate) fn remount(&mut self, process: u64) -> Result<(), String> {
        self.take_turn(process, Op::Remount(Remount::Begin))
    }

    /// One thing at a time announces the memory of a process.
    fn take_turn(&mut self, process: u64, op: Op) -> Result<(), String> {
        let number = self.number();
        let Some(found) = self.processes.get_mut(&process) else { return Ok(()) };
        if found.session.is_some() {
            return Ok(());
        }
        found.session = Some(number);
        self.begin((process, number), op, false)
    }

    /// A call was refused: if the master does not know the process, it says hello at once.
    pub(crate) fn refused(&mut self, process: u64, code: ErrorCode) {
        if code == ErrorCode::CLIENT_NOT_FOUND {
            self.beat_soon(process);
        }
    }

    fn step_remove(&mut self, me: (u64, u64), call: Call, input: Input) -> Option<Op> {
        match input {
            Input::Begin => {
                self.call(me, call.clone());
                Some(Op::Remove(call))
            }
            Input::Answer(Answer { reply: Reply::Done, facts }) => {
                self.outcome.removals += 1;
                self.truth.tell(self.now, facts);
                None
            }
            _ => None,
        }
    }

    fn next_of_session(
        &mut self,
        me: (u64, u64),
        session: Session,
        input: Input,
    ) -> Option<Session> {
        let reply = match input {
            Input::Begin => {
                let registration = self.processes.get(&me.0)?.registration;
                self.call(me, Call::Heartbeat(registration));
                return Some(Session::Beating);
            }
            Input::Answer(answer) => answer.reply,
            _ => return None,
        };
        let process = self.processes.get_mut(&me.0)?;
        match (session, reply) {
            (Session::Beating, Reply::Session { master, is_known, .. }) => {
                if is_known && process.master == master {
                    self.fetch_soon(me.0);
                    return None;
                }
                process.master = 0;
                self.call(me, Call::Register);
                Some(Session::Registering)
            }
            (Session::Registering, Reply::Session { master, registration, .. }) => {
                (process.greeted, process.registration) = (master, registration);
                self.announce(me, 0)
            }
            (Session::Resuming(index), Reply::Done) => self.announce(me, index + 1),
            (Session::Resuming(index), Reply::Failed(ErrorCode::SEGMENT_NOT_FOUND)) => {
                let old = process.segments.get(index)?.clone();
                if !self.plan.has(Bug::LendsUsedMemory) {
                    self.memories.withdraw(old.id);
                    let fresh = self.lend(me.0);
                    *self.processes.get_mut(&me.0)?.segments.get_mut(index)? = fresh;
                    self.outcome.renewals += 1;
                }
                let segment = self.processes.get(&me.0)?.segments.get(index)?.clone();
                self.call(me, Call::Mount(segment));
                Some(Session::Mounting(index))
            }
            (Session::Ending, Reply::Done) => {
                process.master = process.greeted;
                None
            }
            (Session::Mounting(index), Reply::Done) => self.announce(me, index + 1),
            _ => None,
        }
    }

    /// Announces the segment with that index, or is done.
    fn announce(&mut self, me: (u64, u64), index: usize) -> Option<Session> {
        let process = self.processes.get_mut(&me.0)?;
        let Some(segment) = process.segments.get(index) else {
            let ids = process.segments.iter().map(|segment| segment.id).collect();
            self.call(me, Call::All(ids));
            return Some(Session::Ending);
        };
        let call = Call::Resume(segment.clone());
        self.call(me, call);
        Some(Session::Resuming(index))
    }

    fn next_of_remount(
        &mut self,
        me: (u64, u64),
        remount: Remount,
        input: Input,
    ) -> Option<Remount> {
        let process = self.processes.get_mut(&me.0)?;
        let next = match (remount, input) {
            (Remount::Begin, Input::Begin) => {
                let segment = process.segments.first()?.id;
                self.call(me, Call::Unmount(segment));
                Remount::Unmounting(segment)
            }
            (Remount::Unmounting(id), Input::Answer(answer)) => {
                if !matches!(
                    answer.reply,
                    Reply::Done | Reply::Failed(ErrorCode::SEGMENT_NOT_FOUND)
                ) {
                    return None;
                }
                process.segments.retain(|segment| segment.id != id);
                self.memories.withdraw(id);
                let segment = self.lend(me.0);
                self.call(me, Call::Mount(segment.clone()));
                Remount::Mounting(segment)
            }
            (Remount::Mounting(segment), Input::Answer(answer)) => {
                match answer.reply {
                    Reply::Done => process.segments.push(segment),
                    _ => self.give_up(me.0, &segment),
                }
                return None;
            }
            (Remount::Unmounting(id), Input::TimedOut) => {
                self.call(me, Call::Unmount(id));
                Remount::Unmounting(id)
            }
            (Remount::Mounting(segment), Input::TimedOut) => {
                self.give_up(me.0, &segment);
                return None;
            }
            _ => return None,
        };
        Some(next)
    }

    /// Nobody knows whether the master has the segment; what it is told next sets it right.
    fn give_up(&mut self, process: u64, segment: &SegmentSpec) {
        self.memories.withdraw(segment.id);
        if let Some(process) = self.processes.get_mut(&process) {
            process.master = 0;
        }
    }
}
