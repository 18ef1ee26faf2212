//! The collective operations: who sends what to whom, and what comes out of it.
//!
//! Each member sends directly to the others. A large reduction is cut: each member reduces one part
//! in the order of slots, so that all get the same bits, and sends the result to those who want it.

use std::{future::Future, ops::Range};

use mooncake_base::{Error, Result as BaseResult};

use crate::{
    buffers::Buffer,
    call::Call,
    memory::HostRange,
    operation_kind::OperationKind,
    peer_memory::Loan,
    reduce::{Dtype, Reduction, divide, reduce_into},
    staging::{StagedBuffer, peer_buffers::Contribution},
};

/// The step by which a member says that it has its data, or why it has not.
pub(crate) const DONE: u32 = u32::MAX;
/// The step of a frame that only says what its sender has called.
pub(crate) const ANNOUNCED: u32 = u32::MAX - 1;
/// Reductions up to this size are sent whole to each member.
const DIRECT_BYTES_MAX: usize = 16 << 10;

/// A collective operation. Lists have an entry per slot. `elements` is the code of the type of the elements,
/// its place in [`ELEMENTS`](crate::ELEMENTS), which must be the same at all members; 255 stands for others.
#[derive(Debug, Clone)]
pub enum Operation {
    /// Reduces over all members. Only `root`, if there is one, gets the result.
    Reduce {
        /// Elements of this member.
        source: HostRange,
        /// Memory for the result.
        target: HostRange,
        /// Type of the elements.
        dtype: Dtype,
        /// How elements are reduced.
        how: Reduction,
        /// The only slot that gets the result.
        root: Option<usize>,
    },
    /// Sends the bytes of `root` to all members.
    Broadcast {
        /// Bytes that are sent, or overwritten.
        range: HostRange,
        /// Code of their type.
        elements: u8,
        /// Slot that has the bytes.
        root: usize,
    },
    /// Gathers the bytes of each member, at all members or at `root`.
    Gather {
        /// Bytes of this member.
        source: HostRange,
        /// Memory for those of each slot.
        targets: Vec<HostRange>,
        /// Code of their type.
        elements: u8,
        /// The only slot that gets the bytes.
        root: Option<usize>,
    },
    /// Sends each slot its part of the bytes of `root`.
    Scatter {
        /// Bytes for each slot, at the root.
        sources: Vec<HostRange>,
        /// Memory for the part of this member.
        target: HostRange,
        /// Code of their type.
        elements: u8,
        /// Slot that has the bytes.
        root: usize,
    },
    /// Reduces a part per slot; each member gets that of its slot.
    ReduceScatter {
        /// Elements for each slot.
        sources: Vec<HostRange>,
        /// Memory for the result.
        target: HostRange,
        /// Type of the elements.
        dtype: Dtype,
        /// How elements are reduced.
        how: Reduction,
    },
    /// Sends bytes to each slot, and takes bytes from each.
    AllToAll {
        /// Bytes for each slot.
        sources: Vec<HostRange>,
        /// Memory for those of each slot.
        targets: Vec<HostRange>,
        /// Code of their type.
        elements: u8,
    },
    /// Waits for all members.
    Barrier,
}

/// Why an operation stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The view changes.
    Interrupted,
    /// The operation cannot be done.
    Failed(Error),
    /// Another member has told all others that the operation cannot be done.
    FailedElsewhere(Error),
}

/// What is written once the operation counts, in memory of the caller.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    /// Bytes of the caller that go from the first range to the second.
    own: Option<(HostRange, HostRange)>,
    received: Vec<(HostRange, Received)>,
    /// Memory that other members read until the operation has ended.
    lent: Option<Buffer>,
}

impl Writes {
    fn of(target: HostRange, bytes: Buffer) -> Self {
        Self { received: vec![(target, Received::Buffer(bytes))], ..Self::default() }
    }

    pub(crate) fn carry_out(self) {
        if let Some((source, target)) = self.own {
            target.write(source.bytes());
        }
        for (target, received) in self.received {
            received.write_to(target);
        }
        drop(self.lent);
    }
}

/// Bytes of another member, which stay even if it dies.
#[derive(Debug)]
pub(crate) enum Received {
    Buffer(Buffer),
    /// Memory of a peer that is mapped here.
    Mapped(Contribution),
    /// Bytes that were read from another host.
    Fetched(StagedBuffer),
}

impl Received {
    /// Writes the bytes to memory of the caller.
    fn write_to(self, target: HostRange) {
        match self {
            Self::Buffer(bytes) => target.write(&bytes),
            Self::Mapped(contribution) => contribution.write_to(target),
            Self::Fetched(buffer) => buffer.end(|bytes| target.write(bytes)),
        }
    }
}

