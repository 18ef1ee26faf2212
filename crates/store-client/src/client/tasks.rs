//! Copy tasks, move tasks and drain jobs, created at the master. [`worker`] carries them out.

pub(super) mod worker;

use mooncake_base::{ClientId, Error, ErrorCode, JobId, Moment, ObjectKey, Result, TaskId};
use mooncake_proto::v1;

use super::Client;
use crate::{
    rpc::{batch, response},
    task::{DrainInfo, DrainStatus, NewDrain, NewTask, TaskInfo, TaskKind, TaskStatus},
};

impl Client {
    /// Creates copy and move tasks. A client that owns a replica carries them out later; see
    /// [`tasks`](Self::tasks).
    ///
    /// # Errors
    /// By task: `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY` while the object is being written for
    /// the first time; `INVALID_PARAMS` for no targets, an unknown segment, or a source segment
    /// without a replica; `TASK_PENDING_LIMIT_EXCEEDED`; or the master cannot be reached.
    pub fn create_tasks(&self, tasks: &[NewTask]) -> Vec<Result<TaskId>> {
        let deadline = self.inner.rpc.deadline();
        let mut results = Vec::with_capacity(tasks.len());
        let size = |task: &NewTask| match task {
            NewTask::Copy { key, targets } => {
                key.as_bytes().len() + targets.iter().map(String::len).sum::<usize>()
            }
            NewTask::Move { key, source, target } => {
                key.as_bytes().len() + source.len() + target.len()
            }
        };
        for range in batch::split(tasks.iter().map(size), batch::KEY_BYTES_MAX) {
            let part = &tasks[range];
            match self.create_part(part, deadline) {
                Ok(part) => results.extend(part),
                Err(error) => results
                    .extend(part.iter().map(|task| Err(error.clone().with("key", task.key())))),
            }
        }
        results
    }

