//! The log of the running master: what is appended is written a little later, and only then the
//! answers that wait for it are sent. The disk may hang, be full or fail.

use std::{ops::Range, time::Duration};

use mooncake_master::{LogSync, Slice, state::Effect};

use crate::{
    audit::disks::counted_copies,
    plan::Bug,
    simulator::{Event, Simulator, trace},
};

/// The pause before a failed log is started anew.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// The first number of a replica that a task makes.
const FIRST_TASK_ORDINAL: u32 = 128;

impl Simulator {
    /// Gives the effects of a slice to the checkers, and has them written. Returns the entries of the
    /// history that they make.
    pub(crate) fn appended<R>(&mut self, slice: Slice<R>) -> Result<(R, Range<usize>), String> {
        let Slice { result, effects, .. } = slice;
        let entries = self.record_effects(&effects)?;
        if !effects.is_empty() {
            self.log_record.append(self.now, effects, self.history.len());
            let pause = self.write_delay();
            self.after(pause, Event::WriteLog);
        }
        if self.host.journal().is_some_and(|journal| journal.take_request()) {
            self.after(Duration::from_micros(50), Event::SyncLog { is_periodic: false });
        }
        Ok((result, entries))
    }

    fn record_effects(&mut self, effects: &[u8]) -> Result<Range<usize>, String> {
        let mut changes = Vec::new();
        let mut applied = Ok(());
        let is_traced = self.plan.is_traced;
        let (mut dropped, mut lost, mut swept) = (Vec::new(), Vec::new(), Vec::new());
        let (mut counted, mut forgotten) = (Vec::new(), Vec::new());
        let decoded = Effect::decode_all(effects, |effect| {
            if is_traced {
                trace(self.now, &effect);
            }
            if applied.is_ok() {
                counted_copies(&self.model, &effect, &mut counted);
                forgotten.extend(self.forgotten_copy(&effect));
                match &effect {
                    Effect::ReplicaDropped { object, ordinal } => {
                        dropped.extend(self.model.replica(object, *ordinal));
                    }
                    Effect::SegmentDropped { number } => {
                        lost.extend(self.model.segment_id(number.0));
                        swept.push(self.model.keys_in(number.0));
                    }
                    _ => {}
                }
                applied = self.model.apply(effect, &mut changes);
            }
        });
        applied?;
        decoded.map_err(|error| format!("cannot decode an effect: {error:?}"))?;
        self.outcome.records_adopted = self.model.adopted;
        self.check_counted(&counted)?;
        self.check_forgotten(&forgotten)?;
        self.check_dropped(&dropped)?;
        swept.iter().for_each(|keys| self.view_soon(keys));
        lost.into_iter().try_for_each(|id| self.check_lost_segment(id))?;
        let entries = self.history.append(changes);
        self.history.check_late_ends(entries.clone())?;
        Ok(entries)
    }

    /// Returns the time from an append until the queue is written: a group commit.
    fn write_delay(&mut self) -> Duration {
        let max = if self.random.happens(self.plan.faults.slow) { 60_000 } else { 2_000 };
        Duration::from_micros(20 + self.random.below(max))
    }

    /// Writes the queue of the log, and sends the answers that waited for it.
    pub(crate) fn write_log(&mut self) -> Result<(), String> {
        if !self.log_hangs_until.has_passed(self.now) {
            let until = self.log_hangs_until;
            self.at(until, Event::WriteLog);
            return Ok(());
        }
        let Some(journal) = self.host.journal() else { return Ok(()) };
        if self.plan.log_sync == LogSync::Always {
            journal.sync_now();
        } else {
            journal.write_only();
        }
        self.log_written()
    }

    /// Syncs the log, unless its disk hangs.
    pub(crate) fn sync_log(&mut self, is_periodic: bool) -> Result<(), String> {
        if is_periodic {
            self.sync_at_interval();
        }
        if !self.log_hangs_until.has_passed(self.now) {
            return Ok(());
        }
        let Some(journal) = self.host.journal() else { return Ok(()) };
        journal.sync_now();
        if journal.is_healthy() {
            self.log_record.synced(self.now);
        }
        self.log_written()
    }

