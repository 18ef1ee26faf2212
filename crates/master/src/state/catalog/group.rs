//! Groups: objects that are evicted together or not at all.
//!
//! A large group is evicted in slices. From the first slice on the group is *condemned*: its members
//! count as evicted, and objects that join later make a new group of the same name.

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use crate::state::ids::{ObjectSlot, TenantIndex};

/// Members of each group. Objects without a group cost nothing here.
#[derive(Debug)]
pub(in crate::state) struct Groups {
    names: HashMap<(TenantIndex, Box<[u8]>), GroupIndex, rustc_hash::FxSeededState>,
    groups: FxHashMap<GroupIndex, Group>,
    /// Group of each object, and its position among the members.
    memberships: FxHashMap<ObjectSlot, (GroupIndex, usize)>,
    next: u32,
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
}

impl Groups {
    pub(in crate::state) fn new(seed: u64) -> Self {
        let names = HashMap::with_hasher(rustc_hash::FxSeededState::with_seed(seed as usize));
        Self {
            names,
            groups: FxHashMap::default(),
            memberships: FxHashMap::default(),
            next: 0,
            condemned: Vec::new(),
        }
    }

    /// Adds an object that has no group to the tenant's group of that name.
    pub(in crate::state) fn join(&mut self, tenant: TenantIndex, name: &[u8], object: ObjectSlot) {
        let name = (tenant, Box::from(name));
        let number = match self.names.get(&name) {
            Some(&number) => number,
            None => {
                while self.groups.contains_key(&GroupIndex(self.next)) {
                    self.next = self.next.wrapping_add(1);
                }
                let number = GroupIndex(self.next);
                self.next = self.next.wrapping_add(1);
                self.names.insert(name.clone(), number);
                let group = Group { name, members: Vec::new(), blocker: None, is_condemned: false };
                self.groups.insert(number, group);
                number
            }
        };
        let group = self.groups.get_mut(&number).expect("a name has its group");
        self.memberships.insert(object, (number, group.members.len()));
        group.members.push(object);
    }

    /// Removes an object from its group, if it has one; an empty group is removed.
    pub(in crate::state) fn leave(&mut self, object: ObjectSlot) {
        let Some((number, place)) = self.memberships.remove(&object) else { return };
        let group = self.groups.get_mut(&number).expect("a member has its group");
        group.members.swap_remove(place);
        if let Some(moved) = group.members.get(place) {
            self.memberships.insert(*moved, (number, place));
        }
        if group.blocker == Some(object) {
            group.blocker = None;
        }
        if group.members.is_empty() {
            let group = self.groups.remove(&number).expect("it was there a line ago");
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
        let group = self.groups.get_mut(&number).expect("a member has its group");
        if !std::mem::replace(&mut group.is_condemned, true) {
            self.names.remove(&group.name);
            self.condemned.push(number);
        }
    }

    /// Returns a member of a condemned group; `None` if no condemned group has members left.
    pub(in crate::state) fn next_condemned(&self) -> Option<ObjectSlot> {
        self.groups[self.condemned.last()?].members.last().copied()
    }

    /// Returns whether the object belongs to a condemned group.
    pub(in crate::state) fn is_condemned(&self, object: ObjectSlot) -> bool {
        !self.condemned.is_empty()
            && self
                .memberships
                .get(&object)
                .is_some_and(|(number, _)| self.groups[number].is_condemned)
    }

    /// Returns the member that kept the object's group from eviction when it was last examined.
    pub(in crate::state) fn blocker(&self, object: ObjectSlot) -> Option<ObjectSlot> {
        let (number, _) = self.memberships.get(&object)?;
        self.groups[number].blocker
    }

    /// Records the member that keeps the object's group from eviction.
    pub(in crate::state) fn set_blocker(&mut self, object: ObjectSlot, blocker: ObjectSlot) {
        if let Some((number, _)) = self.memberships.get(&object) {
            self.groups.get_mut(number).expect("a member has its group").blocker = Some(blocker);
        }
    }

    /// Returns the id of the object's group.
    pub(in crate::state) fn index(&self, object: ObjectSlot) -> Option<GroupIndex> {
        self.memberships.get(&object).map(|&(number, _)| number)
    }

    /// Returns the name of the object's group.
    pub(in crate::state) fn name(&self, object: ObjectSlot) -> Option<&[u8]> {
        let (number, _) = self.memberships.get(&object)?;
        Some(&self.groups[number].name.1)
    }

    /// Returns all members of the object's group, itself included; empty if it has no group.
    pub(in crate::state) fn members(&self, object: ObjectSlot) -> &[ObjectSlot] {
        match self.memberships.get(&object) {
            Some((number, _)) => &self.groups[number].members,
            None => &[],
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
        assert_eq!((groups.names.len(), groups.groups.len()), (1, 1));
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
        assert_eq!((groups.members(slot(7)), groups.groups.len()), (&[slot(7)][..], 1));
        groups.join(tenant, b"a", slot(8));
        assert_eq!(groups.members(slot(8)).len(), 2, "the name belongs to the new group");
    }
}
