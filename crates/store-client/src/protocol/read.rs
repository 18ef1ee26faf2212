//! Reads located objects: decides which replica is read next, whether the bytes that were read count,
//! and when a read is given up. Works on the objects of one batch, by their numbers.
//!
//! Bytes count if the memory belonged to the object during the whole transfer: the transfer ended
//! within the fence, or the master confirms afterwards that the replica still exists. Records on disk
//! name their version, and need neither.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, ErrorKind, Moment, ReplicaId, Result, SegmentId, Version};
use smallvec::SmallVec;

use super::STALL_LIMIT;

/// The next step of reading objects. Each step concerns all objects that need it now.
#[derive(Debug, PartialEq, Eq)]
pub enum ReadStep {
    /// Read each of these objects from one replica, by its place in the master's answer. A replica
    /// that moves no byte for the time `stall` has failed. Report with [`ReadObjects::transferred`].
    Transfer {
        /// The objects, and the places to read.
        reads: SmallVec<[(usize, usize); 1]>,
        /// The limit on the time without a moved byte; `None`: the deadline only.
        stall: Option<Duration>,
    },
    /// The transfers of these objects ended after their fence: ask the master whether the replicas
    /// that were read still exist. Report with [`ReadObjects::verified`].
    Verify(Vec<(usize, ReplicaId)>),
    /// Compare the bytes of these objects with their checksums. Report with
    /// [`ReadObjects::compared`].
    CompareChecksums(Vec<(usize, ReplicaId)>),
    /// Locate these objects again. Report with [`ReadObjects::relocated`].
    Locate(Vec<usize>),
    /// All objects are read or have failed.
    Done,
}

/// A located object, as far as decisions depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadSource {
    /// The version of the object.
    pub version: Version,
    /// The length of the object.
    pub length: u64,
    /// When the fence ends for the reader.
    pub fence_end: Moment,
    /// All replicas, the best one first.
    pub replicas: SmallVec<[ReadReplica; 1]>,
    /// Whether the bytes are compared with a checksum.
    pub has_checksum: bool,
}

/// A replica that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadReplica {
    /// The place in the master's answer.
    pub place: usize,
    /// The id.
    pub replica: ReplicaId,
    /// The segment that holds it.
    pub segment: SegmentId,
    /// Whether it is a record on disk. Who reads such a record compares its version and checksums, so
    /// that its bytes count whenever they arrive.
    pub is_on_disk: bool,
}

/// The bytes of an object that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadExtent {
    /// All bytes, of this version or a later one of the same length.
    Whole,
    /// This number of bytes. They come from the located version, since the caller combines parts.
    Part(u64),
}

/// Reads a batch of located objects.
#[derive(Debug)]
pub struct ReadObjects {
    deadline: Moment,
    objects: SmallVec<[ObjectRead; 1]>,
    /// The stall limit of the transfers that were started last.
    stall: Option<Duration>,
    /// How often silent holders were tried again.
    silent_rounds: u32,
    /// Whether failed objects were located again.
    is_relocated: bool,
}

/// The read of one object.
#[derive(Debug)]
struct ObjectRead {
    source: ReadSource,
    extent: ReadExtent,
    /// The replica that is read now or was read last.
    current: usize,
    /// Number of replicas tried so far.
    tried: usize,
    /// Replicas whose holder was silent. They are tried again with more patience when no other
    /// replica could be read.
    silent: SmallVec<[usize; 1]>,
    state: ReadState,
}

#[derive(Debug)]
enum ReadState {
    /// The next replica is to be read.
    Open,
    /// Read after the end of the fence.
    Late,
    /// Read while the memory belonged to the object, and to be compared with the checksum.
    Unchecked,
    Done,
    Failed(Error),
}

impl ReadObjects {
    /// No objects. Reads that are added fail after `deadline`.
    pub fn new(deadline: Moment) -> Self {
        let objects = SmallVec::new();
        Self { deadline, objects, stall: None, silent_rounds: 0, is_relocated: false }
    }

