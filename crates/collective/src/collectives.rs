//! The collective operations: who sends what to whom, and what comes out of it.
//!
//! Each member sends directly to the others. A large reduction is cut: each member reduces one part
//! in the order of slots, so that all get the same bits, and sends the result to those who want it.

use std::ops::Range;

use mooncake_base::{Error, Result as BaseResult};

use crate::{
    memory::HostRange,
    reduce::{Dtype, Reduction, divide, reduce_into},
};

/// Reductions up to this size are sent whole to each member.
const DIRECT_BYTES_MAX: usize = 16 << 10;

/// A collective operation. Lists have an entry per slot.
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
        /// Slot that has the bytes.
        root: usize,
    },
    /// Gathers the bytes of each member, at all members or at `root`.
    Gather {
        /// Bytes of this member.
        source: HostRange,
        /// Memory for those of each slot.
        targets: Vec<HostRange>,
        /// The only slot that gets the bytes.
        root: Option<usize>,
    },
    /// Sends each slot its part of the bytes of `root`.
    Scatter {
        /// Bytes for each slot, at the root.
        sources: Vec<HostRange>,
        /// Memory for the part of this member.
        target: HostRange,
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
}

/// What was received, and where it goes once the operation counts.
pub(crate) type Writes = Vec<(HostRange, Vec<u8>)>;

/// The messages of one attempt of one operation.
pub(crate) trait Exchange {
    /// The slots of the members, in order.
    fn slots(&self) -> &[usize];
    /// The slot of this process.
    fn own(&self) -> usize;
    /// Sends bytes to a member.
    fn send(&self, slot: usize, step: u32, bytes: &[u8]) -> Result<(), Stop>;
    /// Receives the bytes that a member sent.
    fn receive(&self, slot: usize, step: u32) -> Result<Vec<u8>, Stop>;
}

impl Operation {
    /// Carries out one attempt. Memory of the caller is not written yet.
    pub(crate) fn run(&self, exchange: &impl Exchange) -> Result<Writes, Stop> {
        match self {
            Self::Reduce { source, target, dtype, how, root } => {
                let reduced = reduce(exchange, source.bytes(), *dtype, *how, *root)?;
                Ok(reduced.map(|bytes| (*target, bytes)).into_iter().collect())
            }
            Self::Broadcast { range, root } => broadcast(exchange, *range, *root),
            Self::Gather { source, targets, root } => gather(exchange, *source, targets, *root),
            Self::Scatter { sources, target, root } => scatter(exchange, sources, *target, *root),
            Self::ReduceScatter { sources, target, dtype, how } => {
                let own = reduce_scatter(exchange, sources, *target, *dtype, *how)?;
                Ok(vec![(*target, own)])
            }
            Self::AllToAll { sources, targets } => all_to_all(exchange, sources, targets),
            Self::Barrier => Ok(Vec::new()),
        }
    }
}

/// Returns the reduced elements at the members that want them.
fn reduce(
    exchange: &impl Exchange,
    source: &[u8],
    dtype: Dtype,
    how: Reduction,
    root: Option<usize>,
) -> Result<Option<Vec<u8>>, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    let wants = |slot: usize| root.is_none_or(|root| root == slot);
    if source.len() <= DIRECT_BYTES_MAX {
        for &slot in slots.iter().filter(|slot| **slot != own && wants(**slot)) {
            exchange.send(slot, 0, source)?;
        }
        if !wants(own) {
            return Ok(None);
        }
        return reduce_parts(exchange, source, dtype, how).map(Some);
    }
    let parts = parts(source.len(), slots.len(), dtype);
    let position = position(slots, own);
    // Each member begins with the next one, so that not all send to the first at once.
    for (slot, part) in rotated(slots, &parts, position) {
        exchange.send(slot, 0, &source[part])?;
    }
    let reduced = reduce_parts(exchange, &source[parts[position].clone()], dtype, how)?;
    for (slot, _) in rotated(slots, &parts, position) {
        if wants(slot) {
            exchange.send(slot, 1, &reduced)?;
        }
    }
    if !wants(own) {
        return Ok(None);
    }
    let mut whole = vec![0; source.len()];
    for (&slot, part) in slots.iter().zip(&parts) {
        if slot == own {
            whole[part.clone()].copy_from_slice(&reduced);
        } else {
            let bytes = expect(exchange.receive(slot, 1)?, part.len())?;
            whole[part.clone()].copy_from_slice(&bytes);
        }
    }
    Ok(Some(whole))
}

