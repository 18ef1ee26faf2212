//! `CollectiveContext`, `CollectiveGroup` and `Completion`: collective operations on memory that
//! the caller names by address and keeps until the operation is done.
#![allow(unsafe_code, reason = "operations read and write memory that the caller lends")]

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::{Clock, Error, Result, SystemClock, Token, env, exposition::Exposition};
use mooncake_collective::{
    Answer, Completion, Context, ContextConfig, Dtype, ELEMENTS, Fabric, Group, GroupConfig,
    HostRange, Mirror, Operation, Reduction, Status, add_metrics,
};
use mooncake_transfer_engine::{LocalRange, Opcode, TransferEntry, TransportKind};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    detach::{attached, detached},
    engine::{Engine, Running},
    error::{or_raise, py_error},
    log,
};

/// How often a wait looks for Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// A limit of the caller that cannot be counted.
const LIMIT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// How long an activation waits for ranks that do not wait in `join` yet.
const READY_LIMIT: Duration = Duration::from_secs(20);

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

/// Reads memory of ranks on other hosts over the RDMA devices of an engine.
#[derive(Debug)]
struct EngineFabric(Arc<Running>);

impl EngineFabric {
    /// Returns the fabric of an engine, if it has RDMA devices. Without them, ranks send bytes over
    /// their own connections.
    fn of(running: Arc<Running>) -> Result<Option<Arc<dyn Fabric>>> {
        let has_devices = running.engine()?.transports().any(|kind| kind == TransportKind::Rdma);
        Ok(has_devices.then(|| Arc::new(Self(running)) as Arc<dyn Fabric>))
    }
}

impl Fabric for EngineFabric {
    fn segment(&self) -> &str {
        self.0.segment()
    }

    fn register(&self, address: u64, length: u64) -> Result<()> {
        self.0.engine()?.regions().register(address, length, "*")
    }

    fn unregister(&self, address: u64) {
        let unregistered = self.0.engine().and_then(|engine| engine.regions().unregister(address));
        if let Err(error) = unregistered {
            tracing::debug!(%error, "memory of a process group was not unregistered");
        }
    }

    fn read(
        &self,
        segment: &str,
        address: u64,
        (base, length): (u64, u64),
        limit: Duration,
    ) -> Result<()> {
        let (engine, deadline) = (self.0.engine()?, SystemClock.now() + limit);
        let peer = engine.open(segment, deadline)?;
        // SAFETY: the group keeps its buffer until this call has returned.
        let target = unsafe { LocalRange::held(base as *mut u8, length as usize) };
        let mut entries = [TransferEntry::new(target, address)];
        engine.transfer(&peer, Opcode::Read, &mut entries, deadline);
        entries.into_iter().try_for_each(|entry| entry.outcome.unwrap_or(Ok(())))
    }
}

/// A group of processes, as this one sees it.
#[pyclass(frozen, module = "mooncake._native", name = "CollectiveGroup")]
#[derive(Debug)]
pub(crate) struct CollectiveGroup {
    group: Group,
    capacity: usize,
}

#[pymethods]
impl CollectiveGroup {
    /// Returns the highest active slot + 1.
    fn size(&self) -> usize {
        self.group.size()
    }

    /// Returns the number of the view.
    fn epoch(&self) -> u64 {
        self.group.epoch()
    }

    /// Returns for each slot whether it is active.
    fn active_ranks(&self) -> Vec<bool> {
        self.group.active()
    }

    /// Shows the active slots in memory of the caller, one 32-bit integer each, until `close`.
    fn set_mirror(&self, address: usize) {
        // SAFETY: the Python group keeps the tensor until it has closed this group.
        let mirror = unsafe { Mirror::new(address, self.capacity) };
        self.group.set_mirror(mirror);
    }

    /// Reduces `count` elements over all members.
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn allreduce(
        &self,
        py: Python<'_>,
        source: usize,
        target: usize,
        count: usize,
        dtype: u32,
        operation: u32,
    ) -> PyResult<CollectiveCompletion> {
        self.reduction(py, source, target, count, dtype, operation, None)
    }

