//! A master in this process, a blocking native client, and a small HTTP client.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::{linux::net::SocketAddrExt, unix::net::UnixStream},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mooncake_base::{ClientId, SegmentId};
use mooncake_master::{Addresses, Master, MasterConfig};
use mooncake_proto::{
    columns::Record,
    native_frame::{self, ServerGreeting},
    v1::{self, request, response},
};
use prost::Message;
use tokio::runtime::Runtime;

/// The maximum duration of any wait in these tests.
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);

/// A master on loopback with free ports, stopped on drop.
pub(crate) struct Running {
    runtime: Runtime,
    master: Option<Master>,
}

impl Running {
    pub(crate) fn new(config: MasterConfig) -> Self {
        let runtime = runtime();
        let master = runtime.block_on(mooncake_master::start(config)).unwrap();
        Self { runtime, master: Some(master) }
    }

    /// Starts a master with all features on.
    pub(crate) fn whole() -> Self {
        Self::new(whole_config())
    }

    pub(crate) fn master(&self) -> &Master {
        self.master.as_ref().unwrap()
    }

    pub(crate) fn addresses(&self) -> Addresses {
        *self.master().addresses()
    }

    pub(crate) fn admin(&self) -> SocketAddr {
        self.addresses().admin.unwrap()
    }

    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    pub(crate) fn stop(mut self) {
        self.runtime.block_on(self.master.take().unwrap().stop());
    }

    pub(crate) fn native(&self) -> NativeClient<TcpStream> {
        NativeClient::over(connect(self.addresses().rpc)).unwrap()
    }

    /// Connects a client to the Unix socket that the greeting names.
    pub(crate) fn unix(&self) -> NativeClient<UnixStream> {
        let name = self.native().greeting.unix_socket;
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
        let stream = UnixStream::connect_addr(&address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        NativeClient::over(stream).unwrap()
    }
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

pub(crate) fn whole_config() -> MasterConfig {
    MasterConfig {
        has_admin: true,
        admin_host: "127.0.0.1".to_owned(),
        admin_port: Some(0),
        has_metadata: true,
        metadata_host: "127.0.0.1".to_owned(),
        metadata_port: 0,
        ..MasterConfig::embedded()
    }
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, DEADLINE).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Waits until the condition holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::yield_now();
    }
}

/// A client of the native protocol.
pub(crate) struct NativeClient<S> {
    pub(crate) stream: S,
    pub(crate) greeting: ServerGreeting,
    pub(crate) id: ClientId,
    input: BytesMut,
}

impl<S: Read + Write> NativeClient<S> {
    pub(crate) fn over(mut stream: S) -> std::io::Result<Self> {
        stream.write_all(&native_frame::client_greeting())?;
        let mut input = BytesMut::new();
        let greeting = receive(&mut stream, &mut input)?;
        Ok(Self { stream, greeting, id: ClientId::random(), input })
    }

    pub(crate) fn caller(&self) -> Option<v1::Caller> {
        let client = Bytes::copy_from_slice(&self.id.to_bytes());
        Some(v1::Caller { client, tenant: String::new() })
    }

    pub(crate) fn send(&mut self, calls: &[request::Call]) {
        let mut output = BytesMut::new();
        for call in calls {
            native_frame::encode(
                &v1::Request { call: Some(call.clone()), ..Default::default() },
                &mut output,
            )
            .unwrap();
        }
        self.stream.write_all(&output).unwrap();
    }

    /// Sends a numbered call.
    pub(crate) fn send_numbered(&mut self, call_number: u64, call: request::Call) {
        let request = v1::Request { call: Some(call), call_number, ..Default::default() };
        let mut output = BytesMut::new();
        native_frame::encode(&request, &mut output).unwrap();
        self.stream.write_all(&output).unwrap();
    }

    pub(crate) fn receive(&mut self) -> response::Call {
        let response: v1::Response = receive(&mut self.stream, &mut self.input).unwrap();
        response.call.unwrap()
    }

    /// Returns the next reply; `None` once the connection is closed.
    pub(crate) fn try_receive(&mut self) -> Option<response::Call> {
        let response: v1::Response = receive(&mut self.stream, &mut self.input).ok()?;
        response.call
    }

    pub(crate) fn call(&mut self, call: request::Call) -> response::Call {
        self.send(&[call]);
        self.receive()
    }

