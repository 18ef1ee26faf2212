//! Fuzz tests of the decoders of the native protocol, on either side of a connection.

use bytes::BytesMut;
use mooncake_base::{
    Error, ErrorCode, Token,
    fuzz::{Target, check, outcome},
};
use prost::Message;

use crate::{
    columns::{ItemPlaces, Located, PutRefs},
    convert,
    native_frame::{
        DaemonGreeting, GREETING_BYTES_MAX, ServerGreeting, VERSION, check_client_greeting,
        client_greeting, decode, encode,
    },
    native_token::{Challenge, ClientProof},
    records::{LoadRecords, Loaded, RecordAnswer, RecordCall, RecordsLoaded, ReleaseRecords},
    v1::{self, request::Call, response::Call as Answer},
};

/// The frame limit of these tests; inputs are shorter than the real limit.
const LIMIT: usize = 1 << 10;

/// The field numbers of all calls, and one number that is not a call.
const CALLS: [std::ops::RangeInclusive<u32>; 3] = [1..=16, 30..=46, 100..=101];

/// The outcome of a byte stream: the messages before the first malformed frame, and how it ended.
struct Decoded<M> {
    messages: Vec<M>,
    has_failed: bool,
    left: usize,
}

/// Decodes frames from bytes that arrive in pieces of this length.
fn decode_pieces<M: Message + Default>(bytes: &[u8], piece: usize, limit: usize) -> Decoded<M> {
    let (mut wire, mut messages) = (BytesMut::new(), Vec::new());
    for part in bytes.chunks(piece) {
        wire.extend_from_slice(part);
        loop {
            match decode(&mut wire, limit) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return Decoded { messages, has_failed: true, left: 0 },
            }
        }
        assert!(
            wire.capacity() <= 2 * (limit + 4 + bytes.len()),
            "no more capacity than a frame needs"
        );
    }
    Decoded { messages, has_failed: false, left: wire.len() }
}

/// Decodes frames in one piece and in many, which must agree, and encodes them again.
fn decode_twice<M: Message + Default + PartialEq>(bytes: &[u8], limit: usize) -> Decoded<M> {
    let whole = decode_pieces::<M>(bytes, bytes.len().max(1), limit);
    let parted = decode_pieces::<M>(bytes, 7, limit);
    assert!(whole.messages == parted.messages && whole.has_failed == parted.has_failed);
    assert_eq!(whole.left, parted.left);
    for message in &whole.messages {
        let mut wire = BytesMut::new();
        encode(message, &mut wire).expect("a decoded frame fits into a frame");
        // Varints may have been encoded longer than necessary, and unknown fields are dropped.
        assert!(
            decode::<M>(&mut wire, usize::MAX).is_ok_and(|again| again.as_ref() == Some(message))
        );
        assert!(wire.is_empty());
    }
    whole
}

fn frame(message: &impl Message) -> Vec<u8> {
    let mut wire = BytesMut::new();
    encode(message, &mut wire).expect("a small message");
    wire.to_vec()
}

/// Returns a frame with an empty message for each call, and for one unknown call.
fn empty_calls() -> impl Iterator<Item = Vec<u8>> {
    CALLS.into_iter().flatten().map(|number| {
        let mut body = Vec::new();
        prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut body);
        body.push(0);
        [&(body.len() as u32).to_le_bytes()[..], &body].concat()
    })
}

/// Requests, as the master and the relay of a daemon decode them.
fn requests() -> Target {
    let caller = Some(v1::Caller { client: vec![7; 16].into(), tenant: "t".to_owned() });
    let keys = v1::KeyColumn::pack(["a", "key"]);
    let checksums = v1::ChecksumColumn { items: vec![1], checksums: vec![u64::MAX] };
    let calls = [
        Call::Locate(v1::LocateRequest {
            caller: caller.clone(),
            lease: true,
            fence: true,
            keys: Some(keys.clone()),
            tag: "t".to_owned(),
        }),
        Call::PutStart(v1::PutStartRequest {
            caller,
            config: Some(v1::ReplicateConfig::default()),
            request_id: u64::MAX,
            columns: Some(v1::PutColumns {
                keys: Some(keys),
                lengths: vec![1 << 40],
                groups: vec!["g".to_owned(), String::new()],
                if_versions: Vec::new(),
            }),
            ..Default::default()
        }),
        Call::PutEnd(v1::PutEndRequest {
            columns: Some(v1::PutRefColumns {
                versions: vec![1, u64::MAX],
                checksums: Some(checksums),
                failed_items: vec![0, 1],
                failed_replicas: vec![1 << 16, 2],
                keys: None,
                late_items: vec![1],
                late_replicas: vec![3],
            }),
            ..Default::default()
        }),
    ];
    let fence = v1::FenceRelease { fence: 3, versions: vec![1, u64::MAX], objects: vec![0, 9] };
    let full = calls.map(|call| v1::Request {
        call: Some(call),
        released_fences: vec![fence.clone()],
        call_number: u64::MAX,
        answered_below: 1,
        caller_address: "unix".to_owned(),
    });
    let mut seeds: Vec<_> = empty_calls().chain(full.iter().map(frame)).collect();
    seeds.push([frame(&full[0]), frame(&full[1])].concat());
    let run = |bytes: &[u8]| {
        let mut decoded = decode_twice::<v1::Request>(bytes, LIMIT);
        let calls = decoded.messages.iter_mut().filter_map(|request| request.call.as_mut());
        let kinds: Vec<_> = calls
            .map(|call| {
                let caller = call.caller_mut().clone();
                let checked = convert::Caller::try_from(caller.as_ref());
                if let Ok(checked) = &checked {
                    let wire = v1::Caller::from(checked);
                    let again = convert::Caller::try_from(Some(&wire));
                    assert!(again.is_ok_and(|again| again == *checked));
                }
                let keys = column_items(call);
                assert!(keys.is_none_or(|keys| keys <= call.items()));
                (std::mem::discriminant(call), checked.is_ok(), keys)
            })
            .collect();
        outcome((kinds, decoded.has_failed, decoded.left == 0))
    };
    Target { name: "native request", seeds, run }
}

