//! One extent: where records are appended, sealed, and found again.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::{
    directory::Directory,
    error::{Error, Result},
    file_system::{File, Mode, read_exact, write_all},
    format::{
        BLOCK_BYTES, ExtentHead, Layout, Name, RecordHead,
        index::{Entry, Trailer, entries},
        round_up,
    },
};

/// A file of records.
#[derive(Debug)]
pub struct Extent {
    /// The number in the name of the file.
    pub number: u32,
    /// Which use of all extents this is; 0 if it holds nothing.
    pub generation: u64,
    /// What the records of this use repeat.
    pub mark: u64,
    /// The file, through the page cache.
    pub file: Arc<dyn File>,
    /// The file, past the page cache, where the file system can.
    pub direct: Option<Arc<dyn File>>,
    is_sealed: AtomicBool,
    /// Where the bytes end that a sync has brought to the device.
    synced: AtomicU64,
    bytes: u64,
    unit: u64,
}

/// How far the records of an extent were found.
#[derive(Debug)]
pub struct Scanned {
    /// Where the records end.
    pub end: u64,
    /// The first error of the system: records may be missing then.
    pub failure: Option<io::Error>,
}

impl Extent {
    /// Opens an extent and reads its head.
    ///
    /// # Errors
    /// Those of the system.
    pub fn open(directory: &Directory, number: u32, is_writable: bool) -> Result<Self> {
        let path = directory.extent_path(number);
        let mut extent = Self::open_unread(directory, number, is_writable)?;
        // A file that is too short was not allocated to its end: it holds nothing.
        if extent.file.length().map_err(Error::io("read", &path))? >= extent.bytes {
            let mut head = [0; ExtentHead::BYTES];
            read_exact(&*extent.file, &mut head, 0).map_err(Error::io("read", &path))?;
            let id = directory.identity().id;
            let head = ExtentHead::decode(&head).filter(|head| head.directory == id);
            (extent.generation, extent.mark) =
                head.map_or((0, 0), |head| (head.generation, head.mark));
        }
        // If the trailer cannot be read, `scan` says so.
        let is_sealed = extent.generation != 0 && matches!(extent.trailer(), Ok(Some(_)));
        extent.is_sealed = is_sealed.into();
        Ok(extent)
    }

    /// Opens the files of an extent and reads nothing of it, so that what cannot be read can be
    /// written.
    fn open_unread(directory: &Directory, number: u32, is_writable: bool) -> Result<Self> {
        let path = directory.extent_path(number);
        let identity = directory.identity();
        let mode = if is_writable { Mode::Write } else { Mode::Read };
        let file = directory.files().open(&path, mode).map_err(Error::io("open", &path))?;
        let direct = directory.files().open(&path, Mode::Direct).ok();
        let (bytes, unit) = (identity.extent_bytes, identity.unit);
        Ok(Self {
            number,
            generation: 0,
            mark: 0,
            file,
            direct,
            is_sealed: false.into(),
            synced: 0.into(),
            bytes,
            unit,
        })
    }

    /// Makes the file of an extent that holds nothing.
    ///
    /// # Errors
    /// Those of the system; the file is removed again then.
    pub fn create(directory: &Directory, number: u32) -> io::Result<()> {
        let (files, path) = (directory.files(), directory.extent_path(number));
        let file = files.open(&path, Mode::Create)?;
        let made = file.allocate(directory.identity().extent_bytes);
        if made.is_err() {
            // The first error is the one to tell; what stays of the file holds nothing.
            let _ = files.remove(&path);
        }
        made?;
        files.sync_dir(directory.path())
    }

    /// Begins a new use: from here on no record of an earlier use counts, also after a loss of
    /// power.
    ///
    /// # Errors
    /// Those of the system.
    pub fn begin(directory: &Directory, number: u32, generation: u64) -> Result<Self> {
        let extent = Self::open_unread(directory, number, true)?;
        let mark = getrandom::u64().expect("the system has random numbers");
        let begin = || -> io::Result<()> {
            let head = ExtentHead { directory: directory.identity().id, generation, mark };
            write_all(&*extent.file, &[0; Trailer::BYTES], extent.trailer_at())?;
            write_all(&*extent.file, &head.encode(), 0)?;
            extent.file.sync()
        };
        begin().map_err(Error::io("write", directory.extent_path(number)))?;
        Ok(Self { generation, mark, is_sealed: false.into(), synced: 0.into(), ..extent })
    }

    /// Tells whether the extent is full and on the device.
    pub fn is_sealed(&self) -> bool {
        self.is_sealed.load(Ordering::Acquire)
    }