    /// The time after which nothing is tried any more.
    pub fn deadline(&self) -> Moment {
        self.deadline
    }

    /// Gives the reads more time, since bytes have arrived. An earlier deadline changes nothing.
    pub fn extend_deadline(&mut self, deadline: Moment) {
        self.deadline = self.deadline.max(deadline);
    }

    /// Adds an object to read.
    pub fn push(&mut self, source: ReadSource, extent: ReadExtent) {
        self.objects.push(ObjectRead::new(source, extent));
    }

    /// Adds an object that cannot be read.
    pub fn push_refused(&mut self, error: Error) {
        let replicas = SmallVec::new();
        let (version, fence_end) = (Version(0), Moment::default());
        let source = ReadSource { version, length: 0, fence_end, replicas, has_checksum: false };
        let mut refused = ObjectRead::new(source, ReadExtent::Part(0));
        refused.state = ReadState::Failed(error);
        self.objects.push(refused);
    }

    /// Returns the next step.
    pub fn next_step(&mut self, now: Moment) -> ReadStep {
        if let Some(step) = self.next_transfers().or_else(|| self.next_silent_transfers(now)) {
            return step;
        }
        let late = self.replicas_in(|state| matches!(state, ReadState::Late));
        if !late.is_empty() {
            return ReadStep::Verify(late);
        }
        let unchecked = self.replicas_in(|state| matches!(state, ReadState::Unchecked));
        if !unchecked.is_empty() {
            return ReadStep::CompareChecksums(unchecked);
        }
        if self.is_relocated || self.deadline.has_passed(now) {
            return ReadStep::Done;
        }
        self.is_relocated = true;
        let failed = self.objects.iter().enumerate().filter(|(_, object)| object.is_retryable());
        let failed: Vec<usize> = failed.map(|(at, _)| at).collect();
        if failed.is_empty() { ReadStep::Done } else { ReadStep::Locate(failed) }
    }

    /// Reports the end of a transfer at `now`. Returns whether it failed and another replica is read
    /// instead.
    pub fn transferred(&mut self, object: usize, outcome: Result<()>, now: Moment) -> bool {
        let (stall, deadline) = (self.stall, self.deadline);
        let read = &mut self.objects[object];
        let Err(error) = outcome else {
            let has_fence = !read.source.replicas[read.current].is_on_disk;
            read.state = if has_fence && read.source.fence_end.has_passed(now) {
                ReadState::Late
            } else {
                read.state_of_current_bytes()
            };
            return false;
        };
        read.record_silence(error.kind() == ErrorKind::Timeout && stall.is_some());
        if read.has_untried_replica() && !deadline.has_passed(now) {
            return true;
        }
        read.state = ReadState::Failed(error);
        false
    }

    /// Reports whether the replica that was read still exists, as the master says.
    pub fn verified(&mut self, object: usize, exists: Result<bool>) {
        let read = &mut self.objects[object];
        read.state = match exists {
            Ok(true) => read.state_of_current_bytes(),
            Ok(false) => {
                // The places of the other replicas are as old.
                read.silent.clear();
                let text = "the object was replaced or removed while it was read";
                ReadState::Failed(Error::new(ErrorCode::LEASE_EXPIRED, text))
            }
            Err(error) => {
                read.silent.clear();
                ReadState::Failed(error)
            }
        };
    }

    /// Reports whether the bytes have the checksum that was kept with them. An error of
    /// [`ErrorCode::CHECKSUM_MISMATCH`] says that they have another one; after any other error the
    /// memory cannot be read.
    pub fn compared(&mut self, object: usize, outcome: Result<()>) {
        let read = &mut self.objects[object];
        read.state = match outcome {
            Ok(()) => ReadState::Done,
            Err(error)
                if error.code() == ErrorCode::CHECKSUM_MISMATCH && read.has_untried_replica() =>
            {
                ReadState::Open
            }
            Err(error) => ReadState::Failed(error),
        };
    }

