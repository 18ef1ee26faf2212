//! A standby that follows the log of a leader: catch-up from files and snapshots, frames as they come,
//! damage, answers that wait, and its own snapshots.

use std::{collections::BTreeSet, fs, sync::mpsc, thread, time::Duration};

use super::{
    super::{
        confirmations::StandbyProgress,
        followers::{FollowerId, Newcomer, NextShipment},
        shipping::{has_standbys, tell_leases},
        standby::StandbyLog,
    },
    *,
};

const SYNC: LogSync = LogSync::Interval(Duration::from_millis(20));

const STANDBY: Newcomer<'_> =
    Newcomer { member: "s", address: "", level: level::RecordLevel::PRESENT };

fn open_standby(directory: Directory) -> StandbyLog {
    StandbyLog::open(Arc::new(directory), SYNC).unwrap()
}

fn required(members: &[&str]) -> BTreeSet<String> {
    members.iter().map(|member| (*member).to_owned()).collect()
}

fn confirm(journal: &Journal, id: FollowerId, position: u64, next_frame: u64) {
    journal.confirm_standby(id, StandbyProgress { position, next_frame });
}

/// Hands a standby what it lacks, and attaches it.
fn catch_up(standby: &mut StandbyLog, leader: &Pool) -> FollowerId {
    let journal = leader.journal();
    let (timeline_id, next) = standby.place();
    assert_eq!(journal.timeline_id(), Some(timeline_id));
    let mut source = journal.catch_up(next);
    loop {
        let missed = source.next(&STANDBY).unwrap();
        standby.receive(&missed.bytes).unwrap();
        if let Some((id, position)) = missed.attached {
            confirm(journal, id, position, standby.place().1);
            source.end();
            return id;
        }
    }
}

