//! The plan of a run, derived from a seed: sizes, rules of the master, and fault rates.

use std::time::Duration;

use mooncake_master::{
    LogSync,
    state::{EvictionKind, Rules, TaskRules},
};

use crate::random::Random;

/// Bytes of a word, the smallest unit of simulated memory.
pub(crate) const WORD_BYTES: u64 = 8;

/// A planted bug: a defect of the program that the checkers must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// The master replies before the change is in the log.
    RepliesBeforeLog,
    /// A restarted master forgets how long its predecessor's fences last.
    ForgetsFences,
    /// The memory of a vanished writer is reused while the writer may still write.
    FreesTooEarly,
    /// A reader whose fence expired does not verify its copy.
    TrustsLateReads,
    /// A reader counts its fence from the answer of the master, not from its request.
    CountsFencesFromAnswer,
    /// A reader hands its fence back when it begins to read.
    ReleasesFencesEarly,
    /// A client that registers again does not announce its segments.
    ForgetsToReannounce,
    /// A client does not correct the master's list of its segments after an unanswered call.
    ForgetsFailedMounts,
    /// A client whose segment the master does not know mounts the same memory again.
    RemountsUsedMemory,
    /// A writer continues after its write window.
    WritesTooLate,
    /// A task runner continues after its write window.
    CopiesTooLate,
    /// A restarted master forgets the tasks and drains of its predecessor.
    ForgetsTasks,
    /// A restarted master does not sync what its predecessor wrote.
    ForgetsToSyncOldLogs,
    /// After a loss of power, a damaged log is cut off with all later ones.
    CutsLaterLogs,
    /// After a loss of power, a log that was never synced is used.
    TrustsUnsyncedLog,
    /// Freed memory is reused before the record of its release is on disk.
    ReusesUnsyncedMemory,
    /// A client forgets the puts that it gave up, and takes its own unfinished put for an object.
    ForgetsUnconfirmedPuts,
    /// A client ends the puts that it gave up, instead of revoking them, and only in the background.
    EndsLatePuts,
    /// A client sends a removal or a request again without a number by which the master knows it.
    RepeatsUnnumberedCalls,
}

impl Bug {
    /// All planted bugs, with their names on the command line.
    pub const ALL: [(&str, Self); 19] = [
        ("replies-before-log", Self::RepliesBeforeLog),
        ("forgets-fences", Self::ForgetsFences),
        ("frees-too-early", Self::FreesTooEarly),
        ("trusts-late-reads", Self::TrustsLateReads),
        ("counts-fences-from-answer", Self::CountsFencesFromAnswer),
        ("releases-fences-early", Self::ReleasesFencesEarly),
        ("forgets-to-reannounce", Self::ForgetsToReannounce),
        ("forgets-failed-mounts", Self::ForgetsFailedMounts),
        ("remounts-used-memory", Self::RemountsUsedMemory),
        ("writes-too-late", Self::WritesTooLate),
        ("copies-too-late", Self::CopiesTooLate),
        ("forgets-tasks", Self::ForgetsTasks),
        ("forgets-to-sync-old-logs", Self::ForgetsToSyncOldLogs),
        ("cuts-later-logs", Self::CutsLaterLogs),
        ("trusts-unsynced-log", Self::TrustsUnsyncedLog),
        ("reuses-unsynced-memory", Self::ReusesUnsyncedMemory),
        ("forgets-unconfirmed-puts", Self::ForgetsUnconfirmedPuts),
        ("ends-late-puts", Self::EndsLatePuts),
        ("repeats-unnumbered-calls", Self::RepeatsUnnumberedCalls),
    ];
}

/// The parameters of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The seed of all randomness.
    pub seed: u64,
    /// The planted bug, if any.
    pub bug: Option<Bug>,
    /// True if every event is printed.
    pub is_traced: bool,
    pub(crate) clients: u64,
    pub(crate) workers: u64,
    pub(crate) keys: u64,
    pub(crate) segment_words: u64,
    pub(crate) object_words: u64,
    /// The share of operations that request a copy, a move or a drain, per mille.
    pub(crate) task_requests: u64,
    /// The time with operations and faults, before the audit.
    pub(crate) active: Duration,
    pub(crate) faults: Faults,
    pub(crate) rules: Rules,
    pub(crate) log_sync: LogSync,
}

/// Fault rates, per mille. Rates of messages are per message, the others per second.
#[derive(Debug, Clone)]
pub(crate) struct Faults {
    pub(crate) lost: u64,
    pub(crate) duplicated: u64,
    /// The share of calls whose connection is cut when the master has received them, so that they
    /// have no reply.
    pub(crate) cut: u64,
    pub(crate) slow: u64,
    /// The longest delay of a slow message.
    pub(crate) slow_max: Duration,
    pub(crate) master_crash: u64,
    /// The longest downtime of the master.
    pub(crate) down_max: Duration,
    pub(crate) master_stall: u64,
    /// The share of crashes that lose the log.
    pub(crate) wipe: u64,
    /// The share of crashes of the master that are crashes of its machine.
    pub(crate) power_loss: u64,
    /// The share of those that damage an older log.
    pub(crate) damage: u64,
    pub(crate) client_crash: u64,
    pub(crate) client_stall: u64,
    pub(crate) partition: u64,
    pub(crate) remount: u64,
    pub(crate) snapshot: u64,
}

