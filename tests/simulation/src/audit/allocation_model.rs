//! An independent model of which version owns which memory, built from the log.

use std::collections::{BTreeMap, HashMap, HashSet};

use mooncake_base::SegmentId;
use mooncake_master::state::{Effect, LoggedCopy, ObjectName, Value};

use crate::{audit::holders::DroppedCopy, call::key_number};

/// The ordinal of the copy on disk, of which an object has at most one.
pub(crate) const DISK_ORDINAL: u32 = u32::MAX;

/// The model. It fails when a range is allocated twice.
#[derive(Debug, Default)]
pub(crate) struct AllocationModel {
    /// Segments by their number in the log.
    segments: HashMap<u32, SegmentModel>,
    /// Disks by their number in the log.
    disks: HashMap<u32, SegmentId>,
    /// Versions that were dropped since the master started, perhaps ahead of need.
    released: HashSet<u64>,
    /// Whether a master that has lost its log makes objects of records.
    pub(crate) adopts_records: bool,
    /// The number of objects made of records.
    pub(crate) adopted: u64,
    writes: HashMap<u64, Allocation>,
    published: HashMap<Vec<u8>, Allocation>,
    /// Number of values dropped other than with their segments.
    pub(crate) dropped: u64,
    /// Writes that were displaced by a newer one and cannot be published any more.
    displaced: Vec<u64>,
}

#[derive(Debug)]
struct SegmentModel {
    id: SegmentId,
    /// Start of a range to its end and the version that owns it.
    ranges: BTreeMap<u64, (u64, u64)>,
}

#[derive(Debug)]
struct Allocation {
    key: Vec<u8>,
    version: u64,
    length: u64,
    copies: Vec<LoggedCopy>,
}

/// A change of the value of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Published(u64),
    Gone(u64),
}

impl AllocationModel {
    pub(crate) fn new(adopts_records: bool) -> Self {
        Self { adopts_records, ..Self::default() }
    }

    /// Applies an effect of the log.
    ///
    /// # Errors
    /// Memory was allocated that another version owns.
    pub(crate) fn apply(
        &mut self,
        effect: Effect<'_>,
        changes: &mut Vec<(Vec<u8>, Change)>,
    ) -> Result<(), String> {
        match effect {
            Effect::Mounted { number, spec, .. } => {
                self.segments
                    .insert(number.0, SegmentModel { id: spec.id, ranges: BTreeMap::new() });
            }
            Effect::DiskMounted { number, spec, .. } => {
                self.disks.insert(number.0, spec.id);
            }
            Effect::SegmentDropped { number } => self.drop_segment(number.0, changes),
            Effect::Started { version, value, .. } => return self.start(version, &value),
            Effect::Published { version, failed, .. } => {
                self.publish(version, failed, changes);
            }
            Effect::Displaced { version } => self.displaced.push(version),
            Effect::WriteDropped { version } => {
                if let Some(allocation) = self.writes.remove(&version) {
                    self.free(&allocation, &allocation.copies);
                }
            }
            Effect::Dropped { object } => {
                let is_match = |allocation: &Allocation| allocation.version == object.version;
                if self.published.get(object.key).is_some_and(is_match)
                    && let Some(allocation) = self.published.remove(object.key)
                {
                    self.free(&allocation, &allocation.copies);
                    self.dropped += 1;
                    self.released.insert(object.version);
                    changes.push((allocation.key, Change::Gone(object.version)));
                }
            }
            Effect::ObjectSnapshot { version, value, .. } => {
                return self.take_back(version, &value, changes);
            }
            Effect::ReplicaAdded { object, copy } => return self.add_copy(&object, copy),
            Effect::ReplicaDropped { object, ordinal } => {
                return self.drop_copy(&object, ordinal, changes);
            }
            _ => {}
        }
        Ok(())
    }

    /// Frees displaced writes after a restart of the master. A snapshot keeps only the end of their
    /// quarantine, so the restarted master may not log when they end.
    pub(crate) fn restart(&mut self) {
        self.released.clear();
        for version in std::mem::take(&mut self.displaced) {
            if let Some(allocation) = self.writes.remove(&version) {
                self.free(&allocation, &allocation.copies);
            }
        }
    }

