//! Fuzz targets for the decoders of both protocols.

use mooncake_base::{
    ErrorCode,
    fuzz::{Target, outcome},
};

use super::{
    compat_frame::{self, Header, Status},
    data_frame::{self, REQUEST_BYTES, RESPONSE_BYTES, Refusal, RequestHeader, ResponseHeader},
    greeting::{
        CLAIM_BYTES, GREETING_BYTES, Greeting, TokenClaim, VERDICT_BYTES, VERSION, Verdict,
    },
};
use crate::transfer_entry::{Opcode, RemoteRange};

pub(crate) fn fuzz_targets() -> Vec<Target> {
    vec![
        Target { name: "greeting", seeds: greetings(), run: greeting },
        Target { name: "request", seeds: vec![request_bytes(1), request_bytes(9)], run: request },
        Target { name: "answer", seeds: answers(), run: answer },
        Target { name: "compat frame", seeds: headers(), run: compat_frames },
    ]
}

fn greetings() -> Vec<Vec<u8>> {
    let greet = |requires_token| Greeting { version: VERSION, engine: 7, requires_token }.encode();
    let claim = TokenClaim { nonce: [1; 32], proof: [2; 32] }.encode();
    let verdict = Verdict::Accepted([3; 32]).encode();
    vec![greet(false).into(), [&greet(true)[..], &claim, &verdict].concat()]
}

fn greeting(bytes: &[u8]) -> u64 {
    let Some((head, rest)) = bytes.split_first_chunk::<GREETING_BYTES>() else { return 0 };
    let Ok(greeting) = Greeting::decode(head) else { return 1 };
    assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
    let Some((claim, rest)) = rest.split_first_chunk::<CLAIM_BYTES>() else { return 2 };
    assert_eq!(&TokenClaim::decode(claim).encode(), claim);
    let Some(verdict) = rest.first_chunk::<VERDICT_BYTES>() else { return 3 };
    match Verdict::decode(verdict) {
        Err(_) => 4,
        Ok(Verdict::Refused) => 5,
        Ok(taken) => {
            assert_eq!(&taken.encode(), verdict);
            6
        }
    }
}

fn request_bytes(count: usize) -> Vec<u8> {
    let mut wire = Vec::new();
    let payload = 64 * count as u64;
    RequestHeader { opcode: Opcode::Write, count, sequence: 5, payload }.encode(&mut wire);
    for index in 0..count as u64 {
        data_frame::encode_entry(RemoteRange { address: index << 12, length: 64 }, &mut wire);
    }
    wire
}

fn request(bytes: &[u8]) -> u64 {
    let Some((head, table)) = bytes.split_first_chunk::<REQUEST_BYTES>() else { return 0 };
    let Ok(header) = RequestHeader::decode(head) else { return 1 };
    let mut wire = Vec::new();
    header.encode(&mut wire);
    assert_eq!(wire, head);
    let mut ranges = Vec::new();
    if data_frame::decode_entries(&header, table, &mut ranges).is_err() {
        return 2;
    }
    for range in &ranges {
        data_frame::encode_entry(*range, &mut wire);
    }
    assert_eq!(wire, bytes);
    assert_eq!(ranges.iter().map(|range| range.length).sum::<u64>(), header.payload);
    outcome((ranges.len(), header.opcode))
}

fn asked() -> RequestHeader {
    RequestHeader { opcode: Opcode::Read, count: 12, sequence: 5, payload: 4096 }
}

fn answers() -> Vec<Vec<u8>> {
    let with = |refused: usize| {
        let mut wire = Vec::new();
        ResponseHeader { sequence: 5, refused, payload: 4096 }.encode(&mut wire);
        for index in 0..refused {
            Refusal { index, code: ErrorCode::TRANSFER_FAIL }.encode(&mut wire);
        }
        wire
    };
    vec![with(0), with(1), with(12)]
}

fn answer(bytes: &[u8]) -> u64 {
    let Some((head, list)) = bytes.split_first_chunk::<RESPONSE_BYTES>() else { return 0 };
    let Ok(answer) = ResponseHeader::decode(head, &asked()) else { return 1 };
    assert!(answer.refused <= asked().count && answer.payload <= asked().payload);
    let Ok(refusals) = Refusal::decode_all(list, asked().count) else { return 2 };
    assert!(refusals.iter().all(|refusal| refusal.index < asked().count));
    assert!(refusals.is_sorted_by_key(|refusal| refusal.index));
    outcome((answer.refused, refusals.len()))
}

fn headers() -> Vec<Vec<u8>> {
    let range = RemoteRange { address: 1 << 40, length: 4096 };
    let with = |opcode, has_status| {
        let header = Header { opcode, range, has_status }.encode();
        [&header[..], &Status::Done.encode(), &Status::Refused.encode()].concat()
    };
    vec![with(Opcode::Read, true), with(Opcode::Write, true), with(Opcode::Write, false)]
}

/// Decodes a header of either version and the status that follows it.
fn compat_frames(bytes: &[u8]) -> u64 {
    let Some((head, rest)) = bytes.split_first_chunk::<{ compat_frame::HEADER_BYTES }>() else {
        return 0;
    };
    let Ok(header) = Header::decode(head) else { return 1 };
    // Everything but the padding.
    assert_eq!(header.encode()[..17], head[..17]);
    let status = rest.first_chunk().map(|status| Status::decode(*status));
    let status = status.map(|status| status.map(|status| status == Status::Done).ok());
    outcome((header.opcode, header.has_status, status))
}