/// Bytes that a member sends, and where peers of its host find them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutgoingPart<'a> {
    pub(crate) bytes: &'a [u8],
    /// Where peers of this host read them; `None` if they are sent as bytes.
    pub(crate) loan: Option<Loan>,
    /// Where peers of other hosts read them; `None` if they are sent as bytes.
    pub(crate) remote: Option<u64>,
}

/// Takes the bytes at an offset.
pub(crate) type Take<'a> = &'a mut (dyn FnMut(usize, &[u8]) -> Result<(), Stop> + Send);

/// The messages of one attempt of one operation.
pub(crate) trait Exchange: Sync {
    /// The slots of the members, in order.
    fn slots(&self) -> &[usize];
    /// The slot of this process.
    fn own(&self) -> usize;
    /// Returns memory for results.
    fn buffer(&self, length: usize) -> Buffer;
    /// Lends bytes to peers until the attempt has ended, for a reduction.
    fn lend<'a>(&self, bytes: &'a [u8]) -> OutgoingPart<'a>;
    /// Lends bytes, and copies them to memory that peers may map, for results that are the same bytes.
    fn stage<'a>(&self, bytes: &'a [u8]) -> OutgoingPart<'a>;
    /// Sends bytes to a member.
    fn send(
        &self,
        slot: usize,
        step: u32,
        outgoing: OutgoingPart<'_>,
    ) -> impl Future<Output = Result<(), Stop>> + Send;
    /// Receives the bytes that a member sent.
    fn receive(
        &self,
        slot: usize,
        step: u32,
        length: usize,
    ) -> impl Future<Output = Result<Received, Stop>> + Send;
    /// Receives the bytes that a member sent.
    fn receive_into(
        &self,
        slot: usize,
        step: u32,
        target: &mut [u8],
    ) -> impl Future<Output = Result<(), Stop>> + Send;
    /// Receives the bytes that a member sent, piece by piece, each with its offset.
    fn receive_with(
        &self,
        slot: usize,
        step: u32,
        length: usize,
        take: Take<'_>,
    ) -> impl Future<Output = Result<(), Stop>> + Send;
}

impl Operation {
    /// Returns the kind under which the operation is counted.
    pub(crate) fn kind(&self) -> OperationKind {
        match self {
            Self::Reduce { root: None, .. } => OperationKind::AllReduce,
            Self::Reduce { .. } => OperationKind::Reduce,
            Self::Broadcast { .. } => OperationKind::Broadcast,
            Self::Gather { root: None, .. } => OperationKind::AllGather,
            Self::Gather { .. } => OperationKind::Gather,
            Self::Scatter { .. } => OperationKind::Scatter,
            Self::ReduceScatter { .. } => OperationKind::ReduceScatter,
            Self::AllToAll { .. } => OperationKind::AllToAll,
            Self::Barrier => OperationKind::Barrier,
        }
    }

    /// Returns what the members compare.
    pub(crate) fn call(&self) -> Call {
        let call = |elements, length| Call::new(self.kind(), elements, length);
        match self {
            Self::Reduce { source, dtype, how, root, .. } => {
                call(*dtype as u8, source.length()).with_reduction(*how).with_root(*root)
            }
            Self::Broadcast { range, elements, root } => {
                call(*elements, range.length()).with_root(Some(*root))
            }
            Self::Gather { source, elements, root, .. } => {
                call(*elements, source.length()).with_root(*root)
            }
            Self::Scatter { target, elements, root, .. } => {
                call(*elements, target.length()).with_root(Some(*root))
            }
            // Members may get parts of different lengths.
            Self::ReduceScatter { dtype, how, .. } => call(*dtype as u8, 0).with_reduction(*how),
            Self::AllToAll { elements, .. } => call(*elements, 0),
            Self::Barrier => call(u8::MAX, 0),
        }
    }

    /// Returns the slot whose bytes all others get, or that alone gets a result.
    pub(crate) fn root(&self) -> Option<usize> {
        match self {
            Self::Reduce { root, .. } | Self::Gather { root, .. } => *root,
            Self::Broadcast { root, .. } | Self::Scatter { root, .. } => Some(*root),
            Self::ReduceScatter { .. } | Self::AllToAll { .. } | Self::Barrier => None,
        }
    }

    /// Returns how many bytes of this rank the operation reads.
    pub(crate) fn source_bytes(&self) -> usize {
        match self {
            Self::Reduce { source, .. } | Self::Gather { source, .. } => source.length(),
            Self::Broadcast { range, .. } => range.length(),
            Self::Scatter { sources, .. }
            | Self::ReduceScatter { sources, .. }
            | Self::AllToAll { sources, .. } => sources.iter().map(|it| it.length()).sum(),
            Self::Barrier => 0,
        }
    }

