//! Objects by tenant and key, kept small: there may be tens of millions of them.

use std::{collections::HashMap, hash::Hasher};

use hashbrown::HashTable;
use mooncake_base::{Error, KeyRef, ObjectKey, Result, TenantId, Version};
use rustc_hash::FxSeededState;

use crate::state::{
    catalog::key_arena::{KeyArena, KeyHandle},
    ids::{KeyHash, ObjectSlot, Slot, TenantIndex, WriteSlot},
    lease::LeaseAndFence,
    replica::Replicas,
};

/// No unfinished put.
pub(in crate::state) const NO_WRITE: WriteSlot = WriteSlot::NONE;

/// Maximum number of tenants.
const TENANTS_MAX: usize = 1 << 16;

/// Hash tables of keys. A table of some thousand keys doubles within a millisecond.
const TABLES: usize = 1024;

/// Maximum number of objects; slot numbers above it are reserved.
const OBJECTS_MAX: usize = u32::MAX as usize - 2;

/// No object.
pub(in crate::state) const NO_OBJECT: ObjectSlot = ObjectSlot::NONE;

/// Maximum replicas of one object. Ordinals of replicas that a put makes are below it, ordinals of
/// replicas that a task adds are above it.
pub(in crate::state) const REPLICAS_MAX: u32 = 128;

/// State of a key: absent, being written, or complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectState {
    /// No object has the key.
    Absent,
    /// A put is unfinished, and nothing is readable yet.
    Writing,
    /// The object is readable.
    Complete,
}

/// The entry of one key: a readable value, unfinished puts, or both.
#[derive(Debug, Clone)]
pub(in crate::state) struct Object {
    key: KeyHandle,
    pub(in crate::state) tenant: TenantIndex,
    pub(in crate::state) data_type: u8,
    pub(in crate::state) flags: Flags,
    /// The newest unfinished put, which links to the others.
    pub(in crate::state) newest_write: WriteSlot,
    pub(in crate::state) version: u64,
    pub(in crate::state) length: u64,
    pub(in crate::state) protection: LeaseAndFence,
    /// Empty unless complete.
    pub(in crate::state) replicas: Replicas,
}

/// Properties of an object, a bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::state) struct Flags(u8);

impl Flags {
    /// The object is readable.
    pub(in crate::state) const COMPLETE: Self = Self(1);
    /// Never evicted.
    pub(in crate::state) const HARD_PINNED: Self = Self(2);
    /// Evicted after all other objects.
    pub(in crate::state) const SOFT_PINNED: Self = Self(4);
    /// Evicted with its group or not at all.
    pub(in crate::state) const GROUPED: Self = Self(8);
    /// The writer gave a checksum.
    pub(in crate::state) const CHECKSUM: Self = Self(16);
    /// Outside the eviction order until a lease ends.
    pub(in crate::state) const PARKED: Self = Self(32);
    /// A client is copying it: not evicted, and removed only by force.
    pub(in crate::state) const BEING_COPIED: Self = Self(64);
    /// Used while it was parked.
    pub(in crate::state) const USED: Self = Self(128);

    pub(in crate::state) fn has(self, flag: Self) -> bool {
        self.0 & flag.0 != 0
    }

    pub(in crate::state) fn set(&mut self, flag: Self, is_set: bool) {
        self.0 = if is_set { self.0 | flag.0 } else { self.0 & !flag.0 };
    }
}

impl Object {
    pub(in crate::state) fn is_complete(&self) -> bool {
        self.flags.has(Flags::COMPLETE)
    }

    pub(in crate::state) fn version(&self) -> Version {
        Version(self.version)
    }

    /// Returns the bytes of all replicas.
    pub(in crate::state) fn bytes(&self) -> u64 {
        self.length * self.replicas.len() as u64
    }
}

/// All objects, each in a slot that it keeps.
#[derive(Debug, Clone)]
pub(in crate::state) struct Objects {
    slots: Vec<Option<Object>>,
    keys: KeyArena,
    /// Checksums of objects with [`Flags::CHECKSUM`]. Only as long as the last slot that has a
    /// checksum, so that it costs nothing where no writer gives one.
    checksums: Vec<u64>,
    vacant: Vec<ObjectSlot>,
    /// Slots by key, in many tables, so that the growth of one is quick.
    by_key: Box<[HashTable<KeyEntry>]>,
    tenants: HashMap<TenantId, TenantIndex, FxSeededState>,
    tenant_names: Vec<TenantId>,
    seed: u64,
    /// Number of objects, unfinished ones included, by tenant.
    by_tenant: Vec<u64>,
    /// Number of readable objects.
    pub(in crate::state) complete: u64,
}

