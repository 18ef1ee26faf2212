//! One directory: opened, described to the master, read, closed.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{
    Clock, Error, ErrorCode, Moment, Result, SegmentId, SystemClock,
    sync::{Mutex, RwLock},
};
use mooncake_disk::{
    Destination, Disk, Name, Options, OwnedName, ReadMethod, ReadOutcome, ReadRequest,
    file_system::{FileSystem, RealFiles, Space},
};
use mooncake_proto::{
    records::{Loaded, Wanted},
    v1,
};

use super::{lent_memory::of_stage, staging::StagingRange};
use crate::{
    config::{DiskConfig, DiskLimits},
    metrics::{DirectoryMetrics, Metrics},
};

/// The bytes of the file system that a directory leaves free.
const FREE_BYTES_MIN: u64 = 64 << 20;

/// The files that are given back at once.
const TRIMMED_MAX: usize = 16;

/// How long closing waits for reads that are in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// An open directory.
#[derive(Debug)]
pub(crate) struct Owner {
    id: SegmentId,
    incarnation: u64,
    capacity: u64,
    path: PathBuf,
    /// `None` once the directory is closed.
    disk: RwLock<Option<Arc<Disk>>>,
    /// Records that reads found to be gone, and that the master is not told of yet.
    lost: Mutex<Vec<OwnedName>>,
    /// When the directory leaves the pool, if it does.
    leaves_at: Mutex<Option<Moment>>,
    metrics: Arc<Metrics>,
}

impl Owner {
    /// Opens a directory.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: the directory is in use, by whom the message says, or is none of records.
    /// Those of the system.
    pub(crate) fn open(
        config: &DiskConfig,
        limits: &DiskLimits,
        metrics: &Arc<Metrics>,
    ) -> Result<Self> {
        let path = config.path.clone();
        let space = space(&path)?;
        let capacity = match config.capacity {
            Some(capacity) => capacity,
            None => default_capacity(&path, space),
        };
        let begin = SystemClock.now();
        let watermarks = limits.watermarks;
        let (free_high, free_low) =
            watermarks.map_or((0, 0), |watermarks| watermarks.free_bytes(space.total));
        let options = Options {
            read_method: ReadMethod::from_switch(config.uses_ring),
            free_bytes_min: free_high.max(FREE_BYTES_MIN),
            free_bytes_low: free_low,
            records_max: limits.records_max.unwrap_or(u64::MAX),
            ..Options::new(capacity)
        };
        let disk = Disk::open(&path, options).map_err(|error| refused(&error))?;
        let id = u128::from_str_radix(&disk.id(), 16)
            .map_err(|_| Error::internal("the id of a directory is no number"))?;
        let statistics = disk.statistics();
        tracing::info!(
            path = %path.display(),
            capacity,
            records = statistics.records,
            allocated_bytes = statistics.allocated_bytes,
            read_method = %disk.read_method(),
            took_ms = SystemClock.now().since(begin).as_millis() as u64,
            "opened a directory of records"
        );
        Ok(Self {
            id: SegmentId::from_bits(id),
            incarnation: disk.incarnation(),
            capacity,
            path,
            disk: RwLock::new(Some(Arc::new(disk))),
            lost: Mutex::default(),
            leaves_at: Mutex::default(),
            metrics: Arc::clone(metrics),
        })
    }

    /// Returns the id of the directory, which is that of its segment.
    pub(crate) const fn id(&self) -> SegmentId {
        self.id
    }

    /// Returns where the directory lies.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open directory. Who keeps it for long delays its close.
    ///
    /// # Errors
    /// It was closed.
    pub(crate) fn disk(&self) -> Result<Arc<Disk>> {
        let disk = self.disk.read();
        disk.as_ref().map(Arc::clone).ok_or_else(|| {
            Error::closed("the directory of records was closed").with("path", self.path.display())
        })
    }

