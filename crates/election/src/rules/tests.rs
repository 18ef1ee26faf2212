//! Tests of the rules: single steps, and clusters under the model of the service.

use super::{
    model::{Cluster, Fault, Outcome},
    *,
};
use crate::{
    simulated_service::SimulatedService,
    view::{Leader, LeaderAddress},
};

const TTL: Duration = Duration::from_secs(3);

fn id(name: &str) -> MemberId {
    MemberId::new(name).unwrap()
}

fn at(seconds_tenths: u64) -> Moment {
    Moment::from_boot(Duration::from_millis(seconds_tenths * 100))
}

fn election(name: &str, history: History) -> Election {
    Election::new(Timing::new(TTL).unwrap(), id(name), history, 1, at(0))
}

/// Lets the election make calls that the service answers at once, until it waits.
fn settle(election: &mut Election, service: &mut SimulatedService, now: Moment) {
    for _ in 0..20 {
        match election.poll(now) {
            Step::Call(call) => {
                let answer = service.carry_out(&call.request, now);
                election.answer(call.number, answer, now);
            }
            Step::WaitUntil(_) => return,
        }
    }
    panic!("the election does not come to rest: {election:?}");
}

fn service_with(members: &[&str]) -> SimulatedService {
    let mut service = SimulatedService::new(TTL);
    let members = members.iter().map(|name| id(name)).collect();
    service.set_in_sync(InSyncSet { members, ..InSyncSet::lost(View(0)) });
    service
}

fn is_leader(election: &Election, now: Moment) -> bool {
    matches!(election.role(now), Role::Leader { .. })
}

#[track_caller]
fn view_of_leader(election: &Election, now: Moment) -> View {
    match election.role(now) {
        Role::Leader { view, .. } => view,
        other => panic!("not a leader: {other:?}"),
    }
}

#[test]
fn member_of_the_set_leads_until_its_lease_is_over() {
    let mut service = service_with(&["a", "b"]);
    let mut a = election("a", History::None);
    settle(&mut a, &mut service, at(0));
    let until = at(27);
    assert_eq!(a.role(at(0)), Role::Leader { view: View(1), valid_until: until });
    assert!(is_leader(&a, at(26)));
    assert_eq!(a.role(until), Role::Fenced { view: View(1) });
    // Even a renewal that the service accepts is too late.
    settle(&mut a, &mut service, until);
    assert_eq!(a.role(until), Role::Fenced { view: View(1) });
    a.restart(History::UpTo(View(1)), until);
    settle(&mut a, &mut service, until);
    assert!(matches!(a.role(until), Role::Leader { view: View(2), .. }));
}

#[test]
fn renewal_counts_from_before_it_was_sent() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::None);
    settle(&mut a, &mut service, at(0));
    let Step::Call(call) = a.poll(at(10)) else { panic!("a renewal is due") };
    assert!(matches!(call.request, Request::Renew(_)));
    a.answer(call.number, Answer::Hold(Hold::Held), at(15));
    assert_eq!(a.role(at(15)), Role::Leader { view: View(1), valid_until: at(37) });
    // A repeated answer changes nothing.
    a.answer(call.number, Answer::Hold(Hold::Lost), at(16));
    assert!(is_leader(&a, at(16)));
}

#[test]
fn lost_lease_fences_at_once() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::None);
    settle(&mut a, &mut service, at(0));
    let Step::Call(call) = a.poll(at(10)) else { panic!("a renewal is due") };
    a.answer(call.number, Answer::Hold(Hold::Lost), at(11));
    assert_eq!(a.role(at(11)), Role::Fenced { view: View(1) });
}

#[test]
fn member_that_was_taken_out_does_not_try() {
    let mut service = service_with(&["b"]);
    let mut a = election("a", History::UpTo(View(5)));
    settle(&mut a, &mut service, at(0));
    assert_eq!(a.role(at(0)), Role::Follower(Obstacle::NotInSync));
}

