//! `Engine`: a transfer engine without a pool. Each transfer is a batch; a failed transfer raises.

mod batch;
mod open;
mod report;

use std::{sync::Arc, time::Duration};

use mooncake_base::{Clock, Error, Moment, Result, SystemClock};
use mooncake_settings::{engine_config, use_rdma};
use mooncake_transfer_engine::{
    BatchId, BatchStatus, Opcode, Stream, TransferEntry, TransportKind, copy::copy,
    discovery::handshake::Notification,
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict},
};

use self::batch::{Batch, Numbers};
pub(crate) use self::open::{Running, close_all};
use crate::{
    argument::Unsigned,
    buffer::uninit_bytes,
    caller_memory::{Views, caller_range, caller_ranges},
    detach::detached,
    error::{forget_last, or_raise},
    log,
    runtime::runtime,
};

/// Adds one nanosecond per byte to the timeout of a transfer.
const BYTES_PER_SECOND: u64 = 1_000_000_000;

/// A transfer engine.
#[pyclass(frozen, module = "mooncake._native", name = "Engine")]
#[derive(Debug)]
pub(crate) struct Engine(Option<Arc<Running>>);

#[pymethods]
impl Engine {
    /// Starts an engine that listens and publishes its segment.
    #[staticmethod]
    #[pyo3(signature = (*, name, metadata, is_tcp_forced = None, rdma_devices = None))]
    fn start(
        py: Python<'_>,
        name: &str,
        metadata: &str,
        is_tcp_forced: Option<bool>,
        rdma_devices: Option<&str>,
    ) -> PyResult<Self> {
        log::install();
        log::warn_of_variables();
        let mut config = or_raise(py, engine_config(name, metadata, is_tcp_forced))?;
        or_raise(py, use_rdma(&mut config, rdma_devices))?;
        let runtime = or_raise(py, runtime())?;
        let started = detached(py, || Running::start(config, runtime)).and_then(|started| started);
        let running = Arc::new(or_raise(py, started)?);
        open::track(&running);
        forget_last();
        Ok(Self(Some(running)))
    }

    /// Registers memory ranges of this process for peers, all of them or none. Touches no page.
    #[pyo3(signature = (addresses, lengths, *, location = "*"))]
    fn register(
        &self,
        py: Python<'_>,
        addresses: Numbers,
        lengths: Numbers,
        location: &str,
    ) -> PyResult<()> {
        let ranges = or_raise(py, addresses.ranges(&lengths))?;
        self.call(py, |running| running.engine()?.regions().register_all(&ranges, location))
    }

    /// Unregisters ranges by their first addresses. Every range is tried, also after a failure.
    fn unregister(&self, py: Python<'_>, addresses: Numbers) -> PyResult<()> {
        let addresses = addresses.as_u64();
        self.call(py, |running| running.engine()?.regions().unregister_all(&addresses))
    }

