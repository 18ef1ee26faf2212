//! A machine that loses power, and a disk that hangs.

use std::io;

use super::{
    super::hanging_disk::{HangingDisk, forward},
    *,
};

const INTERVAL: LogSync = LogSync::Interval(Duration::from_millis(20));

impl Pool {
    fn try_start(disk: &SimulatedDisk, sync: LogSync) -> Result<Self> {
        Self::try_open_on(Directory::on(Arc::new(disk.clone())), sync)
    }

    fn start(disk: &SimulatedDisk, sync: LogSync) -> Self {
        Self::try_start(disk, sync).unwrap()
    }

    pub(super) fn take_snapshot(&self) -> Result<()> {
        self.take_snapshot_on(None)
    }

    fn take_snapshot_on(&self, new_timeline_id: Option<[u8; 16]>) -> Result<()> {
        let mut snapshot = Snapshot::prepare(self.journal(), new_timeline_id)?;
        snapshot.begin(self.journal(), &self.state.lock(), Moment::default());
        snapshot.write(self.journal())?;
        while !snapshot.slice(&self.state.lock(), 1) {
            snapshot.write(self.journal())?;
        }
        snapshot.finish(self.journal(), Moment::default())
    }
}

/// Nothing survives but what was synced.
fn lose_all(disk: &SimulatedDisk) {
    disk.lose_power(&mut |_| 0);
}

/// A few numbers that look random.
fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |end| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % end.max(1)
    }
}

#[test]
fn restarted_log_without_syncs_withholds_no_memory() {
    for (sync, may_wait) in [(LogSync::Never, false), (INTERVAL, true)] {
        let pool = Pool::start(&SimulatedDisk::default(), sync);
        pool.put("a");
        pool.take_snapshot_on(Some([7; 16])).unwrap();
        // Nothing would raise the position again without syncs.
        assert_eq!(pool.journal().synced_position() < u64::MAX, may_wait, "{sync:?}");
    }
}

#[test]
fn synced_log_survives_kill_and_loss_of_power() {
    for sync in [LogSync::Always, INTERVAL] {
        let disk = SimulatedDisk::default();
        let pool = Pool::start(&disk, sync);
        pool.put("a");
        // A change that was written when the process was killed, but not synced.
        let end = pool.journal().append(|into| {
            let mut effects = Vec::new();
            let count = {
                let state = &mut *pool.state.lock();
                let (now, tenant) = (Moment::default(), TenantId::default());
                state.remove(now, &tenant, b"a", true).unwrap();
                state.log_mut().take_effects(&mut effects)
            };
            into.extend(effects);
            count
        });
        pool.journal().wait_written(end);
        drop(pool);
        let pool = Pool::start(&disk, sync);
        assert_eq!(pool.keys(), [""; 0], "{sync:?}");
        pool.put("b");
        pool.journal().sync_now();
        drop(pool);
        lose_all(&disk);
        assert_eq!(Pool::start(&disk, sync).keys(), ["b"], "{sync:?}");
    }
}

#[test]
fn removed_file_of_log_does_not_come_back() {
    // The second process cuts the end of the first, with a whole file, and writes frames with the
    // same numbers.
    for seed in 0..50 {
        let disk = SimulatedDisk::default();
        let pool = Pool::start(&disk, INTERVAL);
        pool.put("a");
        pool.journal().sync_now();
        pool.put("x");
        drop(pool);
        drop(Pool::start(&disk, LogSync::Never));
        disk.lose_power(&mut numbers(seed));
        let pool = Pool::start(&disk, LogSync::Always);
        pool.put("b");
        let keys = pool.keys();
        drop(pool);
        disk.lose_power(&mut numbers(seed + 1000));
        assert_eq!(Pool::start(&disk, LogSync::Always).keys(), keys, "seed={seed}");
    }
}

