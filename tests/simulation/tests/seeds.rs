//! Worlds in which things break, judged at every step; and bugs on purpose, which must be found.

use mooncake_base::env::EnvVar;
use mooncake_simulation::{Bug, Outcome, Plan, run};

static SEED: EnvVar =
    EnvVar { name: "MOONCAKE_TEST_SEED", aliases: &[], default: "0", help: "The first world." };
static SEEDS: EnvVar =
    EnvVar { name: "MOONCAKE_TEST_SEEDS", aliases: &[], default: "100", help: "How many worlds." };
static LONG: EnvVar = EnvVar {
    name: "MOONCAKE_LONG_TESTS",
    aliases: &[],
    default: "",
    help: "Whether tests also do what takes long.",
};

/// How many worlds, and the first of them.
fn seeds() -> std::ops::Range<u64> {
    let first = number(&SEED, 0);
    first..first + number(&SEEDS, 100)
}

fn number(variable: &EnvVar, default: u64) -> u64 {
    variable.read().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn whatever_breaks_readers_get_what_was_put_and_no_memory_is_given_away_twice() {
    let mut sums = Outcome::default();
    for seed in seeds() {
        match run(Plan::new(seed)) {
            Ok(outcome) => sums.add(&outcome),
            Err(violation) => panic!("{violation}"),
        }
    }
    // A world in which nothing happens proves nothing.
    let worlds = seeds().end - seeds().start;
    assert!(sums.puts > worlds * 20 && sums.gets > worlds * 20, "{sums:?}");
    assert!(sums.restarts > worlds / 4 && sums.deaths > worlds / 2, "{sums:?}");
    assert!(sums.late_reads > 0 && sums.renewals > 0 && sums.audited > worlds, "{sums:?}");
    assert!(sums.tasks > worlds && sums.drains > worlds / 2, "{sums:?}");
    assert!(sums.succeeded > worlds / 2 && sums.drained > worlds / 4, "{sums:?}");
}

#[test]
fn the_same_seed_is_the_same_world() {
    assert_eq!(run(Plan::new(3)).unwrap(), run(Plan::new(3)).unwrap());
}

#[test]
fn a_bug_on_purpose_is_found() {
    // These show themselves within few worlds; the others need a longer look.
    const SOON: [Bug; 5] = [
        Bug::AnswersBeforeTheLog,
        Bug::ReleasesTooEarly,
        Bug::BelievesLateReads,
        Bug::LendsUsedMemory,
        Bug::ForgetsTasks,
    ];
    for (name, bug) in Bug::ALL {
        if !SOON.contains(&bug) && LONG.read().is_none() {
            println!("{name} is looked for with MOONCAKE_LONG_TESTS=1");
            continue;
        }
        let found = (0..3000).find_map(|seed| run(Plan::new(seed).with_bug(bug)).err());
        assert!(found.is_some(), "{name} was not found");
    }
}
