//! Lease services: one suite over real etcd and Redis servers, and over a fake Kubernetes API. Where a
//! server is not installed its tests count as ignored.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

mod kubernetes_api;
mod proxy;
mod suite;

use std::{process::ExitCode, sync::Arc, thread, time::Duration};

use libtest_mimic::Arguments;
use mooncake_base::{Clock, Endpoint, Moment, SystemClock, requirement::trial};
use mooncake_election::{
    Basis, Bid, ClusterId, Election, Elector, InSyncSet, LeaderAddress, LeaseService, MemberId,
    OwnerToken, Role, Snapshot, Timing, View,
    etcd::EtcdLease,
    kubernetes::{ApiServer, KubernetesLease, LeaderLabel},
    redis::RedisLease,
    rules::History,
};
use mooncake_kv_client::{
    real_server::{RealServer, etcd, missing, redis},
    redis::{RedisAddress, RedisLogin},
};

use self::{kubernetes_api::KubernetesApi, proxy::Proxy};

/// The shortest lease that etcd grants with its usual timing of elections.
const TTL: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let no_etcd = missing("etcd", "etcd-server");
    let no_redis = missing("redis-server", "redis-server");
    let trials = vec![
        trial(no_etcd.clone(), "etcd_grants_one_lease", etcd_grants_one_lease),
        trial(no_etcd.clone(), "etcd_watch_survives_compaction", etcd_watch_survives_compaction),
        trial(
            no_etcd,
            "cut_off_leader_stops_before_the_next",
            cut_off_leader_stops_before_the_next,
        ),
        trial(no_redis.clone(), "redis_grants_one_lease", redis_grants_one_lease),
        trial(no_redis.clone(), "redis_uses_login_and_database", redis_uses_login_and_database),
        trial(no_redis, "emptied_redis_elects_nobody", emptied_redis_elects_nobody),
        trial(None, "kubernetes_grants_one_lease", kubernetes_grants_one_lease),
        trial(None, "kubernetes_is_reached_over_tls", kubernetes_is_reached_over_tls),
        trial(
            None,
            "kubernetes_watch_lasts_as_long_as_the_lease",
            kubernetes_watch_lasts_as_long_as_the_lease,
        ),
        trial(
            None,
            "kubernetes_watch_goes_on_from_an_old_version",
            kubernetes_watch_goes_on_from_an_old_version,
        ),
        trial(None, "pod_of_the_leader_has_a_label", pod_of_the_leader_has_a_label),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(20)
}

fn at(port: u16) -> Endpoint {
    Endpoint::new("127.0.0.1", port)
}

fn etcd_lease(ports: &[u16], cluster: &str) -> Arc<dyn LeaseService> {
    let members: Vec<_> = ports.iter().map(|port| at(*port)).collect();
    Arc::new(EtcdLease::new(&members, &ClusterId::new(cluster).unwrap(), TTL).unwrap())
}

fn redis_lease(address: &str, login: &RedisLogin, cluster: &str) -> Arc<dyn LeaseService> {
    let address = RedisAddress::parse(address, login).unwrap();
    Arc::new(RedisLease::new(address, &ClusterId::new(cluster).unwrap(), TTL))
}

fn etcd_grants_one_lease() {
    let server = RealServer::start("etcd", etcd, &[]);
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // A dead member is skipped.
    suite::run(&|cluster| etcd_lease(&[dead, server.port], cluster));
}

fn redis_grants_one_lease() {
    let server = RealServer::start("redis-server", redis, &[]);
    let address = at(server.port).to_string();
    suite::run(&|cluster| redis_lease(&address, &RedisLogin::default(), cluster));
}

fn kubernetes_grants_one_lease() {
    let api = KubernetesApi::start();
    suite::run(&|cluster| {
        let server = ApiServer::new(&api.url(), "default", None, None).unwrap();
        let name = cluster.replace('_', "-");
        Arc::new(KubernetesLease::new(server, &name, TTL).unwrap())
    });
}

fn kubernetes_is_reached_over_tls() {
    let api = KubernetesApi::start_with_tls("let me in");
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    let lease = |certificates| {
        let server = ApiServer::new(&api.url(), "default", certificates, Some(token.clone()));
        KubernetesLease::new(server.unwrap(), "l", TTL).unwrap()
    };
    let trusting = lease(Some(kubernetes_api::CERTIFICATE));
    let error = trusting.read(soon()).unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
    std::fs::write(&token, "wrong").unwrap();
    let error = trusting.read(soon()).unwrap_err();
    assert!(error.to_string().contains("401"), "{error}");
    std::fs::write(&token, "let me in\n").unwrap();
    assert_eq!(trusting.read(soon()).unwrap().leader, None);
    // A server whose certificate is not trusted gets no token.
    lease(None).read(soon()).unwrap_err();
    ApiServer::new(&api.url(), "default", Some(b"no certificate"), None).unwrap_err();
    ApiServer::new(&api.url(), "Bad/Name", None, None).unwrap_err();
}

