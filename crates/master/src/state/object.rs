//! Objects by tenant and key, kept small: there may be tens of millions of them.

use crate::state::ids::{KeyHash, ObjectSlot, SegmentSlot, Slot, TenantIndex, WriteSlot};
use std::{collections::HashMap, hash::Hasher, ops::Deref};

use hashbrown::HashTable;
use mooncake_base::{Error, KeyRef, ObjectKey, ReplicaId, Result, TenantId, Version};

use super::{
    allocator::BlockId,
    key_arena::{KeyArena, KeyHandle},
    lease::LeaseAndFence,
};

/// No put under way.
pub(super) const NO_WRITE: WriteSlot = WriteSlot::NONE;
/// The most tenants there may be.
const TENANTS_MAX: usize = 1 << 16;
/// Tables of keys. One of some thousand keys doubles within a millisecond.
const TABLES: usize = 1024;
/// The most objects there may be, and so the numbers that are never one.
const OBJECTS_MAX: usize = u32::MAX as usize - 2;
/// The number of no object.
pub(super) const NO_OBJECT: ObjectSlot = ObjectSlot::NONE;
/// A replica's id is its version shifted by so much, and its number among the copies.
const ORDINAL_BITS: u32 = 16;
/// The most copies of one object. Copies that a put makes are numbered below this, copies that a
/// task adds above it.
pub(super) const REPLICAS_MAX: u32 = 128;

/// Absent, being written, or complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectState {
    /// No object has the key.
    Absent,
    /// There is a writer, and nothing to read yet.
    Writing,
    /// There is something to read.
    Complete,
}

/// What stands under one key: something to read, puts under way, or both.
#[derive(Debug)]
pub(super) struct Object {
    key: KeyHandle,
    pub(super) tenant: TenantIndex,
    pub(super) data_type: u8,
    pub(super) flags: Flags,
    /// The newest put under way, which links to the others.
    pub(super) newest_write: WriteSlot,
    pub(super) version: u64,
    pub(super) length: u64,
    pub(super) protection: LeaseAndFence,
    /// Empty unless complete.
    pub(super) replicas: Replicas,
}

/// Yes-or-no facts of an object, a bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Flags(u8);

impl Flags {
    /// There is something to read.
    pub(super) const COMPLETE: Self = Self(1);
    /// Never evicted.
    pub(super) const HARD_PINNED: Self = Self(2);
    /// Evicted after all others.
    pub(super) const SOFT_PINNED: Self = Self(4);
    /// Evicted with others or not at all.
    pub(super) const GROUPED: Self = Self(8);
    /// The writer gave a checksum.
    pub(super) const CHECKSUM: Self = Self(16);
    /// Waits outside the order of eviction for the end of a lease.
    pub(super) const PARKED: Self = Self(32);
    /// A client is copying it: neither evicted nor plainly removed.
    pub(super) const BEING_COPIED: Self = Self(64);
    /// Was used while it waited there.
    pub(super) const USED: Self = Self(128);

    pub(super) fn has(self, flag: Self) -> bool {
        self.0 & flag.0 != 0
    }

    pub(super) fn set(&mut self, flag: Self, is_set: bool) {
        self.0 = if is_set { self.0 | flag.0 } else { self.0 & !flag.0 };
    }
}

/// One copy: where its memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Replica {
    pub(super) segment: SegmentSlot,
    pub(super) block: BlockId,
    pub(super) ordinal: u16,
}

impl Replica {
    pub(super) fn id(self, version: u64) -> ReplicaId {
        ReplicaId(version << ORDINAL_BITS | u64::from(self.ordinal))
    }
}

/// The number that the replica has among the copies of that version, if it is one of them.
pub(super) fn ordinal_of(replica: ReplicaId, version: u64) -> Option<u16> {
    (replica.0 >> ORDINAL_BITS == version).then_some(replica.0 as u16)
}

/// The copies of an object. One is the usual number and needs no memory of its own.
#[derive(Debug, Default)]
pub(super) enum Replicas {
    #[default]
    None,
    One(Replica),
    #[expect(clippy::box_collection, reason = "one pointer wide, which keeps every object small")]
    Many(Box<Vec<Replica>>),
}

impl Replicas {
    /// Adds one at the end.
    pub(super) fn push(&mut self, replica: Replica) {
        match self {
            Self::None => *self = Self::One(replica),
            Self::One(first) => *self = Self::Many(Box::new(vec![*first, replica])),
            Self::Many(replicas) => replicas.push(replica),
        }
    }

    /// Keeps those of which that holds.
    pub(super) fn retain(&mut self, mut is_kept: impl FnMut(&Replica) -> bool) {
        match self {
            Self::None => {}
            Self::One(replica) => {
                if !is_kept(replica) {
                    *self = Self::None;
                }
            }
            Self::Many(replicas) => {
                replicas.retain(is_kept);
                *self = std::mem::take(&mut **replicas).into();
            }
        }
    }
}

impl Deref for Replicas {
    type Target = [Replica];

