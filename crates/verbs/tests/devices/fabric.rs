//! Claims about the simulated fabric: delays, links that go down, devices that are removed.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use mooncake_verbs::{
    AsyncEvent, ForkSafety, GidKind, Operation, PortState, Status,
    fake::{DeviceSettings, Fabric},
};

use crate::pair::{Pair, device_region};

/// The claims with their names.
pub(crate) const CLAIMS: [(&str, fn()); 15] = [
    ("request_completes_after_latency_and_bytes", request_completes_after_latency_and_bytes),
    ("request_survives_a_link_that_comes_back", request_survives_a_link_that_comes_back),
    ("peer_that_stays_away_fails_the_request", peer_that_stays_away_fails_the_request),
    (
        "peer_that_reconnected_elsewhere_does_not_answer",
        peer_that_reconnected_elsewhere_does_not_answer,
    ),
    ("removed_device_flushes_and_refuses", removed_device_flushes_and_refuses),
    ("deregistered_memory_is_refused", deregistered_memory_is_refused),
    ("device_memory_is_not_read_by_the_processor", device_memory_is_not_read_by_the_processor),
    ("device_that_inlines_nothing_connects", device_that_inlines_nothing_connects),
    ("first_device_protects_from_forks", first_device_protects_from_forks),
    ("kernel_that_copies_needs_no_protection", kernel_that_copies_needs_no_protection),
    ("probe_tells_whether_the_peer_is_there", probe_tells_whether_the_peer_is_there),
    ("kind_of_address_needs_no_file", kind_of_address_needs_no_file),
    ("lost_address_ends_the_connection", lost_address_ends_the_connection),
    ("stale_peer_swallows_writes", stale_peer_swallows_writes),
    ("overrun_queue_reports_nothing", overrun_queue_reports_nothing),
];

const MILLISECOND: Duration = Duration::from_millis(1);

/// Two devices of which the first has a rate and a delay.
fn slow_fabric() -> Arc<Fabric> {
    let slow = DeviceSettings {
        latency: 2 * MILLISECOND,
        bytes_per_second: Some(1_000_000),
        ..DeviceSettings::default()
    };
    let fast = DeviceSettings {
        name: "fake1".to_owned(),
        address: Ipv4Addr::new(10, 77, 0, 2),
        ..DeviceSettings::default()
    };
    Fabric::new([slow, fast])
}

fn statuses(pair: &Pair) -> Vec<Status> {
    let mut found = Vec::new();
    pair.left.queue.poll(|completion| found.push(completion.status)).unwrap();
    found
}

fn request_completes_after_latency_and_bytes() {
    let fabric = slow_fabric();
    let mut pair = Pair::connect(&fabric.library(), 4096);
    let remote = pair.right.remote(0);
    pair.left.fill(|index| index as u8);
    pair.left.post(&[1, 2], Operation::Write, 1000, remote, |_| true).unwrap();
    fabric.advance(2 * MILLISECOND);
    assert_eq!(statuses(&pair), [], "1 ms for the bytes of the first, and 2 ms");
    fabric.advance(MILLISECOND);
    assert_eq!(statuses(&pair), [Status::Success]);
    pair.right.check(1000, 1000, |_| 0);
    assert_eq!(fabric.requests_in_flight(), 1);
    fabric.advance(MILLISECOND);
    assert_eq!(statuses(&pair), [Status::Success]);
    pair.right.check(0, 2000, |index| index as u8);
    assert_eq!(fabric.now(), 4 * MILLISECOND);
}

fn request_survives_a_link_that_comes_back() {
    let fabric = Fabric::of(2);
    let library = fabric.library();
    let mut pair = Pair::connect(&library, 4096);
    let context = Arc::clone(pair.left.queue.context());
    fabric.set_link(0, false);
    assert_eq!(context.next_event(MILLISECOND).unwrap(), Some(AsyncEvent::PortError(1)));
    assert_eq!(context.port(1).unwrap().state, PortState::Down);
    let remote = pair.right.remote(0);
    pair.left.post(&[1], Operation::Read, 64, remote, |_| true).unwrap();
    fabric.advance(100 * MILLISECOND);
    assert_eq!(statuses(&pair), []);
    fabric.set_link(0, true);
    assert_eq!(context.next_event(MILLISECOND).unwrap(), Some(AsyncEvent::PortActive(1)));
    assert_eq!(context.next_event(Duration::ZERO).unwrap(), None);
    assert_eq!(statuses(&pair), [Status::Success]);
}