#[test]
fn damaged_end_of_older_log_is_refused_after_reboot() {
    let disk = SimulatedDisk::default();
    let pool = Pool::start(&disk, LogSync::Always);
    pool.put("a");
    let first = file_name(Kind::Log, pool.journal().writer.lock().number);
    drop(pool);
    let pool = Pool::start(&disk, LogSync::Always);
    pool.put("b");
    drop(pool);
    let end = disk.read(&first).unwrap().len() - 1;
    disk.damage(&first, |bytes| bytes[end] ^= 1).unwrap();
    lose_all(&disk);
    let error = Pool::try_start(&disk, LogSync::Always).unwrap_err().to_string();
    assert!(error.contains(&first), "{error}");
    disk.damage(&first, |bytes| bytes[end] ^= 1).unwrap();
    assert_eq!(Pool::start(&disk, LogSync::Always).keys(), ["a", "b"]);
}

#[test]
fn later_log_of_unsynced_end_is_cut() {
    let disk = SimulatedDisk::default();
    let pool = Pool::start(&disk, INTERVAL);
    pool.put("a");
    pool.journal().sync_now();
    pool.put("b");
    let first = file_name(Kind::Log, pool.journal().writer.lock().number);
    let synced = disk.read(&first).unwrap().len();
    // The file is switched as for a snapshot, and pages of the new one reach the disk first.
    let number = pool.journal().writer.lock().next_file;
    let file = pool.journal().make_file(number, *pool.journal().timeline_id.lock(), None);
    pool.journal().queue.lock().continue_in(file.unwrap());
    pool.put("c");
    drop(pool);
    disk.damage(&first, |bytes| bytes.truncate(synced - 10)).unwrap();
    let later = file_name(Kind::Log, number);
    disk.damage(&later, |_| {}).unwrap();
    lose_all(&disk);
    let pool = Pool::start(&disk, INTERVAL);
    assert_eq!(pool.keys(), ["a"]);
    drop(pool);
    assert_eq!(Pool::start(&disk, INTERVAL).keys(), ["a"]);
}

#[test]
fn log_without_sync_starts_anew_after_loss_of_power() {
    let disk = SimulatedDisk::default();
    let pool = Pool::start(&disk, LogSync::Never);
    pool.put("a");
    let timeline_id = pool.journal().timeline_id();
    drop(pool);
    let pool = Pool::start(&disk, LogSync::Never);
    assert_eq!(pool.keys(), ["a"], "a killed process loses nothing");
    pool.take_snapshot().unwrap();
    pool.put("b");
    drop(pool);
    // All of it happens to be on the disk, but nobody can know that.
    disk.lose_power(&mut |end| end - 1);
    let pool = Pool::start(&disk, LogSync::Never);
    assert_eq!(pool.keys(), [""; 0]);
    assert_ne!(pool.journal().timeline_id(), timeline_id);
    drop(pool);
    // A process that syncs makes sure of what it found.
    let pool = Pool::start(&disk, LogSync::Never);
    pool.put("c");
    drop(pool);
    drop(Pool::start(&disk, LogSync::Always));
    lose_all(&disk);
    assert_eq!(Pool::start(&disk, LogSync::Always).keys(), ["c"]);
}

#[test]
fn loss_of_power_under_snapshots_keeps_what_was_synced() {
    for seed in 0..200 {
        let mut below = numbers(seed);
        let disk = SimulatedDisk::default();
        let mut synced = Vec::new();
        for boot in 0..4 {
            let pool = Pool::start(&disk, LogSync::Always);
            let missing = synced.iter().find(|key| !pool.keys().contains(key));
            assert_eq!(missing, None, "seed={seed} boot={boot}");
            for nth in 0..below(6) {
                let key = format!("{boot}/{nth}");
                pool.put(&key);
                synced.push(key);
                if below(3) == 0 {
                    pool.take_snapshot().unwrap();
                }
            }
            drop(pool);
            if below(2) == 0 {
                disk.lose_power(&mut below);
            }
        }
    }
}

