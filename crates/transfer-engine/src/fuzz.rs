//! Fuzzes every decoder of this crate that reads input from outside.

use mooncake_base::{
    EngineId,
    fuzz::{Target, check, outcome},
};

use crate::{
    discovery::{
        descriptor::{BufferDescriptor, LocalDescriptor, NativeDescriptor, SegmentDescriptor},
        handshake::{
            codec::{self, Message, MessageKind, Notification},
            proof,
        },
        metadata,
    },
    token::Token,
    transport::{shm, tcp},
};

fn targets() -> Vec<Target> {
    let mut targets = vec![descriptor(), handshake(), notification(), sealed()];
    targets.extend(tcp::fuzz_targets());
    targets.extend(shm::fuzz_targets());
    targets.extend(metadata::fuzz::targets());
    targets
}

fn descriptor() -> Target {
    let own = NativeDescriptor::new(
        EngineId::from_bits(7),
        Some(LocalDescriptor { unix_socket: "mooncake-7".into(), process: 4 }),
    );
    let full = SegmentDescriptor {
        name: "h:1".into(),
        protocol: "tcp".into(),
        tcp_data_host: "h".into(),
        tcp_data_port: 2,
        tcp_proto_version: 2,
        buffers: vec![BufferDescriptor {
            name: "cpu:0".into(),
            addr: 1 << 40,
            length: 9,
            rkey: vec![7],
            lkey: vec![7],
        }],
        mooncake: Some(own),
        ..SegmentDescriptor::default()
    };
    let seeds = vec![full.to_json(), SegmentDescriptor::default().to_json(), b"{}".to_vec()];
    let run = |bytes: &[u8]| match SegmentDescriptor::from_json(bytes) {
        Err(_) => 0,
        Ok(read) => {
            let again = SegmentDescriptor::from_json(&read.to_json()).expect("we wrote it");
            assert_eq!(again, read);
            let own = read.mooncake.as_ref();
            let engine = own.and_then(NativeDescriptor::engine).is_some();
            outcome((read.buffers.len(), own.is_some(), engine, read.tcp_proto_version))
        }
    };
    Target { name: "descriptor", seeds, run }
}

fn handshake() -> Target {
    let kinds =
        [MessageKind::Connection, MessageKind::Metadata, MessageKind::Notify, MessageKind::Probe];
    let mut seeds: Vec<_> = kinds.map(|kind| Message::new(kind, *b"{}").encode()).into();
    seeds.push(Message { typed: None, body: b"{\"a\":1}".to_vec() }.encode());
    let run = |bytes: &[u8]| {
        let Some((prefix, content)) = bytes.split_first_chunk::<{ codec::LENGTH_BYTES }>() else {
            return 1;
        };
        let Ok(length) = codec::content_length(*prefix, codec::MESSAGE_BYTES_MAX_DEFAULT) else {
            return 2;
        };
        assert!(length <= codec::MESSAGE_BYTES_MAX_DEFAULT);
        let content = &content[..content.len().min(length)];
        match Message::decode(content.to_vec()) {
            Err(_) => 3,
            Ok(message) => {
                assert_eq!(&message.encode()[codec::LENGTH_BYTES..], content);
                outcome((message.kind() as u8, message.typed.is_some()))
            }
        }
    };
    Target { name: "handshake", seeds, run }
}

fn notification() -> Target {
    let seeds = vec![Notification { name: "n".into(), message: "m\n\"".into() }.to_json()];
    let run = |bytes: &[u8]| match Notification::from_json(bytes) {
        Err(_) => 0,
        Ok(read) => {
            assert_eq!(Notification::from_json(&read.to_json()).expect("we wrote it"), read);
            outcome((read.name.len(), read.message.len()))
        }
    };
    Target { name: "notification", seeds, run }
}

/// A challenge, and messages that claim to be sealed.
fn sealed() -> Target {
    let run = |bytes: &[u8]| {
        let message = Message { typed: Some(MessageKind::Notify), body: bytes.to_vec() };
        let token = Token::new("a long secret").expect("it is long");
        // Sealing needs the token, which the fuzzer does not know.
        assert!(proof::unseal(&token, [1; 32], &message).is_none());
        let challenge = proof::read_challenge(&message);
        if let Some(nonce) = challenge {
            assert_eq!(proof::read_challenge(&proof::challenge(&nonce)), Some(nonce));
        }
        let refusal = proof::read_refusal(bytes).is_some();
        outcome((challenge.is_some(), refusal, proof::is_challenge_request(&message)))
    };
    let seeds =
        vec![proof::challenge(&[7; 32]).body, proof::refusal("no"), vec![1; proof::SEAL_BYTES + 2]];
    Target { name: "sealed", seeds, run }
}

#[test]
fn no_decoder_panics_or_takes_what_it_would_not_write() {
    check(&targets());
}
