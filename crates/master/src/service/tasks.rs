//! The calls about copies, moves and drains, and about clearing replicas.

use std::{sync::Arc, time::SystemTime};

use bytes::Bytes;
use mooncake_base::{Error, ErrorCode, JobId, Moment, Result, TaskId};
use mooncake_proto::{
    calls::Method,
    convert::Caller,
    v1::{self, ItemResult},
};

use super::{
    STEPS_PER_SLICE, check_batch, millis,
    objects::{check_call_number, item_id},
    op_metrics::Op,
    shared_state::SharedState,
    wire::{SegmentTable, job_status, replicas, task_kind, task_status},
};
use crate::state::{CallItem, JobView, NewJob, NewTask, State, TaskEnd, TaskView, Work};

/// The maximum number of tasks handed to a client at a time.
const FETCHED_MAX: usize = 1024;
/// The maximum number of segments in one drain job.
const JOB_SEGMENTS_MAX: usize = 4096;

/// Copies, moves and drains, for metrics and pages.
#[derive(Debug)]
pub struct WorkSummary {
    /// Number of pending tasks.
    pub pending: usize,
    /// Number of running tasks.
    pub processing: usize,
    /// Some of the pending and running tasks.
    pub tasks: Vec<TaskView>,
    /// Drain jobs: the running jobs, then the latest finished jobs.
    pub jobs: Vec<JobView>,
}

/// The calls about copies, moves and drains.
#[derive(Debug)]
pub(super) struct TaskService {
    shared: Arc<SharedState>,
}

impl TaskService {
    pub(super) fn new(shared: Arc<SharedState>) -> Self {
        Self { shared }
    }

    /// Returns the copies, moves and drains, with at most `tasks_max` tasks.
    pub(super) fn work(&self, tasks_max: usize) -> WorkSummary {
        let mut state = self.shared.lock();
        let (pending, processing) = state.tasks().tasks_underway();
        WorkSummary {
            pending,
            processing,
            tasks: state.tasks().list_tasks(tasks_max),
            jobs: state.tasks().list_jobs(),
        }
    }

    pub(super) fn create_tasks(
        &self,
        r: &v1::CreateTasksRequest,
        call_number: u64,
    ) -> Result<v1::CreateTasksResponse> {
        check_batch(r.tasks.len())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let now = self.shared.now();
        let mut items = call_items(r.caller.as_ref(), call_number)?;
        let results = self.shared.map_in_slices(&r.tasks, |state, task| {
            let created = new_task(task)
                .and_then(|new| state.tasks().create_task_once(now, &tenant, new, items.next()));
            let op = match task.kind() {
                v1::TaskKind::Copy => Op::CreateCopyTask,
                v1::TaskKind::Move => Op::CreateMoveTask,
            };
            let failed = created.as_ref().err().map(Error::code).into_iter().collect();
            self.shared.op_metrics().count_items(op, 1, failed);
            match created.and_then(|id| state.task(id)) {
                Ok(view) => v1::CreateTaskResult {
                    failure: None,
                    task: Bytes::copy_from_slice(&view.id.to_bytes()),
                    client: Bytes::copy_from_slice(&view.client.to_bytes()),
                },
                Err(error) => v1::CreateTaskResult {
                    failure: Some((&error).into()),
                    ..v1::CreateTaskResult::default()
                },
            }
        });
        Ok(v1::CreateTasksResponse { results })
    }

    pub(super) fn query_tasks(&self, r: &v1::QueryTasksRequest) -> Result<v1::QueryTasksResponse> {
        check_batch(r.tasks.len())?;
        let now = self.shared.now();
        let results = self.shared.map_in_slices(&r.tasks, |state, id| {
            match task_id(id).and_then(|id| state.task(id)) {
                Ok(view) => v1::QueryTaskResult {
                    failure: None,
                    kind: task_kind(view.kind).into(),
                    status: task_status(view.status).into(),
                    created_at_ms: epoch_ms(now, view.created),
                    updated_at_ms: epoch_ms(now, view.updated),
                    client: Bytes::copy_from_slice(&view.client.to_bytes()),
                    message: view.message,
                },
                Err(error) => v1::QueryTaskResult {
                    failure: Some((&error).into()),
                    ..v1::QueryTaskResult::default()
                },
            }
        });
        let failed = results.iter().filter(|result| result.failure.is_some()).count();
        self.shared.op_metrics().count_batch(Method::QueryTasks, results.len(), failed);
        Ok(v1::QueryTasksResponse { results })
    }

