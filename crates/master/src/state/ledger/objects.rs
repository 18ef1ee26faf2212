//! Objects as the log names and describes them.

use mooncake_base::TenantId;
use smallvec::SmallVec;

use crate::state::{
    catalog::{
        Catalog,
        annotations::Annotation,
        object::{Flags, Object, Objects},
    },
    ids::{ObjectSlot, TenantIndex},
    ledger::{
        Log,
        effect::{Effect, LoggedCopy, LoggedPin, ObjectName, Value},
    },
    pool::{Pool, disks::PoolDisk},
    replica::{DISK_ORDINAL, Replica},
    rules::Rules,
};

impl Log {
    /// Records the annotation of a version of an object, published or about to be.
    pub(in crate::state) fn annotate(
        &mut self,
        objects: &Objects,
        rules: &Rules,
        slot: ObjectSlot,
        version: u64,
        annotation: &Annotation,
    ) {
        self.effects.record(|| Effect::Annotated {
            object: ObjectName { version, ..objects.logged_name(objects.at(slot)) },
            expires: annotation.expires.map(|at| rules.unix_time(at)),
            tags: annotation.tags.clone(),
        });
    }
}

impl Log {
    /// Records that an object is gone.
    pub(in crate::state) fn record_drop(&mut self, catalog: &Catalog, slot: ObjectSlot) {
        let object = catalog.objects.at(slot);
        self.effects.record(|| Effect::Dropped { object: catalog.objects.logged_name(object) });
    }

    /// Records that an object gives its memory up: that it is gone, or that only its copy on disk is
    /// left.
    pub(in crate::state) fn record_release(&mut self, catalog: &Catalog, slot: ObjectSlot) {
        if catalog.disk_copies.get(slot).is_none() {
            return self.record_drop(catalog, slot);
        }
        let object = catalog.objects.at(slot);
        for replica in object.replicas.iter() {
            self.effects.record(|| Effect::ReplicaDropped {
                object: catalog.objects.logged_name(object),
                ordinal: replica.ordinal,
            });
        }
    }
}

impl Pool {
    /// Converts a replica for the log.
    pub(in crate::state) fn logged_copy(&self, replica: &Replica) -> LoggedCopy {
        let segment = self.segments.at(replica.segment);
        LoggedCopy {
            segment: segment.number,
            offset: segment.allocator.offset(replica.block),
            ordinal: replica.ordinal,
        }
    }

    /// Converts the replicas in mounted segments for the log.
    pub(in crate::state) fn logged_copies(
        &self,
        replicas: &[Replica],
    ) -> SmallVec<[LoggedCopy; 1]> {
        let mounted = replicas.iter().filter(|copy| self.segments.at(copy.segment).is_mounted());
        mounted.map(|copy| self.logged_copy(copy)).collect()
    }
}

impl PoolDisk {
    /// Describes a copy in it for the log, which need not know where it lies.
    pub(in crate::state) fn logged_copy(&self) -> LoggedCopy {
        LoggedCopy { segment: self.number, offset: 0, ordinal: DISK_ORDINAL }
    }
}

impl Objects {
    /// Returns the name of an object for the log.
    pub(in crate::state) fn logged_name<'a>(&'a self, object: &'a Object) -> ObjectName<'a> {
        ObjectName {
            tenant: self.logged_tenant(object.tenant),
            key: self.key(object),
            version: object.version,
        }
    }

    /// Returns the name of a tenant for the log; empty for the default tenant.
    pub(in crate::state) fn logged_tenant(&self, tenant: TenantIndex) -> &str {
        match self.tenant_name(tenant).as_str() {
            TenantId::DEFAULT => "",
            name => name,
        }
    }
}

/// Returns the effect that describes a whole object; `None` if all its replicas are lost.
pub(in crate::state) fn logged_object<'a>(
    catalog: &'a Catalog,
    pool: &Pool,
    slot: ObjectSlot,
    object: &'a Object,
) -> Option<Effect<'a>> {
    let mut copies = if catalog.released.contains(slot) {
        // Its memory is given up already, as far as the log is concerned.
        SmallVec::new()
    } else {
        pool.logged_copies(&object.replicas)
    };
    let disk = catalog.disk_copies.get(slot).map(|disk| pool.disks.at(disk));
    copies.extend(disk.filter(|disk| disk.is_kept()).map(PoolDisk::logged_copy));
    if copies.is_empty() {
        return None;
    }
    let value = Value {
        tenant: catalog.objects.logged_tenant(object.tenant),
        key: catalog.objects.key(object),
        length: object.length,
        copies,
        data_type: object.data_type,
        is_hard_pinned: object.flags.has(Flags::HARD_PINNED),
        group: catalog.groups.name(slot).unwrap_or_default(),
        pin: LoggedPin::None,
    };
    let pin = catalog.pins.requested_ttl(slot);
    let (version, checksum) = (object.version, catalog.objects.checksum(slot));
    Some(Effect::ObjectSnapshot { version, value, checksum, pin })
}