/// Watches for a while in which nothing changes. Returns the number of requests of that.
fn watch_quietly(api: &KubernetesApi, lease: &KubernetesLease, seen: &Snapshot) -> usize {
    let (before, end) = (api.requests(), SystemClock.now() + Duration::from_millis(200));
    let unchanged = lease.watch(seen, end).unwrap();
    assert!(unchanged.has_values_of(seen), "{unchanged:?}");
    assert!(end.has_passed(SystemClock.now()), "the watch ends early, and is repeated at once");
    api.requests() - before
}

fn kubernetes_watch_lasts_as_long_as_the_lease() {
    let api = KubernetesApi::start();
    let lease = |ttl| {
        let server = ApiServer::new(&api.url(), "default", None, None).unwrap();
        KubernetesLease::new(server, "l", ttl).unwrap()
    };
    suite::founder(&lease(TTL * 10));
    // A client does not know the time of the masters.
    let client = lease(Duration::from_millis(10));
    let seen = client.read(soon()).unwrap();
    assert_eq!(watch_quietly(&api, &client, &seen), 2, "a watch and a read");
}

fn kubernetes_watch_goes_on_from_an_old_version() {
    let api = KubernetesApi::start();
    let server = ApiServer::new(&api.url(), "default", None, None).unwrap();
    let lease = KubernetesLease::new(server, "l", TTL).unwrap();
    let held = suite::founder(&lease);
    lease.release(&held, soon()).unwrap();
    let seen = lease.read(soon()).unwrap();
    for status in [200, 410] {
        api.forget_changes(status);
        assert_eq!(watch_quietly(&api, &lease, &seen), 3, "two watches and a read");
    }
    let before = api.requests();
    let set = seen.in_sync.clone().unwrap();
    let bid = Bid { owner: OwnerToken::new(8), basis: Basis::Member, set };
    let changed = thread::scope(|scope| {
        let watching = scope.spawn(|| lease.watch(&seen, soon()).unwrap());
        let begin = SystemClock.now();
        while api.requests() < before + 2 {
            assert!(SystemClock.now().since(begin) < Duration::from_secs(20), "it does not watch");
            thread::yield_now();
        }
        lease.acquire(&bid, soon()).unwrap();
        watching.join().unwrap()
    });
    assert_eq!(changed.leader.unwrap().owner, Some(bid.owner));
}

fn pod_of_the_leader_has_a_label() {
    const LABEL: &str = "mooncake.io/store-role";
    let api = KubernetesApi::start();
    // An earlier process of the pod was killed while it led.
    api.add_pod("m-0", (LABEL, "leader"));
    let server = || ApiServer::new(&api.url(), "default", None, None).unwrap();
    LeaderLabel::start(server(), "Bad/Name").unwrap_err();
    let label = LeaderLabel::start(server(), "m-0").unwrap();
    api.wait_for_pod("m-0", |labels, _| labels.is_empty());
    label.set(true);
    api.wait_for_pod("m-0", |labels, _| labels.get(LABEL).is_some_and(|role| role == "leader"));
    // A change that is refused is repeated.
    api.refuse_pods(Some(403));
    label.set(false);
    api.wait_for_pod("m-0", |labels, refused| refused > 0 && !labels.is_empty());
    api.refuse_pods(None);
    api.wait_for_pod("m-0", |labels, _| labels.is_empty());
    label.set(true);
    api.wait_for_pod("m-0", |labels, _| !labels.is_empty());
    label.close();
    api.wait_for_pod("m-0", |labels, _| labels.is_empty());
    label.set(true);
    drop(label);
    api.wait_for_pod("m-0", |labels, _| labels.is_empty());
    // The end of the process waits for no server that refuses.
    api.add_pod("m-1", (LABEL, "leader"));
    api.refuse_pods(Some(500));
    drop(LeaderLabel::start(server(), "m-1").unwrap());
    assert!(api.refuse_pods(None) > 0);
}