    pub(super) fn fetch_tasks(&self, r: &v1::FetchTasksRequest) -> Result<v1::FetchTasksResponse> {
        self.shared.op_metrics().count_one(Method::FetchTasks, || {
            let caller = Caller::try_from(r.caller.as_ref())?;
            let limit = usize::try_from(r.limit).unwrap_or(usize::MAX).min(FETCHED_MAX);
            let (mut tasks, mut bytes) = (Vec::new(), 0_u64);
            let mut segments = SegmentTable::default();
            let window_ms = loop {
                let mut state = self.shared.lock();
                let (now, steps) = (self.shared.now(), state.steps());
                let left = (limit - tasks.len(), r.bytes.saturating_sub(bytes));
                let work = state.tasks().fetch_tasks(now, caller.client, left.0, left.1)?;
                // Where all tasks of a slice have to wait, the next heartbeat tells of the others.
                let is_cut = !work.is_empty() && state.steps() - steps > STEPS_PER_SLICE;
                bytes += work.iter().map(|work| work.length).sum::<u64>();
                tasks.extend(work.into_iter().map(|it| work_to_wire(&state, &mut segments, it)));
                let window_ms = millis(state.rules().write_window);
                state.unlock_fair();
                if !is_cut || tasks.len() >= limit || bytes >= r.bytes {
                    break window_ms;
                }
            };
            Ok(v1::FetchTasksResponse { tasks, segments: segments.into_segments(), window_ms })
        })
    }

    pub(super) fn end_tasks(&self, r: &v1::EndTasksRequest) -> Result<v1::EndTasksResponse> {
        check_batch(r.ends.len())?;
        let caller = Caller::try_from(r.caller.as_ref())?;
        let now = self.shared.now();
        let results = self.shared.map_in_slices(&r.ends, |state, end| {
            let failed_replicas = replicas(&end.failed_replicas);
            let ended = task_id(&end.task).and_then(|id| {
                let end = TaskEnd {
                    id,
                    attempt: end.attempt,
                    failed_replicas: &failed_replicas,
                    why: &end.reason,
                };
                state.tasks().end_task(now, caller.client, end)
            });
            self.shared.op_metrics().count_batch(Method::EndTasks, 1, usize::from(ended.is_err()));
            ItemResult::from(ended)
        });
        let has_tasks = self.shared.lock().tasks().has_tasks(self.shared.now(), caller.client);
        Ok(v1::EndTasksResponse { results, has_tasks })
    }

    pub(super) fn clear_replicas(
        &self,
        r: &v1::ClearReplicasRequest,
    ) -> Result<v1::ClearReplicasResponse> {
        check_batch(r.keys.len())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let now = self.shared.now();
        let cleared = self
            .shared
            .map_in_slices(&r.keys, |state, key| state.clear_copies(now, &tenant, key, &r.segment));
        self.shared.op_metrics().count_batch(Method::ClearReplicas, cleared.len(), 0);
        Ok(v1::ClearReplicasResponse { cleared })
    }

    pub(super) fn create_drain_jobs(
        &self,
        r: &v1::CreateDrainJobsRequest,
        call_number: u64,
    ) -> Result<v1::CreateDrainJobsResponse> {
        check_batch(r.jobs.len())?;
        let now = self.shared.now();
        let mut items = call_items(r.caller.as_ref(), call_number)?;
        let mut create = |state: &mut State, job: &v1::NewDrainJob| {
            let named = job.segments.len().saturating_add(job.targets.len());
            if named > JOB_SEGMENTS_MAX {
                return Err(Error::invalid("the job names too many segments").with("named", named));
            }
            let new = NewJob {
                segments: &job.segments,
                targets: &job.targets,
                concurrency: job.concurrency,
                may_evict: job.allow_eviction,
            };
            let id = state.tasks().create_job_once(now, new, items.next())?;
            state.job(id)
        };
        let results = self.shared.map_in_slices(&r.jobs, |state, job| {
            self.job_result(Method::CreateDrainJobs, now, create(state, job))
        });
        Ok(v1::CreateDrainJobsResponse { results })
    }