#[test]
fn snapshot_of_failed_log_is_not_put_in_place() {
    let disk = SimulatedDisk::default();
    let pool = Pool::start(&disk, INTERVAL);
    pool.put("a");
    let mut snapshot = Snapshot::prepare(pool.journal(), None).unwrap();
    snapshot.begin(pool.journal(), &pool.state.lock(), Moment::default());
    pool.put("b");
    pool.journal().fail(&mut pool.journal().writer.lock(), "failed", io::Error::other("test"));
    assert!(snapshot.slice(&pool.state.lock(), 100));
    snapshot.write(pool.journal()).unwrap();
    snapshot.finish(pool.journal(), Moment::default()).unwrap_err();
    assert_eq!(pool.journal().directory.numbers(Kind::Snapshot).unwrap(), [0_u64; 0]);
    drop(pool);
    assert_eq!(Pool::start(&disk, INTERVAL).keys(), [""; 0]);
}

#[test]
fn log_is_restarted_although_its_old_files_stay() {
    let disk = Arc::new(HangingDisk::default());
    let start = || Pool::try_open_on(Directory::on(disk.clone()), INTERVAL).unwrap();
    let pool = start();
    pool.put("a");
    disk.keep_files(true);
    let error = io::Error::other("test");
    pool.journal().fail(&mut pool.journal().writer.lock(), "failed", error);
    pool.take_snapshot_on(Some([7; 16])).unwrap();
    assert!(pool.journal().status().is_healthy);
    pool.put("b");
    pool.journal().sync_now();
    drop(pool);
    disk.lose_power();
    assert_eq!(start().keys(), ["a", "b"]);
}

/// Memory is reused before the log has its release.
#[test]
fn abandoned_restart_of_log_leaves_no_state() {
    let disk = Arc::new(HangingDisk::default());
    let start = || Pool::try_open_on(Directory::on(disk.clone()), INTERVAL).unwrap();
    let pool = start();
    pool.put("a");
    let error = io::Error::other("test");
    pool.journal().fail(&mut pool.journal().writer.lock(), "failed", error);
    let mut snapshot = Snapshot::prepare(pool.journal(), Some([7; 16])).unwrap();
    snapshot.begin(pool.journal(), &pool.state.lock(), Moment::default());
    assert!(snapshot.slice(&pool.state.lock(), 100));
    disk.forget_names(true);
    snapshot.finish(pool.journal(), Moment::default()).unwrap_err();
    disk.forget_names(false);
    Snapshot::give_up(pool.journal());
    assert_eq!(pool.journal().synced_position(), u64::MAX);
    pool.put("b");
    drop(pool);
    assert_eq!(start().keys(), [""; 0]);
}

#[test]
fn removed_files_leave_no_state_at_any_point() {
    for steps in 0..6 {
        let disk = SimulatedDisk::default();
        let pool = Pool::start(&disk, INTERVAL);
        pool.put("a");
        pool.take_snapshot().unwrap();
        pool.put("b");
        drop(pool);
        let failing = Arc::new(FailingDisk { disk: disk.clone(), left: Mutex::new(steps) });
        let removed = Directory::on(failing).remove_all();
        let is_untouched = steps == 0;
        assert!(removed.is_err() || steps > 2, "steps={steps}");
        let keys = Pool::start(&disk, INTERVAL).keys();
        assert_eq!(keys.is_empty(), !is_untouched, "steps={steps} {keys:?}");
    }
}

#[test]
fn long_queue_is_written_in_frames_that_can_be_read() {
    let disk = SimulatedDisk::default();
    let pool = Pool::start(&disk, INTERVAL);
    let mut end = 0;
    let tenant = TenantId::default();
    let key = vec![b'k'; 60_000];
    // Many changes of one lock of the state, and then many of several.
    for count in [300_u64, 1, 1, 100] {
        end = pool.journal().append(|into| {
            for version in 0..count {
                let object =
                    crate::state::ObjectName { tenant: tenant.as_str(), key: &key, version };
                crate::state::Effect::Dropped { object }.encode(into);
            }
            count
        });
    }
    pool.journal().wait_durable(end).unwrap();
    pool.put("a");
    let log = disk.read(&file_name(Kind::Log, pool.journal().writer.lock().number)).unwrap();
    let (mut at, mut longest) = (HEADER_BYTES, 0);
    while at < log.len() {
        let frame = log_frame::Frame::read(&log[at..]).unwrap();
        longest = longest.max(frame.bytes());
        at += frame.bytes();
    }
    assert!(log.len() > 24_000_000 && longest < 9 << 20, "longest={longest}");
    drop(pool);
    assert_eq!(Pool::start(&disk, INTERVAL).keys(), ["a"]);
}

