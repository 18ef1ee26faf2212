//! The directories of records of a run: their sizes, and the faults of their devices.

use std::time::Duration;

use mooncake_master::state::{OffloadRules, Rules};

use crate::{
    plan::{Bug, Plan},
    random::Random,
};

/// Sizes, shares and fault rates of directories. Rates are per mille, and per second where nothing else
/// is said.
#[derive(Debug, Clone, Default)]
pub(crate) struct DiskPlan {
    /// The share of processes that open a directory.
    pub(crate) owners: u64,
    /// The words of a directory, and of each of its extents.
    pub(crate) capacity: u64,
    pub(crate) extent_words: u64,
    pub(crate) faults: DiskFaults,
}

/// Fault rates of directories.
#[derive(Debug, Clone, Default)]
pub(crate) struct DiskFaults {
    /// The share of ends of processes that are losses of power of their hosts.
    pub(crate) power_loss: u64,
    /// The share of processes that open a copy of a directory instead.
    pub(crate) copy: u64,
    /// A directory leaves the pool.
    pub(crate) leave: u64,
    /// The host of a directory loses its power.
    pub(crate) crash: u64,
    /// The file system of a directory has no space for a while.
    pub(crate) full: u64,
    /// A record is damaged.
    pub(crate) damage: u64,
}

impl Plan {
    /// Gives the clients of some seeds directories, from a generator of their own.
    pub(super) fn with_disks(mut self) -> Self {
        let mut random = Random::new(self.seed ^ 0xd15c_d15c);
        if random.happens(650) {
            return self;
        }
        self.add_disks(&mut random);
        self
    }

    /// Gives the clients directories, whatever the seed is.
    #[must_use]
    pub fn with_directories(mut self) -> Self {
        if self.disks.is_none() {
            self.add_disks(&mut Random::new(self.seed));
        }
        self
    }

    /// Gives the clients directories.
    pub(super) fn add_disks(&mut self, random: &mut Random) {
        let words = self.object_words;
        let extent_words = words * random.between(1, 5);
        let mut rate = |max: u64| if random.happens(400) { 0 } else { random.below(max + 1) };
        let faults = DiskFaults {
            power_loss: rate(800),
            copy: rate(150),
            leave: rate(60),
            crash: rate(60),
            full: rate(100),
            damage: rate(60),
        };
        self.disks = Some(DiskPlan {
            owners: random.between(300, 1000),
            capacity: extent_words * random.between(2, 8),
            extent_words,
            faults,
        });
        self.rules.offload = Some(OffloadRules {
            queue_max: random.between(2, 60) as usize,
            adopts_records: random.happens(250),
            ..OffloadRules::default()
        });
        if random.happens(250) {
            // Reports that arrive again after later ones.
            (self.faults.duplicated, self.faults.slow) = (200, 200);
            self.faults.slow_max = Duration::from_secs(random.between(1, 8));
        }
        self.rules.disk_away_ttl = Duration::from_millis(random.between(2000, 30_000));
        if self.keys <= 24 {
            // More objects than there is memory for.
            self.keys *= 2;
            self.segment_words = words * random.between(3, 12);
        }
        if random.happens(300) {
            self.move_on_eviction(random);
        }
    }

    /// Writes objects to directories when their memory is needed, and not when they are put.
    fn move_on_eviction(&mut self, random: &mut Random) {
        let Some(rules) = &mut self.rules.offload else { return };
        rules.is_on_eviction = true;
        rules.drops_when_full = random.happens(300);
        rules.moves_max = random.between(1, 30) as usize;
    }

    /// Returns the rules of the master, as a planted bug changes them.
    pub(crate) fn rules_of_master(&self) -> Rules {
        let mut rules = self.rules.clone();
        if let Some(offload) = &mut rules.offload {
            offload.adopts_records |= self.has(Bug::AdoptsRecords);
        }
        rules
    }

    /// Returns whether a master that has lost its log makes objects of records.
    pub(crate) fn adopts_records(&self) -> bool {
        self.rules.offload.as_ref().is_some_and(|rules| rules.adopts_records)
    }
}
