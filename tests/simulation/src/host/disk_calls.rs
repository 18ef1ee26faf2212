//! Calls of the owners of directories, as the master executes them.

use mooncake_base::{Error, Moment, Result};
use mooncake_master::state::{self, DiskPlace, OwnDisk, State};

use crate::{
    call::{Call, HandedOver, LongName, Place, RecordReport, Reply, key_name, key_number},
    directory::RecordName,
    host::calls::{Context, SliceEnd, places, process_at},
    host::running_call::ReportWork,
    plan::{Bug, WORD_BYTES},
};

/// The records that one slice of a report handles.
const RECORDS_PER_SLICE: usize = 2;

impl Context<'_> {
    pub(super) fn serve_disks(&self, state: &mut State, now: Moment, call: &Call) -> Result<Reply> {
        let client = self.client;
        match call {
            Call::MountDisk { spec, used } => {
                let mounted = state.disks().mount(client, (**spec).clone(), *used, true);
                if mounted.is_err() && self.bug == Some(Bug::AcceptsCopiedDirectories) {
                    let owner = state
                        .disks()
                        .list()
                        .iter()
                        .find(|it| it.spec.id == spec.id)
                        .map(|it| it.client);
                    if let Some(owner) = owner {
                        state.disks().unmount(now, owner, spec.id, true)?;
                        state.disks().mount(client, (**spec).clone(), *used, true)?;
                        return Ok(Reply::Done);
                    }
                }
                mounted.map(|()| Reply::Done)
            }
            Call::UnmountDisk { .. } if self.bug == Some(Bug::TellsOfAwayDisks) => Ok(Reply::Done),
            Call::UnmountDisk { disk, is_forgotten } => {
                state.disks().unmount(now, client, *disk, *is_forgotten).map(|()| Reply::Done)
            }
            Call::FetchOffloads { disk, limit } => {
                let taken = state.disks().take_over(now, client, *disk, *limit, u64::MAX)?;
                let window = taken.fence;
                let mut objects = Vec::new();
                for object in taken.objects {
                    let key = key_number(&object.key);
                    let places = places(state, &object.places);
                    let length = object.length / WORD_BYTES;
                    let name = RecordName { tenant: object.tenant, key, version: object.version };
                    if self.bug == Some(Bug::CountsUnreportedRecords) {
                        let own = &mut state.disks().own(client, *disk)?;
                        add_record(own, now, &(name.clone(), length));
                    }
                    objects.push(HandedOver { record: (name, length), places });
                }
                Ok(Reply::Offloads { objects, window })
            }
            _ => Err(Error::internal("not a call about disks")),
        }
    }

    /// Handles the records of one slice of a report.
    pub(super) fn report_records(
        &self,
        state: &mut State,
        now: Moment,
        report: &RecordReport,
        work: &mut ReportWork,
    ) -> Result<SliceEnd> {
        let (client, disk) = (self.client, report.disk);
        if work.handled == 0 {
            state.disks().own(client, disk)?.set_used(report.used * WORD_BYTES);
        }
        let RecordReport { dropped, refused, added, .. } = report;
        let (first_refused, first_added) = (dropped.len(), dropped.len() + refused.len());
        let all: Vec<&LongName> = dropped.iter().chain(refused).chain(added).collect();
        let end = all.len().min(work.handled + RECORDS_PER_SLICE);
        for (at, &record) in all.iter().enumerate().take(end).skip(work.handled) {
            if at >= first_added {
                let mut record = record.clone();
                if self.bug == Some(Bug::CountsLateOffloads) {
                    make_present(state, now, &mut record);
                }
                if !add_record(&mut state.disks().own(client, disk)?, now, &record) {
                    work.stale.push(at - first_added);
                }
            } else if at >= first_refused {
                refuse_record(&mut state.disks().own(client, disk)?, now, record);
            } else {
                lose_record(&mut state.disks().own(client, disk)?, now, record);
            }
        }
        work.handled = end;
        if end < all.len() {
            return Ok(SliceEnd::Again(None));
        }
        let done = || SliceEnd::Done(Reply::Reported(work.stale.clone()));
        if work.next.is_none() {
            if !report.is_complete || !state.disks().own(client, disk)?.end_naming() {
                return Ok(done());
            }
            work.next = Some(0);
            return Ok(SliceEnd::Again(None));
        }
        // A disk that left the pool meanwhile has no copies.
        let mut next = work.next.unwrap_or_default();
        let is_done = match state.disks().own(client, disk) {
            Ok(mut own) => own.drop_unnamed(now, &mut next),
            Err(_) => true,
        };
        work.next = Some(next);
        Ok(if is_done { done() } else { SliceEnd::Again(None) })
    }
}

/// Gives a record the version and the length that its object has now.
fn make_present(state: &State, now: Moment, (name, length): &mut LongName) {
    let found = state.view_object(now, &name.tenant, &key_name(name.key));
    if let Ok(view) = found
        && let Some(version) = view.version
    {
        (name.version, *length) = (version, view.length / WORD_BYTES);
    }
}

fn add_record(disk: &mut OwnDisk<'_>, now: Moment, record: &LongName) -> bool {
    with_name(record, |record| disk.record_added(now, record))
}

fn lose_record(disk: &mut OwnDisk<'_>, now: Moment, record: &LongName) {
    with_name(record, |record| disk.record_lost(now, record));
}

fn refuse_record(disk: &mut OwnDisk<'_>, now: Moment, record: &LongName) {
    with_name(record, |record| disk.record_refused(now, record));
}

fn with_name<R>((name, length): &LongName, handle: impl FnOnce(&state::RecordName<'_>) -> R) -> R {
    let key = key_name(name.key);
    handle(&state::RecordName {
        tenant: &name.tenant,
        key: &key,
        version: name.version,
        length: length * WORD_BYTES,
    })
}

/// Returns the place of a copy on disk.
pub(super) fn disk_place(state: &State, place: &DiskPlace) -> Place {
    let spec = state::disk_of(state, place.disk);
    Place {
        segment: spec.id,
        endpoint: process_at(&spec.address),
        address: 0,
        replica: place.replica,
        is_on_disk: true,
    }
}