    /// Describes the directory to the master.
    pub(crate) fn segment(&self, name: &str, endpoint: &str) -> v1::Segment {
        v1::Segment {
            id: self.id.to_bytes().to_vec().into(),
            incarnation: self.incarnation,
            name: name.to_owned(),
            endpoint: endpoint.to_owned(),
            base: 0,
            length: self.capacity,
            protocol: "disk".to_owned(),
            kind: v1::SegmentKind::Disk.into(),
        }
    }

    /// Returns what the directory holds and did; nothing once it is closed.
    pub(crate) fn metrics(&self) -> Option<DirectoryMetrics> {
        let disk = self.disk().ok()?;
        let (chosen, statistics) = (disk.read_method(), disk.statistics());
        Some(DirectoryMetrics {
            path: self.path.display().to_string(),
            read_method: chosen.method.name(),
            why: chosen.why.clone(),
            capacity: self.capacity,
            used: statistics.allocated_bytes,
            records: statistics.records,
            file_bytes: statistics.file_bytes,
            moved: statistics.moved,
            trimmed: statistics.trimmed,
            set_aside: statistics.set_aside,
            direct_refused: statistics.direct_refused,
        })
    }

    /// Gives files back to the file system while it is too full; returns the records that were dropped.
    pub(crate) fn trim(&self) -> Result<Vec<OwnedName>> {
        let disk = self.disk()?;
        let mut dropped = Vec::new();
        for _ in 0..TRIMMED_MAX {
            let trimmed = disk.statistics().trimmed;
            let outcome = disk.trim();
            dropped.append(
                &mut outcome
                    .map_err(|error| Error::new(ErrorCode::FILE_WRITE_FAIL, error.to_string()))?,
            );
            if disk.statistics().trimmed == trimmed {
                break;
            }
        }
        Ok(dropped)
    }

