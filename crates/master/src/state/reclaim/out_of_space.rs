//! Error of a put without free memory: the bytes in use, by reason.

use mooncake_base::{Error, ErrorCode, Moment};
use rustc_hash::FxHashMap;

use super::{AllocRequest, SegmentFilter};
use crate::state::{
    catalog::{group::GroupIndex, object::Flags},
    ids::{ObjectSlot, SegmentSlot, Slot},
    inventory::Inventory,
    pool::segment::SegmentStatus,
    reclaim::Reclaimer,
};

/// Maximum objects scanned, and maximum members of their groups examined. The result is extrapolated
/// to all objects, so that a client that retries all the time does not block the others.
const SCAN_MAX: u32 = 16_384;

/// Bytes of objects by the reason that keeps them, apart from quarantined, written and hard-pinned
/// bytes.
#[derive(Debug, Clone, Copy, Default)]
struct HeldBytes {
    /// Leased, fenced or being copied, or in a group with such an object or a hard-pinned one.
    leased: u64,
    /// Soft-pinned, where the rules forbid evicting these.
    soft_pinned: u64,
    /// Of the object to be replaced.
    replaced: u64,
    /// Evictable, but too little or too scattered.
    evictable: u64,
}

/// The reason that keeps an object and its group from eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocker {
    Leased,
    SoftPinned,
    Replaced,
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
    /// Of objects that may be evicted.
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
            Blocker::Replaced => &mut self.replaced,
            Blocker::None => &mut self.evictable,
        } += bytes;
    }

    fn sum(&self) -> u64 {
        self.leased + self.soft_pinned + self.replaced + self.evictable
    }

    /// Scales the parts to another sum.
    fn scaled(self, sum: u64) -> Self {
        let seen = u128::from(self.sum().max(1));
        let share = |part: u64| (u128::from(part) * u128::from(sum) / seen) as u64;
        let (leased, soft_pinned) = (share(self.leased), share(self.soft_pinned));
        let replaced = share(self.replaced);
        Self { leased, soft_pinned, replaced, evictable: sum - leased - soft_pinned - replaced }
    }
}

impl Reclaimer<'_> {
    pub(super) fn too_large_error(&self, now: Moment, request: &AllocRequest<'_>) -> Error {
        if let Some(end) = self.inventory.pool.segments.quarantine_end(request.length) {
            let why =
                "mounted memory is quarantined until readers and late writers are done; retry";
            return Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why)
                .with("bytes", request.length)
                .with("retry_after_ms", end.left(now).as_millis().max(1));
        }
        let lengths = self
            .inventory
            .pool
            .segments
            .open()
            .iter()
            .map(|&slot| self.inventory.pool.segments.at(slot));
        let largest = lengths.map(|segment| segment.allocator.length()).max();
        let why = match largest {
            Some(_) => "the object is larger than any segment",
            None => self.closed_pool_reason(),
        };
        Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why)
            .with("bytes", request.length)
            .with("largest_segment", largest.unwrap_or(0))
    }

    /// Returns why no segment accepts objects.
    fn closed_pool_reason(&self) -> &'static str {
        let (mut is_drained, mut is_lost) = (false, false);
        for (_, segment) in self.inventory.pool.segments.mounted() {
            match segment.status {
                SegmentStatus::Ok => is_lost = true,
                _ => is_drained = true,
            }
        }
        match (is_drained, is_lost) {
            (false, false) => "no segment accepts objects: none is mounted",
            (true, false) => "no segment accepts objects: all are being drained or were drained",
            (false, true) => "no segment accepts objects: their clients lost contact",
            (true, true) => {
                "no segment accepts objects: they are drained, or their clients lost contact"
            }
        }
    }

    /// Builds the error; its parts add up to all memory that the request may use.
    pub(super) fn out_of_space_error(
        &self,
        now: Moment,
        need: u64,
        request: &AllocRequest<'_>,
    ) -> Error {
        let inventory = &*self.inventory;
        let found = inventory.memory_use(now, request.filter, request.spared);
        let waits_for_fence = admitted(inventory, request.filter).any(|slot| {
            let segment = inventory.pool.segments.at(slot);
            let fenced = segment.reserved().fenced;
            fenced > 0 && segment.free() + fenced >= need
        });
        let why = match waits_for_fence {
            true => "freed memory is quarantined until readers and late writers are done; retry",
            false if found.evictable > 0 => {
                "no segment has enough free memory, and eviction would not free enough in one run"
            }
            false => "no segment has enough free memory, and nothing more may be evicted",
        };
        let mut error = Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why)
            .with("bytes", request.length)
            .with("free", found.free)
            .with("leased", found.leased)
            .with("hard_pinned", found.hard_pinned)
            .with("writing", found.writing)
            .with("fenced", found.fenced);
        let others = [
            ("soft_pinned", found.soft_pinned),
            ("replaced", found.replaced),
            ("evictable", found.evictable),
            ("awaiting_sync", found.awaiting_sync),
        ];
        for (name, bytes) in others.into_iter().filter(|(_, bytes)| *bytes > 0) {
            error = error.with(name, bytes);
        }
        match inventory.pool.quarantine.next().filter(|_| waits_for_fence) {
            Some(end) => error.with("retry_after_ms", end.left(now).as_millis().max(1)),
            None => error,
        }
    }
}