/// Returns the number of items of a call in columns; `None` if the columns are inconsistent.
fn column_items(call: &Call) -> Option<usize> {
    let first = call.first_key();
    if let Call::PutEnd(r) = call {
        return Some(PutRefs::read(r.columns.as_ref()?).ok()?.count());
    }
    let keys = call.keys().ok()??;
    assert!(keys.first().is_none_or(|key| *key == first), "`first_key` is the first of `keys`");
    Some(keys.len())
}

/// Responses, as clients decode them.
fn responses() -> Target {
    let failure = v1::Failure::from(&Error::new(ErrorCode::OBJECT_NOT_FOUND, "no such key"));
    let states = vec![0, 1, 2, 7];
    let failures = vec![v1::ItemFailure { item: 1, failure: Some(failure.clone()) }];
    let mut places = v1::PlaceColumns::default();
    places.push(0, [v1::Place { offset: 1, ..Default::default() }; 2].into_iter());
    places.push(1, std::iter::empty());
    let calls = [
        Answer::PutStart(v1::PutStartResponse {
            columns: Some(v1::StartedColumns {
                versions: vec![9, 0],
                places: Some(places.clone()),
                failures: failures.clone(),
            }),
            ..Default::default()
        }),
        Answer::PutEnd(v1::PutEndResponse {
            columns: Some(v1::DoneColumns { items: 2, failures: failures.clone() }),
        }),
        Answer::Locate(v1::LocateResponse {
            columns: Some(v1::LocatedColumns {
                versions: vec![9, 0],
                lengths: vec![3],
                places: Some(places),
                checksums: Some(v1::ChecksumColumn { items: vec![0], checksums: vec![5] }),
                fences: vec![7, 0],
                objects: vec![1, 0],
                failures,
                tags: vec!["v".to_owned(), String::new()],
            }),
            ..Default::default()
        }),
        Answer::Probe(v1::ProbeResponse {
            states,
            lengths: vec![1, u64::MAX],
            found_suffixes: vec![0, 5],
            prefetching: vec![0, 3],
            prefetch_refused: vec![3],
        }),
        Answer::Failure(failure),
    ];
    let full = calls.map(|call| v1::Response { call: Some(call), ..v1::Response::default() });
    let mut seeds: Vec<_> = empty_calls().chain(full.iter().map(frame)).collect();
    seeds.push([frame(&full[0]), frame(&full[1])].concat());
    let run = |bytes: &[u8]| {
        let decoded = decode_twice::<v1::Response>(bytes, LIMIT);
        let kinds = decoded.messages.iter().filter_map(|answer| answer.call.as_ref()).map(|call| {
            let code = match call {
                Answer::Failure(failure) => Some(Error::from(failure).code().number()),
                answer => response_items(answer).map(|items| items as i32),
            };
            (std::mem::discriminant(call), code)
        });
        outcome((kinds.collect::<Vec<_>>(), decoded.has_failed, decoded.left == 0))
    };
    Target { name: "native response", seeds, run }
}

