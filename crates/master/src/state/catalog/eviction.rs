//! Eviction policies: which object is evicted first when space is needed.

mod adaptive;
mod dueling;
mod ghosts;
mod index_list;
mod lru;
mod s3fifo;
mod tiers;

use std::ops::ControlFlow;

pub(in crate::state) use self::index_list::{IndexLinks, IndexList};
pub use self::{adaptive::Adaptive, lru::Lru, s3fifo::S3Fifo};
use crate::state::{
    ids::{KeyHash, ObjectSlot},
    rules::EvictionKind,
};

/// An eviction policy over object slots. Every call is O(1), `pop` on average.
///
/// The caller removes objects that must not be evicted and inserts them again later, so that a
/// policy does not examine an object repeatedly without success.
pub trait EvictionPolicy: std::fmt::Debug + Send {
    /// Marks the start of a call that uses objects: objects used and inserted until the next mark
    /// are likely to be read together.
    fn begin_batch(&mut self) {}

    /// Makes an object evictable. `hash` is the same for the same key. No effect if the object is
    /// already in.
    fn insert(&mut self, object: ObjectSlot, hash: KeyHash);

    /// Records a use of an object. No effect if the object is not in.
    fn touch(&mut self, object: ObjectSlot);

    /// Removes an object. No effect if the object is not in.
    fn remove(&mut self, object: ObjectSlot);

    /// Removes and returns the next victim.
    fn pop(&mut self) -> Option<ObjectSlot>;

    /// Passes objects to `visit` in the order in which [`pop`](Self::pop) would return them, as far
    /// as that is known, until it breaks. Takes a step per object, and some that are passed over.
    fn visit_next(&self, visit: &mut dyn FnMut(ObjectSlot) -> ControlFlow<()>);

    /// Inserts an object again, as the next victim, that was popped but not evicted.
    fn put_back(&mut self, object: ObjectSlot);

    /// Records that an object, which was popped, has been evicted.
    fn on_evicted(&mut self, _object: ObjectSlot, _hash: KeyHash) {}
}

/// Creates an empty policy of that kind.
pub(in crate::state) fn policy(kind: EvictionKind) -> Box<dyn EvictionPolicy> {
    match kind {
        EvictionKind::Adaptive => Box::new(Adaptive::default()),
        EvictionKind::Lru => Box::new(Lru::default()),
        EvictionKind::S3Fifo => Box::new(S3Fifo::default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: u32) -> ObjectSlot {
        ObjectSlot::new(number)
    }

    /// Checks the contract of every policy.
    fn check_policy(mut policy: Box<dyn EvictionPolicy>) {
        assert_eq!(policy.pop(), None);
        policy.touch(slot(3));
        policy.remove(slot(3));
        for object in 0..100 {
            policy.insert(slot(object), KeyHash::new(object));
            policy.insert(slot(object), KeyHash::new(object));
        }
        policy.remove(slot(50));
        policy.touch(slot(7));
        let mut next = Vec::new();
        let mut visit = |object| {
            next.push(object);
            if next.len() < 50 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        policy.visit_next(&mut visit);
        let victim = policy.pop().unwrap();
        policy.put_back(victim);
        assert_eq!(policy.pop(), Some(victim), "an object put back is the next victim");
        let mut popped = vec![victim];
        popped.extend((1..50).map_while(|index| {
            // As in a full pool, a new object takes the place of each victim.
            policy.insert(slot(1000 + index), KeyHash::new(1000 + index));
            policy.pop()
        }));
        assert_eq!(next, popped, "the next victims are known");
        for object in popped.into_iter().skip(1).rev() {
            policy.put_back(object);
        }
        (1..50).for_each(|index| policy.remove(slot(1000 + index)));
        let mut seen = vec![victim];
        while let Some(object) = policy.pop() {
            seen.push(object);
        }
        seen.sort_unstable();
        let all: Vec<ObjectSlot> = (0..100).filter(|&object| object != 50).map(slot).collect();
        assert_eq!(seen, all, "each object once, without the removed one");
        // The policy can be reused.
        policy.insert(slot(7), KeyHash::new(7));
        policy.insert(slot(200), KeyHash::new(200));
        let rest = [policy.pop(), policy.pop(), policy.pop()];
        assert!(
            rest[2].is_none() && rest.contains(&Some(slot(7))) && rest.contains(&Some(slot(200)))
        );
    }

    #[test]
    fn every_policy_returns_each_object_once() {
        check_policy(policy(EvictionKind::Lru));
        check_policy(policy(EvictionKind::S3Fifo));
        check_policy(policy(EvictionKind::Adaptive));
    }

    #[test]
    fn lru_evicts_least_recently_used() {
        let mut lru = Lru::default();
        for object in 0..3 {
            lru.insert(slot(object), KeyHash::new(0));
        }
        lru.touch(slot(0));
        assert_eq!(
            [lru.pop(), lru.pop(), lru.pop()],
            [Some(slot(1)), Some(slot(2)), Some(slot(0))]
        );
    }

    #[test]
    fn s3fifo_resists_scan() {
        let mut policy = S3Fifo::default();
        for object in 0..10 {
            policy.insert(slot(object), KeyHash::new(object));
            policy.touch(slot(object));
        }
        // A scan over a hundred objects with space for 50.
        for object in 10..110 {
            policy.insert(slot(object), KeyHash::new(object));
            if object >= 50 {
                let victim = policy.pop().unwrap();
                assert!(victim >= slot(10), "victim={victim:?}");
            }
        }
    }
}
