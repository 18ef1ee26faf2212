//! What people ask of a directory that no process uses: its records, whether they hold, to empty it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    directory::Directory,
    error::{Error, Result},
    extent::Extent,
    file_system::RealFiles,
    format::{Name, OwnedName, index::Entry},
    reader::{ARENA_BYTES, ReadMethod, Reader, RecordRead, Verdict},
};

/// The records that are read at the same time.
const BATCH: usize = 256;

/// The threads that read, if there is no ring.
const THREADS: usize = 32;

/// A record as a list shows it.
#[derive(Debug, Clone, Copy)]
pub struct Found<'a> {
    /// What it is called.
    pub name: Name<'a>,
    /// The length of its payload.
    pub length: u64,
    /// The number of its extent.
    pub extent: u32,
    /// Where it lies in the extent.
    pub offset: u64,
    /// Whether its extent is sealed, so that it survives a loss of power.
    pub is_sealed: bool,
}

/// What a check of a whole directory has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The extents.
    pub extents: u64,
    /// The records whose checksums hold.
    pub records: u64,
    /// The payload bytes of these.
    pub bytes: u64,
    /// The records that are listed, but damaged or not readable.
    pub bad: Vec<OwnedName>,
    /// The extents that cannot be read in part or at all.
    pub unreadable: Vec<Unreadable>,
}

/// An extent, and the first error that the system answered to a read of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The file.
    pub path: PathBuf,
    /// The error.
    pub why: String,
}

/// Calls `visit` for each record, also those that a later version of the same object replaces; returns
/// the extents of which records may be missing.
///
/// # Errors
/// If a process uses the directory, if it is none of ours, and those of the system.
pub fn list(path: &Path, mut visit: impl FnMut(Found<'_>)) -> Result<Vec<Unreadable>> {
    let directory = Directory::open_existing(Arc::new(RealFiles), path)?;
    each_extent(&directory, |extent| {
        let is_sealed = extent.is_sealed();
        let visit = |entry: Entry<'_>| {
            let (name, length, offset) = (entry.name, entry.length, entry.offset);
            visit(Found { name, length, extent: extent.number, offset, is_sealed });
        };
        extent.scan(visit).failure.map(|error| error.to_string())
    })
}

/// Reads every record and checks it.
///
/// # Errors
/// The same as for [`list`].
pub fn verify(path: &Path) -> Result<Report> {
    let directory = Directory::open_existing(Arc::new(RealFiles), path)?;
    let reader = Reader::start(
        ReadMethod::Probe,
        THREADS,
        ARENA_BYTES,
        directory.direct_alignment(),
        &directory.open_identity()?,
    )?;
    let mut report = Report::default();
    let unreadable = each_extent(&directory, |extent| {
        let mut listed = Vec::new();
        report.extents += 1;
        let scanned =
            extent.scan(|entry| listed.push((entry.offset, entry.length, entry.name.to_owned())));
        let mut failure = scanned.failure.map(|error| error.to_string());
        for batch in listed.chunks(BATCH) {
            let failed = verify_batch(&reader, extent, batch, &mut report);
            failure = failure.or(failed);
        }
        failure
    })?;
    report.unreadable = unreadable;
    Ok(report)
}

/// The offset, length and name of a record that an extent lists.
type Listed = (u64, u64, OwnedName);

/// Reads a batch of records; returns the first error of the system.
fn verify_batch(
    reader: &Reader,
    extent: &Arc<Extent>,
    batch: &[Listed],
    report: &mut Report,
) -> Option<String> {
    let mut failure = None;
    let entries = batch.iter().map(|(offset, length, name)| Entry {
        offset: *offset,
        length: *length,
        name: name.borrow(),
    });
    let (inside, outside): (Vec<_>, Vec<_>) = entries.partition(|entry| extent.may_hold(*entry));
    report.bad.extend(outside.iter().map(|entry| entry.name.to_owned()));
    let mut reads: Vec<_> = inside
        .into_iter()
        .map(|entry| RecordRead {
            extent: extent.clone(),
            entry,
            range: 0..entry.length,
            into: None,
        })
        .collect();
    for (verdict, entry) in reader.read(&mut reads).into_iter().zip(reads.iter().map(|it| it.entry))
    {
        match verdict {
            Verdict::Good { .. } => {
                report.records += 1;
                report.bytes += entry.length;
            }
            Verdict::Mismatch => report.bad.push(entry.name.to_owned()),
            Verdict::Failed(why) => {
                report.bad.push(entry.name.to_owned());
                failure.get_or_insert(why);
            }
        }
    }
    failure
}

