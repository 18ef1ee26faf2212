//! Planted bugs: defects of the program that the checkers must find, and the conditions that reveal
//! each of them.

use std::time::Duration;

use mooncake_master::LogSync;

use crate::plan::Plan;

/// A planted bug: a defect of the program that the checkers must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// The master replies before the change is in the log.
    RepliesBeforeLog,
    /// A restarted master forgets how long its predecessor's fences last.
    ForgetsFences,
    /// The memory of a vanished writer is reused while the writer may still write.
    FreesTooEarly,
    /// A reader whose fence expired does not verify its copy.
    TrustsLateReads,
    /// A reader counts its fence from the answer of the master, not from its request.
    CountsFencesFromAnswer,
    /// A reader hands its fence back when it begins to read.
    ReleasesFencesEarly,
    /// A client that registers again does not announce its segments.
    ForgetsToReannounce,
    /// A client does not correct the master's list of its segments after an unanswered call.
    ForgetsFailedMounts,
    /// A client whose segment the master does not know mounts the same memory again.
    RemountsUsedMemory,
    /// A writer continues after its write window.
    WritesTooLate,
    /// A task runner continues after its write window.
    CopiesTooLate,
    /// A restarted master forgets the tasks and drains of its predecessor.
    ForgetsTasks,
    /// A restarted master does not sync what its predecessor wrote.
    ForgetsToSyncOldLogs,
    /// After a loss of power, a damaged log is cut off with all later ones.
    CutsLaterLogs,
    /// After a loss of power, a log that was never synced is used.
    TrustsUnsyncedLog,
    /// Freed memory is reused before the record of its release is on disk.
    ReusesUnsyncedMemory,
    /// A client forgets the puts that it gave up, and takes its own unfinished put for an object.
    ForgetsUnconfirmedPuts,
    /// A client ends the puts that it gave up, instead of revoking them, and only in the background.
    EndsLatePuts,
    /// A client sends a removal or a request again without a number by which the master knows it.
    RepeatsUnnumberedCalls,
    /// The master answers a repeated start of a put before the first one is in the log.
    AnswersRepeatedStartEarly,
    /// The master answers a repeated end of a put before the first one is in the log.
    AnswersRepeatedEndEarly,
    /// The master reports that a value exists before it is in the log.
    ReportsExistingEarly,
    /// Heartbeats wait for the same connections as calls that get no answer.
    HeartbeatsShareConnections,
    /// The master completes a move whose new copy cannot be read.
    DropsLastReadableCopy,
    /// A later replica of an object has the number of an earlier one, when the numbers start again.
    ReusesReplicaNumbers,
    /// A put does not say which replicas earlier pieces may still reach.
    ForgetsLatePieces,
    /// The master forgets that the holder or the writer of late bytes may be stopped.
    IgnoresStops,
    /// The master panics when it describes an object of a segment that has left the pool.
    PanicsInViews,
    /// The master panics when it lists objects or counts memory while a segment is swept.
    PanicsInLists,
    /// The answer to several puts waits only for what the log has of the first ones.
    AnswersBatchesEarly,
    /// The master answers a renewal of a write window and counts the old window.
    ForgetsRenewals,
    /// A writer whose write window is not renewed goes on as if it were.
    GoesOnUnrenewed,
    /// The master counts a record whose object was replaced since it was handed over.
    CountsLateOffloads,
    /// A master that has lost its log makes objects of records, though it was not told to.
    AdoptsRecords,
    /// The owner of a directory reads objects that it takes over also after their fence.
    IgnoresHandOverFences,
    /// The owner of a directory does not compare the checksums of records, also after a loss of power.
    TrustsUnsyncedRecords,
    /// The master lets a second process mount a directory, or a copy of it, that another one has open.
    AcceptsCopiedDirectories,
    /// The master sends readers to a directory that has left the pool.
    TellsOfAwayDisks,
    /// The master counts a copy on disk once its owner takes the object over.
    CountsUnreportedRecords,
    /// The owner of a directory sends its reports without numbers, so that they count again when they
    /// arrive once more, after later ones.
    ReportsUnnumbered,
    /// The owner of a directory reports objects that it could not read or write, so that the memory of
    /// objects that move down is given away.
    ReportsUnwritten,
}

