//! Groups: objects that are evicted together or not at all.

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use super::ids::{ObjectSlot, TenantIndex};

/// Members of each group. Objects without a group cost nothing here.
#[derive(Debug)]
pub(super) struct Groups {
    names: HashMap<(TenantIndex, Box<[u8]>), GroupIndex, rustc_hash::FxSeededState>,
    groups: FxHashMap<GroupIndex, Group>,
    /// Group of each object, and its position among the members.
    memberships: FxHashMap<ObjectSlot, (GroupIndex, usize)>,
    next: u32,
}

/// Id of a group; reused after its last member left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GroupIndex(u32);

#[derive(Debug)]
struct Group {
    name: (TenantIndex, Box<[u8]>),
    members: Vec<ObjectSlot>,
}

impl Groups {
    pub(super) fn new(seed: u64) -> Self {
        let names = HashMap::with_hasher(rustc_hash::FxSeededState::with_seed(seed as usize));
        Self { names, groups: FxHashMap::default(), memberships: FxHashMap::default(), next: 0 }
    }

    /// Adds an object that has no group to the tenant's group of that name.
    pub(super) fn join(&mut self, tenant: TenantIndex, name: &[u8], object: ObjectSlot) {
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
                self.groups.insert(number, Group { name, members: Vec::new() });
                number
            }
        };
        let group = self.groups.get_mut(&number).expect("a name has its group");
        self.memberships.insert(object, (number, group.members.len()));
        group.members.push(object);
    }

    /// Removes an object from its group, if it has one; an empty group is removed.
    pub(super) fn leave(&mut self, object: ObjectSlot) {
        let Some((number, place)) = self.memberships.remove(&object) else { return };
        let group = self.groups.get_mut(&number).expect("a member has its group");
        group.members.swap_remove(place);
        if let Some(moved) = group.members.get(place) {
            self.memberships.insert(*moved, (number, place));
        }
        if group.members.is_empty() {
            let group = self.groups.remove(&number).expect("it was there a line ago");
            self.names.remove(&group.name);
        }
    }

    /// Returns the name of the object's group.
    pub(super) fn name(&self, object: ObjectSlot) -> Option<&[u8]> {
        let (number, _) = self.memberships.get(&object)?;
        Some(&self.groups[number].name.1)
    }

    /// Returns all members of the object's group, itself included; empty if it has no group.
    pub(super) fn members(&self, object: ObjectSlot) -> &[ObjectSlot] {
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
}