/// Reduces this member's elements and those that the others sent for step 0.
fn reduce_parts(
    exchange: &impl Exchange,
    own: &[u8],
    dtype: Dtype,
    how: Reduction,
) -> Result<Vec<u8>, Stop> {
    let mut sum: Option<Vec<u8>> = None;
    for &slot in exchange.slots() {
        let received;
        let bytes = if slot == exchange.own() {
            own
        } else {
            received = expect(exchange.receive(slot, 0)?, own.len())?;
            &received
        };
        match &mut sum {
            None => sum = Some(bytes.to_vec()),
            Some(sum) => failing(reduce_into(sum, bytes, dtype, how))?,
        }
    }
    let mut sum = sum.unwrap_or_default();
    if how == Reduction::Average {
        failing(divide(&mut sum, dtype, exchange.slots().len()))?;
    }
    Ok(sum)
}

fn broadcast(exchange: &impl Exchange, range: HostRange, root: usize) -> Result<Writes, Stop> {
    if exchange.own() == root {
        for &slot in exchange.slots().iter().filter(|slot| **slot != root) {
            exchange.send(slot, 0, range.bytes())?;
        }
        return Ok(Vec::new());
    }
    if !exchange.slots().contains(&root) {
        return Ok(Vec::new());
    }
    Ok(vec![(range, expect(exchange.receive(root, 0)?, range.length())?)])
}

fn gather(
    exchange: &impl Exchange,
    source: HostRange,
    targets: &[HostRange],
    root: Option<usize>,
) -> Result<Writes, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    let wants = |slot: usize| root.is_none_or(|root| root == slot);
    let position = position(slots, own);
    for (slot, ()) in rotated(slots, &vec![(); slots.len()], position) {
        if wants(slot) {
            exchange.send(slot, 0, source.bytes())?;
        }
    }
    let mut writes = Writes::new();
    for &slot in slots.iter().filter(|_| wants(own)) {
        let bytes = if slot == own {
            source.bytes().to_vec()
        } else {
            expect(exchange.receive(slot, 0)?, source.length())?
        };
        if let Some(target) = targets.get(slot) {
            writes.push((*target, bytes));
        }
    }
    Ok(writes)
}

fn scatter(
    exchange: &impl Exchange,
    sources: &[HostRange],
    target: HostRange,
    root: usize,
) -> Result<Writes, Stop> {
    if exchange.own() != root {
        if !exchange.slots().contains(&root) {
            return Ok(Vec::new());
        }
        return Ok(vec![(target, expect(exchange.receive(root, 0)?, target.length())?)]);
    }
    for &slot in exchange.slots().iter().filter(|slot| **slot != root) {
        let source = sources.get(slot).copied().unwrap_or(HostRange::EMPTY);
        exchange.send(slot, 0, source.bytes())?;
    }
    let own = sources.get(root).copied().unwrap_or(HostRange::EMPTY);
    Ok(vec![(target, own.bytes().to_vec())])
}

fn reduce_scatter(
    exchange: &impl Exchange,
    sources: &[HostRange],
    target: HostRange,
    dtype: Dtype,
    how: Reduction,
) -> Result<Vec<u8>, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    let part = |slot: usize| sources.get(slot).copied().unwrap_or(HostRange::EMPTY);
    let position = position(slots, own);
    for (slot, ()) in rotated(slots, &vec![(); slots.len()], position) {
        exchange.send(slot, 0, part(slot).bytes())?;
    }
    let own = part(own);
    if own.length() != target.length() {
        return Err(Stop::Failed(wrong_length(own.length(), target.length())));
    }
    reduce_parts(exchange, own.bytes(), dtype, how)
}

fn all_to_all(
    exchange: &impl Exchange,
    sources: &[HostRange],
    targets: &[HostRange],
) -> Result<Writes, Stop> {
    let (slots, own) = (exchange.slots(), exchange.own());
    let of = |list: &[HostRange], slot: usize| list.get(slot).copied().unwrap_or(HostRange::EMPTY);
    let position = position(slots, own);
    for (slot, ()) in rotated(slots, &vec![(); slots.len()], position) {
        exchange.send(slot, 0, of(sources, slot).bytes())?;
    }
    let mut writes = Writes::new();
    for &slot in slots {
        let bytes = if slot == own {
            of(sources, own).bytes().to_vec()
        } else {
            exchange.receive(slot, 0)?
        };
        let target = of(targets, slot);
        writes.push((target, expect(bytes, target.length())?));
    }
    Ok(writes)
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

fn expect(bytes: Vec<u8>, length: usize) -> Result<Vec<u8>, Stop> {
    if bytes.len() == length {
        Ok(bytes)
    } else {
        Err(Stop::Failed(wrong_length(bytes.len(), length)))
    }
}

fn wrong_length(found: usize, wanted: usize) -> Error {
    Error::invalid("the tensors of the ranks differ in size")
        .with("received_bytes", found)
        .with("expected_bytes", wanted)
}

fn failing<T>(result: BaseResult<T>) -> Result<T, Stop> {
    result.map_err(Stop::Failed)
}
