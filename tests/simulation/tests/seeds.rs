//! Runs the simulator over seeds with injected faults, and checks that planted bugs are found.

use mooncake_base::{
    env::{EnvVar, ValueKind},
    requirement::is_long_run,
};
use mooncake_simulation::{Bug, Outcome, Plan, run};

static SEED: EnvVar = EnvVar {
    name: "MOONCAKE_TEST_SEED",
    aliases: &[],
    default: "0",
    kind: ValueKind::Text,
    help: "The first seed.",
};
static SEEDS: EnvVar = EnvVar {
    name: "MOONCAKE_TEST_SEEDS",
    aliases: &[],
    default: "80",
    kind: ValueKind::Text,
    help: "The number of seeds.",
};
/// Returns the range of seeds to run.
fn seeds() -> std::ops::Range<u64> {
    let first = number(&SEED, 0);
    first..first + number(&SEEDS, 80)
}

fn number(variable: &EnvVar, default: u64) -> u64 {
    variable.read().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn no_invariant_is_violated_under_faults() {
    let (mut sums, mut seen) = (Outcome::default(), Outcome::default());
    for seed in seeds() {
        match run(Plan::new(seed)) {
            Ok(outcome) => {
                sums.add(&outcome);
                seen.add(&outcome.seen());
            }
            Err(violation) => panic!("{violation}"),
        }
    }
    // The runs must have covered every kind of operation and fault.
    let runs = seeds().end - seeds().start;
    assert!(sums.puts > runs * 20 && sums.gets > runs * 20, "{sums:?}");
    assert!(sums.power_losses > runs / 10 && sums.undone > 0, "{sums:?}");
    assert!(sums.restarts > runs / 4 && sums.client_deaths > runs / 2, "{sums:?}");
    assert!(sums.late_reads > 0 && sums.renewals > 0 && sums.audited > runs, "{sums:?}");
    assert!(sums.repetitions > runs, "{sums:?}");
    assert!(
        sums.waits > runs * 100 && sums.sliced > runs / 2 && sums.views > runs * 10,
        "{sums:?}"
    );
    assert!(sums.hangs > runs / 5 && sums.starved > runs, "{sums:?}");
    assert!(sums.log_failures > 0 && sums.log_restarts > 0 && sums.endings > 0, "{sums:?}");
    assert!(sums.graces > 0, "{sums:?}");
    assert!(sums.existed > runs && sums.faded > runs / 10, "{sums:?}");
    assert!(sums.suspensions > 0 && sums.expired > 0 && sums.late_pieces > 0, "{sums:?}");
    assert!(sums.stopped_pieces > runs, "{sums:?}");
    assert!(sums.readmissions > 0 && sums.wraps > runs && sums.views_in_sweep > 0, "{sums:?}");
    assert!(sums.tasks > runs && sums.drains > runs / 2, "{sums:?}");
    // Puts of several objects, long puts and views during sweeps are common, not rare.
    assert!(seen.batches > runs * 3 / 4 && seen.window_renewals > runs / 2, "{seen:?}");
    assert!(seen.views_in_sweep > runs / 10 && seen.lists_in_sweep > runs / 10, "{seen:?}");
    // Directories are written to, read, copied, torn, and are away.
    assert!(
        sums.offloaded > runs && sums.disk_gets > runs && sums.records_evicted > runs,
        "{sums:?}"
    );
    assert!(sums.torn_records > 0 && sums.disks_copied > 0 && sums.mounts_refused > 0, "{sums:?}");
    assert!(sums.disks_left > 0 && sums.late_hand_overs > 0 && sums.stale_records > 0, "{sums:?}");
    assert!(sums.audited_records > 0 && seen.disk_gets > runs / 10, "{seen:?}");
    // Puts wait for objects that move down.
    assert!(sums.waits_for_disks > runs && seen.waits_for_disks > runs / 20, "{sums:?}");
    assert!(sums.succeeded > runs / 2 && sums.drained > runs / 4, "{sums:?}");
}

#[test]
fn same_seed_gives_same_run() {
    assert_eq!(run(Plan::new(3)).unwrap(), run(Plan::new(3)).unwrap());
}

#[test]
fn planted_bugs_are_found() {
    // These are found within few seeds, each with one that finds it now, where the search begins. The
    // others need minutes.
    const QUICKLY_FOUND: &[(Bug, u64)] = &[
        (Bug::AnswersRepeatedStartEarly, 27),
        (Bug::AnswersRepeatedEndEarly, 49),
        (Bug::ReportsExistingEarly, 1),
        (Bug::HeartbeatsShareConnections, 0),
        (Bug::IgnoresStops, 47),
        (Bug::PanicsInViews, 8),
        (Bug::PanicsInLists, 0),
        (Bug::AnswersBatchesEarly, 30),
        (Bug::ForgetsRenewals, 19),
        (Bug::GoesOnUnrenewed, 22),
        (Bug::ReusesReplicaNumbers, 36),
        (Bug::ForgetsLatePieces, 40),
        (Bug::DropsLastReadableCopy, 3),
        (Bug::RepliesBeforeLog, 1),
        (Bug::FreesTooEarly, 0),
        (Bug::TrustsLateReads, 20),
        (Bug::CountsFencesFromAnswer, 13),
        (Bug::ReleasesFencesEarly, 1),
        (Bug::RemountsUsedMemory, 16),
        (Bug::ForgetsToReannounce, 0),
        (Bug::ForgetsFailedMounts, 8),
        (Bug::ForgetsTasks, 25),
        (Bug::ForgetsUnconfirmedPuts, 5),
        (Bug::EndsLatePuts, 54),
        (Bug::RepeatsUnnumberedCalls, 1),
        (Bug::ForgetsToSyncOldLogs, 29),
        (Bug::CutsLaterLogs, 1),
        (Bug::TrustsUnsyncedLog, 0),
        (Bug::ReusesUnsyncedMemory, 9),
        (Bug::CountsLateOffloads, 3),
        (Bug::AdoptsRecords, 0),
        (Bug::IgnoresHandOverFences, 25),
        (Bug::TrustsUnsyncedRecords, 33),
        (Bug::AcceptsCopiedDirectories, 0),
        (Bug::TellsOfAwayDisks, 3),
        (Bug::CountsUnreportedRecords, 1),
        (Bug::ReportsUnwritten, 33),
        (Bug::ReportsUnnumbered, 111),
    ];
    for (name, bug) in Bug::ALL {
        let first = QUICKLY_FOUND.iter().find_map(|&(each, seed)| (each == bug).then_some(seed));
        if first.is_none() && !is_long_run() {
            println!("skipped: {name} needs MOONCAKE_LONG_TESTS=1");
            continue;
        }
        let first = first.unwrap_or(0);
        let mut seeds = first..first + 3000;
        let found = seeds.find(|&seed| run(Plan::new(seed).with_bug(bug)).is_err());
        println!("{name}: the search began with seed {first}, and ended with {found:?}");
        assert!(found.is_some(), "{name} was not found");
    }
}
