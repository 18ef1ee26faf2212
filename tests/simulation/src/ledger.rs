//! An independent account of who has which memory, kept from what the log records.

use std::collections::{BTreeMap, HashMap};

use mooncake_base::SegmentId;
use mooncake_master::state::{Effect, LoggedCopy, ObjectName, Value};

/// Who has which memory.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// By the log's number: the segment, and where what begins and ends.
    segments: HashMap<u32, Book>,
    writes: HashMap<u64, Holding>,
    standing: HashMap<Vec<u8>, Holding>,
    /// Values that were dropped otherwise than with their segments.
    pub(crate) dropped: u64,
    /// Of the writes, those that cannot end any more.
    displaced: Vec<u64>,
}

#[derive(Debug)]
struct Book {
    id: SegmentId,
    /// Start to end, and the version that has it.
    blocks: BTreeMap<u64, (u64, u64)>,
}

#[derive(Debug)]
struct Holding {
    key: Vec<u8>,
    version: u64,
    length: u64,
    copies: Vec<LoggedCopy>,
}

/// What became of the value under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Published(u64),
    Gone(u64),
}

impl Ledger {
    /// Enters a change.
    ///
    /// # Errors
    /// Memory was given away that somebody has.
    pub(crate) fn enter(
        &mut self,
        effect: Effect<'_>,
        changes: &mut Vec<(Vec<u8>, Change)>,
    ) -> Result<(), String> {
        match effect {
            Effect::Mounted { number, spec, .. } => {
                self.segments.insert(number.0, Book { id: spec.id, blocks: BTreeMap::new() });
            }
            Effect::SegmentDropped { number } => self.drop_segment(number.0, changes),
            Effect::Started { version, value, .. } => return self.start(version, &value),
            Effect::Published { version, failed, .. } => {
                self.publish(version, failed, changes);
            }
            Effect::Displaced { version } => self.displaced.push(version),
            Effect::WriteDropped { version } => {
                if let Some(holding) = self.writes.remove(&version) {
                    self.free(&holding, &holding.copies);
                }
            }
            Effect::Dropped { object } => {
                let is_it = |holding: &Holding| holding.version == object.version;
                if self.standing.get(object.key).is_some_and(is_it)
                    && let Some(holding) = self.standing.remove(object.key)
                {
                    self.free(&holding, &holding.copies);
                    self.dropped += 1;
                    changes.push((holding.key, Change::Gone(object.version)));
                }
            }
            Effect::ReplicaAdded { object, copy } => return self.add_copy(&object, copy),
            Effect::ReplicaDropped { object, ordinal } => {
                return self.drop_copy(&object, ordinal);
            }
            _ => {}
        }
        Ok(())
    }

    /// The master started again. A snapshot knows of displaced writes only how long their memory
    /// must rest, so that it need not say when they are over.
    pub(crate) fn restart(&mut self) {
        for version in std::mem::take(&mut self.displaced) {
            if let Some(holding) = self.writes.remove(&version) {
                self.free(&holding, &holding.copies);
            }
        }
    }

    /// The log is lost: nobody has anything.
    pub(crate) fn clear(&mut self, changes: &mut Vec<(Vec<u8>, Change)>) {
        let gone = self.standing.drain();
        changes.extend(gone.map(|(key, holding)| (key, Change::Gone(holding.version))));
        changes.sort_by(|(one, _), (other, _)| one.cmp(other));
        *self = Self { dropped: self.dropped, ..Self::default() };
    }

    /// The segments that hold the value of a key.
    pub(crate) fn holders(&self, key: &[u8]) -> Vec<SegmentId> {
        let copies = self.standing.get(key).map_or(&[][..], |holding| &holding.copies);
        copies.iter().filter_map(|copy| Some(self.segments.get(&copy.segment.0)?.id)).collect()
    }

    fn start(&mut self, version: u64, value: &Value<'_>) -> Result<(), String> {
        for copy in value.copies.iter() {
            self.take(copy, value.length, version)?;
        }
        let (key, copies) = (value.key.to_vec(), value.copies.to_vec());
        let length = value.length;
        self.writes.insert(version, Holding { key, version, length, copies });
        Ok(())
    }