    /// Transfers a batch between this process and a segment, then notifies the segment's owner.
    /// Returns the transport that served.
    #[pyo3(signature = (segment, addresses, peer_addresses, lengths, *, is_write, timeout_s, notify = None, hint = ""))]
    #[allow(clippy::too_many_arguments, reason = "each setting is a keyword")]
    fn transfer(
        &self,
        py: Python<'_>,
        segment: &str,
        addresses: Numbers,
        peer_addresses: Numbers,
        lengths: Numbers,
        is_write: bool,
        timeout_s: f64,
        notify: Option<(String, String)>,
        hint: &str,
    ) -> PyResult<Option<&'static str>> {
        let batch = or_raise(py, Batch::new(addresses, peer_addresses, lengths))?;
        let deadline = or_raise(py, deadline(timeout_s, batch.bytes()))?;
        let notification = notify.map(|(name, message)| Notification { name, message });
        let hint = TransportKind::from_name(hint);
        self.call(py, |running| {
            let checked = |sent| running.engine()?.check_notification(sent);
            notification.as_ref().map_or(Ok(()), checked)?;
            let mut entries = batch.into_entries();
            let opcode = opcode(is_write);
            let served = transfer_batch(running, segment, opcode, deadline, hint, &mut entries)?;
            if let Some(notification) = notification {
                running.engine()?.notify(segment, &notification, deadline)?;
            }
            Ok(served.map(|kind| kind.name()))
        })
    }

    /// Transfers one range between this process and a segment. Equivalent to a batch of one,
    /// without lists and keywords, for callers that count microseconds.
    #[pyo3(signature = (segment, address, peer_address, length, is_write, timeout_s, hint, /))]
    #[allow(clippy::too_many_arguments, reason = "a structure would have to be made in Python")]
    fn transfer_one(
        &self,
        py: Python<'_>,
        segment: &str,
        address: Unsigned,
        peer_address: Unsigned,
        length: Unsigned,
        is_write: bool,
        timeout_s: f64,
        hint: &str,
    ) -> PyResult<()> {
        let deadline = or_raise(py, deadline(timeout_s, length.0 as u64))?;
        let (opcode, hint) = (opcode(is_write), TransportKind::from_name(hint));
        let entry = TransferEntry::new(caller_range(address.0, length.0), peer_address.0 as u64);
        self.call(py, |running| {
            transfer_batch(running, segment, opcode, deadline, hint, &mut [entry]).map(drop)
        })
    }

    /// Transfers a batch in the order of a CUDA stream: after all work submitted before, and before
    /// all work submitted later.
    #[pyo3(signature = (segment, addresses, peer_addresses, lengths, *, stream, is_write, timeout_s, hint = ""))]
    #[allow(clippy::too_many_arguments, reason = "each setting is a keyword")]
    fn transfer_on_stream(
        &self,
        py: Python<'_>,
        segment: &str,
        addresses: Numbers,
        peer_addresses: Numbers,
        lengths: Numbers,
        stream: Unsigned,
        is_write: bool,
        timeout_s: f64,
        hint: &str,
    ) -> PyResult<Option<&'static str>> {
        let batch = or_raise(py, Batch::new(addresses, peer_addresses, lengths))?;
        let deadline = or_raise(py, deadline(timeout_s, batch.bytes()))?;
        let hint = TransportKind::from_name(hint);
        self.call(py, |running| {
            let engine = running.engine()?;
            let on_stream = engine.on_stream(Stream(stream.0))?;
            let peer = engine.open(segment, deadline).map_err(|error| {
                // Upstream's error text, which callers match.
                Error::new(error.code(), "Failed to open segment")
                    .with("segment", segment)
                    .caused_by(error)
            })?;
            let mut entries = batch.into_entries();
            let served =
                on_stream.transfer(&peer, opcode(is_write), &mut entries, deadline, hint)?;
            entries.into_iter().try_for_each(|entry| entry.outcome.unwrap_or(Ok(())))?;
            Ok(served.map(|kind| kind.name()))
        })
    }

    /// Begins to transfer a batch; returns its number.
    #[pyo3(signature = (segment, addresses, peer_addresses, lengths, *, is_write, timeout_s, hint = ""))]
    #[allow(clippy::too_many_arguments, reason = "each setting is a keyword")]
    fn submit(
        &self,
        py: Python<'_>,
        segment: &str,
        addresses: Numbers,
        peer_addresses: Numbers,
        lengths: Numbers,
        is_write: bool,
        timeout_s: f64,
        hint: &str,
    ) -> PyResult<u64> {
        let batch = or_raise(py, Batch::new(addresses, peer_addresses, lengths))?;
        let deadline = or_raise(py, deadline(timeout_s, batch.bytes()))?;
        self.call(py, |running| {
            let engine = running.engine()?;
            let peer = engine.open(segment, deadline)?;
            let (opcode, hint) = (opcode(is_write), TransportKind::from_name(hint));
            let entries = batch.into_entries();
            Ok(engine.submit_hinted(peer, opcode, entries, deadline, hint)?.number())
        })
    }

    /// Returns whether a submitted batch has ended. Its outcome is reported once.
    fn is_done(&self, py: Python<'_>, batch: Unsigned) -> PyResult<bool> {
        let batch = BatchId::from_number(batch.0 as u64);
        self.call(py, |running| is_ended(running.engine()?.status(batch)?))
    }

    /// Waits until all of the batches have ended.
    fn wait(&self, py: Python<'_>, batches: Numbers) -> PyResult<()> {
        let batches: Vec<_> = batches.as_u64().into_iter().map(BatchId::from_number).collect();
        self.call(py, |running| {
            let ends = running.engine()?.wait(&batches)?;
            ends.into_iter().try_for_each(|end| is_ended(end).map(drop))
        })
    }

    /// Allocates a buffer of at least that many bytes that peers can reach; returns its address.
    fn allocate(&self, py: Python<'_>, length: Unsigned) -> PyResult<u64> {
        self.call(py, |running| running.buffers()?.allocate(length.0 as u64))
    }

    /// Frees a buffer that `allocate` returned.
    fn free(&self, py: Python<'_>, address: Unsigned, length: Unsigned) -> PyResult<()> {
        self.call(py, |running| running.buffers()?.free(address.0 as u64, length.0 as u64))
    }

    /// Takes the received notifications (name, message), oldest first.
    fn take_notifications(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        let taken = self.call(py, |running| Ok(running.engine()?.take_notifications()))?;
        Ok(taken.into_iter().map(|taken| (taken.name, taken.message)).collect())
    }

    /// Returns address and length of the ranges of a segment, in the order of registration.
    #[pyo3(signature = (segment, *, timeout_s))]
    fn ranges(&self, py: Python<'_>, segment: &str, timeout_s: f64) -> PyResult<Vec<(u64, u64)>> {
        let deadline = or_raise(py, deadline(timeout_s, 0))?;
        let found = self
            .call(py, |running| running.engine()?.metadata().resolve(segment, deadline))?
            .buffers;
        Ok(found.into_iter().map(|buffer| (buffer.addr, buffer.length)).collect())
    }

    /// Raises unless the owner of a segment answers.
    #[pyo3(signature = (segment, *, timeout_s))]
    fn probe(&self, py: Python<'_>, segment: &str, timeout_s: f64) -> PyResult<()> {
        let deadline = or_raise(py, deadline(timeout_s, 0))?;
        self.call(py, |running| running.engine()?.probe(segment, deadline))
    }

    /// Returns counters of each transport and peer, and the fill levels of the pools.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.call(py, |running| Ok(running.engine()?.snapshot()))?;
        report::dictionary(py, &snapshot)
    }

    /// Returns the counters as Prometheus text.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |running| Ok(running.engine()?.snapshot().prometheus()))
    }

    /// The name by which peers open the segment of this engine.
    #[getter]
    fn segment(&self) -> String {
        self.running().segment().to_owned()
    }

    /// The port that answers metadata requests of peers.
    #[getter]
    fn rpc_port(&self) -> u16 {
        self.running().rpc_port()
    }

    /// A number that is unique among the live engines of this process.
    #[getter]
    fn identity(&self) -> usize {
        Arc::as_ptr(self.running()) as usize
    }

    /// True if the engine was started before this process was forked.
    #[getter]
    fn is_closed(&self) -> bool {
        self.running().engine().is_err()
    }
}

