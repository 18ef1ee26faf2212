//! Runs of the simulation: none finds anything, and each planted bug is found.

use mooncake_base::requirement;

use super::{
    Outcome, Simulation,
    plan::{Bug, Plan},
};

/// Runs that each change is tested with.
const RUNS: u64 = 300;

/// Runs within which a planted bug must be found.
const BUG_RUNS: u64 = 100;

/// Runs of a long test.
const LONG_RUNS: u64 = 10_000;

fn run(seed: u64, bug: Option<Bug>) -> Result<Outcome, String> {
    Simulation::new(Plan::new(seed, bug)).run()
}

/// Runs seeds until one finds the planted bug. Returns what was found.
#[track_caller]
fn find(bug: Bug, seeds: u64) -> String {
    let is_unsafe = |why: &String| !why.contains("no client was served");
    let found = (0..seeds)
        .find_map(|seed| run(seed, Some(bug)).err().filter(is_unsafe).map(|why| (seed, why)));
    let Some((seed, why)) = found else { panic!("{bug:?} was not found") };
    println!("{bug:?}: seed {seed}: {why}");
    why
}

#[test]
fn nothing_acknowledged_is_lost_and_one_master_leads() {
    let runs = if requirement::is_long_run() { LONG_RUNS } else { RUNS };
    let mut sum = Outcome::default();
    let mut failures = Vec::new();
    for seed in 0..runs {
        match run(seed, None) {
            Ok(outcome) => sum.add(&outcome),
            Err(why) => failures.push(format!("seed {seed}: {why}")),
        }
    }
    println!("{sum:?}");
    // The runs are of use only if leaders and sets change, and clients are served.
    let Outcome { leaders, set_changes, acknowledged, reads, .. } = sum;
    assert!(leaders > 2 * runs && set_changes > 3 * runs, "{sum:?}");
    assert!(acknowledged > 15 * runs && reads > 8 * runs, "{sum:?}");
    assert!(sum.replaced_logs > 0 && sum.snapshots > 0 && sum.forced > 0, "{sum:?}");
    assert!(sum.hanging_writes > 0, "{sum:?}");
    assert!(failures.is_empty(), "{} of {runs}:\n{}", failures.len(), failures.join("\n"));
}

/// In these runs a member lost power, followed to the end again, and was only killed later.
#[test]
fn member_that_has_followed_since_it_lost_power_may_lead() {
    for seed in [6196, 9014] {
        let mut plan = Plan::new(seed, None);
        plan.faults.hanging_write = 0;
        Simulation::new(plan).run().unwrap();
    }
}

#[test]
fn faults_that_show_a_bug_show_nothing_without_it() {
    for bug in Bug::ALL {
        for seed in 0..20 {
            let plan = Plan { bug: None, ..Plan::new(seed, Some(bug)) };
            if let Err(why) = Simulation::new(plan).run() {
                panic!("{bug:?}: seed {seed}: {why}");
            }
        }
    }
}

#[test]
fn confirmation_of_any_member_is_found() {
    find(Bug::AnyConfirmation, BUG_RUNS);
}

#[test]
fn set_that_shrinks_before_the_transaction_is_found() {
    find(Bug::ShrinksFirst, BUG_RUNS);
}

#[test]
fn standby_that_attaches_without_views_is_found() {
    find(Bug::AttachesBlindly, BUG_RUNS);
}

#[test]
fn memory_reused_before_standbys_know_is_found() {
    let why = find(Bug::ReusesUnconfirmed, BUG_RUNS);
    assert!(why.contains("wrong bytes"), "{why}");
}

#[test]
fn incomplete_member_that_bids_is_found() {
    find(Bug::IncompleteBids, BUG_RUNS);
}

#[test]
fn lease_checked_before_the_wait_is_found() {
    let why = find(Bug::ChecksLeaseEarly, BUG_RUNS);
    assert!(why.contains("after an answer in view"), "{why}");
}

#[test]
fn mark_of_the_leader_alone_is_found() {
    find(Bug::MarksOwnLog, BUG_RUNS);
}

#[test]
fn first_changes_that_wait_for_nobody_are_found() {
    find(Bug::RequiresLate, BUG_RUNS);
}

#[test]
fn member_that_joins_before_it_has_everything_is_found() {
    find(Bug::JoinsEarly, BUG_RUNS);
}
