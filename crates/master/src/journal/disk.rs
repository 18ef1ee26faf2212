//! The file system under the log: a small seam, so that tests can lose power and hang.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read as _, Seek as _, Write as _},
    path::PathBuf,
    sync::Arc,
};

/// A directory of files that are written from their beginning to their end.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Returns the names of all files.
    ///
    /// # Errors
    /// The directory cannot be read.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Reads a whole file.
    ///
    /// # Errors
    /// The file cannot be read.
    fn read(&self, name: &str) -> io::Result<Vec<u8>>;

    /// Reads a part of a file: so many bytes from `offset` on, or fewer at its end.
    ///
    /// # Errors
    /// The file cannot be read.
    fn read_part(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>>;

    /// Creates a file, or empties it if it exists.
    ///
    /// # Errors
    /// The file cannot be created.
    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>>;

    /// Opens a file that exists, to shorten or sync it.
    ///
    /// # Errors
    /// The file cannot be opened.
    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>>;

    /// Renames a file; one of the new name is replaced.
    ///
    /// # Errors
    /// The file cannot be renamed.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The file cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all creations, renames and removals survive a crash of the machine.
    ///
    /// # Errors
    /// The directory cannot be synced.
    fn sync_directory(&self) -> io::Result<()>;

    /// Returns the id of the present boot of the machine.
    fn boot_id(&self) -> [u8; 16];
}

/// An open file. Every method may take as long as the disk does.
pub trait LogFile: fmt::Debug + Send + Sync {
    /// Appends bytes, which then survive the end of the process.
    ///
    /// # Errors
    /// The bytes, or some of them, cannot be written.
    fn append(&self, bytes: &[u8]) -> io::Result<()>;

    /// Cuts the file to a length.
    ///
    /// # Errors
    /// The file cannot be truncated.
    fn truncate(&self, length: u64) -> io::Result<()>;

    /// Makes all bytes and the length of the file survive a crash of the machine.
    ///
    /// # Errors
    /// The file cannot be synced.
    fn sync(&self) -> io::Result<()>;
}

/// A directory of the operating system.
#[derive(Debug)]
pub(super) struct SystemDisk {
    pub(super) path: PathBuf,
}

impl Disk for SystemDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            // A name that is not UTF-8 is not ours.
            names.extend(entry?.file_name().into_string());
        }
        Ok(names)
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        fs::read(self.path.join(name))
    }

    fn read_part(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut file = File::open(self.path.join(name))?;
        file.seek(io::SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        file.take(length as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let path = self.path.join(name);
        Ok(Arc::new(File::options().write(true).create(true).truncate(true).open(path)?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(File::options().write(true).open(self.path.join(name))?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync_directory(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// A random id if the system has none: then every start counts as one after a crash.
    fn boot_id(&self) -> [u8; 16] {
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        match u128::from_str_radix(&digits, 16) {
            Ok(id) => id.to_le_bytes(),
            Err(_) => mooncake_base::SegmentId::random().to_bytes(),
        }
    }
}

impl LogFile for File {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        let mut file = self;
        file.write_all(bytes)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}