    /// Handles that all appended effects are written, or that the log has failed.
    fn log_written(&mut self) -> Result<(), String> {
        let Some(journal) = self.host.journal() else { return Ok(()) };
        if journal.has_ended() {
            self.end_master();
            return Ok(());
        }
        let next_frame = journal.next_frame();
        let is_healthy = journal.is_healthy();
        let answers = self.waiting.take_durable(|position| journal.is_durable(position));
        if is_healthy {
            self.log_record.written(next_frame);
        } else if self.log_record.fail() {
            self.outcome.log_failures += 1;
            self.after(RESTART_PAUSE, Event::RestartLog);
        }
        self.outcome.waits += answers.len() as u64;
        for (call, answer) in answers {
            self.send_reply(&call, answer);
        }
        Ok(())
    }

    /// Ends the master because its log failed. It answers no call, and its files stay.
    fn end_master(&mut self) {
        self.outcome.endings += 1;
        if self.host.disk.takes_bytes()
            && let Some(journal) = self.host.journal()
        {
            // What could not be synced is written.
            self.log_record.written(journal.next_frame());
        }
        self.stop_master();
    }

    /// Starts the log anew after a failure, with a snapshot and on another timeline.
    pub(crate) fn restart_log(&mut self) -> Result<(), String> {
        let is_healthy = self.host.journal().is_none_or(|journal| journal.is_healthy());
        if is_healthy || self.host.is_snapshotting() {
            return Ok(());
        }
        let first = self.log_record.len();
        match self.host.snapshot(self.now, true) {
            // The disk takes nothing yet.
            Err(_) => self.after(RESTART_PAUSE, Event::RestartLog),
            Ok(_) => {
                self.log_record.begin_anew(first);
                self.after(Duration::from_micros(100), Event::Snapshot);
            }
        }
        Ok(())
    }

    /// Starts a snapshot or continues it.
    pub(crate) fn snapshot(&mut self) -> Result<(), String> {
        if !self.log_hangs_until.has_passed(self.now) {
            let until = self.log_hangs_until;
            self.at(until, Event::Snapshot);
            return Ok(());
        }
        let was_healthy = self.host.journal().is_none_or(|journal| journal.is_healthy());
        let is_under_way = self.host.is_snapshotting();
        if !was_healthy && !is_under_way {
            return Ok(());
        }
        let outcome = self.host.snapshot(self.now, false);
        self.log_written()?;
        match outcome {
            Ok(true) if !was_healthy => {
                self.outcome.log_restarts += 1;
                self.log_record.restarted(self.host.journal().map_or(0, |log| log.next_frame()));
            }
            Ok(true) => {}
            Ok(false) => {
                let pause = Duration::from_micros(self.random.below(5000));
                self.after(pause, Event::Snapshot);
            }
            // The log goes on without it, or has failed.
            Err(_) if self.plan.faults.disk_failure > 0 => {
                self.after(RESTART_PAUSE, Event::RestartLog);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Keeps an effect for the replay of a master that starts, unless a planted bug loses it.
    pub(crate) fn keep_effect(bug: Option<Bug>, effect: Effect<'_>, kept: &mut Vec<u8>) {
        match (bug, effect) {
            (Some(Bug::ForgetsFences), Effect::MaxGranted { .. })
            | (Some(Bug::ForgetsTasks), Effect::Task { .. }) => {}
            (Some(Bug::ReusesReplicaNumbers), Effect::ReplicaAdded { object, mut copy }) => {
                copy.ordinal = reused(copy.ordinal);
                Effect::ReplicaAdded { object, copy }.encode(kept);
            }
            (Some(Bug::ReusesReplicaNumbers), Effect::ReplicaDropped { object, ordinal }) => {
                let ordinal = reused(ordinal);
                Effect::ReplicaDropped { object, ordinal }.encode(kept);
            }
            (_, effect) => effect.encode(kept),
        }
    }
}

/// Returns the number of a replica as if numbers were few.
fn reused(ordinal: u32) -> u32 {
    match ordinal {
        0..FIRST_TASK_ORDINAL => ordinal,
        _ => FIRST_TASK_ORDINAL + ordinal % 2,
    }
}