    /// Reduces `count` elements over all members; the root gets the result.
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn reduce(
        &self,
        py: Python<'_>,
        source: usize,
        target: usize,
        count: usize,
        dtype: u32,
        operation: u32,
        root: usize,
    ) -> PyResult<CollectiveCompletion> {
        self.reduction(py, source, target, count, dtype, operation, Some(root))
    }

    /// Sends the bytes of the root to all members. `elements` is the code of their type, here and below.
    fn broadcast(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        root: usize,
        elements: u8,
    ) -> PyResult<CollectiveCompletion> {
        let range = range(address, length);
        self.begin(py, Operation::Broadcast { range, elements, root })
    }

    /// Gathers the bytes of each member at all members.
    fn allgather(
        &self,
        py: Python<'_>,
        source: usize,
        targets: Vec<usize>,
        length: usize,
        elements: u8,
    ) -> PyResult<CollectiveCompletion> {
        let targets = equal_ranges(targets, length);
        let source = range(source, length);
        self.begin(py, Operation::Gather { source, targets, elements, root: None })
    }

    /// Gathers the bytes of each member at the root.
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn gather(
        &self,
        py: Python<'_>,
        source: usize,
        targets: Vec<usize>,
        length: usize,
        root: usize,
        elements: u8,
    ) -> PyResult<CollectiveCompletion> {
        let targets = equal_ranges(targets, length);
        let source = range(source, length);
        self.begin(py, Operation::Gather { source, targets, elements, root: Some(root) })
    }

    /// Sends each slot its part of the bytes of the root.
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn scatter(
        &self,
        py: Python<'_>,
        sources: Vec<usize>,
        target: usize,
        length: usize,
        root: usize,
        elements: u8,
    ) -> PyResult<CollectiveCompletion> {
        let sources = equal_ranges(sources, length);
        let target = range(target, length);
        self.begin(py, Operation::Scatter { sources, target, elements, root })
    }

