//! Uploads: the replicas that are reserved for one object, and what was written of them.

use std::time::Duration;

use mooncake_base::{
    Error, ErrorCode, ErrorKind, KeyRef, Moment, ObjectKey, ReplicaId, Result, Version,
};
use mooncake_transfer_engine::{LocalRange, TransferEntry};
use smallvec::SmallVec;

use crate::{
    client::checksum::Checksummer,
    object::{Place, PutItem},
    protocol::UnconfirmedPut,
};

/// Subtracted from the write window, since the local clock and the master's may run at different
/// speeds.
const WINDOW_MARGIN: Duration = Duration::from_millis(50);

/// The replicas reserved for one object. The key is kept elsewhere.
#[derive(Debug, Clone)]
pub(in crate::client) struct Upload {
    version: Version,
    /// The number of the start.
    request: u64,
    length: u64,
    places: SmallVec<[Place; 1]>,
    checksum: Option<u64>,
    /// Replicas that could not be written, and the last error.
    failed: Vec<ReplicaId>,
    error: Option<Error>,
    /// Of the failed replicas, those whose holder was only silent.
    silent: Vec<ReplicaId>,
    /// Replicas at which bytes of an earlier attempt may still arrive.
    late: Vec<ReplicaId>,
    /// Whether each failure so far was one of a peer.
    has_only_peer_failures: bool,
    window: WriteWindow,
}

/// The time within which an upload may be written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::client) struct WriteWindow {
    /// Writing later is forbidden.
    pub(in crate::client) until: Moment,
    /// From then on a new window is asked for.
    pub(in crate::client) renew_at: Moment,
}

/// A write into an upload.
#[derive(Debug)]
pub(in crate::client) struct UploadWrite<'a> {
    pub(in crate::client) key: KeyRef<'a>,
    pub(in crate::client) upload: &'a mut Upload,
    pub(in crate::client) layout: SourceLayout<'a>,
}

