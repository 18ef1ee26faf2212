//! The log on a real disk: written, torn, damaged, failed, and restarted.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{
    ClientId, Clock, Incarnation, KeyRef, Moment, ObjectKey, SegmentId, SystemClock, TenantId,
    Version,
};

use super::{disk::Disk, log_frame::HEADER_BYTES, simulated_disk::SimulatedDisk, *};
use crate::state::{
    Listing, ObjectState, Put, PutOptions, PutRef, Rules, SegmentSpec, Selector, State,
};

const CLIENT: ClientId = ClientId::from_bits(1);

/// A state with its log, as in the service.
#[derive(Debug)]
struct Pool {
    state: Mutex<State>,
    journal: Option<Journal>,
}

impl StateOwner for Pool {
    fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    fn lock_state(&self) -> Result<MutexGuard<'_, State>> {
        Ok(self.state.lock())
    }

    fn now(&self) -> Moment {
        Moment::default()
    }
}

impl Pool {
    fn open(path: &Path) -> Self {
        Self::try_open(path).unwrap()
    }

    fn try_open(path: &Path) -> Result<Self> {
        Self::try_open_on(Directory::lock(path)?, LogSync::Interval(Duration::from_millis(20)))
    }

    fn try_open_on(directory: Directory, sync: LogSync) -> Result<Self> {
        Ok(Self::over(Journal::open(directory, sync)?))
    }

    fn over(found: RecoveredJournal) -> Self {
        let now = Moment::default();
        let (mut state, restored) =
            State::restore(Rules::default(), 1, now, found.image, Duration::ZERO);
        assert_eq!(restored.conflicts, 0);
        state.register(now, CLIENT, "host:1").unwrap();
        let pool = Self { state: Mutex::new(state), journal: Some(found.journal) };
        pool.change(|state| {
            let spec = spec();
            if state.resume(CLIENT, &spec).is_err() {
                state.mount(now, CLIENT, spec).unwrap();
            }
        });
        pool
    }

    fn journal(&self) -> &Journal {
        self.journal.as_ref().unwrap()
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let (result, end) = self.append(change);
        self.journal().wait_durable(end).unwrap();
        result
    }

    /// Changes the state and does not wait for the log. Returns the position behind the change.
    fn append<R>(&self, change: impl FnOnce(&mut State) -> R) -> (R, u64) {
        let mut state = self.state.lock();
        let result = change(&mut state);
        (result, self.journal().append(|into| state.log_mut().take_effects(into)))
    }

    fn put(&self, key: &str) {
        let version = self.change(|state| start_put(state, key));
        let (now, tenant) = (Moment::default(), TenantId::default());
        let put = PutRef { key: key.as_bytes(), version, failed_replicas: &[], checksum: None };
        self.change(|state| state.puts().put_end(now, CLIENT, &tenant, put).unwrap());
    }

    fn remove(&self, key: &str) {
        let (now, tenant) = (Moment::default(), TenantId::default());
        self.change(|state| state.remove(now, &tenant, key.as_bytes(), true).unwrap());
    }

    fn keys(&self) -> Vec<String> {
        let mut listing = Listing::new(TenantId::default(), Selector::All, None, 0);
        while !self.state.lock().list_objects(&mut listing) {}
        let objects = listing.into_page().objects;
        let text = |key: &ObjectKey| String::from_utf8(key.as_bytes().to_vec()).unwrap();
        // Puts in progress are listed, too.
        let complete = objects.iter().filter(|object| object.state == ObjectState::Complete);
        complete.map(|object| text(&object.key)).collect()
    }

    fn log(&self) -> PathBuf {
        let number = self.journal().writer.lock().number;
        self.journal().directory.path_of(&file_name(Kind::Log, number))
    }
}

/// Starts a put. Returns the version of the object.
fn start_put(state: &mut State, key: &str) -> Version {
    let options = PutOptions::default();
    let put = Put {
        key: KeyRef::new(key.as_bytes()).unwrap(),
        length: 100,
        group: b"",
        options: &options,
        is_replacing: true,
        if_version: None,
        request: 0,
    };
    state.puts().put_start(Moment::default(), CLIENT, &TenantId::default(), put).unwrap().version
}

