//! Log records of drain jobs, and their recovery after a restart.

use mooncake_base::{Incarnation, JobId, Moment, SegmentId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{
    calls::{
        answers::CallItem,
        task::{
            TaskCalls,
            drain::{Job, JobStatus, JobView},
        },
    },
    ids::SegmentSlot,
    ledger::{
        effect::{Effect, reader::Reader, writer::Writer},
        task_record::{RecordKind, read_moment, read_texts, write_moment, write_texts},
    },
    pool::segment::{SegmentSet, SegmentStatus},
};

/// Added to the status of a job that may evict other objects. Its record also has how many it
/// evicted.
const MAY_EVICT: u8 = 0x80;

impl Job {
    /// Encodes the job for the log. Objects that could not be moved are retried after a restart, so
    /// they are counted only in finished jobs.
    pub(in crate::state) fn record(&self) -> Vec<u8> {
        let mut record = RecordKind::Job.begin();
        let (out, view) = (&mut Writer(&mut record), &self.view);
        let status = match view.status {
            JobStatus::Created | JobStatus::Planning | JobStatus::Running => 0,
            JobStatus::Succeeded => 1,
            JobStatus::Failed => 2,
            JobStatus::Canceled => 3,
        };
        out.byte(status | if self.may_evict { MAY_EVICT } else { 0 });
        write_moment(out, view.created);
        write_moment(out, view.updated);
        write_texts(out, &view.segments);
        out.int(view.succeeded).int(view.moved_bytes);
        if self.may_evict {
            out.int(view.evicted).int(view.evicted_bytes);
        }
        if self.is_over() {
            out.int(view.failed).int(view.blocked).text(&view.message);
            CallItem::write(self.item, out);
            return record;
        }
        write_texts(out, &self.targets);
        out.int(u64::from(self.concurrency)).int(self.segments.len() as u64);
        for (id, incarnation) in &self.segments {
            out.id(id.bits()).int(incarnation.0);
        }
        CallItem::write(self.item, out);
        record
    }
}

impl TaskCalls<'_> {
    /// Logs the status of the job.
    pub(super) fn log_job(&mut self, id: JobId) {
        if !self.inventory.log().is_recording() {
            return;
        }
        let record = self.jobs.by_id.get(&id).map(Job::record);
        self.inventory.record(|| Effect::Task { id: id.bits(), record: record.as_deref() });
    }

    /// Decodes a job; `None` if the record is damaged.
    pub(in crate::state) fn read_job(
        &self,
        now: Moment,
        id: JobId,
        input: &mut Reader<'_>,
    ) -> Option<Job> {
        let code = input.byte()?;
        let may_evict = code & MAY_EVICT != 0;
        let status = match code & !MAY_EVICT {
            0 => JobStatus::Running,
            1 => JobStatus::Succeeded,
            2 => JobStatus::Failed,
            3 => JobStatus::Canceled,
            _ => return None,
        };
        let mut job = Job {
            segments: Vec::new(),
            targets: Vec::new(),
            concurrency: 0,
            may_evict,
            is_scheduled: false,
            cursor: 0,
            found: 0,
            blocked: 0,
            given_up: FxHashMap::default(),
            confirming: 0,
            busy: FxHashSet::default(),
            item: None,
            logged: now,
            view: JobView {
                id,
                status,
                created: read_moment(input, now)?,
                updated: read_moment(input, now)?,
                segments: read_texts(input)?,
                succeeded: input.int()?,
                failed: 0,
                blocked: 0,
                active: 0,
                moved_bytes: input.int()?,
                evicted: 0,
                evicted_bytes: 0,
                message: String::new(),
            },
        };
        if may_evict {
            (job.view.evicted, job.view.evicted_bytes) = (input.int()?, input.int()?);
        }
        if job.is_over() {
            (job.view.failed, job.view.blocked) = (input.int()?, input.int()?);
            input.text()?.clone_into(&mut job.view.message);
            job.item = CallItem::read(input)?;
            return Some(job);
        }
        job.targets = read_texts(input)?;
        job.concurrency = u32::try_from(input.int()?).ok()?;
        for _ in 0..input.int()? {
            let id = SegmentId::from_bits(input.id()?);
            job.segments.push((id, Incarnation(input.int()?)));
        }
        job.item = CallItem::read(input)?;
        Some(job)
    }

    /// Resumes jobs. Returns how many have not ended.
    pub(in crate::state) fn restore_jobs(
        &mut self,
        now: Moment,
        mut jobs: Vec<(JobId, Job)>,
    ) -> u64 {
        jobs.sort_by_key(|(id, job)| (job.view.updated, *id));
        for (id, job) in jobs {
            let is_over = job.is_over();
            self.jobs.by_id.insert(id, job);
            if is_over {
                self.jobs.finished.push_back(id);
            } else {
                self.jobs.running.push(id);
                self.schedule_job(id, now);
            }
        }
        // Segments whose job is unknown accept objects again.
        let drained: SegmentSet =
            self.jobs.running.iter().flat_map(|&id| self.job_segments(id)).collect();
        let draining = self.inventory.segments().mounted().filter(|(slot, segment)| {
            segment.status == SegmentStatus::Draining && !drained.contains(*slot)
        });
        let stray: Vec<SegmentSlot> = draining.map(|(slot, _)| slot).collect();
        self.set_status(&stray, SegmentStatus::Ok);
        self.jobs.running.len() as u64
    }
}