    /// Carries out one attempt. Memory of the caller is not written yet.
    pub(crate) async fn run(&self, exchange: &impl Exchange) -> Result<Writes, Stop> {
        match self {
            Self::Reduce { source, target, dtype, how, root } => {
                reduce(exchange, *source, *target, *dtype, *how, *root).await
            }
            Self::Broadcast { range, root, .. } => broadcast(exchange, *range, *root).await,
            Self::Gather { source, targets, root, .. } => {
                gather(exchange, *source, targets, *root).await
            }
            Self::Scatter { sources, target, root, .. } => {
                scatter(exchange, sources, *target, *root).await
            }
            Self::ReduceScatter { sources, target, dtype, how } => {
                reduce_scatter(exchange, sources, *target, *dtype, *how).await
            }
            Self::AllToAll { sources, targets, .. } => all_to_all(exchange, sources, targets).await,
            Self::Barrier => Ok(Writes::default()),
        }
    }
}

async fn reduce(
    exchange: &impl Exchange,
    source: HostRange,
    target: HostRange,
    dtype: Dtype,
    how: Reduction,
    root: Option<usize>,
) -> Result<Writes, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    let source = source.bytes();
    let wants = |slot: usize| root.is_none_or(|root| root == slot);
    if source.len() <= DIRECT_BYTES_MAX {
        let outgoing = exchange.lend(source);
        for &slot in slots.iter().filter(|slot| **slot != own && wants(**slot)) {
            exchange.send(slot, 0, outgoing).await?;
        }
        if !wants(own) {
            return Ok(Writes::default());
        }
        let mut sum = exchange.buffer(source.len());
        reduce_parts(exchange, source, &mut sum, dtype, how).await?;
        return Ok(Writes::of(target, sum));
    }
    let parts = parts(source.len(), slots.len(), dtype);
    let position = position(slots, own);
    // Each member begins with the next one, so that not all send to the first at once.
    for (slot, part) in rotated(slots, &parts, position) {
        exchange.send(slot, 0, exchange.lend(&source[part])).await?;
    }
    let own_part = parts[position].clone();
    let mut sum = exchange.buffer(own_part.len());
    reduce_parts(exchange, &source[own_part.clone()], &mut sum, dtype, how).await?;
    let others = rotated(slots, slots, position).map(|(slot, _)| slot);
    send_same(exchange, 1, &sum, others.filter(|slot| wants(*slot))).await?;
    if !wants(own) {
        return Ok(Writes { lent: Some(sum), ..Writes::default() });
    }
    let mut writes = Writes::of(target.part(own_part), sum);
    for (slot, part) in rotated(slots, &parts, position) {
        let received = exchange.receive(slot, 1, part.len()).await?;
        writes.received.push((target.part(part), received));
    }
    Ok(writes)
}

/// Reduces this member's elements and those that the others sent for step 0, in the order of slots.
async fn reduce_parts(
    exchange: &impl Exchange,
    own: &[u8],
    sum: &mut [u8],
    dtype: Dtype,
    how: Reduction,
) -> Result<(), Stop> {
    for (index, &slot) in exchange.slots().iter().enumerate() {
        match (index, slot == exchange.own()) {
            (0, true) => sum.copy_from_slice(own),
            (0, false) => exchange.receive_into(slot, 0, sum).await?,
            (_, true) => failing(reduce_into(sum, own, dtype, how))?,
            (_, false) => {
                let mut take = |at: usize, bytes: &[u8]| {
                    failing(reduce_into(&mut sum[at..at + bytes.len()], bytes, dtype, how))
                };
                exchange.receive_with(slot, 0, own.len(), &mut take).await?;
            }
        }
    }
    if how == Reduction::Average {
        failing(divide(sum, dtype, exchange.slots().len()))?;
    }
    Ok(())
}

async fn broadcast(
    exchange: &impl Exchange,
    range: HostRange,
    root: usize,
) -> Result<Writes, Stop> {
    if exchange.own() == root {
        let others = exchange.slots().iter().copied().filter(|slot| *slot != root);
        send_same(exchange, 0, range.bytes(), others).await?;
        return Ok(Writes::default());
    }
    receive_from_root(exchange, range, root).await
}

/// Sends the same bytes to each of these slots; makes them ready once, and only if there is a slot.
async fn send_same(
    exchange: &impl Exchange,
    step: u32,
    bytes: &[u8],
    slots: impl Iterator<Item = usize> + Send,
) -> Result<(), Stop> {
    let mut ready = None;
    for slot in slots {
        let outgoing = *ready.get_or_insert_with(|| exchange.stage(bytes));
        exchange.send(slot, step, outgoing).await?;
    }
    Ok(())
}

async fn receive_from_root(
    exchange: &impl Exchange,
    target: HostRange,
    root: usize,
) -> Result<Writes, Stop> {
    if !exchange.slots().contains(&root) {
        return Ok(Writes::default());
    }
    let received = exchange.receive(root, 0, target.length()).await?;
    Ok(Writes { received: vec![(target, received)], ..Writes::default() })
}

