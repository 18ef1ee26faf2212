//! An image as effects, from which a replay makes it again.

use crate::state::{
    catalog::object::Flags,
    ids::{ObjectSlot, Slot},
    ledger::{
        effect::{Effect, LoggedPin, ObjectName, Value, writer::Writer},
        replay::{Image, LoggedAnnotation, LoggedCopies, LoggedWrite, QuarantinedRange},
        task_record::ALL,
    },
    pool::segment::SegmentNumber,
};

impl Image {
    /// Encodes the image, and hands the bytes out in parts: what is not an object first, then so many
    /// objects at a time. Objects without a replica in the pool are left out.
    ///
    /// # Errors
    /// That of `take`.
    pub(crate) fn encode<E>(
        &self,
        objects: u32,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut bytes = Vec::new();
        self.encode_head(&mut bytes);
        take(&bytes)?;
        let count = self.objects.table.slot_count();
        for first in (0..count).step_by(objects.max(1) as usize) {
            bytes.clear();
            for slot in ObjectSlot::range(first, count.min(first.saturating_add(objects))) {
                self.encode_object(slot, &mut bytes);
            }
            take(&bytes)?;
        }
        Ok(())
    }

    fn encode_head(&self, into: &mut Vec<u8>) {
        let number = SegmentNumber(self.next_number);
        Effect::NextIds { version: self.next_version, number }.encode(into);
        Effect::MaxGranted { fence: self.fence, lease: self.lease }.encode(into);
        for (&number, segment) in &self.segments {
            let (client, spec) = (segment.client, segment.spec.clone());
            Effect::Mounted { number, client, spec }.encode(into);
            let (status, grace) = (segment.status, segment.grace);
            Effect::SegmentStatus { number, status, grace }.encode(into);
        }
        for (&number, disk) in &self.disks {
            let (client, spec) = (disk.client, disk.spec.clone());
            Effect::DiskMounted { number, client, spec }.encode(into);
        }
        for (tenant, &bytes) in &self.quotas {
            Effect::Quota { tenant, bytes: Some(bytes) }.encode(into);
        }
        let mut ordinal = Vec::new();
        Writer(&mut ordinal).int(self.next_ordinal.into());
        Effect::Task { id: ALL, record: Some(&ordinal) }.encode(into);
        for (&id, record) in &self.tasks {
            Effect::Task { id, record: Some(record) }.encode(into);
        }
        for (&(number, offset), &QuarantinedRange { length, time }) in &self.quarantined {
            Effect::Quarantined { number, offset, length, time }.encode(into);
        }
        for (&version, write) in &self.writes {
            self.encode_write(version, write, into);
        }
    }

    fn encode_write(&self, version: u64, write: &LoggedWrite, into: &mut Vec<u8>) {
        let live = &write.value;
        let tenant = self.objects.table.logged_tenant(write.tenant);
        let key = write.key.as_bytes();
        let value = Value {
            tenant,
            key,
            length: live.length,
            copies: live.copies.clone(),
            data_type: live.data_type,
            is_hard_pinned: live.is_hard_pinned,
            group: &live.group,
            pin: write.pin.clone(),
        };
        let &LoggedWrite { client, is_replacing, request, .. } = write;
        let terms = write.terms.clone();
        Effect::Started { version, client, value, is_replacing, request, terms }.encode(into);
        if write.is_displaced {
            Effect::Displaced { version }.encode(into);
        }
        encode_annotation(ObjectName { tenant, key, version }, live.annotation.as_deref(), into);
    }

    fn encode_object(&self, slot: ObjectSlot, into: &mut Vec<u8>) {
        let table = &self.objects.table;
        let Some(object) = table.get(slot) else { return };
        let is_kept =
            |number| self.segments.contains_key(&number) || self.disks.contains_key(&number);
        let copies = self.objects.copies(slot).iter().filter(|copy| is_kept(copy.segment));
        let copies: LoggedCopies = copies.cloned().collect();
        if copies.is_empty() {
            return;
        }
        let name = table.logged_name(object);
        let extras = self.objects.extras.get(&slot);
        let value = Value {
            tenant: name.tenant,
            key: name.key,
            length: object.length,
            copies,
            data_type: object.data_type,
            is_hard_pinned: object.flags.has(Flags::HARD_PINNED),
            group: extras.map_or(&[], |extras| &extras.group),
            pin: LoggedPin::None,
        };
        let (version, checksum) = (object.version, table.checksum(slot));
        let pin = extras.and_then(|extras| extras.pin);
        Effect::ObjectSnapshot { version, value, checksum, pin }.encode(into);
        encode_annotation(name, extras.and_then(|extras| extras.annotation.as_deref()), into);
    }
}

fn encode_annotation(
    object: ObjectName<'_>,
    annotation: Option<&LoggedAnnotation>,
    into: &mut Vec<u8>,
) {
    let Some(LoggedAnnotation { expires, tags }) = annotation else { return };
    Effect::Annotated { object, expires: *expires, tags: tags.clone() }.encode(into);
}
