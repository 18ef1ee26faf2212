//! A fuzz target for the messages between engines of one host.

use mooncake_base::{
    EngineId,
    fuzz::{Target, outcome},
};

use super::message::{RegionKind, ShmMessage};

pub(crate) fn fuzz_targets() -> Vec<Target> {
    let id = EngineId::from_bits(7);
    let seeds = [
        ShmMessage::Hello { version: 2, from: id, to: id },
        ShmMessage::OtherVersion { version: 4 },
        ShmMessage::Challenge { nonce: [1; 32] },
        ShmMessage::Answer { nonce: [1; 32], proof: [2; 32] },
        ShmMessage::Granted { proof: [3; 32] },
        ShmMessage::Denied,
        ShmMessage::Welcome { address: 1, sample: 2, sample_length: 3 },
        ShmMessage::Proof { shared: [4; 16], process: [5; 16] },
        ShmMessage::Verdict { is_shared: true, is_process: false },
        ShmMessage::Query { id: 1, address: 2, length: 3 },
        ShmMessage::Found { id: 1, base: 2, length: 3, kind: RegionKind::Shared },
        ShmMessage::Missing { id: 4 },
        ShmMessage::Withdraw { base: 5 },
        ShmMessage::Confirm { base: 6 },
    ];
    let seeds = seeds.iter().map(ShmMessage::encode).collect();
    vec![Target { name: "shm message", seeds, run: message }]
}

fn message(bytes: &[u8]) -> u64 {
    let Some(message) = ShmMessage::decode(bytes) else { return 0 };
    assert_eq!(message.encode(), bytes);
    outcome(std::mem::discriminant(&message))
}
