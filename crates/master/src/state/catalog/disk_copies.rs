//! Which objects have a copy on a disk, and on which: at most one each.

use crate::state::ids::{DiskSlot, ObjectSlot, Slot};

/// The disk of each object that has a copy on one. Only as long as the last slot that has one, so that
/// it costs nothing where there are no disks.
#[derive(Debug, Default)]
pub(in crate::state) struct DiskCopies {
    by_object: Vec<DiskSlot>,
}

impl DiskCopies {
    /// Returns the disk that has a copy of the object.
    pub(in crate::state) fn get(&self, object: ObjectSlot) -> Option<DiskSlot> {
        self.by_object.get(object.index()).copied().filter(|&disk| disk != DiskSlot::NONE)
    }

    /// Records that the disk has the only copy on disk of the object.
    pub(in crate::state) fn insert(&mut self, object: ObjectSlot, disk: DiskSlot) {
        debug_assert_eq!(self.get(object), None, "an object has one copy on disk");
        if object.index() >= self.by_object.len() {
            self.by_object.resize(object.index() + 1, DiskSlot::NONE);
        }
        self.by_object[object.index()] = disk;
    }

    /// Forgets the copy of the object; returns its disk.
    pub(in crate::state) fn remove(&mut self, object: ObjectSlot) -> Option<DiskSlot> {
        let entry = self.by_object.get_mut(object.index())?;
        Some(std::mem::replace(entry, DiskSlot::NONE)).filter(|&disk| disk != DiskSlot::NONE)
    }
}
