//! Annotations: expiry and tags, which few objects have. The others cost nothing here.

use std::collections::BTreeSet;

use mooncake_base::Moment;

use crate::state::{catalog::split_map::SplitMap, ids::ObjectSlot, tags::Tags};

/// What an object may have beside its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::state) struct Annotation {
    /// The object is removed at this time.
    pub(in crate::state) expires: Option<Moment>,
    pub(in crate::state) tags: Tags,
}

/// The annotations of all objects.
#[derive(Debug, Default)]
pub(in crate::state) struct Annotations {
    by_object: SplitMap<ObjectSlot, Annotation>,
    pub(in crate::state) by_expiry: BTreeSet<(Moment, ObjectSlot)>,
}

impl Annotations {
    /// Returns the annotation of an object.
    pub(in crate::state) fn of(&self, slot: ObjectSlot) -> Option<&Annotation> {
        self.by_object.get(&slot)
    }

    /// Returns when the object expires.
    pub(in crate::state) fn expires(&self, slot: ObjectSlot) -> Option<Moment> {
        self.of(slot)?.expires
    }

    /// Returns when the next object expires.
    pub(in crate::state) fn next_expiry(&self) -> Option<Moment> {
        self.by_expiry.first().map(|&(at, _)| at)
    }

    /// Sets the annotation of an object.
    pub(in crate::state) fn insert(&mut self, slot: ObjectSlot, annotation: Annotation) {
        self.remove(slot);
        if let Some(expires) = annotation.expires {
            self.by_expiry.insert((expires, slot));
        }
        if annotation != Annotation::default() {
            self.by_object.insert(slot, annotation);
        }
    }

    /// Forgets the annotation of an object.
    pub(in crate::state) fn remove(&mut self, slot: ObjectSlot) {
        if !self.by_object.is_empty()
            && let Some(Annotation { expires: Some(expires), .. }) = self.by_object.remove(&slot)
        {
            self.by_expiry.remove(&(expires, slot));
        }
    }

    pub(in crate::state) fn has_expired(&self, now: Moment, slot: ObjectSlot) -> bool {
        !self.by_expiry.is_empty() && self.expires(slot).is_some_and(|at| at.has_passed(now))
    }
}
