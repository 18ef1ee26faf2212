//! Functions about the process as a whole: its exit, its environment, its memory, and the programs
//! that the wheel installs.

use mooncake_base::env;
use mooncake_transfer_engine::Topology;
use pyo3::prelude::*;

use crate::{
    detach::{begin_exit, detached},
    engine::close_all,
    error::or_raise,
    store::all_open,
};

/// An environment variable: name, older names, default, help, current value.
type Variable = (&'static str, Vec<&'static str>, &'static str, &'static str, Option<String>);

/// Refuses new calls of other threads and closes every store and engine. To be called at
/// interpreter exit.
#[pyfunction]
pub(crate) fn at_exit(py: Python<'_>) {
    begin_exit(py);
    let stores = all_open();
    let close_engines = close_all();
    py.detach(|| {
        stores.iter().for_each(|store| store.close());
        close_engines();
    });
}

/// Runs the master until it is stopped; returns its exit code.
#[pyfunction]
pub(crate) fn run_master(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    or_raise(py, detached(py, || mooncake_master::run(arguments)))
}

/// Runs the daemon of a host until it is stopped; returns its exit code.
#[pyfunction]
pub(crate) fn run_daemon(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    or_raise(py, detached(py, || mooncake_daemon::run(arguments)))
}

/// Runs the benchmark of the transfer engine; returns its exit code.
#[pyfunction]
pub(crate) fn run_transfer_bench(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    or_raise(py, detached(py, || mooncake_transfer_tools::bench::run(arguments)))
}

/// Prints the topology of this machine; returns the exit code.
#[pyfunction]
pub(crate) fn run_topology_dump(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    or_raise(py, detached(py, || mooncake_transfer_tools::topology_dump::run(arguments)))
}

/// Returns which devices are near which memory as JSON, read from the file that the environment
/// names or from the kernel.
#[pyfunction]
#[pyo3(signature = (wanted, *, is_custom = true))]
pub(crate) fn local_topology(py: Python<'_>, wanted: &str, is_custom: bool) -> PyResult<String> {
    let found = detached(py, || {
        if is_custom {
            mooncake_settings::engine::topology(wanted)
        } else {
            Ok(Topology::local(wanted))
        }
    });
    or_raise(py, found.and_then(|found| found)).map(|topology| topology.to_json())
}

/// Returns every environment variable that is read.
#[pyfunction]
pub(crate) fn environment() -> Vec<Variable> {
    env::ALL
        .iter()
        .map(|var| (var.name, var.aliases.to_vec(), var.default, var.help, var.read()))
        .collect()
}

/// Returns the names of the variables whose values must not be shown.
#[pyfunction]
pub(crate) fn secret_variables() -> Vec<&'static str> {
    env::ALL.iter().filter(|var| var.is_secret()).map(|var| var.name).collect()
}

/// Returns the variables whose values are invalid, each with the reason and what the value does.
#[pyfunction]
pub(crate) fn invalid_variables() -> Vec<(&'static str, String)> {
    env::ALL
        .iter()
        .filter_map(|var| Some((var.name, mooncake_cli::variables::invalid(var)?.text())))
        .collect()
}

/// Returns the variables of upstream that have no effect here, each with the reason.
#[pyfunction]
pub(crate) fn unsupported_variables() -> Vec<(&'static str, &'static str)> {
    let named = |row: &'static env::Unsupported| row.names.iter().map(|name| (*name, row.reason));
    env::UNSUPPORTED.iter().flat_map(named).collect()
}

/// Returns the least memory limit of the control groups of this process and the memory that they
/// still permit, in bytes; `None` without a limit.
#[pyfunction]
pub(crate) fn cgroup_memory() -> Option<(u64, u64)> {
    mooncake_os::memory::cgroup_memory().map(|memory| (memory.limit, memory.available))
}

/// Returns the process that listens at a TCP port of this host, if it can be told.
#[pyfunction]
pub(crate) fn port_holder(py: Python<'_>, port: u16) -> PyResult<Option<String>> {
    or_raise(py, detached(py, || mooncake_os::port_holder(port)))
}
