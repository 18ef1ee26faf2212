//! `RpcClient` and `RpcServer`: messages between processes. Server threads never enter the
//! interpreter; Python threads take the received messages.

use std::{
    io::{self, Read},
    sync::Arc,
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Endpoint, Error, Result};
use mooncake_rpc::{Client, ClientConfig, Delivery, Kind, Server, ServerConfig};
use mooncake_transfer_engine::{LocalRange, copy};
use pyo3::prelude::*;

use crate::{buffer::Buffer, caller_memory::Views, detach::detached, error::or_raise};

/// A client that sends to any number of servers, from any number of threads.
#[pyclass(frozen, module = "mooncake._native", name = "RpcClient")]
#[derive(Debug)]
pub(crate) struct RpcClient(Client);

#[pymethods]
impl RpcClient {
    /// Makes a client without connections.
    #[new]
    #[pyo3(signature = (*, connections_max, timeout_s))]
    fn new(py: Python<'_>, connections_max: usize, timeout_s: f64) -> PyResult<Self> {
        let config = timeout(timeout_s).map(|timeout| ClientConfig { connections_max, timeout });
        or_raise(py, config.and_then(Client::new)).map(Self)
    }

    /// Sends bytes and waits until the receiver has accepted them; raises if it does not.
    #[pyo3(signature = (target, body, *, tensor = None))]
    fn send(
        &self,
        py: Python<'_>,
        target: &str,
        body: &Bound<'_, PyAny>,
        tensor: Option<&str>,
    ) -> PyResult<()> {
        let views = Views::of(body)?;
        let ranges = views.ranges().to_vec();
        let length = ranges.iter().map(|range| range.length() as u64).sum();
        let (kind, meta) = tensor.map_or((Kind::Data, ""), |meta| (Kind::Tensor, meta));
        let sent = detached(py, || {
            self.0.send(target, kind, meta.as_bytes(), &mut RangesReader { ranges, at: 0 }, length)
        });
        or_raise(py, sent.and_then(|sent| sent))
    }
}

/// A server that receives until it is stopped or dropped.
#[pyclass(frozen, module = "mooncake._native", name = "RpcServer")]
#[derive(Debug)]
pub(crate) struct RpcServer(Option<Arc<Server>>);

#[pymethods]
impl RpcServer {
    /// Starts a server that listens at `address`.
    #[new]
    #[pyo3(signature = (address, *, timeout_s))]
    fn new(py: Python<'_>, address: &str, timeout_s: f64) -> PyResult<Self> {
        let start = || {
            let listen: Endpoint = address.parse()?;
            let config = ServerConfig { timeout: timeout(timeout_s)?, ..ServerConfig::default() };
            Server::start(&listen, config)
        };
        let server = or_raise(py, detached(py, start).and_then(|server| server))?;
        Ok(Self(Some(Arc::new(server))))
    }

    /// Waits for the next message; returns `None` on timeout. Raises once the server is stopped.
    #[pyo3(signature = (*, timeout_s))]
    fn take(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<RpcDelivery>> {
        let server = self.server();
        let taken = detached(py, || server.take(timeout(timeout_s)?));
        let delivery = or_raise(py, taken.and_then(|taken| taken))?;
        delivery.map(|delivery| RpcDelivery::new(py, delivery)).transpose()
    }

    /// Stops listening and ends every connection.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let server = self.server();
        or_raise(py, detached(py, || server.stop()))
    }

    /// Returns the address that the server listens at.
    #[getter]
    fn address(&self) -> String {
        self.server().address().to_string()
    }
}

impl RpcServer {
    fn server(&self) -> &Arc<Server> {
        self.0.as_ref().expect("only drop takes what is inside")
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        let server = self.0.take();
        Python::attach(|py| {
            // During exit the call is refused, and the process ends anyway.
            let _ = detached(py, || drop(server));
        });
    }
}

/// A received message. The sender sees a refusal if it is dropped without an answer.
#[pyclass(frozen, module = "mooncake._native", name = "RpcDelivery")]
#[derive(Debug)]
pub(crate) struct RpcDelivery {
    /// Address of the sender.
    #[pyo3(get)]
    source: String,
    /// Description of dtype and shape, if the body is a tensor.
    #[pyo3(get)]
    tensor: Option<String>,
    /// The payload.
    #[pyo3(get)]
    body: Py<Buffer>,
    delivery: Mutex<Option<Delivery>>,
}

#[pymethods]
impl RpcDelivery {
    /// Accepts the message, or refuses it with a reason. Only the first answer counts.
    #[pyo3(signature = (refusal = None))]
    fn answer(&self, refusal: Option<String>) {
        if let Some(delivery) = self.delivery.lock().take() {
            delivery.answer(refusal.map_or(Ok(()), Err));
        }
    }
}

impl RpcDelivery {
    fn new(py: Python<'_>, mut delivery: Delivery) -> PyResult<Self> {
        let body = Py::new(py, Buffer::of(delivery.take_body()))?;
        let tensor = match delivery.kind {
            Kind::Tensor => Some(String::from_utf8_lossy(&delivery.meta).into_owned()),
            _ => None,
        };
        let source = delivery.source.to_string();
        Ok(Self { source, tensor, body, delivery: Mutex::new(Some(delivery)) })
    }
}

/// A reader over several ranges of caller memory.
struct RangesReader {
    ranges: Vec<LocalRange>,
    /// Number of bytes of the first range that are read already.
    at: usize,
}

impl Read for RangesReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(first) = self.ranges.first() else { return Ok(0) };
        let count = into.len().min(first.length() - self.at);
        copy::read(first.part(self.at, count), &mut into[..count]).map_err(io::Error::other)?;
        self.at += count;
        if self.at == first.length() {
            self.ranges.remove(0);
            self.at = 0;
        }
        Ok(count)
    }
}

fn timeout(timeout_s: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(timeout_s).map_err(|_| {
        Error::invalid("a timeout must be a number of seconds").with("timeout_s", timeout_s)
    })
}