    /// Reduces a part per slot; this member gets that of its slot, of `length` elements.
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        sources: Vec<usize>,
        counts: Vec<usize>,
        target: usize,
        count: usize,
        dtype: u32,
        operation: u32,
    ) -> PyResult<CollectiveCompletion> {
        let (dtype, how) = or_raise(py, codes(dtype, operation))?;
        let lengths = counts.into_iter().map(|count| count.saturating_mul(dtype.size()));
        let sources = sources.into_iter().zip(lengths).map(|(at, length)| range(at, length));
        let sources = sources.collect();
        let target = range(target, count.saturating_mul(dtype.size()));
        self.begin(py, Operation::ReduceScatter { sources, target, dtype, how })
    }

    /// Sends bytes to each slot, and takes bytes from each.
    #[allow(clippy::too_many_arguments, reason = "the binding names each argument")]
    fn all_to_all(
        &self,
        py: Python<'_>,
        sources: Vec<usize>,
        source_lengths: Vec<usize>,
        targets: Vec<usize>,
        target_lengths: Vec<usize>,
        elements: u8,
    ) -> PyResult<CollectiveCompletion> {
        let ranges = |addresses: Vec<usize>, lengths: Vec<usize>| {
            addresses.into_iter().zip(lengths).map(|(at, length)| range(at, length)).collect()
        };
        let sources = ranges(sources, source_lengths);
        let targets = ranges(targets, target_lengths);
        self.begin(py, Operation::AllToAll { sources, targets, elements })
    }

    /// Waits for all members.
    fn barrier(&self, py: Python<'_>) -> PyResult<CollectiveCompletion> {
        self.begin(py, Operation::Barrier)
    }

    /// Sends a message; done when the receiver has taken it.
    fn send(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        to: usize,
        tag: u32,
    ) -> PyResult<CollectiveCompletion> {
        or_raise(py, self.group.send(range(address, length), to, tag)).map(CollectiveCompletion)
    }

    /// Receives a message of a slot; of any if none is given.
    fn recv(
        &self,
        py: Python<'_>,
        address: usize,
        length: usize,
        source: Option<usize>,
        tag: u32,
    ) -> PyResult<CollectiveCompletion> {
        let received = self.group.receive(range(address, length), source, tag);
        or_raise(py, received).map(CollectiveCompletion)
    }

    /// Returns for each slot whether its rank is reachable and active, or waits for activation.
    fn peer_state(&self) -> Vec<bool> {
        self.group.peers()
    }

    /// Gives up a receive that has got no message, and returns whether it had got none.
    fn cancel_receive(&self, completion: &CollectiveCompletion) -> bool {
        self.group.cancel_receive(&completion.0)
    }

    /// Makes ranks that wait in `join` members; returns status, epoch, dropped ranks and reason.
    /// Waits for ranks that do not wait in `join` yet, and at most `limit_s` for the members to agree.
    fn activate(&self, py: Python<'_>, slots: Vec<usize>, limit_s: f64) -> PyResult<AnswerParts> {
        let limit = limit(limit_s);
        let end = Instant::now() + READY_LIMIT;
        loop {
            let version = self.group.peers_version();
            let answer = ask(py, || self.group.activate(slots.clone(), limit))?;
            if answer.status != Status::NotReady || !self.await_peers(py, version, end)? {
                return Ok(parts(answer));
            }
        }
    }

    /// Takes ranks out of the view; returns as `activate`.
    fn deactivate(&self, py: Python<'_>, slots: Vec<usize>, limit_s: f64) -> PyResult<AnswerParts> {
        ask(py, || self.group.deactivate(slots, limit(limit_s))).map(parts)
    }

    /// Returns whether the members have agreed on a loss since the last call.
    fn sync_after_failure(&self, py: Python<'_>, limit_s: f64) -> PyResult<bool> {
        let answer = ask(py, || self.group.synchronize(limit(limit_s)))?;
        Ok(answer.status == Status::Applied)
    }

    /// Waits until a member activates this rank; returns whether one did.
    fn join(&self, py: Python<'_>, timeout_us: u64) -> PyResult<bool> {
        or_raise(py, detached(py, || self.group.begin_join()).and_then(|begun| begun))?;
        let end = Instant::now() + Duration::from_micros(timeout_us);
        loop {
            let left = end.saturating_duration_since(Instant::now()).min(SIGNAL_INTERVAL);
            let joined = detached(py, || self.group.wait_joined(left)).and_then(|it| it);
            if or_raise(py, joined)? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Returns what the group did, by name.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.group.counters();
        let operations = PyDict::new(py);
        for (name, one) in counters.operations {
            let values = PyDict::new(py);
            values.set_item("count", one.latency.count())?;
            values.set_item("bytes", one.bytes)?;
            values.set_item("losses", one.losses)?;
            values.set_item("errors", one.errors)?;
            values.set_item("seconds_total", one.latency.sum().as_secs_f64())?;
            values.set_item("seconds_max", one.time_max.as_secs_f64())?;
            for (name, part) in [("seconds_p50", 0.5), ("seconds_p99", 0.99)] {
                let bound = one.latency.quantile(part).unwrap_or_default();
                values.set_item(name, bound.min(one.time_max).as_secs_f64())?;
            }
            operations.set_item(name, values)?;
        }
        let values = PyDict::new(py);
        values.set_item("epoch", self.group.epoch())?;
        values.set_item("active_ranks", self.group.active())?;
        values.set_item("bytes_sent", counters.bytes_sent)?;
        values.set_item("bytes_fetched", counters.bytes_fetched)?;
        values.set_item("bytes_buffered", counters.bytes_buffered)?;
        values.set_item("operations", operations)?;
        Ok(values)
    }

    /// Ends the group: operations that are not done fail.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        or_raise(py, detached(py, || self.group.close()))
    }
}

