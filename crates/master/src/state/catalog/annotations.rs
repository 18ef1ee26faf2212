//! Annotations: expiry and tags, which few objects have. The others cost nothing here.

use std::{collections::BTreeSet, time::Duration};

use mooncake_base::{Error, Moment, Result, TenantId, Version};

use crate::state::{
    Effect, Log, ObjectName, Rules, State,
    catalog::{object::Objects, split_map::SplitMap},
    ids::ObjectSlot,
    inventory::Inventory,
    put::PutCalls,
    read::{LocatedObject, not_found, not_ready},
};

/// Maximum number of tags of an object.
const TAGS_MAX: usize = 32;
/// Maximum length of all names and values of the tags of an object.
const TAG_BYTES_MAX: usize = 1024;

/// Text that the writer stores beside an object: names and values, sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tags(Box<[(Box<str>, Box<str>)]>);

impl Tags {
    /// Checks the tags of a put.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: too many tags, too long ones, an empty name, or a name twice.
    pub fn new<'a>(tags: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut sorted: Vec<(Box<str>, Box<str>)> =
            tags.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        sorted.sort_unstable();
        let bytes: usize = sorted.iter().map(|(name, value)| name.len() + value.len()).sum();
        if sorted.len() > TAGS_MAX || bytes > TAG_BYTES_MAX {
            return Err(Error::invalid("an object takes few and short tags")
                .with("tags", sorted.len())
                .with("limit", TAGS_MAX)
                .with("tag_bytes", bytes)
                .with("limit_bytes", TAG_BYTES_MAX));
        }
        if sorted.first().is_some_and(|(name, _)| name.is_empty()) {
            return Err(Error::invalid("a tag has a name"));
        }
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::invalid("a tag is given twice").with("tag", &pair[0].0));
        }
        Ok(Self(sorted.into()))
    }

    /// Returns names and values in the order of the names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Returns the value of a tag.
    pub fn value(&self, name: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(own, _)| (**own).cmp(name)).ok()?;
        Some(&self.0[at].1)
    }

    /// Returns whether there are no tags.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

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
    by_expiry: BTreeSet<(Moment, ObjectSlot)>,
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

    fn has_expired(&self, now: Moment, slot: ObjectSlot) -> bool {
        !self.by_expiry.is_empty() && self.expires(slot).is_some_and(|at| at.has_passed(now))
    }
}

impl Inventory {
    /// Drops the value of an object whose time is over, leased or not. Readers in flight keep their
    /// fence.
    pub(in crate::state) fn drop_if_expired(&mut self, now: Moment, slot: ObjectSlot) {
        if self.catalog.annotations.has_expired(now, slot) {
            self.log.counters.objects_expired += 1;
            self.drop_value(now, slot);
        }
    }
}

impl PutCalls<'_> {
    /// Lets an object expire after `ttl`, or never. Returns its version.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: the first put is unfinished; `INVALID_PARAMS`: no
    /// time at all.
    pub fn set_expiry(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        ttl: Option<Duration>,
    ) -> Result<Version> {
        check_ttl(ttl)?;
        let tenant = self.inventory.catalog.objects.tenant_index(tenant);
        let found = tenant.and_then(|tenant| self.inventory.find(now, tenant, key));
        let found = found.filter(|&slot| !self.inventory.is_unclaimed(slot));
        let slot = found.ok_or_else(|| not_found(key))?;
        if !self.inventory.catalog.objects.at(slot).is_complete() {
            return Err(not_ready(key));
        }
        self.inventory.take_back(slot);
        let tags = self.inventory.catalog.annotations.of(slot).map(|found| found.tags.clone());
        let expires = ttl.map(|ttl| now + ttl);
        let annotation = Annotation { expires, tags: tags.unwrap_or_default() };
        let version = self.inventory.catalog.objects.at(slot).version();
        let Inventory { log, catalog, rules, .. } = &mut *self.inventory;
        log.annotate(&catalog.objects, rules, (slot, version.0), &annotation);
        catalog.annotations.insert(slot, annotation);
        Ok(version)
    }
}

impl LocatedObject {
    /// Returns the value of a tag, in the state that has just located the object.
    pub fn tag<'a>(&self, state: &'a State, name: &str) -> Option<&'a str> {
        state.inventory.catalog.annotations.of(self.slot)?.tags.value(name)
    }
}

impl State {
    /// Removes the object that expired first. Returns whether there was one.
    pub(in crate::state) fn remove_expired(&mut self, now: Moment) -> bool {
        let Self { inventory, .. } = self;
        let Some(&(expires, slot)) = inventory.catalog.annotations.by_expiry.first() else {
            return false;
        };
        if !expires.has_passed(now) {
            return false;
        }
        inventory.drop_if_expired(now, slot);
        inventory.catalog.remove_if_empty(slot);
        true
    }
}

impl Log {
    /// Records the annotation of a version of an object, published or about to be.
    pub(in crate::state) fn annotate(
        &mut self,
        objects: &Objects,
        rules: &Rules,
        (slot, version): (ObjectSlot, u64),
        annotation: &Annotation,
    ) {
        self.effects.record(|| Effect::Annotated {
            object: ObjectName { version, ..objects.logged_name(objects.at(slot)) },
            expires: annotation.expires.map(|at| rules.unix_time(at)),
            tags: annotation.tags.clone(),
        });
    }
}

/// Checks the time to live of an object.
///
/// # Errors
/// `INVALID_PARAMS`: the time is zero.
pub(in crate::state) fn check_ttl(ttl: Option<Duration>) -> Result<()> {
    match ttl {
        Some(Duration::ZERO) => Err(Error::invalid("the time to live is longer than zero")),
        _ => Ok(()),
    }
}
