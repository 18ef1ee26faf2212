//! One entry of more than a gibibyte, over every transport.

use std::time::Duration;

use mooncake_base::{Clock, SystemClock};
use mooncake_transfer_engine::Opcode;

use crate::pair::{Lent, Pair, held, move_until, pattern};

pub(crate) fn arrives_over_memory() {
    arrives_whole(&Pair::over_memory());
}

pub(crate) fn arrives_over_shm() {
    arrives_whole(&Pair::over_shm());
}

pub(crate) fn arrives_over_tcp() {
    arrives_whole(&Pair::over_tcp());
}

/// Moves one entry into and out of the middle of both ranges. Each write brings other bytes.
fn arrives_whole(pair: &Pair) {
    const LENGTH: usize = (1 << 30) + 5;
    let deadline = || SystemClock.now() + Duration::from_secs(600);
    let mut bytes = Vec::new();
    for (seed, make) in [Lent::shared, Lent::user].into_iter().enumerate() {
        let lent = make(&pair.far, LENGTH + 3);
        let wanted = pattern(LENGTH, seed);
        bytes.clone_from(&wanted);
        let transfer = |opcode, bytes: &mut [u8]| {
            let one = (held(bytes), lent.base() + 3);
            move_until(&pair.near, &pair.peer, opcode, one, deadline()).unwrap();
        };
        transfer(Opcode::Write, &mut bytes);
        bytes.fill(0);
        transfer(Opcode::Read, &mut bytes);
        assert!(bytes == wanted);
    }
}
