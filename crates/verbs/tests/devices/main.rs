//! Claims about devices and connections, on a simulated fabric and on the RDMA devices of this machine.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

mod fabric;
mod pair;

use std::{
    num::NonZeroUsize,
    process::ExitCode,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use libtest_mimic::Arguments;
use mooncake_base::requirement::trial;
use mooncake_verbs::{
    Access, CompletionChannel, CompletionQueue, Context, Error, Library, MemoryRegion, Operation,
    Ordering, PortState, ProtectionDomain, QueuePair, QueuePairLimits, QueuePairState, Status,
    fake::Fabric,
};

use self::pair::{End, Pair, open};

/// Makes the library whose devices a claim is about.
type MakeLibrary = fn() -> Arc<Library>;

/// A claim about any library with devices.
type Claim = fn(MakeLibrary);

const CLAIMS: [(&str, Claim); 16] = [
    ("device_has_a_name_ports_and_addresses", device_has_a_name_ports_and_addresses),
    ("unknown_port_is_an_error_that_names_the_device", unknown_port_is_an_error),
    ("region_has_keys_and_outlives_its_parents", region_has_keys_and_outlives_its_parents),
    ("read_only_memory_is_a_source_only", read_only_memory_is_a_source_only),
    ("range_outside_of_its_region_is_none", range_outside_of_its_region_is_none),
    ("completion_queue_starts_empty", completion_queue_starts_empty),
    ("channel_is_needed_to_arm", channel_is_needed_to_arm),
    ("writes_and_reads_arrive", writes_and_reads_arrive),
    ("small_writes_arrive", small_writes_arrive),
    ("signaled_request_implies_those_before_it", signaled_request_implies_those_before_it),
    ("refused_key_fails_the_connection", refused_key_fails_the_connection),
    ("failed_connection_flushes_requests", failed_connection_flushes_requests),
    ("full_queue_tells_how_many_were_posted", full_queue_tells_how_many_were_posted),
    ("channel_wakes_up_for_a_completion", channel_wakes_up_for_a_completion),
    ("refused_connect_returns_the_queue_pair", refused_connect_returns_the_queue_pair),
    ("disconnected_queue_pair_connects_again", disconnected_queue_pair_connects_again),
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let missing = has_device().err();
    let mut trials = Vec::new();
    for (name, claim) in CLAIMS {
        trials.push(trial(None, format!("fake::{name}"), move || claim(fake)));
        trials.push(trial(missing.clone(), format!("real::{name}"), move || claim(real)));
    }
    let unmapped = "real::refuses_to_register_unmapped_memory";
    trials.push(trial(missing, unmapped.to_owned(), refuses_to_register_unmapped_memory));
    for (name, claim) in fabric::CLAIMS {
        trials.push(trial(None, format!("fabric::{name}"), claim));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn fake() -> Arc<Library> {
    Fabric::of(2).library()
}

fn real() -> Arc<Library> {
    Library::load().unwrap()
}

/// Returns why the claims about real devices cannot be tried.
fn has_device() -> Result<(), String> {
    let library = Library::load().map_err(|error| format!("needs libibverbs: {error}"))?;
    let devices = library.devices().expect("the kernel lists its devices");
    if devices.is_empty() { Err("needs an RDMA device".to_owned()) } else { Ok(()) }
}

fn device(make: MakeLibrary) -> Arc<Context> {
    open(&make(), 0)
}

fn device_has_a_name_ports_and_addresses(make: MakeLibrary) {
    let library = make();
    let context = open(&library, 0);
    assert!(!context.device().name().is_empty());
    assert!(library.device_names().unwrap().contains(&context.device().name().to_owned()));
    let limits = context.limits().unwrap();
    assert!(limits.ports >= 1 && limits.completions_max >= 1, "{limits:?}");
    for number in 1..=limits.ports {
        let port = context.port(number).unwrap();
        let gids = context.gids(number).unwrap();
        assert!(gids.len() <= port.gid_count as usize);
        if port.state == PortState::Active {
            assert!(port.mtu.bytes() >= 256 && !gids.is_empty());
            assert!(!mooncake_verbs::rank_gids(gids).is_empty());
        }
    }
}

fn unknown_port_is_an_error(make: MakeLibrary) {
    let context = device(make);
    let error = context.port(200).unwrap_err();
    assert!(error.to_string().contains(context.device().name()), "{error}");
    assert!(context.gid(1, u32::MAX).is_err());
}

fn region_has_keys_and_outlives_its_parents(make: MakeLibrary) {
    let context = device(make);
    let domain = ProtectionDomain::new(&context).unwrap();
    let mut memory = vec![7_u8; 64 * 1024];
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    let register = |length, access, ordering| {
        // SAFETY: `memory` outlives the regions, and nothing is posted that would write to it.
        unsafe { MemoryRegion::register(&domain, base, length, access, ordering) }
    };
    let first = register(memory.len(), Access::RemoteReadWrite, Ordering::Relaxed).unwrap();
    let second = register(4096, Access::Destination, Ordering::Strict).unwrap();
    assert_ne!(first.local_key(), second.local_key());
    assert_ne!(first.remote_key(), 0);
    assert_eq!((first.address(), first.length()), (base.as_ptr() as u64, 64 * 1024));
    drop(context);
    drop(domain);
    assert!(!first.domain().context().device().name().is_empty());
    drop(first);
    drop(second);
    assert!(memory.iter().all(|byte| *byte == 7));
}

fn read_only_memory_is_a_source_only(make: MakeLibrary) {
    static CONSTANT: [u8; 16384] = [7; 16384];
    let domain = ProtectionDomain::new(&device(make)).unwrap();
    let base = NonNull::from(&CONSTANT).cast::<u8>();
    let register = |access| {
        // SAFETY: the memory stays, and nothing is posted that would write to it.
        unsafe { MemoryRegion::register(&domain, base, CONSTANT.len(), access, Ordering::Strict) }
    };
    register(Access::Source).unwrap();
    let error = register(Access::Destination).unwrap_err().to_string();
    assert!(error.contains("not writable"), "{error}");
}

fn range_outside_of_its_region_is_none(make: MakeLibrary) {
    let end = End::new(&device(make), 4096, QueuePairLimits::default());
    assert!(end.region.range(0, 4096).is_some());
    assert!(end.region.range(4095, 1).is_some());
    assert!(end.region.range(4096, 0).is_some());
    assert!(end.region.range(1, 4096).is_none());
    assert!(end.region.range(usize::MAX, 1).is_none());
}

fn refuses_to_register_unmapped_memory() {
    let context = device(real);
    let domain = ProtectionDomain::new(&context).unwrap();
    let nowhere = NonNull::without_provenance(NonZeroUsize::new(4096).unwrap());
    let access = Access::RemoteReadWrite;
    // SAFETY: nothing is mapped in the first pages, so that nothing can be overwritten; the
    // kernel refuses them.
    let refused =
        unsafe { MemoryRegion::register(&domain, nowhere, 4096, access, Ordering::Strict) };
    let Err(error @ Error::Register { .. }) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("not mapped"), "{error}");
}

fn completion_queue_starts_empty(make: MakeLibrary) {
    let context = device(make);
    let queue = CompletionQueue::new(&context, 100).unwrap();
    assert!(queue.capacity() >= 100);
    assert_eq!(queue.poll(|completion| panic!("{completion:?}")).unwrap(), 0);
    let too_many = context.limits().unwrap().completions_max + 1;
    assert!(CompletionQueue::new(&context, too_many).is_err());
    assert!(CompletionQueue::new(&context, u32::MAX).is_err());
}

fn channel_is_needed_to_arm(make: MakeLibrary) {
    let queue = CompletionQueue::new(&device(make), 16).unwrap();
    assert!(matches!(queue.arm(), Err(Error::NoChannel)));
}

fn writes_and_reads_arrive(make: MakeLibrary) {
    let mut pair = Pair::connect(&make(), 1 << 20);
    pair.left.fill(|index| index as u8);
    pair.transfer(Operation::Write, 0, 0, 1 << 19);
    pair.right.check(0, 1 << 19, |index| index as u8);
    pair.right.check(1 << 19, 1 << 19, |_| 0);
    pair.right.fill(|index| (index * 7) as u8);
    pair.transfer(Operation::Read, 1000, 3, 70_001);
    pair.left.check(1000, 70_001, |index| ((index + 3) * 7) as u8);
    pair.left.check(71_001, 100, |index| (index + 71_001) as u8);
}

fn small_writes_arrive(make: MakeLibrary) {
    let mut pair = Pair::connect(&make(), 4096);
    let inline = pair.left.queue_pair().limits().inline_bytes;
    pair.left.fill(|index| index as u8 | 1);
    for length in [1, inline.max(2) - 1, inline.max(1), inline + 1] {
        pair.transfer(Operation::Write, 100, 2000, length);
        pair.right.check(2000, length as usize, |index| (index + 100) as u8 | 1);
        pair.right.check(2000 + length as usize, 8, |_| 0);
    }
}

fn signaled_request_implies_those_before_it(make: MakeLibrary) {
    let mut pair = Pair::connect(&make(), 4096);
    pair.left.fill(|index| index as u8);
    let remote = pair.right.remote(0);
    let ids: Vec<u64> = (0..8).collect();
    let posted = pair.left.post(&ids, Operation::Write, 512, remote, |id| id == 7);
    assert_eq!(posted.unwrap(), 8);
    let completions = pair.left.completions(1);
    assert_eq!((completions[0].request, completions[0].status), (7, Status::Success));
    pair.right.check(0, 4096, |index| index as u8);
    assert_eq!(pair.left.queue.poll(|other| panic!("{other:?}")).unwrap(), 0);
}

fn refused_key_fails_the_connection(make: MakeLibrary) {
    let mut pair = Pair::connect(&make(), 4096);
    let mut remote = pair.right.remote(0);
    remote.key = remote.key.wrapping_add(0x1234);
    pair.left.post(&[1, 2], Operation::Write, 256, remote, |_| true).unwrap();
    let completions = pair.left.completions(2);
    assert_eq!((completions[0].request, completions[0].status), (1, Status::RemoteAccess));
    assert_eq!((completions[1].request, completions[1].status), (2, Status::Flushed));
    assert!(completions[0].status.is_invalid_request());
    assert_eq!(pair.left.queue_pair().state().unwrap(), QueuePairState::Failed);
    pair.right.check(0, 4096, |_| 0);
}

fn failed_connection_flushes_requests(make: MakeLibrary) {
    let mut pair = Pair::connect(&make(), 4096);
    pair.left.queue_pair().fail().unwrap();
    let remote = pair.right.remote(0);
    pair.left.post(&[5], Operation::Read, 256, remote, |_| false).unwrap();
    let completions = pair.left.completions(1);
    assert_eq!((completions[0].request, completions[0].status), (5, Status::Flushed));
}

fn full_queue_tells_how_many_were_posted(make: MakeLibrary) {
    let limits = QueuePairLimits { requests: 8, inline_bytes: 0, batch: 64 };
    let mut pair = Pair::with_limits(&make(), 1 << 20, limits);
    let granted: u64 = pair.left.queue_pair().limits().requests.into();
    let remote = pair.right.remote(0);
    let ids: Vec<u64> = (0..pair.left.queue_pair().limits().batch.into()).collect();
    let mut posted = 0;
    let error = loop {
        // No completion is polled. A device may free a place when its request is done.
        match pair.left.post(&ids, Operation::Read, 1 << 15, remote, |_| true) {
            Ok(count) => posted += count as u64,
            Err(error) => break error,
        }
        assert!(posted < 800, "the completion queue would overrun");
    };
    posted += error.posted as u64;
    assert!(posted >= granted, "posted={posted} granted={granted}");
    assert_eq!(error.source.raw_os_error(), Some(libc::ENOMEM), "{error}");
    let completions = pair.left.completions(posted as usize);
    assert!(completions.iter().all(|completion| completion.is_done()));
    pair.transfer(Operation::Read, 0, 0, 64);
}

fn channel_wakes_up_for_a_completion(make: MakeLibrary) {
    let library = make();
    let context = open(&library, 0);
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::with_channel(&channel, 64, 1000).unwrap();
    let mut pair = Pair::with_queue(&library, 4096, &queue);
    queue.arm().unwrap();
    assert!(!channel.wait(Duration::from_millis(10)).unwrap(), "nothing was posted");
    let remote = pair.right.remote(0);
    pair.left.post(&[1], Operation::Write, 64, remote, |_| true).unwrap();
    assert!(channel.wait(Duration::from_secs(10)).unwrap());
    assert_eq!(pair.left.completions(1)[0].status, Status::Success);
    // One event per arming.
    pair.left.post(&[2], Operation::Write, 64, remote, |_| true).unwrap();
    assert_eq!(pair.left.completions(1)[0].request, 2);
    assert!(!channel.wait(Duration::from_millis(10)).unwrap());
}

fn refused_connect_returns_the_queue_pair(make: MakeLibrary) {
    let library = make();
    let mut left = End::new(&open(&library, 0), 4096, QueuePairLimits::default());
    let mut right = End::new(&open(&library, 1), 4096, QueuePairLimits::default());
    let (left_address, right_address) = (left.address(), right.address());
    let mut settings = left.settings();
    settings.gid_index = 200;
    let queue_pair: QueuePair = left.take_unconnected();
    let number = queue_pair.number();
    let refused = queue_pair.connect(&right_address, &settings).unwrap_err();
    assert!(matches!(refused.error, Error::Call { .. }), "{refused:?}");
    let queue_pair = refused.queue_pair.expect("a reset queue pair");
    assert_eq!((queue_pair.number(), queue_pair.state().unwrap()), (number, QueuePairState::Reset));
    left.set_unconnected(queue_pair);
    left.connect(&right_address);
    right.connect(&left_address);
    Pair { left, right }.transfer(Operation::Write, 0, 0, 4096);
}

fn disconnected_queue_pair_connects_again(make: MakeLibrary) {
    let mut pair = Pair::connect(&make(), 4096);
    pair.transfer(Operation::Write, 0, 0, 64);
    pair.left.disconnect();
    pair.right.disconnect();
    let (left, right) = (pair.left.address(), pair.right.address());
    pair.left.connect(&right);
    pair.right.connect(&left);
    pair.left.fill(|index| index as u8);
    let started = Instant::now();
    pair.transfer(Operation::Write, 0, 0, 4096);
    pair.right.check(0, 4096, |index| index as u8);
    assert!(started.elapsed() < Duration::from_secs(30));
}
