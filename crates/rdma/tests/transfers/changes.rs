//! Claims about devices that change while they are used: addresses, queues, numbers, peers that leave.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{Clock, SystemClock, clock::ManualClock};
use mooncake_rdma::{DeviceDescription, Operation, PeerAffinity, RdmaSettings};
use mooncake_verbs::fake::{DeviceSettings, Fabric};

use crate::{
    fabric::{entry, slow_fabric, wait_until},
    side::{Sides, names},
};

/// The claims with their names.
pub(crate) const CLAIMS: [(&str, fn()); 12] = [
    ("reused_queue_pair_numbers_lose_no_write", reused_queue_pair_numbers_lose_no_write),
    ("changed_address_is_told_and_used", changed_address_is_told_and_used),
    ("address_is_found_in_another_place", address_is_found_in_another_place),
    ("address_that_is_given_back_is_used", address_that_is_given_back_is_used),
    ("changed_identifier_is_told_and_used", changed_identifier_is_told_and_used),
    ("link_that_returns_without_an_event_is_used", link_that_returns_without_an_event_is_used),
    ("failed_completion_queue_is_replaced", failed_completion_queue_is_replaced),
    ("deadline_of_one_transfer_spares_others", deadline_of_one_transfer_spares_others),
    ("pair_that_carries_nothing_is_tried_seldom", pair_that_carries_nothing_is_tried_seldom),
    ("connections_of_gone_peers_are_given_up", connections_of_gone_peers_are_given_up),
    ("reads_are_limited_by_what_the_peer_serves", reads_are_limited_by_what_the_peer_serves),
    ("temporary_memory_is_not_read_by_processors", temporary_memory_is_not_read_by_processors),
];

const OTHER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 99);

/// Two sides over one device, connected, and a count of the changes that the left one tells.
fn connected(fabric: &Arc<Fabric>) -> (Sides, Arc<AtomicUsize>) {
    let mut sides = Sides::new(&fabric.library(), 4096, RdmaSettings::default());
    sides.left.fill(|index| index as u8);
    sides.transfer(Operation::Write, &[(0, 0, 4096)]);
    let changes = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&changes);
    sides.left.devices.observe(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    (sides, changes)
}

fn described(sides: &Sides) -> DeviceDescription {
    sides.left.devices.describe().remove(0)
}

/// Waits until a write arrives over a link that was made before the change.
fn arrives(sides: &mut Sides) {
    sides.left.fill(|index| (index % 7) as u8);
    let link = sides.link();
    wait_until("a write arrives", || {
        sides.try_transfer(&link, Operation::Write, &entry(sides, 4096))[0].is_ok()
    });
    sides.right.check(0, 4096, |index| (index % 7) as u8);
}

fn reused_queue_pair_numbers_lose_no_write() {
    let fabric = Fabric::of(2);
    fabric.reuse_numbers();
    let library = fabric.library();
    let mut sides = Sides::new(&library, 4096, RdmaSettings::default());
    let write_back = |sides: &Sides| {
        let back = mooncake_rdma::Entry {
            local: sides.right.base(),
            remote: sides.left.base(),
            length: 4096,
        };
        sides.try_transfer(&sides.link_back(), Operation::Write, &[back])
    };
    // Several, so that the sequence numbers of both queue pairs have grown.
    for _ in 0..8 {
        assert!(write_back(&sides)[0].is_ok());
    }
    sides.restart_right(&library);
    sides.right.fill(|index| (index % 11) as u8);
    for _ in 0..8 {
        let outcomes = write_back(&sides);
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
        sides.left.check(0, 4096, |index| (index % 11) as u8);
    }
}

fn changed_address_is_told_and_used() {
    let fabric = Fabric::of(1);
    let (mut sides, changes) = connected(&fabric);
    let before = described(&sides);
    fabric.set_address(0, Some((0, OTHER)));
    wait_until("the change is told", || changes.load(Ordering::SeqCst) == 1);
    let after = described(&sides);
    assert!(after.gid.ends_with("0a:4d:00:63") && before.gid != after.gid, "{after:?}");
    arrives(&mut sides);
    assert_eq!(sides.left.devices.usage()[0].link_failures, 0, "the link was up all the time");
}