fn spec() -> SegmentSpec {
    SegmentSpec {
        id: SegmentId::from_bits(1),
        incarnation: Incarnation(1),
        name: "host:1".to_owned(),
        endpoint: "host:1".to_owned(),
        base: 1 << 40,
        length: 1 << 20,
        protocol: "tcp".to_owned(),
    }
}

/// Waits for the maintenance thread.
fn eventually(mut holds: impl FnMut() -> bool) {
    let end = SystemClock.now() + Duration::from_secs(30);
    while !holds() {
        assert!(!end.has_passed(SystemClock.now()), "not in time");
        std::thread::yield_now();
    }
}

#[test]
fn durable_changes_survive_any_shutdown() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::open(folder.path());
    pool.put("a");
    pool.put("b");
    pool.remove("a");
    let timeline_id = pool.journal().timeline_id().unwrap();
    drop(pool);
    let pool = Pool::open(folder.path());
    assert_eq!(pool.keys(), ["b"]);
    assert_eq!(pool.journal().timeline_id(), Some(timeline_id), "the timeline continues");
    pool.put("c");
    drop(pool);
    assert_eq!(Pool::open(folder.path()).keys(), ["b", "c"]);
}

#[test]
fn torn_log_keeps_all_whole_frames() {
    let disk = SimulatedDisk::default();
    let open = |disk: &SimulatedDisk| {
        Pool::try_open_on(Directory::on(Arc::new(disk.clone())), LogSync::Always).unwrap()
    };
    let pool = open(&disk);
    let name = file_name(Kind::Log, 1);
    let length = || disk.read(&name).unwrap().len();
    // The length of the log after each put.
    let mut steps = vec![(length(), vec![])];
    for key in ["a", "b", "c"] {
        pool.put(key);
        steps.push((length(), pool.keys()));
    }
    drop(pool);
    let whole = disk.read(&name).unwrap();
    for length in 0..=whole.len() {
        let torn = SimulatedDisk::default();
        torn.create(&name).unwrap().append(&whole[..length]).unwrap();
        let known = steps.iter().rev().find(|(end, _)| *end <= length);
        let known = known.map_or(&[][..], |(_, keys)| keys);
        let pool = open(&torn);
        assert_eq!(pool.keys(), known, "length={length}");
        // The log can be appended to.
        pool.put("z");
        drop(pool);
        assert!(open(&torn).keys().contains(&"z".to_owned()), "length={length}");
    }
}

#[test]
fn refuses_log_damaged_in_middle() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::open(folder.path());
    let path = pool.log();
    for key in ["a", "b", "c"] {
        pool.put(key);
    }
    drop(pool);
    let whole = fs::read(&path).unwrap();
    for at in [HEADER_BYTES + 3, HEADER_BYTES + 9, HEADER_BYTES + 40, whole.len() / 2] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        fs::write(&path, &damaged).unwrap();
        let error = Pool::try_open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(&*path.to_string_lossy()) && error.contains("offset="), "{error}");
        assert_eq!(fs::read(&path).unwrap(), damaged);
    }
    fs::write(&path, &whole).unwrap();
    assert_eq!(Pool::open(folder.path()).keys(), ["a", "b", "c"]);
}

#[test]
fn unsynced_hole_after_reboot_ends_log() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::open(folder.path());
    let path = pool.log();
    pool.put("a");
    let hole = fs::metadata(&path).unwrap().len() as usize;
    pool.put("b");
    pool.put("c");
    let pool_boot = pool.journal().boot;
    drop(pool);
    let mut bytes = fs::read(&path).unwrap();
    // Pages reach the disk in any order: the frames behind the hole are complete.
    bytes[hole..hole + 16].fill(0);
    fs::write(&path, &bytes).unwrap();
    let open = |boot| {
        let directory = Directory::lock(folder.path()).unwrap();
        recovery::recover(&directory, boot, &mut |image, effects| image.replay(effects))
            .map(|found| (found.image, found.may_lack_end))
    };
    open(pool_boot).unwrap_err();
    let (image, may_lack_end) = open([1; 16]).unwrap();
    assert_eq!((image.objects(), may_lack_end), (1, true));
    assert_eq!(fs::metadata(&path).unwrap().len() as usize, hole, "what follows is cut");
}