impl CollectiveGroup {
    /// Waits until `end` and returns whether the state of a peer has changed since `version`.
    fn await_peers(&self, py: Python<'_>, version: u64, end: Instant) -> PyResult<bool> {
        loop {
            let left = end.saturating_duration_since(Instant::now()).min(SIGNAL_INTERVAL);
            let changed = detached(py, || self.group.wait_peers(version, left)).and_then(|it| it);
            if or_raise(py, changed)? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    fn begin(&self, py: Python<'_>, operation: Operation) -> PyResult<CollectiveCompletion> {
        or_raise(py, self.group.begin_for_waiter(operation)).map(CollectiveCompletion)
    }

    fn reduction(
        &self,
        py: Python<'_>,
        source: usize,
        target: usize,
        count: usize,
        dtype: u32,
        operation: u32,
        root: Option<usize>,
    ) -> PyResult<CollectiveCompletion> {
        let (dtype, how) = or_raise(py, codes(dtype, operation))?;
        let length = count.saturating_mul(dtype.size());
        let (source, target) = (range(source, length), range(target, length));
        self.begin(py, Operation::Reduce { source, target, dtype, how, root })
    }
}

/// The end of an operation.
#[pyclass(frozen, module = "mooncake._native", name = "CollectiveCompletion")]
#[derive(Debug)]
pub(crate) struct CollectiveCompletion(Completion);

#[pymethods]
impl CollectiveCompletion {
    /// Lets the group carry out the operation without a thread that waits for it.
    fn start(&self) {
        self.0.start();
    }

    /// Waits at most `timeout_s` and returns whether the operation is done.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        if self.0.wait(Duration::ZERO) {
            return Ok(true);
        }
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX);
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed()).min(SIGNAL_INTERVAL);
            if or_raise(py, detached(py, || self.0.wait(left)))? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Returns whether the operation is done. Looks for frames of the peers.
    fn done(&self) -> bool {
        self.0.wait(Duration::ZERO)
    }

    /// Whether the end of the operation was seen already, without a look at the peers.
    #[getter]
    fn has_ended(&self) -> bool {
        self.0.is_done()
    }

    /// Returns why the operation failed as a whole.
    fn error<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let error = self.0.outcome()?.error?;
        Some(py_error(py, &error).into_value(py).into_bound(py).into_any())
    }

    /// Returns the slots that were lost while the operation ran.
    fn failed_ranks(&self) -> Vec<usize> {
        self.0.outcome().map(|outcome| outcome.failed_slots).unwrap_or_default()
    }

    /// Returns the slot that a receive got its message from.
    fn source(&self) -> Option<usize> {
        self.0.outcome()?.source
    }

    /// Calls `callback` once the operation is done, from a native thread; at once if it is.
    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let completion = self.0.clone();
        let call = Box::new(move || {
            attached(|py| {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, None);
                }
            });
        });
        or_raise(py, detached(py, || completion.on_done(call)))
    }
}

type AnswerParts = (u32, u64, Vec<usize>, String);

fn ask(py: Python<'_>, ask: impl FnOnce() -> Result<Answer> + Send) -> PyResult<Answer> {
    or_raise(py, detached(py, ask).and_then(|answer| answer))
}

fn parts(answer: Answer) -> AnswerParts {
    let status = match answer.status {
        Status::Rejected | Status::NothingPending | Status::NotReady => 0,
        Status::Applied => 1,
        Status::AppliedWithDropped => 2,
    };
    (status, answer.epoch, answer.dropped, answer.reason)
}

fn codes(dtype: u32, operation: u32) -> Result<(Dtype, Reduction)> {
    Ok((Dtype::from_code(dtype)?, Reduction::from_code(operation)?))
}

fn limit(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(LIMIT_MAX)
}

fn equal_ranges(addresses: Vec<usize>, length: usize) -> Vec<HostRange> {
    addresses.into_iter().map(|address| range(address, length)).collect()
}

fn range(address: usize, length: usize) -> HostRange {
    // SAFETY: the Python work keeps the tensors until the operation is done.
    unsafe { HostRange::new(address, length) }
}
