//! Groups: objects that are evicted together or not at all.
//!
//! A large group is evicted in slices. From the first slice on the group is *condemned*: its members
//! count as evicted, and objects that join later make a new group of the same name.
//!
//! A large group is examined in slices, too. Members that were found evictable are not examined
//! again unless one of them is protected meanwhile.

use crate::state::{
    catalog::split_map::{SeededState, SplitMap},
    ids::{ObjectSlot, TenantIndex},
};

/// Members of a group that are evicted at once; the group is condemned if it has more.
pub(in crate::state) const GROUP_SLICE: usize = 64;

/// Members of a group that are remembered as waiting for its eviction.
const WAITING_MAX: usize = 64;

/// Members of each group. Objects without a group cost nothing here.
#[derive(Debug)]
pub(in crate::state) struct Groups {
    names: SplitMap<(TenantIndex, Box<[u8]>), GroupIndex, SeededState>,
    groups: Vec<Option<Group>>,
    vacant: Vec<GroupIndex>,
    /// Group of each object, and its position among the members.
    memberships: SplitMap<ObjectSlot, (GroupIndex, u32)>,
    /// Condemned groups that have members left.
    condemned: Vec<GroupIndex>,
}

/// Id of a group; reused after its last member left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::state) struct GroupIndex(u32);

#[derive(Debug)]
struct Group {
    name: (TenantIndex, Box<[u8]>),
    members: Vec<ObjectSlot>,
    /// The member that kept the group from eviction when it was last examined.
    blocker: Option<ObjectSlot>,
    is_condemned: bool,
    /// So many of the first members were found evictable.
    examined: usize,
    /// Members that have a soft pin.
    soft_pinned: usize,
    /// Members that left the order of eviction because of another member.
    waiting: Vec<ObjectSlot>,
    /// There are more of these.
    has_more_waiting: bool,
}

impl Groups {
    pub(in crate::state) fn new(seed: u64) -> Self {
        Self {
            names: SplitMap::with_hasher(SeededState::with_seed(seed as usize)),
            groups: Vec::new(),
            vacant: Vec::new(),
            memberships: SplitMap::default(),
            condemned: Vec::new(),
        }
    }

    /// Adds an object that has no group to the tenant's group of that name.
    pub(in crate::state) fn join(&mut self, tenant: TenantIndex, name: &[u8], object: ObjectSlot) {
        let name = (tenant, Box::from(name));
        let number = match self.names.get(&name) {
            Some(&number) => number,
            None => {
                let number = self.vacant.pop().unwrap_or_else(|| {
                    self.groups.push(None);
                    // Each group has an object at least, whose number has 32 bits.
                    GroupIndex(self.groups.len() as u32 - 1)
                });
                self.names.insert(name.clone(), number);
                self.groups[number.0 as usize] = Some(Group::new(name));
                number
            }
        };
        let place = self.at(number).members.len() as u32;
        let before = self.memberships.insert(object, (number, place));
        debug_assert!(before.is_none(), "an object is in one group");
        self.at_mut(number).members.push(object);
    }

    /// Removes an object from its group, if it has one; an empty group is removed.
    pub(in crate::state) fn leave(&mut self, object: ObjectSlot) {
        let Some((number, place)) = self.memberships.remove(&object) else { return };
        let group = self.at_mut(number);
        let left = group.members.swap_remove(place as usize);
        debug_assert_eq!(left, object, "a member knows its place");
        // The last member has come to this place.
        group.examined = group.examined.min(place as usize);
        if group.blocker == Some(object) {
            group.blocker = None;
        }
        let (moved, is_empty) =
            (group.members.get(place as usize).copied(), group.members.is_empty());
        if let Some(moved) = moved {
            self.memberships.insert(moved, (number, place));
        }
        if is_empty && let Some(group) = self.groups[number.0 as usize].take() {
            debug_assert_eq!(group.soft_pinned, 0, "soft pins leave with their members");
            self.vacant.push(number);
            if group.is_condemned {
                self.condemned.retain(|&other| other != number);
            } else {
                self.names.remove(&group.name);
            }
        }
    }

