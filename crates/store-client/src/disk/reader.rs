//! Connections to the record servers of other processes.

use std::{collections::HashMap, net::Shutdown, time::Duration};

use mooncake_base::{
    Clock, Endpoint, Error, ErrorCode, Moment, Result, SegmentId, SystemClock, Token, sync::Mutex,
};
use mooncake_proto::{
    columns::Record,
    records::{
        ANSWER_BYTES_MAX, LoadRecords, Loaded, RecordAnswer, RecordCall, RecordsLoaded,
        ReleaseRecords, Wanted,
    },
    v1,
};

use super::wire::Wire;

/// The idle connections that are kept for each server.
const IDLE_MAX: usize = 8;

/// The servers that idle connections are kept for.
const SERVERS_MAX: usize = 64;

/// Time limit for connecting and greeting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The connections of one client.
#[derive(Debug)]
pub(crate) struct RecordReaders {
    token: Option<Token>,
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    by_server: HashMap<String, Vec<Wire>>,
    is_closed: bool,
}

/// A connection to a record server. It is kept for later reads only if [`RecordReaders::keep`] gets it.
#[derive(Debug)]
pub(crate) struct RecordReader {
    server: String,
    wire: Wire,
}

/// What a load has brought: the memory stays held until it is released.
#[derive(Debug)]
pub(crate) struct Load {
    /// The number of the memory; 0 if none is held.
    pub(crate) lease: u64,
    /// The name under which an engine opens the owner.
    pub(crate) endpoint: String,
    /// The id of the memory, by which the engine is recognized; `None` if no record was loaded.
    pub(crate) segment: Option<SegmentId>,
    /// What became of each range, and where it lies.
    pub(crate) ranges: Vec<(Loaded, u64)>,
}

impl RecordReaders {
    /// No connections; they will prove the secret.
    pub(crate) fn new(token: Option<Token>) -> Self {
        Self { token, idle: Mutex::default() }
    }

    /// Returns a connection to the server, and whether it was used before.
    ///
    /// # Errors
    /// The server cannot be reached or refuses.
    pub(crate) fn connect(&self, server: &str, deadline: Moment) -> Result<RecordReader> {
        let server = server.to_owned();
        let idle = self.idle.lock().by_server.get_mut(&server).and_then(Vec::pop);
        if let Some(wire) = idle.filter(is_alive) {
            return Ok(RecordReader { server, wire });
        }
        let endpoint: Endpoint = server.parse()?;
        let deadline = deadline.min(SystemClock.now() + CONNECT_TIMEOUT);
        let mut wire = Wire::new(mooncake_os::dial::dial(&endpoint, deadline)?);
        wire.greet(self.token.as_ref(), deadline)?;
        Ok(RecordReader { server, wire })
    }

    /// Keeps a connection on which all memory was released.
    pub(crate) fn keep(&self, reader: RecordReader) {
        let mut idle = self.idle.lock();
        if idle.is_closed {
            return;
        }
        if idle.by_server.len() >= SERVERS_MAX && !idle.by_server.contains_key(&reader.server) {
            // Rarely: the servers of a large pool come and go.
            idle.by_server.clear();
        }
        let of_server = idle.by_server.entry(reader.server).or_default();
        if of_server.len() < IDLE_MAX {
            of_server.push(reader.wire);
        }
    }

    /// Closes the idle connections, and keeps none any more.
    pub(crate) fn close(&self) {
        let mut idle = self.idle.lock();
        idle.is_closed = true;
        for wire in idle.by_server.drain().flat_map(|(_, wires)| wires) {
            // Fails if the server has already closed the connection.
            let _ = wire.stream().shutdown(Shutdown::Both);
        }
    }
}

impl RecordReader {
    /// Has the owner load ranges of records of a directory, in memory that it waits for until shortly
    /// before the deadline.
    ///
    /// # Errors
    /// The owner refuses or does not answer; the connection is then of no use.
    pub(crate) fn load(
        &mut self,
        disk: SegmentId,
        wanted: &[Wanted<'_>],
        deadline: Moment,
    ) -> Result<Load> {
        let records = wanted.iter().map(|wanted| Record {
            tenant: wanted.tenant,
            key: wanted.key,
            version: wanted.version,
            length: wanted.length,
        });
        let left = deadline.left(SystemClock.now());
        let load = LoadRecords {
            disk: disk.to_bytes().to_vec(),
            records: Some(v1::RecordColumns::pack(records)),
            offsets: wanted.iter().map(|wanted| wanted.offset).collect(),
            wait_ms: u64::try_from((left / 2).as_millis()).unwrap_or(u64::MAX),
        };
        let answer = self.call(RecordCall { load: Some(load), release: None }, deadline)?;
        let loaded = answer.loaded.ok_or_else(unexpected)?;
        let ranges = loaded.read(wanted.len())?;
        let RecordsLoaded { lease, endpoint, segment, .. } = loaded;
        Ok(Load { lease, endpoint, segment: SegmentId::from_bytes(&segment), ranges })
    }

    /// Gives the memory of a load back. The bytes that were read there count only after this.
    ///
    /// # Errors
    /// The memory was not held any more, or the owner does not answer.
    pub(crate) fn release(&mut self, lease: u64, deadline: Moment) -> Result<()> {
        let release = Some(ReleaseRecords { lease });
        let answer = self.call(RecordCall { load: None, release }, deadline)?;
        if answer.released.ok_or_else(unexpected)?.was_held {
            return Ok(());
        }
        let text = "the owner of a disk gave the memory of a read to others meanwhile";
        Err(Error::new(ErrorCode::TRANSFER_FAIL, text).with("server", &self.server))
    }

    fn call(&mut self, call: RecordCall, deadline: Moment) -> Result<RecordAnswer> {
        self.wire.send(&call, deadline)?;
        let answer: RecordAnswer = self.wire.receive(ANSWER_BYTES_MAX, deadline)?;
        match &answer.failure {
            Some(failure) => Err(Error::from(failure).with("server", &self.server)),
            None => Ok(answer),
        }
    }
}

fn unexpected() -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the owner of a disk answered another call")
}

/// Returns whether the server has not closed the connection, as far as can be seen without waiting.
fn is_alive(wire: &Wire) -> bool {
    let stream = wire.stream();
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let is_open = peeked.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    is_open && stream.set_nonblocking(false).is_ok()
}
