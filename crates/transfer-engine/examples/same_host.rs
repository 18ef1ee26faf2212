//! Measures transfers between two engines of one process, over the transports that need no
//! network, next to plain copies between two mappings:
//! `cargo run --release --features test-util --example same_host`.
//!
//! Rates are per CPU time of the calling thread, which does all the work on these transports, so
//! that other load on the machine matters less.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for people who measure")]

use std::time::Duration;

use mooncake_base::{Clock, SystemClock};
use mooncake_transfer_engine::{
    Engine, EngineConfig, LocalRange, Opcode, SharedMemory, TransferEntry, TransportKind,
};

const BYTES: usize = 64 << 20;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let start = |disabled: &[TransportKind]| {
        let config = EngineConfig {
            name: "127.0.0.1".to_owned(),
            disabled: disabled.to_vec(),
            ..EngineConfig::default()
        };
        Engine::start(config, runtime.handle().clone()).unwrap()
    };
    let far = start(&[]);
    let shared = far.allocate(BYTES as u64).unwrap();
    let user = vec![1_u8; BYTES];
    far.regions().register(user.as_ptr() as u64, BYTES as u64, "cpu:0").unwrap();
    let mut local = vec![2_u8; BYTES];
    let mut other = vec![3_u8; BYTES];
    let transports = [TransportKind::Memory, TransportKind::Shm];
    for size in [4 << 10, 64 << 10, 1 << 20, 8 << 20] {
        let plain = fastest(|| {
            for (from, to) in local.chunks(size).zip(other.chunks_mut(size)) {
                // SAFETY: two slices of one length that do not overlap.
                unsafe { std::ptr::copy(from.as_ptr(), to.as_mut_ptr(), size) };
            }
        });
        println!("{size:>8} B  plain copy {plain:.1} GB/s");
        for (count, transport) in transports.into_iter().enumerate() {
            let near = start(&transports[..count]);
            for (name, base) in [("shared", shared.base()), ("user", user.as_ptr() as u64)] {
                for is_held in [true, false] {
                    measure(
                        &near,
                        &far,
                        (transport, name, base),
                        (&mut local, size, is_held),
                        plain,
                    );
                }
            }
        }
    }
    first_touch(&far);
}

fn measure(
    near: &Engine,
    far: &Engine,
    (transport, name, base): (TransportKind, &str, u64),
    (local, size, is_held): (&mut [u8], usize, bool),
    plain: f64,
) {
    let deadline = SystemClock.now() + Duration::from_secs(60);
    let peer = near.open(far.segment_name(), deadline).unwrap();
    assert_eq!(peer.transport(), Some(transport));
    let mut run = |opcode| {
        fastest(|| {
            // One entry at a time, as a caller without batches does.
            for (i, part) in local.chunks_mut(size).enumerate() {
                let range = range(part, is_held);
                let mut entries = [TransferEntry::new(range, base + (i * size) as u64)];
                near.transfer(&peer, opcode, &mut entries, deadline);
                assert!(matches!(entries[0].outcome, Some(Ok(()))), "{entries:?}");
            }
        })
    };
    let (write, read) = (run(Opcode::Write), run(Opcode::Read));
    let ownership = if is_held { "held" } else { "foreign" };
    println!(
        "{size:>8} B  {transport:<6} {name:<6} {ownership:<7} \
         write {write:>5.1} ({:.2})  read {read:>5.1} ({:.2})",
        write / plain,
        read / plain
    );
}

/// Measures the cost of first writes to new memory.
fn first_touch(engine: &Engine) {
    let bytes = vec![5_u8; 1 << 20];
    let memory: SharedMemory = engine.allocate(BYTES as u64).unwrap();
    for round in ["first", "second", "third"] {
        let start = thread_time();
        for i in 0..BYTES / bytes.len() {
            memory.write((i * bytes.len()) as u64, &bytes).unwrap();
        }
        println!("{round} write of 64 MiB of new memory: {:.1} GB/s", rate(thread_time() - start));
    }
}

fn range(part: &mut [u8], is_held: bool) -> LocalRange {
    let (address, length) = (part.as_mut_ptr(), part.len());
    if is_held {
        // SAFETY: the slice outlives the transfer and is not touched meanwhile.
        unsafe { LocalRange::held(address, length) }
    } else {
        // SAFETY: as above.
        unsafe { LocalRange::foreign(address as usize, length) }
    }
}

/// The best rate of a few rounds over all bytes, in GB/s.
fn fastest(mut round: impl FnMut()) -> f64 {
    let rounds = (0..5).map(|_| {
        let start = thread_time();
        round();
        thread_time() - start
    });
    rate(rounds.min().unwrap())
}

fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills a live local.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn rate(time: Duration) -> f64 {
    BYTES as f64 / time.as_secs_f64() / 1e9
}