/// An entry of a table of keys.
#[derive(Debug, Clone, Copy)]
struct KeyEntry {
    slot: ObjectSlot,
    /// Hash of the key, so that a table can grow and skip other keys without reading keys.
    hash: KeyHash,
}

impl Objects {
    /// Creates an empty table. The seed keeps clients from choosing keys that collide.
    pub(in crate::state) fn new(seed: u64) -> Self {
        let mut tenants = HashMap::with_hasher(FxSeededState::with_seed(seed as usize));
        tenants.insert(TenantId::default(), TenantIndex::DEFAULT);
        Self {
            slots: Vec::new(),
            keys: KeyArena::default(),
            checksums: Vec::new(),
            vacant: Vec::new(),
            by_key: empty_tables(),
            tenants,
            tenant_names: vec![TenantId::default()],
            seed,
            by_tenant: Vec::new(),
            complete: 0,
        }
    }

    /// Returns the index of a tenant, adding the tenant if it is new.
    pub(in crate::state) fn intern_tenant(&mut self, tenant: &TenantId) -> Result<TenantIndex> {
        if let Some(number) = self.tenant_index(tenant) {
            return Ok(number);
        }
        if self.tenants.len() >= TENANTS_MAX {
            return Err(Error::invalid("there are too many tenants").with("limit", TENANTS_MAX));
        }
        let number = TenantIndex::new(self.tenants.len() as u16);
        self.tenants.insert(tenant.clone(), number);
        self.tenant_names.push(tenant.clone());
        Ok(number)
    }

    /// Returns the index of a tenant that has put something before.
    pub(in crate::state) fn tenant_index(&self, tenant: &TenantId) -> Option<TenantIndex> {
        self.tenants.get(tenant).copied()
    }

    /// Returns the tenant with that index.
    pub(in crate::state) fn tenant_name(&self, number: TenantIndex) -> &TenantId {
        &self.tenant_names[number.index()]
    }

    pub(in crate::state) fn find(&self, tenant: TenantIndex, key: &[u8]) -> Option<ObjectSlot> {
        self.find_hashed(self.hash(tenant, key), tenant, key)
    }

    /// Finds a key whose hash is known.
    pub(in crate::state) fn find_hashed(
        &self,
        hash: KeyHash,
        tenant: TenantIndex,
        key: &[u8],
    ) -> Option<ObjectSlot> {
        let found = self.by_key[table_of(hash)].find(spread(hash), |entry| {
            let is_meant = || {
                let object = self.at(entry.slot);
                object.tenant == tenant && self.key(object) == key
            };
            entry.hash == hash && is_meant()
        });
        found.map(|entry| entry.slot)
    }

