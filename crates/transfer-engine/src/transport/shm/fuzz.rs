//! A fuzz target for the messages between engines of one host.

use mooncake_base::{
    EngineId,
    fuzz::{Target, outcome},
};

use super::message::{Message, RegionKind};

pub(crate) fn fuzz_targets() -> Vec<Target> {
    let id = EngineId::from_bits(7);
    let seeds = [
        Message::Hello { version: 2, from: id, to: id },
        Message::OtherVersion { version: 4 },
        Message::Challenge { nonce: [1; 32] },
        Message::Answer { nonce: [1; 32], proof: [2; 32] },
        Message::Granted { proof: [3; 32] },
        Message::Denied,
        Message::Welcome { address: 1, sample: 2, sample_length: 3 },
        Message::Proof { shared: [4; 16], process: [5; 16] },
        Message::Verdict { is_shared: true, is_process: false },
        Message::Query { id: 1, address: 2, length: 3 },
        Message::Found { id: 1, base: 2, length: 3, kind: RegionKind::Shared },
        Message::Missing { id: 4 },
        Message::Withdraw { base: 5 },
        Message::Confirm { base: 6 },
    ];
    let seeds = seeds.iter().map(Message::encode).collect();
    vec![Target { name: "shm message", seeds, run: message }]
}

fn message(bytes: &[u8]) -> u64 {
    let Some(message) = Message::decode(bytes) else { return 0 };
    assert_eq!(message.encode(), bytes);
    outcome(std::mem::discriminant(&message))
}
