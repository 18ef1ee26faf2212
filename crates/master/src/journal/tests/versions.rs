//! Logs of earlier versions of the master: a file of each format that is read is test data.

use super::{
    super::{
        followers::Newcomer,
        level::{self, RecordLevel},
    },
    *,
};

/// Returns the folder with a state directory in a format.
fn data(version: u32) -> PathBuf {
    let name = format!("tests/data/log-version-{version}");
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Writes a state directory with a snapshot, and with a log behind it.
fn write_example(path: &Path) {
    let pool = Pool::try_open_on(Directory::lock(path).unwrap(), LogSync::Always).unwrap();
    for key in ["a", "b"] {
        pool.put(key);
    }
    pool.remove("a");
    let mut snapshot = Snapshot::prepare(pool.journal(), None).unwrap();
    snapshot.begin(pool.journal(), &pool.state.lock(), Moment::default());
    while !snapshot.slice(&pool.state.lock(), 1) {
        snapshot.write(pool.journal()).unwrap();
    }
    snapshot.finish(pool.journal(), Moment::default()).unwrap();
    pool.put("c");
}

fn copy(from: &Path, to: &Path) {
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

#[test]
fn log_of_each_known_version_is_read() {
    let versions = [log_frame::VERSION];
    for version in versions {
        let data = data(version);
        if !data.exists() {
            write_example(&data);
            panic!("{} was missing and has been written: commit it", data.display());
        }
        let folder = tempfile::tempdir().unwrap();
        copy(&data, folder.path());
        assert_eq!(Pool::open(folder.path()).keys(), ["b", "c"], "version {version}");
    }
}

#[test]
fn log_of_unknown_version_is_refused_with_remedy() {
    let folder = tempfile::tempdir().unwrap();
    write_example(folder.path());
    let path = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let path = path.into_iter().find(|path| path.to_string_lossy().contains("log-")).unwrap();
    let written = fs::read(&path).unwrap();
    for version in [1, log_frame::VERSION + 1] {
        let mut bytes = written.clone();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let error = Pool::try_open(folder.path()).unwrap_err().to_string();
        let folder = folder.path().display();
        for part in [
            format!("file={}", path.display()),
            format!("file_version={version}"),
            format!("our_version={}", log_frame::VERSION),
            format!("mv {folder} {folder}.old"),
        ] {
            assert!(error.contains(&part), "{part}: {error}");
        }
        assert_eq!(fs::read(&path).unwrap(), bytes, "the file is left as it is");
    }
}

#[test]
fn earlier_master_can_read_log_until_it_is_finalized() {
    let fresh = tempfile::tempdir().unwrap();
    let level_of = |folder: &Path| Pool::open(folder).journal().level().get();
    assert_eq!(level_of(fresh.path()), RecordLevel::PRESENT);
    assert_eq!(level_of(fresh.path()), RecordLevel::PRESENT);

    let folder = tempfile::tempdir().unwrap();
    copy(&data(log_frame::VERSION), folder.path());
    assert_eq!(level_of(folder.path()), RecordLevel::FIRST);
    let pool = Pool::open(folder.path());
    let needs_disks = || level::check(Some(pool.journal()), RecordLevel::DISKS, "a directory");
    let error = needs_disks().unwrap_err().to_string();
    assert!(error.contains("mooncake finalize"), "{error}");
    // A standby of an earlier version still follows.
    let (member, address) = ("s", "host:1");
    let standby = |level| Newcomer { member, address, level };
    pool.journal().followers().attach(&standby(RecordLevel::FIRST), 0);
    let error = level::finalize(pool.journal()).unwrap_err().to_string();
    assert!(error.contains("install this version there first") && error.contains(address));
    needs_disks().unwrap_err();
    pool.journal().followers().attach(&standby(RecordLevel::PRESENT), 0);
    level::finalize(pool.journal()).unwrap();
    needs_disks().unwrap();
    drop(pool);
    assert_eq!(level_of(folder.path()), RecordLevel::PRESENT);
    level::check(None, RecordLevel::PRESENT, "no log").unwrap();

    fs::write(folder.path().join("level"), (RecordLevel::PRESENT.0 + 1).to_string()).unwrap();
    let error = Pool::try_open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("a later master"), "{error}");
    fs::write(folder.path().join("level"), "x").unwrap();
    Pool::try_open(folder.path()).unwrap_err();
}
