//! A single object in full, for operators.

use std::time::Duration;

use mooncake_base::{Moment, TenantId, Version};

use crate::state::{
    calls::put::write::Writes,
    catalog::object::Flags,
    inventory::{Inventory, errors::not_found},
    tags::Tags,
};

/// An object with its copies, its protection and its unfinished puts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectView {
    /// Length in bytes of the readable value; 0 without one.
    pub length: u64,
    /// Version of the readable value; None while the first put is unfinished.
    pub version: Option<Version>,
    /// Checksum that the writer gave.
    pub checksum: Option<u64>,
    /// Time until eviction and removal may take the object.
    pub lease_left: Duration,
    /// Time until its memory may be reused at once.
    pub fence_left: Duration,
    /// Data type that the writer gave.
    pub data_type: u8,
    /// Time until the object is removed, if it expires.
    pub expires_in: Option<Duration>,
    /// Text stored beside it.
    pub tags: Tags,
    /// True if the object is never evicted.
    pub is_hard_pinned: bool,
    /// Time that the soft pin lasts after each access, if it has one.
    pub soft_pin_ttl: Option<Duration>,
    /// True while a client copies the object.
    pub is_being_copied: bool,
    /// Name of the group with which it is evicted.
    pub group: Option<Vec<u8>>,
    /// Number of unfinished puts.
    pub unfinished_puts: usize,
    /// Copies of the readable value.
    pub copies: Vec<CopyView>,
}

/// A copy of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyView {
    /// Name of the segment.
    pub segment: String,
    /// Address of the transfer engine that owns the segment; that of the records for a disk.
    pub endpoint: String,
    /// Whether it lies on a disk.
    pub is_on_disk: bool,
    /// Bytes that the copy occupies, its padding included; 0 once its segment has left the pool.
    pub occupied: u64,
    /// False while the process that holds the copy is suspect or gone.
    pub is_readable: bool,
}

impl ObjectView {
    /// Returns the object of a key in full. Grants no lease.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`
    pub(in crate::state) fn find(
        inventory: &Inventory,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        writes: &Writes,
    ) -> mooncake_base::Result<Self> {
        let catalog = inventory.catalog();
        let found = catalog
            .objects
            .tenant_index(tenant)
            .and_then(|tenant| catalog.objects.find(tenant, key))
            .filter(|&slot| !inventory.is_unclaimed(slot));
        let slot = found.ok_or_else(|| not_found(key))?;
        let object = catalog.objects.at(slot);
        let is_complete = object.is_complete();
        let copies = object.replicas.iter().map(|copy| {
            let segment = inventory.segment(copy.segment);
            CopyView {
                segment: segment.spec.name.clone(),
                endpoint: segment.spec.endpoint.clone(),
                is_on_disk: false,
                // The sweep has not reached an object whose segment just left.
                occupied: if segment.is_mounted() { segment.allocator.size(copy.block) } else { 0 },
                is_readable: segment.is_readable(),
            }
        });
        let disk = inventory.disk_copy(slot).map(|disk| {
            let disk = inventory.disk(disk);
            CopyView {
                segment: disk.spec.name.clone(),
                endpoint: disk.spec.address.clone(),
                is_on_disk: true,
                occupied: object.length,
                is_readable: disk.is_readable(),
            }
        });
        let copies = copies.chain(disk);
        let copying = catalog.copying_until(slot);
        Ok(Self {
            length: if is_complete { object.length } else { 0 },
            version: is_complete.then(|| object.version()),
            checksum: if is_complete { catalog.objects.checksum(slot) } else { None },
            lease_left: object.protection.lease_left(now),
            fence_left: object.protection.fence().left(now),
            data_type: object.data_type,
            expires_in: catalog.annotations.expires(slot).map(|at| at.left(now)),
            tags: catalog.annotations.of(slot).map(|found| found.tags.clone()).unwrap_or_default(),
            is_hard_pinned: object.flags.has(Flags::HARD_PINNED),
            soft_pin_ttl: catalog.pins.ttl(now, slot),
            is_being_copied: copying > now.into(),
            group: catalog.groups.name(slot).map(<[u8]>::to_vec),
            unfinished_puts: writes.chain(object.newest_write).count(),
            copies: copies.collect(),
        })
    }
}