#[test]
fn snapshot_bounds_log_under_writes() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Arc::new(Pool::open(folder.path()));
    let maintenance = Maintenance::start(&pool).unwrap();
    let first = pool.log();
    for round in 0..5 {
        for key in 0..40 {
            pool.put(&format!("{round}/{key}"));
            if key % 3 == 0 {
                pool.remove(&format!("{round}/{key}"));
            }
            if key == 20 {
                pool.journal().snapshot_requests.request();
            }
        }
        eventually(|| pool.journal().status().snapshots > round);
    }
    assert!(!first.exists(), "logs before a snapshot are removed");
    let keys = pool.keys();
    drop(maintenance);
    drop(pool);
    let pool = Pool::open(folder.path());
    assert_eq!(pool.keys(), keys);
    assert!(pool.journal().status().snapshot_bytes > 0);
}

#[test]
fn failed_log_is_removed_and_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Arc::new(Pool::open(folder.path()));
    pool.put("a");
    let timeline_id = pool.journal().timeline_id();
    // Writes to this file fail, as on a full disk.
    pool.journal().writer.lock().file = Some(Arc::new(File::open("/dev/null").unwrap()));
    pool.put("b");
    let status = pool.journal().status();
    assert!(!status.is_healthy && status.failures == 1 && !status.failure.is_empty());
    assert_eq!(pool.journal().timeline_id(), None);
    assert_eq!(pool.keys(), ["a", "b"], "the master continues");
    assert_eq!(pool.journal().directory.numbers(Kind::Log).unwrap(), [0_u64; 0]);
    let maintenance = Maintenance::start(&pool).unwrap();
    eventually(|| pool.journal().status().is_healthy);
    pool.put("c");
    assert!(
        pool.journal().timeline_id().is_some_and(|new| Some(new) != timeline_id),
        "another history"
    );
    drop(maintenance);
    drop(pool);
    assert_eq!(Pool::open(folder.path()).keys(), ["a", "b", "c"]);
}

#[test]
fn waiting_threads_share_group_commits() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::open(folder.path());
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let pool = &pool;
            scope.spawn(move || {
                for key in 0..25 {
                    pool.put(&format!("{thread}/{key}"));
                }
            });
        }
    });
    let status = pool.journal().status();
    assert!(status.writes <= status.records, "{status:?}");
    assert_eq!(pool.keys().len(), 200);
    drop(pool);
    assert_eq!(Pool::open(folder.path()).keys().len(), 200);
}

#[test]
fn unused_next_file_does_not_end_log() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::open(folder.path());
    pool.put("before");
    let (number, timeline_id) = {
        let writer = pool.journal().writer.lock();
        (writer.next_file, *pool.journal().timeline_id.lock())
    };
    drop(pool.journal().make_file(number, timeline_id, None).unwrap());
    // The master continues with the old file, and is killed.
    pool.put("after");
    drop(pool);
    let pool = Pool::open(folder.path());
    assert_eq!(pool.keys(), ["after", "before"]);
    pool.put("later");
    drop(pool);
    let again = Pool::open(folder.path());
    assert_eq!(again.keys(), ["after", "before", "later"]);
    assert_eq!(*again.journal().timeline_id.lock(), timeline_id, "it is one history");
}

#[test]
fn waits_for_sync_share_one_and_end_at_their_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Arc::new(Pool::open(folder.path()));
    let end = pool.journal().append(|_| 0);
    assert!(pool.journal().synced_position() < end, "written, but not synced");
    assert!(!pool.journal().wait_synced(end, SystemClock.now()), "the deadline has passed");
    let maintenance = Maintenance::start(&pool).unwrap();
    let deadline = SystemClock.now() + Duration::from_secs(30);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(pool.journal().wait_synced(end, deadline)));
        }
    });
    assert!(pool.journal().synced_position() >= end);
    // A broken log holds nothing up.
    pool.journal().writer.lock().file = Some(Arc::new(File::open("/dev/null").unwrap()));
    pool.put("a");
    assert!(pool.journal().wait_synced(u64::MAX, deadline));
    eventually(|| pool.journal().status().is_healthy);
    pool.put("b");
    let end = pool.journal().append(|_| 0);
    assert!(pool.journal().wait_synced(end, deadline));
    assert_ne!(pool.journal().synced_position(), u64::MAX, "the restarted log counts again");
    drop(maintenance);
}

mod confirmations;
mod crash;
mod standby;
mod streaming;
mod versions;