fn peer_that_stays_away_fails_the_request() {
    let fabric = Fabric::of(2);
    let mut pair = Pair::connect(&fabric.library(), 4096);
    fabric.set_link(1, false);
    let remote = pair.right.remote(0);
    pair.left.post(&[1, 2], Operation::Write, 64, remote, |_| false).unwrap();
    // Eight tries of 67 ms.
    fabric.advance(500 * MILLISECOND);
    assert_eq!(statuses(&pair), []);
    fabric.advance(100 * MILLISECOND);
    assert_eq!(statuses(&pair), [Status::NoAnswer, Status::Flushed]);
    pair.right.check(0, 128, |_| 0);
}

fn peer_that_reconnected_elsewhere_does_not_answer() {
    let fabric = Fabric::of(2);
    let mut pair = Pair::connect(&fabric.library(), 4096);
    pair.right.disconnect();
    let remote = pair.right.remote(0);
    pair.left.post(&[1], Operation::Write, 64, remote, |_| true).unwrap();
    fabric.advance(Duration::from_secs(1));
    assert_eq!(statuses(&pair), [Status::NoAnswer]);
}

fn removed_device_flushes_and_refuses() {
    let fabric = slow_fabric();
    let library = fabric.library();
    let mut pair = Pair::connect(&library, 4096);
    let context = Arc::clone(pair.left.queue.context());
    let remote = pair.right.remote(0);
    pair.left.post(&[1], Operation::Write, 64, remote, |_| true).unwrap();
    fabric.remove(0);
    assert_eq!(statuses(&pair), [Status::Flushed]);
    assert_eq!(context.next_event(MILLISECOND).unwrap(), Some(AsyncEvent::DeviceFatal));
    assert!(context.port(1).is_err());
    assert!(pair.left.queue_pair().state().is_err());
    assert_eq!(library.device_names().unwrap(), ["fake1"]);
}

fn deregistered_memory_is_refused() {
    let fabric = Fabric::of(2);
    let library = fabric.library();
    let mut pair = Pair::connect(&library, 4096);
    let gone = Pair::connect(&library, 4096).right.remote(0);
    pair.left.post(&[1], Operation::Read, 64, gone, |_| true).unwrap();
    assert_eq!(statuses(&pair), [Status::RemoteAccess]);
}

fn device_memory_is_not_read_by_the_processor() {
    let fabric = Fabric::of(2);
    let mut pair = Pair::connect(&fabric.library(), 4096);
    assert_eq!(pair.left.limits().inline_bytes, 64);
    let region = device_region(pair.left.region.domain(), &[5; 48]);
    let remote = pair.right.remote(0);
    pair.left.post_region(1, &region, remote);
    assert_eq!(statuses(&pair), [Status::Success]);
    pair.right.check(0, 48, |_| 5);
    assert_eq!(fabric.inline_requests(), 0);
    let remote = pair.right.remote(100);
    pair.left.post(&[2], Operation::Write, 48, remote, |_| true).unwrap();
    assert_eq!(fabric.inline_requests(), 1, "the host reads its own memory");
}

fn device_that_inlines_nothing_connects() {
    let device = |index: u8| DeviceSettings {
        name: format!("fake{index}"),
        address: Ipv4Addr::new(10, 77, 0, index + 1),
        inline_bytes_max: 0,
        ..DeviceSettings::default()
    };
    let fabric = Fabric::new((0..2).map(device));
    let mut pair = Pair::connect(&fabric.library(), 4096);
    assert_eq!(pair.left.limits().inline_bytes, 0);
    pair.left.fill(|index| index as u8);
    pair.transfer(Operation::Write, 0, 0, 16);
    pair.right.check(0, 16, |index| index as u8);
}

