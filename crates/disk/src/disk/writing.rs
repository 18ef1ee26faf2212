//! Writes: records are appended to the open extent; a full one is sealed, and an old one reused.

mod reuse;

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Disk, place_of};
use crate::{
    error::{Error, Result},
    extent::{Extent, fits},
    file_system::{is_full, write_all},
    format::{
        LARGE_BYTES, Layout, Name, OwnedName, RecordHead,
        index::{Entry, entries},
    },
    index::Place,
};

/// The open extent, and one that its records can be moved to.
const EXTENTS_MIN: u64 = 2;

/// The writes that may fail in one extent; the next one goes to another extent.
const FAILURES_MAX: u32 = 2;

/// The share of the extents that may be set aside because they could not be written: if all fail, the
/// device does, and their records need not go.
const SET_ASIDE_SHARE: u64 = 8;

/// How long no write is tried after one has failed.
const PAUSE: Duration = Duration::from_secs(1);

/// A record to write.
#[derive(Debug, Clone, Copy)]
pub struct Write<'a> {
    /// Its name.
    pub name: Name<'a>,
    /// Its bytes.
    pub payload: &'a [u8],
}

/// A moment in the order of writes: a record is on the device once its ticket is at most
/// [`Disk::synced`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket {
    generation: u64,
    end: u64,
}

/// What became of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteOutcome {
    /// It can be read, and survives the end of the process; a loss of power only once it is synced.
    Written(Ticket),
    /// A later version of the object is there.
    Superseded,
    /// The name or the payload is too long for a record.
    TooLong,
    /// No extent is free: the capacity or the file system is full, and none may be used again yet.
    Full,
    /// The system could not write it. Writes are tried again after a second.
    Failed(String),
}

/// The outcomes of a batch, and what had to go for it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct WriteReport {
    /// In the order of the writes.
    pub outcomes: Vec<WriteOutcome>,
    /// Records that were dropped with their extent.
    pub evicted: Vec<OwnedName>,
}

/// The extent that records are appended to.
#[derive(Debug)]
struct Open {
    extent: Arc<Extent>,
    end: u64,
    index: Vec<u8>,
    /// The writes that failed here, other than for want of space.
    failures: u32,
    /// Whether a sync has failed: then the system may have dropped what it did not write, and a
    /// later sync that succeeds says nothing of it.
    has_failed: bool,
}

impl Open {
    fn sync(&mut self) -> io::Result<()> {
        if self.has_failed {
            return Err(io::Error::other("an earlier sync of this file has failed"));
        }
        self.extent.sync(self.end).inspect_err(|_| self.has_failed = true)
    }
}

/// What only writes use.
#[derive(Debug, Default)]
pub(super) struct Writer {
    open: Option<Open>,
    /// Extents without records that count, and the generation that they had.
    unused: Vec<(u32, u64)>,
    /// The same of extents that could not be read or written: used again if there is no other.
    set_aside: Vec<(u32, u64)>,
    /// Extents with records that could not be listed while no other could.
    skipped: Vec<u32>,
    next_number: u32,
    generation: u64,
    paused_until: Option<Instant>,
    /// Whether extents are given up until the file system has `free_bytes_low` free bytes.
    gives_up: bool,
    head: Vec<u8>,
}

impl Writer {
    /// Takes an extent of an earlier process into account.
    pub(super) fn count_extent(&mut self, extent: &Extent) {
        self.next_number = self.next_number.max(extent.number + 1);
        self.generation = self.generation.max(extent.generation);
        if extent.generation == 0 {
            self.unused.push((extent.number, 0));
        }
    }

    /// Takes an extent of an earlier process into account that cannot be read.
    pub(super) fn count_unreadable(&mut self, number: u32) {
        self.next_number = self.next_number.max(number + 1);
        self.set_aside.push((number, 0));
    }

    /// Tells whether an extent holds no record that counts.
    fn has_given_up(&self, number: u32) -> bool {
        self.unused.iter().chain(&self.set_aside).any(|(other, _)| *other == number)
    }
}

/// Why a record was not appended.
enum AppendRefusal {
    Full,
    Io(String),
}

impl From<io::Error> for AppendRefusal {
    fn from(error: io::Error) -> Self {
        if is_full(&error) { Self::Full } else { Self::Io(error.to_string()) }
    }
}

