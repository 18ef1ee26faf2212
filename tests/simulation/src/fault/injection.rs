//! Injects faults: crashes, hanging disks, suspended hosts, broken connections, and their repair.

use std::time::Duration;

use mooncake_master::LogSync;

use crate::{
    actor::task::AcceptedTasks,
    host::disk::DiskFailure,
    plan::DiskFaults,
    simulator::{Event, Simulator},
};

/// The replicas of tasks after which their numbers start again: all numbers of 32 bits but those of
/// puts.
const REPLICA_NUMBERS: u32 = u32::MAX - 127;

impl Simulator {
    /// Injects the faults of a second.
    pub(crate) fn inject_faults(&mut self) {
        let faults = self.plan.faults.clone();
        if self.host.is_running() && self.random.happens(faults.master_crash) {
            self.crash_master();
        }
        if self.random.happens(faults.master_stall) {
            self.stalled_until = self.now + Duration::from_millis(self.random.below(12_000));
            self.impair_all(self.stalled_until);
        }
        if self.random.happens(faults.snapshot) && !self.host.is_snapshotting() {
            self.outcome.snapshots += 1;
            self.after(Duration::ZERO, Event::Snapshot);
        }
        if self.random.happens(faults.clock_jump) {
            let jumped = Duration::from_secs(1_700_000_000 + self.random.below(20));
            self.host.set_wall_clock(jumped);
        }
        if self.random.happens(faults.wrap) {
            self.outcome.wraps += 1;
            let made = REPLICA_NUMBERS - self.random.below(6) as u32;
            self.host.run(|state| state.tasks().skip_replica_ordinals(made));
        }
        self.inject_disk_faults();
        let processes: Vec<u64> = self.processes.keys().copied().collect();
        for process in processes {
            self.inject_client_faults(process);
        }
    }

    fn inject_disk_faults(&mut self) {
        let faults = self.plan.faults.clone();
        if self.random.happens(faults.log_hang) {
            self.outcome.hangs += 1;
            let length = self.random.between(50, faults.log_hang_max.as_millis() as u64);
            self.log_hangs_until = self.now + Duration::from_millis(length);
            // Some masters are killed because their log hangs.
            if self.random.happens(400) {
                let pause = Duration::from_millis(self.random.below(length + 100));
                self.after(pause, Event::KillMaster);
            }
        }
        if self.random.happens(faults.disk_failure) {
            let kinds = [
                DiskFailure::Full,
                DiskFailure::Broken,
                DiskFailure::Stuck,
                DiskFailure::Undeletable,
                DiskFailure::ReadOnly,
            ];
            self.host.disk.set_failure(self.random.pick(&kinds).copied());
        } else if self.random.happens(500) {
            self.host.disk.set_failure(None);
        }
    }

    fn inject_client_faults(&mut self, process: u64) {
        let faults = self.plan.faults.clone();
        if self.random.happens(faults.client_crash) {
            self.kill_process(process);
            return;
        }
        self.inject_directory_faults(process);
        let time = self.now + Duration::from_millis(self.random.below(10_000));
        let is_suspended = self.random.happens(faults.suspend);
        let stalls = self.random.happens(faults.client_stall) || is_suspended;
        let is_partitioned = self.random.happens(faults.partition);
        let remounts = self.random.happens(faults.remount);
        if let Some(found) = self.processes.get_mut(&process) {
            if stalls && found.stalled_until.has_passed(self.now) {
                found.stalled_until = time;
            }
            found.partitioned_until = if is_partitioned { time } else { found.partitioned_until };
        }
        if stalls || is_partitioned {
            self.impair(process, time + self.plan.call_timeout);
        }
        // A suspended host answers nothing: its connections time out.
        if is_suspended || self.random.happens(faults.disconnect) {
            self.outcome.suspensions += u64::from(is_suspended);
            let is_dead = !is_suspended && self.random.happens(500);
            self.after(Duration::from_millis(1), Event::Disconnected { process, is_dead });
        }
        if remounts {
            // The operation only sends a call here, which cannot violate an invariant.
            let _ = self.start_remount(process);
        }
    }

    /// Ends all faults and starts no new operations.
    pub(crate) fn stop_faults(&mut self) {
        self.is_quiet = true;
        self.plan.faults = self.plan.faults.ended();
        if let Some(disks) = &mut self.plan.disks {
            disks.faults = DiskFaults::default();
        }
        let directories = self.directories.iter_mut();
        directories.for_each(|directory| directory.full_until = self.now);
        self.host.disk.set_failure(None);
        (self.stalled_until, self.log_hangs_until) = (self.now, self.now);
        for process in self.processes.values_mut() {
            (process.stalled_until, process.partitioned_until) = (self.now, self.now);
        }
    }

