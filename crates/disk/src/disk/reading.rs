//! Reads: all records of a batch at the same time, each compared and checked before it counts.

use std::{io, io::IoSliceMut, sync::Arc, thread};

use mooncake_base::sync::Mutex;

use super::{Disk, add};
use crate::{
    extent::Extent,
    file_system::{File, read_exact},
    format::{BLOCK_BYTES, LARGE_BYTES, Layout, Name, index::Entry, round_up},
    index::Place,
};

/// Payload that goes through memory of ours at once; a multiple of a block.
const CHUNK_BYTES: usize = 4 * BLOCK_BYTES;

/// The length of the longest head, and more: its parts have limits.
const HEAD_BYTES_MAX: usize = 256 * 1024;

/// A record to read.
#[derive(Debug)]
pub struct Read<'a> {
    /// Its name.
    pub name: Name<'a>,
    /// Where the payload goes; of its length, which [`Disk::length`] returns. Memory whose address
    /// and length are multiples of the unit of the directory is read into without a copy.
    pub into: &'a mut [u8],
}

/// What became of a read. Only of [`ReadOutcome::Good`] do the bytes count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The memory holds the payload, and its checksums hold.
    Good,
    /// There is no such record.
    Missing,
    /// The memory is of another length than the payload, which is this one.
    Length(u64),
    /// The record is damaged. It was dropped.
    Bad,
    /// The system could not read it. A later read may succeed.
    Failed(String),
}

/// Memory whose address is a multiple of any unit.
#[derive(Debug)]
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize, unit: usize) -> Self {
        let bytes = vec![0; length + unit];
        let start = bytes.as_ptr().align_offset(unit);
        Self { bytes, start, length }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

/// The memory of ours that one read at a time goes through.
#[derive(Debug)]
pub(super) struct Buffers {
    head: Aligned,
    chunk: Aligned,
}

struct Job<'a, 'b> {
    number: usize,
    read: &'b mut Read<'a>,
    extent: Arc<Extent>,
    place: Place,
}

impl Disk {
    /// Reads records; the outcomes are in the order of the reads.
    pub fn read(&self, reads: &mut [Read<'_>]) -> Vec<ReadOutcome> {
        let mut outcomes = vec![ReadOutcome::Missing; reads.len()];
        let mut jobs = Vec::with_capacity(reads.len());
        {
            let mut state = self.state.lock();
            for (number, read) in reads.iter_mut().enumerate() {
                let found = state.index.get(read.name);
                let Some(place) = found.filter(|found| found.version == read.name.version) else {
                    continue;
                };
                if place.length != read.into.len() as u64 {
                    outcomes[number] = ReadOutcome::Length(place.length);
                } else if let Some(extent) = state.extents.get(&place.extent).cloned() {
                    state.index.touch(read.name);
                    jobs.push(Job { number, read, extent, place });
                }
            }
        }
        // The device reads neighbours faster, and one file after the other.
        jobs.sort_by_key(|job| (job.place.extent, job.place.offset));
        let threads = jobs.len().min(self.options.reads_in_flight).max(1);
        let jobs = Mutex::new(jobs.into_iter());
        let done = Mutex::new(&mut outcomes);
        let work = || {
            let mut buffers = self.take_buffers();
            loop {
                let Some(mut job) = jobs.lock().next() else { break };
                let outcome = self.read_one(&mut job, &mut buffers);
                done.lock()[job.number] = outcome;
            }
            self.buffers.lock().push(buffers);
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                // A thread that cannot be started leaves its share to the others.
                let _ = thread::Builder::new().name("disk-read".into()).spawn_scoped(scope, work);
            }
            work();
        });
        outcomes
    }

    fn take_buffers(&self) -> Buffers {
        let unit = self.directory.identity().unit as usize;
        self.buffers.lock().pop().unwrap_or_else(|| Buffers {
            head: Aligned::new(HEAD_BYTES_MAX, unit),
            chunk: Aligned::new(CHUNK_BYTES, unit),
        })
    }

    fn read_one(&self, job: &mut Job<'_, '_>, buffers: &mut Buffers) -> ReadOutcome {
        loop {
            let outcome = self.read_at(job, buffers);
            let name = job.read.name;
            let bytes = job.place.length;
            match outcome {
                Ok(true) => {
                    add(&self.counters.read, 1);
                    add(&self.counters.read_bytes, bytes);
                    return ReadOutcome::Good;
                }
                Ok(false) => {}
                Err(error) => return ReadOutcome::Failed(error.to_string()),
            }
            // Its extent may have been used again meanwhile: then it lies elsewhere, or nowhere.
            let mut state = self.state.lock();
            let place = match state.index.get(name) {
                Some(place) if place.version == name.version && place.length == bytes => place,
                _ => return ReadOutcome::Missing,
            };
            let extent = state.extents.get(&place.extent).cloned();
            let Some(extent) = extent else { return ReadOutcome::Missing };
            if place == job.place && extent.mark == job.extent.mark {
                state.index.remove(name, place);
                add(&self.counters.bad, 1);
                return ReadOutcome::Bad;
            }
            (job.place, job.extent) = (place, extent);
        }
    }

    /// Reads a record where it should lie; `false` if another one or a damaged one lies there.
    fn read_at(&self, job: &mut Job<'_, '_>, buffers: &mut Buffers) -> io::Result<bool> {
        let Job { read, extent, place, .. } = job;
        let entry = Entry { offset: place.offset, length: place.length, name: read.name };
        let unit = extent.unit();
        let layout = Layout::of(read.name, place.length, unit);
        if place.length < LARGE_BYTES {
            return read_packed(extent, entry, layout, read.into, buffers.chunk.get());
        }
        let head = &mut buffers.head.get()[..layout.payload_at as usize];
        let is_aligned = read.into.as_ptr().align_offset(unit as usize) == 0
            && place.length.is_multiple_of(unit);
        if is_aligned {
            read_vectored(extent, head, read.into, entry.offset)?;
            let head = extent.head_of(&head[..layout.head_bytes as usize], entry);
            add(&self.counters.read_in_place, 1);
            return Ok(head.is_some_and(|head| head.holds_all(read.into)));
        }
        let chunk = buffers.chunk.get();
        let first = padded(place.length, 0, unit);
        read_vectored(extent, head, &mut chunk[..first], entry.offset)?;
        let head = extent.head_of(&head[..layout.head_bytes as usize], entry);
        let Some(head) = head else { return Ok(false) };
        for (number, part) in read.into.chunks_mut(CHUNK_BYTES).enumerate() {
            let at = number * CHUNK_BYTES;
            if number > 0 {
                let bytes = padded(place.length, at as u64, unit);
                let offset = entry.offset + layout.payload_at + at as u64;
                read_vectored(extent, &mut [], &mut chunk[..bytes], offset)?;
            }
            let block = number * CHUNK_BYTES / BLOCK_BYTES;
            let holds = |(index, bytes): (usize, &[u8])| head.holds(block + index, bytes);
            if !chunk[..part.len()].chunks(BLOCK_BYTES).enumerate().all(holds) {
                return Ok(false);
            }
            part.copy_from_slice(&chunk[..part.len()]);
        }
        Ok(true)
    }
}