    /// Returns the state of tasks.
    ///
    /// # Errors
    /// By task: `TASK_NOT_FOUND`, also for a task that finished long ago; or the master cannot be
    /// reached.
    pub fn tasks(&self, ids: &[TaskId]) -> Vec<Result<TaskInfo>> {
        let encoded = ids.iter().map(|id| id.to_bytes().to_vec().into()).collect();
        let request = v1::QueryTasksRequest { caller: self.inner.rpc.caller(), tasks: encoded };
        let answer = self.inner.rpc.call(request).map(|response| response.results);
        let answer = answer.and_then(|results| {
            response::check_count(results.len(), ids.len())?;
            Ok(results)
        });
        match answer {
            Ok(results) => {
                results.into_iter().zip(ids).map(|(result, id)| read_task(result, *id)).collect()
            }
            Err(error) => ids.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// Drops the replicas of objects in segments of the given name, or all replicas if the name is
    /// empty. Returns for each key whether a replica was dropped; leased objects and objects being
    /// copied keep theirs.
    ///
    /// # Errors
    /// By key: the master cannot be reached.
    pub fn clear_replicas(&self, keys: &[ObjectKey], segment: &str) -> Vec<Result<bool>> {
        let deadline = self.inner.rpc.deadline();
        batch::for_keys(keys, |keys, packed| {
            let request = v1::ClearReplicasRequest {
                caller: self.inner.rpc.caller(),
                keys: packed,
                segment: segment.to_owned(),
            };
            let cleared = self.inner.rpc.call_until(request, deadline)?.cleared;
            response::check_count(cleared.len(), keys.len())?;
            Ok(cleared.into_iter().map(Ok).collect())
        })
    }

    /// Starts to drain segments, given by name, into the target segments, or into any if no targets
    /// are given. Draining segments accept no new objects. An object that does not fit into free
    /// memory elsewhere stays where it is, and the job fails, unless the job may evict.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`; `UNAVAILABLE_IN_CURRENT_STATUS` if a segment is already being drained
    /// or unmounted; `INVALID_PARAMS` for no segments or a segment that is also a target; or the
    /// master cannot be reached.
    pub fn drain(&self, new: &NewDrain) -> Result<DrainInfo> {
        let job = v1::NewDrainJob {
            segments: new.segments.clone(),
            targets: new.targets.clone(),
            concurrency: new.concurrency,
            allow_eviction: new.may_evict,
        };
        let caller = self.inner.rpc.caller();
        let request = v1::CreateDrainJobsRequest { caller, jobs: vec![job] };
        let results = self.inner.rpc.call(request)?.results;
        only_job(results)
    }

    /// Returns the state of a drain job.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`, or the master cannot be reached.
    pub fn drain_info(&self, job: JobId) -> Result<DrainInfo> {
        let jobs = vec![job.to_bytes().to_vec().into()];
        let caller = self.inner.rpc.caller();
        let request = v1::QueryDrainJobsRequest { caller, jobs };
        let results = self.inner.rpc.call(request)?.results;
        only_job(results)
    }

    /// Cancels a drain job. Moves in flight finish, no others start, and the segments accept
    /// objects again.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS` if the job has ended already, or the master
    /// cannot be reached.
    pub fn cancel_drain(&self, job: JobId) -> Result<DrainInfo> {
        let jobs = vec![job.to_bytes().to_vec().into()];
        let caller = self.inner.rpc.caller();
        let request = v1::CancelDrainJobsRequest { caller, jobs };
        let results = self.inner.rpc.call(request)?.results;
        only_job(results)
    }

    fn create_part(&self, tasks: &[NewTask], deadline: Moment) -> Result<Vec<Result<TaskId>>> {
        let request = v1::CreateTasksRequest {
            caller: self.inner.rpc.caller(),
            tasks: tasks.iter().map(wire_task).collect(),
        };
        let results = self.inner.rpc.call_until(request, deadline)?.results;
        response::check_count(results.len(), tasks.len())?;
        let own = self.inner.id.to_bytes();
        if results.iter().any(|result| result.client[..] == own) {
            // The worker need not wait for the next heartbeat.
            self.inner.wake_worker();
        }
        let read = |(result, task): (&v1::CreateTaskResult, &NewTask)| match &result.failure {
            Some(failure) => Err(response::item_error(failure, task.key())),
            None => TaskId::from_bytes(&result.task)
                .ok_or_else(|| response::protocol_error("a task has no id")),
        };
        Ok(results.iter().zip(tasks).map(read).collect())
    }
}

fn wire_task(task: &NewTask) -> v1::NewTask {
    let key = |key: &ObjectKey| key.as_bytes().to_vec().into();
    match task {
        NewTask::Copy { key: of, targets } => v1::NewTask {
            kind: v1::TaskKind::Copy.into(),
            key: key(of),
            source: String::new(),
            targets: targets.clone(),
        },
        NewTask::Move { key: of, source, target } => v1::NewTask {
            kind: v1::TaskKind::Move.into(),
            key: key(of),
            source: source.clone(),
            targets: vec![target.clone()],
        },
    }
}

fn read_task(result: v1::QueryTaskResult, id: TaskId) -> Result<TaskInfo> {
    if let Some(failure) = &result.failure {
        return Err(Error::from(failure));
    }
    Ok(TaskInfo {
        id,
        kind: match result.kind() {
            v1::TaskKind::Copy => TaskKind::Copy,
            v1::TaskKind::Move => TaskKind::Move,
        },
        status: match result.status() {
            v1::TaskStatus::Pending => TaskStatus::Pending,
            v1::TaskStatus::Processing => TaskStatus::Processing,
            v1::TaskStatus::Failed => TaskStatus::Failed,
            v1::TaskStatus::Success => TaskStatus::Success,
        },
        created_at_ms: result.created_at_ms,
        updated_at_ms: result.updated_at_ms,
        client: ClientId::from_bytes(&result.client)
            .ok_or_else(|| response::protocol_error("a task has no client"))?,
        message: result.message,
    })
}

fn only_job(results: Vec<v1::DrainJobResult>) -> Result<DrainInfo> {
    response::check_count(results.len(), 1)?;
    let missing = || Error::new(ErrorCode::JOB_NOT_FOUND, "the master did not return the job");
    let job = results.into_iter().next().ok_or_else(missing)?;
    if let Some(failure) = &job.failure {
        return Err(Error::from(failure));
    }
    Ok(DrainInfo {
        id: JobId::from_bytes(&job.job)
            .ok_or_else(|| response::protocol_error("a job has no id"))?,
        status: match job.status() {
            v1::JobStatus::Created => DrainStatus::Created,
            v1::JobStatus::Planning => DrainStatus::Planning,
            v1::JobStatus::Running => DrainStatus::Running,
            v1::JobStatus::Succeeded => DrainStatus::Succeeded,
            v1::JobStatus::Failed => DrainStatus::Failed,
            v1::JobStatus::Canceled => DrainStatus::Canceled,
        },
        created_at_ms: job.created_at_ms,
        updated_at_ms: job.updated_at_ms,
        segments: job.segments,
        succeeded: job.succeeded,
        failed: job.failed,
        blocked: job.blocked,
        active: job.active,
        moved_bytes: job.moved_bytes,
        evicted: job.evicted,
        evicted_bytes: job.evicted_bytes,
        message: job.message,
    })
}
