//! Throws broken bytes at everything that decodes what comes from outside.
//!
//! A target is a function of bytes that must neither panic nor accept what it does not write the
//! same way again. The driver begins with good messages, breaks them at random, and keeps those
//! that lead to an outcome it has not seen yet. Each run of the tests takes the same seed and a
//! moment; `MOONCAKE_FUZZ_SECONDS=600 cargo test -p mooncake-transfer-engine --lib fuzz --
//! --nocapture` takes that long, with a seed of its own that a failure prints.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use mooncake_base::{EngineId, env::EnvVar};

use crate::{
    descriptor::{BufferDescriptor, LocalDescriptor, OwnDescriptor, SegmentDescriptor},
    handshake::codec::{self, Message, MessageKind, Notification},
    transport::{shm, tcp},
};

/// How long a run takes, in seconds; a moment if it is not set.
static SECONDS: EnvVar = EnvVar {
    name: "MOONCAKE_FUZZ_SECONDS",
    aliases: &[],
    default: "",
    help: "How long the tests throw broken bytes at decoders.",
};

/// Bytes thrown at each target in a run of the tests.
const ROUNDS: u64 = 20_000;

/// No input is longer.
const BYTES_MAX: usize = 4096;

/// Something that decodes.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// Good inputs.
    pub(crate) seeds: Vec<Vec<u8>>,
    /// Decodes and checks; the number tells one kind of outcome from another.
    pub(crate) run: fn(&[u8]) -> u64,
}

/// A number for an outcome.
pub(crate) fn outcome(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

fn targets() -> Vec<Target> {
    let mut targets = vec![descriptor(), handshake(), notification()];
    targets.extend(tcp::fuzz_targets());
    targets.extend(shm::fuzz_targets());
    targets
}

fn descriptor() -> Target {
    let own = OwnDescriptor::new(
        EngineId::from_bits(7),
        Some(LocalDescriptor { unix_socket: "mooncake-7".into(), process: 4 }),
    );
    let full = SegmentDescriptor {
        name: "h:1".into(),
        protocol: "tcp".into(),
        tcp_data_host: "h".into(),
        tcp_data_port: 2,
        tcp_proto_version: 2,
        buffers: vec![BufferDescriptor { name: "cpu:0".into(), addr: 1 << 40, length: 9 }],
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
            let engine = own.and_then(OwnDescriptor::engine).is_some();
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

/// Numbers, one after another, that a seed fixes (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Breaks an input in one to four places.
fn break_bytes(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next() as u8,
            2 => bytes.insert(at, random.next() as u8),
            3 if at < bytes.len() => drop(bytes.remove(at)),
            4 => bytes.truncate(at),
            5 => {
                // Numbers at which sums and sizes go wrong.
                let edges = [0, 1, 4095, 4096, 4097, u64::MAX, 1 << 63, u64::MAX >> 1, 1 << 32];
                let edge = edges[random.below(edges.len())].to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)];
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&edge[..end - at]);
            }
            6 => {
                let other = &corpus[random.below(corpus.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[random.below(other.len() + 1)..]);
            }
            _ => {
                let end = (at + random.below(32)).min(bytes.len());
                bytes.extend_from_within(at..end);
            }
        }
        bytes.truncate(BYTES_MAX);
    }
    bytes
}

/// Throws bytes at one target; how many times, and how many kinds of outcome there were.
fn drive(target: &Target, seed: u64, goes_on: &dyn Fn(u64) -> bool) -> (u64, usize) {
    let mut random = Random(seed | 1);
    let mut corpus = target.seeds.clone();
    let mut seen: HashSet<u64> = corpus.iter().map(|bytes| (target.run)(bytes)).collect();
    let mut count = 0;
    while goes_on(count) {
        let bytes = break_bytes(&mut random, &corpus);
        let run = catch_unwind(AssertUnwindSafe(|| (target.run)(&bytes)));
        let Ok(outcome) = run else {
            panic!("{} with seed {seed}, run {count}: {bytes:?}", target.name);
        };
        if seen.len() < 4096 && seen.insert(outcome) {
            corpus.push(bytes);
        }
        count += 1;
    }
    (count, seen.len())
}

#[test]
#[allow(clippy::print_stderr, reason = "a long run tells how far it came")]
fn no_decoder_panics_or_takes_what_it_would_not_write() {
    let targets = targets();
    let seconds: Option<u64> = SECONDS.read().and_then(|text| text.parse().ok());
    let Some(seconds) = seconds else {
        for target in &targets {
            let (_, outcomes) = drive(target, 1, &|count| count < ROUNDS);
            assert!(outcomes >= 2, "{}: good and bad bytes are told apart", target.name);
        }
        return;
    };
    let each = Duration::from_secs(seconds) / targets.len() as u32;
    for target in &targets {
        let seed = EngineId::random().halves().0;
        let end = Instant::now() + each;
        let (count, outcomes) =
            drive(target, seed, &|count| count % 256 != 0 || Instant::now() < end);
        eprintln!("{}: {count} runs, {outcomes} kinds of outcome, seed {seed}", target.name);
    }
}

#[test]
fn the_driver_finds_a_decoder_that_panics() {
    let run = |bytes: &[u8]| {
        let length = bytes.first().map_or(0, |first| usize::from(*first));
        u64::from(bytes[..length][0])
    };
    let target = Target { name: "bad", seeds: vec![vec![3, 1, 2]], run };
    let found = catch_unwind(|| drive(&target, 1, &|count| count < 1000));
    assert!(found.is_err());
}
