//! Claims that hold for every lease service.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    thread,
    time::Duration,
};

use mooncake_base::{Clock, SystemClock};
use mooncake_election::{
    Acquisition, Basis, Bid, Change, Hold, InSyncSet, LeaderAddress, Lease, LeaseService, MemberId,
    OwnerToken, View,
};

use crate::{TTL, soon};

/// Makes a client of the service for a cluster.
pub(crate) type Connect<'a> = dyn Fn(&str) -> Arc<dyn LeaseService> + Sync + 'a;

pub(crate) fn run(connect: &Connect<'_>) {
    one_attempt_wins(&*connect("one_attempt"));
    leader_is_announced_and_released(&*connect("announced"));
    set_is_changed_only_by_its_leader(&*connect("set_changed"));
    only_members_of_the_set_win(&*connect("members"));
    lost_set_is_marked_once(&*connect("marked"));
    lease_ends_without_renewal(connect);
    clusters_are_separate(connect);
    watch_tells_changes(connect);
    closed_service_ends_its_watch(connect);
}

fn token(number: u64) -> OwnerToken {
    OwnerToken::new(number)
}

fn id(name: &str) -> MemberId {
    MemberId::new(name).unwrap()
}

fn set(members: &[&str]) -> InSyncSet {
    let members = members.iter().map(|name| id(name)).collect();
    InSyncSet { members, ..InSyncSet::lost(View(0)) }
}

fn bid(owner: u64, basis: Basis, set: &InSyncSet) -> Bid {
    Bid { owner: token(owner), basis, set: set.clone() }
}

fn acquire(lease: &dyn LeaseService, bid: &Bid) -> Option<Lease> {
    match lease.acquire(bid, soon()).unwrap() {
        Acquisition::Acquired(view) => Some(bid.lease(view)),
        Acquisition::Refused => None,
    }
}

/// The lease of the founder of a cluster, `m`.
pub(crate) fn founder(lease: &dyn LeaseService) -> Lease {
    acquire(lease, &bid(7, Basis::Founder, &InSyncSet::founded_by(&id("m")))).unwrap()
}

fn one_attempt_wins(lease: &dyn LeaseService) {
    assert_eq!(lease.read(soon()).unwrap().leader, None);
    let won = founder(lease);
    let founded = InSyncSet::founded_by(&id("m"));
    for basis in [Basis::Member, Basis::Founder, Basis::Forced] {
        assert_eq!(acquire(lease, &bid(8, basis, &founded)), None);
    }
    let found = lease.read(soon()).unwrap();
    let leader = found.leader.unwrap();
    assert_eq!((leader.owner, leader.view), (Some(token(7)), won.view));
    assert_eq!(leader.address, LeaderAddress::Warming);
    assert_eq!(found.in_sync, Some(founded.clone()));
    assert_eq!(lease.renew(&won, soon()).unwrap(), Hold::Held);
    for other in [Lease { owner: token(8), ..won }, Lease { view: View(won.view.0 + 1), ..won }] {
        assert_eq!(lease.renew(&other, soon()).unwrap(), Hold::Lost);
        assert_eq!(lease.announce(&other, "other:1", soon()).unwrap(), Hold::Lost);
        lease.release(&other, soon()).unwrap();
    }
    assert_eq!(lease.renew(&won, soon()).unwrap(), Hold::Held);
    lease.release(&won, soon()).unwrap();
    assert_eq!(lease.renew(&won, soon()).unwrap(), Hold::Lost);
    let next = acquire(lease, &bid(9, Basis::Member, &founded)).unwrap();
    assert!(next.view > won.view, "{next:?} after {won:?}");
    lease.release(&next, soon()).unwrap();
    // Views rise also where the service counts anew.
    let based = InSyncSet { number: 5, view_base: 1 << 40, ..founded };
    let forced = acquire(lease, &bid(10, Basis::Forced, &based)).unwrap();
    assert!(forced.view.0 > 1 << 40);
    assert_eq!(lease.read(soon()).unwrap().leader.unwrap().view, forced.view);
    assert_eq!(lease.renew(&forced, soon()).unwrap(), Hold::Held);
    lease.release(&forced, soon()).unwrap();
}

fn leader_is_announced_and_released(lease: &dyn LeaseService) {
    let won = founder(lease);
    assert_eq!(lease.announce(&won, "10.0.0.1:50051", soon()).unwrap(), Hold::Held);
    let leader = lease.read(soon()).unwrap().leader.unwrap();
    assert_eq!(leader.address, LeaderAddress::Serving("10.0.0.1:50051".into()));
    assert_eq!((leader.owner, leader.view), (Some(won.owner), won.view));
    assert_eq!(lease.renew(&won, soon()).unwrap(), Hold::Held);
    lease.release(&won, soon()).unwrap();
    assert_eq!(lease.read(soon()).unwrap().leader, None);
    assert!(lease.read(soon()).unwrap().in_sync.is_some(), "the set outlives the leader");
}

