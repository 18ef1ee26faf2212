//! The next objects to evict, as the order of eviction names them.

use mooncake_base::Moment;

use crate::state::{
    catalog::order::EvictionPass,
    ids::ObjectSlot,
    inventory::{Inventory, eviction::Verdict},
};

/// An object that the order of eviction named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum Candidate {
    /// It and its group may be evicted, at once or once disks have them. It is out of the order, unless
    /// it is put back.
    Victim(ObjectSlot),
    /// It may not be evicted for this search. It is out of the order, unless it is put back.
    Spared(ObjectSlot),
    /// Its group takes more steps to examine. It is out of the order, unless it is put back.
    Unfinished(ObjectSlot),
    /// It may not be evicted now: it has another place in the order.
    Postponed,
    /// The order has no more objects. If `has_early` is set, others could be examined early.
    None {
        /// Whether parked objects are to be examined early.
        has_early: bool,
    },
}

/// Puts those objects in order again whose protection is over.
pub(in crate::state) fn unpark_due(inventory: &mut Inventory, now: Moment) {
    let Inventory { catalog, pool, .. } = inventory;
    catalog.unpark_due(now, pool.disks.is_empty());
}

/// Takes the next object out of the order. Subtracts the members of its group that it examined from
/// `steps`.
pub(in crate::state) fn next_candidate(
    inventory: &mut Inventory,
    now: Moment,
    pass: EvictionPass,
    spared: Option<ObjectSlot>,
    steps: &mut usize,
) -> Candidate {
    let Some(object) = inventory.catalog.pop(pass) else {
        return Candidate::None { has_early: inventory.catalog.queue.has_early() };
    };
    match inventory.classify(now, object, pass, spared, steps) {
        Verdict::Evict | Verdict::Move => return Candidate::Victim(object),
        Verdict::Skip => return Candidate::Spared(object),
        Verdict::Unfinished => return Candidate::Unfinished(object),
        Verdict::Wait(until) => inventory.catalog.park(object, until),
        Verdict::Demote => inventory.catalog.demote(object),
    }
    Candidate::Postponed
}

/// Takes an object out of the order.
pub(in crate::state) fn take_out(inventory: &mut Inventory, object: ObjectSlot) {
    inventory.catalog.dequeue(object);
}

/// Puts objects back that were taken out of the order, the last one first.
pub(in crate::state) fn put_back(inventory: &mut Inventory, taken: Vec<ObjectSlot>) {
    for object in taken.into_iter().rev() {
        inventory.catalog.put_back(object);
    }
}