    fn deref(&self) -> &[Replica] {
        match self {
            Self::None => &[],
            Self::One(replica) => std::slice::from_ref(replica),
            Self::Many(replicas) => replicas,
        }
    }
}

impl From<Vec<Replica>> for Replicas {
    fn from(mut replicas: Vec<Replica>) -> Self {
        match replicas[..] {
            [] => Self::None,
            [replica] => Self::One(replica),
            _ => {
                replicas.shrink_to_fit();
                Self::Many(Box::new(replicas))
            }
        }
    }
}

impl Object {
    pub(super) fn is_complete(&self) -> bool {
        self.flags.has(Flags::COMPLETE)
    }

    pub(super) fn version(&self) -> Version {
        Version(self.version)
    }

    /// Bytes of all its copies.
    pub(super) fn bytes(&self) -> u64 {
        self.length * self.replicas.len() as u64
    }
}

/// All objects, each under a number that stays while it exists.
#[derive(Debug)]
pub(super) struct Objects {
    slots: Vec<Option<Object>>,
    keys: KeyArena,
    /// Of objects with [`Flags::CHECKSUM`]; shorter than `slots` while later ones have none, so
    /// that it costs nothing where no writer gives one.
    checksums: Vec<u64>,
    vacant: Vec<ObjectSlot>,
    /// By key, in so many tables that the growth of one is over at once.
    by_key: Box<[HashTable<Entry>]>,
    tenants: HashMap<TenantId, TenantIndex, rustc_hash::FxSeededState>,
    tenant_names: Vec<TenantId>,
    seed: u64,
    /// How many have something to read.
    pub(super) complete: u64,
}

/// An object in a table of keys.
#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: ObjectSlot,
    /// Of its key, so that a table grows, and passes other keys over, without a look at them.
    hash: KeyHash,
}

impl Objects {
    /// None. The seed keeps strangers from choosing keys that collide.
    pub(super) fn new(seed: u64) -> Self {
        let mut tenants = HashMap::with_hasher(rustc_hash::FxSeededState::with_seed(seed as usize));
        tenants.insert(TenantId::default(), TenantIndex::DEFAULT);
        Self {
            slots: Vec::new(),
            keys: KeyArena::default(),
            checksums: Vec::new(),
            vacant: Vec::new(),
            by_key: (0..TABLES).map(|_| HashTable::new()).collect(),
            tenants,
            tenant_names: vec![TenantId::default()],
            seed,
            complete: 0,
        }
    }

