//! `CollectiveGroup`: the operations of a group, on memory that the caller names by address.
#![allow(unsafe_code, reason = "operations read and write memory that the caller lends")]

use std::time::{Duration, Instant};

use mooncake_base::Result;
use mooncake_collective::{Answer, Dtype, Group, HostRange, Mirror, Operation, Reduction, Status};
use pyo3::{prelude::*, types::PyDict};

use super::{SIGNAL_INTERVAL, completion::CollectiveCompletion, limit};
use crate::{detach::detached, error::or_raise};

/// How long an activation waits for ranks that do not wait in `join` yet.
const READY_LIMIT: Duration = Duration::from_secs(20);

/// A group of processes, as this one sees it.
#[pyclass(frozen, module = "mooncake._native", name = "CollectiveGroup")]
#[derive(Debug)]
pub(crate) struct CollectiveGroup {
    pub(super) group: Group,
    pub(super) capacity: usize,
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

    /// Gives up a receive unless its bytes arrive just now, and returns whether it was given up.
    fn cancel_receive(&self, completion: &CollectiveCompletion) -> bool {
        self.group.cancel_receive(&completion.0)
    }

    /// Withdraws a message unless its receiver has taken it, and returns whether it was withdrawn.
    fn cancel_send(&self, py: Python<'_>, completion: &CollectiveCompletion) -> PyResult<bool> {
        or_raise(py, detached(py, || self.group.cancel_send(&completion.0)))
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

fn equal_ranges(addresses: Vec<usize>, length: usize) -> Vec<HostRange> {
    addresses.into_iter().map(|address| range(address, length)).collect()
}

fn range(address: usize, length: usize) -> HostRange {
    // SAFETY: the Python work keeps the tensors until the operation is done.
    unsafe { HostRange::new(address, length) }
}