/// Source ranges of a write and their position in the object.
#[derive(Debug, Clone, Copy)]
pub(in crate::client) enum SourceLayout<'a> {
    /// Consecutive ranges.
    InOrder(&'a [LocalRange]),
    /// Ranges at explicit offsets.
    At(&'a [(u64, LocalRange)]),
}

/// An upload with its key.
pub(in crate::client) type KeyedUpload<'a> = (KeyRef<'a>, &'a Upload);

impl WriteWindow {
    /// The window that the master has granted in answer to a call that was sent then.
    pub(in crate::client) fn granted(sent: Moment, length: Duration) -> Self {
        Self { until: sent + length.saturating_sub(WINDOW_MARGIN), renew_at: sent + length / 2 }
    }
}

impl Upload {
    pub(in crate::client) fn new(
        version: Version,
        request: u64,
        length: u64,
        places: SmallVec<[Place; 1]>,
        window: WriteWindow,
    ) -> Self {
        Self {
            version,
            request,
            length,
            places,
            checksum: None,
            failed: Vec::new(),
            error: None,
            silent: Vec::new(),
            late: Vec::new(),
            has_only_peer_failures: true,
            window,
        }
    }

    /// Merges the failed replicas from a clone that was written through.
    pub(super) fn merge(&mut self, other: Self) {
        for replica in other.failed {
            if !self.failed.contains(&replica) {
                self.failed.push(replica);
            }
        }
        for replica in other.late {
            self.add_late(replica);
        }
        self.error = self.error.take().or(other.error);
        self.has_only_peer_failures &= other.has_only_peer_failures;
        if self.window.until < other.window.until {
            self.window = other.window;
        }
    }

    pub(in crate::client) fn version(&self) -> Version {
        self.version
    }

    /// Returns the number of the start.
    pub(in crate::client) fn request(&self) -> u64 {
        self.request
    }

    pub(in crate::client) fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    pub(in crate::client) fn failed_replicas(&self) -> &[ReplicaId] {
        &self.failed
    }

    /// Returns the replicas that were written and at which bytes of an earlier attempt may still
    /// arrive.
    pub(in crate::client) fn late_replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.late.iter().copied().filter(|replica| !self.failed.contains(replica))
    }

    /// Returns the replicas at which bytes may still arrive after the put was given up.
    pub(in crate::client) fn unsettled_replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.failed.iter().copied().chain(self.late_replicas())
    }

    /// Returns the end of the write window.
    pub(in crate::client) fn write_until(&self) -> Moment {
        self.window.until
    }

    /// Returns whether a new write window is to be asked for.
    pub(in crate::client) fn is_to_be_renewed(&self, now: Moment) -> bool {
        self.window.renew_at.has_passed(now) && !self.has_no_replica()
    }

    pub(in crate::client) fn set_window(&mut self, window: WriteWindow) {
        self.window = window;
    }

    pub(in crate::client) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the number of replicas that were written.
    pub(in crate::client) fn healthy_count(&self) -> u32 {
        u32::try_from(self.healthy().count()).unwrap_or(u32::MAX)
    }

    /// Returns the put as one that the master may still hold.
    pub(in crate::client) fn to_unconfirmed(&self, key: KeyRef<'_>) -> Option<UnconfirmedPut> {
        let key = ObjectKey::new(key.as_bytes()).ok()?;
        let failed_replicas = self.unsettled_replicas().collect();
        Some(UnconfirmedPut { key, version: self.version, failed_replicas })
    }

    /// Computes and stores the checksum of a value that is written whole.
    pub(in crate::client) fn set_checksum(
        &mut self,
        checksummer: &mut Checksummer<'_>,
        item: &PutItem<'_>,
    ) {
        match checksummer.checksum(item.parts.iter().copied()) {
            Ok(sum) => self.checksum = Some(sum),
            Err(error) => {
                for at in 0..self.places.len() {
                    self.has_only_peer_failures = false;
                    self.fail_replica(self.places[at].replica, error.clone(), item.key);
                }
            }
        }
    }

    /// Returns all replicas, also those that failed.
    pub(super) fn replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.places.iter().map(|place| place.replica)
    }

    pub(in crate::client) fn healthy(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(|place| !self.failed.contains(&place.replica))
    }

    pub(in crate::client) fn has_no_replica(&self) -> bool {
        self.healthy().next().is_none()
    }

    /// Returns whether the put failed because no holder could be reached.
    pub(in crate::client) fn is_lost_to_peers(&self) -> bool {
        self.has_no_replica() && self.has_only_peer_failures && self.error.is_some()
    }

    /// Takes the replicas of silent holders back if no other replica is left. Returns whether there
    /// are any.
    pub(in crate::client) fn readmit_silent_replicas(&mut self) -> bool {
        if self.silent.is_empty() || !self.has_no_replica() {
            return false;
        }
        let silent = std::mem::take(&mut self.silent);
        self.failed.retain(|replica| !silent.contains(replica));
        // The connections of the first attempt may still hold bytes that nobody has read.
        silent.into_iter().for_each(|replica| self.add_late(replica));
        self.error = None;
        true
    }

    pub(in crate::client) fn add_late(&mut self, replica: ReplicaId) {
        if !self.late.contains(&replica) {
            self.late.push(replica);
        }
    }

    fn fail_replica(&mut self, replica: ReplicaId, error: Error, key: KeyRef<'_>) {
        self.failed.push(replica);
        self.error = Some(error.with("key", key));
    }

    /// Records that a replica could not be written. `may_be_left`: a holder that is silent was not
    /// awaited, since another one may take the put.
    pub(in crate::client) fn fail_write(
        &mut self,
        key: KeyRef<'_>,
        replica: ReplicaId,
        error: Error,
        may_be_left: bool,
    ) {
        if error.kind() == ErrorKind::Timeout && may_be_left {
            self.silent.push(replica);
        }
        self.has_only_peer_failures &=
            !matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Closed);
        self.fail_replica(replica, error, key);
    }

    /// Gives up all replicas, whose write window is over.
    fn fail_window(&mut self, key: KeyRef<'_>) -> Error {
        let error = self.window_error(key);
        self.has_only_peer_failures = false;
        self.failed = self.replicas().collect();
        self.error = Some(error.clone());
        error
    }

    /// Returns the error for an upload without healthy replicas.
    pub(in crate::client) fn no_replica_error(&self, key: KeyRef<'_>) -> Error {
        self.error.clone().unwrap_or_else(|| {
            Error::new(ErrorCode::WRITE_FAIL, "the put has no replica").with("key", key)
        })
    }

    pub(in crate::client) fn window_error(&self, key: KeyRef<'_>) -> Error {
        Error::new(ErrorCode::WRITE_FAIL, "the put took longer than its write window")
            .with("key", key)
            .with("bytes", self.length)
    }
}

