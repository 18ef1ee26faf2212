//! Replay of log effects into an image: which objects exist, which puts are unfinished, and where
//! they lie.
//!
//! Plain tables without an eviction order, time or clients.
//! [`State::restore`](crate::state::State::restore) makes a working state of an image.

mod encode;
mod logged_objects;

use std::{collections::BTreeMap, time::Duration};

use mooncake_base::{ClientId, KeyRef, Moment, ObjectKey, TenantId};
use rustc_hash::FxHashMap;

pub(in crate::state) use self::logged_objects::{LoggedCopies, LoggedExtras, LoggedObjects};
use crate::state::{
    ids::{ObjectSlot, TenantIndex},
    ledger::{
        effect::{DecodeError, Effect, LoggedCopy, LoggedPin, ObjectName, Value},
        lease_notes::{KnownLeases, LeaseNotes},
        task_record::next_ordinal,
    },
    options::Terms,
    pool::{
        disks::DiskSpec,
        segment::{SegmentNumber, SegmentSpec},
    },
    replica::DISK_ORDINAL,
    tags::Tags,
};

/// The contents of a log.
#[derive(Debug, Clone, Default)]
pub struct Image {
    pub(in crate::state) segments: BTreeMap<SegmentNumber, LoggedSegment>,
    pub(in crate::state) disks: BTreeMap<SegmentNumber, LoggedDisk>,
    pub(in crate::state) objects: LoggedObjects,
    pub(in crate::state) writes: FxHashMap<u64, LoggedWrite>,
    /// By where they begin.
    pub(in crate::state) quarantined: FxHashMap<(SegmentNumber, u64), QuarantinedRange>,
    pub(in crate::state) fence: Duration,
    pub(in crate::state) lease: Duration,
    pub(in crate::state) next_version: u64,
    pub(in crate::state) next_number: u32,
    pub(in crate::state) tasks: BTreeMap<u128, Box<[u8]>>,
    pub(in crate::state) quotas: BTreeMap<Box<str>, u64>,
    /// Lowest ordinal for the next replica that a task makes.
    pub(in crate::state) next_ordinal: u32,
    /// Leases that a leader has told of, outside of the log.
    pub(in crate::state) known_leases: KnownLeases,
    /// All memory that must rest has a record, as a leader has said, outside of the log, right behind it.
    pub(in crate::state) is_rest_logged: bool,
    /// Another master may have granted versions of which the log has no record.
    pub(in crate::state) may_lack_versions: bool,
}

/// A segment of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::state) struct LoggedSegment {
    pub(in crate::state) client: ClientId,
    pub(in crate::state) spec: SegmentSpec,
    pub(in crate::state) status: u8,
    pub(in crate::state) grace: Duration,
}

/// A disk of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::state) struct LoggedDisk {
    pub(in crate::state) client: ClientId,
    pub(in crate::state) spec: DiskSpec,
}

/// The value of an object, published or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::state) struct LiveObject {
    pub(in crate::state) version: u64,
    pub(in crate::state) length: u64,
    pub(in crate::state) copies: LoggedCopies,
    pub(in crate::state) data_type: u8,
    pub(in crate::state) is_hard_pinned: bool,
    pub(in crate::state) group: Box<[u8]>,
    pub(in crate::state) checksum: Option<u64>,
    pub(in crate::state) pin: Option<Duration>,
    pub(in crate::state) annotation: Option<Box<LoggedAnnotation>>,
}

/// Expiry, since 1970, and tags of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::state) struct LoggedAnnotation {
    pub(in crate::state) expires: Option<Duration>,
    pub(in crate::state) tags: Tags,
}

/// An unfinished put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::state) struct LoggedWrite {
    pub(in crate::state) tenant: TenantIndex,
    pub(in crate::state) key: ObjectKey,
    pub(in crate::state) client: ClientId,
    pub(in crate::state) is_replacing: bool,
    pub(in crate::state) request: u64,
    pub(in crate::state) is_displaced: bool,
    pub(in crate::state) pin: LoggedPin,
    pub(in crate::state) terms: Option<Box<Terms>>,
    pub(in crate::state) value: LiveObject,
}

/// Memory that a late write may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) struct QuarantinedRange {
    pub(in crate::state) length: u64,
    pub(in crate::state) time: Duration,
}

impl Image {
    /// Applies effects that [`Log::take_effects`](crate::state::ledger::Log::take_effects) returned.
    ///
    /// # Errors
    /// The bytes are damaged or of a later version.
    pub fn replay(&mut self, effects: &[u8]) -> Result<(), DecodeError> {
        self.is_rest_logged = false;
        Effect::decode_all(effects, |effect| self.apply(effect))
    }

    /// Applies effects that were decoded.
    pub(crate) fn apply_all(&mut self, effects: Vec<Effect<'_>>) {
        self.is_rest_logged = false;
        effects.into_iter().for_each(|effect| self.apply(effect));
    }