    /// Reports where an object is now. Returns whether it is read once more: it has moved, or the
    /// first read was only too late. Replicas that could not be read before are not tried again.
    pub fn relocated(&mut self, object: usize, found: Result<ReadSource>) -> bool {
        let read = &mut self.objects[object];
        match found {
            Ok(source) if read.can_continue_with(&source) => {
                *read = ObjectRead::new(source, read.extent);
                true
            }
            Ok(_) => false,
            Err(error) => {
                read.state = ReadState::Failed(error);
                false
            }
        }
    }

    /// Returns the outcome of each object, in the order in which they were added.
    pub fn into_outcomes(self) -> impl Iterator<Item = Result<()>> {
        self.objects.into_iter().map(|object| match object.state {
            ReadState::Done => Ok(()),
            ReadState::Failed(error) => Err(error),
            ReadState::Open | ReadState::Late | ReadState::Unchecked => {
                Err(Error::internal("a read was left out of its batch"))
            }
        })
    }

    /// Returns transfers from the next replica of each open object.
    fn next_transfers(&mut self) -> Option<ReadStep> {
        let mut reads = SmallVec::new();
        let mut segments = SegmentsSeen::None;
        let mut has_alternatives = false;
        for (at, object) in self.objects.iter_mut().enumerate() {
            if let Some(replica) = object.next_replica() {
                reads.push((at, replica.place));
                segments.add(replica.segment);
                has_alternatives |= object.source.replicas.len() > 1;
            }
        }
        if reads.is_empty() {
            return None;
        }
        // Nobody is kept waiting by reads that all need the same holder.
        let is_patient = !has_alternatives && !matches!(segments, SegmentsSeen::Several);
        self.stall = (!is_patient).then_some(STALL_LIMIT);
        Some(ReadStep::Transfer { reads, stall: self.stall })
    }

    /// Returns transfers from silent holders of failed reads, with a patience that doubles each time
    /// and lasts until the deadline at last.
    fn next_silent_transfers(&mut self, now: Moment) -> Option<ReadStep> {
        let mut reads = SmallVec::new();
        let mut has_alternatives = false;
        for (at, object) in self.objects.iter_mut().enumerate() {
            if let Some(replica) = object.next_silent_replica(self.silent_rounds) {
                reads.push((at, replica.place));
                has_alternatives |= object.silent.len() > 1;
            }
        }
        if reads.is_empty() || self.deadline.has_passed(now) {
            self.silent_rounds = 0;
            return None;
        }
        self.silent_rounds += 1;
        let stall = STALL_LIMIT * 2_u32.saturating_pow(self.silent_rounds);
        let is_last = !has_alternatives || now + stall >= self.deadline;
        self.stall = (!is_last).then_some(stall);
        Some(ReadStep::Transfer { reads, stall: self.stall })
    }

    /// Returns the objects in a state, with the replicas that were read.
    fn replicas_in(&self, is_match: impl Fn(&ReadState) -> bool) -> Vec<(usize, ReplicaId)> {
        let found = self.objects.iter().enumerate().filter(|(_, object)| is_match(&object.state));
        found.map(|(at, object)| (at, object.source.replicas[object.current].replica)).collect()
    }
}

/// Whether transfers go to one segment or to several.
enum SegmentsSeen {
    None,
    One(SegmentId),
    Several,
}

impl SegmentsSeen {
    fn add(&mut self, segment: SegmentId) {
        *self = match self {
            Self::None => Self::One(segment),
            Self::One(first) if *first == segment => return,
            Self::One(_) | Self::Several => Self::Several,
        };
    }
}

impl ObjectRead {
    fn new(source: ReadSource, extent: ReadExtent) -> Self {
        let bytes = match extent {
            ReadExtent::Whole => source.length,
            ReadExtent::Part(bytes) => bytes,
        };
        // An empty read is complete.
        let state = if bytes == 0 { ReadState::Done } else { ReadState::Open };
        Self { source, extent, current: 0, tried: 0, silent: SmallVec::new(), state }
    }

