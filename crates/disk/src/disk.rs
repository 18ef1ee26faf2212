//! The store of one directory: writes, reads, removal, and reuse of extents.

mod reading;
#[cfg(test)]
mod tests;
mod writing;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    path::Path,
    sync::Arc,
};

use mooncake_base::counters;

pub use reading::{Read, ReadOutcome, ReadRequest};
pub use writing::{Ticket, Write, WriteOutcome, WriteReport};

use crate::{
    directory::Directory,
    error::{Error, Result},
    extent::{Extent, payload_bytes_max},
    file_system::{FileSystem, RealFiles},
    format::{Name, index::Entry},
    index::{Index, Place},
    reader::{ARENA_BYTES, ChosenReadMethod, ReadMethod, Reader},
};

/// Tells whether an extent may be used again: its number, and its generation when it was dropped.
type Gate = Arc<dyn Fn(u32, u64) -> bool + Send + Sync>;

/// How a directory is used.
#[derive(Clone)]
pub struct Options {
    /// The bytes that all extents together may take.
    pub capacity: u64,
    /// The bytes of the file system that stay free: no extent is added below, and those that are
    /// there are given up while other data takes what should be free, down to a quarter of the
    /// capacity. See [`Disk::trim`].
    pub free_bytes_min: u64,
    /// The free bytes of the file system up to which extents are given up once there are fewer than
    /// `free_bytes_min`; not more than that: until there are as many as that.
    pub free_bytes_low: u64,
    /// The most records in the directory; the oldest and least read ones make room.
    pub records_max: u64,
    /// How records are read.
    pub read_method: ReadMethod,
    /// The threads that read, if no ring does.
    pub reads_in_flight: usize,
    /// The bytes of memory for reads that cannot go straight to memory of the caller.
    pub arena_bytes: usize,
    /// Asked before an extent whose records were dropped is used again: `true` once no reader of an
    /// old place can be in flight.
    pub may_reuse: Gate,
    /// The file system.
    pub files: Arc<dyn FileSystem>,
}

impl Options {
    /// Returns options for a directory of this capacity.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            free_bytes_min: 0,
            free_bytes_low: 0,
            records_max: u64::MAX,
            read_method: ReadMethod::Probe,
            reads_in_flight: 32,
            arena_bytes: ARENA_BYTES,
            may_reuse: Arc::new(|_, _| true),
            files: Arc::new(RealFiles),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("capacity", &self.capacity)
            .field("free_bytes_min", &self.free_bytes_min)
            .field("free_bytes_low", &self.free_bytes_low)
            .field("records_max", &self.records_max)
            .field("read_method", &self.read_method)
            .field("reads_in_flight", &self.reads_in_flight)
            .field("arena_bytes", &self.arena_bytes)
            .finish_non_exhaustive()
    }
}

counters! {
    /// Counts what a directory does.
    struct DiskCounters;
    /// What a directory holds and did since it was opened.
    #[derive(Copy)]
    pub struct Statistics {
        /// Records that can be read.
        pub records: u64,
        /// Bytes of all extents.
        pub allocated_bytes: u64,
        /// Bytes of memory that the index takes.
        pub index_bytes: u64,
        /// Reads past the page cache that the system refused, so that they went through it.
        pub direct_refused: u64,
        /// Reads that gave a part of what was asked for, and were continued.
        pub continued: u64,
    }
    METRICS {
        /// Records written, those that were moved included.
        written,
        /// Payload bytes of these.
        written_bytes,
        /// Bytes of the files that these take, with their heads.
        file_bytes,
        /// Records read whose checksums held.
        read,
        /// Payload bytes of these.
        read_bytes,
        /// Records of which all bytes were read past the page cache straight into memory of the caller.
        read_in_place,
        /// Records that were found to be damaged, and dropped.
        bad,
        /// Records dropped because their extent is used again.
        evicted,
        /// Records moved out of such an extent.
        moved,
        /// Extents given back to the file system.
        trimmed,
        /// Extents that could not be read or written, and are used again only if there is no other.
        set_aside,
        /// Writes refused because no extent was free.
        refused,
        /// Writes and seals that failed.
        failed,
    }
}