    /// Hashes keys that are looked up next and prefetches their entries side by side: in a large
    /// table each lookup alone waits for memory several times. The hashes mean nothing without a
    /// tenant.
    pub(in crate::state) fn prefetch_hashes<'k>(
        &self,
        tenant: Option<TenantIndex>,
        keys: impl Iterator<Item = &'k [u8]>,
    ) -> Vec<KeyHash> {
        let Some(tenant) = tenant else { return keys.map(|_| KeyHash::new(0)).collect() };
        let hashes: Vec<KeyHash> = keys.map(|key| self.hash(tenant, key)).collect();
        let found = hashes.iter().map(|&hash| {
            let entry =
                self.by_key[table_of(hash)].find(spread(hash), |entry| entry.hash == hash)?;
            self.key(self.at(entry.slot)).first()
        });
        // Keeps the compiler from removing the reads.
        std::hint::black_box(found.flatten().count());
        hashes
    }

    /// Hashes all keys with another seed.
    pub(in crate::state) fn rehash(&mut self, seed: u64) {
        self.seed = seed;
        let numbered = (0..).zip(&self.tenant_names);
        let tenants = numbered.map(|(number, name)| (name.clone(), TenantIndex::new(number)));
        let mut renumbered = HashMap::with_hasher(FxSeededState::with_seed(seed as usize));
        renumbered.extend(tenants);
        self.tenants = renumbered;
        // Freed before the new ones grow.
        self.by_key = empty_tables();
        // A table that gets more keys than most grows as it would by puts. Space for it in every table
        // could double the size of all of them.
        let each = self.len() as usize / TABLES;
        for table in &mut self.by_key {
            table.reserve(each, |entry| spread(entry.hash));
        }
        for slot in ObjectSlot::range(0, self.slot_count()) {
            if self.get(slot).is_some() {
                let hash = self.key_hash(slot);
                let table = &mut self.by_key[table_of(hash)];
                let entry = KeyEntry { slot, hash };
                table.insert_unique(spread(hash), entry, |entry| spread(entry.hash));
            }
        }
    }

    /// Adds an object without a value, under a key that has none.
    pub(in crate::state) fn insert(
        &mut self,
        tenant: TenantIndex,
        key: KeyRef<'_>,
    ) -> Result<ObjectSlot> {
        self.insert_hashed(self.hash(tenant, key.as_bytes()), tenant, key)
    }

    /// Adds an object under a key whose hash is known.
    pub(in crate::state) fn insert_hashed(
        &mut self,
        hash: KeyHash,
        tenant: TenantIndex,
        key: KeyRef<'_>,
    ) -> Result<ObjectSlot> {
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None if self.slots.len() >= OBJECTS_MAX => {
                return Err(Error::invalid("there are too many objects").with("limit", OBJECTS_MAX));
            }
            None => {
                self.slots.push(None);
                ObjectSlot::from_index(self.slots.len() - 1)
            }
        };
        if tenant.index() >= self.by_tenant.len() {
            self.by_tenant.resize(tenant.index() + 1, 0);
        }
        self.by_tenant[tenant.index()] += 1;
        self.slots[slot.index()] = Some(Object {
            key: self.keys.insert(key.as_bytes()),
            tenant,
            data_type: 0,
            flags: Flags::default(),
            newest_write: NO_WRITE,
            version: 0,
            length: 0,
            protection: LeaseAndFence::default(),
            replicas: Replicas::None,
        });
        let entry = KeyEntry { slot, hash };
        self.by_key[table_of(hash)].insert_unique(spread(hash), entry, |entry| spread(entry.hash));
        Ok(slot)
    }

    pub(in crate::state) fn remove(&mut self, slot: ObjectSlot) {
        let hash = self.key_hash(slot);
        self.by_key[table_of(hash)]
            .find_entry(spread(hash), |entry| entry.slot == slot)
            .expect("every object is in the table")
            .remove();
        if let Some(object) = self.slots[slot.index()].take() {
            debug_assert!(object.replicas.is_empty(), "an object that is removed has no memory");
            debug_assert_eq!(
                object.newest_write, NO_WRITE,
                "no put names an object that is removed"
            );
            self.by_tenant[object.tenant.index()] -= 1;
            self.keys.remove(object.key);
            self.vacant.push(slot);
        }
    }

    /// Returns the number of objects of a tenant, unfinished ones included.
    pub(in crate::state) fn count_of(&self, tenant: TenantIndex) -> u64 {
        self.by_tenant.get(tenant.index()).copied().unwrap_or_default()
    }

    /// Sets or clears the checksum of an object.
    pub(in crate::state) fn set_checksum(&mut self, slot: ObjectSlot, checksum: Option<u64>) {
        self.at_mut(slot).flags.set(Flags::CHECKSUM, checksum.is_some());
        if let Some(checksum) = checksum {
            let index = slot.index();
            if index >= self.checksums.len() {
                self.checksums.resize(index + 1, 0);
            }
            self.checksums[index] = checksum;
        }
    }

    /// Returns the checksum that the writer gave.
    pub(in crate::state) fn checksum(&self, slot: ObjectSlot) -> Option<u64> {
        let is_known = self.at(slot).flags.has(Flags::CHECKSUM);
        is_known.then(|| self.checksums[slot.index()])
    }

    pub(in crate::state) fn at_mut(&mut self, slot: ObjectSlot) -> &mut Object {
        self.slots[slot.index()].as_mut().expect("the caller has just found it")
    }

    pub(in crate::state) fn at(&self, slot: ObjectSlot) -> &Object {
        self.slots[slot.index()].as_ref().expect("the caller has just found it")
    }

    /// Returns the object in a slot.
    pub(in crate::state) fn get(&self, slot: ObjectSlot) -> Option<&Object> {
        self.slots.get(slot.index())?.as_ref()
    }

    pub(in crate::state) fn get_mut(&mut self, slot: ObjectSlot) -> Option<&mut Object> {
        self.slots.get_mut(slot.index())?.as_mut()
    }

    /// Returns the bound of all slot numbers.
    pub(in crate::state) fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Returns the number of objects, unfinished ones included.
    pub(in crate::state) fn len(&self) -> u64 {
        (self.slots.len() - self.vacant.len()) as u64
    }

    /// Returns the seed of the hashes.
    pub(in crate::state) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the key of an object.
    pub(in crate::state) fn key(&self, object: &Object) -> &[u8] {
        self.keys.get(object.key)
    }

    /// Returns an owned copy of the key of an object.
    pub(in crate::state) fn object_key(&self, object: &Object) -> ObjectKey {
        ObjectKey::new(self.key(object)).expect("it came as a key")
    }

    /// Returns the hash of the key of an object.
    pub(in crate::state) fn key_hash(&self, slot: ObjectSlot) -> KeyHash {
        let object = self.at(slot);
        self.hash(object.tenant, self.key(object))
    }

    /// Hashes a key with the seed, so that no caller can predict the hash.
    pub(in crate::state) fn hash(&self, tenant: TenantIndex, key: &[u8]) -> KeyHash {
        KeyHash::new((hash_of(self.seed, tenant, key) >> u32::BITS) as u32)
    }
}

