//! Runs of the simulation: none finds anything, and each planted bug is found.

use mooncake_base::requirement;

use super::{
    Outcome, Simulation,
    bugs::Bug,
    plan::{Faults, Plan},
};

/// Runs that each change is tested with.
const RUNS: u64 = 300;

/// Runs within which a planted bug must be found.
const BUG_RUNS: u64 = 300;

/// Runs of a long test.
const LONG_RUNS: u64 = 10_000;

fn run(seed: u64, bug: Option<Bug>) -> Result<Outcome, String> {
    Simulation::new(Plan::new(seed, bug)).run()
}

/// The runs of seeds that tests name: other faults would make other runs of them.
fn run_without_stale_reads(seed: u64) -> Result<Outcome, String> {
    let plan = Plan::new(seed, None);
    let faults = Faults { stale_reads: 0, leader_return: 0, ..plan.faults };
    Simulation::new(Plan { faults, ..plan }).run()
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
    assert!(sum.hanging_writes > 0 && sum.damaged > 0 && sum.handovers > 0, "{sum:?}");
    assert!(sum.late_attaches > 0 && sum.prepared > 0 && sum.stale_reads > 0, "{sum:?}");
    assert!(failures.is_empty(), "{} of {runs}:\n{}", failures.len(), failures.join("\n"));
}

/// In these runs a leader is to hand over while a standby is about to join the set and lacks changes.
#[test]
fn hand_over_goes_to_no_standby_that_is_about_to_join() {
    for seed in [1125, 3239, 5759, 6361, 7080, 8014] {
        run_without_stale_reads(seed).unwrap();
    }
}

/// In these runs the lease service is emptied, and a member is left that began without a history and followed.
#[test]
fn member_that_followed_founds_no_cluster() {
    for seed in [9623, 9723] {
        run_without_stale_reads(seed).unwrap();
    }
}

/// In these runs a leader begins from a log that has no record of versions which another one has granted: the
/// record was lost, and a restart in between left none; or an operator named a member that was away.
#[test]
fn version_of_a_put_without_a_record_is_not_granted_again() {
    for seed in [6177, 8542] {
        run(seed, None).unwrap();
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
fn no_end_of_a_put_fails_because_of_hand_overs() {
    let mut sum = Outcome::default();
    for seed in 0..30 {
        let faults = Faults { handover: 60, ..Faults::default() };
        let plan = Plan { faults, ..Plan::new(seed, None) };
        sum.add(&Simulation::new(plan).run().unwrap());
    }
    assert!(sum.handovers > 60 && sum.acknowledged > 30 * 30, "{sum:?}");
    assert_eq!(sum.failed_ends, 0, "{sum:?}");
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

#[test]
fn long_fence_that_standbys_do_not_know_is_found() {
    let why = find(Bug::FencesUnconfirmed, BUG_RUNS);
    assert!(why.contains("wrong bytes"), "{why}");
}

#[test]
fn answer_of_an_earlier_view_that_a_client_takes_is_found() {
    let why = find(Bug::TakesEarlierViews, BUG_RUNS);
    assert!(why.contains("and not one of"), "{why}");
}

#[test]
fn resting_memory_granted_by_the_next_leader_is_found() {
    let why = find(Bug::UsesRestingMemory, 100);
    assert!(why.contains("wrong bytes"), "{why}");
}

#[test]
fn slow_write_of_a_put_that_standbys_do_not_know_is_found() {
    let why = find(Bug::StartsUnlogged, BUG_RUNS);
    assert!(why.contains("wrong bytes"), "{why}");
}

#[test]
fn damaged_message_between_members_that_is_taken_is_found() {
    find(Bug::TrustsDamage, BUG_RUNS);
}

#[test]
fn hand_over_to_a_standby_that_lacks_changes_is_found() {
    find(Bug::HandsOverEarly, BUG_RUNS);
}

#[test]
fn leader_of_an_earlier_view_that_is_followed_is_found() {
    find(Bug::FollowsEarlierView, BUG_RUNS);
}