impl Plan {
    /// Derives the plan of a seed.
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x51ed_270b);
        let mut rate = |max: u64| if random.happens(400) { 0 } else { random.below(max + 1) };
        let faults = Faults {
            lost: rate(60),
            duplicated: rate(40),
            slow: rate(60),
            slow_max: Duration::from_millis(10 + rate(8000)),
            master_crash: rate(150),
            down_max: Duration::from_millis(1 + rate(4000)),
            master_stall: rate(60),
            wipe: rate(30),
            client_crash: rate(80),
            client_stall: rate(120),
            partition: rate(60),
            remount: rate(60),
            snapshot: rate(400),
            power_loss: 0,
            damage: 0,
            cut: 0,
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
            task_requests: 60,
            active: Duration::from_secs(random.between(5, 30)),
            faults,
            rules: rules(&mut random),
            log_sync: LogSync::Always,
        }
        .with_power_losses()
        .with_cuts()
    }

    /// Derives the rate of cut connections from a generator of its own.
    fn with_cuts(mut self) -> Self {
        let mut random = Random::new(self.seed ^ 0xc07);
        self.faults.cut = if random.happens(400) { 0 } else { random.below(300) };
        self
    }

    /// Derives the losses of power from a generator of their own.
    fn with_power_losses(mut self) -> Self {
        let mut random = Random::new(self.seed ^ 0x0dd_ba11);
        let interval = LogSync::Interval(Duration::from_millis(random.between(20, 1500)));
        let kinds = [LogSync::Always, interval, interval, LogSync::Never];
        self.log_sync = *random.pick(&kinds).unwrap_or(&interval);
        if random.happens(600) {
            self.faults.power_loss = random.below(800);
            self.faults.damage = random.below(100);
        }
        self
    }

    /// Plants a bug, and makes the conditions that reveal it more likely.
    pub fn with_bug(mut self, bug: Bug) -> Self {
        self.bug = Some(bug);
        self.reveal_bug_of_master(bug);
        self.reveal_bug_of_client(bug);
        self
    }

    fn reveal_bug_of_master(&mut self, bug: Bug) {
        match bug {
            Bug::FreesTooEarly => {
                self.rules.put_discard = Duration::from_millis(20);
                self.rules.put_release = Duration::from_millis(30);
            }
            Bug::ForgetsFences => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.down_max) = (400, Duration::from_millis(1));
                (faults.slow, faults.slow_max) = (500, Duration::from_millis(150));
                (faults.wipe, faults.lost) = (0, 0);
                self.rules.lease_ttl = Duration::from_millis(1);
                self.rules.client_ttl = Duration::from_millis(300);
                (self.keys, self.workers) = (2, 4);
            }
            Bug::ForgetsToSyncOldLogs | Bug::CutsLaterLogs | Bug::TrustsUnsyncedLog => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.power_loss) = (400, 500);
                (faults.wipe, faults.down_max) = (0, Duration::from_millis(50));
                faults.damage = if bug == Bug::CutsLaterLogs { 500 } else { 0 };
                self.log_sync = match bug {
                    Bug::TrustsUnsyncedLog => LogSync::Never,
                    _ => LogSync::Always,
                };
            }
            Bug::ReusesUnsyncedMemory => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.power_loss) = (300, 800);
                (faults.wipe, faults.damage, faults.lost) = (0, 0, 0);
                faults.down_max = Duration::from_millis(50);
                self.log_sync = LogSync::Interval(Duration::from_millis(1500));
                self.segment_words = self.object_words * 3;
                (self.keys, self.workers) = (24, 4);
            }
            _ => {}
        }
    }

    fn reveal_bug_of_client(&mut self, bug: Bug) {
        match bug {
            Bug::RemountsUsedMemory => {
                let faults = &mut self.faults;
                (faults.master_crash, faults.wipe) = (400, 1000);
                (faults.down_max, faults.lost) = (Duration::from_millis(1), 0);
                (faults.slow, faults.slow_max) = (500, Duration::from_millis(400));
                (self.keys, self.workers) = (2, 4);
                (self.object_words, self.segment_words) = (64, 256);
            }
            Bug::CountsFencesFromAnswer | Bug::ReleasesFencesEarly => {
                let slow_max = if bug == Bug::ReleasesFencesEarly { 200 } else { 500 };
                (self.faults.slow, self.faults.slow_max) = (300, Duration::from_millis(slow_max));
                (self.faults.master_crash, self.faults.lost) = (0, 0);
                self.rules.lease_ttl = Duration::from_millis(1);
                (self.keys, self.workers, self.segment_words) = (4, 4, self.object_words * 3);
            }
            Bug::WritesTooLate => self.faults.client_stall = 300,
            Bug::ForgetsUnconfirmedPuts | Bug::EndsLatePuts => {
                (self.faults.cut, self.faults.partition) = (700, 200);
                (self.faults.client_crash, self.faults.wipe) = (0, 0);
                (self.keys, self.workers) = (2, 4);
            }
            Bug::RepeatsUnnumberedCalls => {
                (self.faults.cut, self.keys, self.workers) = (500, 2, 4);
            }
            Bug::CopiesTooLate => {
                (self.faults.client_stall, self.faults.client_crash) = (100, 0);
                (self.faults.wipe, self.faults.lost) = (0, 0);
                (self.faults.slow, self.faults.slow_max) = (300, Duration::from_millis(200));
                self.rules.write_window = Duration::from_millis(300);
                (self.keys, self.workers, self.task_requests) = (12, 4, 200);
                (self.object_words, self.segment_words) = (64, 256);
                self.active = Duration::from_secs(30);
            }
            Bug::ForgetsFailedMounts => {
                let faults = &mut self.faults;
                (faults.remount, faults.cut, faults.partition) = (600, 700, 200);
                (faults.client_crash, faults.master_crash, faults.master_stall) = (0, 0, 0);
            }
            _ => {}
        }
    }

    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }
}

/// Returns rules with short times, so that a short run covers much. `put_discard` and `put_release`
/// must be longer than the write window.
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
