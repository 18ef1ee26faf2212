//! The state directory: its lock and its files.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use mooncake_base::{Error, ErrorCode, Result, sync::Mutex};

use super::{
    disk::{Disk, LogFile, SystemDisk},
    log_frame::Kind,
};

/// The lock file: its lock marks the directory as in use.
const LOCK: &str = "lock";
/// The name of an unfinished snapshot.
pub(super) const UNFINISHED: &str = "snapshot.new";
/// The name of a marker that is being made.
const UNFINISHED_MARKER: &str = "marker.new";
/// The content of a marker. A file without content marks its timeline as void.
const MARKER: &[u8] = b"The files of this timeline are in use.\n";

/// A locked state directory. The lock is held until this is dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    disk: Arc<dyn Disk>,
    /// Held while a snapshot is made: its unfinished file has one name.
    snapshots: Mutex<()>,
    _lock: Option<File>,
}

impl Directory {
    /// Creates the directory if it does not exist, and locks it.
    ///
    /// # Errors
    /// The directory cannot be created or written to, or another master has locked it.
    pub(crate) fn lock(path: &Path) -> Result<Self> {
        let unusable = |source: io::Error| {
            let why = "the state directory cannot be used; name a directory that can be created \
                       and written to by --state_dir";
            Error::new(ErrorCode::PERSISTENT_FAIL, why)
                .with("state_dir", path.display())
                .caused_by(source)
        };
        fs::create_dir_all(path).map_err(unusable)?;
        let lock = path.join(LOCK);
        let file = File::options().create(true).truncate(false).write(true).open(&lock);
        let file = file.map_err(unusable)?;
        match file.try_lock() {
            Ok(()) => {
                let disk = Arc::new(SystemDisk { path: path.to_owned() });
                let snapshots = Mutex::default();
                Ok(Self { path: path.to_owned(), disk, snapshots, _lock: Some(file) })
            }
            Err(TryLockError::WouldBlock) => Err(Error::new(
                ErrorCode::PERSISTENT_FAIL,
                "another master uses the state directory; give each master its own by --state_dir",
            )
            .with("state_dir", path.display())),
            Err(TryLockError::Error(source)) => Err(file_error("cannot be locked", path, source)),
        }
    }

    /// Returns a directory on another disk than that of the system. It needs no lock.
    #[cfg(any(test, feature = "test-util"))]
    pub fn on(disk: Arc<dyn Disk>) -> Self {
        let (path, snapshots) = (PathBuf::from("simulated"), Mutex::default());
        Self { path, disk, snapshots, _lock: None }
    }