#[test]
fn lost_set_of_a_cluster_with_history_elects_nobody() {
    let mut service = SimulatedService::new(TTL);
    let (mut old, mut fresh) =
        (election("old", History::UpTo(View(5))), election("fresh", History::None));
    settle(&mut fresh, &mut service, at(0));
    assert_eq!(fresh.role(at(0)), Role::Follower(Obstacle::Founding));
    settle(&mut old, &mut service, at(5));
    assert_eq!(old.role(at(5)), Role::Follower(Obstacle::SetLost));
    for now in [40, 80, 120].map(at) {
        settle(&mut fresh, &mut service, now);
        settle(&mut old, &mut service, now);
        for each in [&fresh, &old] {
            assert_eq!(each.role(now), Role::Follower(Obstacle::SetLost));
        }
    }
    // The operator's word; the view is above that of the log.
    old.force(View(0), at(130));
    settle(&mut old, &mut service, at(130));
    assert!(view_of_leader(&old, at(130)) > View(5));
    assert_eq!(service.in_sync().unwrap().members, BTreeSet::from([id("old")]));
}

#[test]
fn member_that_has_seen_a_set_founds_no_other_cluster() {
    let mut service = service_with(&["b"]);
    let mut fresh = election("a", History::None);
    settle(&mut fresh, &mut service, at(0));
    assert_eq!(fresh.role(at(0)), Role::Follower(Obstacle::NotInSync));
    service.clear();
    for now in [10, 40, 80].map(at) {
        settle(&mut fresh, &mut service, now);
        assert_eq!(fresh.role(now), Role::Follower(Obstacle::SetLost));
    }
}

/// A member that knows views up to the fifth is forced over a service. Returns the view in which it leads.
fn force(service: &mut SimulatedService, floor: View) -> View {
    let mut member = election("a", History::UpTo(View(5)));
    member.force(floor, at(0));
    settle(&mut member, service, at(0));
    view_of_leader(&member, at(0))
}

#[test]
fn forced_views_are_above_those_of_unknown_leaders() {
    // Others have led often since, and then the service was emptied.
    let unknown = View(1_000_000);
    let mut emptied = SimulatedService::new(TTL);
    assert!(force(&mut emptied, View(0)) > unknown, "also with a clock that is wrong");
    // The service remembers another member that was forced, and what it counted.
    let set = InSyncSet { view_base: 1 << 50, ..InSyncSet::founded_by(&id("b")) };
    let mut service = SimulatedService::new(TTL);
    service.set_in_sync(set.clone());
    assert!(force(&mut service, View(0)) > View(1 << 50));
    // The service has forgotten it: the clock is above.
    let mut emptied = SimulatedService::new(TTL);
    let first = force(&mut emptied, View(1 << 50));
    let mut emptied = SimulatedService::new(TTL);
    assert!(force(&mut emptied, View((1 << 50) + (1 << 20))) > first);
    // A leader of a lost set, and numbers that leave no room.
    let mut service = SimulatedService::new(TTL);
    service.set_in_sync(InSyncSet::lost(View(1 << 40)));
    assert!(force(&mut service, View(0)) > View(1 << 40));
    service = SimulatedService::new(TTL);
    service.set_in_sync(InSyncSet { view_base: u64::MAX - 1, ..set });
    assert_eq!(force(&mut service, View(0)), View(u64::MAX));
}

#[test]
fn forced_member_knows_what_others_may_have() {
    let forced_over = |set: Option<&[&str]>, is_complete: bool| {
        let mut service = set.map_or_else(|| SimulatedService::new(TTL), service_with);
        let mut a = election("a", History::UpTo(View(5)));
        a.set_complete(is_complete, at(0));
        a.force(View(0), at(0));
        settle(&mut a, &mut service, at(0));
        assert!(is_leader(&a, at(0)));
        a.overruled()
    };
    for is_complete in [true, false] {
        assert_eq!(forced_over(None, is_complete), Overruled::LostSet);
        assert_eq!(forced_over(Some(&[]), is_complete), Overruled::LostSet);
        assert_eq!(forced_over(Some(&["b"]), is_complete), Overruled::Others);
        assert_eq!(forced_over(Some(&["a"]), is_complete), Overruled::Nothing);
    }
    assert_eq!(forced_over(Some(&["a", "b"]), true), Overruled::Nothing);
    assert_eq!(forced_over(Some(&["a", "b"]), false), Overruled::Others);
}

