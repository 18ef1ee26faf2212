//! Restores a working state from the replayed log after a restart.

use std::{cmp::Reverse, time::Duration};

use mooncake_base::Moment;

use crate::state::{
    State,
    calls::put::write::Write,
    catalog::object::NO_WRITE,
    ids::KeyHash,
    inventory::{
        puts,
        restore::{Restoration, drop_put, find_or_insert, resume_put},
    },
    ledger::{
        effect::LoggedPin,
        replay::{Image, LoggedWrite},
    },
    options::RequestedPin,
    rules::Rules,
};

/// Result of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Restored {
    /// Unclaimed segments.
    pub segments: u64,
    /// Objects in these segments.
    pub objects: u64,
    /// Unfinished puts.
    pub writes: u64,
    /// Tasks that will continue.
    pub tasks: u64,
    /// Drain jobs that will continue.
    pub jobs: u64,
    /// Objects and puts dropped because another one has their memory, or because they lie beyond
    /// their segment: the log was damaged in a way that its checksums did not detect.
    pub conflicts: u64,
}

impl State {
    /// Restores the state after a restart. All of it is unclaimed until the owners announce their
    /// segments; effects are recorded.
    ///
    /// Until the longest fence granted by the earlier master ends, no memory is allocated, since
    /// readers and writers may still use it, unless that master has
    /// [recorded](crate::state::log_rest) which memory that is. Grants that were lost with the
    /// unsynced end of the log last at most `lost_grants_max`.
    pub fn restore(
        rules: Rules,
        seed: u64,
        now: Moment,
        mut image: Image,
        lost_grants_max: Duration,
    ) -> (Self, Restored) {
        let mut state = Self::new(rules, seed);
        let mut restoration =
            Restoration::begin(&mut state.inventory, seed, now, &mut image, lost_grants_max);
        let report = restore_image(&mut state, &mut restoration, now, image);
        (state, report)
    }
}

fn restore_image(
    state: &mut State,
    restoration: &mut Restoration,
    now: Moment,
    image: Image,
) -> Restored {
    restoration.restore_memory(&mut state.inventory, image.segments, image.disks);
    restoration.restore_objects(&mut state.inventory, image.objects, image.quotas);
    let mut report = Restored::default();
    let mut writes: Vec<LoggedWrite> = image.writes.into_values().collect();
    writes.sort_unstable_by_key(|write| write.value.version);
    for write in writes {
        if restore_write(state, restoration, now, write) {
            report.writes += 1;
        } else {
            report.conflicts += 1;
        }
    }
    // Ranges whose rest was over long ago may overlap others: of each byte, the longest rest counts.
    let mut resting: Vec<_> = image.quarantined.into_iter().collect();
    resting.sort_unstable_by_key(|&(place, range)| (Reverse(range.time), place));
    for ((segment, offset), range) in resting {
        restoration.restore_quarantined(&mut state.inventory, segment, offset, range);
    }
    let records = state.tasks().restore_records(now, image.tasks, image.next_ordinal);
    Restored {
        segments: restoration.segments,
        objects: restoration.objects,
        tasks: records.tasks,
        jobs: records.jobs,
        conflicts: report.conflicts + restoration.conflicts + records.damaged,
        ..report
    }
}

/// Restores a put as if it had started now: its writer may still end it. Returns `false` if its memory
/// is taken.
fn restore_write(
    state: &mut State,
    restoration: &Restoration,
    now: Moment,
    logged: LoggedWrite,
) -> bool {
    let inventory = &mut state.inventory;
    let (replicas, is_whole) = restoration.restore_write_copies(inventory, &logged.value);
    let tenant = logged.tenant;
    let object = if !is_whole {
        None
    } else if logged.is_displaced {
        Some(None)
    } else {
        find_or_insert(inventory, tenant, &logged.key).map(Some)
    };
    let Some(object) = object else {
        drop_put(inventory, logged.value.version, &replicas);
        return false;
    };
    let (length, end) = (logged.value.length, now + inventory.rules().late_end());
    resume_put(inventory, object, tenant, length, &replicas, end);
    let number = state.writes.insert(Write {
        object,
        hash: object.map_or(KeyHash::new(0), |slot| inventory.objects().key_hash(slot)),
        tenant,
        next: object.map_or(NO_WRITE, |slot| inventory.object(slot).newest_write),
        version: logged.value.version,
        client: logged.client,
        request: logged.request,
        window_began: now,
        length: logged.value.length,
        replicas: replicas.into(),
        soft_pin: match logged.pin {
            LoggedPin::Preserve => RequestedPin::Preserve,
            LoggedPin::None => RequestedPin::None,
            LoggedPin::For(ttl) => RequestedPin::For(ttl),
        },
        is_hard_pinned: logged.value.is_hard_pinned,
        is_replacing: logged.is_replacing,
        data_type: logged.value.data_type,
        group: logged.value.group,
        terms: logged.terms,
    });
    if let Some(slot) = object {
        puts::set_newest(inventory, slot, number);
    }
    true
}