impl Bug {
    /// All planted bugs, with their names on the command line.
    pub const ALL: [(&str, Self); 41] = [
        ("replies-before-log", Self::RepliesBeforeLog),
        ("forgets-fences", Self::ForgetsFences),
        ("frees-too-early", Self::FreesTooEarly),
        ("trusts-late-reads", Self::TrustsLateReads),
        ("counts-fences-from-answer", Self::CountsFencesFromAnswer),
        ("releases-fences-early", Self::ReleasesFencesEarly),
        ("forgets-to-reannounce", Self::ForgetsToReannounce),
        ("forgets-failed-mounts", Self::ForgetsFailedMounts),
        ("remounts-used-memory", Self::RemountsUsedMemory),
        ("writes-too-late", Self::WritesTooLate),
        ("copies-too-late", Self::CopiesTooLate),
        ("forgets-tasks", Self::ForgetsTasks),
        ("forgets-to-sync-old-logs", Self::ForgetsToSyncOldLogs),
        ("cuts-later-logs", Self::CutsLaterLogs),
        ("trusts-unsynced-log", Self::TrustsUnsyncedLog),
        ("reuses-unsynced-memory", Self::ReusesUnsyncedMemory),
        ("forgets-unconfirmed-puts", Self::ForgetsUnconfirmedPuts),
        ("ends-late-puts", Self::EndsLatePuts),
        ("repeats-unnumbered-calls", Self::RepeatsUnnumberedCalls),
        ("answers-repeated-start-early", Self::AnswersRepeatedStartEarly),
        ("answers-repeated-end-early", Self::AnswersRepeatedEndEarly),
        ("reports-existing-early", Self::ReportsExistingEarly),
        ("heartbeats-share-connections", Self::HeartbeatsShareConnections),
        ("drops-last-readable-copy", Self::DropsLastReadableCopy),
        ("reuses-replica-numbers", Self::ReusesReplicaNumbers),
        ("forgets-late-pieces", Self::ForgetsLatePieces),
        ("ignores-stops", Self::IgnoresStops),
        ("panics-in-views", Self::PanicsInViews),
        ("panics-in-lists", Self::PanicsInLists),
        ("answers-batches-early", Self::AnswersBatchesEarly),
        ("forgets-renewals", Self::ForgetsRenewals),
        ("goes-on-unrenewed", Self::GoesOnUnrenewed),
        ("counts-late-offloads", Self::CountsLateOffloads),
        ("adopts-records", Self::AdoptsRecords),
        ("ignores-hand-over-fences", Self::IgnoresHandOverFences),
        ("trusts-unsynced-records", Self::TrustsUnsyncedRecords),
        ("accepts-copied-directories", Self::AcceptsCopiedDirectories),
        ("tells-of-away-disks", Self::TellsOfAwayDisks),
        ("counts-unreported-records", Self::CountsUnreportedRecords),
        ("reports-unnumbered", Self::ReportsUnnumbered),
        ("reports-unwritten", Self::ReportsUnwritten),
    ];

    /// Returns whether the bug shows only where clients have directories of records.
    fn is_about_disks(self) -> bool {
        matches!(
            self,
            Self::AcceptsCopiedDirectories
                | Self::AdoptsRecords
                | Self::CountsLateOffloads
                | Self::CountsUnreportedRecords
                | Self::IgnoresHandOverFences
                | Self::ReportsUnnumbered
                | Self::ReportsUnwritten
                | Self::TellsOfAwayDisks
                | Self::TrustsUnsyncedRecords
        )
    }
}

impl Plan {
    /// Plants a bug, and makes the conditions that reveal it more likely.
    pub fn with_bug(mut self, bug: Bug) -> Self {
        self = if bug.is_about_disks() {
            self.with_directories()
        } else {
            Self { is_traced: self.is_traced, ..Self::without_disks(self.seed) }
        };
        self.bug = Some(bug);
        self.reveal_bug_of_master(bug);
        self.reveal_bug_of_client(bug);
        self.reveal_bug_of_disks(bug);
        self
    }

    /// Lets the log hang while many puts of several objects are answered.
    fn reveal_early_batches(&mut self) {
        let faults = &mut self.faults;
        (faults.log_hang, faults.log_hang_max) = (300, Duration::from_secs(4));
        (faults.wipe, faults.power_loss, faults.disk_failure) = (0, 0, 0);
        (self.keys, self.workers, self.tenants) = (12, 4, 1);
        self.batches = 700;
    }