#[test]
fn cluster_without_history_is_founded_after_a_while() {
    let mut service = SimulatedService::new(TTL);
    let mut a = election("a", History::None);
    for now in [0, 10, 20, 29] {
        settle(&mut a, &mut service, at(now));
        assert_eq!(a.role(at(now)), Role::Follower(Obstacle::Founding));
    }
    settle(&mut a, &mut service, at(31));
    assert!(is_leader(&a, at(31)));
}

#[test]
fn founder_waits_again_after_it_did_not_see_the_service() {
    let (mut service, mut a) = (SimulatedService::new(TTL), election("a", History::None));
    settle(&mut a, &mut service, at(0));
    // Meanwhile another member may have founded the cluster, and led until its set was lost.
    settle(&mut a, &mut service, at(40));
    assert_eq!(a.role(at(40)), Role::Follower(Obstacle::Founding));
    for now in [50, 60] {
        settle(&mut a, &mut service, at(now));
        assert_eq!(a.role(at(now)), Role::Follower(Obstacle::Founding));
    }
    settle(&mut a, &mut service, at(70));
    assert!(is_leader(&a, at(70)));
}

#[test]
fn view_below_that_of_the_log_is_given_back() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::UpTo(View(5)));
    settle(&mut a, &mut service, at(0));
    assert_eq!(a.role(at(0)), Role::Follower(Obstacle::ViewTooLow));
    assert_eq!(service.snapshot(at(0)).leader, None);
}

#[test]
fn attempt_whose_answer_was_lost_is_confirmed_by_a_renewal() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::None);
    let Step::Call(read) = a.poll(at(0)) else { panic!("a read comes first") };
    a.answer(read.number, service.carry_out(&read.request, at(0)), at(0));
    let Step::Call(acquire) = a.poll(at(1)) else { panic!("an attempt follows") };
    service.carry_out(&acquire.request, at(9));
    // The attempt is given up at its deadline; a read finds its key, and a renewal dates the lease.
    settle(&mut a, &mut service, at(11));
    settle(&mut a, &mut service, at(13));
    assert_eq!(a.role(at(13)), Role::Leader { view: View(1), valid_until: at(13 + 27) });
}

#[test]
fn late_attempt_of_a_member_that_gave_its_log_up_is_given_back() {
    let mut service = service_with(&["a", "b"]);
    let mut a = election("a", History::None);
    let Step::Call(read) = a.poll(at(0)) else { panic!("a read comes first") };
    a.answer(read.number, service.carry_out(&read.request, at(0)), at(0));
    let Step::Call(acquire) = a.poll(at(1)) else { panic!("an attempt follows") };
    a.answer(acquire.number, Answer::Failed, at(2));
    a.set_complete(false, at(2));
    // The service carries the attempt out after all.
    service.carry_out(&acquire.request, at(3));
    settle(&mut a, &mut service, at(20));
    assert_eq!(a.role(at(20)), Role::Follower(Obstacle::MayLackChanges));
    assert_eq!(service.snapshot(at(20)).leader, None);
}

#[test]
fn follower_tries_as_soon_as_the_watch_tells() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::None);
    let leader =
        Leader { address: LeaderAddress::Serving("other:1".into()), view: View(0), owner: None };
    let mut seen = service.snapshot(at(0));
    seen.leader = Some(leader);
    a.observe(&seen, at(0));
    assert_eq!(a.role(at(0)), Role::Follower(Obstacle::LeaderPresent));
    assert!(matches!(a.poll(at(0)), Step::WaitUntil(_)));
    a.observe(&service.snapshot(at(1)), at(1));
    settle(&mut a, &mut service, at(1));
    assert!(is_leader(&a, at(1)));
}

#[test]
fn resigned_leader_gives_its_lease_back() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::None);
    settle(&mut a, &mut service, at(0));
    let lease = a.lease_at_end(at(0));
    assert!(lease.is_some());
    a.resign();
    assert_eq!(a.role(at(1)), Role::Fenced { view: View(1) });
    assert_eq!(a.lease_at_end(at(1)), lease, "it was not given back yet");
    settle(&mut a, &mut service, at(1));
    assert_eq!(service.snapshot(at(1)).leader, None);
}

