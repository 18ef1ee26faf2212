//! Warnings about puts that did not do all that they were asked, each at most once in an interval.

use std::{collections::HashSet, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Moment, Result, SystemClock};
use mooncake_store_client::{Client, PutOptions, PutOutcome};

/// Shortest time between two warnings of one kind.
const INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of names of segments that are remembered.
const NAMES_MAX: usize = 4096;

/// Lets something happen at most once in [`INTERVAL`].
struct Throttle(Mutex<Option<Moment>>);

impl Throttle {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Returns whether the interval has passed, and begins another one.
    fn is_due(&self) -> bool {
        let now = SystemClock.now();
        let mut last = self.0.lock();
        let is_due = last.is_none_or(|at| now.since(at) >= INTERVAL);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

/// Warns of what a batch of puts did not do.
pub(super) fn warn(client: &Client, outcomes: &[Result<PutOutcome>], options: &PutOptions) {
    warn_of_fewer_copies(outcomes, options.replicas);
    if !options.preferred_segments.is_empty() {
        warn_of_unknown_segments(client, &options.preferred_segments);
    }
}

/// Logs that objects have fewer copies than asked.
fn warn_of_fewer_copies(outcomes: &[Result<PutOutcome>], asked: u32) {
    static THROTTLE: Throttle = Throttle::new();
    let copies = |outcome: &Result<PutOutcome>| match outcome {
        Ok(PutOutcome::Stored { replicas, .. }) if *replicas < asked => Some(*replicas),
        _ => None,
    };
    let Some(made) = outcomes.iter().filter_map(copies).min() else { return };
    if !THROTTLE.is_due() {
        return;
    }
    let objects = outcomes.iter().filter_map(copies).count();
    tracing::warn!(
        objects,
        asked,
        made,
        "objects have fewer copies than asked: each copy needs a segment of its own with free space"
    );
}

/// Logs that preferred segments are not in the pool, so that objects are placed elsewhere. Asks the
/// master only about names that it has not confirmed before.
fn warn_of_unknown_segments(client: &Client, preferred: &[String]) {
    static THROTTLE: Throttle = Throttle::new();
    static CONFIRMED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let is_confirmed = |names: &Option<HashSet<String>>| {
        names.as_ref().is_some_and(|names| preferred.iter().all(|name| names.contains(name)))
    };
    if is_confirmed(&CONFIRMED.lock()) || !THROTTLE.is_due() {
        return;
    }
    let Ok(segments) = client.segments() else { return };
    let found: HashSet<String> =
        segments.into_iter().take(NAMES_MAX).map(|each| each.segment.name).collect();
    let unknown: Vec<_> = preferred.iter().filter(|&name| !found.contains(name)).collect();
    if !unknown.is_empty() {
        tracing::warn!(
            ?unknown,
            "preferred segments are not in the pool, so that objects are placed elsewhere; \
             `mooncake segments` lists the names"
        );
    }
    *CONFIRMED.lock() = Some(found);
}
