//! Moves whose target is lost or leaves: the source is kept until another replica surely exists.

use super::*;
use crate::state::tests::{
    recovery::Log,
    tasks::{drain, on, segment_status, two},
};

const C: ClientId = ClientId::from_bits(3);

impl Pool {
    fn join_c(&mut self) {
        self.state.register(self.now, C, "host-c:1").unwrap();
        let segment = SegmentSpec {
            name: "host-c:1".into(),
            endpoint: "host-c:1".into(),
            ..spec(B, 3, 1, 4)
        };
        self.state.mount(self.now, C, segment).unwrap();
    }

    /// Lets time pass in which these clients send heartbeats.
    fn pass(&mut self, seconds: u64, clients: &[ClientId]) {
        for _ in 0..seconds {
            self.now = self.now + Duration::from_secs(1);
            for &client in clients {
                self.state.heartbeat(self.now, client);
            }
            self.advance_all();
        }
    }

    /// Carries out the tasks of a client.
    fn carry_out(&mut self, client: ClientId) {
        for work in self.fetch(client) {
            self.done(client, &work).unwrap();
        }
    }
}

#[test]
fn source_is_kept_until_target_was_heard_of() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.shift("k", "host-a:1", "host-b:1").unwrap();
    pool.carry_out(A);
    assert_eq!(pool.status(id).0, TaskStatus::Processing);
    pool.pass(2, &[A]);
    assert_eq!(pool.holders("k"), ["host-a:1", "host-b:1"]);
    assert_eq!(pool.state.tasks().tasks_underway(), (0, 1));
    pool.pass(1, &[A, B]);
    assert_eq!(pool.status(id).0, TaskStatus::Success);
    assert_eq!(pool.holders("k"), ["host-b:1"]);
}

#[test]
fn move_keeps_source_when_target_is_lost() {
    // The master notices that the target died before or after the report, or by its silence.
    for noticed in ["before", "after", "by silence"] {
        let mut pool = two();
        pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
        let id = pool.shift("k", "host-a:1", "host-b:1").unwrap();
        let work = pool.fetch(A).remove(0);
        if noticed == "before" {
            pool.state.suspect(pool.now, B);
        }
        pool.done(A, &work).unwrap();
        if noticed == "after" {
            pool.state.suspect(pool.now, B);
        }
        for _ in 0..60 {
            pool.pass(1, &[A]);
            pool.carry_out(A);
            assert!(pool.holders("k").contains(&"host-a:1".into()), "{noticed}");
        }
        assert_eq!(pool.holders("k"), ["host-a:1"], "{noticed}");
        assert_eq!(pool.status(id).0, TaskStatus::Failed, "{noticed}");
    }
}

#[test]
fn drain_moves_elsewhere_when_target_leaves_or_dies() {
    for how in ["unregister", "unmount", "drain", "silence"] {
        let mut pool = two();
        pool.join_c();
        for index in 0..6 {
            pool.put_with(&format!("k{index}"), 1000, false, &on("host-a:1")).unwrap();
        }
        let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
        pool.advance_all();
        while pool.state.tasks().has_tasks(pool.now, A) {
            pool.carry_out(A);
        }
        let at_b = |pool: &mut Pool| {
            (0..6).filter(|i| pool.holders(&format!("k{i}")).contains(&"host-b:1".into())).count()
        };
        assert!(at_b(&mut pool) > 0, "B is the target of some");
        assert_eq!(pool.state.job(job).unwrap().succeeded, 0, "nothing is known of the targets");
        match how {
            "unregister" => drop(pool.state.unregister(pool.now, B)),
            "unmount" => {
                let grace = Duration::from_secs(10);
                pool.state.unmount(pool.now, B, SegmentId::from_bits(2), grace).unwrap();
            }
            "drain" => drop(drain(&mut pool, &["host-b:1"], &["host-c:1"]).unwrap()),
            _ => {}
        }
        let alive: &[ClientId] = if how == "silence" { &[A, C] } else { &[A, B, C] };
        for _ in 0..100 {
            pool.pass(1, alive);
            for client in [A, B, C] {
                if pool.state.registration(client) != 0 && alive.contains(&client) {
                    pool.carry_out(client);
                }
            }
        }
        for index in 0..6 {
            assert_eq!(pool.holders(&format!("k{index}")), ["host-c:1"], "{how}");
        }
        let view = pool.state.job(job).unwrap();
        assert_eq!((view.status, view.succeeded), (JobStatus::Succeeded, 6), "{how}: {view:?}");
    }
}

/// The client frees the memory at the end of the grace, whatever the job did meanwhile.
#[test]
fn segment_leaves_after_its_grace_although_it_is_drained() {
    for how in ["succeeds", "is cancelled"] {
        for restarts in [false, true] {
            let mut pool = two();
            let mut log = Log::begin(&mut pool);
            let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
            let grace = Duration::from_secs(20);
            pool.state.unmount(pool.now, A, SegmentId::from_bits(1), grace).unwrap();
            match how {
                "succeeds" => pool.pass(5, &[A, B]),
                _ => pool.state.tasks().cancel_job(pool.now, job).unwrap(),
            }
            assert!(pool.state.job(job).unwrap().status.is_over());
            log.check(&mut pool);
            if restarts {
                pool.state = log.restart(pool.now, &Rules::default());
                for (client, segment) in [(A, 1), (B, 2)] {
                    pool.state.register(pool.now, client, "host:1").unwrap();
                    pool.state.resume(client, &spec(client, segment, 1, 4)).unwrap();
                }
            }
            assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::GracefullyUnmounting);
            pool.pass(21, &[A, B]);
            let left = pool.state.list_segments();
            let left: Vec<_> = left.iter().map(|view| view.spec.name.as_str()).collect();
            assert_eq!(left, ["host-b:1"], "{how}, restarts: {restarts}");
        }
    }
}

