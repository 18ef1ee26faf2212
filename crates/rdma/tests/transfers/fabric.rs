//! Claims about failures, on a simulated fabric whose clock and links are in the test's hand.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{DeviceUsage, clock::ManualClock};
use mooncake_rdma::{Entry, EntryError, Operation, RdmaSettings, survey};
use mooncake_verbs::{
    PortState,
    fake::{DeviceSettings, Fabric},
};

use crate::side::{Sides, names};

/// The claims with their names.
pub(crate) const CLAIMS: [(&str, fn()); 11] = [
    ("link_that_goes_down_moves_slices_elsewhere", link_that_goes_down_moves_slices_elsewhere),
    ("link_that_comes_back_is_used_again", link_that_comes_back_is_used_again),
    ("removed_device_is_left", removed_device_is_left),
    ("silent_peer_fails_with_the_reason", silent_peer_fails_with_the_reason),
    ("slices_are_spread_by_speed", slices_are_spread_by_speed),
    ("transfer_heals_within_50_ms_of_a_lost_link", transfer_heals_within_50_ms_of_a_lost_link),
    ("failed_slices_do_not_wait_for_others", failed_slices_do_not_wait_for_others),
    ("pauses_follow_the_clock", pauses_follow_the_clock),
    ("near_devices_are_preferred_at_both_ends", near_devices_are_preferred_at_both_ends),
    ("usage_counts_what_each_device_moved", usage_counts_what_each_device_moved),
    ("survey_tells_what_would_be_used_and_why", survey_tells_what_would_be_used_and_why),
];

/// Two devices with a latency, so that requests are in flight until the clock is moved.
pub(crate) fn slow_fabric() -> Arc<Fabric> {
    Fabric::new((0..2).map(|index| DeviceSettings {
        name: format!("fake{index}"),
        address: Ipv4Addr::new(10, 77, 0, index + 1),
        latency: Duration::from_millis(10),
        ..DeviceSettings::default()
    }))
}

/// Waits for a condition that another thread brings about.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        thread::yield_now();
    }
}