fn etcd_watch_survives_compaction() {
    let server = RealServer::start("etcd", etcd, &[]);
    let lease = etcd_lease(&[server.port], "c");
    let seen = lease.read(soon()).unwrap();
    let held = suite::founder(&*lease);
    suite::compact(server.port, &*lease);
    // The watch begins at a revision that is gone; the answer has the values all the same.
    let changed = lease.watch(&seen, soon()).unwrap();
    assert_eq!(changed.leader.unwrap().view, held.view);
}

fn redis_uses_login_and_database() {
    let server = RealServer::start("redis-server", redis, &["--requirepass", "open sesame"]);
    let address = at(server.port).to_string();
    let error = redis_lease(&address, &RedisLogin::default(), "c").read(soon()).unwrap_err();
    assert!(error.to_string().contains("NOAUTH"), "{error}");
    let login = RedisLogin { password: "open sesame".into(), database: 3, ..RedisLogin::default() };
    let lease = redis_lease(&address, &login, "c");
    suite::founder(&*lease);
    assert!(lease.read(soon()).unwrap().leader.is_some());
    let other = RedisLogin { database: 0, ..login };
    assert_eq!(redis_lease(&address, &other, "c").read(soon()).unwrap().leader, None);
}

fn election(member: &str, history: History, seed: u64) -> Election {
    let member = MemberId::new(member).unwrap();
    Election::new(Timing::new(TTL).unwrap(), member, history, seed, SystemClock.now())
}

fn leads(role: Role) -> bool {
    matches!(role, Role::Leader { .. })
}

fn cut_off_leader_stops_before_the_next() {
    let server = RealServer::start("etcd", etcd, &[]);
    let proxy = Proxy::start(server.port);
    let direct = etcd_lease(&[server.port], "c");
    let set = InSyncSet {
        members: ["a", "b"].map(|id| MemberId::new(id).unwrap()).into(),
        ..InSyncSet::lost(View(0))
    };
    direct.mark_lost(&set, soon()).unwrap();
    let a =
        Elector::start(etcd_lease(&[proxy.port()], "c"), election("a", History::None, 1)).unwrap();
    assert!(leads(a.wait_for_role(leads, soon())));
    a.announce("host-a:1", soon()).unwrap();
    let b =
        Elector::start(etcd_lease(&[server.port], "c"), election("b", History::None, 2)).unwrap();
    let Role::Leader { view: first, .. } = a.role() else { panic!("it is cut off later") };
    proxy.cut();
    // Both roles are read one after the other: that of the new leader first.
    let begin = SystemClock.now();
    loop {
        let role = b.wait_for_role(leads, SystemClock.now() + Duration::from_millis(20));
        if leads(role) {
            assert!(!leads(a.role()), "two leaders at a time");
            assert!(!a.validity().is_valid(first, SystemClock.now()));
            break;
        }
        assert!(SystemClock.now().since(begin) < Duration::from_secs(60), "{role:?}");
    }
    b.announce("host-b:1", soon()).unwrap();
    let leader = direct.read(soon()).unwrap().leader.unwrap();
    assert_eq!(leader.address, LeaderAddress::Serving("host-b:1".into()));
    assert!(leader.view > first);
    a.announce("host-a:1", soon()).unwrap_err();
    // The former leader comes back as a follower, and leads again when the other one resigns.
    proxy.heal();
    a.restart(History::UpTo(first));
    let follows = |role| matches!(role, Role::Follower(_));
    assert!(follows(a.wait_for_role(follows, soon())));
    drop(b);
    let role = a.wait_for_role(leads, soon());
    assert!(matches!(role, Role::Leader { view, .. } if view > leader.view), "{role:?}");
}

fn emptied_redis_elects_nobody() {
    let server = RealServer::start("redis-server", redis, &[]);
    let address = at(server.port).to_string();
    let connect = || redis_lease(&address, &RedisLogin::default(), "c");
    let a = Elector::start(connect(), election("a", History::None, 1)).unwrap();
    assert!(leads(a.wait_for_role(leads, soon())), "it founds the cluster");
    suite::empty(server.port);
    let is_fenced = |role| matches!(role, Role::Fenced { .. });
    let Role::Fenced { view } = a.wait_for_role(is_fenced, soon()) else { panic!("it leads on") };
    a.restart(History::UpTo(view));
    let has_no_set =
        |role| matches!(role, Role::Follower(mooncake_election::rules::Obstacle::SetLost));
    assert!(has_no_set(a.wait_for_role(has_no_set, soon())));
    a.force();
    let role = a.wait_for_role(leads, soon());
    assert!(matches!(role, Role::Leader { view: forced, .. } if forced > view), "{role:?}");
}