    fn reveal_bug_of_master(&mut self, bug: Bug) {
        match bug {
            Bug::FreesTooEarly => {
                self.rules.put_discard = Duration::from_millis(20);
                self.rules.put_release = Duration::from_millis(30);
            }
            Bug::ForgetsFences => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.down_max) = (400, Duration::from_millis(1));
                (faults.slow, faults.slow_max) = (500, Duration::from_millis(150));
                (faults.wipe, faults.lost) = (0, 0);
                self.rules.lease_ttl = Duration::from_millis(1);
                self.rules.client_ttl = Duration::from_millis(300);
                (self.keys, self.workers) = (2, 4);
            }
            Bug::ForgetsToSyncOldLogs | Bug::CutsLaterLogs | Bug::TrustsUnsyncedLog => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.power_loss) = (400, 500);
                (faults.wipe, faults.down_max) = (0, Duration::from_millis(50));
                faults.damage = if bug == Bug::CutsLaterLogs { 500 } else { 0 };
                self.log_sync = match bug {
                    Bug::TrustsUnsyncedLog => LogSync::Never,
                    _ => LogSync::Always,
                };
            }
            Bug::RepliesBeforeLog
            | Bug::AnswersRepeatedStartEarly
            | Bug::AnswersRepeatedEndEarly
            | Bug::ReportsExistingEarly => {
                let faults = &mut self.faults;
                (faults.log_hang, faults.log_hang_max) = (300, Duration::from_secs(4));
                (faults.wipe, faults.power_loss, faults.disk_failure) = (0, 0, 0);
                (self.keys, self.workers) = (4, 4);
            }
            Bug::AnswersBatchesEarly => self.reveal_early_batches(),
            Bug::HeartbeatsShareConnections => {
                let faults = &mut self.faults;
                (faults.log_hang, faults.log_hang_max) = (200, Duration::from_secs(9));
                (self.connections, self.workers) = (2, 4);
                self.call_timeout = Duration::from_secs(5);
            }
            Bug::DropsLastReadableCopy => {
                (self.faults.target_crash, self.task_requests) = (300, 300);
            }
            Bug::ReusesReplicaNumbers => {
                (self.faults.master_crash, self.task_requests) = (200, 300);
                self.faults.wipe = 0;
            }
            Bug::IgnoresStops => {
                let faults = &mut self.faults;
                (faults.client_stall, faults.client_crash) = (300, 0);
                (faults.master_crash, faults.master_stall, faults.lost) = (0, 0, 0);
                self.rules.client_ttl = Duration::from_secs(8);
                self.rules.write_window = Duration::from_millis(300);
                self.rules.put_release = Duration::from_secs(12);
                self.rules.stop_max = Duration::ZERO;
                self.active = Duration::from_secs(7);
                (self.keys, self.workers) = (24, 4);
                self.segment_words = self.object_words * 3;
            }
            Bug::ReusesUnsyncedMemory => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.power_loss) = (300, 800);
                (faults.wipe, faults.damage, faults.lost) = (0, 0, 0);
                faults.down_max = Duration::from_millis(50);
                self.log_sync = LogSync::Interval(Duration::from_millis(1500));
                self.segment_words = self.object_words * 3;
                (self.keys, self.workers) = (24, 4);
            }
            _ => {}
        }
    }

    fn reveal_bug_of_client(&mut self, bug: Bug) {
        match bug {
            Bug::RemountsUsedMemory => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.wipe) = (400, 1000);
                (faults.down_max, faults.lost) = (Duration::from_millis(1), 0);
                (faults.slow, faults.slow_max) = (500, Duration::from_millis(400));
                (self.keys, self.workers) = (2, 4);
                (self.object_words, self.segment_words) = (64, 256);
            }
            Bug::CountsFencesFromAnswer | Bug::ReleasesFencesEarly => {
                let slow_max = if bug == Bug::ReleasesFencesEarly { 200 } else { 500 };
                (self.faults.slow, self.faults.slow_max) = (300, Duration::from_millis(slow_max));
                (self.faults.master_crash, self.faults.lost) = (0, 0);
                self.rules.lease_ttl = Duration::from_millis(1);
                (self.keys, self.workers, self.segment_words) = (4, 4, self.object_words * 3);
            }
            Bug::ForgetsLatePieces => {
                (self.faults.slow, self.faults.slow_max) = (300, Duration::from_secs(4));
                (self.faults.master_crash, self.faults.client_crash) = (0, 0);
                (self.keys, self.workers) = (24, 4);
                self.segment_words = self.object_words * 3;
            }
            Bug::ForgetsRenewals | Bug::GoesOnUnrenewed => {
                // Puts that take several windows, in little memory.
                let faults = &mut self.faults;
                (faults.master_crash, faults.client_crash, faults.wipe) = (0, 0, 0);
                faults.partition = if bug == Bug::GoesOnUnrenewed { 200 } else { 0 };
                self.rules.client_ttl = Duration::from_secs(1);
                self.rules.stop_max = self.rules.client_ttl;
                self.rules.write_window = Duration::from_secs(1);
                self.rules.put_discard = Duration::from_millis(3100);
                self.rules.put_release = Duration::from_millis(4100);
                (self.keys, self.workers, self.puts) = (24, 4, 700);
                (self.slow_puts, self.batches) = (500, 300);
                (self.object_words, self.segment_words) = (200, 1600);
            }
            Bug::WritesTooLate => self.faults.client_stall = 300,
            Bug::ForgetsUnconfirmedPuts | Bug::EndsLatePuts => {
                (self.faults.cut, self.faults.partition) = (700, 200);
                (self.faults.client_crash, self.faults.wipe) = (0, 0);
                (self.keys, self.workers) = (2, 4);
            }
            Bug::RepeatsUnnumberedCalls => {
                (self.faults.cut, self.keys, self.workers) = (500, 2, 4);
            }
            Bug::CopiesTooLate => {
                (self.faults.client_stall, self.faults.client_crash) = (100, 0);
                (self.faults.wipe, self.faults.lost) = (0, 0);
                (self.faults.slow, self.faults.slow_max) = (300, Duration::from_millis(200));
                self.rules.write_window = Duration::from_millis(300);
                (self.keys, self.workers, self.task_requests) = (12, 4, 200);
                (self.object_words, self.segment_words) = (64, 256);
                self.active = Duration::from_secs(30);
            }
            Bug::ForgetsFailedMounts => {
                let faults = &mut self.faults;
                (faults.remount, faults.cut, faults.partition) = (600, 700, 200);
                (faults.client_crash, faults.master_crash, faults.master_stall) = (0, 0, 0);
            }
            _ => {}
        }
    }

    fn reveal_bug_of_disks(&mut self, bug: Bug) {
        if !bug.is_about_disks() {
            return;
        }
        let Some(disks) = &mut self.disks else { return };
        if let Some(rules) = &mut self.rules.offload {
            rules.adopts_records = false;
        }
        match bug {
            Bug::AdoptsRecords => (self.faults.master_crash, self.faults.wipe) = (200, 1000),
            Bug::IgnoresHandOverFences => {
                (self.faults.client_stall, self.faults.client_crash) = (300, 0);
                (self.faults.master_crash, self.faults.lost) = (0, 0);
                (self.faults.slow, self.faults.slow_max) = (150, Duration::from_secs(6));
                (disks.owners, disks.faults.leave, disks.faults.crash) = (1000, 0, 0);
                (self.keys, self.workers, self.puts) = (24, 4, 800);
                (self.object_words, self.segment_words) = (48, 48 * 3);
                (disks.extent_words, disks.capacity) = (48 * 4, 48 * 16);
            }
            Bug::TrustsUnsyncedRecords => {
                (disks.faults.crash, disks.faults.power_loss) = (150, 1000)
            }
            Bug::ReportsUnnumbered => {
                let faults = &mut self.faults;
                (faults.duplicated, faults.slow) = (300, 200);
                (faults.slow_max, faults.client_crash) = (Duration::from_secs(8), 0);
                (disks.owners, disks.faults.leave) = (1000, 0);
            }
            Bug::ReportsUnwritten => {
                (disks.owners, disks.faults.full) = (1000, 300);
                if let Some(rules) = &mut self.rules.offload {
                    (rules.is_on_eviction, rules.drops_when_full) = (true, false);
                }
            }
            Bug::AcceptsCopiedDirectories => disks.faults.copy = 500,
            Bug::TellsOfAwayDisks => disks.faults.leave = 200,
            _ => {}
        }
    }
}