fn address_is_found_in_another_place() {
    let fabric = Fabric::of(1);
    let (mut sides, changes) = connected(&fabric);
    let before = described(&sides);
    fabric.set_address(0, Some((5, Ipv4Addr::new(10, 77, 0, 1))));
    wait_until("the change is seen", || changes.load(Ordering::SeqCst) == 1);
    assert_eq!(described(&sides), before, "the same address");
    arrives(&mut sides);
}

fn address_that_is_given_back_is_used() {
    let fabric = Fabric::of(1);
    let (mut sides, _) = connected(&fabric);
    let is_active = |sides: &Sides| sides.left.devices.usage()[0].is_active;
    fabric.set_address(0, None);
    wait_until("the loss is noticed", || !is_active(&sides));
    fabric.set_address(0, Some((2, OTHER)));
    wait_until("the device is used again", || is_active(&sides));
    arrives(&mut sides);
}

fn changed_identifier_is_told_and_used() {
    let fabric = Fabric::of(1);
    let (mut sides, changes) = connected(&fabric);
    fabric.set_lid(0, 77);
    wait_until("the change is told", || changes.load(Ordering::SeqCst) == 1);
    assert_eq!(described(&sides).lid, 77);
    arrives(&mut sides);
}

fn link_that_returns_without_an_event_is_used() {
    let fabric = Fabric::of(1);
    let (mut sides, _) = connected(&fabric);
    fabric.set_link(0, false);
    wait_until("the failure is noticed", || !sides.left.devices.usage()[0].is_active);
    fabric.set_link_silently(0, true);
    arrives(&mut sides);
}

fn failed_completion_queue_is_replaced() {
    let fabric = slow_fabric();
    let day = Duration::from_secs(86_400);
    let settings = RdmaSettings { stall_timeout: day, ..RdmaSettings::default() };
    let mut sides = Sides::new(&fabric.library(), 1 << 20, settings);
    sides.left.fill(|index| (index % 251) as u8);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    thread::scope(|scope| {
        let moving =
            scope.spawn(|| sides.try_transfer(&link, Operation::Write, &entry(&sides, 1 << 20)));
        wait_until("all slices are in flight", || fabric.requests_in_flight() == 16);
        fabric.fail_completions(0);
        fabric.fail_completions(1);
        // Nothing but the event tells: the devices report no request any more.
        while !moving.is_finished() {
            fabric.advance(Duration::from_millis(10));
            thread::yield_now();
        }
        let outcomes = moving.join().unwrap();
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
    });
    sides.right.check(0, 1 << 20, |index| (index % 251) as u8);
    let usage = sides.left.devices.usage();
    assert!(usage.iter().all(|one| one.is_active && one.in_flight == 0), "{usage:?}");
}

fn deadline_of_one_transfer_spares_others() {
    let device = DeviceSettings { latency: Duration::from_secs(1), ..DeviceSettings::default() };
    let fabric = Fabric::new([device]);
    // A slice that fails is lost.
    let settings = RdmaSettings { queue_pairs: 1, tries: 1, ..RdmaSettings::default() };
    let sides = Sides::new(&fabric.library(), 4096, settings);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    let one = entry(&sides, 4096);
    thread::scope(|scope| {
        let patient = scope.spawn(|| sides.try_transfer(&link, Operation::Write, &one));
        wait_until("it is in flight", || fabric.requests_in_flight() == 1);
        let soon = SystemClock.now() + Duration::from_millis(20);
        let hasty = sides.try_transfer_until(&link, soon, Operation::Write, &one);
        assert!(hasty[0].is_err(), "{hasty:?}");
        wait_until("the other one is sent again", || fabric.requests_in_flight() == 1);
        while !patient.is_finished() {
            fabric.advance(Duration::from_millis(100));
            thread::yield_now();
        }
        let outcomes = patient.join().unwrap();
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
    });
}

