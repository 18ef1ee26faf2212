//! Which ranks are silent for too long, without clock and I/O.

use std::{collections::BTreeMap, time::Duration};

use mooncake_base::Moment;

/// How often silence is looked for.
pub(crate) const TICK: Duration = Duration::from_millis(250);

/// When each rank was heard of.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    limit: Duration,
    heard: BTreeMap<u32, Moment>,
    looked: Moment,
}

impl Heartbeats {
    /// A rank that is silent for longer than `limit` is silent for too long.
    pub(crate) fn new(limit: Duration, now: Moment) -> Self {
        Self { limit, heard: BTreeMap::new(), looked: now }
    }

    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Records that a rank was heard of.
    pub(crate) fn record(&mut self, rank: u32, now: Moment) {
        self.heard.insert(rank, now);
    }

    /// Forgets a rank whose connection has ended.
    pub(crate) fn forget(&mut self, rank: u32) {
        self.heard.remove(&rank);
    }

    /// Returns the ranks that are silent for too long. Called once per [`TICK`]: if much more time
    /// has passed, this process did not run, and the ranks had no chance to be heard.
    pub(crate) fn silent(&mut self, now: Moment) -> Vec<u32> {
        let pause = now.since(self.looked).saturating_sub(TICK);
        self.looked = now;
        if pause > TICK {
            // Nobody is heard of later than now.
            self.heard.values_mut().for_each(|heard| *heard = now.min(*heard + pause));
        }
        let silent = self.heard.iter().filter(|(_, heard)| now.since(**heard) > self.limit);
        silent.map(|(rank, _)| *rank).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);
    const NOBODY: [u32; 0] = [];

    fn at(millis: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(millis))
    }

    #[test]
    fn rank_is_silent_after_the_limit_and_no_earlier() {
        let mut heartbeats = Heartbeats::new(LIMIT, at(0));
        heartbeats.record(1, at(1_000));
        heartbeats.record(2, at(1_000));
        let ticks = (0..).map(|tick| 1_000 + tick * 250);
        for now in ticks.take_while(|now| *now <= 11_000) {
            heartbeats.record(2, at(now));
            assert_eq!(heartbeats.silent(at(now)), NOBODY, "{now}");
        }
        assert_eq!(heartbeats.silent(at(11_250)), [1]);
        heartbeats.record(1, at(11_300));
        assert_eq!(heartbeats.silent(at(11_500)), NOBODY);
    }

    #[test]
    fn pause_of_the_coordinator_counts_for_nobody() {
        let mut heartbeats = Heartbeats::new(LIMIT, at(0));
        heartbeats.record(1, at(0));
        assert_eq!(heartbeats.silent(at(250)), NOBODY);
        assert_eq!(heartbeats.silent(at(60_000)), NOBODY);
        let ticks: Vec<u64> = (60_250..=80_000).step_by(250).collect();
        let first = ticks.iter().find(|now| heartbeats.silent(at(**now)) == [1]);
        // It was silent for 250 ms before the pause, and for as long in the tick that ended it.
        assert_eq!(first, Some(&69_750));
    }

    #[test]
    fn rank_whose_connection_has_ended_is_not_silent() {
        let mut heartbeats = Heartbeats::new(LIMIT, at(0));
        heartbeats.record(1, at(0));
        heartbeats.forget(1);
        assert_eq!(heartbeats.silent(at(250)), NOBODY);
    }
}
