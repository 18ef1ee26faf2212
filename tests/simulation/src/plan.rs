//! What a seed means: the size of the world, its rules, and how often what breaks.

use std::time::Duration;

use mooncake_master::state::{EvictionKind, Rules, TaskRules};

use crate::random::Random;

/// Bytes of a word of memory, which is the least that is told apart.
pub(crate) const WORD_BYTES: u64 = 8;

/// A fault of the program itself, planted to see that it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// The master answers before the change is in the log.
    AnswersBeforeTheLog,
    /// A restarted master does not know how long its predecessor's fences last.
    ForgetsFences,
    /// Space of a writer that vanished goes to others while it may still write.
    ReleasesTooEarly,
    /// A reader whose fence ran out does not ask whether its copy still stands.
    BelievesLateReads,
    /// A client whose memory the master does not know lends it again as it is.
    LendsUsedMemory,
    /// A writer goes on after its window.
    WritesTooLate,
    /// Whoever carries out a task goes on after its window.
    CopiesTooLate,
    /// A restarted master does not know of the tasks and drains of its predecessor.
    ForgetsTasks,
}

impl Bug {
    /// All of them, with the names that the command line takes.
    pub const ALL: [(&str, Self); 8] = [
        ("answers-before-the-log", Self::AnswersBeforeTheLog),
        ("forgets-fences", Self::ForgetsFences),
        ("releases-too-early", Self::ReleasesTooEarly),
        ("believes-late-reads", Self::BelievesLateReads),
        ("lends-used-memory", Self::LendsUsedMemory),
        ("writes-too-late", Self::WritesTooLate),
        ("copies-too-late", Self::CopiesTooLate),
        ("forgets-tasks", Self::ForgetsTasks),
    ];
}

/// One world.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Decides everything else.
    pub seed: u64,
    /// What is broken on purpose.
    pub bug: Option<Bug>,
    /// Whether every event is printed.
    pub is_traced: bool,
    pub(crate) clients: u64,
    pub(crate) workers: u64,
    pub(crate) keys: u64,
    pub(crate) segment_words: u64,
    pub(crate) object_words: u64,
    /// How much of what clients do is a wish for a copy, a move or a drain, in a thousand.
    pub(crate) wishes: u64,
    /// How long things break and clients work, before the audit.
    pub(crate) active: Duration,
    pub(crate) faults: Faults,
    pub(crate) rules: Rules,
}

/// How often what breaks, in a thousand.
#[derive(Debug, Clone)]
pub(crate) struct Faults {
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    pub(crate) slow: u64,
    /// How long a slow message takes at the most.
    pub(crate) slow_max: Duration,
    /// By the second of the active time.
    pub(crate) master_crash: u64,
    /// How long it is down at the most.
    pub(crate) down_max: Duration,
    pub(crate) master_stall: u64,
    /// The master comes back without its log.
    pub(crate) wipe: u64,
    pub(crate) client_crash: u64,
    pub(crate) client_stall: u64,
    pub(crate) partition: u64,
    pub(crate) remount: u64,
    pub(crate) snapshot: u64,
}

impl Plan {
    /// The world of that seed.
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x51ed_270b);
        let mut often = |max: u64| if random.happens(400) { 0 } else { random.below(max + 1) };
        let faults = Faults {
            lost: often(60),
            doubled: often(40),
            slow: often(60),
            slow_max: Duration::from_millis(10 + often(8000)),
            master_crash: often(150),
            down_max: Duration::from_millis(1 + often(4000)),
            master_stall: often(60),
            wipe: often(30),
            client_crash: often(80),
            client_stall: often(120),
            partition: often(60),
            remount: often(60),
            snapshot: often(400),
        };
        let object_words = random.between(1, 64);
        Self {
            seed,
            bug: None,
            is_traced: false,
            clients: random.between(2, 5),
            workers: random.between(1, 4),
            keys: random.between(1, 24),
            segment_words: object_words * random.between(3, 24),
            object_words,
            wishes: 60,
            active: Duration::from_secs(random.between(5, 30)),
            faults,
            rules: rules(&mut random),
        }
    }

    /// The same world with something broken in it.
    pub fn with_bug(mut self, bug: Bug) -> Self {
        match bug {
            Bug::ReleasesTooEarly => {
                self.rules.put_discard = Duration::from_millis(20);
                self.rules.put_release = Duration::from_millis(30);
            }
            // Rare coincidences are made less so.
            Bug::ForgetsFences => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.down_max) = (400, Duration::from_millis(1));
                (faults.slow, faults.slow_max) = (500, Duration::from_millis(150));
                (faults.wipe, faults.lost) = (0, 0);
                self.rules.lease_ttl = Duration::from_millis(1);
                self.rules.client_ttl = Duration::from_millis(300);
                (self.keys, self.workers) = (2, 4);
            }
            Bug::LendsUsedMemory => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.wipe) = (400, 1000);
                (faults.down_max, faults.lost) = (Duration::from_millis(1), 0);
                (faults.slow, faults.slow_max) = (500, Duration::from_millis(400));
                (self.keys, self.workers) = (2, 4);
                (self.object_words, self.segment_words) = (64, 256);
            }
            Bug::WritesTooLate => self.faults.client_stall = 300,
            Bug::CopiesTooLate => {
                (self.faults.client_stall, self.faults.client_crash) = (100, 0);
                (self.faults.wipe, self.faults.lost) = (0, 0);
                (self.faults.slow, self.faults.slow_max) = (300, Duration::from_millis(200));
                self.rules.write_window = Duration::from_millis(300);
                (self.keys, self.workers, self.wishes) = (12, 4, 200);
                (self.object_words, self.segment_words) = (64, 256);
                self.active = Duration::from_secs(30);
            }
            _ => {}
        }
        self.bug = Some(bug);
        self
    }

    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }
}

/// Short times, so that much happens in few seconds; in the order in which they must stand.
fn rules(random: &mut Random) -> Rules {
    let window = Duration::from_millis(random.between(500, 4000));
    Rules {
        client_ttl: Duration::from_millis(random.between(1000, 6000)),
        lease_ttl: Duration::from_millis(random.between(1, 2000)),
        write_window: window,
        put_discard: window + Duration::from_millis(2100),
        put_release: window + Duration::from_millis(2100 + random.below(4000)),
        resume_grace: Duration::from_millis(random.between(100, 3000)),
        unclaimed_ttl: Duration::from_millis(random.between(3000, 10_000)),
        eviction: *random
            .pick(&[EvictionKind::Lru, EvictionKind::S3Fifo])
            .unwrap_or(&EvictionKind::Lru),
        tasks: TaskRules {
            pending_timeout: Duration::from_millis(random.between(3000, 20_000)),
            processing_timeout: Duration::from_millis(random.between(3000, 20_000)),
            retries_max: random.below(5) as u32,
            ..TaskRules::default()
        },
        ..Rules::default()
    }
}