/// Returns how much of a payload to read at once, from this byte of it on.
fn padded(length: u64, at: u64, unit: u64) -> usize {
    round_up(length - at, unit).min(CHUNK_BYTES as u64) as usize
}

fn read_packed(
    extent: &Extent,
    entry: Entry<'_>,
    layout: Layout,
    into: &mut [u8],
    chunk: &mut [u8],
) -> io::Result<bool> {
    let start = entry.offset / extent.unit() * extent.unit();
    let end = round_up(entry.offset + layout.record_bytes, extent.unit());
    let chunk = &mut chunk[..(end - start) as usize];
    read_vectored(extent, &mut [], chunk, start)?;
    let record = &chunk[(entry.offset - start) as usize..];
    let (head, payload) = record.split_at(layout.head_bytes as usize);
    let payload = &payload[..into.len()];
    let is_good = extent.head_of(head, entry).is_some_and(|head| head.holds_all(payload));
    if is_good {
        into.copy_from_slice(payload);
    }
    Ok(is_good)
}

/// Fills both buffers. What is sealed is read past the page cache where the file system can; the
/// rest of a short read comes through it, as its address may be of any alignment.
fn read_vectored(
    extent: &Extent,
    head: &mut [u8],
    payload: &mut [u8],
    offset: u64,
) -> io::Result<()> {
    let both = |file: &dyn File, head: &mut [u8], payload: &mut [u8]| {
        file.read_at(&mut [IoSliceMut::new(head), IoSliceMut::new(payload)], offset)
    };
    let direct = extent.direct.as_deref().filter(|_| extent.is_sealed());
    let count = match direct.map(|file| both(file, head, payload)) {
        Some(Ok(count)) => count,
        // Refused for its alignment, or failed: the page cache tells which.
        Some(Err(_)) | None => match both(&*extent.file, head, payload) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            outcome => outcome?,
        },
    };
    let of_head = count.min(head.len());
    read_exact(&*extent.file, &mut head[of_head..], offset + of_head as u64)?;
    let of_payload = count - of_head;
    let at = offset + (head.len() + of_payload) as u64;
    read_exact(&*extent.file, &mut payload[of_payload..], at)
}