    fn impair_all(&mut self, until: mooncake_base::Moment) {
        for process in self.processes.values_mut() {
            process.impaired_until = process.impaired_until.max(until);
        }
    }

    /// Kills the master, before or after the queue of its log is written.
    pub(crate) fn crash_master(&mut self) {
        if self.random.happens(300)
            && self.log_hangs_until.has_passed(self.now)
            && let Some(journal) = self.host.journal()
        {
            journal.write_only();
            // After the end of a log its files hold all that was acknowledged.
            if journal.is_healthy() {
                self.log_record.written(journal.next_frame());
            } else if !journal.has_ended() {
                self.log_record.fail();
            }
        }
        self.stop_master();
    }

    /// Stops the master, perhaps with its machine, and starts it again later.
    pub(crate) fn stop_master(&mut self) {
        self.host.kill();
        self.waiting.clear();
        self.log_record.crash(self.now, false);
        if self.log_record.is_failed() {
            // The files that are left are void.
            if self.random.happens(self.plan.faults.power_loss) {
                self.host.lose_power(&mut self.random);
            }
            self.forget_log();
        } else if self.random.happens(self.plan.faults.wipe) {
            self.host.disk.wipe();
            self.forget_log();
        } else if self.random.happens(self.plan.faults.power_loss) {
            self.lose_power();
        }
        let down_max = self.plan.faults.down_max.as_millis() as u64;
        let pause = Duration::from_millis(self.random.below(down_max));
        self.impair_all(self.now + pause + self.plan.call_timeout);
        self.after(pause, Event::StartMaster);
    }

    /// Crashes the machine of the master. Clients are on other hosts and go on.
    fn lose_power(&mut self) {
        self.outcome.power_losses += 1;
        self.is_log_damaged =
            self.random.happens(self.plan.faults.damage) && self.host.disk.damage_older_log();
        self.host.lose_power(&mut self.random);
        self.log_record.crash(self.now, true);
        if self.plan.log_sync == LogSync::Never {
            self.forget_log();
        }
    }

    /// Takes all values for lost, with the log.
    fn forget_log(&mut self) {
        let mut changes = Vec::new();
        self.model.clear(&mut changes);
        self.history.append(changes);
        self.log_record.clear();
        self.accepted = AcceptedTasks::default();
    }

    pub(crate) fn start_master(&mut self) -> Result<(), String> {
        if self.host.is_running() {
            return Ok(());
        }
        // A master does not start while its disk takes nothing.
        self.host.disk.set_failure(None);
        self.outcome.restarts += 1;
        let seed = self.random.next();
        let bug = self.plan.bug;
        let mut started =
            self.host.restart(self.now, seed, |effect, kept| Self::keep_effect(bug, effect, kept));
        if started.is_err() && std::mem::take(&mut self.is_log_damaged) {
            // The master refuses a damaged log, and the operator removes it.
            self.host.disk.wipe();
            self.forget_log();
            started = self.host.restart(self.now, seed, |effect, kept| {
                Self::keep_effect(bug, effect, kept);
            });
        }
        self.is_log_damaged = false;
        self.executed.restart();
        self.records.restart();
        self.check_recovered(started?)?;
        self.impair_all(self.now + self.plan.call_timeout);
        if self.log_record.len() == 1 {
            // Operators set quotas again after the log was lost.
            self.set_quotas()?;
        }
        let Some(slice) = self.host.run(|_| ()) else { return Ok(()) };
        self.appended(slice).map(drop)
    }

    /// Kills a process. Its kernel closes its connections.
    pub(crate) fn kill_process(&mut self, process: u64) {
        self.outcome.client_deaths += 1;
        self.processes.remove(&process);
        self.memories.remove_all(process);
        self.abandon_directory(process);
        self.after(Duration::from_millis(1), Event::Disconnected { process, is_dead: true });
        let pause = Duration::from_millis(self.random.below(3000));
        self.after(pause, Event::StartProcess);
    }

    /// Kills the process of one of these endpoints now and then, and lets the master notice it.
    pub(crate) fn kill_target(&mut self, endpoints: &[u64], own: u64) {
        if !self.random.happens(self.plan.faults.target_crash) {
            return;
        }
        let Some(&target) = self.random.pick(endpoints) else { return };
        if target != own && self.processes.contains_key(&target) {
            self.kill_process(target);
        }
    }
}
