//! Cuts records into operations, and awaits them.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use super::{
    operation::{Call, Operation},
    pending_record::{Chunk, PendingRecord, Verdict},
    queue::Queue,
};
use crate::{
    extent::Extent,
    format::{BLOCK_BYTES, LARGE_BYTES, Layout, index::Entry, round_up},
    memory::{Destination, Lender, LentRange, SLOT_BYTES, lend},
};

/// The most bytes of a payload that one operation reads into memory of the caller: a device reads
/// that much at its full speed, and the checks of one overlap with the reads of others.
const IN_PLACE_BYTES_MAX: u64 = 4 * BLOCK_BYTES as u64;

/// The records of a batch that the device begins with while the others are cut.
const RECORDS_FIRST: usize = 32;

/// The longest head that is read together with the first block of its payload.
const HEAD_BYTES_MAX: u64 = (SLOT_BYTES - BLOCK_BYTES) as u64;

/// A record to read, or a range of it.
#[derive(Debug)]
pub(crate) struct RecordRead<'a> {
    pub(crate) extent: Arc<Extent>,
    pub(crate) entry: Entry<'a>,
    /// The bytes of the payload; they lie in it.
    pub(crate) range: Range<u64>,
    /// Where they go, of the same length; without it they are only checked.
    pub(crate) into: Option<Destination<'a>>,
}

/// Reads records; the verdicts are in the order of the reads.
pub(super) fn read_all(
    queue: &Queue,
    direct_alignment: u64,
    reads: &mut [RecordRead<'_>],
) -> Vec<Verdict> {
    lend(|lender| {
        let call = Arc::new(Call::default());
        let mut plan = Plan::new(&call, direct_alignment);
        let mut records = Vec::with_capacity(reads.len());
        for (number, read) in reads.iter_mut().enumerate() {
            records.push(plan.add(number, read, lender));
            if number + 1 == RECORDS_FIRST {
                queue.push(std::mem::take(&mut plan.operations));
            }
        }
        queue.push(plan.operations);
        let mut chunks = plan.chunks;
        let mut outstanding = chunks.len();
        while outstanding > 0 {
            for completion in call.wait() {
                outstanding -= 1;
                if let Some(chunk) = chunks[completion.number].take() {
                    records[chunk.record].accept(chunk, completion);
                }
            }
        }
        records.into_iter().map(PendingRecord::verdict).collect()
    })
}

/// The operations of a batch.
struct Plan<'a> {
    call: &'a Arc<Call>,
    alignment: u64,
    operations: VecDeque<Operation>,
    chunks: Vec<Option<Chunk>>,
}

impl<'a> Plan<'a> {
    const fn new(call: &'a Arc<Call>, alignment: u64) -> Self {
        Self { call, alignment, operations: VecDeque::new(), chunks: Vec::new() }
    }

    /// Adds the operations of a record, that of its head first.
    fn add<'env, 'b>(
        &mut self,
        number: usize,
        read: &'b mut RecordRead<'env>,
        lender: &Lender<'b>,
    ) -> PendingRecord<'b> {
        let RecordRead { extent, entry, range, into } = read;
        let extent: &'b Arc<Extent> = extent;
        let target = into.as_mut().map(|into| lender.lend(into.reborrow()));
        let mut cut = Cut {
            record: number,
            layout: Layout::of(entry.name, entry.length, extent.unit()),
            direct_alignment: extent.direct_alignment(entry, self.alignment),
            extent,
            entry: *entry,
        };
        let before = self.chunks.len();
        if entry.length < LARGE_BYTES {
            cut.add_packed(self, range.start, target);
        } else {
            cut.add_large(self, range.clone(), target);
        }
        let is_in_place = cut.direct_alignment.is_some() && entry.length >= LARGE_BYTES;
        PendingRecord::new(extent, *entry, self.chunks.len() - before, is_in_place)
    }
}

/// A record while it is cut.
struct Cut<'a> {
    record: usize,
    layout: Layout,
    direct_alignment: Option<u64>,
    extent: &'a Arc<Extent>,
    entry: Entry<'a>,
}

