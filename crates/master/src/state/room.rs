//! Finding room for an object, and making it.

mod refusal;

use std::time::Duration;

use mooncake_base::{Moment, Result};

use rustc_hash::FxHashMap;

use super::{
    State,
    allocator::{BlockId, footprint},
    eviction::EvictionPolicy,
    lease::Stamp,
    object::{Flags, Replica, Replicas},
    placement::Ask,
    wish::PutOptions,
};

/// How soon a group with a hard-pinned member is looked at again.
const GROUP_RETRY: Duration = Duration::from_secs(1);
/// How many objects are evicted ahead of need at a time.
const AHEAD_SLICE: usize = 64;
/// How soon the watermark is looked at again while nothing can be evicted.
const AHEAD_RETRY: Duration = Duration::from_secs(1);

/// What a put needs.
#[derive(Debug)]
pub(super) struct Want<'a> {
    pub(super) length: u64,
    pub(super) replicas: u32,
    /// Where the copies may lie.
    pub(super) within: Within<'a>,
    /// The writer's host; empty if unknown.
    pub(super) host: &'a str,
    pub(super) options: &'a PutOptions,
    /// Must not be evicted: it is to be replaced.
    pub(super) spared: Option<u32>,
}

/// Segments that come into question, of those that take new objects.
#[derive(Debug, Clone, Copy)]
pub(super) enum Within<'a> {
    /// All.
    All,
    /// These.
    Only(&'a [u32]),
    /// All but these.
    Except(&'a [u32]),
}

impl Within<'_> {
    fn has(&self, segment: u32) -> bool {
        match self {
            Self::All => true,
            Self::Only(these) => these.contains(&segment),
            Self::Except(these) => !these.contains(&segment),
        }
    }
}

/// A search for victims on its way.
#[derive(Debug)]
struct Hunt {
    /// What a segment must reach.
    need: u64,
    /// By segment: bytes that are free or would be without the victims; `None` if it is no use.
    room: Vec<Option<u64>>,
    /// Taken from the queue to be evicted, if they lie so that it helps.
    victims: Vec<u32>,
    /// The memory of the victims: segment and block, and whose it is.
    taken: FxHashMap<(u32, BlockId), u32>,
    /// Taken from the queue in vain.
    aside: Vec<u32>,
}

/// The two orders of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Plain,
    Soft,
}

/// What becomes of an object that is next in the order.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict {
    Evict,
    /// Held until then.
    Wait(Stamp),
    /// To be evicted only after all others.
    Later,
    /// No use, or not to be touched by this put.
    Pass,
}

impl State {
    /// Allocates the copies, on distinct segments; at least one, all that are wished if possible.
    ///
    /// # Errors
    /// `NO_AVAILABLE_HANDLE`, with what holds the memory.
    pub(super) fn find_room(&mut self, now: Moment, want: &Want<'_>) -> Result<Replicas> {
        let open = self.segments.open().iter().filter(|&&slot| want.within.has(slot));
        let Some(need) = footprint(want.length) else { return Err(self.too_large(now, want)) };
        let possible = open.filter(|&&slot| self.segments.at(slot).allocator.length() >= need);
        let wished = possible.take(want.replicas as usize).count();
        if wished == 0 {
            return Err(self.too_large(now, want));
        }
        let mut replicas = Replicas::default();
        self.fill(want, wished, &mut replicas);
        if replicas.len() < wished && self.take_back(now) {
            self.fill(want, wished, &mut replicas);
        }
        while replicas.len() < wished && self.make_room(now, need, want, &mut replicas) {}
        if replicas.is_empty() {
            return Err(self.no_room(now, need, want));
        }
        if replicas.len() < want.replicas as usize {
            self.counters.puts_with_fewer_copies += 1;
        }
        Ok(replicas)
    }

    /// Evicts ahead of need, a slice at a time. When it is to be called again.
    pub(super) fn evict_ahead(&mut self, now: Moment) -> Option<Moment> {
        let watermark = self.rules.watermark?;
        let (used, capacity) = self.sums();
        let low = (watermark.high - watermark.ratio) * capacity as f64;
        let limit = if self.is_evicting { low } else { watermark.high * capacity as f64 };
        self.is_evicting = used as f64 > limit;
        if !self.is_evicting {
            return None;
        }
        let goal = self.counters.evicted_bytes + (used as f64 - low).ceil() as u64;
        self.unpark_due(now);
        for _ in 0..AHEAD_SLICE {
            if self.counters.evicted_bytes >= goal {
                break;
            }
            let passes = [Pass::Plain, Pass::Soft];
            let next = passes.into_iter().find_map(|pass| Some((pass, self.pop(pass)?)));
            let Some((pass, object)) = next else { return Some(now + AHEAD_RETRY) };
            match self.judge(now, object, pass, None) {
                Verdict::Evict => {
                    for member in self.unit(object) {
                        self.dequeue(member);
                        self.evict(now, member);
                    }
                }
                Verdict::Wait(until) => self.park(object, until),
                Verdict::Later => self.queue.soft.insert(object, 0),
                Verdict::Pass => self.put_back(object),
            }
        }
        Some(now)
    }

