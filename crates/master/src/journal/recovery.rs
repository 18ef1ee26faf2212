//! Recovery at the start: reads the newest snapshot, then every later log.
//!
//! The end of the log may be missing or torn: by a crash during a write or, if the machine itself
//! crashed, by everything that was not synced. Such an end is cut off. A frame that was on disk, as
//! a later frame says, and is damaged now is different: the data behind it cannot be trusted, and
//! the master refuses to start. A log that was never synced is of no use after a crash of the
//! machine, because memory that it says is an object's may have been reused since.

use mooncake_base::{Error, ErrorCode, Result, SegmentId};

use super::{
    Replay,
    directory::{Directory, file_error, file_name},
    frame::{Frame, HEADER_BYTES, Header, Kind, Synced},
};
use crate::state::Image;

/// The number of the frame that ends a snapshot.
pub(super) const SNAPSHOT_END: u64 = u64::MAX;

/// The result of recovery.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) image: Image,
    pub(super) timeline_id: [u8; 16],
    /// The number of the next log file.
    pub(super) next_file: u64,
    /// The number of the first frame in that file.
    pub(super) next_frame: u64,
    /// Bytes of all logs.
    pub(super) log_bytes: u64,
    pub(super) logs: usize,
    pub(super) snapshot_bytes: u64,
    /// Whether acknowledged changes may have been lost in a crash of the machine.
    pub(super) may_lack_end: bool,
    /// The names of the logs that were read and stay.
    kept: Vec<String>,
}

/// A log file or snapshot, read into memory.
struct LogFile {
    name: String,
    number: u64,
    header: Option<Header>,
    bytes: Vec<u8>,
}

/// Recovers the state from the directory; `boot` is the present boot of the machine.
///
/// # Errors
/// A file cannot be read, is not a file of the log, has another version, or is damaged in the
/// middle.
pub(super) fn recover(
    directory: &Directory,
    boot: [u8; 16],
    replay: Replay<'_>,
) -> Result<Recovered> {
    let snapshot = directory.numbers(Kind::Snapshot)?.pop();
    let mut logs = directory.numbers(Kind::Log)?;
    let mut recovered = Recovered::empty();
    if let Some(number) = snapshot {
        logs.retain(|log| *log >= number);
    } else if logs.first().is_some_and(|first| *first != 1) {
        // The first log file was removed when the log failed, and no snapshot followed.
        return recovered.forget(directory, "the log failed earlier and lacks its first file");
    }
    let files = logs.iter().map(|&log| read(directory, Kind::Log, log));
    let files: Vec<LogFile> = files.collect::<Result<_>>()?;
    recovered.next_file = 1 + logs.last().copied().max(snapshot).unwrap_or(0);
    let snapshot = snapshot.map(|number| read(directory, Kind::Snapshot, number)).transpose()?;
    if is_useless(snapshot.as_ref(), &files, boot) {
        return recovered
            .forget(directory, "the machine went down, and the log ran with --log_sync=never");
    }
    if is_void(directory, snapshot.as_ref(), &files)? {
        return recovered
            .forget(directory, "the log failed earlier, and its files are out of date");
    }
    if let Some(snapshot) = &snapshot {
        recovered.load_snapshot(directory, snapshot, &mut *replay)?;
    }
    recovered.logs = files.len();
    recovered.kept = files.iter().map(|file| file.name.clone()).collect();
    recovered.replay(directory, &files, boot, snapshot.is_some(), replay)?;
    Ok(recovered)
}

impl Recovered {
    fn empty() -> Self {
        Self {
            image: Image::default(),
            timeline_id: SegmentId::random().to_bytes(),
            next_file: 1,
            next_frame: 1,
            log_bytes: 0,
            logs: 0,
            snapshot_bytes: 0,
            may_lack_end: false,
            kept: Vec::new(),
        }
    }

    /// Removes what is in the directory and starts another timeline.
    fn forget(self, directory: &Directory, why: &str) -> Result<Self> {
        tracing::warn!(
            state_dir = %directory.path().display(),
            "{why}; starting with an empty pool"
        );
        directory.remove_all()?;
        Ok(Self::empty())
    }

