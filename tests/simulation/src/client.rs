//! A process with a client: its segments, its operations, and its registration with the master.

use std::collections::BTreeMap;

use mooncake_base::{ClientId, ErrorCode, Incarnation, Moment, SegmentId};
use mooncake_master::state::SegmentSpec;
use mooncake_store_client::protocol::{CallNumbers, FenceReleases, OwnPuts};

use crate::{
    call::{Call, Reply, ReplyMessage},
    get::Get,
    plan::{Bug, WORD_BYTES},
    put::Put,
    repeated_call::{Progress, RepeatedCall, Request},
    settle::Settle,
    simulator::Simulator,
    task::TaskRunner,
};

/// A simulated client process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) client: ClientId,
    /// Segments that are mounted or about to be.
    pub(crate) segments: Vec<SegmentSpec>,
    /// The process does nothing before this time.
    pub(crate) stalled_until: Moment,
    /// The process cannot reach the master until this time.
    pub(crate) partitioned_until: Moment,
    /// Running operations by their unique number.
    pub(crate) running: BTreeMap<u64, Running>,
    /// The start number of the master that knows this client and its segments; 0 if none does.
    master: u64,
    /// The start number of the master with which the client is registering.
    registering_with: u64,
    /// The registration that the master returned.
    registration: u64,
    /// The sequence number of the last call about its segments.
    pub(crate) sequence: u64,
    /// The only operation that may make calls about the segments.
    exclusive: Option<u64>,
    /// The puts that are not closed.
    pub(crate) own_puts: OwnPuts,
    pub(crate) call_numbers: CallNumbers,
    /// The fences of finished reads.
    pub(crate) fence_releases: FenceReleases,
}

/// A running operation.
#[derive(Debug)]
pub(crate) struct Running {
    /// `None` while a step of the operation runs.
    pub(crate) op: Option<Op>,
    /// The call whose reply the operation waits for.
    pub(crate) attempt: u64,
    /// True if a worker starts the next operation when this one ends.
    pub(crate) is_work: bool,
}

/// An operation of a client.
#[derive(Debug)]
pub(crate) enum Op {
    Put(Put),
    Settle(Settle),
    Get(Box<Get>),
    Request(Request),
    Session(Session),
    Remount(Remount),
    RunTasks(TaskRunner),
}

/// An input of an operation.
#[derive(Debug)]
pub(crate) enum Input {
    Begin,
    /// The pause before a repetition of a call is over.
    Again,
    Reply(ReplyMessage),
    TimedOut,
    Wrote(bool),
    Read(Option<Vec<u64>>),
}

/// The operation if it continues. An error is a violated invariant.
pub(crate) type Step = Result<Option<Op>, String>;

/// A heartbeat, and the registration that follows if the master restarted or forgot the client.
#[derive(Debug)]
pub(crate) enum Session {
    Beating,
    Registering,
    /// Resumes the segment with this index.
    Resuming(usize),
    /// Mounts the segment with this index.
    Mounting(usize),
    /// Names the complete list of segments.
    Ending,
}

/// Unmounts one segment and mounts another.
#[derive(Debug)]
pub(crate) enum Remount {
    Begin,
    Unmounting(SegmentId, RepeatedCall),
    Mounting(SegmentSpec),
}

impl Process {
    pub(crate) fn new(number: u64) -> Self {
        Self {
            client: ClientId::from_bytes(&u128::from(number).to_be_bytes())
                .expect("sixteen bytes are an id"),
            segments: Vec::new(),
            stalled_until: Moment::default(),
            partitioned_until: Moment::default(),
            running: BTreeMap::new(),
            master: 0,
            registering_with: 0,
            registration: 0,
            sequence: 0,
            exclusive: None,
            own_puts: OwnPuts::default(),
            call_numbers: CallNumbers::default(),
            fence_releases: FenceReleases::default(),
        }
    }
}