    /// Condemns the group of an object, which is being evicted.
    pub(in crate::state) fn condemn(&mut self, object: ObjectSlot) {
        let Some(&(number, _)) = self.memberships.get(&object) else { return };
        let Some(group) = &mut self.groups[number.0 as usize] else { return };
        if !std::mem::replace(&mut group.is_condemned, true) {
            self.names.remove(&group.name);
            self.condemned.push(number);
        }
    }

    /// Returns a member of a condemned group; `None` if no condemned group has members left.
    pub(in crate::state) fn next_condemned(&self) -> Option<ObjectSlot> {
        self.at(*self.condemned.last()?).members.last().copied()
    }

    /// Returns whether the object belongs to a condemned group.
    pub(in crate::state) fn is_condemned(&self, object: ObjectSlot) -> bool {
        !self.condemned.is_empty()
            && self
                .memberships
                .get(&object)
                .is_some_and(|&(number, _)| self.at(number).is_condemned)
    }

    /// Returns the member that kept the object's group from eviction when it was last examined.
    pub(in crate::state) fn blocker(&self, object: ObjectSlot) -> Option<ObjectSlot> {
        let &(number, _) = self.memberships.get(&object)?;
        self.at(number).blocker
    }

    /// Returns how many of the first members of the object's group were found evictable.
    pub(in crate::state) fn examined(&self, object: ObjectSlot) -> usize {
        self.memberships.get(&object).map_or(0, |&(number, _)| self.at(number).examined)
    }

    /// Records how many of the first members of the object's group were found evictable, and the member
    /// that keeps the group from eviction, if one was found.
    pub(in crate::state) fn record_examination(
        &mut self,
        object: ObjectSlot,
        evictable: usize,
        blocker: Option<ObjectSlot>,
    ) {
        if let Some(&(number, _)) = self.memberships.get(&object) {
            let group = self.at_mut(number);
            group.examined = evictable;
            group.blocker = blocker.or(group.blocker);
        }
    }

    /// Records that a member may not be evicted for some time.
    pub(in crate::state) fn record_protection(&mut self, object: ObjectSlot) {
        let Some(&(number, place)) = self.memberships.get(&object) else { return };
        let group = self.at_mut(number);
        group.examined = group.examined.min(place as usize);
    }

    /// Counts a soft pin of a member that begins or ends.
    pub(in crate::state) fn count_soft_pin(&mut self, object: ObjectSlot, begins: bool) {
        let Some(&(number, _)) = self.memberships.get(&object) else { return };
        let group = self.at_mut(number);
        if begins {
            group.soft_pinned += 1;
            debug_assert!(group.soft_pinned <= group.members.len(), "a member has one soft pin");
        } else {
            group.soft_pinned -= 1;
        }
    }

    /// Returns whether a member of the object's group has a soft pin.
    pub(in crate::state) fn has_soft_pin(&self, object: ObjectSlot) -> bool {
        self.memberships.get(&object).is_some_and(|&(number, _)| self.at(number).soft_pinned > 0)
    }

    /// Records that a member left the order of eviction because of another member.
    /// `is_waiting` tells whether a recorded one still does.
    pub(in crate::state) fn add_waiting(
        &mut self,
        object: ObjectSlot,
        is_waiting: impl Fn(ObjectSlot) -> bool,
    ) {
        let Some(&(number, _)) = self.memberships.get(&object) else { return };
        let memberships = &self.memberships;
        let Some(group) = &mut self.groups[number.0 as usize] else { return };
        if group.waiting.len() >= WAITING_MAX {
            let is_member = |other: &ObjectSlot| {
                memberships.get(other).is_some_and(|&(of, _)| of == number) && is_waiting(*other)
            };
            group.waiting.retain(is_member);
        }
        if group.waiting.len() < WAITING_MAX {
            group.waiting.push(object);
        } else {
            group.has_more_waiting = true;
        }
    }