    /// Forgets all values and segments, because the log is lost.
    pub(crate) fn clear(&mut self, changes: &mut Vec<(Vec<u8>, Change)>) {
        let gone = self.published.drain();
        changes.extend(gone.map(|(key, allocation)| (key, Change::Gone(allocation.version))));
        changes.sort_by(|(one, _), (other, _)| one.cmp(other));
        let (dropped, adopted) = (self.dropped, self.adopted);
        *self = Self { dropped, adopted, ..Self::new(self.adopts_records) };
    }

    /// Returns the segments that hold the value of a key.
    pub(crate) fn holders(&self, key: &[u8]) -> Vec<SegmentId> {
        let copies = self.published.get(key).map_or(&[][..], |allocation| &allocation.copies);
        copies.iter().filter_map(|copy| Some(self.segments.get(&copy.segment.0)?.id)).collect()
    }

    /// Returns the disk that has a copy of the value of a key.
    pub(crate) fn disk_of(&self, key: &[u8]) -> Option<SegmentId> {
        let copies = &self.published.get(key)?.copies;
        let copy = copies.iter().find(|copy| copy.ordinal == DISK_ORDINAL)?;
        self.disk_id(copy.segment.0)
    }

    /// Returns the id of the disk with this number.
    pub(crate) fn disk_id(&self, number: u32) -> Option<SegmentId> {
        self.disks.get(&number).copied()
    }

    /// Returns the copy of an object with this ordinal: its key and its segment.
    pub(crate) fn replica(&self, object: &ObjectName<'_>, ordinal: u32) -> Option<DroppedCopy> {
        let allocation = self.published.get(object.key)?;
        let is_match = |copy: &&LoggedCopy| copy.ordinal == ordinal;
        let copy = allocation.copies.iter().find(is_match)?;
        (allocation.version == object.version)
            .then(|| Some((object.key.to_vec(), self.segment_id(copy.segment.0)?)))?
    }

    /// Returns the keys that have a copy in the segment with this number, in order.
    pub(crate) fn keys_in(&self, segment: u32) -> Vec<u64> {
        let is_there =
            |found: &&Allocation| found.copies.iter().any(|copy| copy.segment.0 == segment);
        let found = self.published.values().filter(is_there);
        let mut keys: Vec<u64> = found.map(|found| key_number(&found.key)).collect();
        keys.sort_unstable();
        keys
    }

    /// Returns the id of the segment with this number.
    pub(crate) fn segment_id(&self, number: u32) -> Option<SegmentId> {
        self.segments.get(&number).map(|segment| segment.id)
    }

    fn start(&mut self, version: u64, value: &Value<'_>) -> Result<(), String> {
        for copy in value.copies.iter() {
            self.claim(copy, value.length, version)?;
        }
        let (key, copies) = (value.key.to_vec(), value.copies.to_vec());
        let length = value.length;
        self.writes.insert(version, Allocation { key, version, length, copies });
        Ok(())
    }

    /// Takes back that an object was dropped: it was released ahead of need, and is used again.
    fn take_back(
        &mut self,
        version: u64,
        value: &Value<'_>,
        changes: &mut Vec<(Vec<u8>, Change)>,
    ) -> Result<(), String> {
        if self.published.get(value.key).is_some_and(|found| found.version == version) {
            // Its memory was released ahead of need, and a disk has a copy.
            if let Some(found) = self.published.remove(value.key) {
                self.free(&found, &found.copies);
            }
            for copy in value.copies.iter() {
                self.claim(copy, value.length, version)?;
            }
            let (key, copies, length) = (value.key.to_vec(), value.copies.to_vec(), value.length);
            self.published.insert(key.clone(), Allocation { key, version, length, copies });
            return Ok(());
        }
        if !self.released.contains(&version) {
            if !self.adopts_records {
                return Err(format!("version {version} is an object again: {value:?}"));
            }
            self.adopted += 1;
        }
        self.start(version, value)?;
        self.publish(version, &[], changes);
        Ok(())
    }

    /// Records a copy made by a task.
    fn add_copy(&mut self, object: &ObjectName<'_>, copy: LoggedCopy) -> Result<(), String> {
        let published = self.published.get_mut(object.key);
        let Some(allocation) = published.filter(|allocation| allocation.version == object.version)
        else {
            return Err(format!("a copy was made of an object that is not published: {object:?}"));
        };
        if copy.ordinal == DISK_ORDINAL {
            allocation.copies.retain(|other| other.ordinal != DISK_ORDINAL);
        }
        if allocation.copies.iter().any(|other| other.ordinal == copy.ordinal) {
            return Err(format!("two copies have the same ordinal: {object:?}, {copy:?}"));
        }
        let length = allocation.length;
        allocation.copies.push(copy.clone());
        self.claim(&copy, length, object.version)
    }