#[test]
fn large_head_of_snapshot_is_written_in_frames_that_can_be_read() {
    let disk = SimulatedDisk::default();
    let pool = Pool::start(&disk, INTERVAL);
    pool.put("a");
    let (now, tenant, options) = (Moment::default(), TenantId::default(), PutOptions::default());
    // The head has all unfinished puts.
    for number in 0..200_u8 {
        let key = vec![number; 60_000];
        pool.change(|state| {
            let put = Put {
                key: KeyRef::new(&key).unwrap(),
                length: 100,
                group: b"",
                options: &options,
                is_replacing: false,
                if_version: None,
                request: 0,
            };
            state.puts().put_start(now, CLIENT, &tenant, put).unwrap();
        });
    }
    pool.take_snapshot().unwrap();
    let number = pool.journal().writer.lock().number;
    drop(pool);
    let snapshot = disk.read(&file_name(Kind::Snapshot, number)).unwrap();
    let (mut at, mut longest) = (HEADER_BYTES, 0);
    while at < snapshot.len() {
        let frame = log_frame::Frame::read(&snapshot[at..]).unwrap();
        longest = longest.max(frame.bytes());
        at += frame.bytes();
    }
    assert!(snapshot.len() > 12_000_000 && longest < 5 << 20, "longest={longest}");
    assert_eq!(Pool::start(&disk, INTERVAL).keys(), ["a"]);
}

#[test]
fn hanging_disk_stops_no_call_that_needs_no_disk() {
    let disk = Arc::new(HangingDisk::default());
    let pool = Pool::try_open_on(Directory::on(disk.clone()), INTERVAL).unwrap();
    let pool = Arc::new(pool);
    pool.put("a");
    let maintenance = Maintenance::start(&pool).unwrap();
    disk.hang(true);
    std::thread::scope(|scope| {
        let put = scope.spawn(|| pool.put("b"));
        pool.journal().snapshot_requests.request();
        eventually(|| disk.is_hanging());
        eventually(|| pool.journal().writer.try_lock().is_none());
        // Each of these would wait for ever.
        for _ in 0..100 {
            assert!(pool.journal().timeline_id().is_some());
            assert!(pool.keys().contains(&"a".to_owned()));
            let end = pool.journal().append(|_| 0);
            assert!(!pool.journal().wait_synced(end, SystemClock.now()));
        }
        assert!(!put.is_finished());
        disk.hang(false);
    });
    assert!(pool.keys().contains(&"b".to_owned()));
    let end = pool.journal().append(|_| 0);
    assert!(pool.journal().wait_synced(end, SystemClock.now() + Duration::from_secs(30)));
    drop(maintenance);
}

/// A disk on which a number of removals succeed and then none.
#[derive(Debug)]
struct FailingDisk {
    disk: SimulatedDisk,
    left: Mutex<u32>,
}

impl Disk for FailingDisk {
    forward! {
        list() -> io::Result<Vec<String>>;
        read(name: &str) -> io::Result<Vec<u8>>;
        read_part(name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>>;
        create(name: &str) -> io::Result<Arc<dyn LogFile>>;
        open(name: &str) -> io::Result<Arc<dyn LogFile>>;
        rename(from: &str, to: &str) -> io::Result<()>;
        sync_directory() -> io::Result<()>;
        boot_id() -> [u8; 16];
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let left = &mut *self.left.lock();
        *left = left.checked_sub(1).ok_or_else(|| io::Error::other("the process is killed"))?;
        self.disk.remove(name)
    }
}
