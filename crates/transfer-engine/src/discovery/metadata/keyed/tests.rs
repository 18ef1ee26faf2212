//! Tests of hanging and garbled servers. Those over real servers are in `tests/metadata_servers`.

use std::{io::Read, net::TcpListener, sync::Arc, thread, time::Instant};

use mooncake_base::ErrorKind;

use super::*;
use crate::discovery::metadata::{MetadataSettings, open};

fn store(url: &str) -> Arc<dyn MetadataStore> {
    open(url, MetadataSettings::default()).unwrap()
}

/// A server that answers every connection with these bytes, and then hangs; returns its port.
fn garbled_server(answer: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = std::io::Write::write_all(&mut stream, answer);
            held.push(stream);
        }
    });
    port
}

#[test]
fn request_to_a_hanging_server_ends_at_the_deadline() {
    for scheme in ["etcd", "redis"] {
        for answer in [&b""[..], b"$100\r\nab", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"]
        {
            let url = format!("{scheme}://127.0.0.1:{}", garbled_server(answer));
            let begin = Instant::now();
            let deadline = SystemClock.now() + Duration::from_millis(200);
            let error = store(&url).resolve("a", deadline).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable),
                "{url} {error}"
            );
            assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        }
    }
}

#[test]
fn error_names_a_server_of_another_kind() {
    let page = &b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\noops"[..];
    for scheme in ["etcd", "redis"] {
        for answer in [page, b"SSH-2.0-x\r\n", b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"] {
            let port = garbled_server(answer);
            let error = store(&format!("{scheme}://127.0.0.1:{port}"))
                .resolve("a", SystemClock.now() + Duration::from_secs(5))
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains(&port.to_string()), "{error}");
        }
    }
}