    /// Records that one copy was dropped and others remain.
    fn drop_copy(
        &mut self,
        object: &ObjectName<'_>,
        ordinal: u32,
        changes: &mut Vec<(Vec<u8>, Change)>,
    ) -> Result<(), String> {
        let published = self.published.get_mut(object.key);
        let Some(allocation) = published.filter(|allocation| allocation.version == object.version)
        else {
            return Ok(());
        };
        let is_match = |copy: &mut LoggedCopy| copy.ordinal == ordinal;
        let gone: Vec<LoggedCopy> = allocation.copies.extract_if(.., is_match).collect();
        let is_last = allocation.copies.is_empty() && !gone.is_empty();
        if is_last && ordinal == DISK_ORDINAL {
            // Its memory has left with its segment, which is not swept yet.
            self.published.remove(object.key);
            changes.push((object.key.to_vec(), Change::Gone(object.version)));
        } else if is_last {
            return Err(format!("the last copy was dropped of {object:?}"));
        }
        let ranges: Vec<_> = gone.iter().map(|copy| (copy.segment.0, copy.offset)).collect();
        for (segment, offset) in ranges {
            if let Some(segment) = self.segments.get_mut(&segment) {
                segment.ranges.remove(&offset);
            }
        }
        Ok(())
    }

    /// Marks the memory of a copy as owned by a version.
    fn claim(&mut self, copy: &LoggedCopy, length: u64, version: u64) -> Result<(), String> {
        if copy.ordinal == DISK_ORDINAL {
            return Ok(());
        }
        let Some(segment) = self.segments.get_mut(&copy.segment.0) else {
            return Err(format!("memory was allocated in a dropped segment: {copy:?}"));
        };
        let end = copy.offset + length;
        let before = segment.ranges.range(..end).next_back();
        if let Some((&start, &(other_end, owner))) = before
            && other_end > copy.offset
        {
            return Err(format!(
                "version {version} was allocated {}..{end} while version {owner} owns \
                 {start}..{other_end} of the same segment",
                copy.offset
            ));
        }
        segment.ranges.insert(copy.offset, (end, version));
        Ok(())
    }

    fn publish(&mut self, version: u64, failed: &[u8], changes: &mut Vec<(Vec<u8>, Change)>) {
        let Some(mut allocation) = self.writes.remove(&version) else { return };
        let is_failed = |copy: &LoggedCopy| {
            failed.iter().any(|&ordinal| u64::from(ordinal) == u64::from(copy.ordinal))
        };
        let (dropped, kept): (Vec<_>, Vec<_>) = allocation.copies.drain(..).partition(is_failed);
        self.free(&allocation, &dropped);
        allocation.copies = kept;
        let key = allocation.key.clone();
        if let Some(earlier) = self.published.insert(key.clone(), allocation) {
            self.free(&earlier, &earlier.copies);
        }
        changes.push((key, Change::Published(version)));
    }

    fn drop_segment(&mut self, number: u32, changes: &mut Vec<(Vec<u8>, Change)>) {
        self.segments.remove(&number);
        self.disks.remove(&number);
        for allocation in self.writes.values_mut().chain(self.published.values_mut()) {
            allocation.copies.retain(|copy| copy.segment.0 != number);
        }
        let lost = self.published.extract_if(|_, allocation| allocation.copies.is_empty());
        let mut lost: Vec<_> =
            lost.map(|(key, allocation)| (key, Change::Gone(allocation.version))).collect();
        lost.sort_by(|(one, _), (other, _)| one.cmp(other));
        changes.append(&mut lost);
    }

    fn free(&mut self, allocation: &Allocation, copies: &[LoggedCopy]) {
        for copy in copies {
            if let Some(segment) = self.segments.get_mut(&copy.segment.0) {
                let is_owned = segment
                    .ranges
                    .get(&copy.offset)
                    .is_some_and(|&(_, owner)| owner == allocation.version);
                if is_owned {
                    segment.ranges.remove(&copy.offset);
                }
            }
        }
    }
}
