//! The embedded metadata server with upstream's semantics.

use std::{net::SocketAddr, time::Duration};

use mooncake_master::MasterConfig;

use crate::support::{Running, eventually, get, http, whole_config};

fn put(address: SocketAddr, key: &str, body: &[u8]) -> (u16, String) {
    let answer = http(address, "PUT", &format!("/metadata?key={key}"), body);
    (answer.status, answer.text().to_owned())
}

#[test]
fn stored_value_reads_back_and_is_deleted_once() {
    let running = Running::whole();
    let address = running.addresses().metadata.unwrap();
    assert_eq!(put(address, "k", b"\x00\xff"), (200, "metadata updated".to_owned()));
    let answer = get(address, "/metadata?key=k");
    assert_eq!((answer.status, &answer.body[..]), (200, &b"\x00\xff"[..]));
    assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
    assert_eq!(put(address, "k", b"").0, 200);
    assert_eq!(get(address, "/metadata?key=k").body, b"");
    let delete = || http(address, "DELETE", "/metadata?key=k", b"");
    assert_eq!(delete().text(), "metadata deleted");
    let again = delete();
    assert_eq!((again.status, again.text()), (404, "metadata not found"));
    let missing = get(address, "/metadata?key=k");
    assert_eq!((missing.status, missing.text()), (404, "metadata not found"));
}

#[test]
fn key_is_not_decoded() {
    let running = Running::whole();
    let address = running.addresses().metadata.unwrap();
    put(address, "a%2Fb", b"x");
    assert_eq!(get(address, "/metadata?key=a/b").status, 404);
    assert_eq!(get(address, "/metadata?key=a%2Fb").status, 200);
}

#[test]
fn refuses_duplicate_engine_address() {
    let running = Running::whole();
    let address = running.addresses().metadata.unwrap();
    let key = "mooncake%2Frpc_meta%2Fh%3A1";
    assert_eq!(put(address, key, b"one"), (200, "metadata updated".to_owned()));
    assert_eq!(put(address, key, b"one"), (200, "metadata unchanged".to_owned()));
    let refused = (400, "Duplicate rpc_meta key not allowed".to_owned());
    assert_eq!(put(address, key, b"two"), refused);
    assert_eq!(get(address, &format!("/metadata?key={key}")).text(), "one");
}

#[test]
fn bad_requests_are_answered_like_upstream() {
    let running = Running::whole();
    let address = running.addresses().metadata.unwrap();
    let answer = get(address, "/metadata");
    assert_eq!((answer.status, answer.text()), (400, "Missing key parameter"));
    assert_eq!(http(address, "POST", "/metadata?key=k", b"").status, 404);
    put(address, "k", b"xyz");
    let head = http(address, "HEAD", "/metadata?key=k", b"");
    assert_eq!((head.status, &head.body[..]), (200, &b""[..]));
    assert!(head.head.contains("content-length: 3"), "{}", head.head);
    assert_eq!(get(address, "/other").status, 404);
    assert_eq!(get(address, "/health").text(), "OK");
}

#[test]
fn refuses_value_above_limit() {
    let running = Running::whole();
    let address = running.addresses().metadata.unwrap();
    let (status, _) = put(address, "k", &vec![0; (16 << 20) + 1]);
    assert_eq!(status, 413);
    assert_eq!(get(address, "/metadata?key=k").status, 404);
}

#[test]
fn deletes_metadata_of_expired_client_on_request() {
    let running = Running::new(MasterConfig {
        client_ttl: Duration::from_secs(1),
        is_metadata_cleaned: true,
        ..whole_config()
    });
    let address = running.addresses().metadata.unwrap();
    let mut client = running.native();
    client.join("127.0.0.1:1", 1 << 20);
    put(address, "mooncake%2Frpc_meta%2F127.0.0.1%3A1", b"x");
    put(address, "mooncake%2Frpc_meta%2F127.0.0.1%3A2", b"x");
    eventually("the metadata is deleted", || {
        get(address, "/metadata?key=mooncake%2Frpc_meta%2F127.0.0.1%3A1").status == 404
    });
    assert_eq!(get(address, "/metadata?key=mooncake%2Frpc_meta%2F127.0.0.1%3A2").status, 200);
}