/// What reads and writes share. Never held while a file is read or written.
#[derive(Debug)]
struct DiskState {
    index: Index,
    extents: BTreeMap<u32, Arc<Extent>>,
    /// The extents that could not be opened and have not been begun anew since.
    unreadable: BTreeSet<u32>,
    /// Records that were dropped, and that no report names.
    unnamed: u64,
    synced: Ticket,
}

impl DiskState {
    fn new() -> Self {
        Self {
            index: Index::new(),
            extents: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            unnamed: 0,
            synced: Ticket::default(),
        }
    }

    fn add(&mut self, extent: Arc<Extent>) {
        self.unreadable.remove(&extent.number);
        self.extents.insert(extent.number, extent);
    }

    /// Forgets the records of an extent whose names are not known; returns their number.
    fn remove_unnamed(&mut self, extent: u32) -> u64 {
        let removed = self.index.remove_extent(extent);
        self.unnamed += removed;
        removed
    }

    /// Returns the number of the files of extents.
    fn files(&self) -> u64 {
        (self.extents.len() + self.unreadable.len()) as u64
    }
}

/// An open directory of records. All calls block; they may come from any number of threads.
///
/// Where both are held, the lock of the writer is taken before that of the state.
#[derive(Debug)]
pub struct Disk {
    directory: Directory,
    options: Options,
    state: mooncake_base::sync::Mutex<DiskState>,
    writer: mooncake_base::sync::Mutex<writing::Writer>,
    reader: Reader,
    counters: DiskCounters,
}

impl Disk {
    /// Opens a directory, which is made if it does not exist, and finds the records in it. What the
    /// device cannot read is left out, and logged.
    ///
    /// # Errors
    /// If another process has it open, if a later version made it, if it holds other files, and
    /// those of the system.
    pub fn open(path: &Path, options: Options) -> Result<Self> {
        let directory = Directory::open(options.files.clone(), path, options.capacity)?;
        let reader = Reader::start(
            options.read_method,
            options.reads_in_flight,
            options.arena_bytes,
            directory.direct_alignment(),
            &directory.open_identity()?,
        )?;
        let mut state = DiskState::new();
        let mut writer = writing::Writer::default();
        let counters = DiskCounters::default();
        let mut opened = Vec::new();
        for number in directory.extents()? {
            match Extent::open(&directory, number, true) {
                Ok(extent) => opened.push(extent),
                Err(error) if error.is_of_medium() => {
                    tracing::warn!(%error, "a file of records is left out");
                    counters.set_aside.increment();
                    writer.count_unreadable(number);
                    state.unreadable.insert(number);
                }
                Err(error) => return Err(error),
            }
        }
        // A copy that was moved lies in a later use: it replaces the one it was made of.
        opened.sort_by_key(|extent| extent.generation);
        for extent in opened {
            writer.count_extent(&extent);
            if extent.generation != 0
                && let Err(error) = adopt(&mut state.index, &extent)
            {
                let path = directory.extent_path(extent.number);
                tracing::warn!(
                    path = %path.display(), %error, "a file of records is read in part, or not sealed"
                );
            }
            state.extents.insert(extent.number, Arc::new(extent));
        }
        Ok(Self {
            directory,
            options,
            state: mooncake_base::sync::Mutex::new(state),
            writer: mooncake_base::sync::Mutex::new(writer),
            reader,
            counters,
        })
    }

    /// Returns the id of the directory as text; a copy of the directory has the same.
    pub fn id(&self) -> String {
        self.directory.identity().id_text()
    }

    /// Returns how often the directory was opened, this time included.
    pub const fn incarnation(&self) -> u64 {
        self.directory.identity().incarnation
    }

    /// Returns what addresses are multiples of that a record can be read to without a copy.
    pub fn direct_alignment(&self) -> u64 {
        self.reader.direct_alignment()
    }

