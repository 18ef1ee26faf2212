//! Worlds in which things break, judged at every step; and bugs on purpose, which must be found.

use mooncake_simulation::{Bug, Outcome, Plan, run};

/// How many worlds, and the first; `MOONCAKE_TEST_SEEDS=10000` and `MOONCAKE_TEST_SEED=7` change it.
#[expect(clippy::disallowed_methods, reason = "tests take their switches from the environment")]
fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first = number("MOONCAKE_TEST_SEED").unwrap_or(0);
    first..first + number("MOONCAKE_TEST_SEEDS").unwrap_or(100)
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
}

#[test]
fn the_same_seed_is_the_same_world() {
    assert_eq!(run(Plan::new(3)).unwrap(), run(Plan::new(3)).unwrap());
}

#[test]
fn a_bug_on_purpose_is_found() {
    // These show themselves within few worlds; the others need a longer look.
    const SOON: [Bug; 3] =
        [Bug::AnswersBeforeTheLog, Bug::ReleasesTooEarly, Bug::BelievesLateReads];
    for (name, bug) in Bug::ALL {
        if !SOON.contains(&bug) && !is_long() {
            println!("{name} is looked for with MOONCAKE_LONG_TESTS=1");
            continue;
        }
        let found = (0..3000).find_map(|seed| run(Plan::new(seed).with_bug(bug)).err());
        assert!(found.is_some(), "{name} was not found");
    }
}

#[expect(clippy::disallowed_methods, reason = "tests take their switches from the environment")]
fn is_long() -> bool {
    std::env::var_os("MOONCAKE_LONG_TESTS").is_some()
}