    /// The lock of the one who makes a snapshot.
    pub(super) const fn snapshots(&self) -> &Mutex<()> {
        &self.snapshots
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Returns the path of a file, for messages.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the numbers of the files of a kind in ascending order.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn numbers(&self, kind: Kind) -> Result<Vec<u64>> {
        let names = self.disk.list();
        let names = names.map_err(|source| file_error("cannot be read", &self.path, source))?;
        let number = |name: &String| {
            let (_, digits) = name.rsplit_once('-')?;
            let number = digits.parse().ok()?;
            (digits.len() == 16 && file_name(kind, number) == *name).then_some(number)
        };
        let mut numbers: Vec<u64> = names.iter().filter_map(number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Reads a part of a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read_part(&self, name: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        let read = self.disk.read_part(name, offset, length);
        read.map_err(|source| file_error("cannot be read", &self.path_of(name), source))
    }

    /// Returns the present boot of the machine, as text.
    pub(crate) fn boot(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.disk.boot_id()))
    }

    /// Returns a small file of the cluster; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read_note(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match self.disk.read(name) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(file_error("cannot be read", &self.path_of(name), source)),
        }
    }

    /// Replaces a small file of the cluster. It survives a crash of the machine when this returns.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write_note(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let unfinished = format!("{name}.new");
        let write = || {
            let file = self.disk.create(&unfinished)?;
            file.append(bytes)?;
            file.sync()?;
            self.disk.rename(&unfinished, name)?;
            self.disk.sync_directory()
        };
        write().map_err(|source| file_error("cannot be written", &self.path_of(name), source))
    }

    /// Opens an existing file.
    pub(super) fn open(&self, name: &str) -> Result<Arc<dyn LogFile>> {
        self.disk
            .open(name)
            .map_err(|source| file_error("cannot be opened", &self.path_of(name), source))
    }

    pub(super) fn remove(&self, name: &str) -> Result<()> {
        self.disk
            .remove(name)
            .map_err(|source| file_error("cannot be removed", &self.path_of(name), source))
    }

    /// Removes the files that a complete snapshot with this number replaces.
    pub(super) fn remove_before(&self, number: u64) -> Result<()> {
        for kind in [Kind::Log, Kind::Snapshot] {
            for old in self.numbers(kind)?.into_iter().filter(|old| *old < number) {
                self.remove(&file_name(kind, old))?;
            }
        }
        self.remove_unfinished()
    }

    /// Removes all logs and snapshots. Whenever the machine or the process ends meanwhile, what is
    /// left is not taken for a state: snapshots go first, and then the first log, without which no
    /// other is read.
    pub(super) fn remove_all(&self) -> Result<()> {
        for number in self.numbers(Kind::Snapshot)? {
            self.remove(&file_name(Kind::Snapshot, number))?;
            self.sync()?;
        }
        for (nth, number) in self.numbers(Kind::Log)?.into_iter().enumerate() {
            self.remove(&file_name(Kind::Log, number))?;
            if nth == 0 {
                self.sync()?;
            }
        }
        self.remove_unfinished()?;
        self.sync()?;
        // Last: until then a void timeline must be known as such.
        self.remove_markers(None)
    }

    /// Returns the open marker of a timeline, which is on the disk then. Emptying it makes all files
    /// of the timeline void, also on a disk without free space.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn mark(&self, timeline_id: [u8; 16]) -> Result<Arc<dyn LogFile>> {
        let name = marker_name(timeline_id);
        let make = || -> io::Result<Arc<dyn LogFile>> {
            if !self.disk.list()?.contains(&name) {
                let file = self.disk.create(UNFINISHED_MARKER)?;
                file.append(MARKER)?;
                file.sync()?;
                // A crash must not leave an empty marker behind.
                self.disk.rename(UNFINISHED_MARKER, &name)?;
                self.disk.sync_directory()?;
            }
            self.disk.open(&name)
        };
        make().map_err(|source| file_error("cannot be written", &self.path_of(&name), source))
    }

    /// Returns whether the files of the timeline are void: they lack changes that were acknowledged.
    ///
    /// # Errors
    /// The marker cannot be read.
    pub(super) fn is_void(&self, timeline_id: [u8; 16]) -> Result<bool> {
        let name = marker_name(timeline_id);
        match self.disk.read(&name) {
            Ok(content) => Ok(content.is_empty()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(file_error("cannot be read", &self.path_of(&name), source)),
        }
    }

    /// Removes the markers of all timelines but one.
    ///
    /// # Errors
    /// A marker cannot be removed.
    pub(super) fn remove_markers(&self, but: Option<[u8; 16]>) -> Result<()> {
        let kept = but.map(marker_name);
        let names = self.disk.list();
        let names = names.map_err(|source| file_error("cannot be read", &self.path, source))?;
        let is_marker =
            |name: &String| name.starts_with(MARKER_PREFIX) && Some(name) != kept.as_ref();
        names.iter().filter(|name| is_marker(name)).try_for_each(|name| self.remove(name))
    }

    /// Removes the unfinished snapshot that a crash left. None is being written now, or it is of no
    /// use any more.
    fn remove_unfinished(&self) -> Result<()> {
        match self.disk.remove(UNFINISHED) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(file_error("cannot be removed", &self.path_of(UNFINISHED), error))
            }
            _ => Ok(()),
        }
    }

    /// Syncs the directory, so that created, renamed and removed files stay so after a crash of the
    /// machine.
    pub(super) fn sync(&self) -> Result<()> {
        self.disk
            .sync_directory()
            .map_err(|source| file_error("cannot be synced", &self.path, source))
    }
}

/// The names of markers begin with this.
const MARKER_PREFIX: &str = "timeline-";

/// Returns the name of the marker of a timeline.
fn marker_name(timeline_id: [u8; 16]) -> String {
    format!("{MARKER_PREFIX}{:032x}", u128::from_be_bytes(timeline_id))
}

/// Returns the name of a file.
pub(super) fn file_name(kind: Kind, number: u64) -> String {
    let name = match kind {
        Kind::Log => "log",
        Kind::Snapshot => "snapshot",
    };
    format!("{name}-{number:016}")
}

/// Returns the error of a failed operation on a file or directory.
pub(super) fn file_error(what: &str, path: &Path, source: io::Error) -> Error {
    Error::new(ErrorCode::PERSISTENT_FAIL, format!("a file or folder of the log {what}"))
        .with("path", path.display())
        .caused_by(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_is_locked_by_one_master() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er");
        let first = Directory::lock(&path).unwrap();
        let error = Directory::lock(&path).unwrap_err();
        assert!(error.to_string().contains("another master"), "{error}");
        drop(first);
        Directory::lock(&path).unwrap();
    }

    #[test]
    fn ignores_foreign_files() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::lock(folder.path()).unwrap();
        for number in [3, 1, 2] {
            fs::write(folder.path().join(file_name(Kind::Log, number)), "").unwrap();
        }
        fs::write(folder.path().join(file_name(Kind::Snapshot, 2)), "").unwrap();
        for name in ["log-1", "log-x", "notes", "snapshot.new"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(directory.numbers(Kind::Log).unwrap(), [1, 2, 3]);
        directory.remove_before(3).unwrap();
        assert_eq!(directory.numbers(Kind::Log).unwrap(), [3]);
        assert_eq!(directory.numbers(Kind::Snapshot).unwrap(), [0_u64; 0]);
        assert!(folder.path().join("notes").exists());
        assert!(!folder.path().join("snapshot.new").exists());
    }
}