    /// Makes sure that what was recovered is on disk: earlier processes may not have synced it.
    pub(super) fn sync(&self, directory: &Directory) -> Result<()> {
        for name in &self.kept {
            directory.open(name)?.sync().map_err(|source| {
                file_error("cannot be synced", &directory.path_of(name), source)
            })?;
        }
        directory.sync()
    }

    fn load_snapshot(
        &mut self,
        directory: &Directory,
        file: &LogFile,
        replay: Replay<'_>,
    ) -> Result<()> {
        let damaged = |at| damaged_error(directory, file, at);
        let header = file.header.ok_or_else(|| damaged(0))?;
        self.timeline_id = header.timeline_id;
        self.snapshot_bytes = file.bytes.len() as u64;
        let mut at = HEADER_BYTES;
        loop {
            let frame = Frame::read(&file.bytes[at..]).ok_or_else(|| damaged(at))?;
            if frame.number == SNAPSHOT_END {
                self.next_frame = frame.synced;
                return Ok(());
            }
            replay(&mut self.image, frame.payload).map_err(|_| damaged(at))?;
            at += frame.bytes();
        }
    }

    fn replay(
        &mut self,
        directory: &Directory,
        files: &[LogFile],
        boot: [u8; 16],
        has_snapshot: bool,
        replay: Replay<'_>,
    ) -> Result<()> {
        for (nth, file) in files.iter().enumerate() {
            self.log_bytes += file.bytes.len() as u64;
            let Some(header) = file.header else {
                return self.cut_torn_end(directory, &files[nth..], 0, boot);
            };
            if nth == 0 && !has_snapshot {
                self.timeline_id = header.timeline_id;
            } else if header.timeline_id != self.timeline_id {
                return Err(damaged_error(directory, file, 0)
                    .with("because", "it belongs to another timeline"));
            }
            // A file without effects says nothing: the process before it may have been the first
            // after the crash, and was killed before it recorded what it let rest.
            if nth == 0 || file.has_effects() {
                self.may_lack_end = header.boot != boot && header.synced != Synced::Always;
            }
            let mut at = HEADER_BYTES;
            while at < file.bytes.len() {
                let frame = Frame::read(&file.bytes[at..]);
                let Some(frame) = frame.filter(|frame| frame.number == self.next_frame) else {
                    return self.cut_torn_end(directory, &files[nth..], at, boot);
                };
                replay(&mut self.image, frame.payload)
                    .map_err(|_| damaged_error(directory, file, at))?;
                self.next_frame += 1;
                at += frame.bytes();
            }
        }
        Ok(())
    }

    /// Handles the first invalid frame, at offset `at` of the first file: decides whether the log
    /// may end there. If so, truncates the rest, so that a later recovery cannot replay it.
    fn cut_torn_end(
        &mut self,
        directory: &Directory,
        files: &[LogFile],
        at: usize,
        boot: [u8; 16],
    ) -> Result<()> {
        let Some((first, later)) = files.split_first() else { return Ok(()) };
        let same_boot = files.iter().filter_map(|file| file.header).any(|h| h.boot == boot);
        // Frame numbers keep rising, so a frame of an earlier log does not match.
        let mut behind = frames_behind(first, at, self.next_frame)
            .chain(later.iter().flat_map(|file| frames_behind(file, 0, self.next_frame)));
        // Written data can be read again unless the machine went down. After a crash of the machine
        // only what a sound frame says to be on disk is certain.
        let is_lost = match same_boot {
            true => {
                let has_later = later.iter().any(|file| file.bytes.len() > HEADER_BYTES);
                has_later || behind.next().is_some()
            }
            false => behind.any(|frame| frame.synced > self.next_frame),
        };
        if is_lost {
            return Err(damaged_error(directory, first, at));
        }
        self.may_lack_end |= !same_boot;
        let cut: usize = later.iter().map(|file| file.bytes.len()).sum();
        tracing::warn!(
            file = %directory.path_of(&first.name).display(),
            offset = at,
            bytes = first.bytes.len() - at + cut,
            "the log ends in a torn write, which was truncated"
        );
        // From the end, so that a kill meanwhile leaves a log with a torn end again.
        for file in later.iter().rev() {
            directory.remove(&file.name)?;
        }
        self.kept.truncate(self.kept.len() - later.len());
        if at < HEADER_BYTES {
            self.kept.pop();
            self.next_file = first.number;
            return directory.remove(&first.name);
        }
        directory.open(&first.name)?.truncate(at as u64).map_err(|source| {
            file_error("cannot be truncated", &directory.path_of(&first.name), source)
        })
    }
}

