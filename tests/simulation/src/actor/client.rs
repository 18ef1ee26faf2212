//! A process with a client: its segments, its operations, and its registration with the master.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mooncake_base::{ClientId, Incarnation, Moment, SegmentId};
use mooncake_master::state::SegmentSpec;
use mooncake_store_client::protocol::{CallNumbers, FenceReleases, OwnPuts, Session};

use crate::{
    actor::connections::Connections,
    actor::directory_owner::{DirectoryOwner, OwnDirectory},
    actor::get::Get,
    actor::put::Put,
    actor::repeated_call::Request,
    actor::session::{Heartbeat, SegmentChange},
    actor::settle::Settle,
    actor::task::TaskRunner,
    call::ReplyMessage,
    directory::Loaded,
    plan::WORD_BYTES,
    simulator::Simulator,
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
    pub(crate) connections: Connections,
    /// The difference of the clock of the host to that of the master.
    pub(crate) clock_ahead: Duration,
    /// Until then injected faults may have kept heartbeats away.
    pub(crate) impaired_until: Moment,
    /// The master knows the segments of the process.
    pub(crate) is_registered: bool,
    /// The segments that the process asked to unmount.
    pub(crate) unmounting: BTreeSet<SegmentId>,
    /// The ends of the grace of those that are still there.
    pub(crate) leaving: BTreeMap<SegmentId, Moment>,
    /// The directory of records that the process has open.
    pub(crate) directory: Option<OwnDirectory>,
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
    Directory(DirectoryOwner),
}

/// An input of an operation.
#[derive(Debug)]
pub(crate) enum Input {
    Begin,
    /// The pause before a repetition of a call is over.
    Again,
    Reply(ReplyMessage),
    TimedOut,
    /// A piece was written, or its memory is gone.
    Wrote {
        piece: u64,
        is_written: bool,
    },
    /// A piece was not confirmed in time.
    Silent {
        piece: u64,
    },
    Read(Option<Vec<u64>>),
    /// What became of the read of a record; `None`: its owner cannot be reached.
    Loaded(Option<Loaded>),
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
            connections: Connections::new(1),
            clock_ahead: Duration::ZERO,
            impaired_until: Moment::default(),
            is_registered: false,
            unmounting: BTreeSet::new(),
            leaving: BTreeMap::new(),
            directory: None,
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
        let base = self.segments << 32;
        self.memories.add(process, id, base, words);
        SegmentSpec {
            id,
            incarnation: Incarnation(1),
            name: format!("host-{process}:1"),
            endpoint: format!("host-{process}:1"),
            base,
            length: words * WORD_BYTES,
            protocol: "tcp".to_owned(),
        }
    }
}