    /// Allocates copies where there is room.
    fn fill(&mut self, want: &Want<'_>, wished: usize, replicas: &mut Replicas) {
        let mut offers = std::mem::take(&mut self.offers);
        offers.clear();
        self.offer(want, &mut offers);
        self.try_segments(&offers, want, wished, replicas);
        // All of perhaps thousands come only after those that were offered.
        if replicas.len() < wished {
            offers.clear();
            offers.extend(self.segments.open());
            self.try_segments(&offers, want, wished, replicas);
        }
        self.offers = offers;
    }

    /// Takes memory back that is due, should the driver be late with it; whether there was any.
    fn take_back(&mut self, now: Moment) -> bool {
        let mut has_any = false;
        while self.release_rested(now) | self.release_oldest_write(now) {
            has_any = true;
        }
        has_any
    }

    /// Segments that should be tried before the others, in that order.
    fn offer(&mut self, want: &Want<'_>, offers: &mut Vec<u32>) {
        for name in &want.options.preferred_segments {
            offers.extend(self.segments.named(name));
        }
        let open = self.segments.open();
        if want.options.is_same_node_preferred && !want.host.is_empty() {
            offers.extend(open.iter().filter(|&&slot| *self.segments.at(slot).host == *want.host));
        }
        let ask = Ask { host: want.host, replicas: want.replicas };
        self.placement.order(&self.segments, &ask, offers);
    }

    fn try_segments(
        &mut self,
        slots: &[u32],
        want: &Want<'_>,
        wished: usize,
        replicas: &mut Replicas,
    ) {
        for &slot in slots.iter().filter(|&&slot| want.within.has(slot)) {
            if replicas.len() == wished {
                return;
            }
            self.try_segment(slot, want.length, replicas);
        }
    }

    fn try_segment(&mut self, slot: u32, length: u64, replicas: &mut Replicas) {
        let segment = self.segments.at_mut(slot);
        let is_taken = replicas.iter().any(|replica| replica.segment == slot);
        if is_taken || !segment.takes_new() || segment.free() < length {
            return;
        }
        if let Some(block) = segment.allocator.allocate(length) {
            replicas.push(Replica { segment: slot, block, ordinal: replicas.len() as u16 });
        }
    }

    /// Evicts until one more copy has room; nothing at all if that cannot help.
    fn make_room(
        &mut self,
        now: Moment,
        need: u64,
        want: &Want<'_>,
        replicas: &mut Replicas,
    ) -> bool {
        self.counters.evictions_attempted += 1;
        let mut room = vec![None; self.segments.slots()];
        for &slot in self.segments.open() {
            let segment = self.segments.at(slot);
            let is_taken = replicas.iter().any(|replica| replica.segment == slot);
            if !is_taken && want.within.has(slot) && segment.reach() >= need {
                room[slot as usize] = Some(segment.free());
            }
        }
        if room.iter().all(Option::is_none) {
            return false;
        }
        self.unpark_due(now);
        let mut hunt = Hunt {
            need,
            room,
            victims: Vec::new(),
            taken: FxHashMap::default(),
            aside: Vec::new(),
        };
        let mut is_found = self.hunt(now, Pass::Plain, want, &mut hunt, replicas);
        if !is_found && self.rules.is_soft_pin_evictable {
            is_found = self.hunt(now, Pass::Soft, want, &mut hunt, replicas);
        }
        for object in hunt.victims.into_iter().chain(hunt.aside).rev() {
            self.put_back(object);
        }
        self.counters.evictions_succeeded += u64::from(is_found);
        is_found
    }