impl Cut<'_> {
    fn add(&self, plan: &mut Plan<'_>, at: Range<u64>, lent: Option<LentRange>, chunk: Chunk) {
        let lent_bytes = lent.as_ref().map_or(0, LentRange::len);
        plan.operations.push_back(Operation {
            call: plan.call.clone(),
            number: plan.chunks.len(),
            extent: self.extent.clone(),
            offset: at.start,
            slot_bytes: (at.end - at.start) as usize - lent_bytes,
            slot: None,
            lent,
            direct_alignment: self.direct_alignment,
            done: 0,
            tries: 0,
        });
        plan.chunks.push(Some(chunk));
    }

    /// Returns what offsets of reads are multiples of. Past the page cache that is the unit of the
    /// directory, also where the file system could do with less: devices read their own blocks, and
    /// a read that begins within one is slower by a tenth.
    fn offset_alignment(&self) -> u64 {
        self.direct_alignment.map_or(1, |_| self.extent.unit())
    }

    fn round_up(&self, bytes: u64) -> u64 {
        round_up(bytes, self.offset_alignment())
    }

    /// A small record is read as a whole, with its neighbours of the same sectors.
    fn add_packed(&mut self, plan: &mut Plan<'_>, from: u64, target: Option<LentRange>) {
        let offset = self.entry.offset;
        let start = offset / self.offset_alignment() * self.offset_alignment();
        let end = self.round_up(offset + self.layout.payload_at + self.entry.length);
        let chunk = Chunk {
            record: self.record,
            head_at: Some((offset - start) as usize),
            payload_at: (offset - start + self.layout.payload_at) as usize,
            block: 0,
            bytes: self.entry.length as usize,
            is_in_place: false,
            target,
            target_from: from as usize,
        };
        self.add(plan, start..end, None, chunk);
    }

    /// Of a large record the blocks that the range touches are read: whole blocks into the memory of
    /// the caller where that is aligned, others through slots.
    fn add_large(&mut self, plan: &mut Plan<'_>, range: Range<u64>, mut target: Option<LentRange>) {
        let block_bytes = BLOCK_BYTES as u64;
        let (record_at, payload_at) = (self.entry.offset, self.layout.payload_at);
        let mut head_bytes = payload_at;
        let is_head_apart =
            range.is_empty() || range.start >= block_bytes || payload_at > HEAD_BYTES_MAX;
        if is_head_apart {
            let end = record_at + self.round_up(self.layout.head_bytes);
            let chunk = self.chunk(Some(0), 0, 0..0, false);
            self.add(plan, record_at..end, None, chunk);
            head_bytes = 0;
        }
        let mut at = range.start;
        while at < range.end {
            let first = at / block_bytes * block_bytes;
            let run_end = self.in_place_end(at, range.end, target.as_ref());
            let is_in_place = run_end > at;
            let end = if is_in_place { run_end } else { self.block_end(first) };
            let (lent, own) =
                if is_in_place { (end - first, 0) } else { (0, self.round_up(end - first)) };
            let chunk_end = end.min(range.end);
            let part = target.take().map(|whole| whole.split_at((chunk_end - at) as usize));
            let (part, rest) = part.unzip();
            target = rest;
            let head_at = (head_bytes > 0).then_some(0);
            let mut chunk = self.chunk(head_at, head_bytes, first..end, is_in_place);
            chunk.target_from = (at - first) as usize;
            let start = record_at + payload_at + first - head_bytes;
            let place = start..start + head_bytes + lent + own;
            if is_in_place {
                self.add(plan, place, part, chunk);
            } else {
                chunk.target = part;
                self.add(plan, place, None, chunk);
            }
            head_bytes = 0;
            at = chunk_end;
        }
    }

    const fn chunk(
        &self,
        head_at: Option<usize>,
        payload_at: u64,
        blocks: Range<u64>,
        is_in_place: bool,
    ) -> Chunk {
        Chunk {
            record: self.record,
            head_at,
            payload_at: payload_at as usize,
            block: blocks.start as usize / BLOCK_BYTES,
            bytes: (blocks.end - blocks.start) as usize,
            is_in_place,
            target: None,
            target_from: 0,
        }
    }

    fn block_end(&self, first: u64) -> u64 {
        (first + BLOCK_BYTES as u64).min(self.entry.length)
    }

    /// Returns where the whole blocks from `at` on end that can be read to their place at once; `at`
    /// if the first cannot.
    fn in_place_end(&self, at: u64, end: u64, target: Option<&LentRange>) -> u64 {
        let Some(target) = target else { return at };
        let alignment = self.direct_alignment.unwrap_or(1);
        if !at.is_multiple_of(BLOCK_BYTES as u64) || !target.is_aligned(alignment as usize) {
            return at;
        }
        let limit = end.min(at + IN_PLACE_BYTES_MAX);
        let mut run_end = at;
        while run_end < limit {
            let next = self.block_end(run_end);
            if next > end || !(next - run_end).is_multiple_of(alignment) {
                break;
            }
            run_end = next;
        }
        run_end
    }
}
