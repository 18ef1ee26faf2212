//! `RpcClient`, `RpcServer`: data handed to another process. No thread of the server enters the
//! interpreter; threads of Python take what has come.

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

use crate::{
    buffer::{Buffer, Views},
    detach::detached,
    error::or_raise,
};

/// Sends to any number of servers, from any number of threads.
#[pyclass(frozen, module = "mooncake._native", name = "RpcClient")]
#[derive(Debug)]
pub(crate) struct RpcClient(Client);

#[pymethods]
impl RpcClient {
    /// A client that has no connection yet.
    #[new]
    #[pyo3(signature = (*, connections_max, timeout_s))]
    fn new(py: Python<'_>, connections_max: usize, timeout_s: f64) -> PyResult<Self> {
        let config = timeout(timeout_s).map(|timeout| ClientConfig { connections_max, timeout });
        or_raise(py, config.and_then(Client::new)).map(Self)
    }

    /// Sends bytes and waits until somebody has taken them; raises if nobody does.
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
            self.0.send(target, kind, meta.as_bytes(), &mut Ranges { ranges, at: 0 }, length)
        });
        or_raise(py, sent.and_then(|sent| sent))
    }
}

/// Receives until it is stopped or dropped.
#[pyclass(frozen, module = "mooncake._native", name = "RpcServer")]
#[derive(Debug)]
pub(crate) struct RpcServer(Option<Arc<Server>>);

#[pymethods]
impl RpcServer {
    /// Listens.
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

    /// Waits for the next message; nothing if none comes in time. Raises when it is stopped.
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

    /// Where it listens.
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
            // During exit there is nobody to tell, and the process ends anyway.
            let _ = detached(py, || drop(server));
        });
    }
}

/// A message that was taken; dropped without an answer it is refused.
#[pyclass(frozen, module = "mooncake._native", name = "RpcDelivery")]
#[derive(Debug)]
pub(crate) struct RpcDelivery {
    /// Who sent it.
    #[pyo3(get)]
    source: String,
    /// How its bytes are to be read, if they are those of a tensor.
    #[pyo3(get)]
    tensor: Option<String>,
    /// The bytes.
    #[pyo3(get)]
    body: Py<Buffer>,
    delivery: Mutex<Option<Delivery>>,
}

#[pymethods]
impl RpcDelivery {
    /// Tells the sender that it was taken, or why not. The first answer counts.
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

/// Reads memory of callers, part after part.
struct Ranges {
    ranges: Vec<LocalRange>,
    /// How many bytes of the first one are read.
    at: usize,
}

impl Read for Ranges {
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
        Error::invalid("a time-out is a number of seconds").with("timeout_s", timeout_s)
    })
}