fn empty_tables() -> Box<[HashTable<KeyEntry>]> {
    (0..TABLES).map(|_| HashTable::new()).collect()
}

/// Returns the table of a key.
fn table_of(hash: KeyHash) -> usize {
    (hash.number() >> (u32::BITS - TABLES.ilog2())) as usize
}

/// Spreads the bits that differ among the keys of one table.
fn spread(hash: KeyHash) -> u64 {
    u64::from(hash.number()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// SipHash with a secret seed, since keys come from untrusted clients.
fn hash_of(seed: u64, tenant: TenantIndex, key: &[u8]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    // One word, so that the words of the key stay aligned.
    hasher.write_u64(seed ^ u64::from(tenant.number()));
    hasher.write(key);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: TenantIndex = TenantIndex::DEFAULT;

    #[test]
    fn object_takes_64_bytes_beside_its_key() {
        assert_eq!(size_of::<Option<Object>>(), 64);
        assert_eq!(size_of::<Replicas>(), 16);
    }

    #[test]
    fn reused_slot_does_not_keep_its_checksum() {
        let mut objects = Objects::new(1);
        let slots = [*b"a", *b"b", *b"c"]
            .map(|key| objects.insert(DEFAULT, KeyRef::new(&key).unwrap()).unwrap());
        assert_eq!(objects.checksum(slots[1]), None);
        objects.set_checksum(slots[1], Some(0));
        objects.set_checksum(slots[0], Some(7));
        assert_eq!(slots.map(|slot| objects.checksum(slot)), [Some(7), Some(0), None]);
        objects.set_checksum(slots[0], None);
        assert_eq!(objects.checksum(slots[0]), None);
        // The next object reuses the slot, but not its checksum.
        objects.remove(slots[1]);
        let next = objects.insert(DEFAULT, KeyRef::new(b"d").unwrap()).unwrap();
        assert_eq!((next, objects.checksum(next)), (slots[1], None));
    }

    #[test]
    fn tenants_have_separate_keys() {
        let mut objects = Objects::new(1);
        let other = objects.intern_tenant(&TenantId::new("other")).unwrap();
        assert_eq!(objects.intern_tenant(&TenantId::new("")).unwrap(), DEFAULT);
        assert_eq!(objects.tenant_index(&TenantId::new("unknown")), None);
        let key = KeyRef::new(b"k").unwrap();
        let own = objects.insert(DEFAULT, key).unwrap();
        assert_eq!((objects.find(DEFAULT, b"k"), objects.find(other, b"k")), (Some(own), None));
        let foreign = objects.insert(other, key).unwrap();
        objects.remove(own);
        assert_eq!((objects.find(DEFAULT, b"k"), objects.find(other, b"k")), (None, Some(foreign)));
        assert_eq!(objects.insert(DEFAULT, KeyRef::new(b"l").unwrap()).unwrap(), own);
    }
}