impl LogFile {
    /// Returns the frames up to the first invalid one.
    fn frames(&self) -> impl Iterator<Item = Frame<'_>> {
        let mut rest = self.bytes.get(HEADER_BYTES..).unwrap_or_default();
        std::iter::from_fn(move || {
            let frame = Frame::read(rest)?;
            rest = &rest[frame.bytes()..];
            Some(frame)
        })
    }

    fn has_effects(&self) -> bool {
        self.frames().take(2).any(|frame| !frame.payload.is_empty())
    }
}

/// Returns all sound frames at or behind an offset, wherever they begin.
fn frames_behind(file: &LogFile, at: usize, at_least: u64) -> impl Iterator<Item = Frame<'_>> {
    let mut rest = &file.bytes[at.min(file.bytes.len())..];
    std::iter::from_fn(move || {
        let (frame, behind) = Frame::find(rest, at_least)?;
        rest = behind;
        Some(frame)
    })
}

/// Returns whether the timeline of these files was given up.
fn is_void(directory: &Directory, snapshot: Option<&LogFile>, logs: &[LogFile]) -> Result<bool> {
    let header = snapshot.or_else(|| logs.first()).and_then(|file| file.header);
    header.map_or(Ok(false), |header| directory.is_void(header.timeline_id))
}

/// Returns whether the machine crashed after a process ran without syncing, and no later process
/// has made sure that its frames are on disk.
fn is_useless(snapshot: Option<&LogFile>, logs: &[LogFile], boot: [u8; 16]) -> bool {
    let is_never = |file: &LogFile| {
        file.header.is_some_and(|header| header.synced == Synced::Never && header.boot != boot)
    };
    // A process that syncs says so in its first frame, before which it has synced all files.
    match logs.iter().rposition(is_never) {
        Some(last) => !logs[last + 1..].iter().flat_map(LogFile::frames).any(|f| f.synced > 0),
        // The log that began with the snapshot may be what was lost.
        None => logs.is_empty() && snapshot.is_some_and(is_never),
    }
}

fn read(directory: &Directory, kind: Kind, number: u64) -> Result<LogFile> {
    let name = file_name(kind, number);
    let path = directory.path_of(&name);
    let bytes = directory
        .disk()
        .read(&name)
        .map_err(|source| file_error("cannot be read", &path, source))?;
    let header = Header::decode(&bytes).map_err(|error| {
        let folder = directory.path().display();
        let set_aside = format_args!("mv {folder} {folder}.old").to_string();
        error.with("file", path.display()).with("set_aside_by", set_aside)
    })?;
    let mut file = LogFile { name, number, header, bytes };
    if let Some(header) = file.header
        && (header.kind, header.number) != (kind, number)
    {
        file.header = None;
        return Err(damaged_error(directory, &file, 0)
            .with("because", "its header does not match its name"));
    }
    Ok(file)
}

fn damaged_error(directory: &Directory, file: &LogFile, at: usize) -> Error {
    Error::new(
        ErrorCode::PERSISTENT_FAIL,
        "the log of the master is damaged; restore a good copy, or move the state directory away \
         to start with an empty pool",
    )
    .with("file", directory.path_of(&file.name).display())
    .with("offset", at)
}