fn set_is_changed_only_by_its_leader(lease: &dyn LeaseService) {
    let won = founder(lease);
    let first = InSyncSet::founded_by(&id("m"));
    let second = first.changed(won.view, BTreeSet::from([id("m"), id("n")])).unwrap();
    let third = second.changed(won.view, BTreeSet::from([id("n")])).unwrap();
    let change = |lease_of: &Lease, from: &InSyncSet, to: &InSyncSet| {
        let change = Change { lease: *lease_of, from: from.clone(), to: to.clone() };
        lease.change_in_sync(&change, soon()).unwrap()
    };
    assert_eq!(change(&won, &second, &third), Hold::Lost, "another set is there");
    assert_eq!(change(&Lease { owner: token(8), ..won }, &first, &second), Hold::Lost);
    assert_eq!(change(&won, &first, &second), Hold::Held);
    assert_eq!(change(&won, &first, &third), Hold::Lost, "a late repetition");
    assert_eq!(lease.read(soon()).unwrap().in_sync, Some(second.clone()));
    lease.release(&won, soon()).unwrap();
    assert_eq!(change(&won, &second, &third), Hold::Lost, "the lease is over");
    assert_eq!(lease.read(soon()).unwrap().in_sync, Some(second));
}

fn only_members_of_the_set_win(lease: &dyn LeaseService) {
    let now = set(&["a", "b"]);
    lease.mark_lost(&now, soon()).unwrap();
    let old = set(&["a", "b", "c"]);
    assert_eq!(acquire(lease, &bid(1, Basis::Member, &old)), None, "the set was another one");
    assert_eq!(acquire(lease, &bid(2, Basis::Founder, &old)), None, "there is a set");
    assert_eq!(lease.read(soon()).unwrap().in_sync, Some(now.clone()));
    let won = acquire(lease, &bid(3, Basis::Member, &now)).unwrap();
    lease.release(&won, soon()).unwrap();
}

fn lost_set_is_marked_once(lease: &dyn LeaseService) {
    assert_eq!(lease.read(soon()).unwrap().in_sync, None);
    for view in [5, 6] {
        lease.mark_lost(&InSyncSet::lost(View(view)), soon()).unwrap();
        assert_eq!(lease.read(soon()).unwrap().in_sync, Some(InSyncSet::lost(View(5))));
    }
}

fn lease_ends_without_renewal(connect: &Connect<'_>) {
    let (leader, next) = (connect("ends"), connect("ends"));
    let won = founder(&*leader);
    let begin = SystemClock.now();
    let founded = InSyncSet::founded_by(&id("m"));
    let mut seen = next.read(soon()).unwrap();
    let later = loop {
        match acquire(&*next, &bid(8, Basis::Member, &founded)) {
            Some(lease) => break lease,
            // The end of a lease is told by a watch, or by time.
            None => seen = next.watch(&seen, SystemClock.now() + TTL).unwrap(),
        }
        assert!(SystemClock.now().since(begin) < Duration::from_secs(60), "it does not end");
    };
    // The lease began before `begin` was read, by the time of one call at most.
    assert!(SystemClock.now().since(begin) > TTL * 8 / 10, "it ended early");
    assert!(later.view > won.view);
    assert_eq!(leader.renew(&won, soon()).unwrap(), Hold::Lost);
    next.release(&later, soon()).unwrap();
}

fn clusters_are_separate(connect: &Connect<'_>) {
    let (one, two) = (connect("cluster.1"), connect("cluster.2"));
    founder(&*one);
    assert_eq!(two.read(soon()).unwrap().leader, None);
    founder(&*two);
}

fn watch_tells_changes(connect: &Connect<'_>) {
    let (leader, watcher) = (connect("watched"), connect("watched"));
    let won = founder(&*leader);
    leader.announce(&won, "a:1", soon()).unwrap();
    let seen = watcher.read(soon()).unwrap();
    // Nothing changes until the deadline.
    let same = watcher.watch(&seen, SystemClock.now() + Duration::from_millis(50)).unwrap();
    assert_eq!(same.leader, seen.leader);
    let waiting = thread::spawn(move || watcher.watch(&seen, soon()).unwrap());
    leader.announce(&won, "b:1", soon()).unwrap();
    let changed = waiting.join().unwrap().leader.unwrap();
    assert_eq!(changed.address, LeaderAddress::Serving("b:1".into()));
    leader.release(&won, soon()).unwrap();
}

fn closed_service_ends_its_watch(connect: &Connect<'_>) {
    let lease = connect("closed");
    let seen = lease.read(soon()).unwrap();
    let watcher = Arc::clone(&lease);
    let begin = SystemClock.now();
    let deadline = begin + Duration::from_secs(100);
    let waiting = thread::spawn(move || watcher.watch(&seen, deadline));
    lease.close();
    // An error, or the values of before if the watch ended first.
    drop(waiting.join().unwrap());
    assert!(SystemClock.now().since(begin) < Duration::from_secs(50));
    lease.read(soon()).unwrap_err();
}

/// Removes the history of etcd up to now.
pub(crate) fn compact(port: u16, lease: &dyn LeaseService) {
    let revision = lease.read(soon()).unwrap().mark;
    let body = format!("{{\"revision\":\"{revision}\",\"physical\":true}}");
    let head = format!(
        "POST /v3/kv/compaction HTTP/1.1\r\nHost: e\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let answer = exchange(port, &(head + &body));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Removes everything from Redis.
pub(crate) fn empty(port: u16) {
    assert!(exchange(port, "FLUSHALL\r\nQUIT\r\n").starts_with("+OK"));
}

fn exchange(port: u16, text: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
