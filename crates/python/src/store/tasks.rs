//! Conversion of copy and move tasks and of drains between Python and the client.

use mooncake_base::{JobId, Result, TaskId};
use mooncake_store_client::{
    Client, DrainInfo, DrainStatus, NewTask, TaskInfo, TaskKind, TaskStatus,
};
use pyo3::{prelude::*, types::PyDict};

/// The upper and lower 64 bits of an id, as upstream's calls pass it.
pub(crate) type IdParts = (u64, u64);

/// Creates one task.
pub(crate) fn create(client: &Client, task: NewTask) -> Result<IdParts> {
    single(client.create_tasks(&[task])).map(TaskId::halves)
}

/// Queries one task.
pub(crate) fn info(client: &Client, (first, second): IdParts) -> Result<TaskInfo> {
    let id = TaskId::from_bits(u128::from(first) << 64 | u128::from(second));
    single(client.tasks(&[id]))
}

/// Builds the id of a drain.
pub(crate) fn job_id((first, second): IdParts) -> JobId {
    JobId::from_bits(u128::from(first) << 64 | u128::from(second))
}

/// Converts a task to a dictionary.
pub(crate) fn task<'py>(py: Python<'py>, info: &TaskInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("id", info.id.halves())?;
    dict.set_item(
        "kind",
        match info.kind {
            TaskKind::Copy => "copy",
            TaskKind::Move => "move",
        },
    )?;
    dict.set_item(
        "status",
        match info.status {
            TaskStatus::Pending => "pending",
            TaskStatus::Processing => "processing",
            TaskStatus::Failed => "failed",
            TaskStatus::Success => "success",
        },
    )?;
    dict.set_item("created_at_ms", info.created_at_ms)?;
    dict.set_item("updated_at_ms", info.updated_at_ms)?;
    dict.set_item("client", info.client.halves())?;
    dict.set_item("message", &info.message)?;
    Ok(dict)
}

/// Converts a drain to a dictionary.
pub(crate) fn drain<'py>(py: Python<'py>, info: &DrainInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("id", info.id.halves())?;
    dict.set_item(
        "status",
        match info.status {
            DrainStatus::Created => "created",
            DrainStatus::Planning => "planning",
            DrainStatus::Running => "running",
            DrainStatus::Succeeded => "succeeded",
            DrainStatus::Failed => "failed",
            DrainStatus::Canceled => "canceled",
        },
    )?;
    dict.set_item("created_at_ms", info.created_at_ms)?;
    dict.set_item("updated_at_ms", info.updated_at_ms)?;
    dict.set_item("segments", &info.segments)?;
    dict.set_item("succeeded", info.succeeded)?;
    dict.set_item("failed", info.failed)?;
    dict.set_item("blocked", info.blocked)?;
    dict.set_item("active", info.active)?;
    dict.set_item("moved_bytes", info.moved_bytes)?;
    dict.set_item("evicted", info.evicted)?;
    dict.set_item("evicted_bytes", info.evicted_bytes)?;
    dict.set_item("message", &info.message)?;
    Ok(dict)
}

fn single<T>(outcomes: Vec<Result<T>>) -> Result<T> {
    let missing = || Err(mooncake_base::Error::internal("a batch of one gave no outcome"));
    outcomes.into_iter().next().unwrap_or_else(missing)
}
