//! The state directory: its lock and its files.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
};

use mooncake_base::{Error, ErrorCode, Result};

use super::frame::Kind;

/// The lock file: its lock marks the directory as in use.
const LOCK: &str = "lock";
/// The name of an unfinished snapshot.
const UNFINISHED: &str = "snapshot.new";

/// A locked state directory. The lock is held until this is dropped.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    _lock: File,
}

impl Directory {
    /// Creates the directory if it does not exist, and locks it.
    ///
    /// # Errors
    /// The directory cannot be created or written to, or another master has locked it.
    pub(crate) fn lock(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).map_err(|source| file_error("cannot be made", path, source))?;
        let lock = path.join(LOCK);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock)
            .map_err(|source| file_error("cannot be written to", path, source))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: file }),
            Err(TryLockError::WouldBlock) => Err(Error::new(
                ErrorCode::PERSISTENT_FAIL,
                "another master uses the state directory; give each master its own by --state_dir",
            )
            .with("state_dir", path.display())),
            Err(TryLockError::Error(source)) => Err(file_error("cannot be locked", path, source)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of a file.
    pub(super) fn file(&self, kind: Kind, number: u64) -> PathBuf {
        let name = match kind {
            Kind::Log => "log",
            Kind::Snapshot => "snapshot",
        };
        self.path.join(format!("{name}-{number:016}"))
    }

    /// Returns the path of an unfinished snapshot.
    pub(super) fn unfinished(&self) -> PathBuf {
        self.path.join(UNFINISHED)
    }

    /// Returns the numbers of the files of a kind in ascending order.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn numbers(&self, kind: Kind) -> Result<Vec<u64>> {
        let list = || -> io::Result<Vec<u64>> {
            let mut numbers = Vec::new();
            for entry in fs::read_dir(&self.path)? {
                let name = entry?.file_name();
                let number = name
                    .to_str()
                    .and_then(|name| name.rsplit_once('-'))
                    .and_then(|(_, digits)| digits.parse().ok().filter(|_| digits.len() == 16));
                numbers.extend(number.filter(|&number| {
                    self.file(kind, number).file_name() == Some(name.as_os_str())
                }));
            }
            numbers.sort_unstable();
            Ok(numbers)
        };
        list().map_err(|source| file_error("cannot be read", &self.path, source))
    }

    /// Removes the files that a complete snapshot with this number replaces.
    pub(super) fn remove_before(&self, number: u64) -> Result<()> {
        for kind in [Kind::Log, Kind::Snapshot] {
            for old in self.numbers(kind)?.into_iter().filter(|old| *old < number) {
                let path = self.file(kind, old);
                fs::remove_file(&path)
                    .map_err(|source| file_error("cannot be removed", &path, source))?;
            }
        }
        // Remove the unfinished snapshot left by a crash. No snapshot is being written at this
        // point.
        let unfinished = self.path.join(UNFINISHED);
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(file_error("cannot be removed", &unfinished, error))
            }
            _ => Ok(()),
        }
    }

    /// Removes all logs and snapshots.
    pub(super) fn remove_all(&self) -> Result<()> {
        self.remove_before(u64::MAX)
    }

    /// Syncs the directory, so that created and renamed files survive a crash of the machine.
    pub(super) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
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
            fs::write(directory.file(Kind::Log, number), "").unwrap();
        }
        fs::write(directory.file(Kind::Snapshot, 2), "").unwrap();
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
