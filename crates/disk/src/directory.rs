//! The directory: its lock, its identity file, and the names of its extents.

use std::{
    io,
    path::{Path, PathBuf},
    process,
    sync::Arc,
};

use crate::{
    error::{Error, Result},
    extent::Extent,
    file_system::{File, FileSystem, Lock, Mode, is_full, read_exact, unit, write_all},
    format::{
        UNIT_MIN,
        identity::{Identity, IdentityRefusal},
    },
};

const IDENTITY: &str = "identity";
const IDENTITY_NEW: &str = "identity.new";
const LOCK: &str = "lock";
const EXTENT: &str = "extent-";

/// The maximum length of an identity file.
const IDENTITY_BYTES_MAX: u64 = 4096;

/// The length of an extent in a directory of at least 16 times this capacity.
pub const EXTENT_BYTES_MAX: u64 = 256 << 20;

/// A directory that this process holds the lock of.
#[derive(Debug)]
pub struct Directory {
    files: Arc<dyn FileSystem>,
    path: PathBuf,
    identity: Identity,
    _lock: Box<dyn Lock>,
}

impl Directory {
    /// Opens a directory for writing. Makes it if it does not exist, with extents of a 16th of the
    /// capacity, 256 MiB at most; an existing one keeps the length of its extents. Gives one extent up
    /// if the file system has no space for the identity file.
    ///
    /// # Errors
    /// If another process has it open, if it holds other files, if a later version made it, if the
    /// capacity is less than one of its extents, and those of the system.
    pub fn open(files: Arc<dyn FileSystem>, path: &Path, capacity: u64) -> Result<Self> {
        files.create_dir(path).map_err(Error::io("make", path))?;
        let lock = lock(&*files, path)?;
        let mut identity = match read_identity(&*files, path)? {
            Some(identity) => identity,
            None => new_identity(&*files, path, capacity)?,
        };
        if capacity < identity.extent_bytes {
            return Err(Error::Invalid(format!(
                "{} is divided into files of {} bytes, and a capacity of {capacity} bytes has room for \
                 none: give it at least {} bytes, or empty it with `mooncake disk wipe`",
                path.display(),
                identity.extent_bytes,
                identity.extent_bytes
            )));
        }
        identity.incarnation += 1;
        let directory = Self { files, path: path.into(), identity, _lock: lock };
        match directory.write_identity() {
            Err(error) if is_full(&error) && directory.give_extent_up()? => {
                directory.write_identity()
            }
            outcome => outcome,
        }
        .map_err(Error::io("write", path.join(IDENTITY)))?;
        Ok(directory)
    }

    fn write_identity(&self) -> io::Result<()> {
        let (new, file) = (self.path.join(IDENTITY_NEW), self.path.join(IDENTITY));
        match self.files.remove(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let open = self.files.open(&new, Mode::Create)?;
        write_all(&*open, self.identity.encode().as_bytes(), 0)?;
        open.sync()?;
        self.files.rename(&new, &file)?;
        self.files.sync_dir(&self.path)
    }

    /// Gives the oldest extent back to a file system that is full, so that the others can be read;
    /// `false` if there is at most one.
    fn give_extent_up(&self) -> Result<bool> {
        let numbers = self.extents()?;
        // One whose head cannot be read has no records that could be.
        let generation =
            |number: &u32| Extent::open(self, *number, false).map_or(0, |extent| extent.generation);
        let Some(oldest) = numbers.iter().min_by_key(|number| generation(number)) else {
            return Ok(false);
        };
        if numbers.len() < 2 {
            return Ok(false);
        }
        let path = self.extent_path(*oldest);
        self.files.remove(&path).map_err(Error::io("remove", &path))?;
        tracing::warn!(
            path = %path.display(),
            "the file system is full: the oldest file of a directory of records was removed"
        );
        Ok(true)
    }

    /// Opens an existing directory to look at it or to empty it; does not change its identity.
    ///
    /// # Errors
    /// If it is no directory of records, and as for [`Self::open`].
    pub fn open_existing(files: Arc<dyn FileSystem>, path: &Path) -> Result<Self> {
        // Before the lock, which would make a file in a directory of something else.
        if read_identity(&*files, path)?.is_none() {
            let why = "it has no identity file".to_owned();
            return Err(Error::Foreign { path: path.into(), why });
        }
        let lock = lock(&*files, path)?;
        let Some(identity) = read_identity(&*files, path)? else {
            let why = "it has no identity file any more".to_owned();
            return Err(Error::Foreign { path: path.into(), why });
        };
        Ok(Self { files, path: path.into(), identity, _lock: lock })
    }

    /// Returns what the directory is.
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns where the directory lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file system.
    pub fn files(&self) -> &dyn FileSystem {
        &*self.files
    }

    /// Returns what addresses, offsets and lengths of reads past the page cache are multiples of: what
    /// the file system reports, or the unit of the directory.
    pub fn direct_alignment(&self) -> u64 {
        let reported = self.files.direct_alignment(&self.path.join(LOCK));
        let unit = self.identity.unit;
        reported.filter(|bytes| bytes.is_power_of_two() && *bytes <= unit).unwrap_or(unit)
    }

    /// Opens a small file of the directory, to try out how it can be read.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn open_identity(&self) -> Result<Arc<dyn File>> {
        let path = self.path.join(IDENTITY);
        self.files.open(&path, Mode::Read).map_err(Error::io("open", path))
    }

