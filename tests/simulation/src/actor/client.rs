//! A process with a client: its segments, its operations, and its registration with the master.

use std::collections::BTreeMap;

use mooncake_base::{ClientId, Incarnation, Moment, SegmentId};
use mooncake_master::state::SegmentSpec;
use mooncake_store_client::protocol::{CallNumbers, FenceReleases, OwnPuts, Session};

use crate::{
    call::ReplyMessage,
    get::Get,
    plan::WORD_BYTES,
    put::Put,
    repeated_call::Request,
    session::{Heartbeat, SegmentChange},
    settle::Settle,
    simulator::Simulator,
    task::TaskRunner,
};

/// A simulated client process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) client: ClientId,
    /// The mounted segments.
    pub(crate) segments: Vec<SegmentSpec>,
    /// The process does nothing before this time.
    pub(crate) stalled_until: Moment,
    /// The process cannot reach the master until this time.
    pub(crate) partitioned_until: Moment,
    /// Running operations by their unique number.
    pub(crate) running: BTreeMap<u64, Running>,
    pub(crate) session: Session,
    /// The number of segments that the process lends when it is connected.
    pub(crate) wanted_segments: usize,
    /// The time of the next heartbeat.
    pub(crate) next_heartbeat: Moment,
    /// True while a heartbeat or the registration after it runs.
    pub(crate) is_beating: bool,
    /// The only operation that may make calls about the segments.
    pub(crate) exclusive: Option<u64>,
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
    Heartbeat(Heartbeat),
    SegmentChange(SegmentChange),
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

impl Process {
    pub(crate) fn new(number: u64) -> Self {
        Self {
            client: ClientId::from_bytes(&u128::from(number).to_be_bytes())
                .expect("sixteen bytes are an id"),
            segments: Vec::new(),
            stalled_until: Moment::default(),
            partitioned_until: Moment::default(),
            running: BTreeMap::new(),
            session: Session::default(),
            wanted_segments: 0,
            next_heartbeat: Moment::default(),
            is_beating: false,
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
            Op::Heartbeat(heartbeat) => {
                let next = heartbeat.step(self, caller, input);
                if next.is_none() {
                    self.unlock_announcements(caller);
                }
                Ok(next.map(Op::Heartbeat))
            }
            Op::SegmentChange(change) => {
                let next = change.step(self, caller, input);
                if next.is_none() {
                    self.unlock_announcements(caller);
                }
                Ok(next.map(Op::SegmentChange))
            }
        }
    }
}
