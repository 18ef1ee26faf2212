//! Fuzz targets: the answers of metadata servers.

use std::{
    cell::RefCell,
    net::{Ipv4Addr, SocketAddr},
    sync::LazyLock,
    time::Duration,
};

use mooncake_base::{
    Clock, Moment, SystemClock,
    fuzz::{Target, outcome},
};
use mooncake_kv_client::http::HttpClient;
use ureq::{
    Agent,
    config::Config,
    http::Uri,
    unversioned::{
        resolver::{ResolvedSocketAddrs, Resolver},
        transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport},
    },
};

use super::{
    MetadataSettings, TEXTS,
    http::HttpServer,
    keyed::{self, KeyClaim, KeyValueServer},
};
use crate::discovery::descriptor::DESCRIPTOR_BYTES_MAX;

pub(crate) fn targets() -> Vec<Target> {
    vec![keyed::fuzz_target(), Target { name: "http answer", seeds: answers(), run: answer }]
}

thread_local! {
    /// The bytes that the fake server sends in this thread, on every connection.
    static SERVER_BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Connects to a fake server that sends [`SERVER_BYTES`] and then closes the connection.
#[derive(Debug)]
struct FakeConnector;

#[derive(Debug)]
struct FakeConnection {
    bytes: Vec<u8>,
    buffers: LazyBuffers,
}

impl Connector for FakeConnector {
    type Out = FakeConnection;

    fn connect(
        &self,
        _: &ConnectionDetails<'_>,
        _: Option<()>,
    ) -> Result<Option<FakeConnection>, ureq::Error> {
        let bytes = SERVER_BYTES.with_borrow(Clone::clone);
        Ok(Some(FakeConnection { bytes, buffers: LazyBuffers::new(16 << 10, 16 << 10) }))
    }
}

impl Transport for FakeConnection {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, _: usize, _: NextTimeout) -> Result<(), ureq::Error> {
        Ok(())
    }

    fn await_input(&mut self, _: NextTimeout) -> Result<bool, ureq::Error> {
        let room = self.buffers.input_append_buf();
        let count = room.len().min(self.bytes.len());
        room[..count].copy_from_slice(&self.bytes[..count]);
        self.bytes.drain(..count);
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        false
    }
}

/// Resolves every host to this one, so that a redirection needs no name server.
#[derive(Debug)]
struct LocalResolver;

impl Resolver for LocalResolver {
    fn resolve(
        &self,
        _: &Uri,
        _: &Config,
        _: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let mut found = self.empty();
        found.push(SocketAddr::from((Ipv4Addr::LOCALHOST, 80)));
        Ok(found)
    }
}

fn answers() -> Vec<Vec<u8>> {
    let plain = |status: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    };
    let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let moved = b"HTTP/1.1 302 Found\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n";
    vec![
        plain("200 OK", "hello"),
        plain("404 Not Found", ""),
        plain("400 Bad Request", "Duplicate rpc_meta key not allowed"),
        plain("500 Internal Server Error", "no"),
        chunked.to_vec(),
        moved.to_vec(),
        b"HTTP/1.0 200 OK\r\n\r\nup to the end".to_vec(),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n".to_vec(),
    ]
}

fn answer(bytes: &[u8]) -> u64 {
    static SERVER: LazyLock<HttpServer> = LazyLock::new(|| {
        let config = Agent::config_builder().http_status_as_error(false).proxy(None).build();
        let http_client = HttpClient::over(
            Agent::with_parts(config, FakeConnector, LocalResolver),
            DESCRIPTOR_BYTES_MAX as u64,
            &TEXTS,
        );
        let url = "http://127.0.0.1/metadata";
        HttpServer::new(url, &MetadataSettings::default()).expect("it is a URL").over(http_client)
    });
    SERVER_BYTES.set(bytes.to_vec());
    let found = SERVER.get("key", soon());
    if let Ok(Some(body)) = &found {
        assert!(body.len() <= BODY_MAX.min(DESCRIPTOR_BYTES_MAX));
    }
    let claim = KeyClaim { key: "key", value: b"value" };
    let claimed = SERVER.claim(claim, None, soon());
    let found = found.map(|found| found.is_some()).map_err(|error| error.code());
    outcome((found, claimed.map(|holder| holder.is_some()).map_err(|error| error.code())))
}

/// No answer has a body that is longer than the fuzzed input.
const BODY_MAX: usize = 4096;

pub(super) fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(60)
}