    fn hunt(
        &mut self,
        now: Moment,
        pass: Pass,
        want: &Want<'_>,
        hunt: &mut Hunt,
        replicas: &mut Replicas,
    ) -> bool {
        while let Some(object) = self.pop(pass) {
            match self.judge(now, object, pass, want.spared) {
                Verdict::Wait(until) => self.park(object, until),
                Verdict::Later => self.queue.soft.insert(object, 0),
                Verdict::Pass => hunt.aside.push(object),
                Verdict::Evict => {
                    let unit = self.unit(object);
                    if !self.count(hunt, &unit) {
                        hunt.aside.push(object);
                        continue;
                    }
                    for &member in &unit {
                        self.dequeue(member);
                    }
                    hunt.victims.extend(&unit);
                    if self.strike(now, hunt, &unit, want.length, replicas) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Evicts victims if some of them, the latest among them, lie so that the object fits where
    /// they were; only those, and the groups they are of.
    fn strike(
        &mut self,
        now: Moment,
        hunt: &mut Hunt,
        latest: &[u32],
        length: u64,
        replicas: &mut Replicas,
    ) -> bool {
        let copies = latest.iter().flat_map(|&object| self.objects.at(object).replicas.iter());
        let found = copies.into_iter().find_map(|copy| {
            let segment = copy.segment;
            hunt.room.get(segment as usize)?.filter(|&room| room >= hunt.need)?;
            let is_taken = |block| hunt.taken.contains_key(&(segment, block));
            let run = self.segments.at(segment).allocator.run(copy.block, length, is_taken)?;
            Some((segment, run))
        });
        let Some((segment, run)) = found else { return false };
        for block in run {
            // A block whose object went with another one's group is gone already.
            let Some(&object) = hunt.taken.get(&(segment, block)) else { continue };
            for member in self.unit(object) {
                for copy in self.objects.at(member).replicas.iter() {
                    hunt.taken.remove(&(copy.segment, copy.block));
                }
                self.evict(now, member);
            }
        }
        let before = replicas.len();
        self.try_segment(segment, length, replicas);
        replicas.len() > before
    }

    /// Adds what evicting these would free; whether it helps.
    fn count(&self, hunt: &mut Hunt, unit: &[u32]) -> bool {
        let mut helps = false;
        for &member in unit {
            for replica in self.objects.at(member).replicas.iter() {
                if let Some(Some(room)) = hunt.room.get_mut(replica.segment as usize) {
                    hunt.taken.insert((replica.segment, replica.block), member);
                    *room += self.segments.at(replica.segment).allocator.size(replica.block);
                    helps = true;
                }
            }
        }
        helps
    }

    pub(super) fn judge(
        &mut self,
        now: Moment,
        object: u32,
        pass: Pass,
        spared: Option<u32>,
    ) -> Verdict {
        if !self.settle(object) {
            // Its copies are lost; the sweep forgets the rest of it.
            return Verdict::Pass;
        }
        let unit = self.unit(object);
        let mut end = Stamp::default();
        let mut is_soft = false;
        for &member in &unit {
            if self.is_dormant(member) {
                end = end.max(self.dormancy.end().into());
            }
            let held = self.objects.at(member);
            if held.flags.has(Flags::HARD_PINNED) {
                end = end.max((now + GROUP_RETRY).into());
            }
            end = end.max(held.holds.end()).max(self.copied_until(member));
            is_soft |= held.flags.has(Flags::SOFT_PINNED);
        }
        if spared.is_some_and(|spared| unit.contains(&spared)) {
            Verdict::Pass
        } else if end > now.into() {
            Verdict::Wait(end)
        } else if is_soft && pass == Pass::Plain {
            Verdict::Later
        } else {
            Verdict::Evict
        }
    }

    /// What is evicted together with the object, itself among it.
    pub(super) fn unit(&self, object: u32) -> Vec<u32> {
        match self.groups.siblings(object) {
            [] => vec![object],
            siblings => siblings.to_vec(),
        }
    }

    pub(super) fn evict(&mut self, now: Moment, object: u32) {
        self.counters.evicted_keys += 1;
        self.counters.evicted_bytes += self.objects.at(object).bytes();
        let is_plain = !self.objects.at(object).flags.has(Flags::SOFT_PINNED);
        self.drop_value(now, object);
        if is_plain {
            self.queue.plain.evicted(object, self.objects.key_hash(object));
        }
        self.vacate_if_empty(object);
    }

    fn pop(&mut self, pass: Pass) -> Option<u32> {
        match pass {
            Pass::Plain => self.queue.plain.pop(),
            Pass::Soft => self.queue.soft.pop(),
        }
    }

    /// An object that was taken out of the order is next again.
    fn put_back(&mut self, object: u32) {
        let Some(flags) = self.objects.get(object).map(|object| object.flags) else { return };
        if !flags.has(Flags::COMPLETE) {
            return;
        }
        if flags.has(Flags::SOFT_PINNED) {
            self.queue.soft.put_back(object);
        } else {
            self.queue.plain.put_back(object);
        }
    }
}