/// Removes all records and the identity of a directory; returns how many extents it had.
///
/// # Errors
/// The same as for [`list`].
pub fn wipe(path: &Path) -> Result<usize> {
    let directory = Directory::open_existing(Arc::new(RealFiles), path)?;
    let extents = directory.extents()?.len();
    directory.wipe()?;
    Ok(extents)
}

/// Calls `run` with each extent; returns those that cannot be opened, or of which it returns an error.
fn each_extent(
    directory: &Directory,
    mut run: impl FnMut(&Arc<Extent>) -> Option<String>,
) -> Result<Vec<Unreadable>> {
    let mut unreadable = Vec::new();
    for number in directory.extents()? {
        let why = match Extent::open(directory, number, false) {
            Ok(extent) => run(&Arc::new(extent)),
            Err(Error::Io { source, .. }) => Some(source.to_string()),
            Err(error) => return Err(error),
        };
        let path = directory.extent_path(number);
        unreadable.extend(why.map(|why| Unreadable { path, why }));
    }
    Ok(unreadable)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::FileExt};

    use super::*;
    use crate::{Disk, Options, Write};

    #[test]
    fn a_directory_in_use_is_not_listed_checked_or_emptied() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::open(folder.path(), Options::new(16 << 20)).unwrap();
        let names = [b"a", b"b"].map(|key| Name { tenant: "default", key, version: 7 });
        let writes = names.map(|name| Write { name, payload: &[5; 70_000] });
        disk.write(&writes);
        for refusal in [list(folder.path(), |_| ()).map(drop), wipe(folder.path()).map(drop)] {
            assert!(matches!(refusal, Err(Error::InUse { .. })), "{refusal:?}");
        }
        disk.close().unwrap();

        let mut found = Vec::new();
        list(folder.path(), |record| {
            assert!(record.is_sealed && record.length == 70_000);
            found.push((record.name.to_owned(), record.extent, record.offset));
        })
        .unwrap();
        assert_eq!(found.iter().map(|(name, ..)| name.borrow()).collect::<Vec<_>>(), names);
        let report = verify(folder.path()).unwrap();
        assert_eq!((report.extents, report.records, report.bytes), (1, 2, 140_000));
        assert_eq!(report.bad, []);

        let (name, extent, offset) = found.remove(1);
        let path = folder.path().join(format!("extent-{extent:06}"));
        let file = fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&[6], offset + 4096 + 10).unwrap();
        let report = verify(folder.path()).unwrap();
        assert_eq!((report.records, report.bad), (1, vec![name]));

        // What cannot be read is named, and does not hide the rest.
        let unreadable = folder.path().join("extent-000007");
        std::os::unix::fs::symlink(&unreadable, &unreadable).unwrap();
        let report = verify(folder.path()).unwrap();
        assert_eq!((report.extents, report.records), (1, 1));
        assert_eq!(report.unreadable.len(), 1);
        assert_eq!(report.unreadable[0].path, unreadable);
        let mut listed = 0;
        assert_eq!(list(folder.path(), |_| listed += 1).unwrap(), report.unreadable);
        assert_eq!(listed, 2);
        fs::remove_file(&unreadable).unwrap();

        assert_eq!(wipe(folder.path()).unwrap(), 1);
        assert!(matches!(list(folder.path(), |_| ()), Err(Error::Foreign { .. })));
        Disk::open(folder.path(), Options::new(16 << 20)).unwrap();
    }
}