/// Copies the log of a leader that is not running, which a standby starts with.
fn copy_log(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        if entry.file_name() != "lock" {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

#[test]
fn standby_catches_up_follows_and_takes_over() {
    let (leader_dir, standby_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Pool::open(leader_dir.path()).put("first");
    copy_log(leader_dir.path(), standby_dir.path());
    let leader = Pool::open(leader_dir.path());
    leader.put("missed");
    let mut standby = open_standby(Directory::lock(standby_dir.path()).unwrap());
    let timeline_id = standby.place().0;
    let journal = leader.journal();
    let id = catch_up(&mut standby, &leader);
    assert_eq!(standby.image().objects(), 2);
    journal.require_standbys(&required(&["s"]));

    // An answer waits for the standby.
    let (answered, answers) = mpsc::sync_channel(1);
    thread::scope(|scope| {
        scope.spawn(|| {
            leader.put("followed");
            answered.send(()).unwrap();
        });
        while let NextShipment::Frames(shipment) =
            journal.followers().next(id, Duration::from_secs(10))
        {
            assert!(answers.try_recv().is_err(), "the put was answered before the standby had it");
            assert!(!journal.is_durable(shipment.position));
            assert!(journal.synced_position() < shipment.position, "memory would be reused early");
            standby.receive(&shipment.frames).unwrap();
            let has_all = standby.image().objects() == 3;
            confirm(journal, id, shipment.position, standby.place().1);
            if has_all {
                break;
            }
        }
        answers.recv_timeout(Duration::from_secs(10)).unwrap();
    });
    assert_eq!(standby.place(), (timeline_id, journal.with_writer(|writer| writer.next_frame)));

    drop(standby);
    let heir = Pool::open(standby_dir.path());
    let mut keys = heir.keys();
    keys.sort();
    assert_eq!(keys, ["first", "followed", "missed"]);
}

#[test]
fn leases_that_a_leader_tells_of_hold_after_a_take_over() {
    let (leader_dir, standby_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Pool::open(leader_dir.path()).put("left");
    copy_log(leader_dir.path(), standby_dir.path());
    let leader = Pool::open(leader_dir.path());
    leader.put("read");
    let mut standby = open_standby(Directory::lock(standby_dir.path()).unwrap());
    let (journal, tenant) = (leader.journal(), TenantId::default());
    let at = |seconds| Moment::from_boot(Duration::from_secs(seconds));
    assert!(!has_standbys(journal));
    let id = catch_up(&mut standby, &leader);
    assert!(has_standbys(journal));
    let mut tell = |seconds| {
        let lease = Duration::from_secs(10);
        tell_leases(journal, &leader.state.lock().log_mut().take_lease_notes(lease));
        let NextShipment::Leases(notes) = journal.followers().next(id, Duration::ZERO) else {
            panic!("no notes")
        };
        standby.receive_leases(at(seconds), &notes);
    };
    tell(0);
    leader.state.lock().probe(at(20), &tenant, b"read", true);
    tell(20);
    let image = standby.lead(true).unwrap().image;
    let (mut state, _) = State::restore(Rules::default(), 1, at(21), image, Duration::ZERO);
    state.register(at(21), CLIENT, "host:1").unwrap();
    state.resume(CLIENT, &spec()).unwrap();
    let is_leased =
        |key: &[u8]| !state.view_object(at(21), &tenant, key).unwrap().lease_left.is_zero();
    assert!(is_leased(b"read") && !is_leased(b"left"));
}

#[test]
fn damaged_frame_is_refused_and_sent_again() {
    let (leader_dir, standby_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Pool::open(leader_dir.path()).put("first");
    copy_log(leader_dir.path(), standby_dir.path());
    let leader = Pool::open(leader_dir.path());
    leader.put("second");
    let mut standby = open_standby(Directory::lock(standby_dir.path()).unwrap());
    let place = standby.place();
    let sound = leader.journal().catch_up(place.1).next(&STANDBY).unwrap().bytes;
    for at in 0..sound.len() {
        let mut damaged = sound.clone();
        damaged[at] ^= 0x10;
        standby.receive(&damaged).unwrap_err();
        assert_eq!((standby.place(), standby.image().objects()), (place, 1), "at={at}");
    }
    standby.receive(&sound).unwrap();
    standby.receive(&sound).unwrap_err();
    assert_eq!(standby.image().objects(), 2);
    drop(standby);
    assert_eq!(Pool::open(standby_dir.path()).keys().len(), 2);
}

/// Takes a snapshot of the leader's state.
fn take_snapshot(leader: &Pool) {
    let journal = leader.journal();
    let mut snapshot = Snapshot::prepare(journal, None).unwrap();
    snapshot.begin(journal, &leader.state.lock(), Moment::default());
    while !snapshot.slice(&leader.state.lock(), 100) {}
    snapshot.finish(journal, Moment::default()).unwrap();
}

#[test]
fn standby_that_is_too_far_behind_gets_snapshot() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let leader = Pool::open(folders[0].path());
    leader.put("first");
    let journal = leader.journal();
    assert!(
        journal.catch_up(1).is_possible().unwrap()
            && journal.catch_up(journal.end_frame()).is_possible().unwrap()
    );
    assert!(!journal.catch_up(journal.end_frame() + 1).is_possible().unwrap());
    take_snapshot(&leader);
    assert!(!journal.catch_up(1).is_possible().unwrap());
    journal.catch_up(1).next(&STANDBY).unwrap_err();
    leader.put("later");

    let (timeline_id, number) =
        (journal.timeline_id().unwrap(), journal.snapshots().newest().unwrap().unwrap());
    let receive = |standby: &mut StandbyLog, flipped: Option<usize>| {
        let mut incoming = standby.receive_snapshot(timeline_id, number).unwrap();
        let mut bytes = journal.snapshots().read(number, 0).unwrap();
        assert_eq!(journal.snapshots().read(number, bytes.len() as u64).unwrap(), [0; 0]);
        if let Some(at) = flipped {
            bytes[at] ^= 0x10;
        }
        // In parts that end anywhere.
        bytes.chunks(7).try_for_each(|part| incoming.append(part)).unwrap();
        standby.adopt_snapshot(incoming)
    };
    let mut standby = open_standby(Directory::lock(folders[1].path()).unwrap());
    let snapshot_bytes = journal.snapshots().read(number, 0).unwrap().len();
    for at in (HEADER_BYTES..snapshot_bytes).step_by(5) {
        receive(&mut standby, Some(at)).unwrap_err();
        assert!(standby.is_empty(), "nothing is left of a damaged snapshot");
    }
    receive(&mut standby, None).unwrap();
    assert_eq!(standby.image().objects(), 1);
    catch_up(&mut standby, &leader);
    assert_eq!(standby.image().objects(), 2);
    drop(leader);
    let mut keys = Pool::over(standby.lead(true).unwrap()).keys();
    keys.sort();
    assert_eq!(keys, ["first", "later"]);
}

#[test]
fn long_log_of_a_standby_becomes_a_snapshot() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let leader = Pool::open(folders[0].path());
    let mut standby = open_standby(Directory::lock(folders[1].path()).unwrap());
    standby.begin_anew(leader.journal().timeline_id().unwrap()).unwrap();
    for key in ["a", "b", "c"] {
        leader.put(key);
    }
    leader.remove("b");
    catch_up(&mut standby, &leader);
    assert!(standby.begin_compaction().unwrap().is_none(), "it is short");
    let compaction = standby.compact().unwrap();
    // Frames go on meanwhile.
    leader.put("d");
    catch_up(&mut standby, &leader);
    standby.end_compaction(compaction.run().unwrap());
    leader.put("e");
    catch_up(&mut standby, &leader);
    let place = standby.place();
    drop((standby, compaction));
    let standby = open_standby(Directory::lock(folders[1].path()).unwrap());
    assert_eq!((standby.place(), standby.image().objects()), (place, 4));
    let mut keys = Pool::over(standby.lead(true).unwrap()).keys();
    keys.sort();
    assert_eq!(keys, ["a", "c", "d", "e"]);
}

#[test]
fn compaction_that_is_cancelled_leaves_the_files() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let leader = Pool::open(folders[0].path());
    let mut standby = open_standby(Directory::lock(folders[1].path()).unwrap());
    standby.begin_anew(leader.journal().timeline_id().unwrap()).unwrap();
    leader.put("a");
    catch_up(&mut standby, &leader);
    let compaction = standby.compact().unwrap();
    standby.cancel_compaction();
    compaction.run().unwrap_err();
    assert_eq!(Pool::over(standby.lead(true).unwrap()).keys(), ["a"]);
}

#[test]
fn position_is_confirmed_across_change_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let leader = Pool::open(folder.path());
    let journal = leader.journal();
    let mut source = journal.catch_up(1);
    let (id, position) = source.next(&STANDBY).unwrap().attached.unwrap();
    source.end();
    confirm(journal, id, position, 1);
    let mut snapshot = Snapshot::prepare(journal, None).unwrap();
    // The next file begins right behind effects that are not written.
    let end = {
        let mut state = leader.state.lock();
        start_put(&mut state, "key");
        let end = journal.append(|into| state.log_mut().take_effects(into));
        snapshot.begin(journal, &state, Moment::default());
        end
    };
    journal.require_standbys(&required(&["s"]));
    journal.wait_written(end);
    assert!(!journal.is_durable(end));
    while let NextShipment::Frames(shipment) = journal.followers().next(id, Duration::ZERO) {
        confirm(journal, id, shipment.position, 1);
    }
    assert!(journal.is_durable(end));
}

#[test]
fn leadership_passes_along_and_every_standby_follows() {
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    Pool::open(folders[0].path()).put("a");
    for folder in &folders[1..] {
        copy_log(folders[0].path(), folder.path());
    }
    let open = |at: usize| open_standby(Directory::lock(folders[at].path()).unwrap());
    let (mut second, mut third) = (open(1), open(2));
    let leader = Pool::open(folders[0].path());
    leader.put("b");
    leader.remove("a");
    catch_up(&mut second, &leader);
    catch_up(&mut third, &leader);
    drop(leader);

    let leader = Pool::over(second.lead(true).unwrap());
    assert_eq!(leader.keys(), ["b"]);
    leader.put("c");
    catch_up(&mut third, &leader);
    drop(leader);

    let leader = Pool::over(third.lead(true).unwrap());
    leader.put("d");
    let expected = ["b", "c", "d"];
    // The first leader had nothing that the others lack, and follows.
    let mut first = open(0);
    catch_up(&mut first, &leader);
    assert_eq!(first.image().objects(), 3);
    drop(leader);
    for pool in [Pool::over(first.lead(true).unwrap()), Pool::open(folders[2].path())] {
        let mut keys = pool.keys();
        keys.sort();
        assert_eq!(keys, expected);
    }
}

#[test]
fn standby_that_loses_power_keeps_what_it_synced() {
    let leader =
        Pool::try_open_on(Directory::on(Arc::new(SimulatedDisk::default())), SYNC).unwrap();
    let journal = leader.journal();
    for survives in [0, 1] {
        let disk = SimulatedDisk::default();
        let open = || open_standby(Directory::on(Arc::new(disk.clone())));
        let mut standby = open();
        // An empty log takes the leader's timeline with the first file.
        standby.begin_anew(journal.timeline_id().unwrap()).unwrap();
        leader.put("synced");
        catch_up(&mut standby, &leader);
        let point = standby.sync_point().unwrap();
        point.sync().unwrap();
        standby.end_sync(&point);
        drop(point);
        leader.put("later");
        catch_up(&mut standby, &leader);
        drop(standby);
        disk.lose_power(&mut |below| survives.min(below - 1));
        let mut standby = open();
        assert!((1..=2).contains(&standby.image().objects()));
        catch_up(&mut standby, &leader);
        let heir = Pool::over(standby.lead(true).unwrap());
        assert_eq!(heir.keys().len(), 2);
    }
}

#[test]
fn changes_that_were_not_applied_are_read_from_the_log() {
    let (leader_dir, standby_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Pool::open(leader_dir.path()).put("first");
    copy_log(leader_dir.path(), standby_dir.path());
    let leader = Pool::open(leader_dir.path());
    leader.put("second");
    let mut standby = open_standby(Directory::lock(standby_dir.path()).unwrap());
    let missed = leader.journal().catch_up(standby.place().1).next(&STANDBY).unwrap();
    let accepted = standby.accept(&missed.bytes).unwrap();
    drop(accepted);
    assert!(standby.is_broken() && standby.image().objects() == 1);
    standby.accept(&[]).unwrap_err();
    standby.mend().unwrap();
    assert_eq!(standby.image().objects(), 2);
    assert!(standby.accept(&[]).is_ok());
}