    fn has_untried_replica(&self) -> bool {
        self.tried < self.source.replicas.len()
    }

    /// Returns the replica that is read next, if the read is open.
    fn next_replica(&mut self) -> Option<ReadReplica> {
        if !matches!(self.state, ReadState::Open) {
            return None;
        }
        let Some(&replica) = self.source.replicas.get(self.tried) else {
            let text = "no replica of the object can be read";
            self.state = ReadState::Failed(Error::new(ErrorCode::TRANSFER_FAIL, text));
            return None;
        };
        self.current = self.tried;
        self.tried += 1;
        Some(replica)
    }

    /// Returns the silent replica whose turn it is in this round, if the read has failed.
    fn next_silent_replica(&mut self, round: u32) -> Option<ReadReplica> {
        if self.silent.is_empty() || !matches!(self.state, ReadState::Failed(_)) {
            return None;
        }
        self.current = self.silent[round as usize % self.silent.len()];
        Some(self.source.replicas[self.current])
    }

    /// Remembers whether the holder of the current replica was only silent, in which case it may
    /// answer later.
    fn record_silence(&mut self, is_silent: bool) {
        let current = self.current;
        if !is_silent {
            self.silent.retain(|silent| *silent != current);
        } else if !self.silent.contains(&current) {
            self.silent.push(current);
        }
    }

    /// Returns the state after bytes were read that belonged to the object.
    fn state_of_current_bytes(&self) -> ReadState {
        if self.source.has_checksum { ReadState::Unchecked } else { ReadState::Done }
    }