    /// Syncs the bytes before `end`.
    ///
    /// # Errors
    /// Those of the system.
    pub fn sync(&self, end: u64) -> io::Result<()> {
        self.file.sync()?;
        self.synced.fetch_max(end, Ordering::AcqRel);
        self.forget_cached(end);
        Ok(())
    }

    /// Frees the page cache of what is read past it from now on: it would hold the same bytes as the
    /// memory of the store, and count towards the limit of a container.
    fn forget_cached(&self, end: u64) {
        if self.direct.is_some() {
            self.file.forget_cached(end);
        }
    }

    /// Returns what reads of a record past the page cache have to be aligned to; `None` if they
    /// should go through it: its file system cannot do without, or it has bytes that are not on the
    /// device, which such a read would wait for.
    pub(crate) fn direct_alignment(&self, entry: &Entry<'_>, alignment: u64) -> Option<u64> {
        let end = || entry.offset + Layout::of(entry.name, entry.length, self.unit).record_bytes;
        let is_on_device = || self.is_sealed() || end() <= self.synced.load(Ordering::Acquire);
        (self.direct.is_some() && is_on_device()).then_some(alignment)
    }

    /// Returns where the first record begins.
    pub const fn start(&self) -> u64 {
        self.unit
    }

    /// Returns where a record goes that follows the byte `end`, or `None` if the extent has no
    /// place for it, its entry and the entries before.
    pub fn place(&self, end: u64, layout: Layout, index_bytes: u64) -> Option<u64> {
        let offset = round_up(end, layout.alignment);
        let index_at = round_up(offset.checked_add(layout.record_bytes)?, self.unit);
        (index_at.checked_add(index_bytes)? <= self.trailer_at()).then_some(offset)
    }

    /// Syncs the records, then writes the index behind them.
    ///
    /// # Errors
    /// Those of the system; the extent is not sealed then, and its records can be read.
    pub fn seal(&self, end: u64, index: &[u8]) -> io::Result<()> {
        self.file.sync()?;
        let index_at = round_up(end, self.unit);
        let trailer = Trailer {
            mark: self.mark,
            index_at,
            index_bytes: index.len() as u64,
            index_sum: crc32c::crc32c(index),
        };
        write_all(&*self.file, index, index_at)?;
        write_all(&*self.file, &trailer.encode(), self.trailer_at())?;
        self.file.sync()?;
        self.is_sealed.store(true, Ordering::Release);
        self.forget_cached(self.bytes);
        Ok(())
    }

