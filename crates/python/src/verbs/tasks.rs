//! Copy and move tasks, and drains of segments.

use mooncake_base::Result;
use mooncake_store_client::{Client, DrainInfo, NewDrain, NewTask};
use pyo3::prelude::*;

use super::{Begun, Driver, methods};
use crate::{
    error::or_raise,
    store::{
        outcome::single_key,
        tasks::{self, IdParts},
    },
};

methods! {
    /// Creates a copy task for an object; returns its id.
    fn copy_object(
        &self,
        py: Python<'_>,
        key: Bound<'_, PyAny>,
        targets: Vec<String>,
    ) -> PyResult<Begun<Self>> {
        let key = or_raise(py, single_key(key)?)?;
        self.drive_value(py, (), |client, ()| tasks::create(client, NewTask::Copy { key, targets }))
    }

    /// Creates a task that moves a copy of an object to another segment; returns its id.
    fn move_object(
        &self,
        py: Python<'_>,
        key: Bound<'_, PyAny>,
        source: String,
        target: String,
    ) -> PyResult<Begun<Self>> {
        let key = or_raise(py, single_key(key)?)?;
        self.drive_value(py, (), |client, ()| {
            tasks::create(client, NewTask::Move { key, source, target })
        })
    }

    /// Returns the state of a task.
    fn task(&self, py: Python<'_>, task_id: IdParts) -> PyResult<Begun<Self>> {
        self.drive(
            py,
            (),
            move |client, ()| tasks::info(client, task_id),
            |py, info| Ok(tasks::task(py, &info)?.into_any().unbind()),
        )
    }

    /// Starts a drain of segments.
    #[pyo3(signature = (segments, *, targets = Vec::new(), concurrency = 0, may_evict = false))]
    fn drain(
        &self,
        py: Python<'_>,
        segments: Vec<String>,
        targets: Vec<String>,
        concurrency: u32,
        may_evict: bool,
    ) -> PyResult<Begun<Self>> {
        let new = NewDrain { segments, targets, concurrency, may_evict };
        drive_drain(self, py, move |client| client.drain(&new))
    }

    /// Returns the state of a drain.
    fn drain_info(&self, py: Python<'_>, job_id: IdParts) -> PyResult<Begun<Self>> {
        drive_drain(self, py, move |client| client.drain_info(tasks::job_id(job_id)))
    }

    /// Cancels a drain.
    fn cancel_drain(&self, py: Python<'_>, job_id: IdParts) -> PyResult<Begun<Self>> {
        drive_drain(self, py, move |client| client.cancel_drain(tasks::job_id(job_id)))
    }
}

/// Makes a call that returns the state of a drain.
fn drive_drain<D: Driver>(
    driver: &D,
    py: Python<'_>,
    work: impl FnOnce(&Client) -> Result<DrainInfo> + Send + 'static,
) -> PyResult<Begun<D>> {
    driver.drive(
        py,
        (),
        |client, ()| work(client),
        |py, info| Ok(tasks::drain(py, &info)?.into_any().unbind()),
    )
}