    /// Returns the length of the longest payload that the directory can take under a tenant and a key
    /// of these lengths: a longer one is [`WriteOutcome::TooLong`]. 0 if it takes none.
    pub const fn payload_bytes_max(&self, tenant_bytes: usize, key_bytes: usize) -> u64 {
        let identity = self.directory.identity();
        payload_bytes_max(tenant_bytes, key_bytes, identity.unit, identity.extent_bytes)
    }

    /// Returns how records are read, and why.
    pub const fn read_method(&self) -> &ChosenReadMethod {
        self.reader.chosen()
    }

    /// Returns the length of the record of this name, if there is one.
    pub fn length(&self, name: Name<'_>) -> Option<u64> {
        let found = self.state.lock().index.get(name)?;
        (found.version == name.version).then_some(found.length)
    }

    /// Forgets the record of this name; tells whether there was one. Its bytes stay in the directory
    /// until the extent is used again, and the record is found again by the next `open` before that:
    /// it has the same version.
    pub fn remove(&self, name: Name<'_>) -> bool {
        let mut state = self.state.lock();
        let found = state.index.get(name).filter(|found| found.version == name.version);
        found.is_some_and(|found| state.index.remove(name, found))
    }

    /// Calls `visit` with the name and length of each record that can be read, in the order of
    /// their extents. Reads the lists of sealed extents, and the records of open ones. Extents whose
    /// list cannot be read are left out as far as that, and logged.
    ///
    /// # Errors
    /// Those of the system, if no record can be listed for them.
    pub fn records(&self, mut visit: impl FnMut(Name<'_>, u64)) -> Result<()> {
        let extents: Vec<_> = self.state.lock().extents.values().cloned().collect();
        let (mut visited, mut failed) = (0_u64, None);
        for extent in extents {
            let scanned = extent.scan(|entry| {
                let found = self.state.lock().index.get(entry.name);
                if found == Some(place_of(&extent, entry)) {
                    visited += 1;
                    visit(entry.name, entry.length);
                }
            });
            if let Some(error) = scanned.failure {
                let error = Error::io("read", self.directory.extent_path(extent.number))(error);
                tracing::warn!(%error, "records of a file are not listed");
                failed.get_or_insert(error);
            }
        }
        match failed {
            Some(error) if visited == 0 && self.state.lock().index.len() > 0 => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes the number of records that were dropped without a name in any report, since their extent
    /// could not be read. Those that are left are what [`Self::records`] lists.
    pub fn take_unnamed(&self) -> u64 {
        std::mem::take(&mut self.state.lock().unnamed)
    }

    /// Returns what the directory holds and did.
    pub fn statistics(&self) -> Statistics {
        let (records, extents, index_bytes) = {
            let state = self.state.lock();
            (state.index.len(), state.files(), state.index.memory_bytes())
        };
        let events = self.reader.events();
        Statistics {
            records: records as u64,
            allocated_bytes: extents * self.directory.identity().extent_bytes,
            index_bytes: index_bytes as u64,
            direct_refused: events.direct_refused,
            continued: events.continued,
            ..self.counters.snapshot()
        }
    }
}

/// Enters the records of an extent, and seals it if it was open and could be read to its end.
fn adopt(index: &mut Index, extent: &Extent) -> io::Result<()> {
    let mut list = Vec::new();
    let was_sealed = extent.is_sealed();
    let scanned = extent.scan(|entry| {
        if !was_sealed {
            entry.encode(&mut list);
        }
        if index.get(entry.name).is_none_or(|found| found.version <= entry.name.version) {
            index.insert(entry.name, place_of(extent, entry));
        }
    });
    if let Some(error) = scanned.failure {
        return Err(error);
    }
    if was_sealed {
        return Ok(());
    }
    match extent.seal(scanned.end, &list) {
        // The records can be read without a list; the next start reads them again.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Ok(()),
        outcome => outcome,
    }
}

const fn place_of(extent: &Extent, entry: Entry<'_>) -> Place {
    Place {
        extent: extent.number,
        offset: entry.offset,
        length: entry.length,
        version: entry.name.version,
    }
}
