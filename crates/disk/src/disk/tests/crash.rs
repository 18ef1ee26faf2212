//! Tests of random work that ends in a crash, again and again: the process is killed, the power is
//! lost, or the device damages what lies on it.
//!
//! A model plays the part of the master: it knows the present version of each key. As an owner does,
//! the test announces after each start what it finds, and removes what the model does not know.

use std::collections::HashSet;

use mooncake_base::requirement;

use super::*;

const KEYS: usize = 40;

/// The number of random runs, each with three crashes: some seconds, or the long tier.
fn seeds(short: u64) -> std::ops::Range<u64> {
    0..if requirement::is_long_run() { 10 * short } else { short }
}

#[test]
fn no_record_is_lost_when_the_process_is_killed() {
    for seed in seeds(40) {
        Crashes::new(seed, Crash::Kill).run();
    }
}

#[test]
fn a_loss_of_power_loses_only_what_was_not_synced() {
    for seed in seeds(70) {
        Crashes::new(seed, Crash::Power).run();
    }
}

#[test]
fn damage_on_the_device_yields_no_wrong_bytes() {
    for seed in seeds(40) {
        Crashes::new(seed, Crash::Damage).run();
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Crash {
    /// The process ends; the system writes what it has.
    Kill,
    /// Sectors that were not synced are kept or lost, each by itself.
    Power,
    /// The process ends, and parts of extents are changed before it starts again.
    Damage,
}

/// A directory, and what is known of it.
struct Crashes {
    seed: u64,
    kind: Crash,
    random: SplitMix64,
    files: FaultyFiles,
    version: u64,
    /// All records that were ever handed to the directory.
    written: HashSet<OwnedName>,
    /// The present version of each key.
    present: BTreeMap<Vec<u8>, u64>,
    /// The present records that have to be there, and when they were written.
    expected: BTreeMap<Vec<u8>, Ticket>,
}

impl Crashes {
    fn new(seed: u64, kind: Crash) -> Self {
        Self {
            seed,
            kind,
            random: SplitMix64::new(seed),
            files: FaultyFiles::new(seed),
            version: 0,
            written: HashSet::new(),
            present: BTreeMap::new(),
            expected: BTreeMap::new(),
        }
    }

    /// Works and crashes three times.
    fn run(&mut self) {
        let mut disk = faulty(&self.files, 2 << 20).unwrap();
        for _ in 0..3 {
            let loss = (self.kind == Crash::Power).then(|| self.random.below(150) as u64);
            let is_short = self.random.below(2) == 0;
            let faults = Faults { is_short, writes_until_loss: loss, ..Faults::default() };
            self.files.set(faults);
            for _ in 0..20 + self.random.below(120) {
                self.work(&disk);
                if self.kind == Crash::Power && self.random.below(20) == 0 {
                    self.change_faults(faults);
                }
            }
            let synced = disk.synced();
            drop(disk);
            match self.kind {
                Crash::Kill => self.files.kill(),
                Crash::Power => {
                    self.files.lose_power();
                    self.expected.retain(|_, ticket| *ticket <= synced);
                }
                Crash::Damage => {
                    self.files.kill();
                    self.damage();
                    self.expected.clear();
                }
            }
            disk = faulty(&self.files, 2 << 20).unwrap();
            self.check(&disk);
        }
    }

    /// Lets the device fail, or the file system be full, or ends that.
    fn change_faults(&mut self, usual: Faults) {
        let now = self.files.faults();
        let free = (self.random.below(3) == 0).then(|| self.random.below(1 << 19) as u64);
        let [fails_writes, fails_reads] = [0, 1].map(|_| self.random.below(8) == 0);
        let writes_until_loss = now.writes_until_loss;
        self.files.set(Faults { free, fails_writes, fails_reads, writes_until_loss, ..usual });
    }

    /// Does one thing at random.
    fn work(&mut self, disk: &Disk) {
        let key = vec![self.random.below(KEYS) as u8 + 1];
        match self.random.below(20) {
            0..12 => self.write(disk, key),
            12..14 => {
                // Removed at the master, which tells the owner nothing, and perhaps by the owner.
                self.expected.remove(&key);
                if let Some(version) = self.present.remove(&key)
                    && self.random.below(2) == 0
                {
                    disk.remove(name(&key, version));
                }
            }
            // After the loss of power it fails.
            14 => drop(disk.sync()),
            15 => {
                let evicted = disk.trim().unwrap_or_default();
                self.forget(evicted);
                self.forget_unnamed(disk);
            }
            16 => self.write_late(disk, &key),
            // Those that are read are moved when their extent is used again.
            _ => {
                if let Some(version) = self.present.get(&key) {
                    let outcome = read(disk, name(&key, *version));
                    let is_expected = self.expected.contains_key(&key);
                    assert!(
                        !is_expected || self.kind == Crash::Power || outcome == ReadOutcome::Good,
                        "seed {}: {key:?} {outcome:?}",
                        self.seed
                    );
                }
            }
        }
    }

    fn write(&mut self, disk: &Disk, key: Vec<u8>) {
        self.version += 1;
        let version = self.version;
        let outcome = self.hand_over(disk, name(&key, version));
        // Objects that no disk has are present all the same.
        self.present.insert(key.clone(), version);
        self.expected.remove(&key);
        match outcome {
            WriteOutcome::Written(ticket) => drop(self.expected.insert(key, ticket)),
            outcome => assert!(self.kind == Crash::Power, "{outcome:?}"),
        }
    }

    /// Writes a version that was replaced or removed meanwhile. As the master says so, the owner
    /// removes it.
    fn write_late(&mut self, disk: &Disk, key: &[u8]) {
        let version = self.random.below(self.version as usize + 1) as u64;
        let name = name(key, version);
        if self.present.get(key) != Some(&version)
            && matches!(self.hand_over(disk, name), WriteOutcome::Written(_))
        {
            disk.remove(name);
            // The index has one record of a key.
            self.expected.remove(key);
        }
    }

    fn hand_over(&mut self, disk: &Disk, name: Name<'_>) -> WriteOutcome {
        let length = length_of(name);
        self.written.insert(name.to_owned());
        let mut report = disk.write(&[Write { name, payload: &payload(name, length) }]);
        self.forget(report.evicted);
        self.forget_unnamed(disk);
        report.outcomes.remove(0)
    }

    /// Forgets records that went without a name in a report, as an owner does that lists the rest.
    fn forget_unnamed(&mut self, disk: &Disk) {
        if disk.take_unnamed() > 0 {
            let present = &self.present;
            self.expected.retain(|key, _| disk.length(name(key, present[key])).is_some());
        }
    }

    fn forget(&mut self, evicted: Vec<OwnedName>) {
        for gone in evicted {
            if self.present.get(&*gone.key) == Some(&gone.version) {
                self.expected.remove(&*gone.key);
            }
        }
    }

    /// Changes bits, clears sectors, and writes parts of extents to wrong places.
    fn damage(&mut self) {
        let random = &mut self.random;
        let extents: Vec<_> = self.files.paths();
        let extents: Vec<_> = extents.iter().filter(|path| is_extent(path)).collect();
        for _ in 0..1 + random.below(40) {
            let [from, to] = [0, 1].map(|_| extents[random.below(extents.len())]);
            let mut bytes = self.files.bytes(to);
            let count = [1, 8, 512, 4096, 70_000][random.below(5)];
            let mut at = random.below(bytes.len() - count);
            if random.below(2) == 0 {
                at = at / 4096 * 4096;
            }
            match random.below(4) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at..at + count].fill(0),
                2 => bytes[at..at + count].fill_with(|| random.number() as u8),
                _ => {
                    let source = self.files.bytes(from);
                    let shift = [0, 4096 * random.below(4)][random.below(2)];
                    let begin = (at + shift).min(source.len() - count);
                    bytes[at..at + count].copy_from_slice(&source[begin..begin + count]);
                }
            }
            self.files.replace(to, bytes);
        }
    }

    /// Announces what is there, removes what is not present any more, and reads all the rest.
    fn check(&mut self, disk: &Disk) {
        let seed = self.seed;
        let mut announced = Vec::new();
        disk.records(|name, _| announced.push(name.to_owned())).unwrap();
        for found in &announced {
            assert!(self.written.contains(found), "seed {seed}: nobody wrote {found:?}");
            let is_present = self.present.get(&*found.key) == Some(&found.version);
            if !is_present {
                assert!(disk.remove(found.borrow()), "seed {seed}: {found:?}");
                assert_eq!(read(disk, found.borrow()), ReadOutcome::Missing);
                continue;
            }
            let outcome = read(disk, found.borrow());
            // Those of sealed extents are listed without a look at them.
            let is_damaged = self.kind == Crash::Damage && outcome == ReadOutcome::Bad;
            assert!(
                outcome == ReadOutcome::Good || is_damaged,
                "seed {seed}: {found:?} {outcome:?}"
            );
        }
        for key in self.expected.keys() {
            let outcome = read(disk, name(key, self.present[key]));
            assert_eq!(outcome, ReadOutcome::Good, "seed {seed}: {key:?}");
        }
        for key in (1..=KEYS as u8).map(|key| [key]) {
            let present = self.present.get(&key[..]);
            for version in (0..=self.version).filter(|version| Some(version) != present) {
                assert_eq!(disk.length(name(&key, version)), None, "seed {seed}: {key:?} is back");
            }
        }
        // Tickets of this life begin anew, and all that was found is on the device.
        self.expected.values_mut().for_each(|ticket| *ticket = Ticket::default());
    }
}

/// Returns the length that a record of this name has, as it is written once only.
fn length_of(name: Name<'_>) -> usize {
    let sum = name.version.wrapping_mul(2_654_435_761).wrapping_add(u64::from(name.key[0]));
    [10, 3000, 20_000, 66_000][SplitMix64::new(sum).below(4)]
}

fn is_extent(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("extent-"))
}