    /// Returns members that may have left the order of eviction because of another member, at most
    /// 64 of them: any one of them brings the group back. Members that left the group meanwhile are
    /// among them.
    pub(in crate::state) fn take_waiting(&mut self, object: ObjectSlot) -> Vec<ObjectSlot> {
        let Some(&(number, _)) = self.memberships.get(&object) else { return Vec::new() };
        let group = self.at_mut(number);
        let waiting = std::mem::take(&mut group.waiting);
        if waiting.is_empty() && std::mem::take(&mut group.has_more_waiting) {
            // Those that were recorded have left.
            group.members.clone()
        } else {
            waiting
        }
    }

    fn at(&self, number: GroupIndex) -> &Group {
        self.groups[number.0 as usize].as_ref().expect("a member has its group")
    }

    fn at_mut(&mut self, number: GroupIndex) -> &mut Group {
        self.groups[number.0 as usize].as_mut().expect("a member has its group")
    }

    /// Returns the id of the object's group.
    pub(in crate::state) fn index(&self, object: ObjectSlot) -> Option<GroupIndex> {
        self.memberships.get(&object).map(|&(number, _)| number)
    }

    /// Returns the name of the object's group.
    pub(in crate::state) fn name(&self, object: ObjectSlot) -> Option<&[u8]> {
        let &(number, _) = self.memberships.get(&object)?;
        Some(&self.at(number).name.1)
    }

    /// Returns all members of the object's group, itself included; empty if it has no group.
    pub(in crate::state) fn members(&self, object: ObjectSlot) -> &[ObjectSlot] {
        match self.memberships.get(&object) {
            Some(&(number, _)) => &self.at(number).members,
            None => &[],
        }
    }
}

impl Group {
    fn new(name: (TenantIndex, Box<[u8]>)) -> Self {
        Self {
            name,
            members: Vec::new(),
            blocker: None,
            is_condemned: false,
            examined: 0,
            soft_pinned: 0,
            waiting: Vec::new(),
            has_more_waiting: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: u32) -> ObjectSlot {
        ObjectSlot::new(number)
    }

    #[test]
    fn empty_groups_are_removed() {
        let mut groups = Groups::new(5);
        for object in 0..4 {
            groups.join(TenantIndex::new(0), b"a", slot(object));
        }
        groups.join(TenantIndex::new(1), b"a", slot(9));
        groups.leave(slot(0));
        groups.leave(slot(77));
        let mut siblings = groups.members(slot(1)).to_vec();
        siblings.sort_unstable();
        assert_eq!(
            (siblings, groups.members(slot(9))),
            ([1, 2, 3].map(slot).to_vec(), &[slot(9)][..])
        );
        assert!(groups.members(slot(0)).is_empty());
        for object in 1..4 {
            groups.leave(slot(object));
        }
        assert_eq!((groups.names.len(), groups.groups.iter().flatten().count()), (1, 1));
    }

    #[test]
    fn condemned_group_is_left_member_by_member() {
        let mut groups = Groups::new(5);
        let tenant = TenantIndex::new(0);
        (0..3).for_each(|object| groups.join(tenant, b"a", slot(object)));
        groups.condemn(slot(1));
        groups.condemn(slot(1));
        groups.join(tenant, b"a", slot(7));
        assert!((0..3).all(|object| groups.is_condemned(slot(object))));
        assert!(!groups.is_condemned(slot(7)), "a new group of the same name");
        let mut left = Vec::new();
        while let Some(member) = groups.next_condemned() {
            groups.leave(member);
            left.push(member);
        }
        assert_eq!(left, [2, 1, 0].map(slot));
        let left = groups.groups.iter().flatten().count();
        assert_eq!((groups.members(slot(7)), left), (&[slot(7)][..], 1));
        groups.join(tenant, b"a", slot(8));
        assert_eq!(groups.members(slot(8)).len(), 2, "the name belongs to the new group");
    }
}