#[test]
fn members_of_a_change_are_required_until_its_outcome_is_known() {
    let mut service = service_with(&["a", "b"]);
    let mut a = election("a", History::None);
    settle(&mut a, &mut service, at(0));
    let both = BTreeSet::from([id("a"), id("b")]);
    assert_eq!(a.required_members(at(0)), Some(both.clone()));
    let smaller = a.begin_change(BTreeSet::from([id("a")]), at(1)).unwrap();
    assert_eq!(a.required_members(at(1)), Some(both.clone()), "it may fail");
    let larger = a.begin_change(BTreeSet::from([id("a"), id("b"), id("c")]), at(1)).unwrap();
    assert_eq!(a.required_members(at(1)).unwrap().len(), 3, "it may have been carried out");
    a.end_change(&smaller);
    assert_eq!(a.required_members(at(1)), Some(BTreeSet::from([id("a")])));
    a.end_change(&larger);
    assert_eq!(a.required_members(at(1)).unwrap().len(), 1, "the other change came first");
    assert_eq!(a.required_members(at(27)), None, "the lease is over");
    a.begin_change(both, at(27)).unwrap_err();
}

#[test]
fn member_that_is_about_to_join_is_not_in_sync() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::None);
    settle(&mut a, &mut service, at(0));
    let (own, both) = (BTreeSet::from([id("a")]), BTreeSet::from([id("a"), id("b")]));
    let change = a.begin_change(both.clone(), at(1)).unwrap();
    assert_eq!(a.required_members(at(1)).as_ref(), Some(&both));
    assert_eq!(a.in_sync_members(at(1)), Some(&own));
    a.end_change(&change);
    assert_eq!(a.in_sync_members(at(1)), Some(&both));
    assert_eq!(a.in_sync_members(at(27)), None, "the lease is over");
}

#[test]
fn unknown_changes_are_bounded() {
    let mut service = service_with(&["a"]);
    let mut a = election("a", History::None);
    settle(&mut a, &mut service, at(0));
    let mut with = |n: usize| a.begin_change(BTreeSet::from([id(&n.to_string())]), at(0));
    (0..16).for_each(|n| drop(with(n).unwrap()));
    with(16).unwrap_err();
    with(3).unwrap();
}

#[test]
fn lease_durations_are_checked() {
    for bad in [Duration::ZERO, Duration::from_millis(999), Duration::from_secs(3601)] {
        Timing::new(bad).unwrap_err();
    }
    assert_eq!(Timing::new(TTL).unwrap().margin, Duration::from_millis(300));
}

fn run(seeds: std::ops::Range<u64>, fault: Fault) -> Vec<(u64, Outcome)> {
    seeds.map(|seed| (seed, Cluster::new(seed, fault).run(3000))).collect()
}

#[test]
fn never_two_leaders_and_none_without_acknowledged_changes() {
    let outcomes = run(0..150, Fault::None);
    for (seed, outcome) in &outcomes {
        assert_eq!(outcome.violation, None, "seed {seed}: {outcome:?}");
    }
    let sum = |of: fn(&Outcome) -> usize| outcomes.iter().map(|(_, each)| of(each)).sum::<usize>();
    // The runs are of use only if leaders change, sets change and changes are acknowledged.
    assert!(sum(|outcome| outcome.leaders) > 150 * 3);
    assert!(sum(|outcome| outcome.set_changes) > 150 * 3);
    assert!(sum(|outcome| outcome.acknowledged) > 150 * 100);
}

#[test]
fn model_finds_a_leader_without_margin() {
    assert!(run(0..150, Fault::NoMargin).iter().any(|(_, outcome)| outcome.violation.is_some()));
}

#[test]
fn model_finds_an_acknowledgement_before_the_change() {
    let outcomes = run(0..20, Fault::AcknowledgesBeforeChange);
    assert!(outcomes.iter().any(|(_, outcome)| outcome.violation.is_some()));
}

#[test]
fn model_finds_that_unknown_changes_are_ignored() {
    let outcomes = run(0..150, Fault::IgnoresUnknownChanges);
    assert!(outcomes.iter().any(|(_, outcome)| outcome.violation.is_some()));
}