impl Simulator {
    /// Allocates a new segment in a process.
    pub(crate) fn new_segment(&mut self, process: u64) -> SegmentSpec {
        self.segments += 1;
        let words = self.plan.segment_words;
        let id = SegmentId::from_bytes(&u128::from(self.segments).to_be_bytes())
            .expect("sixteen bytes are an id");
        self.memories.add(process, id, words);
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

    /// Runs one step of an operation.
    pub(crate) fn step_op(&mut self, caller: (u64, u64), op: Op, input: Input) -> Step {
        match op {
            Op::Put(put) => put.step(self, caller, input),
            Op::Settle(settle) => Ok(settle.step(self, caller, input).map(Op::Settle)),
            Op::Get(get) => get.step(self, caller, input),
            Op::Request(request) => Ok(request.step(self, caller, input).map(Op::Request)),
            Op::RunTasks(runner) => runner.step(self, caller, input),
            Op::Session(session) => {
                let next = self.step_session(caller, session, input).map(Op::Session);
                Ok(self.release_if_ended(caller.0, next))
            }
            Op::Remount(remount) => {
                let next = self.step_remount(caller, remount, input).map(Op::Remount);
                Ok(self.release_if_ended(caller.0, next))
            }
        }
    }

    fn release_if_ended(&mut self, process: u64, next: Option<Op>) -> Option<Op> {
        if next.is_none()
            && let Some(process) = self.processes.get_mut(&process)
        {
            process.exclusive = None;
        }
        next
    }

    /// Starts a heartbeat, unless another call about the segments is in progress.
    pub(crate) fn start_heartbeat(&mut self, process: u64) -> Result<(), String> {
        self.start_exclusive(process, Op::Session(Session::Beating))
    }

    /// Starts a remount, unless another call about the segments is in progress.
    pub(crate) fn start_remount(&mut self, process: u64) -> Result<(), String> {
        self.start_exclusive(process, Op::Remount(Remount::Begin))
    }

    /// Starts an operation that makes calls about the segments; one at a time per process.
    fn start_exclusive(&mut self, process: u64, op: Op) -> Result<(), String> {
        let number = self.next_number();
        let Some(found) = self.processes.get_mut(&process) else { return Ok(()) };
        if found.exclusive.is_some() {
            return Ok(());
        }
        found.exclusive = Some(number);
        self.start_op((process, number), op, false)
    }

    /// Handles a refused call: if the master does not know the client, schedules a heartbeat.
    pub(crate) fn handle_refusal(&mut self, process: u64, code: ErrorCode) {
        if code == ErrorCode::CLIENT_NOT_FOUND {
            self.heartbeat_soon(process);
        }
    }

    fn step_session(
        &mut self,
        caller: (u64, u64),
        session: Session,
        input: Input,
    ) -> Option<Session> {
        let reply = match input {
            Input::Begin => {
                let registration = self.processes.get(&caller.0)?.registration;
                self.call(caller, Call::Heartbeat(registration));
                return Some(Session::Beating);
            }
            Input::Reply(message) => message.reply,
            _ => return None,
        };
        let process = self.processes.get_mut(&caller.0)?;
        match (session, reply) {
            (Session::Beating, Reply::Session { master, is_known, .. }) => {
                if is_known && process.master == master {
                    self.fetch_soon(caller.0);
                    self.settle_soon(caller.0);
                    return None;
                }
                process.master = 0;
                self.call(caller, Call::Register);
                Some(Session::Registering)
            }
            (Session::Registering, Reply::Session { master, registration, .. }) => {
                (process.registering_with, process.registration) = (master, registration);
                self.resume_segment(caller, 0)
            }
            (Session::Resuming(index), Reply::Done) => self.resume_segment(caller, index + 1),
            (Session::Resuming(index), Reply::Failed(ErrorCode::SEGMENT_NOT_FOUND)) => {
                let old = process.segments.get(index)?.clone();
                if !self.plan.has(Bug::RemountsUsedMemory) {
                    self.memories.remove(old.id);
                    let fresh = self.new_segment(caller.0);
                    *self.processes.get_mut(&caller.0)?.segments.get_mut(index)? = fresh;
                    self.outcome.renewals += 1;
                }
                let segment = self.processes.get(&caller.0)?.segments.get(index)?.clone();
                self.call(caller, Call::Mount(segment));
                Some(Session::Mounting(index))
            }
            (Session::Ending, Reply::Done) => {
                process.master = process.registering_with;
                None
            }
            (Session::Mounting(index), Reply::Done) => self.resume_segment(caller, index + 1),
            _ => None,
        }
    }

    /// Resumes the segment with this index, or ends the registration after the last one.
    fn resume_segment(&mut self, caller: (u64, u64), index: usize) -> Option<Session> {
        let process = self.processes.get_mut(&caller.0)?;
        let Some(segment) = process.segments.get(index) else {
            let ids = process.segments.iter().map(|segment| segment.id).collect();
            self.call(caller, Call::RetainSegments(ids));
            return Some(Session::Ending);
        };
        let call = Call::Resume(segment.clone());
        self.call(caller, call);
        Some(Session::Resuming(index))
    }

    fn step_remount(
        &mut self,
        caller: (u64, u64),
        remount: Remount,
        input: Input,
    ) -> Option<Remount> {
        let process = self.processes.get_mut(&caller.0)?;
        match (remount, input) {
            (Remount::Begin, _) => {
                let id = process.segments.first()?.id;
                Some(Remount::Unmounting(id, RepeatedCall::send(self, caller, Call::Unmount(id))))
            }
            (Remount::Unmounting(id, mut call), input) => {
                let message = match call.step(self, caller, input) {
                    Progress::Waiting => return Some(Remount::Unmounting(id, call)),
                    Progress::Answered(message) => message,
                    Progress::GivenUp => {
                        let call = RepeatedCall::send(self, caller, Call::Unmount(id));
                        return Some(Remount::Unmounting(id, call));
                    }
                };
                let (Reply::Done | Reply::Failed(ErrorCode::SEGMENT_NOT_FOUND)) = message.reply
                else {
                    return None;
                };
                let process = self.processes.get_mut(&caller.0)?;
                process.segments.retain(|segment| segment.id != id);
                self.memories.remove(id);
                let segment = self.new_segment(caller.0);
                self.call(caller, Call::Mount(segment.clone()));
                Some(Remount::Mounting(segment))
            }
            (Remount::Mounting(segment), Input::Reply(message))
                if matches!(message.reply, Reply::Done) =>
            {
                process.segments.push(segment);
                None
            }
            (Remount::Mounting(segment), _) => {
                self.abandon_segment(caller.0, &segment);
                None
            }
        }
    }

    /// Abandons a segment of which it is unknown whether the master has mounted it. The next
    /// registration names the complete list, which resolves the doubt.
    fn abandon_segment(&mut self, process: u64, segment: &SegmentSpec) {
        self.memories.remove(segment.id);
        if let Some(process) = self.processes.get_mut(&process) {
            process.master = 0;
        }
    }
}