    /// Returns the numbers of the extents in order.
    ///
    /// # Errors
    /// Those of the system.
    pub fn extents(&self) -> Result<Vec<u32>> {
        let names = self.files.list(&self.path).map_err(Error::io("list", &self.path))?;
        let mut numbers: Vec<_> = names
            .iter()
            .filter_map(|name| name.strip_prefix(EXTENT)?.parse().ok())
            .filter(|number| names.contains(&extent_name(*number)))
            .collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Returns the path of an extent.
    pub fn extent_path(&self, number: u32) -> PathBuf {
        self.path.join(extent_name(number))
    }

    /// Removes all extents and the identity, so that the directory holds no record any more.
    ///
    /// # Errors
    /// Those of the system.
    pub fn wipe(self) -> Result<()> {
        // The identity goes last: until then a wipe that was interrupted can be done again.
        let extents = self.extents()?.into_iter().map(|number| self.extent_path(number));
        for path in extents.chain([self.path.join(IDENTITY)]) {
            self.files.remove(&path).map_err(Error::io("remove", &path))?;
        }
        self.files.sync_dir(&self.path).map_err(Error::io("sync", &self.path))
    }
}

fn extent_name(number: u32) -> String {
    format!("{EXTENT}{number:06}")
}

fn lock(files: &dyn FileSystem, path: &Path) -> Result<Box<dyn Lock>> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let holder = format!("process {} on {host}\n", process::id());
    let file = path.join(LOCK);
    let locked = files.lock(&file, &holder).map_err(Error::io("lock", file))?;
    locked.map_err(|holder| {
        let holder = if holder.is_empty() { "another process".to_owned() } else { holder };
        Error::InUse { path: path.into(), holder }
    })
}

fn read_identity(files: &dyn FileSystem, path: &Path) -> Result<Option<Identity>> {
    let file = path.join(IDENTITY);
    let read = || -> io::Result<Vec<u8>> {
        let open = files.open(&file, Mode::Read)?;
        let mut bytes = vec![0; open.length()?.min(IDENTITY_BYTES_MAX) as usize];
        read_exact(&*open, &mut bytes, 0)?;
        Ok(bytes)
    };
    let bytes = match read() {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", file)(error)),
    };
    match Identity::decode(&bytes) {
        Ok(identity) => Ok(Some(identity)),
        Err(IdentityRefusal::Newer(what)) => Err(Error::Newer { path: path.into(), what }),
        Err(IdentityRefusal::Damaged(why)) => Err(Error::Foreign { path: path.into(), why }),
    }
}

fn new_identity(files: &dyn FileSystem, path: &Path, capacity: u64) -> Result<Identity> {
    let names = files.list(path).map_err(Error::io("list", path))?;
    let ours = [LOCK, IDENTITY_NEW, "lost+found"];
    if let Some(name) = names.iter().find(|name| !ours.contains(&name.as_str())) {
        let why = format!("it holds other files, as {name}");
        return Err(Error::Foreign { path: path.into(), why });
    }
    let unit = unit(files.direct_alignment(&path.join(LOCK)));
    let extent_bytes = (capacity / 16).min(EXTENT_BYTES_MAX) / unit * unit;
    if extent_bytes < 4 * UNIT_MIN.max(unit) {
        return Err(Error::Invalid(format!(
            "a directory of records needs a capacity of at least {} bytes, not {capacity}",
            16 * 4 * unit
        )));
    }
    let mut id = [0; 16];
    getrandom::fill(&mut id).expect("the system has random numbers");
    Ok(Identity { id, incarnation: 0, features: 0, unit, extent_bytes })
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;
    use crate::file_system::RealFiles;

    fn open(path: &Path) -> Result<Directory> {
        Directory::open(Arc::new(RealFiles), path, 1 << 30)
    }

    #[test]
    fn a_directory_keeps_its_id_and_counts_how_often_it_was_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records");
        let first = open(&path).unwrap().identity().clone();
        let second = open(&path).unwrap().identity().clone();
        assert_eq!((first.id, first.incarnation + 1), (second.id, second.incarnation));
        assert_eq!(first.extent_bytes, 64 << 20);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&path.join(IDENTITY))), (0o700, 0o600));
    }

    #[test]
    fn a_second_holder_is_told_process_and_host_of_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let held = open(folder.path()).unwrap();
        let refusal = open(folder.path()).unwrap_err().to_string();
        assert!(refusal.contains(&format!("process {} on ", process::id())), "{refusal}");
        assert!(refusal.contains("a directory of its own"), "{refusal}");
        drop(held);
        open(folder.path()).unwrap();
    }

    #[test]
    fn foreign_and_later_directories_are_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("photo.jpg"), b"x").unwrap();
        let refusal = open(folder.path()).unwrap_err().to_string();
        assert!(refusal.contains("photo.jpg"), "{refusal}");

        let folder = tempfile::tempdir().unwrap();
        let text = open(folder.path()).unwrap().identity().encode().replace("format 1", "format 9");
        fs::write(folder.path().join(IDENTITY), &text).unwrap();
        let refusal = open(folder.path()).unwrap_err().to_string();
        assert!(refusal.contains("format 9"), "{refusal}");
        assert_eq!(fs::read_to_string(folder.path().join(IDENTITY)).unwrap(), text);
    }

    #[test]
    fn looking_at_a_directory_of_something_else_makes_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = Directory::open_existing(Arc::new(RealFiles), folder.path()).unwrap_err();
        assert!(refusal.to_string().contains("no identity file"), "{refusal}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