impl UploadWrite<'_> {
    /// Checks that the write is possible now.
    pub(in crate::client) fn check(&mut self, now: Moment) -> Result<()> {
        self.check_window(now)?;
        for (offset, range) in self.layout.ranges() {
            let end = offset.checked_add(range.length() as u64);
            if end.is_none_or(|end| end > self.upload.length) {
                return Err(Error::invalid("the write ends outside the object")
                    .with("key", self.key)
                    .with("object_bytes", self.upload.length)
                    .with("offset", offset)
                    .with("length", range.length()));
            }
        }
        Ok(())
    }

    /// Checks that there is a replica to write, and time for it.
    pub(in crate::client) fn check_window(&mut self, now: Moment) -> Result<()> {
        if self.upload.has_no_replica() {
            return Err(self.upload.no_replica_error(self.key));
        }
        if self.upload.window.until.has_passed(now) {
            return Err(self.upload.fail_window(self.key));
        }
        Ok(())
    }

    /// Returns the transfers into the replica at an address.
    pub(in crate::client) fn transfers_to(
        &self,
        address: u64,
    ) -> impl Iterator<Item = TransferEntry> {
        let some = self.layout.ranges().filter(|(_, range)| range.length() > 0);
        some.map(move |(offset, range)| TransferEntry::new(range, address + offset))
    }
}

impl SourceLayout<'_> {
    /// Iterates over offsets within the object and their source ranges.
    pub(in crate::client) fn ranges(self) -> impl Iterator<Item = (u64, LocalRange)> {
        let count = match self {
            Self::InOrder(parts) => parts.len(),
            Self::At(ranges) => ranges.len(),
        };
        let mut end = 0_u64;
        (0..count).map(move |at| {
            let (offset, range) = match self {
                Self::InOrder(parts) => (end, parts[at]),
                Self::At(ranges) => ranges[at],
            };
            // Saturates, since callers may pass arbitrary lengths.
            end = offset.saturating_add(range.length() as u64);
            (offset, range)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_base::SegmentId;
    use smallvec::smallvec;

    use super::*;
    use crate::{client::bytes::dangling_range, object::SegmentInfo};

    fn upload(replicas: u64) -> Upload {
        let segment = Arc::new(SegmentInfo {
            id: SegmentId::from_bits(1),
            name: "h:1".to_owned(),
            endpoint: "h:1".to_owned(),
            base: 0,
            length: 1 << 20,
            protocol: "tcp".to_owned(),
            is_disk: false,
        });
        let place = |replica| Place {
            segment: Arc::clone(&segment),
            offset: 0,
            length: 1,
            replica: ReplicaId(replica),
        };
        Upload::new(Version(7), 1, 1, (0..replicas).map(place).collect(), WriteWindow::default())
    }

    #[test]
    fn silent_holder_that_is_taken_back_may_get_late_bytes() {
        let key = KeyRef::new(b"k").unwrap();
        let error = || Error::new(ErrorCode::RPC_TIMEOUT, "silent");
        let mut put = upload(2);
        put.fail_replica(ReplicaId(0), error(), key);
        put.silent.push(ReplicaId(0));
        assert!(!put.readmit_silent_replicas(), "the other one is written");
        assert_eq!(put.late_replicas().count(), 0);
        put.fail_replica(ReplicaId(1), error(), key);
        put.silent.push(ReplicaId(1));
        assert!(put.readmit_silent_replicas());
        let late: Vec<_> = put.late_replicas().collect();
        assert_eq!((late, put.failed_replicas()), (vec![ReplicaId(0), ReplicaId(1)], &[][..]));
        put.fail_replica(ReplicaId(1), error(), key);
        assert_eq!(put.late_replicas().collect::<Vec<_>>(), [ReplicaId(0)]);
        let unconfirmed = put.to_unconfirmed(key).unwrap().failed_replicas;
        let all: SmallVec<[ReplicaId; 1]> = smallvec![ReplicaId(1), ReplicaId(0)];
        assert_eq!(unconfirmed, all, "nobody knows what still arrives");
    }

    #[test]
    fn layout_yields_offsets_of_parts_and_ranges() {
        let offsets =
            |layout: SourceLayout<'_>| layout.ranges().map(|(at, _)| at).collect::<Vec<_>>();
        let parts = [dangling_range(3), dangling_range(0), dangling_range(5), dangling_range(1)];
        assert_eq!(offsets(SourceLayout::InOrder(&parts)), [0, 3, 3, 8]);
        assert_eq!(
            offsets(SourceLayout::At(&[(7, dangling_range(2)), (1, dangling_range(4))])),
            [7, 1]
        );
        let most = [dangling_range(usize::MAX), dangling_range(usize::MAX), dangling_range(1)];
        assert_eq!(offsets(SourceLayout::InOrder(&most)), [0, u64::MAX, u64::MAX]);
    }
}
