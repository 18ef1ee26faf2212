//! `CollectiveContext`: this process's part in collective operations. They work on memory that the
//! caller names by address and keeps until the operation is done.

pub(crate) mod completion;
mod engine_fabric;
pub(crate) mod group;

use std::{net::IpAddr, sync::Arc, time::Duration};

use mooncake_base::{Error, Result, Token, env, exposition::Exposition};
use mooncake_collective::{Context, ContextConfig, ELEMENTS, GroupConfig, add_metrics};
use pyo3::prelude::*;

use self::{engine_fabric::EngineFabric, group::CollectiveGroup};
use crate::{detach::detached, engine::Engine, error::or_raise, log};

/// How often a wait looks for Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// A limit of the caller that cannot be counted.
const LIMIT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// The process's part in collective operations.
#[pyclass(frozen, module = "mooncake._native", name = "CollectiveContext")]
#[derive(Debug)]
pub(crate) struct CollectiveContext(Arc<Context>);

#[pymethods]
impl CollectiveContext {
    /// Starts the listeners and registers with the coordinator; without the address of one, this
    /// process runs it.
    #[new]
    #[pyo3(signature = (
        *, global_rank, host, coordinator = None, engine = None,
        heartbeat_timeout_us = 10_000_000, bootstrap_timeout_us = 300_000_000
    ))]
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn new(
        py: Python<'_>,
        global_rank: u32,
        host: &str,
        coordinator: Option<String>,
        engine: Option<&Engine>,
        heartbeat_timeout_us: u64,
        bootstrap_timeout_us: u64,
    ) -> PyResult<Self> {
        log::install();
        log::warn_of_variables();
        let engine = engine.map(|engine| Arc::clone(engine.running()));
        let start = || -> Result<Context> {
            let host: IpAddr = host
                .parse()
                .map_err(|_| Error::invalid("the host must be an IP address").with("host", host))?;
            let token = env::MC_TRANSFER_TOKEN.read().filter(|text| !text.trim().is_empty());
            Context::start(&ContextConfig {
                rank: global_rank,
                host,
                coordinator,
                token: token.map(|text| Token::new(&text)).transpose()?,
                fabric: engine.map(EngineFabric::of).transpose()?.flatten(),
                heartbeat_timeout: Duration::from_micros(heartbeat_timeout_us),
                bootstrap_timeout: Duration::from_micros(bootstrap_timeout_us),
            })
        };
        let context = or_raise(py, detached(py, start).and_then(|context| context))?;
        Ok(Self(Arc::new(context)))
    }

    /// Returns the metrics of all groups of this process as Prometheus text.
    #[staticmethod]
    fn metrics_text(py: Python<'_>) -> PyResult<String> {
        let text = || {
            let mut out = Exposition::default();
            add_metrics(&mut out);
            out.finish()
        };
        or_raise(py, detached(py, text))
    }

    /// Returns the names of the types of elements, in the order of their codes. 255 stands for others.
    #[staticmethod]
    fn element_names() -> [&'static str; ELEMENTS.len()] {
        ELEMENTS
    }

    /// The address of the coordinator.
    #[getter]
    fn address(&self) -> String {
        self.0.coordinator_address().to_owned()
    }

    /// Makes a group, and waits until all founders have made it. `first_rank` is the global rank of
    /// slot 0.
    #[pyo3(signature = (
        name, slot, *, declared_size, max_group_size, is_extension, auto_deactivate, first_rank,
        timeout_s
    ))]
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn group(
        &self,
        py: Python<'_>,
        name: String,
        slot: usize,
        declared_size: usize,
        max_group_size: usize,
        is_extension: bool,
        auto_deactivate: bool,
        first_rank: u32,
        timeout_s: f64,
    ) -> PyResult<CollectiveGroup> {
        let config = GroupConfig {
            name,
            slot,
            declared: declared_size,
            capacity: max_group_size,
            is_extension,
            removes_lost: auto_deactivate,
            first_rank,
            made_within: limit(timeout_s),
        };
        let made = detached(py, || self.0.group(&config)).and_then(|made| made);
        Ok(CollectiveGroup { group: or_raise(py, made)?, capacity: max_group_size })
    }

    /// Ends connections and threads. Groups must be closed before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        or_raise(py, detached(py, || self.0.close()))
    }
}

fn limit(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(LIMIT_MAX)
}