fn pair_that_carries_nothing_is_tried_seldom() {
    let fabric = Fabric::of(2);
    let settings =
        RdmaSettings { stall_timeout: Duration::from_millis(20), ..RdmaSettings::default() };
    let sides = Sides::new(&fabric.library(), 1 << 17, settings);
    let link = sides.link();
    link.connect(sides.deadline()).unwrap();
    // Connections are made, and nothing arrives.
    fabric.set_link_silently(0, false);
    let before = sides.left.exchanges();
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(3) {
        let outcomes = sides.try_transfer(&link, Operation::Write, &entry(&sides, 1 << 17));
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
    }
    // After pauses of 50, 100, 200, 400, 800 and 1600 ms; two messages each.
    let messages = sides.left.exchanges() - before;
    assert!(messages <= 14, "{messages} messages");
}

fn connections_of_gone_peers_are_given_up() {
    let fabric = Fabric::of(1);
    let clock = Arc::new(ManualClock::default());
    clock.advance(Duration::from_secs(100));
    let sides = Sides::with_clock(&fabric.library(), 4096, RdmaSettings::default(), &clock);
    let link = sides.link();
    assert!(sides.try_transfer(&link, Operation::Write, &entry(&sides, 4096))[0].is_ok());
    let pairs = |sides: &Sides| (sides.left.devices.pairs(), sides.right.devices.pairs());
    assert_eq!(pairs(&sides), (1, 1));
    // The peers that are there answer.
    let exchanges = sides.left.exchanges();
    for _ in 0..10 {
        let posted = fabric.requests_posted();
        clock.advance(Duration::from_secs(61));
        wait_until("both ends ask", || fabric.requests_posted() >= posted + 4);
        assert!(sides.try_transfer(&link, Operation::Write, &entry(&sides, 64))[0].is_ok());
    }
    assert_eq!((sides.left.exchanges(), pairs(&sides)), (exchanges, (1, 1)));
    drop(link);
    sides.right.devices.close();
    wait_until("the connection is given up", || {
        clock.advance(Duration::from_secs(1));
        fabric.advance(Duration::from_secs(1));
        pairs(&sides).0 == 0
    });
    assert_eq!(sides.left.devices.usage()[0].queue_pairs, 0);
}

fn reads_are_limited_by_what_the_peer_serves() {
    let device = |index: u8, reads_max| DeviceSettings {
        name: format!("fake{index}"),
        address: Ipv4Addr::new(10, 77, 0, index + 1),
        reads_max,
        ..DeviceSettings::default()
    };
    let fabric = Fabric::new([device(0, 16), device(1, 1)]);
    let other = |own: &str, peer: &str| (own.to_owned(), names(&[peer]));
    let preferred = BTreeMap::from([other("fake0", "fake1"), other("fake1", "fake0")]);
    let settings = RdmaSettings {
        affinity: PeerAffinity::Names(preferred),
        tries: 1,
        ..RdmaSettings::default()
    };
    let mut sides = Sides::new(&fabric.library(), 1 << 20, settings);
    sides.right.fill(|index| (index % 5) as u8);
    sides.transfer(Operation::Read, &[(0, 0, 1 << 20)]);
    sides.left.check(0, 1 << 20, |index| (index % 5) as u8);
}

fn temporary_memory_is_not_read_by_processors() {
    let fabric = Fabric::of(1);
    let sides = Sides::new(&fabric.library(), 4096, RdmaSettings::default());
    let link = sides.link();
    let inline = |local: u64| {
        let before = fabric.inline_requests();
        let entries = [mooncake_rdma::Entry { local, remote: sides.right.base(), length: 16 }];
        let outcomes = sides.try_transfer(&link, Operation::Write, &entries);
        assert!(outcomes[0].is_ok(), "{outcomes:?}");
        fabric.inline_requests() - before
    };
    assert_eq!(inline(sides.left.base()), 1);
    // Nothing is known about memory that is registered for a transfer: it may be that of a device.
    let foreign = vec![1_u8; 4096];
    assert_eq!(inline(foreign.as_ptr().expose_provenance() as u64), 0);
}