/// Copies bytes to an address; returns an error if the address is not writable.
#[pyfunction]
pub(crate) fn write_memory(
    py: Python<'_>,
    address: Unsigned,
    data: &Bound<'_, PyAny>,
    length: Unsigned,
) -> PyResult<()> {
    let view = Views::of(data)?;
    let given = view.ranges().first().map_or(0, |range| range.length());
    if length.0 > given {
        let error = Error::invalid("the data is shorter than the length to write")
            .with("length", length.0)
            .with("given", given);
        return or_raise(py, Err(error));
    }
    if length.0 == 0 {
        return Ok(());
    }
    let Some(from) = view.ranges().first() else { return Ok(()) };
    let from = from.part(0, length.0);
    let to = caller_ranges(vec![(address.0, length.0)]);
    let copied = detached(py, || to.into_iter().try_for_each(|to| copy(from, to)));
    or_raise(py, copied.and_then(|copied| copied))
}

/// Returns the bytes at an address; returns an error if the address is not readable.
#[pyfunction]
pub(crate) fn read_memory(
    py: Python<'_>,
    address: Unsigned,
    length: Unsigned,
) -> PyResult<Py<PyBytes>> {
    let (bytes, to) = uninit_bytes(py, length.0 as u64)?;
    let from = caller_ranges(vec![(address.0, length.0)]);
    let copied = detached(py, || from.into_iter().try_for_each(|from| copy(from, to)));
    or_raise(py, copied.and_then(|copied| copied))?;
    Ok(bytes)
}

impl Engine {
    /// The running engine, for stores that share it.
    pub(crate) fn running(&self) -> &Arc<Running> {
        self.0.as_ref().expect("only drop takes what is inside")
    }

    /// Makes a call without holding the interpreter; raises its error.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Running) -> Result<T> + Send,
    ) -> PyResult<T> {
        let running = self.running();
        let answer = or_raise(py, detached(py, || call(running)).and_then(|answer| answer))?;
        forget_last();
        Ok(answer)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let Some(running) = self.0.take() else { return };
        if running.is_forked() {
            // Locks may be held by threads that do not exist in this process, so the engine is
            // leaked.
            std::mem::forget(running);
            return;
        }
        Python::attach(|py| {
            // During exit the call is refused, and the process ends anyway.
            let _ = detached(py, || drop(running));
        });
    }
}

/// Transfers the entries of a batch; returns the transport that served.
fn transfer_batch(
    running: &Running,
    segment: &str,
    opcode: Opcode,
    deadline: Moment,
    hint: Option<TransportKind>,
    entries: &mut [TransferEntry],
) -> Result<Option<TransportKind>> {
    let engine = running.engine()?;
    let peer = engine.open(segment, deadline)?;
    let served = engine.transfer_hinted(&peer, opcode, entries, deadline, hint);
    entries.iter_mut().try_for_each(|entry| entry.outcome.take().unwrap_or(Ok(())))?;
    Ok(served)
}

fn opcode(is_write: bool) -> Opcode {
    if is_write { Opcode::Write } else { Opcode::Read }
}

fn deadline(timeout_s: f64, bytes: u64) -> Result<Moment> {
    let timeout = Duration::try_from_secs_f64(timeout_s).map_err(|_| {
        Error::invalid("a timeout must be a number of seconds").with("timeout_s", timeout_s)
    })?;
    Ok(SystemClock.now()
        + timeout
        + Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND as f64))
}

fn is_ended(status: BatchStatus) -> Result<bool> {
    match status {
        BatchStatus::Running => Ok(false),
        BatchStatus::Done => Ok(true),
        BatchStatus::Failed(error) => Err(error),
        BatchStatus::TimedOut(error) => Err(Error::new(
            mooncake_base::ErrorCode::RPC_TIMEOUT,
            "the deadline of the batch passed",
        )
        .caused_by(error)),
    }
}