#[test]
fn drain_keeps_last_copy_whose_target_dies() {
    let mut pool = two();
    for index in 0..6 {
        pool.put_with(&format!("k{index}"), 1000, false, &on("host-a:1")).unwrap();
    }
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.advance_all();
    while pool.state.tasks().has_tasks(pool.now, A) {
        pool.carry_out(A);
    }
    for _ in 0..60 {
        pool.pass(1, &[A]);
        pool.carry_out(A);
    }
    for index in 0..6 {
        assert_eq!(pool.holders(&format!("k{index}")), ["host-a:1"]);
    }
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded, view.moved_bytes), (JobStatus::Failed, 0, 0));
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Ok);
}

#[test]
fn moves_that_wait_for_sign_of_life_hold_up_no_others() {
    let mut pool = two();
    for index in 0..50 {
        pool.put_with(&format!("k{index}"), 1000, false, &on("host-a:1")).unwrap();
    }
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.advance_all();
    let mut moved = 0;
    while pool.state.tasks().has_tasks(pool.now, A) {
        let work = pool.fetch(A);
        assert!(work.len() <= 2, "no more at once than may be");
        moved += work.len();
        work.iter().for_each(|work| pool.done(A, work).unwrap());
    }
    assert_eq!((moved, pool.state.job(job).unwrap().active), (50, 50));
    pool.pass(3, &[A, B]);
    assert_eq!(pool.state.job(job).unwrap().status, JobStatus::Succeeded);
}

/// Moves "k" from one segment to the other. Returns the id of the new replica.
fn move_k(pool: &mut Pool, from: (ClientId, &str), to: &str) -> ReplicaId {
    let id = pool.shift("k", from.1, to).unwrap();
    let work = pool.fetch(from.0).remove(0);
    pool.done(from.0, &work).unwrap();
    pool.pass(2, &[A, B]);
    assert_eq!(pool.status(id).0, TaskStatus::Success);
    work.targets[0].replica
}

#[test]
fn replica_ids_of_object_differ_when_ordinals_start_anew() {
    let mut pool = two();
    let mut log = Log::begin(&mut pool);
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    pool.state.tasks.resume_ordinals(u32::MAX);
    let first = move_k(&mut pool, (A, "host-a:1"), "host-b:1");
    log.check(&mut pool);
    // As many other replicas are made as there are ordinals.
    pool.state.tasks.resume_ordinals(u32::MAX);
    let second = move_k(&mut pool, (B, "host-b:1"), "host-a:1");
    assert_ne!(first, second);
    let version = pool.locate("k", false, false).unwrap().version;
    assert!(!pool.state.verify(&pool.tenant, b"k", version, first), "it is at another place");
    log.check(&mut pool);
    pool.state = log.restart(pool.now, &Rules::default());
    pool.state.register(pool.now, A, "host-a:1").unwrap();
    pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
    assert_eq!(pool.holders("k"), ["host-a:1"]);
}

#[test]
fn ids_of_many_moves_differ() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let first = move_k(&mut pool, (A, "host-a:1"), "host-b:1");
    pool.state.tasks.resume_ordinals(first.0 as u32 + (1 << 16));
    assert_ne!(first, move_k(&mut pool, (B, "host-b:1"), "host-a:1"));
}

#[test]
fn earlier_log_with_equal_ordinals_keeps_the_moved_replica() {
    let place =
        |segment, offset| LoggedCopy { segment: SegmentNumber(segment), offset, ordinal: 300 };
    let value = Value {
        tenant: "",
        key: b"k",
        length: 1,
        copies: [place(1, 0)].into_iter().collect(),
        data_type: 0,
        is_hard_pinned: false,
        group: b"",
        pin: LoggedPin::None,
    };
    let object = ObjectName { tenant: "", key: b"k", version: 5 };
    let mut effects = Vec::new();
    Effect::ObjectSnapshot { version: 5, value, checksum: None, pin: None }.encode(&mut effects);
    Effect::ReplicaAdded { object: object.clone(), copy: place(2, 64) }.encode(&mut effects);
    Effect::ReplicaDropped { object, ordinal: 300 }.encode(&mut effects);
    let mut image = Image::default();
    image.replay(&effects).unwrap();
    let (_, _, object) = image.objects.iter().next().unwrap();
    assert_eq!(object.copies[..], [place(2, 64)]);
}

#[test]
fn writer_from_before_upgrade_names_former_replica_ids() {
    let mut pool = two();
    let both = PutOptions { replicas: 2, ..PutOptions::default() };
    let started = pool.start_with(A, "k", MIB, false, &both).unwrap();
    let former = [ReplicaId(started.version.0 << 16 | 1)];
    let put =
        PutRef { key: b"k", version: started.version, failed_replicas: &former, checksum: None };
    pool.state.puts().put_end(pool.now, A, &pool.tenant, put).unwrap();
    let found = pool.locate("k", false, false).unwrap();
    assert_eq!(found.places[..], [started.places[0]]);
}