/// Returns the number of items or places of a response in columns; `None` if inconsistent.
fn response_items(answer: &Answer) -> Option<usize> {
    match answer {
        Answer::PutStart(started) => {
            let columns = started.columns.as_ref()?;
            let items = columns.versions.len();
            let places = |(_, places): (u64, ItemPlaces<'_>)| places.to_messages(1).count();
            Some(columns.read(items).ok()?.map(|item| item.map_or(0, places)).sum())
        }
        Answer::PutEnd(ended) => {
            let columns = ended.columns.as_ref()?;
            // The number is untrusted input, so it is limited here.
            let items = (columns.items as usize).min(LIMIT);
            Some(columns.read(items).ok()?.count())
        }
        Answer::Locate(located) => {
            let fences = located.fences().count();
            let columns = located.columns.as_ref()?;
            let items = columns.versions.len();
            assert!(fences <= items);
            let places = |at: Located<'_>| at.places.to_messages(1).count();
            Some(columns.read(items).ok()?.map(|item| item.map_or(0, places)).sum())
        }
        _ => None,
    }
}

/// Server greetings, as clients decode them.
fn server_greetings() -> Target {
    let daemon = DaemonGreeting { name: "h:1".to_owned(), metadata: "P2PHANDSHAKE".to_owned() };
    let mut greeting = ServerGreeting {
        version: VERSION,
        master: vec![9; 16],
        unix_socket: "mooncake-7".to_owned(),
        ..ServerGreeting::default()
    };
    let master = frame(&greeting);
    let challenge = frame(&ServerGreeting {
        version: VERSION,
        challenge: vec![5; 32],
        ..ServerGreeting::default()
    });
    greeting.daemon = Some(daemon);
    let run = |bytes: &[u8]| {
        let decoded = decode_twice::<ServerGreeting>(bytes, GREETING_BYTES_MAX);
        let kinds =
            decoded.messages.iter().map(|one| (one.version == VERSION, one.daemon.is_some()));
        outcome((kinds.collect::<Vec<_>>(), decoded.has_failed, decoded.left == 0))
    };
    Target {
        name: "native greeting of a server",
        seeds: vec![master, challenge, frame(&greeting)],
        run,
    }
}

/// Proofs of the token, as a master decodes and checks them.
fn client_proofs() -> Target {
    let proof = ClientProof { nonce: vec![1; 32], proof: vec![2; 32] };
    let run = |bytes: &[u8]| {
        let token = Token::new("open sesame").expect("long enough");
        let decoded = decode_twice::<ClientProof>(bytes, GREETING_BYTES_MAX);
        for proof in &decoded.messages {
            assert!(Challenge::new().check(&token, proof).is_err(), "made without the token");
        }
        outcome((decoded.messages.len(), decoded.has_failed, decoded.left == 0))
    };
    Target { name: "native proof of a client", seeds: vec![frame(&proof)], run }
}

/// Client greetings, as a server decodes them.
fn client_greetings() -> Target {
    let run = |bytes: &[u8]| {
        let Some(first) = bytes.first_chunk() else { return 0 };
        let checked = check_client_greeting(first);
        assert_eq!(checked.is_ok(), *first == client_greeting());
        outcome(checked.map_err(|error| error.code().number()))
    };
    Target { name: "native greeting of a client", seeds: vec![client_greeting().to_vec()], run }
}

/// Calls of readers of records, as the owner of a disk decodes and checks them.
fn record_calls() -> Target {
    let record = crate::columns::Record { tenant: "t", key: b"key", version: 3, length: 1 << 20 };
    let load = LoadRecords {
        disk: vec![1; 16],
        records: Some(v1::RecordColumns::pack([record, record])),
        offsets: vec![0, u64::MAX - (1 << 20)],
        wait_ms: 100,
    };
    let seeds = [
        RecordCall { load: Some(load), release: None },
        RecordCall { load: None, release: Some(ReleaseRecords { lease: u64::MAX }) },
    ];
    let run = |bytes: &[u8]| {
        let decoded = decode_twice::<RecordCall>(bytes, LIMIT);
        let wanted = decoded.messages.iter().map(|call| {
            let wanted = call.load.as_ref().map(LoadRecords::read)?.ok()?;
            assert!(wanted.iter().all(|one| one.offset.checked_add(one.length).is_some()));
            Some(wanted.len())
        });
        outcome((wanted.collect::<Vec<_>>(), decoded.has_failed, decoded.left == 0))
    };
    Target { name: "call of a reader of records", seeds: seeds.iter().map(frame).collect(), run }
}

/// Answers of the owner of a disk, as readers decode them.
fn record_answers() -> Target {
    let loaded = RecordsLoaded {
        lease: 1,
        endpoint: "host:1".to_owned(),
        outcomes: vec![Loaded::Good as i32, Loaded::Later as i32],
        addresses: vec![1 << 40, 0],
        segment: vec![7; 16],
    };
    let seeds = [RecordAnswer { loaded: Some(loaded), ..Default::default() }];
    let run = |bytes: &[u8]| {
        let decoded = decode_twice::<RecordAnswer>(bytes, LIMIT);
        let loaded = decoded.messages.iter().map(|answer| {
            let read = answer.loaded.as_ref()?.read(2).ok()?;
            assert_eq!(read.len(), 2);
            Some(read[0].0)
        });
        outcome((loaded.collect::<Vec<_>>(), decoded.has_failed, decoded.left == 0))
    };
    Target { name: "answer of an owner of records", seeds: seeds.iter().map(frame).collect(), run }
}

#[test]
fn native_frames_never_panic_and_round_trip() {
    check(&[
        requests(),
        responses(),
        server_greetings(),
        client_proofs(),
        client_greetings(),
        record_calls(),
        record_answers(),
    ]);
}