    pub(crate) fn status(&mut self) -> v1::StatusResponse {
        let call = request::Call::Status(v1::StatusRequest { caller: self.caller() });
        match self.call(call) {
            response::Call::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    /// Registers and mounts one segment of that many bytes.
    pub(crate) fn join(&mut self, name: &str, length: u64) -> SegmentId {
        let register = request::Call::Register(v1::RegisterRequest {
            caller: self.caller(),
            name: name.to_owned(),
            process: std::process::id(),
            version: "test".to_owned(),
            wants_offload: false,
            log_mark: None,
        });
        let response::Call::Register(answer) = self.call(register) else { panic!("register") };
        assert_eq!(answer.master, self.greeting.master);
        let id = SegmentId::random();
        let segment = v1::Segment {
            id: Bytes::copy_from_slice(&id.to_bytes()),
            incarnation: 1,
            name: name.to_owned(),
            endpoint: name.to_owned(),
            base: 0x10000,
            length,
            protocol: "tcp".to_owned(),
            kind: v1::SegmentKind::Memory.into(),
        };
        let mount = request::Call::Mount(v1::MountRequest {
            caller: self.caller(),
            segments: vec![segment],
            ..v1::MountRequest::default()
        });
        let response::Call::Mount(answer) = self.call(mount) else { panic!("mount") };
        assert_eq!(answer.results, [v1::ItemResult { failure: None }]);
        id
    }

    /// Mounts a disk that has records.
    pub(crate) fn mount_disk_with(&mut self, records: &[Record<'_>]) {
        let id = Bytes::copy_from_slice(&SegmentId::random().to_bytes());
        let disk = v1::Segment {
            id: id.clone(),
            incarnation: 1,
            name: "disk".to_owned(),
            endpoint: "127.0.0.1:1".to_owned(),
            length: 1 << 30,
            kind: v1::SegmentKind::Disk.into(),
            ..v1::Segment::default()
        };
        let mount = request::Call::MountDisk(v1::MountDiskRequest {
            caller: self.caller(),
            disk: Some(disk),
            used: 0,
            reports_all: true,
        });
        let response::Call::MountDisk(_) = self.call(mount) else { panic!("mount_disk") };
        let report = request::Call::ReportRecords(v1::ReportRecordsRequest {
            caller: self.caller(),
            disk: id,
            added: Some(v1::RecordColumns::pack(records.iter().copied())),
            is_complete: true,
            ..v1::ReportRecordsRequest::default()
        });
        let response::Call::ReportRecords(answer) = self.call(report) else { panic!("report") };
        assert!(answer.stale.is_empty(), "{answer:?}");
    }

    /// Puts an object without writing a byte; the master does not check the content.
    pub(crate) fn put(&mut self, key: &str, length: u64) {
        let segments = self.put_all(&[(key, length)]);
        assert_eq!(segments.len(), 1);
    }

    /// Puts objects with one call each way. Returns the segments that hold them.
    pub(crate) fn put_all<K: AsRef<[u8]> + Clone>(
        &mut self,
        items: &[(K, u64)],
    ) -> Vec<v1::Segment> {
        let start = request::Call::PutStart(v1::PutStartRequest {
            caller: self.caller(),
            columns: Some(v1::PutColumns::pack(items.iter().cloned())),
            ..Default::default()
        });
        let response::Call::PutStart(answer) = self.call(start) else { panic!("put_start") };
        let (started, segments) = (answer.columns.expect("columns"), answer.segments);
        assert_eq!(started.failures, []);
        let columns = v1::PutRefColumns { versions: started.versions, ..Default::default() };
        let end = request::Call::PutEnd(v1::PutEndRequest {
            caller: self.caller(),
            columns: Some(columns),
        });
        let response::Call::PutEnd(answer) = self.call(end) else { panic!("put_end") };
        assert_eq!(answer.columns.expect("columns").failures, []);
        segments
    }

    /// Locates an object; `None` if it is absent.
    pub(crate) fn locate(&mut self, key: &str) -> Option<v1::LocateResponse> {
        let call = v1::LocateRequest {
            caller: self.caller(),
            lease: false,
            fence: true,
            keys: Some(v1::KeyColumn::pack([key])),
            ..Default::default()
        };
        let response::Call::Locate(answer) = self.call(request::Call::Locate(call)) else {
            panic!("locate")
        };
        let is_absent = match &answer.columns.as_ref().expect("columns").failures[..] {
            [] => false,
            [failed] => failed.failure.as_ref().is_some_and(|failure| failure.code == -800),
            _ => panic!("{answer:?}"),
        };
        (!is_absent).then_some(answer)
    }

    pub(crate) fn probe(&mut self, keys: &[&str]) -> v1::ProbeResponse {
        let keys = keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect();
        let call = request::Call::Probe(v1::ProbeRequest {
            caller: self.caller(),
            keys,
            lease: false,
            ..Default::default()
        });
        match self.call(call) {
            response::Call::Probe(answer) => answer,
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn receive<M: Message + Default>(
    stream: &mut impl Read,
    input: &mut BytesMut,
) -> std::io::Result<M> {
    loop {
        if let Some(message) = native_frame::decode(input, native_frame::FRAME_BYTES_MAX).unwrap() {
            return Ok(message);
        }
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => input.extend_from_slice(&chunk[..count]),
        }
    }
}

/// The reply of an HTTP server.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Sends one HTTP/1.0 request. The server closes the connection after its reply.
pub(crate) fn http(address: SocketAddr, method: &str, target: &str, body: &[u8]) -> Answer {
    http_with(address, method, target, "host: localhost\r\n", body)
}

/// Sends one HTTP/1.0 request with additional header lines.
pub(crate) fn http_with(
    address: SocketAddr,
    method: &str,
    target: &str,
    headers: &str,
    body: &[u8],
) -> Answer {
    let mut stream = connect(address);
    let head =
        format!("{method} {target} HTTP/1.0\r\n{headers}content-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses a large body may close before it has read the whole body.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("an HTTP head");
    let head = String::from_utf8(answer[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: answer[end + 4..].to_vec() }
}

pub(crate) fn get(address: SocketAddr, target: &str) -> Answer {
    http(address, "GET", target, b"")
}
