//! Claims about the simulated fabric: delays, links that go down, devices that are removed.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use mooncake_verbs::{
    AsyncEvent, Operation, PortState, Status,
    fake::{DeviceSettings, Fabric},
};

use crate::pair::Pair;

/// The claims with their names.
pub(crate) const CLAIMS: [(&str, fn()); 6] = [
    ("request_completes_after_latency_and_bytes", request_completes_after_latency_and_bytes),
    ("request_survives_a_link_that_comes_back", request_survives_a_link_that_comes_back),
    ("peer_that_stays_away_fails_the_request", peer_that_stays_away_fails_the_request),
    (
        "peer_that_reconnected_elsewhere_does_not_answer",
        peer_that_reconnected_elsewhere_does_not_answer,
    ),
    ("removed_device_flushes_and_refuses", removed_device_flushes_and_refuses),
    ("deregistered_memory_is_refused", deregistered_memory_is_refused),
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