    /// Takes it from the leader that all memory which must rest has a record in what was replayed.
    pub fn set_rest_logged(&mut self) {
        self.is_rest_logged = true;
    }

    /// Says that another master may have granted versions of which the log has no record.
    pub fn set_may_lack_versions(&mut self) {
        self.may_lack_versions = true;
    }

    /// Takes notes of the leader that were received at this moment.
    pub fn receive_leases(&mut self, now: Moment, notes: &LeaseNotes) {
        self.known_leases.receive(now, notes);
    }

    /// Forgets all notes: some may be missing.
    pub fn forget_leases(&mut self) {
        self.known_leases = KnownLeases::default();
    }

    /// Returns the number of objects, including those in dropped segments.
    pub fn objects(&self) -> u64 {
        self.objects.len()
    }

    /// Returns whether clients keep directories.
    pub fn has_disks(&self) -> bool {
        !self.disks.is_empty()
    }

    /// Returns the number of segments.
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Returns the records of tasks and drain jobs, by id.
    pub fn tasks(&self) -> impl Iterator<Item = (u128, &[u8])> {
        self.tasks.iter().map(|(&id, record)| (id, &**record))
    }

    /// Returns the quotas in bytes, by tenant; the default tenant has the empty name.
    pub fn quotas(&self) -> impl Iterator<Item = (&str, u64)> {
        self.quotas.iter().map(|(tenant, &bytes)| (&**tenant, bytes))
    }

    fn apply(&mut self, effect: Effect<'_>) {
        match effect {
            Effect::Mounted { number, client, spec } => {
                let segment = LoggedSegment { client, spec, status: 0, grace: Duration::ZERO };
                self.next_number = self.next_number.max(number.0.saturating_add(1));
                self.segments.insert(number, segment);
            }
            Effect::DiskMounted { number, client, spec } => {
                self.next_number = self.next_number.max(number.0.saturating_add(1));
                self.disks.insert(number, LoggedDisk { client, spec });
            }
            Effect::SegmentStatus { number, status, grace } => {
                if let Some(segment) = self.segments.get_mut(&number) {
                    (segment.status, segment.grace) = (status, grace);
                }
            }
            Effect::SegmentDropped { number } => {
                self.segments.remove(&number);
                self.disks.remove(&number);
                self.quarantined.retain(|(segment, _), _| *segment != number);
            }
            Effect::Started { version, client, mut value, is_replacing, request, terms } => {
                self.apply_started(version, client, &mut value, is_replacing, request, terms);
            }
            Effect::Published { version, failed, checksum, pin } => {
                self.apply_published(version, failed, checksum, pin);
            }
            Effect::Displaced { version } => {
                self.writes.entry(version).and_modify(|write| write.is_displaced = true);
            }
            Effect::WriteDropped { version } => {
                self.writes.remove(&version);
            }
            Effect::ObjectSnapshot { version, mut value, checksum, pin } => {
                let live = LiveObject { checksum, pin, ..LiveObject::new(version, &mut value) };
                self.insert_live(&value, live);
            }
            Effect::Dropped { object } => {
                if let Some(slot) = self.find(&object) {
                    self.objects.remove(slot);
                }
            }
            Effect::ReplicaAdded { object, copy } => self.apply_replica(&object, copy),
            Effect::ReplicaDropped { object, ordinal } => self.apply_dropped(&object, ordinal),
            Effect::Annotated { object, expires, tags } => {
                self.apply_annotation(&object, LoggedAnnotation { expires, tags });
            }
            Effect::Pinned { object, pin } => {
                if let Some(slot) = self.find(&object) {
                    self.objects.change_extras(slot, |extras| extras.pin = pin);
                }
            }
            Effect::Quarantined { number, offset, length, time } => {
                self.apply_quarantined((number, offset), QuarantinedRange { length, time });
            }
            Effect::MaxGranted { fence, lease } => {
                (self.fence, self.lease) = (fence, lease);
            }
            Effect::NextIds { version, number } => {
                self.next_version = self.next_version.max(version);
                self.next_number = self.next_number.max(number.0);
            }
            Effect::Task { id, record } => self.apply_task_record(id, record),
            Effect::Quota { tenant, bytes: Some(bytes) } => {
                self.quotas.insert(tenant.into(), bytes);
            }
            Effect::Quota { tenant, bytes: None } => {
                self.quotas.remove(tenant);
            }
        }
    }

    fn apply_quarantined(&mut self, place: (SegmentNumber, u64), range: QuarantinedRange) {
        if range.time.is_zero() {
            self.quarantined.remove(&place);
        } else {
            self.quarantined.insert(place, range);
        }
    }

