//! Fuzzes the decoders of messages and answers.

use mooncake_base::fuzz::{Target, check, outcome};

use crate::{
    client::read_answer,
    rpc_message::{Head, Kind},
    server::{receive_head, receive_rest},
};

/// Id of the message that is answered.
const ID: u64 = 7;

/// Maximum body length.
const BODY_BYTES_MAX: u64 = 1 << 20;

fn message(kind: Kind, meta: &[u8], body: &[u8]) -> Vec<u8> {
    let (meta_bytes, body_bytes) = (meta.len() as u32, body.len() as u64);
    let head = Head { kind, id: ID, meta_bytes, body_bytes };
    [&head.encode(), meta, body].concat()
}

/// Consecutive messages, as a server reads them.
fn messages() -> Target {
    let run = |bytes: &[u8]| {
        let mut rest = bytes;
        let mut kinds = Vec::new();
        while let Ok(head) = receive_head(&mut rest, BODY_BYTES_MAX)
            && let Ok((meta, body)) = receive_rest(&mut rest, &head, |_| Ok(()))
        {
            let read = &bytes[..bytes.len() - rest.len()];
            assert!(read.ends_with(&[&head.encode()[..], &meta, &body].concat()));
            kinds.push((head.kind, meta.is_empty(), body.is_empty()));
        }
        outcome(kinds)
    };
    let seeds = vec![
        message(Kind::Data, b"", b"body"),
        message(Kind::Tensor, b"{\"shape\":[2]}", &[1; 100]),
        [message(Kind::Data, b"", b""), message(Kind::Refused, b"why", b"")].concat(),
    ];
    Target { name: "rpc message", seeds, run }
}

/// One answer, as a client reads it.
fn answers() -> Target {
    let run = |bytes: &[u8]| {
        let mut rest = bytes;
        let answer = read_answer(&mut rest, ID);
        if let Ok(answer) = &answer {
            let read = &bytes[..bytes.len() - rest.len()];
            let reason = answer.as_ref().map_or(0, String::len);
            assert!(
                answer.is_none() || reason >= (read.len() - crate::rpc_message::HEAD_BYTES) / 4
            );
        }
        outcome(answer.map(|reason| reason.is_some()).map_err(|error| error.message().to_owned()))
    };
    let seeds = vec![
        message(Kind::Taken, b"", b""),
        message(Kind::Refused, "not accepted".as_bytes(), b""),
        message(Kind::Data, b"", b""),
    ];
    Target { name: "rpc answer", seeds, run }
}

#[test]
fn decoders_never_panic_nor_accept_unencodable_input() {
    check(&[messages(), answers()]);
}
