//! Log records of tasks and drain jobs, one per id, with their own encoding.
//!
//! The record of a finished task or job is complete. The record of an unfinished one has what a
//! restarted master needs to start it again: an attempt dies with the master, and the space it
//! wrote to is quarantined. Tasks of a drain have no records, since the job finds their objects
//! again.

use crate::state::{
    catalog::object::Objects,
    log::effect::{
        Effect,
        codec::{Reader, Writer},
    },
    task::{TaskCalls, Tasks, drain::Jobs},
};
use std::collections::BTreeMap;

use mooncake_base::{JobId, Moment, TaskId};

/// The id of the record about all tasks.
const ALL: u128 = 0;

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

/// The kind of a record, stored in its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum Kind {
    /// A copy or a move created by a caller.
    Task,
    /// A drain job.
    Job,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Task => 1,
            Self::Job => 2,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::Task, Self::Job].into_iter().find(|kind| kind.code() == code)
    }

    /// Starts a record of this kind.
    pub(in crate::state) fn begin(self) -> Vec<u8> {
        vec![self.code()]
    }
}

/// Encodes a moment. The value is meaningless after a reboot.
pub(in crate::state) fn write_moment(out: &mut Writer<'_>, moment: Moment) {
    out.time(moment.since_boot());
}

/// Decodes a moment, limited to the present.
pub(in crate::state) fn read_moment(input: &mut Reader<'_>, now: Moment) -> Option<Moment> {
    Some(now.min(Moment::from_boot(input.time()?)))
}

/// Encodes a list of strings: their number, then each of them.
pub(in crate::state) fn write_texts(out: &mut Writer<'_>, texts: &[impl AsRef<str>]) {
    out.int(texts.len() as u64);
    for text in texts {
        out.text(text.as_ref());
    }
}

/// Decodes a list of strings.
pub(in crate::state) fn read_texts<T: for<'a> From<&'a str>>(
    input: &mut Reader<'_>,
) -> Option<Vec<T>> {
    let count = input.int()?;
    // A damaged count ends at the end of the bytes.
    (0..count).map(|_| input.text().map(T::from)).collect()
}

/// Decodes the ordinal of the next replica, if the record contains it.
pub(in crate::state) fn next_ordinal(id: u128, record: Option<&[u8]>) -> Option<u32> {
    (id == ALL).then(|| u32::try_from(Reader::new(record?).int()?).ok())?
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
            let is_read = match input.byte().and_then(Kind::from_code) {
                Some(Kind::Task) => self
                    .read_task(now, input)
                    .map(|task| tasks.push((TaskId::from_bits(id), task)))
                    .is_some(),
                Some(Kind::Job) => {
                    let id = JobId::from_bits(id);
                    self.read_job(now, id, input).map(|job| jobs.push((id, job))).is_some()
                }
                None => false,
            };
            if !is_read {
                restored.damaged += 1;
                self.inventory.log.effects.record(|| Effect::Task { id, record: None });
            }
        }
        restored.tasks = self.restore_tasks(now, tasks);
        restored.jobs = self.restore_jobs(now, jobs);
        restored
    }
}

/// Appends every record.
pub(super) fn append_records(tasks: &Tasks, jobs: &Jobs, objects: &Objects, into: &mut Vec<u8>) {
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