    fn apply_replica(&mut self, object: &ObjectName<'_>, copy: LoggedCopy) {
        if copy.ordinal != DISK_ORDINAL {
            self.next_ordinal = ordinal_after(self.next_ordinal, copy.ordinal);
        }
        let place = (copy.segment, copy.offset);
        if let Some(slot) = self.find(object) {
            let copies = self.objects.copies_mut(slot);
            copies.retain(|other| (other.segment, other.offset) != place);
            copies.push(copy);
        }
    }

    /// Drops the replica of that ordinal. Logs up to version 0.4.0 may have two: the earlier one is
    /// the source of a move.
    fn apply_dropped(&mut self, object: &ObjectName<'_>, ordinal: u32) {
        if let Some(slot) = self.find(object) {
            let copies = self.objects.copies_mut(slot);
            if let Some(at) = copies.iter().position(|copy| copy.ordinal == ordinal) {
                copies.remove(at);
            }
        }
    }

    fn apply_annotation(&mut self, object: &ObjectName<'_>, annotation: LoggedAnnotation) {
        let is_none = annotation.expires.is_none() && annotation.tags.is_empty();
        let annotation = (!is_none).then(|| Box::new(annotation));
        if let Some(write) = self.writes.get_mut(&object.version) {
            write.value.annotation = annotation;
        } else if let Some(slot) = self.find(object) {
            self.objects.change_extras(slot, |extras| extras.annotation = annotation);
        }
    }

    fn apply_task_record(&mut self, id: u128, record: Option<&[u8]>) {
        if let Some(ordinal) = next_ordinal(id, record) {
            self.next_ordinal = ordinal;
        } else if let Some(record) = record {
            self.tasks.insert(id, record.into());
        } else {
            self.tasks.remove(&id);
        }
    }

    fn insert_live(&mut self, value: &Value<'_>, live: LiveObject) {
        self.next_version = self.next_version.max(live.version.saturating_add(1));
        // A master never logs an invalid key; a checksum detects damage before this.
        if let (Some(tenant), Ok(key)) = (self.tenant(value.tenant), KeyRef::new(value.key)) {
            self.objects.insert(tenant, key, live);
        }
    }

    fn apply_started(
        &mut self,
        version: u64,
        client: ClientId,
        value: &mut Value<'_>,
        is_replacing: bool,
        request: u64,
        terms: Option<Box<Terms>>,
    ) {
        self.next_version = self.next_version.max(version.saturating_add(1));
        // A master allocates no memory that still rests.
        for copy in &value.copies {
            self.quarantined.remove(&(copy.segment, copy.offset));
        }
        let Some(tenant) = self.tenant(value.tenant) else { return };
        let Ok(key) = ObjectKey::new(value.key) else { return };
        let write = LoggedWrite {
            tenant,
            key,
            client,
            is_replacing,
            request,
            is_displaced: false,
            pin: value.pin.clone(),
            terms,
            value: LiveObject::new(version, value),
        };
        self.writes.insert(version, write);
    }

    fn apply_published(
        &mut self,
        version: u64,
        failed: &[u8],
        checksum: Option<u64>,
        pin: Option<Duration>,
    ) {
        // Unknown: a snapshot that started after the put has its value already.
        let Some(write) = self.writes.remove(&version) else { return };
        let mut value = write.value;
        value.copies.retain(|copy| {
            !u8::try_from(copy.ordinal).is_ok_and(|number| failed.contains(&number))
        });
        (value.checksum, value.pin) = (checksum, pin);
        self.objects.insert(write.tenant, (&write.key).into(), value);
    }

    /// Returns the index of a tenant, adding the tenant if it is new. `None`: there are too many, as
    /// no master allows.
    fn tenant(&mut self, name: &str) -> Option<TenantIndex> {
        match name {
            "" => Some(TenantIndex::DEFAULT),
            name => self.objects.table.intern_tenant(&TenantId::new(name)).ok(),
        }
    }

    fn find(&self, object: &ObjectName<'_>) -> Option<ObjectSlot> {
        let tenant = match object.tenant {
            "" => TenantIndex::DEFAULT,
            name => self.objects.table.tenant_index(&TenantId::new(name))?,
        };
        self.objects.find(tenant, object.key, object.version)
    }
}

impl LiveObject {
    /// Moves the replicas out of `value`.
    fn new(version: u64, value: &mut Value<'_>) -> Self {
        Self {
            version,
            length: value.length,
            copies: std::mem::take(&mut value.copies),
            data_type: value.data_type,
            is_hard_pinned: value.is_hard_pinned,
            group: value.group.into(),
            checksum: None,
            pin: None,
            annotation: None,
        }
    }
}

/// Returns the next ordinal after a logged one. Tasks do not end in the order of their ordinals,
/// and ordinals wrap around.
fn ordinal_after(next: u32, ordinal: u32) -> u32 {
    let after = ordinal.wrapping_add(1);
    let is_ahead = after.wrapping_sub(next) < 1 << 31;
    if is_ahead { after } else { next }
}
