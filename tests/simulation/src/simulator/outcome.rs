//! What a run has done, or the invariant that it has violated.

use std::fmt;

/// Declares counters with their sum.
macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of what happened in a run without a violation.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Outcome {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Outcome {
            /// Adds the counts of another run.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// Returns 1 for each count that is not 0, so that sums say how many runs have it.
            #[must_use]
            pub fn seen(&self) -> Self {
                Self { $($name: self.$name.min(1),)* }
            }
        }
    };
}

counts! {
    /// Acknowledged puts.
    puts,
    /// Puts of other clients that were reported as existing values.
    existed,
    /// Reads whose bytes were accepted and checked.
    gets,
    /// Reads, accepted or discarded, that outlasted their fence and had to be verified.
    late_reads,
    /// Acknowledged removals.
    removals,
    /// Descriptions, lists and admin pages.
    views,
    /// Descriptions of objects of which a segment had left the pool.
    views_in_sweep,
    /// Lists and admin pages that were made while the objects of a segment were swept.
    lists_in_sweep,
    /// Calls that started several puts.
    batches,
    /// Calls that renewed write windows.
    window_renewals,
    /// Repeated calls that got the answer to their first execution.
    repetitions,
    /// Answers that waited for the log while other calls ran.
    waits,
    /// Calls that were executed in more than one slice.
    sliced,
    /// Calls that waited for other large calls.
    queued,
    /// Calls that waited for a connection of their client.
    starved,
    /// Times in which the log took no write.
    hangs,
    /// Failures of the log, after which it was restarted on another timeline.
    log_failures,
    /// Masters that ended because their log failed.
    endings,
    /// Restarts of the log without a restart of the master.
    log_restarts,
    /// Restarts of the master.
    restarts,
    /// Crashes of the master's machine.
    power_losses,
    /// Changes that were lost with the unsynced end of the log.
    undone,
    /// Killed clients.
    client_deaths,
    /// Clients that the master took for dead.
    expired,
    /// Hosts that were suspended.
    suspensions,
    /// Segments replaced by new memory because the master did not know them.
    renewals,
    /// Segments that were unmounted with a grace.
    graces,
    /// Started snapshots.
    snapshots,
    /// Pieces of writes that reached memory after their writer had given them up.
    late_pieces,
    /// Pieces that waited for a process that was stopped.
    stopped_pieces,
    /// Holders that were silent and taken back by the put.
    readmissions,
    /// Advances of the numbers of replicas to the end of their range.
    wraps,
    /// Objects that expired or were evicted ahead of need.
    faded,
    /// Copies of objects read in the audit.
    audited,
    /// Copy and move tasks that the master accepted.
    tasks,
    /// Drain jobs that the master accepted.
    drains,
    /// Attempts of tasks whose end was acknowledged.
    task_attempts,
    /// Tasks that succeeded.
    succeeded,
    /// Drain jobs that succeeded.
    drained,
    /// Mounts of directories.
    disk_mounts,
    /// Mounts of directories that the master refused.
    mounts_refused,
    /// Directories that left the pool before their process ended.
    disks_left,
    /// Directories that were copied.
    disks_copied,
    /// Losses of power of hosts with directories.
    disk_power_losses,
    /// Damaged records that were found when a directory was opened.
    torn_records,
    /// Objects that directories took over.
    handed_over,
    /// Objects that were read too late to be written.
    late_hand_overs,
    /// Records that counted when they were reported.
    offloaded,
    /// Times that a put waited until disks had taken objects over.
    waits_for_disks,
    /// Records that could not be written.
    records_refused,
    /// Records that went for others.
    records_evicted,
    /// Records that were removed because nobody would ask for them.
    stale_records,
    /// Records that became objects again after the log was lost.
    records_adopted,
    /// Reads whose bytes came from a directory.
    disk_gets,
    /// Reads of records that were gone.
    disk_misses,
    /// Records that were read in the audit.
    audited_records,
    /// Handled events.
    steps,
}

/// A violated invariant, and the seed and step that reproduce it.
#[derive(Debug, Clone)]
pub struct Violation {
    /// The seed of the run.
    pub seed: u64,
    /// The number of events handled before.
    pub step: u64,
    /// The violated invariant, or the message of a panic.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, step {}: {}", self.seed, self.step, self.message)
    }
}