impl From<Error> for AppendRefusal {
    fn from(error: Error) -> Self {
        match error {
            Error::Io { source, .. } => source.into(),
            other => Self::Io(other.to_string()),
        }
    }
}

impl Disk {
    /// Writes records; none waits for the device.
    pub fn write(&self, batch: &[Write<'_>]) -> WriteReport {
        let mut report = WriteReport::default();
        if self.reader.is_forked() {
            let why = "the process is a fork of the one that has the directory open";
            report.outcomes = vec![WriteOutcome::Failed(why.to_owned()); batch.len()];
            return report;
        }
        let mut writer = self.writer.lock();
        for write in batch {
            let outcome = self.write_one(&mut writer, *write, &mut report.evicted);
            report.outcomes.push(outcome);
        }
        report
    }

    /// Waits until all that was written is on the device; returns the newest ticket of it.
    ///
    /// # Errors
    /// Those of the system. What was not synced then is dropped by the next write that needs another
    /// extent, and named in its report.
    pub fn sync(&self) -> Result<Ticket> {
        let mut writer = self.writer.lock();
        if let Some(open) = &mut writer.open {
            let path = self.directory.extent_path(open.extent.number);
            open.sync().map_err(Error::io("sync", path))?;
            self.state.lock().synced = Ticket { generation: open.extent.generation, end: open.end };
        }
        Ok(self.synced())
    }

    /// Returns the newest ticket whose records, and all before, are on the device.
    pub fn synced(&self) -> Ticket {
        self.state.lock().synced
    }

    /// Gives an extent back to the file system if that has fewer free bytes than
    /// [`Options::free_bytes_min`](super::Options::free_bytes_min) or if the directory is larger than
    /// its capacity; returns the records that were dropped with it. Writes do the same whenever they
    /// need an extent; call this from time to time where nothing may be written for long.
    ///
    /// Other data that fills the file system never takes more than three quarters of the capacity.
    ///
    /// # Errors
    /// Those of the system.
    pub fn trim(&self) -> Result<Vec<OwnedName>> {
        let mut evicted = Vec::new();
        if !self.reader.is_forked() {
            let trimmed = self.trim_one(&mut self.writer.lock(), &mut evicted);
            trimmed.map_err(Error::io("trim", self.directory.path()))?;
        }
        Ok(evicted)
    }

    fn trim_one(&self, writer: &mut Writer, evicted: &mut Vec<OwnedName>) -> io::Result<()> {
        if !self.is_too_large(writer) {
            return Ok(());
        }
        // One stays unused, so that records can be moved out of the next one.
        if writer.unused.len() < 2 {
            self.drop_oldest(writer, evicted)?;
        }
        let Some(at) = self.unused_extent_at(writer) else { return Ok(()) };
        let number = writer.unused[at].0;
        self.directory.files().remove(&self.directory.extent_path(number))?;
        writer.unused.remove(at);
        self.state.lock().extents.remove(&number);
        self.counters.trimmed.increment();
        Ok(())
    }

    /// Tells whether an extent should be given back.
    fn is_too_large(&self, writer: &mut Writer) -> bool {
        let bytes = self.directory.identity().extent_bytes;
        let extents = self.state.lock().files();
        if extents * bytes > self.options.capacity {
            return extents > EXTENTS_MIN;
        }
        let extents_min = (self.options.capacity / 4).div_ceil(bytes).max(EXTENTS_MIN);
        let Ok(space) = self.directory.files().space(self.directory.path()) else { return false };
        writer.gives_up = space.free < self.free_bytes_wanted(writer);
        writer.gives_up && extents > extents_min
    }

    /// Returns the bytes of the file system that are to be free.
    fn free_bytes_wanted(&self, writer: &Writer) -> u64 {
        if writer.gives_up {
            self.options.free_bytes_low.max(self.options.free_bytes_min)
        } else {
            self.options.free_bytes_min
        }
    }

    /// Seals the open extent and gives the directory up.
    ///
    /// # Errors
    /// Those of the system. The records can be found again also then.
    pub fn close(self) -> Result<()> {
        if self.reader.is_forked() {
            return Ok(());
        }
        let mut dropped = Vec::new();
        self.seal(&mut self.writer.lock(), &mut dropped)
            .map_err(Error::io("seal", self.directory.path()))
    }

    fn write_one(
        &self,
        writer: &mut Writer,
        write: Write<'_>,
        evicted: &mut Vec<OwnedName>,
    ) -> WriteOutcome {
        let (name, length) = (write.name, write.payload.len() as u64);
        let identity = self.directory.identity();
        if !name.is_valid() || !fits(name, length, identity.unit, identity.extent_bytes) {
            return WriteOutcome::TooLong;
        }
        let found = self.state.lock().index.get(name);
        if found.is_some_and(|found| found.version > name.version) {
            return WriteOutcome::Superseded;
        }
        if writer.paused_until.is_some_and(|until| Instant::now() < until) {
            self.counters.refused.increment();
            return WriteOutcome::Failed("a write has failed less than a second ago".to_owned());
        }
        writer.paused_until = None;
        let has_room = match found {
            Some(_) => Ok(()),
            None => self.make_room_for_a_name(writer, evicted),
        };
        let appended = has_room.map_err(AppendRefusal::from).and_then(|()| {
            loop {
                if let Some(ticket) = self.append(writer, write, None)? {
                    return Ok(ticket);
                }
                self.next_extent(writer, evicted)?;
            }
        });
        match appended {
            Ok(ticket) => WriteOutcome::Written(ticket),
            Err(AppendRefusal::Full) => {
                self.counters.refused.increment();
                WriteOutcome::Full
            }
            Err(AppendRefusal::Io(why)) => {
                self.counters.failed.increment();
                writer.paused_until = Some(Instant::now() + PAUSE);
                WriteOutcome::Failed(why)
            }
        }
    }

    /// Drops the oldest records where there are as many as there may be.
    fn make_room_for_a_name(
        &self,
        writer: &mut Writer,
        evicted: &mut Vec<OwnedName>,
    ) -> io::Result<()> {
        let is_full = || self.state.lock().index.len() as u64 >= self.options.records_max;
        if is_full() {
            self.drop_oldest(writer, evicted)?;
        }
        if is_full() {
            // They are in the open extent.
            self.seal(writer, evicted)?;
            self.drop_oldest(writer, evicted)?;
        }
        Ok(())
    }

    /// Appends a record to the open extent, or returns `None` if there is none that has a place.
    /// A record that was written in part is overwritten by the next. One that is moved from a place
    /// counts only if it was not removed meanwhile.
    fn append(
        &self,
        writer: &mut Writer,
        write: Write<'_>,
        moved_from: Option<Place>,
    ) -> io::Result<Option<Ticket>> {
        let Some(open) = writer.open.as_mut().filter(|open| open.failures < FAILURES_MAX) else {
            return Ok(None);
        };
        let (extent, name) = (&open.extent, write.name);
        let length = write.payload.len() as u64;
        let layout = Layout::of(name, length, extent.unit());
        let index_bytes = open.index.len() as u64 + Entry::bytes_of(name);
        let Some(offset) = extent.place(open.end, layout, index_bytes) else { return Ok(None) };
        writer.head.clear();
        RecordHead::encode(name, extent.mark, offset, write.payload, &mut writer.head);
        let written = if length < LARGE_BYTES {
            writer.head.extend_from_slice(write.payload);
            Ok(())
        } else {
            write_all(&*extent.file, write.payload, offset + layout.payload_at)
        };
        let written = written.and_then(|()| write_all(&*extent.file, &writer.head, offset));
        written.inspect_err(|error| open.failures += u32::from(!is_full(error)))?;
        let entry = Entry { offset, length, name };
        entry.encode(&mut open.index);
        open.end = offset + layout.record_bytes;
        let place = place_of(extent, entry);
        let mut state = self.state.lock();
        if moved_from.is_none() || state.index.get(name) == moved_from {
            state.index.insert(name, place);
        }
        drop(state);
        self.counters.written.increment();
        self.counters.written_bytes.add(length);
        self.counters.file_bytes.add(layout.record_bytes);
        Ok(Some(Ticket { generation: extent.generation, end: open.end }))
    }

    /// Seals the open extent. If that fails, its records are dropped: some may not be on the device.
    fn seal(&self, writer: &mut Writer, evicted: &mut Vec<OwnedName>) -> io::Result<()> {
        let Some(mut open) = writer.open.take() else { return Ok(()) };
        let sealed =
            if open.has_failed { open.sync() } else { open.extent.seal(open.end, &open.index) };
        if sealed.is_ok() {
            self.state.lock().synced = Ticket { generation: open.extent.generation, end: open.end };
            return sealed;
        }
        for entry in entries(&open.index).flatten() {
            let place = place_of(&open.extent, entry);
            self.evict(entry.name, place, evicted);
        }
        let number = (open.extent.number, open.extent.generation);
        if open.failures == 0 {
            writer.unused.push(number);
        } else {
            self.set_aside(writer, number);
        }
        sealed
    }

    fn evict(&self, name: Name<'_>, place: Place, evicted: &mut Vec<OwnedName>) {
        if self.state.lock().index.remove(name, place) {
            self.counters.evicted.increment();
            evicted.push(name.to_owned());
        }
    }

    /// Seals the open extent and begins another. Keeps one unused behind it, so that records can be
    /// moved out of an old extent before that is given up.
    fn next_extent(
        &self,
        writer: &mut Writer,
        evicted: &mut Vec<OwnedName>,
    ) -> std::result::Result<(), AppendRefusal> {
        self.seal(writer, evicted)?;
        let mut found = self.unused_extent(writer)?;
        if found.is_none() {
            if writer.unused.is_empty() {
                self.drop_oldest(writer, evicted)?;
            }
            found = self.unused_extent(writer)?.or_else(|| self.take_set_aside(writer));
        }
        let number = found.ok_or(AppendRefusal::Full)?;
        writer.generation += 1;
        let begun = Extent::begin(&self.directory, number, writer.generation);
        let extent = Arc::new(begun.inspect_err(|error| {
            if error.is_of_medium() {
                tracing::warn!(%error, "a file of records is set aside");
                self.set_aside(writer, (number, 0));
            } else {
                writer.unused.push((number, 0));
            }
        })?);
        self.state.lock().add(extent.clone());
        let end = extent.start();
        writer.open = Some(Open { extent, end, index: Vec::new(), failures: 0, has_failed: false });
        if self.trim_one(writer, evicted).is_err() {
            self.counters.failed.increment();
        }
        if writer.unused.is_empty() && !self.may_create(writer) {
            self.drop_oldest(writer, evicted)?;
        }
        Ok(())
    }

    /// Takes an extent that may be used again, or makes one.
    fn unused_extent(
        &self,
        writer: &mut Writer,
    ) -> std::result::Result<Option<u32>, AppendRefusal> {
        if let Some(at) = self.unused_extent_at(writer) {
            return Ok(Some(writer.unused.remove(at).0));
        }
        if !self.may_create(writer) {
            return Ok(None);
        }
        let number = writer.next_number;
        match Extent::create(&self.directory, number).map_err(AppendRefusal::from) {
            Ok(()) => {}
            // The file system is full: there may be an extent to use again.
            Err(AppendRefusal::Full) => return Ok(None),
            Err(refusal) => return Err(refusal),
        }
        writer.next_number += 1;
        Ok(Some(number))
    }

    /// Returns the place in the list of unused extents of one that no reader can need.
    fn unused_extent_at(&self, writer: &Writer) -> Option<usize> {
        writer.unused.iter().position(|unused| self.has_no_reader(unused.0, unused.1))
    }

    fn has_no_reader(&self, number: u32, generation: u64) -> bool {
        generation == 0 || (self.options.may_reuse)(number, generation)
    }

    /// Takes an extent that was set aside: what could not be read can often be written.
    fn take_set_aside(&self, writer: &mut Writer) -> Option<u32> {
        let at = writer.set_aside.iter().position(|aside| self.has_no_reader(aside.0, aside.1))?;
        Some(writer.set_aside.remove(at).0)
    }

    /// Uses an extent that failed only if there is no other. There is a limit, beyond which it is used
    /// again like any.
    fn set_aside(&self, writer: &mut Writer, extent: (u32, u64)) {
        let max = (self.state.lock().files() / SET_ASIDE_SHARE).max(1);
        self.counters.set_aside.increment();
        if (writer.set_aside.len() as u64) < max {
            writer.set_aside.push(extent);
        } else {
            writer.unused.push(extent);
        }
    }

    /// Tells whether the capacity and the file system have room for one more extent.
    fn may_create(&self, writer: &Writer) -> bool {
        let bytes = self.directory.identity().extent_bytes;
        let extents = self.state.lock().files();
        let is_open = writer.next_number < u32::MAX;
        let space = self.directory.files().space(self.directory.path());
        is_open
            && (extents + 1) * bytes <= self.options.capacity
            && space.is_ok_and(|space| space.free >= self.free_bytes_wanted(writer) + bytes)
    }
}