    fn is_retryable(&self) -> bool {
        let ReadState::Failed(error) = &self.state else { return false };
        !matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Closed)
    }

    /// Returns whether the read may continue with a newer answer of the master.
    fn can_continue_with(&self, new: &ReadSource) -> bool {
        let is_same_version = self.source.version == new.version;
        let is_allowed = match self.extent {
            ReadExtent::Whole => self.source.length == new.length,
            ReadExtent::Part(_) => is_same_version,
        };
        let is_expired = matches!(&self.state, ReadState::Failed(error)
            if error.code() == ErrorCode::LEASE_EXPIRED);
        let is_known =
            |replica: ReplicaId| self.source.replicas.iter().any(|known| known.replica == replica);
        let has_moved =
            !is_same_version || new.replicas.iter().any(|found| !is_known(found.replica));
        is_allowed && (is_expired || has_moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const START: Moment = Moment::from_boot(SECOND);
    const FENCE_END: Moment = Moment::from_boot(Duration::from_secs(3));

    /// A version with replicas of these ids, each in a segment of its own.
    fn source(version: u64, replicas: &[u64]) -> ReadSource {
        let replica = |(place, &id): (usize, &u64)| {
            let segment = SegmentId::from_bytes(&u128::from(id).to_be_bytes()).unwrap();
            ReadReplica { place, replica: ReplicaId(id), segment, is_on_disk: false }
        };
        ReadSource {
            version: Version(version),
            length: 8,
            fence_end: FENCE_END,
            replicas: replicas.iter().enumerate().map(replica).collect(),
            has_checksum: false,
        }
    }

    fn reading(sources: impl IntoIterator<Item = ReadSource>) -> ReadObjects {
        let mut objects = ReadObjects::new(START + SECOND * 30);
        sources.into_iter().for_each(|source| objects.push(source, ReadExtent::Whole));
        objects
    }

    fn transfer(reads: &[(usize, usize)], stall: Option<u32>) -> ReadStep {
        let reads = SmallVec::from_slice(reads);
        ReadStep::Transfer { reads, stall: stall.map(|seconds| SECOND * seconds) }
    }

    fn error(code: ErrorCode) -> Error {
        Error::new(code, "injected")
    }

    fn silent() -> Result<()> {
        Err(error(ErrorCode::RPC_TIMEOUT))
    }

    fn broken() -> Result<()> {
        Err(error(ErrorCode::TRANSFER_FAIL))
    }

    fn codes(objects: ReadObjects) -> Vec<Option<ErrorCode>> {
        objects.into_outcomes().map(|outcome| outcome.err().map(|error| error.code())).collect()
    }

    #[test]
    fn read_within_its_fence_is_done() {
        let mut objects = reading([source(1, &[4])]);
        objects.push(source(1, &[]), ReadExtent::Part(0));
        objects.push_refused(error(ErrorCode::INVALID_PARAMS));
        assert_eq!(objects.next_step(START), transfer(&[(0, 0)], None));
        assert!(!objects.transferred(0, Ok(()), START + SECOND));
        assert_eq!(objects.next_step(START + SECOND), ReadStep::Done);
        assert_eq!(codes(objects), [None, None, Some(ErrorCode::INVALID_PARAMS)]);
    }

    #[test]
    fn read_past_its_fence_is_verified() {
        let mut objects = reading([source(1, &[4]), source(2, &[5])]);
        objects.next_step(START);
        objects.transferred(0, Ok(()), FENCE_END);
        objects.transferred(1, Ok(()), FENCE_END);
        let late = vec![(0, ReplicaId(4)), (1, ReplicaId(5))];
        assert_eq!(objects.next_step(FENCE_END), ReadStep::Verify(late));
        objects.verified(0, Ok(true));
        objects.verified(1, Ok(false));
        assert_eq!(objects.next_step(FENCE_END), ReadStep::Locate(vec![1]));
        // It was only too late: the object is where it was.
        assert!(objects.relocated(1, Ok(source(2, &[5]))));
        assert_eq!(objects.next_step(FENCE_END), transfer(&[(1, 0)], None));
        objects.transferred(1, Ok(()), FENCE_END);
        objects.next_step(FENCE_END);
        objects.verified(1, Ok(false));
        assert_eq!(objects.next_step(FENCE_END), ReadStep::Done, "located again only once");
        assert_eq!(codes(objects), [None, Some(ErrorCode::LEASE_EXPIRED)]);
    }

    #[test]
    fn record_on_disk_counts_past_the_fence() {
        let mut on_disk = source(1, &[4, 5]);
        on_disk.replicas[1].is_on_disk = true;
        let mut objects = reading([on_disk]);
        objects.next_step(START);
        objects.transferred(0, broken(), FENCE_END);
        assert_eq!(objects.next_step(FENCE_END), transfer(&[(0, 1)], Some(1)));
        objects.transferred(0, Ok(()), FENCE_END);
        assert_eq!(objects.next_step(FENCE_END), ReadStep::Done);
        assert_eq!(codes(objects), [None]);
    }

    #[test]
    fn next_replica_is_read_after_a_failure() {
        let mut objects = reading([source(1, &[4, 5]), source(2, &[6])]);
        assert_eq!(objects.next_step(START), transfer(&[(0, 0), (1, 0)], Some(1)));
        assert!(objects.transferred(0, broken(), START));
        assert!(!objects.transferred(1, broken(), START));
        assert_eq!(objects.next_step(START), transfer(&[(0, 1)], Some(1)));
        assert!(!objects.transferred(0, Ok(()), START));
        assert_eq!(objects.next_step(START), ReadStep::Locate(vec![1]));
        assert!(!objects.relocated(1, Ok(source(2, &[6]))), "that replica cannot be read");
        assert_eq!(objects.next_step(START), ReadStep::Done);
        assert_eq!(codes(objects), [None, Some(ErrorCode::TRANSFER_FAIL)]);
    }

    #[test]
    fn silent_holders_are_tried_again_with_more_patience() {
        let mut objects = reading([source(1, &[4, 5])]);
        let mut now = START;
        let mut tried = Vec::new();
        while let ReadStep::Transfer { reads, stall } = objects.next_step(now) {
            tried.push((reads[0].1, stall.map(|stall| stall.as_secs())));
            now = match stall {
                Some(stall) => now + stall,
                None => objects.deadline(),
            };
            objects.transferred(0, silent(), now);
        }
        let patience =
            [(0, Some(1)), (1, Some(1)), (0, Some(2)), (1, Some(4)), (0, Some(8)), (1, None)];
        assert_eq!(tried, patience);
        assert_eq!(codes(objects), [Some(ErrorCode::RPC_TIMEOUT)]);
    }

    #[test]
    fn only_holder_is_awaited_until_the_deadline() {
        let mut objects = reading([source(1, &[4]), source(2, &[4])]);
        assert_eq!(objects.next_step(START), transfer(&[(0, 0), (1, 0)], None));
        // Another object must not wait for it.
        let mut objects = reading([source(1, &[4]), source(2, &[5])]);
        assert_eq!(objects.next_step(START), transfer(&[(0, 0), (1, 0)], Some(1)));
        objects.transferred(0, silent(), START);
        objects.transferred(1, Ok(()), START);
        assert_eq!(objects.next_step(START), transfer(&[(0, 0)], None));
    }

    #[test]
    fn deadline_moves_only_forward() {
        let mut objects = ReadObjects::new(Moment::from_boot(Duration::from_secs(30)));
        for (seconds, expected) in [(20, 30), (40, 40), (35, 40)] {
            objects.extend_deadline(Moment::from_boot(Duration::from_secs(seconds)));
            assert_eq!(objects.deadline(), Moment::from_boot(Duration::from_secs(expected)));
        }
    }

    #[test]
    fn nothing_is_tried_after_the_deadline() {
        let mut objects = reading([source(1, &[4, 5])]);
        objects.next_step(START);
        let deadline = objects.deadline();
        assert!(!objects.transferred(0, silent(), deadline));
        assert_eq!(objects.next_step(deadline), ReadStep::Done);
        assert_eq!(codes(objects), [Some(ErrorCode::RPC_TIMEOUT)]);
    }

    #[test]
    fn damaged_replica_is_left_for_another() {
        let mut objects = reading([ReadSource { has_checksum: true, ..source(1, &[4, 5]) }]);
        for (place, replica) in [4, 5].into_iter().enumerate() {
            assert_eq!(objects.next_step(START), transfer(&[(0, place)], Some(1)));
            objects.transferred(0, Ok(()), START);
            let read = ReadStep::CompareChecksums(vec![(0, ReplicaId(replica))]);
            assert_eq!(objects.next_step(START), read);
            objects.compared(0, Err(error(ErrorCode::CHECKSUM_MISMATCH)));
        }
        assert_eq!(objects.next_step(START), ReadStep::Locate(vec![0]));
        objects.relocated(0, Ok(source(1, &[5, 4])));
        assert_eq!(codes(objects), [Some(ErrorCode::CHECKSUM_MISMATCH)]);
    }

    #[test]
    fn part_is_never_read_from_another_version() {
        for (extent, continues) in [(ReadExtent::Whole, true), (ReadExtent::Part(4), false)] {
            let mut objects = ReadObjects::new(START + SECOND * 30);
            objects.push(source(1, &[4]), extent);
            objects.next_step(START);
            objects.transferred(0, broken(), START);
            objects.next_step(START);
            assert_eq!(objects.relocated(0, Ok(source(2, &[5]))), continues, "{extent:?}");
        }
        let mut objects = reading([source(1, &[4])]);
        objects.next_step(START);
        objects.transferred(0, broken(), START);
        objects.next_step(START);
        let longer = ReadSource { length: 9, ..source(2, &[5]) };
        assert!(!objects.relocated(0, Ok(longer)), "the destination was laid out for 8 bytes");
    }

    #[test]
    fn object_without_replicas_fails() {
        let mut objects = reading([source(1, &[])]);
        assert_eq!(objects.next_step(START), ReadStep::Locate(vec![0]));
        objects.relocated(0, Err(error(ErrorCode::OBJECT_NOT_FOUND)));
        assert_eq!(codes(objects), [Some(ErrorCode::OBJECT_NOT_FOUND)]);
    }
}