    /// The number of a tenant, given to it if it is new.
    pub(super) fn intern_tenant(&mut self, tenant: &TenantId) -> Result<TenantIndex> {
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

    /// The number of a tenant that has put something before.
    pub(super) fn tenant_index(&self, tenant: &TenantId) -> Option<TenantIndex> {
        self.tenants.get(tenant).copied()
    }

    /// The tenant of that number.
    pub(super) fn tenant_name(&self, number: TenantIndex) -> &TenantId {
        &self.tenant_names[number.index()]
    }

    pub(super) fn find(&self, tenant: TenantIndex, key: &[u8]) -> Option<ObjectSlot> {
        self.find_hashed(self.hash(tenant, key), tenant, key)
    }

    /// As [`find`](Self::find), for who knows the hash.
    pub(super) fn find_hashed(
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

    /// The hashes of keys that are looked up next. What that will look at is fetched meanwhile, for
    /// all of them side by side: in a large table each lookup alone waits for memory several times.
    /// Of no meaning where there is no tenant.
    pub(super) fn prefetch_hashes<'k>(
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
        // Or nobody would look.
        std::hint::black_box(found.flatten().count());
        hashes
    }

    /// Makes room for so many more, so that nothing has to grow while they come.
    pub(super) fn reserve(&mut self, objects: usize) {
        self.slots.reserve(objects);
        // Not all tables get the same number.
        let each = objects / TABLES + objects / (4 * TABLES) + 8;
        for table in &mut self.by_key {
            table.reserve(each, |entry| spread(entry.hash));
        }
    }

    /// A new object with nothing in it, under a key that has none.
    pub(super) fn insert(&mut self, tenant: TenantIndex, key: KeyRef<'_>) -> Result<ObjectSlot> {
        self.insert_hashed(self.hash(tenant, key.as_bytes()), tenant, key)
    }

    /// As [`insert`](Self::insert), for who knows the hash.
    pub(super) fn insert_hashed(
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
        let entry = Entry { slot, hash };
        self.by_key[table_of(hash)].insert_unique(spread(hash), entry, |entry| spread(entry.hash));
        Ok(slot)
    }

    pub(super) fn remove(&mut self, slot: ObjectSlot) {
        let hash = self.key_hash(slot);
        self.by_key[table_of(hash)]
            .find_entry(spread(hash), |entry| entry.slot == slot)
            .expect("every object is in the table")
            .remove();
        if let Some(object) = self.slots[slot.index()].take() {
            self.keys.remove(object.key);
            self.vacant.push(slot);
        }
    }

    /// What the writer of the object's value gave.
    pub(super) fn set_checksum(&mut self, slot: ObjectSlot, checksum: Option<u64>) {
        self.at_mut(slot).flags.set(Flags::CHECKSUM, checksum.is_some());
        if let Some(checksum) = checksum {
            let index = slot.index();
            if index >= self.checksums.len() {
                self.checksums.resize(index + 1, 0);
            }
            self.checksums[index] = checksum;
        }
    }

    /// What the writer of the object's value gave, if anything.
    pub(super) fn checksum(&self, slot: ObjectSlot) -> Option<u64> {
        let is_known = self.at(slot).flags.has(Flags::CHECKSUM);
        is_known.then(|| self.checksums[slot.index()])
    }

    pub(super) fn at_mut(&mut self, slot: ObjectSlot) -> &mut Object {
        self.slots[slot.index()].as_mut().expect("the caller has just found it")
    }

    pub(super) fn at(&self, slot: ObjectSlot) -> &Object {
        self.slots[slot.index()].as_ref().expect("the caller has just found it")
    }

    /// The object of that number, if there is one.
    pub(super) fn get(&self, slot: ObjectSlot) -> Option<&Object> {
        self.slots.get(slot.index())?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: ObjectSlot) -> Option<&mut Object> {
        self.slots.get_mut(slot.index())?.as_mut()
    }

    /// Every number is below this.
    pub(super) fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The bytes of its key.
    pub(super) fn key(&self, object: &Object) -> &[u8] {
        self.keys.get(object.key)
    }

    /// Its key, for others to keep.
    pub(super) fn object_key(&self, object: &Object) -> ObjectKey {
        ObjectKey::new(self.key(object)).expect("it came as a key")
    }

    /// The hash of its key.
    pub(super) fn key_hash(&self, slot: ObjectSlot) -> KeyHash {
        let object = self.at(slot);
        self.hash(object.tenant, self.key(object))
    }

    /// A number that is the same for the same key, and that no caller can foretell.
    pub(super) fn hash(&self, tenant: TenantIndex, key: &[u8]) -> KeyHash {
        KeyHash::new((hash_of(self.seed, tenant, key) >> u32::BITS) as u32)
    }
}

/// Which table a key is in.
fn table_of(hash: KeyHash) -> usize {
    (hash.number() >> (u32::BITS - TABLES.ilog2())) as usize
}

/// The bits that tables go by, of those that all keys of one table do not share.
fn spread(hash: KeyHash) -> u64 {
    u64::from(hash.number()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// SipHash with a seed that no caller knows: keys come from strangers.
fn hash_of(seed: u64, tenant: TenantIndex, key: &[u8]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    // One word, so that the words of the key are taken as they lie.
    hasher.write_u64(seed ^ u64::from(tenant.number()));
    hasher.write(key);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: TenantIndex = TenantIndex::DEFAULT;

    #[test]
    fn an_object_takes_64_bytes_beside_its_key() {
        assert_eq!(size_of::<Option<Object>>(), 64);
        assert_eq!(size_of::<Replicas>(), 16);
    }

    #[test]
    fn a_checksum_is_that_of_its_object_and_may_be_none() {
        let mut objects = Objects::new(1);
        let slots = [*b"a", *b"b", *b"c"]
            .map(|key| objects.insert(DEFAULT, KeyRef::new(&key).unwrap()).unwrap());
        assert_eq!(objects.checksum(slots[1]), None);
        objects.set_checksum(slots[1], Some(0));
        objects.set_checksum(slots[0], Some(7));
        assert_eq!(slots.map(|slot| objects.checksum(slot)), [Some(7), Some(0), None]);
        objects.set_checksum(slots[0], None);
        assert_eq!(objects.checksum(slots[0]), None);
        // The number goes to another object, not the checksum.
        objects.remove(slots[1]);
        let next = objects.insert(DEFAULT, KeyRef::new(b"d").unwrap()).unwrap();
        assert_eq!((next, objects.checksum(next)), (slots[1], None));
    }

    #[test]
    fn keys_of_two_tenants_are_two_keys() {
        let mut objects = Objects::new(1);
        let other = objects.intern_tenant(&TenantId::new("other")).unwrap();
        assert_eq!(objects.intern_tenant(&TenantId::new("")).unwrap(), DEFAULT);
        assert_eq!(objects.tenant_index(&TenantId::new("unknown")), None);
        let key = KeyRef::new(b"k").unwrap();
        let mine = objects.insert(DEFAULT, key).unwrap();
        assert_eq!((objects.find(DEFAULT, b"k"), objects.find(other, b"k")), (Some(mine), None));
        let theirs = objects.insert(other, key).unwrap();
        objects.remove(mine);
        assert_eq!((objects.find(DEFAULT, b"k"), objects.find(other, b"k")), (None, Some(theirs)));
        assert_eq!(objects.insert(DEFAULT, KeyRef::new(b"l").unwrap()).unwrap(), mine);
    }
}
