//! The use of the memory, by the reason that holds it.

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

use crate::state::{
    catalog::{group::GroupIndex, object::Flags},
    ids::{ObjectSlot, SegmentSlot, Slot},
    inventory::{
        Inventory,
        hold::{MemoryHold, memory_hold},
    },
    pool::request::SegmentFilter,
};

/// Maximum objects scanned, and maximum members of their groups examined. The result is extrapolated
/// to all objects, so that a client that retries all the time does not block the others.
const SCAN_MAX: u32 = 4096;

/// Bytes of objects by the reason that keeps them, apart from quarantined, written and hard-pinned
/// bytes.
#[derive(Debug, Clone, Copy, Default)]
struct HeldBytes {
    /// Leased, fenced or being copied, or in a group with such an object or a hard-pinned one.
    leased: u64,
    /// Soft-pinned, where the rules forbid evicting these.
    soft_pinned: u64,
    /// Evictable, but too little or too scattered.
    evictable: u64,
}

/// The reason that keeps an object and its group from eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum Blocker {
    Leased,
    SoftPinned,
    None,
}

/// Bytes of the pool by the reason that holds them. The parts add up to all memory that accepts
/// objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Not in use.
    pub free: u64,
    /// Of objects that are leased, fenced or being copied, or in a group with such an object.
    pub leased: u64,
    /// Of objects that are never evicted.
    pub hard_pinned: u64,
    /// Of soft-pinned objects, where the rules forbid evicting these.
    pub soft_pinned: u64,
    /// Of the object to be replaced.
    pub replaced: u64,
    /// Of objects that may be evicted, or could be once a disk has them.
    pub evictable: u64,
    /// Of unfinished puts and tasks.
    pub writing: u64,
    /// Freed, and in quarantine until a fence or a late write ends.
    pub fenced: u64,
    /// Freed, and waiting for the log.
    pub awaiting_sync: u64,
}

impl HeldBytes {
    fn add(&mut self, blocker: Blocker, bytes: u64) {
        *match blocker {
            Blocker::Leased => &mut self.leased,
            Blocker::SoftPinned => &mut self.soft_pinned,
            Blocker::None => &mut self.evictable,
        } += bytes;
    }

    fn sum(&self) -> u64 {
        self.leased + self.soft_pinned + self.evictable
    }

    /// Scales the parts to another sum.
    fn scaled(self, sum: u64) -> Self {
        let seen = u128::from(self.sum().max(1));
        let share = |part: u64| (u128::from(part) * u128::from(sum) / seen) as u64;
        let (leased, soft_pinned) = (share(self.leased), share(self.soft_pinned));
        Self { leased, soft_pinned, evictable: sum - leased - soft_pinned }
    }
}

/// Returns the bytes of the segments that accept objects, by the reason that holds them. The
/// bytes of objects are extrapolated from the first ones. Returns the number of segments and
/// objects looked at, too.
pub(in crate::state) fn memory_use(
    inventory: &Inventory,
    now: Moment,
    filter: SegmentFilter<'_>,
) -> (MemoryUse, u64) {
    let mut steps = 0;
    let (mut found, mut rest) = (MemoryUse::default(), 0);
    for slot in admitted(inventory, filter) {
        let segment = inventory.pool.segments.at(slot);
        let reserved = segment.reserved();
        steps += 1;
        found.free += segment.free() + reserved.prepared;
        found.fenced += reserved.fenced;
        found.writing += reserved.writing;
        found.hard_pinned += reserved.hard_pinned;
        found.awaiting_sync += reserved.withheld;
        rest += segment.reclaimable() - segment.free().min(segment.reclaimable());
    }
    let scanned = inventory.catalog.objects.slot_count().min(SCAN_MAX);
    let held = held_bytes(inventory, now, filter).scaled(rest);
    let total = MemoryUse {
        leased: held.leased,
        soft_pinned: held.soft_pinned,
        evictable: held.evictable,
        ..found
    };
    (total, steps + u64::from(scanned))
}

/// Sums up the scanned objects by the reason that keeps them.
fn held_bytes(inventory: &Inventory, now: Moment, filter: SegmentFilter<'_>) -> HeldBytes {
    let mut held = HeldBytes::default();
    let mut groups: FxHashMap<GroupIndex, Blocker> = FxHashMap::default();
    let mut members_left = SCAN_MAX as usize;
    for slot in ObjectSlot::range(0, inventory.catalog.objects.slot_count().min(SCAN_MAX)) {
        let Some(object) = inventory.catalog.objects.get(slot) else { continue };
        if !object.is_complete() || object.flags.has(Flags::HARD_PINNED) {
            continue;
        }
        let bytes = bytes_in(inventory, slot, filter);
        if bytes == 0 {
            continue;
        }
        let blocker = match inventory.catalog.groups.index(slot) {
            None => blocker(inventory, now, &[slot]),
            Some(group) => *groups.entry(group).or_insert_with(|| {
                let known = inventory.catalog.groups.blocker(slot);
                let known = known.map(|member| blocker(inventory, now, &[member]));
                if let Some(blocker) = known.filter(|&known| known != Blocker::None) {
                    return blocker;
                }
                let members = inventory.catalog.groups.members(slot);
                let examined = &members[..members.len().min(members_left)];
                members_left -= examined.len();
                blocker(inventory, now, examined)
            }),
        };
        held.add(blocker, bytes);
    }
    held
}

/// Returns the reason that keeps these objects from eviction, one of them at least.
pub(in crate::state) fn blocker(
    inventory: &Inventory,
    now: Moment,
    group: &[ObjectSlot],
) -> Blocker {
    let is_leased =
        |&member: &ObjectSlot| matches!(memory_hold(inventory, now, member), MemoryHold::Until(_));
    let is_soft =
        |&member: &ObjectSlot| inventory.catalog.objects.at(member).flags.has(Flags::SOFT_PINNED);
    if group.iter().any(is_leased) {
        Blocker::Leased
    } else if !inventory.rules.is_soft_pin_evictable && group.iter().any(is_soft) {
        Blocker::SoftPinned
    } else {
        Blocker::None
    }
}

/// Returns the bytes of an object in the segments that accept objects and pass the filter.
pub(in crate::state) fn bytes_in(
    inventory: &Inventory,
    slot: ObjectSlot,
    filter: SegmentFilter<'_>,
) -> u64 {
    let copies = inventory.catalog.objects.at(slot).replicas.iter().map(|copy| {
        let segment = inventory.pool.segments.at(copy.segment);
        let counts = segment.accepts_new() && filter.admits(copy.segment);
        if counts { segment.allocator.size(copy.block) } else { 0 }
    });
    copies.sum()
}

/// Returns the segments that accept objects and pass the filter.
pub(in crate::state) fn admitted<'a>(
    inventory: &'a Inventory,
    filter: SegmentFilter<'a>,
) -> impl Iterator<Item = SegmentSlot> + use<'a> {
    let open = inventory.pool.segments.open().iter().copied();
    open.filter(move |&slot| filter.admits(slot))
}