async fn gather(
    exchange: &impl Exchange,
    source: HostRange,
    targets: &[HostRange],
    root: Option<usize>,
) -> Result<Writes, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    let wants = |slot: usize| root.is_none_or(|root| root == slot);
    let others = || rotated(slots, slots, position(slots, own)).map(|(slot, _)| slot);
    send_same(exchange, 0, source.bytes(), others().filter(|slot| wants(*slot))).await?;
    if !wants(own) {
        return Ok(Writes::default());
    }
    let place = |slot: usize| {
        targets.get(slot).copied().ok_or_else(|| {
            let error = Error::invalid("the output has no place for the tensor of a rank");
            Stop::Failed(error.with("rank", slot).with("places", targets.len()))
        })
    };
    let mut writes = Writes { own: Some((source, place(own)?)), ..Writes::default() };
    for slot in others() {
        let received = exchange.receive(slot, 0, source.length()).await?;
        // A rank that has sent its tensor is in the view: a caller that knew of its loss left it out.
        writes.received.push((place(slot)?, received));
    }
    Ok(writes)
}

async fn scatter(
    exchange: &impl Exchange,
    sources: &[HostRange],
    target: HostRange,
    root: usize,
) -> Result<Writes, Stop> {
    if exchange.own() != root {
        return receive_from_root(exchange, target, root).await;
    }
    for &slot in exchange.slots().iter().filter(|slot| **slot != root) {
        exchange.send(slot, 0, exchange.stage(of(sources, slot).bytes())).await?;
    }
    Ok(Writes { own: Some((of(sources, root), target)), ..Writes::default() })
}

async fn reduce_scatter(
    exchange: &impl Exchange,
    sources: &[HostRange],
    target: HostRange,
    dtype: Dtype,
    how: Reduction,
) -> Result<Writes, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    for (slot, _) in rotated(slots, slots, position(slots, own)) {
        exchange.send(slot, 0, exchange.lend(of(sources, slot).bytes())).await?;
    }
    let own = of(sources, own);
    if own.length() != target.length() {
        return Err(wrong_length(exchange.own(), own.length() as u64, target.length()));
    }
    let mut sum = exchange.buffer(target.length());
    reduce_parts(exchange, own.bytes(), &mut sum, dtype, how).await?;
    Ok(Writes::of(target, sum))
}

async fn all_to_all(
    exchange: &impl Exchange,
    sources: &[HostRange],
    targets: &[HostRange],
) -> Result<Writes, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    let others = || rotated(slots, slots, position(slots, own)).map(|(slot, _)| slot);
    for slot in others() {
        exchange.send(slot, 0, exchange.stage(of(sources, slot).bytes())).await?;
    }
    let (source, target) = (of(sources, own), of(targets, own));
    if source.length() != target.length() {
        return Err(wrong_length(own, source.length() as u64, target.length()));
    }
    let mut writes = Writes { own: Some((source, target)), ..Writes::default() };
    for slot in others() {
        let target = of(targets, slot);
        let received = exchange.receive(slot, 0, target.length()).await?;
        writes.received.push((target, received));
    }
    Ok(writes)
}

/// Returns what belongs to a slot, nothing if the list is too short.
fn of(list: &[HostRange], slot: usize) -> HostRange {
    list.get(slot).copied().unwrap_or(HostRange::EMPTY)
}

/// Cuts elements into one part per member.
fn parts(bytes: usize, members: usize, dtype: Dtype) -> Vec<Range<usize>> {
    let (size, count) = (dtype.size(), bytes / dtype.size());
    (0..members).map(|i| count * i / members * size..count * (i + 1) / members * size).collect()
}

/// Returns the other members and what belongs to them, beginning with the next one.
fn rotated<T: Clone>(
    slots: &[usize],
    values: &[T],
    position: usize,
) -> impl Iterator<Item = (usize, T)> {
    let count = slots.len();
    (1..count).map(move |step| (position + step) % count).map(|i| (slots[i], values[i].clone()))
}

fn position(slots: &[usize], own: usize) -> usize {
    slots.iter().position(|slot| *slot == own).unwrap_or(0)
}

/// Returns the failure of a member that has got a part of another length than it has a place for.
pub(crate) fn wrong_length(slot: usize, found: u64, wanted: usize) -> Stop {
    let error = Error::invalid(if found == 0 {
        "the tensor or list of a rank has no part for this one"
    } else {
        "the tensors of the ranks differ in size"
    });
    let error = error.with("from_rank", slot);
    Stop::Failed(error.with("received_bytes", found).with("expected_bytes", wanted))
}

fn failing<T>(result: BaseResult<T>) -> Result<T, Stop> {
    result.map_err(Stop::Failed)
}