pub(crate) fn entry(sides: &Sides, length: u64) -> [Entry; 1] {
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

/// The clock of the engines and that of the fabric move together, by hand.
fn transfer_heals_within_50_ms_of_a_lost_link() {
    const LENGTH: usize = 16 << 20;
    let fabric = slow_fabric();
    let clock = Arc::new(ManualClock::default());
    clock.advance(Duration::from_secs(100));
    let settings = RdmaSettings { queue_depth: 32, ..RdmaSettings::default() };
    let mut sides = Sides::with_clock(&fabric.library(), LENGTH, settings, &clock);
    sides.left.fill(|index| (index % 251) as u8);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    thread::scope(|scope| {
        let moving = scope
            .spawn(|| sides.try_transfer(&link, Operation::Write, &entry(&sides, LENGTH as u64)));
        wait_until("both devices are busy", || {
            fabric.bytes_sent(0) > 1 << 20 && fabric.bytes_sent(1) > 1 << 20
        });
        let (before, sent) = (fabric.now(), fabric.bytes_sent(1));
        fabric.set_link(0, false);
        // Steps of a millisecond, each after the engine did what it can without time.
        while fabric.bytes_sent(1) == sent {
            let until = Instant::now() + Duration::from_millis(20);
            while fabric.bytes_sent(1) == sent && Instant::now() < until {
                thread::yield_now();
            }
            if fabric.bytes_sent(1) == sent {
                clock.advance(Duration::from_millis(1));
                fabric.advance(Duration::from_millis(1));
            }
        }
        let healed = fabric.now() - before;
        assert!(healed <= Duration::from_millis(50), "{healed:?}");
        while !moving.is_finished() {
            // Otherwise the engine has something to do first.
            if fabric.requests_in_flight() > 0 {
                clock.advance(Duration::from_millis(1));
                fabric.advance(Duration::from_millis(1));
            }
            thread::yield_now();
        }
        let outcomes = moving.join().unwrap();
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
    });
    sides.right.check(0, LENGTH, |index| (index % 251) as u8);
}

fn failed_slices_do_not_wait_for_others() {
    // Device 1 holds its slices back until the end of the test.
    let device = |index: u8, latency| DeviceSettings {
        name: format!("fake{index}"),
        address: Ipv4Addr::new(10, 77, 0, index + 1),
        latency,
        ..DeviceSettings::default()
    };
    let (short, long) = (Duration::from_millis(10), Duration::from_secs(3600));
    let fabric = Fabric::new([device(0, short), device(1, long), device(2, short)]);
    let settings = RdmaSettings {
        queue_pairs: 1,
        stall_timeout: Duration::from_secs(7200),
        ..RdmaSettings::default()
    };
    let clock = Arc::new(ManualClock::default());
    let sides = Sides::with_clock(&fabric.library(), 8 << 20, settings, &clock);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    thread::scope(|scope| {
        let moving =
            scope.spawn(|| sides.try_transfer(&link, Operation::Write, &entry(&sides, 8 << 20)));
        wait_until("all slices are in flight", || fabric.requests_in_flight() == 128);
        let sent = fabric.bytes_sent(0);
        assert!(sent > 0 && fabric.bytes_sent(1) > 0, "the slices are spread");
        let others = fabric.bytes_sent(1) + fabric.bytes_sent(2);
        fabric.set_link(0, false);
        wait_until("the slices are sent again", || {
            fabric.bytes_sent(1) + fabric.bytes_sent(2) == others + sent
        });
        fabric.advance(long);
        assert!(moving.join().unwrap()[0].is_ok());
    });
}

fn pauses_follow_the_clock() {
    let fabric = Fabric::of(1);
    let clock = Arc::new(ManualClock::default());
    let day = Duration::from_secs(86_400);
    let settings = RdmaSettings { stall_timeout: day, ..RdmaSettings::default() };
    let sides = Sides::with_clock(&fabric.library(), 4096, settings, &clock);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    let exchanges = || sides.left.exchanges();
    fabric.set_link(0, false);
    wait_until("the failure is noticed", || !sides.left.devices.usage()[0].is_active);
    let bad = sides.try_transfer(&link, Operation::Write, &entry(&sides, 64));
    assert!(bad[0].is_err(), "{bad:?}");
    fabric.set_link(0, true);
    wait_until("the link is up", || {
        sides.left.devices.usage()[0].is_active && sides.right.devices.usage()[0].is_active
    });
    let before = exchanges();
    thread::scope(|scope| {
        let moving =
            scope.spawn(|| sides.try_transfer(&link, Operation::Write, &entry(&sides, 64)));
        // Only the clock ends the pause.
        wait_until("the pause is over", || {
            clock.advance(Duration::from_millis(10));
            moving.is_finished() || exchanges() > before
        });
        let outcomes = moving.join().unwrap();
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
    });
    assert!(exchanges() > before, "the devices were connected again");
    assert_eq!(sides.left.devices.usage()[0].link_failures, 1);
}

fn near_devices_are_preferred_at_both_ends() {
    let fabric = Fabric::of(4);
    let near = |location: &str, device: &str| (location.to_owned(), names(&[device]));
    let settings = RdmaSettings {
        near: BTreeMap::from([near("cpu:0", "fake2"), near("cpu:1", "fake1")]),
        ..RdmaSettings::default()
    };
    let sides = Sides::new(&fabric.library(), 1 << 20, settings);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    // Both ends have registered their memory at cpu:0. The first transfers connect the near pair.
    wait_until("the near device takes the transfers", || {
        let before = fabric.bytes_sent(2);
        let outcomes = sides.try_transfer(&link, Operation::Write, &entry(&sides, 4096));
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
        fabric.bytes_sent(2) > before
    });
    assert_eq!(sides.right.devices.near()["cpu:0"], ["fake2"], "published for peers");
    fabric.set_link(2, false);
    wait_until("the failure is noticed", || !sides.left.devices.usage()[2].is_active);
    let outcomes = sides.try_transfer(&link, Operation::Write, &entry(&sides, 1 << 20));
    assert!(outcomes[0].is_ok(), "far devices serve, too: {outcomes:?}");
}

fn usage_counts_what_each_device_moved() {
    let fabric = Fabric::of(2);
    let sides = Sides::new(&fabric.library(), 1 << 20, RdmaSettings::default());
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    for operation in [Operation::Write, Operation::Read, Operation::Read] {
        assert!(sides.try_transfer(&link, operation, &entry(&sides, 1 << 20))[0].is_ok());
    }
    let usage = sides.left.devices.usage();
    let sum = |of: fn(&DeviceUsage) -> u64| usage.iter().map(of).sum::<u64>();
    assert_eq!(sum(|one| one.bytes_written), 1 << 20);
    assert_eq!(sum(|one| one.bytes_read), 2 << 20);
    assert_eq!(sum(|one| one.slices), 48);
    assert_eq!(sum(|one| one.in_flight.into()), 0);
    assert!(usage.iter().all(|one| one.is_active && one.queue_pairs == 2), "{usage:?}");
    assert!(usage.iter().all(|one| one.errors.iter().all(|(_, count)| *count == 0)), "{usage:?}");
    fabric.remove(0);
    wait_until("the failure is noticed", || !sides.left.devices.usage()[0].is_active);
    assert_eq!(sides.left.devices.usage()[0].link_failures, 1);
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

fn survey_tells_what_would_be_used_and_why() {
    let fabric = Fabric::of(3);
    fabric.set_link(1, false);
    let settings = RdmaSettings { excluded: vec!["fake2".to_owned()], ..RdmaSettings::default() };
    let reports = survey(&fabric.library(), &settings).unwrap();
    let names: Vec<_> = reports.iter().map(|report| report.name.as_str()).collect();
    assert_eq!(names, ["fake0", "fake1", "fake2"]);
    let chosen = reports[0].choice.as_ref().unwrap();
    assert_eq!(*chosen, reports[0].addresses[0]);
    assert!(reports[0].limits.is_some());
    let reason = |index: usize| reports[index].choice.as_ref().unwrap_err().to_string();
    assert!(reason(1).contains("is down"), "{}", reason(1));
    assert_eq!(reports[1].port.unwrap().state, PortState::Down);
    assert!(reason(2).contains("excluded"), "{}", reason(2));
}
