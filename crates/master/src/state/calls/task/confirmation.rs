//! The end of a move: the source is kept until the process that holds the new replica was heard of
//! after the bytes were written.
//!
//! The client that wrote the bytes reports what was true before: meanwhile the process of the target
//! may be dead or leaving, and the source may be the last replica that can be read. A call of any kind
//! shows that it lives. A replica in a segment that is lost or leaving replaces no other. A drain may
//! leave an object to the owner of a disk.

use std::time::Duration;

use mooncake_base::{ClientId, Moment, TaskId};

use crate::state::{
    calls::task::{
        CHANGED, TaskCalls,
        promotion::disk_keeper,
        table::{Goal, Task},
    },
    catalog::object::Object,
    ids::SegmentSlot,
    inventory::new_copies::{end_copying, protect_copied},
};

/// How often a task looks for the sign of life that it waits for.
const CONFIRM_PAUSE: Duration = Duration::from_millis(250);

/// Why a move starts again.
const TARGET_LOST: &str = "the process that holds the new replica is lost or leaves";

/// A move whose replicas are written, and whose source is still there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Confirmation {
    /// When the end of the attempt was reported.
    since: Moment,
    /// Bytes that were copied.
    copied: u64,
}

/// What is known of the replicas that replace the source of a move.
enum Replacement {
    /// One of them is in use.
    Confirmed,
    /// The process of one of them has not been heard of yet.
    Unconfirmed,
    Lost,
}

/// Completes a task whose replicas exist. `reporter` is the client that has just reported it.
pub(super) fn confirm_task(
    calls: &mut TaskCalls<'_>,
    now: Moment,
    id: TaskId,
    copied: u64,
    reporter: Option<ClientId>,
) {
    try_to_confirm(calls, now, id, Confirmation { since: now, copied }, reporter);
}

/// Handles the timer of a task that waits for a sign of life.
pub(super) fn check_confirmation(calls: &mut TaskCalls<'_>, now: Moment, id: TaskId) {
    let Some(confirmation) = end_confirmation(calls, id) else { return };
    let Some(task) = calls.tasks.get(id) else { return };
    let slot = task.subject.slot;
    let is_same = calls.subject(task).is_some() && calls.inventory.drop_lost_replicas(slot);
    if is_same {
        try_to_confirm(calls, now, id, confirmation, None);
    } else {
        calls.fail_task(now, id, CHANGED);
    }
    calls.advance_jobs(now);
}

fn try_to_confirm(
    calls: &mut TaskCalls<'_>,
    now: Moment,
    id: TaskId,
    confirmation: Confirmation,
    reporter: Option<ClientId>,
) {
    let Some(task) = calls.tasks.get(id) else { return };
    let Some(object) = calls.subject(task) else { return calls.fail_task(now, id, CHANGED) };
    let (slot, sources) = (task.subject.slot, calls.sources(&task.goal));
    if !object.replicas.iter().any(|copy| sources.contains(&copy.segment)) {
        return calls.finish_task(now, id, Ok(confirmation.copied));
    }
    match replacement(calls, task, object, &sources, confirmation.since, reporter) {
        Replacement::Confirmed => {
            calls.inventory.drop_copies(now, slot, &sources);
            calls.finish_task(now, id, Ok(confirmation.copied));
        }
        Replacement::Unconfirmed => await_confirmation(calls, now, id, confirmation),
        Replacement::Lost => calls.retry_task(now, id, TARGET_LOST),
    }
}

fn replacement(
    calls: &TaskCalls<'_>,
    task: &Task,
    object: &Object,
    sources: &[SegmentSlot],
    since: Moment,
    reporter: Option<ClientId>,
) -> Replacement {
    let segments = calls.inventory.segments();
    let goal = &task.goal;
    let targets: Vec<SegmentSlot> = match goal {
        Goal::Copy { .. } => Vec::new(),
        Goal::Move { target, .. } => segments.named(target).to_vec(),
        Goal::Evacuate { targets, .. } => {
            targets.iter().flat_map(|name| segments.named(name)).copied().collect()
        }
    };
    let is_anywhere = matches!(goal, Goal::Evacuate { targets, .. } if targets.is_empty());
    let mut owners = object
        .replicas
        .iter()
        .filter(|copy| is_anywhere || targets.contains(&copy.segment))
        .filter(|copy| !sources.contains(&copy.segment))
        .map(|copy| segments.at(copy.segment))
        .filter(|segment| segment.may_replace())
        .map(|segment| segment.client)
        .chain(disk_keeper(calls, task))
        .peekable();
    if owners.peek().is_none() {
        return Replacement::Lost;
    }
    let lives = |owner: ClientId| {
        reporter == Some(owner) || calls.inventory.clients().was_heard_after(owner, since)
    };
    if owners.any(lives) { Replacement::Confirmed } else { Replacement::Unconfirmed }
}

/// Lets a task that is in no queue wait. It occupies no place of its drain job meanwhile, and its
/// object is not evicted.
fn await_confirmation(
    calls: &mut TaskCalls<'_>,
    now: Moment,
    id: TaskId,
    confirmation: Confirmation,
) {
    let Some(task) = calls.tasks.get(id) else { return };
    let slot = task.subject.slot;
    // The owner of the target is heard of before then, or has expired.
    let until = confirmation.since + calls.inventory.rules().client_ttl * 2;
    protect_copied(calls.inventory, slot, until);
    calls.tasks.begin_confirmation(id, confirmation);
    calls.set_task_timer(id, now + CONFIRM_PAUSE);
    if let Some(job) = calls.tasks.get(id).and_then(|task| task.job) {
        calls.jobs.count_confirming(job, true);
    }
}

fn end_confirmation(calls: &mut TaskCalls<'_>, id: TaskId) -> Option<Confirmation> {
    let confirmation = calls.tasks.end_confirmation(id)?;
    let task = calls.tasks.get(id)?;
    let (slot, job) = (task.subject.slot, task.job);
    if calls.subject(task).is_some() {
        end_copying(calls.inventory, slot);
    }
    if let Some(job) = job {
        calls.jobs.count_confirming(job, false);
    }
    Some(confirmation)
}