    /// A task has made one more copy.
    fn add_copy(&mut self, object: &ObjectName<'_>, copy: LoggedCopy) -> Result<(), String> {
        let standing = self.standing.get_mut(object.key);
        let Some(holding) = standing.filter(|holding| holding.version == object.version) else {
            return Err(format!("a copy was made of what does not stand: {object:?}"));
        };
        if holding.copies.iter().any(|other| other.ordinal == copy.ordinal) {
            return Err(format!("two copies have one number: {object:?}, {copy:?}"));
        }
        let length = holding.length;
        holding.copies.push(copy.clone());
        self.take(&copy, length, object.version)
    }

    /// A copy was given up while others stay.
    fn drop_copy(&mut self, object: &ObjectName<'_>, ordinal: u16) -> Result<(), String> {
        let standing = self.standing.get_mut(object.key);
        let Some(holding) = standing.filter(|holding| holding.version == object.version) else {
            return Ok(());
        };
        let is_it = |copy: &mut LoggedCopy| copy.ordinal == ordinal;
        let gone: Vec<LoggedCopy> = holding.copies.extract_if(.., is_it).collect();
        if holding.copies.is_empty() && !gone.is_empty() {
            return Err(format!("the last copy was given up of {object:?}"));
        }
        let blocks: Vec<_> = gone.iter().map(|copy| (copy.segment.0, copy.offset)).collect();
        for (segment, offset) in blocks {
            if let Some(book) = self.segments.get_mut(&segment) {
                book.blocks.remove(&offset);
            }
        }
        Ok(())
    }

    /// Memory is somebody's from now on.
    fn take(&mut self, copy: &LoggedCopy, length: u64, version: u64) -> Result<(), String> {
        let Some(book) = self.segments.get_mut(&copy.segment.0) else {
            return Err(format!("memory of a segment that went was given away: {copy:?}"));
        };
        let end = copy.offset + length;
        let before = book.blocks.range(..end).next_back();
        if let Some((&start, &(other_end, owner))) = before
            && other_end > copy.offset
        {
            return Err(format!(
                "version {version} was given {}..{end} while version {owner} has \
                 {start}..{other_end} of the same segment",
                copy.offset
            ));
        }
        book.blocks.insert(copy.offset, (end, version));
        Ok(())
    }

    fn publish(&mut self, version: u64, failed: &[u8], changes: &mut Vec<(Vec<u8>, Change)>) {
        let Some(mut holding) = self.writes.remove(&version) else { return };
        let is_failed = |copy: &LoggedCopy| {
            failed.iter().any(|&ordinal| u64::from(ordinal) == u64::from(copy.ordinal))
        };
        let (given_up, kept): (Vec<_>, Vec<_>) = holding.copies.drain(..).partition(is_failed);
        self.free(&holding, &given_up);
        holding.copies = kept;
        let key = holding.key.clone();
        if let Some(earlier) = self.standing.insert(key.clone(), holding) {
            self.free(&earlier, &earlier.copies);
        }
        changes.push((key, Change::Published(version)));
    }

    fn drop_segment(&mut self, number: u32, changes: &mut Vec<(Vec<u8>, Change)>) {
        self.segments.remove(&number);
        for holding in self.writes.values_mut().chain(self.standing.values_mut()) {
            holding.copies.retain(|copy| copy.segment.0 != number);
        }
        let lost = self.standing.extract_if(|_, holding| holding.copies.is_empty());
        let mut lost: Vec<_> =
            lost.map(|(key, holding)| (key, Change::Gone(holding.version))).collect();
        lost.sort_by(|(one, _), (other, _)| one.cmp(other));
        changes.append(&mut lost);
    }

    fn free(&mut self, holding: &Holding, copies: &[LoggedCopy]) {
        for copy in copies {
            if let Some(book) = self.segments.get_mut(&copy.segment.0) {
                let is_ours = book
                    .blocks
                    .get(&copy.offset)
                    .is_some_and(|&(_, owner)| owner == holding.version);
                if is_ours {
                    book.blocks.remove(&copy.offset);
                }
            }
        }
    }
}