    pub(super) fn query_drain_jobs(
        &self,
        r: &v1::QueryDrainJobsRequest,
    ) -> Result<v1::QueryDrainJobsResponse> {
        check_batch(r.jobs.len())?;
        let now = self.shared.now();
        let results = self.shared.map_in_slices(&r.jobs, |state, id| {
            let view = job_id(id).and_then(|id| state.job(id));
            self.job_result(Method::QueryDrainJobs, now, view)
        });
        Ok(v1::QueryDrainJobsResponse { results })
    }

    pub(super) fn cancel_drain_jobs(
        &self,
        r: &v1::CancelDrainJobsRequest,
    ) -> Result<v1::CancelDrainJobsResponse> {
        check_batch(r.jobs.len())?;
        let now = self.shared.now();
        let results = self.shared.map_in_slices(&r.jobs, |state, id| {
            let view = job_id(id).and_then(|id| {
                state.tasks().cancel_job(now, id)?;
                state.job(id)
            });
            self.job_result(Method::CancelDrainJobs, now, view)
        });
        Ok(v1::CancelDrainJobsResponse { results })
    }

    fn job_result(&self, method: Method, now: Moment, view: Result<JobView>) -> v1::DrainJobResult {
        self.shared.op_metrics().count_batch(method, 1, usize::from(view.is_err()));
        match view {
            Ok(view) => v1::DrainJobResult {
                failure: None,
                job: Bytes::copy_from_slice(&view.id.to_bytes()),
                status: job_status(view.status).into(),
                created_at_ms: epoch_ms(now, view.created),
                updated_at_ms: epoch_ms(now, view.updated),
                segments: view.segments,
                succeeded: view.succeeded,
                failed: view.failed,
                blocked: view.blocked,
                active: view.active.into(),
                moved_bytes: view.moved_bytes,
                message: view.message,
                evicted: view.evicted,
                evicted_bytes: view.evicted_bytes,
            },
            Err(error) => v1::DrainJobResult {
                failure: Some((&error).into()),
                ..v1::DrainJobResult::default()
            },
        }
    }
}

/// Returns the items of a numbered call, in order; nothing for a call without number or client.
fn call_items(
    caller: Option<&v1::Caller>,
    call_number: u64,
) -> Result<impl Iterator<Item = CallItem> + use<>> {
    check_call_number("call_number", call_number)?;
    let client = if call_number > 0 { Caller::try_from(caller).ok() } else { None };
    Ok(client.into_iter().flat_map(move |caller| {
        (0..)
            .map(move |item| CallItem { client: caller.client, number: item_id(call_number, item) })
    }))
}

fn new_task(task: &v1::NewTask) -> Result<NewTask<'_>> {
    match (v1::TaskKind::try_from(task.kind), &task.targets[..]) {
        (Ok(v1::TaskKind::Copy), targets) => Ok(NewTask::Copy { key: &task.key, targets }),
        (Ok(v1::TaskKind::Move), [target]) => {
            Ok(NewTask::Move { key: &task.key, source: &task.source, target })
        }
        (Ok(v1::TaskKind::Move), targets) => {
            Err(Error::invalid("a move needs exactly one target").with("targets", targets.len()))
        }
        (Err(_), _) => Err(Error::invalid("unknown kind of task").with("kind", task.kind)),
    }
}

fn work_to_wire(state: &State, segments: &mut SegmentTable, work: Work) -> v1::TaskWork {
    v1::TaskWork {
        task: Bytes::copy_from_slice(&work.id.to_bytes()),
        attempt: work.attempt,
        key: Bytes::copy_from_slice(work.key.as_bytes()),
        version: work.version.0,
        length: work.length,
        checksum: work.checksum,
        source: Some(segments.place(state, work.source)),
        targets: segments.places(state, &work.targets),
    }
}

fn task_id(bytes: &[u8]) -> Result<TaskId> {
    TaskId::from_bytes(bytes).ok_or_else(|| {
        Error::new(ErrorCode::TASK_NOT_FOUND, "a task id has 16 bytes").with("bytes", bytes.len())
    })
}

fn job_id(bytes: &[u8]) -> Result<JobId> {
    JobId::from_bytes(bytes)
        .ok_or_else(|| Error::invalid("a job id has 16 bytes").with("bytes", bytes.len()))
}

/// Converts a moment to milliseconds since 1970, relative to `now`.
fn epoch_ms(now: Moment, then: Moment) -> u64 {
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    millis(clock.saturating_sub(now.since(then)))
}