fn first_device_protects_from_forks() {
    let fabric = Fabric::of(1);
    let library = fabric.library();
    let device = library.devices().unwrap().remove(0);
    assert_eq!(library.fork_safety(), ForkSafety::Unsafe);
    let _context = device.open().unwrap();
    assert_eq!(library.fork_safety(), ForkSafety::Protected);
    assert!(fabric.is_fork_protected());
}

fn kernel_that_copies_needs_no_protection() {
    let fabric = Fabric::of(1);
    fabric.copy_on_fork();
    let library = fabric.library();
    let _context = library.devices().unwrap().remove(0).open().unwrap();
    assert_eq!(library.fork_safety(), ForkSafety::Safe);
    assert!(!fabric.is_fork_protected());
}

fn probe_tells_whether_the_peer_is_there() {
    let fabric = Fabric::of(2);
    let mut pair = Pair::connect(&fabric.library(), 4096);
    pair.left.post_probe(1);
    assert_eq!(statuses(&pair), [Status::Success]);
    pair.right.disconnect();
    pair.left.post_probe(2);
    fabric.advance(Duration::from_secs(1));
    assert_eq!(statuses(&pair), [Status::NoAnswer]);
}

fn kind_of_address_needs_no_file() {
    for (number, kind) in [(1, GidKind::RoceV1), (2, GidKind::RoceV2)] {
        let device = DeviceSettings { gid_kind: number, ..DeviceSettings::default() };
        let context = crate::pair::open(&Fabric::new([device]).library(), 0);
        assert_eq!(context.gids(1).unwrap()[0].kind, kind);
    }
}

fn lost_address_ends_the_connection() {
    let fabric = Fabric::of(2);
    let mut pair = Pair::connect(&fabric.library(), 4096);
    let context = Arc::clone(pair.left.queue.context());
    fabric.set_address(0, Some((4, Ipv4Addr::new(10, 77, 0, 1))));
    assert_eq!(context.next_event(MILLISECOND).unwrap(), Some(AsyncEvent::AddressChange(1)));
    let found: Vec<_> = context.gids(1).unwrap().iter().map(|entry| entry.index).collect();
    assert_eq!(found, [4]);
    let remote = pair.right.remote(0);
    pair.left.post(&[1], Operation::Write, 64, remote, |_| true).unwrap();
    fabric.advance(Duration::from_secs(1));
    assert_eq!(statuses(&pair), [Status::NoAnswer]);
}

/// Writes after a peer was connected anew with the same numbers, while this end expects later packets.
fn stale_peer_swallows_writes() {
    let fabric = Fabric::of(2);
    fabric.reuse_numbers();
    let mut pair = Pair::connect(&fabric.library(), 4096);
    pair.left.fill(|index| index as u8);
    pair.transfer(Operation::Write, 0, 0, 64);
    let right = pair.right.address();
    pair.left.disconnect();
    pair.left.connect(&right);
    let remote = pair.right.remote(1000);
    pair.left.post(&[1], Operation::Write, 64, remote, |_| true).unwrap();
    assert_eq!(statuses(&pair), [Status::Success], "acknowledged as a duplicate");
    pair.right.check(1000, 64, |_| 0);
    let (left, right) = (pair.left.address(), pair.right.address());
    pair.left.disconnect();
    pair.right.disconnect();
    pair.left.connect(&right);
    pair.right.connect(&left);
    pair.transfer(Operation::Write, 0, 1000, 64);
    pair.right.check(1000, 64, |index| index as u8);
}

fn overrun_queue_reports_nothing() {
    let fabric = Fabric::of(2);
    let mut pair = Pair::connect(&fabric.library(), 4096);
    let context = Arc::clone(pair.left.queue.context());
    fabric.fail_completions(0);
    assert_eq!(context.next_event(MILLISECOND).unwrap(), Some(AsyncEvent::CompletionQueueError));
    let remote = pair.right.remote(0);
    pair.left.post(&[1], Operation::Write, 64, remote, |_| true).unwrap();
    fabric.advance(Duration::from_secs(1));
    assert_eq!(statuses(&pair), []);
}