impl Inventory {
    /// Returns the bytes of the segments that accept objects, by the reason that holds them. The
    /// bytes of objects are extrapolated from the first ones.
    pub(in crate::state) fn memory_use(
        &self,
        now: Moment,
        filter: SegmentFilter<'_>,
        spared: Option<ObjectSlot>,
    ) -> MemoryUse {
        let (mut found, mut rest) = (MemoryUse::default(), 0);
        for slot in admitted(self, filter) {
            let segment = self.pool.segments.at(slot);
            let reserved = segment.reserved();
            found.free += segment.free();
            found.fenced += reserved.fenced;
            found.writing += reserved.writing;
            found.hard_pinned += reserved.hard_pinned;
            found.awaiting_sync += reserved.withheld;
            rest += segment.reclaimable() - segment.free().min(segment.reclaimable());
        }
        let held = self.held_bytes(now, filter, spared).scaled(rest);
        MemoryUse {
            leased: held.leased,
            soft_pinned: held.soft_pinned,
            replaced: held.replaced,
            evictable: held.evictable,
            ..found
        }
    }

    /// Sums up the scanned objects by the reason that keeps them.
    fn held_bytes(
        &self,
        now: Moment,
        filter: SegmentFilter<'_>,
        spared: Option<ObjectSlot>,
    ) -> HeldBytes {
        let mut held = HeldBytes::default();
        let mut groups: FxHashMap<GroupIndex, Blocker> = FxHashMap::default();
        let mut members_left = SCAN_MAX as usize;
        for slot in ObjectSlot::range(0, self.catalog.objects.slot_count().min(SCAN_MAX)) {
            let Some(object) = self.catalog.objects.get(slot) else { continue };
            if !object.is_complete() || object.flags.has(Flags::HARD_PINNED) {
                continue;
            }
            let copies = object.replicas.iter().map(|copy| {
                let segment = self.pool.segments.at(copy.segment);
                let counts = segment.accepts_new() && filter.admits(copy.segment);
                if counts { segment.allocator.size(copy.block) } else { 0 }
            });
            let bytes: u64 = copies.sum();
            if bytes == 0 {
                continue;
            }
            let blocker = match self.catalog.groups.index(slot) {
                None => self.blocker(now, &[slot], spared),
                Some(group) => *groups.entry(group).or_insert_with(|| {
                    let members = self.catalog.groups.members(slot);
                    let examined = &members[..members.len().min(members_left)];
                    members_left -= examined.len();
                    self.blocker(now, examined, spared)
                }),
            };
            held.add(blocker, bytes);
        }
        held
    }

    /// Returns the reason that keeps these objects from eviction, one of them at least.
    fn blocker(&self, now: Moment, group: &[ObjectSlot], spared: Option<ObjectSlot>) -> Blocker {
        let is_leased = |&member: &ObjectSlot| {
            let object = self.catalog.objects.at(member);
            let end = object.protection.protected_until().max(self.catalog.copying_until(member));
            end > now.into() || object.flags.has(Flags::HARD_PINNED) || self.is_unclaimed(member)
        };
        let is_soft =
            |&member: &ObjectSlot| self.catalog.objects.at(member).flags.has(Flags::SOFT_PINNED);
        if group.iter().any(is_leased) {
            Blocker::Leased
        } else if spared.is_some_and(|spared| group.contains(&spared)) {
            Blocker::Replaced
        } else if !self.rules.is_soft_pin_evictable && group.iter().any(is_soft) {
            Blocker::SoftPinned
        } else {
            Blocker::None
        }
    }
}

/// Returns the segments that accept objects and pass the filter.
pub(super) fn admitted<'a>(
    inventory: &'a Inventory,
    filter: SegmentFilter<'a>,
) -> impl Iterator<Item = SegmentSlot> + use<'a> {
    let open = inventory.pool.segments.open().iter().copied();
    open.filter(move |&slot| filter.admits(slot))
}
