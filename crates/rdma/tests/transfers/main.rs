//! Claims about transfers, on a simulated fabric and on the RDMA devices of this machine.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

mod changes;
mod fabric;
mod side;

use std::{
    process::ExitCode,
    sync::{Arc, Barrier},
    time::Duration,
};

use libtest_mimic::Arguments;
use mooncake_base::requirement::trial;
use mooncake_rdma::{Devices, Entry, EntryError, Operation, RdmaSettings};
use mooncake_verbs::{Library, fake::Fabric};

use self::side::{Sides, names};

/// Makes the library whose devices a claim is about.
type MakeLibrary = fn() -> Arc<Library>;

/// A claim about any library with devices.
type Claim = fn(MakeLibrary);

const CLAIMS: [(&str, Claim); 13] = [
    ("bytes_arrive_in_both_directions", bytes_arrive_in_both_directions),
    ("many_small_entries_arrive", many_small_entries_arrive),
    ("more_slices_than_places_arrive", more_slices_than_places_arrive),
    ("long_registration_is_split", long_registration_is_split),
    (
        "unregistered_memory_is_registered_for_the_transfer",
        unregistered_memory_is_registered_for_the_transfer,
    ),
    ("read_only_memory_is_sent", read_only_memory_is_sent),
    ("ranges_that_are_not_published_are_told", ranges_that_are_not_published_are_told),
    ("withdrawn_memory_fails_only_its_entries", withdrawn_memory_fails_only_its_entries),
    ("both_sides_may_begin_at_once", both_sides_may_begin_at_once),
    ("peer_that_started_again_is_reached", peer_that_started_again_is_reached),
    ("many_threads_share_a_link", many_threads_share_a_link),
    ("engine_reaches_itself", engine_reaches_itself),
    ("unknown_device_is_named", unknown_device_is_named),
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let missing = has_devices().err();
    let mut trials = Vec::new();
    for (name, claim) in CLAIMS {
        trials.push(trial(None, format!("fake::{name}"), move || claim(fake)));
        trials.push(trial(missing.clone(), format!("real::{name}"), move || claim(real)));
    }
    trials.push(trial(missing, "real::unmapped_memory_is_refused", unmapped_memory_is_refused));
    for (name, claim) in fabric::CLAIMS.into_iter().chain(changes::CLAIMS) {
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
fn has_devices() -> Result<(), String> {
    let library = Library::load().map_err(|error| format!("needs libibverbs: {error}"))?;
    match library.devices().expect("the kernel lists its devices").len() {
        0 | 1 => Err("needs an RDMA device, and a second one".to_owned()),
        _ => Ok(()),
    }
}

fn bytes_arrive_in_both_directions(make: MakeLibrary) {
    let mut sides = Sides::new(&make(), 1 << 20, RdmaSettings::default());
    sides.left.fill(|index| (index % 251) as u8);
    sides.transfer(Operation::Write, &[(0, 0, 1 << 20)]);
    sides.right.check(0, 1 << 20, |index| (index % 251) as u8);
    sides.right.fill(|index| (index % 13) as u8);
    sides.transfer(Operation::Read, &[(5, 70_001, 300_001), (500_000, 0, 0), (600_000, 1, 7)]);
    sides.left.check(5, 300_001, |index| ((index + 70_001) % 13) as u8);
    sides.left.check(600_000, 7, |index| ((index + 1) % 13) as u8);
    sides.left.check(600_007, 1000, |index| ((index + 600_007) % 251) as u8);
}

fn many_small_entries_arrive(make: MakeLibrary) {
    let mut sides = Sides::new(&make(), 1 << 20, RdmaSettings::default());
    sides.left.fill(|index| (index % 249) as u8);
    let entries: Vec<_> =
        (0..1000).map(|index| (index * 1000, index * 1001, 40 + index % 60)).collect();
    sides.transfer(Operation::Write, &entries);
    for (from, to, length) in entries {
        sides.right.check(to, length, |index| ((from + index) % 249) as u8);
    }
}

fn more_slices_than_places_arrive(make: MakeLibrary) {
    let settings = RdmaSettings {
        slice_bytes: 1024,
        slice_tail_bytes: 0,
        queue_depth: 16,
        device_depth: 24,
        ..RdmaSettings::default()
    };
    let mut sides = Sides::new(&make(), 4 << 20, settings);
    sides.left.fill(|index| (index % 241) as u8);
    sides.transfer(Operation::Write, &[(0, 0, 4 << 20)]);
    sides.right.check(0, 4 << 20, |index| (index % 241) as u8);
}

fn long_registration_is_split(make: MakeLibrary) {
    let settings = RdmaSettings { region_bytes_max: 65_536, ..RdmaSettings::default() };
    let mut sides = Sides::new(&make(), 300_000, settings);
    let described = sides.right.devices.keys(sides.right.base());
    assert_eq!(described.iter().map(|(_, length, _)| *length).sum::<u64>(), 300_000);
    assert_eq!(described.len(), 5);
    sides.left.fill(|index| (index % 239) as u8);
    sides.transfer(Operation::Write, &[(1, 2, 299_998)]);
    sides.right.check(2, 299_998, |index| ((index + 1) % 239) as u8);
}

fn unregistered_memory_is_registered_for_the_transfer(make: MakeLibrary) {
    let sides = Sides::new(&make(), 1 << 16, RdmaSettings::default());
    let link = sides.link();
    let mut local = vec![0_u8; 1 << 16];
    for (index, place) in local.iter_mut().enumerate() {
        *place = (index % 253) as u8;
    }
    let base = local.as_mut_ptr().expose_provenance() as u64;
    // In reverse order, with gaps.
    let entry = |part: u64| {
        let (local, remote) = (base + 1024 * part, sides.right.base() + 1000 * part);
        Entry { local, remote, length: 1000 }
    };
    let entries: Vec<_> = (0..64).rev().map(entry).collect();
    for outcome in sides.try_transfer(&link, Operation::Write, &entries) {
        outcome.unwrap_or_else(|error| panic!("{error:?}"));
    }
    sides.right.check(0, 64_000, |index| ((index / 1000 * 1024 + index % 1000) % 253) as u8);
}

fn read_only_memory_is_sent(make: MakeLibrary) {
    static CONSTANT: [u8; 8192] = [9; 8192];
    let sides = Sides::new(&make(), 8192, RdmaSettings::default());
    let link = sides.link();
    let local = (&raw const CONSTANT).expose_provenance() as u64;
    let entries = [Entry { local, remote: sides.right.base(), length: 8192 }];
    let outcomes = sides.try_transfer(&link, Operation::Write, &entries);
    assert!(outcomes[0].is_ok(), "{outcomes:?}");
    sides.right.check(0, 8192, |_| 9);
    let outcomes = sides.try_transfer(&link, Operation::Read, &entries);
    assert!(matches!(outcomes[0], Err(EntryError::NotRegistered)), "{outcomes:?}");
}

fn ranges_that_are_not_published_are_told(make: MakeLibrary) {
    let sides = Sides::new(&make(), 4096, RdmaSettings::default());
    let link = sides.link();
    let (left, right) = (sides.left.base(), sides.right.base());
    let entries = [
        Entry { local: left, remote: right + 4095, length: 2 },
        Entry { local: left, remote: right, length: 96 },
    ];
    let outcomes = sides.try_transfer(&link, Operation::Read, &entries);
    assert!(matches!(outcomes[0], Err(EntryError::NotPublished)), "{outcomes:?}");
    assert!(outcomes[1].is_ok(), "{outcomes:?}");
    assert!(!link.is_usable(), "the peer may have published more since");
    assert!(link.reaches(right, 4096) && !link.reaches(right, 4097));
}

fn unmapped_memory_is_refused() {
    let sides = Sides::new(&real(), 4096, RdmaSettings::default());
    let link = sides.link();
    let entries = [Entry { local: 4096, remote: sides.right.base(), length: 100 }];
    let outcomes = sides.try_transfer(&link, Operation::Read, &entries);
    assert!(matches!(outcomes[0], Err(EntryError::NotRegistered)), "{outcomes:?}");
}

fn withdrawn_memory_fails_only_its_entries(make: MakeLibrary) {
    let mut sides = Sides::new(&make(), 1 << 16, RdmaSettings::default());
    let mut other = vec![7_u8; 1 << 16].into_boxed_slice();
    let gone = other.as_mut_ptr() as u64;
    // SAFETY: the memory outlives the registration, and is not touched meanwhile.
    unsafe { sides.right.devices.register(gone, 1 << 16, "cpu:0") }.unwrap();
    let link = sides.link_with(&[(sides.right.base(), 1 << 16), (gone, 1 << 16)]);
    sides.right.devices.deregister(gone, Duration::ZERO).unwrap();
    sides.left.fill(|index| index as u8);
    let (left, right) = (sides.left.base(), sides.right.base());
    let entries = [
        Entry { local: left, remote: right, length: 30_000 },
        Entry { local: left, remote: gone, length: 30_000 },
        Entry { local: left + 30_000, remote: right + 30_000, length: 30_000 },
    ];
    let outcomes = sides.try_transfer(&link, Operation::Write, &entries);
    assert!(outcomes[0].is_ok() && outcomes[2].is_ok(), "{outcomes:?}");
    let Err(EntryError::Failed(error)) = &outcomes[1] else { panic!("{outcomes:?}") };
    assert!(error.to_string().contains("not registered any more"), "{error}");
    assert!(!link.is_usable(), "the peer's keys have changed");
    sides.right.check(0, 60_000, |index| index as u8);
    assert!(other.iter().all(|byte| *byte == 7));
}

fn both_sides_may_begin_at_once(make: MakeLibrary) {
    for _ in 0..10 {
        let sides = Sides::new(&make(), 4096, RdmaSettings::default());
        let links = [sides.link(), sides.link_back()];
        let begin = Barrier::new(2);
        std::thread::scope(|scope| {
            for link in &links {
                scope.spawn(|| {
                    begin.wait();
                    link.connect(sides.deadline()).unwrap();
                });
            }
        });
        let (left, right) = (sides.left.base(), sides.right.base());
        let there = [Entry { local: left, remote: right, length: 4096 }];
        let back = [Entry { local: right, remote: left, length: 4096 }];
        assert!(sides.try_transfer(&links[0], Operation::Write, &there)[0].is_ok());
        assert!(sides.try_transfer(&links[1], Operation::Read, &back)[0].is_ok());
    }
}

fn peer_that_started_again_is_reached(make: MakeLibrary) {
    let library = make();
    let mut sides = Sides::new(&library, 1 << 16, RdmaSettings::default());
    sides.transfer(Operation::Write, &[(0, 0, 1 << 16)]);
    sides.restart_right(&library);
    sides.left.fill(|index| (index % 7) as u8);
    sides.transfer(Operation::Write, &[(0, 0, 1 << 16)]);
    sides.right.check(0, 1 << 16, |index| (index % 7) as u8);
}

fn many_threads_share_a_link(make: MakeLibrary) {
    let settings = RdmaSettings { slice_bytes: 4096, device_depth: 64, ..RdmaSettings::default() };
    let mut sides = Sides::new(&make(), 8 << 20, settings);
    sides.left.fill(|index| (index % 233) as u8);
    let link = sides.link();
    let (left, right) = (sides.left.base(), sides.right.base());
    std::thread::scope(|scope| {
        for part in 0..8_u64 {
            let (sides, link) = (&sides, &link);
            scope.spawn(move || {
                for round in 0..4 {
                    let offset = part << 20 | round << 18;
                    let (local, remote) = (left + offset, right + offset);
                    let entries = [Entry { local, remote, length: 1 << 18 }];
                    let outcomes = sides.try_transfer(link, Operation::Write, &entries);
                    assert!(outcomes[0].is_ok(), "{outcomes:?}");
                }
            });
        }
    });
    sides.right.check(0, 8 << 20, |index| (index % 233) as u8);
}

fn engine_reaches_itself(make: MakeLibrary) {
    let mut sides = Sides::new(&make(), 8192, RdmaSettings::default());
    sides.left.fill(|index| index as u8);
    let link = sides.link_to_self();
    let base = sides.left.base();
    let entries = [Entry { local: base, remote: base + 4096, length: 256 }];
    let outcomes = sides.try_transfer(&link, Operation::Write, &entries);
    assert!(outcomes[0].is_ok(), "{outcomes:?}");
    sides.left.check(4096, 256, |index| index as u8);
}

fn unknown_device_is_named(make: MakeLibrary) {
    let settings = RdmaSettings { devices: names(&["none0"]), ..RdmaSettings::default() };
    let error = Devices::open(&make(), settings, "here", "1").unwrap_err();
    assert!(error.to_string().contains("none0"), "{error}");
}
