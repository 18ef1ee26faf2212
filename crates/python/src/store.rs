//! `Store`: a handle on a pool. Every call is a batch: a failed item is an exception instance at
//! its place in the result, a failed call raises.

mod advice;
mod calls;
pub(crate) mod describe;
pub(crate) mod details;
pub(crate) mod grids;
pub(crate) mod located;
mod open;
pub(crate) mod outcome;
pub(crate) mod parts;
mod pool;
pub(crate) mod settings;
pub(crate) mod status_codes;
pub(crate) mod tasks;
pub(crate) mod transfer;

use std::{sync::Arc, time::Duration};

use pyo3::{prelude::*, types::PyDict};

pub(crate) use self::open::{Open, all_open};
use self::{
    open::metrics_text,
    settings::{Arguments, DummyArguments, PrefetchArguments, Settings},
};
use crate::{
    argument,
    detach::{detached, limited},
    engine::Engine,
    error::{forget_last, or_raise},
    log,
    runtime::runtime,
};

pub(crate) type Keys<'py> = Vec<Bound<'py, PyAny>>;

/// A handle on a pool of memory.
#[pyclass(frozen, module = "mooncake._native", name = "Store")]
#[derive(Debug)]
pub(crate) struct Store {
    open: Option<Arc<Open>>,
    /// Longest duration of a call; `None`: the limits of the client.
    timeout: Option<Duration>,
}

#[pymethods]
impl Store {
    /// Joins a pool, or starts one with a master in this process (`master="embedded"`).
    #[staticmethod]
    #[pyo3(signature = (
        *, master, name = String::new(), metadata = String::from("P2PHANDSHAKE"),
        segment_bytes = 0, tenant = String::from("default"), refuses_ignored_tenant = true,
        disks = Vec::new(), is_tcp_forced = None, rdma_devices = None,
        rpc_timeout_s = None, connect_timeout_s = None, transfer_timeout_s = None, retry_s = None,
        fails_as_upstream = false, listen = String::new(), has_checksums = None,
        http_port = None, token = None, prefetch = None, engine = None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "each setting is a keyword")]
    fn connect(
        py: Python<'_>,
        master: String,
        name: String,
        metadata: String,
        #[pyo3(from_py_with = argument::unsigned)] segment_bytes: u64,
        tenant: String,
        refuses_ignored_tenant: bool,
        disks: Vec<(String, Option<u64>)>,
        is_tcp_forced: Option<bool>,
        rdma_devices: Option<String>,
        rpc_timeout_s: Option<f64>,
        connect_timeout_s: Option<f64>,
        transfer_timeout_s: Option<f64>,
        retry_s: Option<f64>,
        fails_as_upstream: bool,
        listen: String,
        has_checksums: Option<bool>,
        #[pyo3(from_py_with = argument::optional_unsigned)] http_port: Option<u16>,
        token: Option<String>,
        prefetch: Option<PrefetchArguments>,
        engine: Option<&Bound<'_, Engine>>,
    ) -> PyResult<Self> {
        log::install();
        log::warn_of_variables();
        let arguments = Arguments {
            master,
            name,
            metadata,
            segment_bytes,
            tenant,
            refuses_ignored_tenant,
            disks,
            is_tcp_forced,
            rdma_devices,
            rpc_timeout_s,
            connect_timeout_s,
            transfer_timeout_s,
            retry_s,
            fails_as_upstream,
            listen,
            has_checksums,
            http_port,
            token,
            prefetch,
        };
        let settings = or_raise(py, Settings::read(arguments))?;
        let runtime = or_raise(py, runtime())?;
        let shared = engine.map(|engine| Arc::clone(engine.get().running()));
        let opened = limited(py, None, || Open::start(settings, shared, runtime))?;
        let store = Arc::new(opened);
        open::track(&store);
        forget_last();
        Ok(Self { open: Some(store), timeout: None })
    }

    /// Joins a pool as a dummy client of the daemon of this host.
    #[staticmethod]
    #[pyo3(signature = (
        daemon, *, pool_bytes = 0, is_tcp_forced = None, rpc_timeout_s = None,
        connect_timeout_s = None, transfer_timeout_s = None, retry_s = None,
        fails_as_upstream = false, has_checksums = None, http_port = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "a call of Python with many options")]
    fn connect_daemon(
        py: Python<'_>,
        daemon: String,
        #[pyo3(from_py_with = argument::unsigned)] pool_bytes: u64,
        is_tcp_forced: Option<bool>,
        rpc_timeout_s: Option<f64>,
        connect_timeout_s: Option<f64>,
        transfer_timeout_s: Option<f64>,
        retry_s: Option<f64>,
        fails_as_upstream: bool,
        has_checksums: Option<bool>,
        #[pyo3(from_py_with = argument::optional_unsigned)] http_port: Option<u16>,
    ) -> PyResult<Self> {
        log::install();
        log::warn_of_variables();
        let runtime = or_raise(py, runtime())?;
        let arguments = DummyArguments {
            is_tcp_forced,
            rpc_timeout_s,
            connect_timeout_s,
            transfer_timeout_s,
            retry_s,
            fails_as_upstream,
            has_checksums,
            http_port,
        };
        let open = || Open::start_dummy(&daemon, pool_bytes, &arguments, runtime);
        let store = Arc::new(limited(py, None, open)?);
        open::track(&store);
        forget_last();
        Ok(Self { open: Some(store), timeout: None })
    }

    /// Returns the same store with a limit for the duration of each call.
    fn within(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Self> {
        let timeout = or_raise(py, settings::seconds("timeout_s", Some(timeout_s)))?;
        Ok(Self { open: self.open.clone(), timeout })
    }

    /// Leaves the pool. Objects whose only copy this process held are lost.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open();
        or_raise(py, detached(py, || open.close()))
    }

    /// Returns the counters of this client.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = self.call(py, |client| client.metrics())?;
        describe::metrics(py, &metrics)
    }

    /// The name of this client's segments.
    #[getter]
    fn hostname(&self) -> String {
        self.open().names().0
    }

    /// The address of the master, with which other processes join.
    #[getter]
    fn master_address(&self) -> String {
        self.open().names().1
    }

    /// The address of the client's HTTP server as `host:port`, if it has one.
    #[getter]
    fn http_address(&self) -> Option<String> {
        self.open().http_address().map(|address| address.to_string())
    }

    /// Returns the counters as Prometheus text.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, metrics_text)
    }

    /// True if the master runs in this process, for this store.
    #[getter]
    fn is_embedded(&self) -> bool {
        self.open().is_embedded()
    }

    /// True for a dummy client, which reaches the master through the daemon of this host.
    #[getter]
    fn is_dummy(&self) -> bool {
        self.open().is_dummy()
    }

    /// True if the store was closed, or opened before this process was forked.
    #[getter]
    fn is_closed(&self) -> bool {
        self.open().is_closed() || self.open().is_forked()
    }
}

impl Store {
    pub(crate) fn open(&self) -> &Arc<Open> {
        self.open.as_ref().expect("only drop takes what is inside")
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            open::release(open);
        }
    }
}
