//! Fault rates of a run.

use std::time::Duration;

use crate::random::Random;

/// Fault rates, per mille. Rates of messages are per message, the others per second.
#[derive(Debug, Clone, Default)]
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
    /// The disk of the log takes no write for a while.
    pub(crate) log_hang: u64,
    /// The longest of these times.
    pub(crate) log_hang_max: Duration,
    /// The disk of the log is full or fails.
    pub(crate) disk_failure: u64,
    /// The host of a client is suspended.
    pub(crate) suspend: u64,
    /// The wall clock of the master's machine jumps.
    pub(crate) clock_jump: u64,
    /// The last connection of a client ends, and the client goes on.
    pub(crate) disconnect: u64,
    /// The share of ends of tasks at which the holder of a new copy has just died.
    pub(crate) target_crash: u64,
    /// So many replicas are made elsewhere that their numbers start again.
    pub(crate) wrap: u64,
}

impl Faults {
    /// Derives the rates of a run.
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x51ed_270b);
        let mut rate = |max: u64| if random.happens(400) { 0 } else { random.below(max + 1) };
        let is_failing = (1..500).contains(&rate(1000));
        Self {
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
            cut: rate(300),
            log_hang: rate(120),
            log_hang_max: Duration::from_millis(100 + rate(10_000)),
            disk_failure: if is_failing { rate(100) } else { 0 },
            suspend: rate(30),
            clock_jump: rate(60),
            disconnect: rate(40),
            target_crash: rate(60),
            wrap: rate(300),
        }
    }

    /// Returns no faults. The log may still have to be started anew after a failure.
    pub(crate) fn ended(&self) -> Self {
        Self { disk_failure: self.disk_failure, ..Self::default() }
    }
}
