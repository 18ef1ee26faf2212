//! Log records of all tasks and drain jobs: written for a snapshot, restored at a start.

use std::collections::BTreeMap;

use mooncake_base::{JobId, Moment, TaskId};

use crate::state::{
    calls::task::{TaskCalls, Tasks, drain::Jobs},
    catalog::object::Objects,
    ledger::{
        effect::{Effect, reader::Reader, writer::Writer},
        task_record::{ALL, RecordKind},
    },
};

/// The result of restoring the records.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::state) struct RestoredRecords {
    /// Number of unfinished tasks.
    pub(in crate::state) tasks: u64,
    /// Number of unfinished jobs.
    pub(in crate::state) jobs: u64,
    /// Number of records that cannot be decoded.
    pub(in crate::state) damaged: u64,
}

impl TaskCalls<'_> {
    /// Restores tasks and jobs, after everything else has been restored.
    pub(in crate::state) fn restore_records(
        &mut self,
        now: Moment,
        records: BTreeMap<u128, Box<[u8]>>,
        ordinal: u32,
    ) -> RestoredRecords {
        self.tasks.resume_ordinals(ordinal);
        let mut restored = RestoredRecords::default();
        let (mut tasks, mut jobs) = (Vec::new(), Vec::new());
        for (id, record) in records {
            let input = &mut Reader::new(&record);
            let is_read = match input.byte().and_then(RecordKind::from_code) {
                Some(RecordKind::Task) => self
                    .read_task(now, input)
                    .map(|task| tasks.push((TaskId::from_bits(id), task)))
                    .is_some(),
                Some(RecordKind::Job) => {
                    let id = JobId::from_bits(id);
                    self.read_job(now, id, input).map(|job| jobs.push((id, job))).is_some()
                }
                None => false,
            };
            if !is_read {
                restored.damaged += 1;
                self.inventory.record(|| Effect::Task { id, record: None });
            }
        }
        restored.tasks = self.restore_tasks(now, tasks);
        restored.jobs = self.restore_jobs(now, jobs);
        restored
    }
}

/// Appends every record.
pub(in crate::state) fn append_records(
    tasks: &Tasks,
    jobs: &Jobs,
    objects: &Objects,
    into: &mut Vec<u8>,
) {
    let mut ordinal = Vec::new();
    Writer(&mut ordinal).int(u64::from(tasks.next_ordinal()));
    Effect::Task { id: ALL, record: Some(&ordinal) }.encode(into);
    for (id, task) in tasks.requested() {
        let record = task.record(objects);
        Effect::Task { id: id.bits(), record: Some(&record) }.encode(into);
    }
    for (id, job) in jobs.all() {
        Effect::Task { id: id.bits(), record: Some(&job.record()) }.encode(into);
    }
}
