//! Which records were written, and which process the master lets serve a directory: only written
//! records count, readers are sent only to open directories, and a directory has one owner.

use std::collections::{BTreeMap, HashSet};

use mooncake_base::{ClientId, SegmentId, Version};
use mooncake_master::state::{Effect, LoggedCopy};

use crate::{
    actor::client::Process,
    audit::allocation_model::{AllocationModel, DISK_ORDINAL},
    call::{Call, Place, Reply, key_name, key_number},
    directory::{Loaded, RecordName},
    plan::Bug,
    simulator::Simulator,
};

/// What is known of directories and their records.
#[derive(Debug, Default)]
pub(crate) struct DiskRecords {
    /// The key and the version of all records that were ever written to the directory of an id, or to
    /// one that was copied from it.
    written: HashSet<(SegmentId, u64, Version)>,
    /// The client of each directory that is open, as far as the master knows.
    owners: BTreeMap<SegmentId, ClientId>,
}

/// A copy on disk that the master counts: the key, the version, and the disk, if it is known.
pub(crate) type CountedCopy = (u64, u64, Option<SegmentId>);

impl DiskRecords {
    pub(crate) fn record_written(&mut self, disk: SegmentId, name: &RecordName) {
        self.written.insert((disk, name.key, name.version));
    }

    pub(crate) fn record_mount(&mut self, disk: SegmentId, client: ClientId) {
        self.owners.insert(disk, client);
    }

    pub(crate) fn record_unmount(&mut self, disk: SegmentId, client: ClientId) {
        if self.owners.get(&disk) == Some(&client) {
            self.owners.remove(&disk);
        }
    }

    /// Forgets a client that the master took for dead.
    pub(crate) fn forget_client(&mut self, client: ClientId) {
        self.owners.retain(|_, owner| *owner != client);
    }

    /// Forgets all owners: a master that starts knows none.
    pub(crate) fn restart(&mut self) {
        self.owners.clear();
    }

    /// Checks the places of an object that a reader is sent to.
    ///
    /// # Errors
    /// One of them is in a directory that nobody has open.
    pub(crate) fn check_places(&self, places: &[Place]) -> Result<(), String> {
        let is_open = |place: &&Place| {
            let owner = self.owners.get(&place.segment);
            owner.is_some_and(|owner| *owner == Process::new(place.endpoint).client)
        };
        let mut on_disk = places.iter().filter(|place| place.is_on_disk);
        match on_disk.find(|place| !is_open(place)) {
            Some(place) => Err(format!("a reader is sent to {place:?}, which nobody has open")),
            None => Ok(()),
        }
    }
}

/// Adds the copies on disk that an effect makes count.
pub(crate) fn counted_copies(
    model: &AllocationModel,
    effect: &Effect<'_>,
    counted: &mut Vec<CountedCopy>,
) {
    let is_on_disk = |copy: &&LoggedCopy| copy.ordinal == DISK_ORDINAL;
    let (key, version, copies) = match effect {
        Effect::ReplicaAdded { object, copy } => {
            (object.key, object.version, std::slice::from_ref(copy))
        }
        Effect::ObjectSnapshot { version, value, .. } => (value.key, *version, &value.copies[..]),
        _ => return,
    };
    let on_disk = copies.iter().filter(is_on_disk);
    counted.extend(on_disk.map(|copy| (key_number(key), version, model.disk_id(copy.segment.0))));
}

impl Simulator {
    /// Checks that each copy on disk that the master counts was written there.
    ///
    /// # Errors
    /// One of them was not.
    pub(crate) fn check_counted(&self, counted: &[CountedCopy]) -> Result<(), String> {
        for &(key, version, disk) in counted {
            let Some(disk) = disk else {
                return Err(format!("version {version} of key {key} is on an unknown disk"));
            };
            if !self.records.written.contains(&(disk, key, Version(version))) {
                return Err(format!(
                    "the master counts version {version} of key {key} on disk {disk}, where nobody \
                     has written it"
                ));
            }
        }
        Ok(())
    }