    /// Calls `visit` for each record: those of the index of a sealed extent, otherwise those whose
    /// checksums hold, up to the first head that does not. What the system cannot read is left out: if
    /// that is the index, its records are found by their heads.
    pub fn scan(&self, mut visit: impl FnMut(Entry<'_>)) -> Scanned {
        let mut scanned = Scanned { end: self.start(), failure: None };
        if self.generation == 0 {
            return scanned;
        }
        match self.list() {
            Ok(Some((index_at, index))) => {
                entries(&index).flatten().for_each(visit);
                return Scanned { end: index_at, failure: None };
            }
            Ok(None) => {}
            Err(error) => scanned.failure = Some(error),
        }
        let mut block = Vec::new();
        loop {
            let (head, offset) = match self.head_after(scanned.end) {
                Ok(Some(found)) => found,
                Ok(None) => return scanned,
                Err(error) => {
                    scanned.failure.get_or_insert(error);
                    return scanned;
                }
            };
            let Some(head) = RecordHead::decode(&head) else { return scanned };
            let layout = head.layout(self.unit);
            match self.payload_holds(&head, offset + layout.payload_at, &mut block) {
                Ok(true) => visit(Entry { offset, length: head.length, name: head.name }),
                Ok(false) => {}
                Err(error) => drop(scanned.failure.get_or_insert(error)),
            }
            scanned.end = offset + layout.record_bytes;
        }
    }

    /// Returns the index of a sealed extent and where it lies, if its checksum holds.
    fn list(&self) -> io::Result<Option<(u64, Vec<u8>)>> {
        let Some(trailer) = self.trailer()? else { return Ok(None) };
        let mut index = vec![0; trailer.index_bytes as usize];
        read_exact(&*self.file, &mut index, trailer.index_at)?;
        let is_whole = crc32c::crc32c(&index) == trailer.index_sum;
        Ok(is_whole.then_some((trailer.index_at, index)))
    }

    /// Returns the bytes of the head that follows the byte `end`, packed behind it or on a unit, and
    /// where it lies. What an earlier use left behind `end` may look like a head.
    fn head_after(&self, end: u64) -> io::Result<Option<(Vec<u8>, u64)>> {
        for offset in [end, round_up(end, self.unit)] {
            if offset + 8 > self.trailer_at() {
                return Ok(None);
            }
            let mut first = [0; 8];
            read_exact(&*self.file, &mut first, offset)?;
            let Some(bytes) = RecordHead::announced_bytes(&first) else { continue };
            if offset + bytes as u64 > self.trailer_at() {
                continue;
            }
            let mut head = vec![0; bytes];
            read_exact(&*self.file, &mut head, offset)?;
            let is_here = RecordHead::decode(&head).is_some_and(|head| {
                let layout = head.layout(self.unit);
                head.mark == self.mark
                    && head.offset == offset
                    && self.place(offset, layout, 0) == Some(offset)
            });
            if is_here {
                return Ok(Some((head, offset)));
            }
        }
        Ok(None)
    }

    fn payload_holds(
        &self,
        head: &RecordHead<'_>,
        mut at: u64,
        block: &mut Vec<u8>,
    ) -> io::Result<bool> {
        let mut rest = head.length;
        for number in 0.. {
            if rest == 0 {
                break;
            }
            block.resize(rest.min(BLOCK_BYTES as u64) as usize, 0);
            read_exact(&*self.file, block, at)?;
            if !head.holds(number, block) {
                return Ok(false);
            }
            at += block.len() as u64;
            rest -= block.len() as u64;
        }
        Ok(true)
    }

    /// Tells whether a record that `scan` found can lie where it is said to lie.
    pub fn may_hold(&self, entry: Entry<'_>) -> bool {
        let layout = Layout::of(entry.name, entry.length, self.unit);
        self.place(entry.offset, layout, 0) == Some(entry.offset)
    }

    /// Decodes a head, and returns it only if it is the one of this entry in this use.
    pub fn head_of<'a>(&self, bytes: &'a [u8], entry: Entry<'_>) -> Option<RecordHead<'a>> {
        RecordHead::decode(bytes).filter(|head| {
            head.mark == self.mark
                && head.offset == entry.offset
                && head.length == entry.length
                && head.name == entry.name
        })
    }

    /// Returns the trailer, if the extent is sealed in this use.
    fn trailer(&self) -> io::Result<Option<Trailer>> {
        let mut bytes = [0; Trailer::BYTES];
        read_exact(&*self.file, &mut bytes, self.trailer_at())?;
        let is_inside = |trailer: &Trailer| {
            trailer.index_at >= self.start()
                && trailer.index_at.saturating_add(trailer.index_bytes) <= self.trailer_at()
        };
        Ok(Trailer::decode(&bytes)
            .filter(|trailer| trailer.mark == self.mark && is_inside(trailer)))
    }

    const fn trailer_at(&self) -> u64 {
        self.bytes - self.unit
    }

    /// Returns the unit of the directory.
    pub const fn unit(&self) -> u64 {
        self.unit
    }
}

/// Tells whether a record of this name and length fits into an empty extent.
pub fn fits(name: Name<'_>, length: u64, unit: u64, extent_bytes: u64) -> bool {
    fits_lengths(name.tenant.len(), name.key.len(), length, unit, extent_bytes)
}

/// Returns the length of the longest payload that fits into an empty extent beside a tenant and a key
/// of these lengths; 0 if none does.
pub const fn payload_bytes_max(
    tenant_bytes: usize,
    key_bytes: usize,
    unit: u64,
    extent_bytes: u64,
) -> u64 {
    let (mut fitting, mut too_long) = (0, extent_bytes);
    while fitting + 1 < too_long {
        let length = fitting + (too_long - fitting) / 2;
        if fits_lengths(tenant_bytes, key_bytes, length, unit, extent_bytes) {
            fitting = length;
        } else {
            too_long = length;
        }
    }
    fitting
}

/// Tells the same as [`fits`], of the lengths of a tenant and a key.
const fn fits_lengths(
    tenant_bytes: usize,
    key_bytes: usize,
    length: u64,
    unit: u64,
    extent_bytes: u64,
) -> bool {
    let layout = Layout::new(tenant_bytes, key_bytes, length, unit);
    let records = round_up(unit.saturating_add(layout.record_bytes), unit);
    let entry_bytes = Entry::bytes_of_lengths(tenant_bytes, key_bytes);
    records.saturating_add(entry_bytes) <= extent_bytes - unit
}
