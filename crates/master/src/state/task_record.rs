//! What the log keeps of tasks and drain jobs: a record each, by its id, in words of their own.
//!
//! A record tells all there is to know of what is over, and of what is not, what a restarted master
//! needs to begin it again: a try under way dies with the master, and what it wrote rests. Parts of
//! a drain have no records, since the job finds them again.

use std::collections::BTreeMap;

use mooncake_base::{JobId, Moment, TaskId};

use super::{
    State,
    effect::{
        Effect,
        codec::{Reader, Writer},
    },
};

/// The id under which stands what is about all tasks.
const ALL: u128 = 0;

/// What became of the records.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RestoredRecords {
    /// Tasks that are not over.
    pub(super) tasks: u64,
    /// Jobs that are not over.
    pub(super) jobs: u64,
    /// What cannot be read.
    pub(super) damaged: u64,
}

/// What a record is of: its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A copy or a move that somebody asked for.
    Task,
    /// A drain.
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

    /// The beginning of a record of this kind.
    pub(super) fn begin(self) -> Vec<u8> {
        vec![self.code()]
    }
}

/// A moment in the words of the log. It means nothing after the machine was started anew.
pub(super) fn write_moment(out: &mut Writer<'_>, moment: Moment) {
    out.time(moment.since_boot());
}

/// A moment that was written, which cannot be later than now.
pub(super) fn read_moment(input: &mut Reader<'_>, now: Moment) -> Option<Moment> {
    Some(now.min(Moment::from_boot(input.time()?)))
}

/// How many texts there are, and each of them.
pub(super) fn write_texts(out: &mut Writer<'_>, texts: &[impl AsRef<str>]) {
    out.int(texts.len() as u64);
    for text in texts {
        out.text(text.as_ref());
    }
}

/// The texts that were written.
pub(super) fn read_texts<T: for<'a> From<&'a str>>(input: &mut Reader<'_>) -> Option<Vec<T>> {
    let count = input.int()?;
    // A damaged count ends with the bytes.
    (0..count).map(|_| input.text().map(T::from)).collect()
}

/// The number of the next copy that a task makes, if the record is of that.
pub(super) fn next_ordinal(id: u128, record: Option<&[u8]>) -> Option<u16> {
    (id == ALL).then(|| u16::try_from(Reader::new(record?).int()?).ok())?
}

impl State {
    /// Appends every record.
    pub(super) fn snapshot_task_records(&self, into: &mut Vec<u8>) {
        let mut ordinal = Vec::new();
        Writer(&mut ordinal).int(u64::from(self.tasks.next_ordinal()));
        Effect::Task { id: ALL, record: Some(&ordinal) }.encode(into);
        for (id, task) in self.tasks.requested() {
            let record = task.record(&self.objects);
            Effect::Task { id: id.bits(), record: Some(&record) }.encode(into);
        }
        for (id, job) in self.jobs.all() {
            Effect::Task { id: id.bits(), record: Some(&job.record()) }.encode(into);
        }
    }

    /// Takes up what the records tell of, when all else was restored.
    pub(super) fn restore_records(
        &mut self,
        now: Moment,
        records: BTreeMap<u128, Box<[u8]>>,
        ordinal: u16,
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
                self.effects.record(|| Effect::Task { id, record: None });
            }
        }
        restored.tasks = self.restore_tasks(now, tasks);
        restored.jobs = self.restore_jobs(now, jobs);
        restored
    }
}
