//! Claims about failures, on a simulated fabric whose clock and links are in the test's hand.

use std::{
    net::Ipv4Addr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_rdma::{Entry, EntryError, Operation, RdmaSettings};
use mooncake_verbs::fake::{DeviceSettings, Fabric};

use crate::side::Sides;

/// The claims with their names.
pub(crate) const CLAIMS: [(&str, fn()); 5] = [
    ("link_that_goes_down_moves_slices_elsewhere", link_that_goes_down_moves_slices_elsewhere),
    ("link_that_comes_back_is_used_again", link_that_comes_back_is_used_again),
    ("removed_device_is_left", removed_device_is_left),
    ("silent_peer_fails_with_the_reason", silent_peer_fails_with_the_reason),
    ("slices_are_spread_by_speed", slices_are_spread_by_speed),
];

/// Two devices with a latency, so that requests are in flight until the clock is moved.
fn slow_fabric() -> Arc<Fabric> {
    Fabric::new((0..2).map(|index| DeviceSettings {
        name: format!("fake{index}"),
        address: Ipv4Addr::new(10, 77, 0, index + 1),
        latency: Duration::from_millis(10),
        ..DeviceSettings::default()
    }))
}

/// Waits for a condition that another thread brings about.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        thread::yield_now();
    }
}

fn entry(sides: &Sides, length: u64) -> [Entry; 1] {
    [Entry { local: sides.left.base(), remote: sides.right.base(), length }]
}

fn link_that_goes_down_moves_slices_elsewhere() {
    let fabric = slow_fabric();
    let mut sides = Sides::new(&fabric.library(), 1 << 20, RdmaSettings::default());
    sides.left.fill(|index| (index % 251) as u8);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    thread::scope(|scope| {
        let moving =
            scope.spawn(|| sides.try_transfer(&link, Operation::Write, &entry(&sides, 1 << 20)));
        wait_until("all slices are in flight", || fabric.requests_in_flight() == 16);
        fabric.set_link(0, false);
        wait_until("all bytes go over the other device", || fabric.bytes_sent(1) == 1 << 20);
        // Nothing waited for a time-out of the device.
        fabric.advance(Duration::from_millis(10));
        assert!(moving.join().unwrap()[0].is_ok());
    });
    sides.right.check(0, 1 << 20, |index| (index % 251) as u8);
}

fn link_that_comes_back_is_used_again() {
    let fabric = Fabric::of(1);
    let mut sides = Sides::new(&fabric.library(), 4096, RdmaSettings::default());
    sides.transfer(Operation::Write, &[(0, 0, 4096)]);
    fabric.set_link(0, false);
    let link = sides.link();
    wait_until("the failure is noticed", || {
        sides.try_transfer(&link, Operation::Write, &entry(&sides, 64))[0].is_err()
    });
    fabric.set_link(0, true);
    sides.left.fill(|index| index as u8);
    wait_until("the link is used again", || {
        sides.try_transfer(&link, Operation::Write, &entry(&sides, 4096))[0].is_ok()
    });
    sides.right.check(0, 4096, |index| index as u8);
}

fn removed_device_is_left() {
    let fabric = Fabric::of(2);
    let sides = Sides::new(&fabric.library(), 1 << 16, RdmaSettings::default());
    sides.transfer(Operation::Write, &[(0, 0, 1 << 16)]);
    fabric.remove(1);
    let link = sides.link();
    for _ in 0..20 {
        let outcomes = sides.try_transfer(&link, Operation::Read, &entry(&sides, 1 << 16));
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
    }
    fabric.remove(0);
    wait_until("both are noticed", || {
        sides.try_transfer(&link, Operation::Read, &entry(&sides, 64))[0].is_err()
    });
}

fn silent_peer_fails_with_the_reason() {
    let fabric = slow_fabric();
    let settings = RdmaSettings {
        stall_timeout: Duration::from_millis(50),
        tries: 3,
        ..RdmaSettings::default()
    };
    let sides = Sides::new(&fabric.library(), 4096, settings);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    // The clock stands still, so that no request ends.
    let started = Instant::now();
    let outcomes = sides.try_transfer(&link, Operation::Write, &entry(&sides, 4096));
    let Err(EntryError::Failed(error)) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(error.to_string().contains("right:2"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(30));
    assert_eq!(fabric.requests_in_flight(), 0);
}

fn slices_are_spread_by_speed() {
    let device = |index: u8, rate| DeviceSettings {
        name: format!("fake{index}"),
        address: Ipv4Addr::new(10, 77, 0, index + 1),
        bytes_per_second: Some(rate),
        ..DeviceSettings::default()
    };
    let fabric = Fabric::new([device(0, 4_000_000_000), device(1, 1_000_000_000)]);
    let settings = RdmaSettings { queue_depth: 16, ..RdmaSettings::default() };
    let sides = Sides::new(&fabric.library(), 16 << 20, settings);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    thread::scope(|scope| {
        let moving = scope.spawn(|| {
            for _ in 0..8 {
                let outcomes =
                    sides.try_transfer(&link, Operation::Write, &entry(&sides, 16 << 20));
                assert!(outcomes[0].is_ok(), "{outcomes:?}");
            }
        });
        while !moving.is_finished() {
            fabric.advance(Duration::from_micros(20));
            thread::yield_now();
        }
        moving.join().unwrap();
    });
    let [fast, slow] = [fabric.bytes_sent(0), fabric.bytes_sent(1)];
    assert_eq!(fast + slow, 8 * (16 << 20));
    assert!(fast > 2 * slow && slow > 0, "fast={fast} slow={slow}");
}