    /// Loads ranges of records, each to its place within the stage, where they do not overlap; the
    /// outcomes are in the order of the ranges.
    pub(crate) fn load(
        &self,
        wanted: &[Wanted<'_>],
        places: &[u64],
        stage: &StagingRange,
    ) -> Vec<Loaded> {
        let places = places.iter().zip(wanted);
        self.read(wanted, places.map(|(&at, wanted)| of_stage(stage, at, wanted.length)))
    }

    /// Reads ranges of records into memory of their lengths; the outcomes are in the order of the
    /// ranges. Records that are gone are kept for [`Self::take_lost`].
    pub(crate) fn read<'a>(
        &self,
        wanted: &[Wanted<'_>],
        destinations: impl Iterator<Item = Option<Destination<'a>>>,
    ) -> Vec<Loaded> {
        let mut outcomes = vec![Loaded::Failed; wanted.len()];
        let Ok(disk) = self.disk() else {
            outcomes.fill(Loaded::Missing);
            return outcomes;
        };
        let begin = SystemClock.now();
        let mut numbers = Vec::with_capacity(wanted.len());
        let mut requests = Vec::with_capacity(wanted.len());
        for ((at, wanted), into) in wanted.iter().enumerate().zip(destinations) {
            if let Some(into) = into {
                numbers.push(at);
                requests.push(ReadRequest { name: name_of(wanted), offset: wanted.offset, into });
            }
        }
        let (mut records, mut bytes) = (0, 0);
        for (at, outcome) in numbers.into_iter().zip(disk.read_batch(&mut requests)) {
            let wanted = &wanted[at];
            outcomes[at] = match outcome {
                ReadOutcome::Good => {
                    (records, bytes) = (records + 1, bytes + wanted.length);
                    Loaded::Good
                }
                ReadOutcome::Missing => self.record_loss(wanted, Loaded::Missing),
                ReadOutcome::Bad => self.record_loss(wanted, Loaded::Damaged),
                ReadOutcome::Length(_) => Loaded::Failed,
                ReadOutcome::Failed(why) => {
                    let path = self.path.display();
                    tracing::warn!(%path, why, "a record cannot be read");
                    Loaded::Failed
                }
            };
        }
        self.metrics.disk.read.count(records, bytes, SystemClock.now().since(begin));
        outcomes
    }

    /// Has the thread of the directory take it out of the pool at that time.
    pub(crate) fn leave_at(&self, time: Moment) {
        let mut leaves_at = self.leaves_at.lock();
        *leaves_at = Some(leaves_at.map_or(time, |earlier| earlier.min(time)));
    }

    /// Returns when the directory leaves the pool, if it does.
    pub(crate) fn leaves_at(&self) -> Option<Moment> {
        *self.leaves_at.lock()
    }

    fn record_loss(&self, wanted: &Wanted<'_>, outcome: Loaded) -> Loaded {
        if outcome == Loaded::Damaged {
            let path = self.path.display();
            tracing::error!(%path, "a record is damaged, and dropped");
        }
        self.metrics.disk.lost.increment();
        self.lost.lock().push(name_of(wanted).to_owned());
        outcome
    }

    /// Takes the records that reads found to be gone.
    pub(crate) fn take_lost(&self) -> Vec<OwnedName> {
        std::mem::take(&mut *self.lost.lock())
    }

    /// Gives back records that the master could not be told of.
    pub(crate) fn put_back_lost(&self, mut lost: Vec<OwnedName>) {
        self.lost.lock().append(&mut lost);
    }

    /// Closes the directory: waits a while for reads in flight, then until all is on the device.
    pub(crate) fn close(&self) {
        let Some(mut disk) = self.disk.write().take() else { return };
        let until = SystemClock.now() + CLOSE_TIMEOUT;
        loop {
            match Arc::try_unwrap(disk) {
                Ok(disk) => {
                    if let Err(error) = disk.close() {
                        let path = self.path.display();
                        tracing::warn!(%path, %error, "the end of the records is not on the device");
                    }
                    return;
                }
                Err(shared) => disk = shared,
            }
            if !wait_a_little(until) {
                // Who reads last closes the files; the next start finds the records all the same.
                return;
            }
        }
    }
}

/// Waits a millisecond; `false` once the time is over.
#[expect(clippy::disallowed_methods, reason = "nothing tells that the last reader is done")]
fn wait_a_little(until: Moment) -> bool {
    std::thread::sleep(Duration::from_millis(1));
    !until.has_passed(SystemClock.now())
}

fn name_of<'a>(wanted: &Wanted<'a>) -> Name<'a> {
    Name { tenant: wanted.tenant, key: wanted.key, version: wanted.version }
}

/// Returns 90 % of what is free for the directory, and what its records take already.
fn default_capacity(path: &Path, space: Space) -> u64 {
    let own: u64 = std::fs::read_dir(path).map_or(0, |entries| {
        let lengths =
            entries.filter_map(|entry| entry.ok()?.metadata().ok().map(|file| file.len()));
        lengths.sum()
    });
    (space.free / 10 * 9).saturating_add(own)
}

/// Returns the space of the file system of a directory, which may not exist yet.
fn space(path: &Path) -> Result<Space> {
    let existing = path.ancestors().find(|path| path.is_dir()).unwrap_or_else(|| Path::new("."));
    RealFiles.space(existing).map_err(|source| {
        Error::new(ErrorCode::FILE_OPEN_FAIL, "the free space of a directory cannot be read")
            .with("path", existing.display())
            .caused_by(source)
    })
}

/// Returns the error of a directory that cannot be opened.
fn refused(error: &mooncake_disk::Error) -> Error {
    use mooncake_disk::Error as Disk;
    let code = match error {
        Disk::Io { .. } => ErrorCode::FILE_OPEN_FAIL,
        Disk::InUse { .. } => ErrorCode::FILE_LOCK_FAIL,
        Disk::Newer { .. } | Disk::Foreign { .. } | Disk::Invalid(_) => ErrorCode::INVALID_PARAMS,
    };
    Error::new(code, error.to_string())
}
