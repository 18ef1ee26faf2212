//! Large calls over many connections: more than a master admits at a time.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use bytes::{Bytes, BytesMut};
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX, GREETING_BYTES_MAX, ServerGreeting},
    v1::{self, request, response},
};
use prost::Message;

/// The connections, each with one call in flight: more calls than may run and wait.
const CONNECTIONS: usize = 300;

/// The items of a call: more than a small call has.
const ITEMS: usize = 1100;

/// The longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Threads that probe keys until this is dropped.
#[derive(Debug)]
pub struct Overload {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    is_over: AtomicBool,
    refused: AtomicU64,
}

impl Overload {
    /// Starts to overload a master.
    pub fn start(master: &str) -> Self {
        let shared = Arc::<Shared>::default();
        let start = |_| {
            let (shared, master) = (Arc::clone(&shared), master.to_owned());
            // A connection that fails ends: the others go on.
            std::thread::spawn(move || drop(probe_until_end(&master, &shared)))
        };
        let threads = (0..CONNECTIONS).map(start).collect();
        Self { shared, threads }
    }

    /// Returns the number of calls that the master refused.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

impl Drop for Overload {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn probe_until_end(master: &str, shared: &Shared) -> Result<()> {
    let mut stream = TcpStream::connect(master)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(&native_frame::client_greeting())?;
    let mut input = BytesMut::new();
    receive::<ServerGreeting>(&mut stream, &mut input, GREETING_BYTES_MAX)?;
    let keys = vec![Bytes::from_static(b"absent"); ITEMS];
    let probe = v1::ProbeRequest { keys, ..v1::ProbeRequest::default() };
    let request = v1::Request { call: Some(request::Call::Probe(probe)), ..v1::Request::default() };
    let mut output = BytesMut::new();
    while !shared.is_over.load(Ordering::Relaxed) {
        output.clear();
        native_frame::encode(&request, &mut output)?;
        stream.write_all(&output)?;
        let answer: v1::Response = receive(&mut stream, &mut input, FRAME_BYTES_MAX)?;
        if matches!(answer.call, Some(response::Call::Failure(_))) {
            shared.refused.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

fn receive<M: Message + Default>(
    stream: &mut TcpStream,
    input: &mut BytesMut,
    limit: usize,
) -> Result<M> {
    let mut piece = [0; 4096];
    loop {
        if let Some(message) = native_frame::decode(input, limit).context("a frame")? {
            return Ok(message);
        }
        match stream.read(&mut piece)? {
            0 => bail!("the master closed the connection"),
            count => input.extend_from_slice(&piece[..count]),
        }
    }
}