    /// Returns the copy on disk that an effect of a report makes the master forget.
    pub(crate) fn forgotten_copy(&self, effect: &Effect<'_>) -> Option<RecordName> {
        let (disk, object) = match (self.reporting, effect) {
            (Some((_, disk)), Effect::Dropped { object }) => (disk, object),
            (Some((_, disk)), Effect::ReplicaDropped { object, ordinal: DISK_ORDINAL }) => {
                (disk, object)
            }
            _ => return None,
        };
        if self.history.may_expire(object.version) {
            return None;
        }
        let key = key_number(object.key);
        let tenant = self.host.tenant_of(key);
        let name = RecordName { tenant, key, version: Version(object.version) };
        (self.model.disk_of(object.key) == Some(disk)).then_some(name)
    }

    /// Checks that the owner of a directory does not have the records that its report made the master
    /// forget.
    ///
    /// # Errors
    /// It has one of them.
    pub(crate) fn check_forgotten(&self, forgotten: &[RecordName]) -> Result<(), String> {
        let Some((process, disk)) = self.reporting else { return Ok(()) };
        let own = self.processes.get(&process).and_then(|found| found.directory.as_ref());
        let Some(directory) = own.map(|own| &self.directories[own.number]) else { return Ok(()) };
        let is_there = |name: &&RecordName| matches!(directory.read(name, false), Loaded::Good(_));
        match forgotten.iter().find(is_there) {
            Some(name) if directory.id == disk => {
                Err(format!("a report made the master forget {name:?}, which is on disk {disk}"))
            }
            _ => Ok(()),
        }
    }

    /// Checks what the master says about directories. `target` is the client to which it sent the
    /// readers of a directory that is mounted.
    ///
    /// # Errors
    /// Two clients have a directory, or nobody has one that a reader is sent to.
    pub(crate) fn check_disk_reply(
        &mut self,
        client: ClientId,
        call: &Call,
        reply: &Reply,
        target: Option<ClientId>,
    ) -> Result<(), String> {
        match (call, reply) {
            (Call::MountDisk { spec, .. }, Reply::Done) => {
                if let Some(other) = target.filter(|other| *other != client) {
                    return Err(format!("disk {} is open to {client} and to {other}", spec.id));
                }
                self.records.record_mount(spec.id, client);
            }
            (Call::UnmountDisk { disk, .. }, Reply::Done) => {
                self.records.record_unmount(*disk, client);
            }
            (_, Reply::Located { places, .. }) => return self.records.check_places(places),
            _ => {}
        }
        Ok(())
    }

    /// Returns the client that readers of a directory are sent to.
    pub(crate) fn reader_target(&self, disk: SegmentId) -> Option<ClientId> {
        let mut state = self.host.state()?;
        let calls = state.disks();
        let views = calls.list();
        views.iter().find(|view| view.spec.id == disk && view.is_readable).map(|view| view.client)
    }

    /// Checks that the record of each object that the master says is on a present disk is there, and
    /// that copies of damaged records are dropped once somebody has read them.
    pub(crate) fn audit_disk_copy(&mut self, key: u64, version: Version) -> Result<(), String> {
        let Some(disk) = self.model.disk_of(&key_name(key)) else { return Ok(()) };
        let Some(client) = self.reader_target(disk) else { return Ok(()) };
        let owner = self.processes.values().find(|process| process.client == client);
        let directory = owner.and_then(|owner| owner.directory.as_ref());
        let directory = directory.map(|own| &self.directories[own.number]);
        let Some(directory) = directory.filter(|directory| directory.id == disk) else {
            return Err(format!("disk {disk} counts as open by {client}, which has it not"));
        };
        let name = RecordName { tenant: self.host.tenant_of(key), key, version };
        match directory.read(&name, self.plan.has(Bug::TrustsUnsyncedRecords)) {
            Loaded::Good(words) => {
                self.outcome.audited_records += 1;
                self.history.check_read(self.now, key, version, &words)
            }
            Loaded::Damaged => Ok(()),
            Loaded::Missing => Err(format!(
                "the master says that {name:?} is on disk {disk}, which has no such record"
            )),
        }
    }

    /// Checks that no disk counts objects.
    pub(crate) fn check_empty_disks(&self) -> Result<(), String> {
        let Some(mut state) = self.host.state() else { return Err("it is down".to_owned()) };
        let calls = state.disks();
        match calls.list().iter().find(|view| view.objects > 0) {
            Some(view) => Err(format!("objects are left on a disk: {view:?}")),
            None => Ok(()),
        }
    }
}
