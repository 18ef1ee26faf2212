//! Recovery at the start: reads the newest snapshot, then every later log.
//!
//! The end of the log may be missing or torn: by a crash during a write or, if the machine itself
//! crashed, by everything that was not synced. Such an end is cut off. A frame that was on disk, as
//! a later frame says, and is damaged now is different: the data behind it cannot be trusted, and
//! the master refuses to start. A log that was never synced is of no use after a crash of the
//! machine, because memory that it says is an object's may have been reused since.

mod log_file;

use mooncake_base::{Result, SegmentId};

use self::log_file::{RecoveredFile, damaged_error};
use super::{
    Replay,
    directory::{Directory, file_error},
    log_frame::{self, FRAME_BYTES, Frame, HEADER_BYTES, Kind, Synced},
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
    /// Whether a whole frame at the end was damaged, and cut off.
    pub(super) has_lost_frame: bool,
    /// The names of the logs that were read and stay.
    kept: Vec<String>,
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
    let files = logs.iter().map(|&log| RecoveredFile::open(directory, Kind::Log, log));
    let files: Vec<RecoveredFile> = files.collect::<Result<_>>()?;
    recovered.next_file = 1 + logs.last().copied().max(snapshot).unwrap_or(0);
    let snapshot = snapshot.map(|number| RecoveredFile::open(directory, Kind::Snapshot, number));
    let snapshot = snapshot.transpose()?;
    if is_useless(directory, snapshot.as_ref(), &files, boot)? {
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

/// Recovers the state as it was before the log file of a number, from files that a process of this
/// machine has written or recovered since it started.
///
/// # Errors
/// A file cannot be read, or is damaged.
pub(super) fn recover_before(
    directory: &Directory,
    number: u64,
    replay: Replay<'_>,
) -> Result<Recovered> {
    let snapshot = directory.numbers(Kind::Snapshot)?.pop();
    let logs = directory.numbers(Kind::Log)?.into_iter();
    let logs = logs.filter(|&log| log < number && snapshot.is_none_or(|first| log >= first));
    let files = logs.map(|log| RecoveredFile::open(directory, Kind::Log, log));
    let files: Vec<RecoveredFile> = files.collect::<Result<_>>()?;
    let mut recovered = Recovered::empty();
    if let Some(snapshot) = snapshot {
        let file = RecoveredFile::open(directory, Kind::Snapshot, snapshot)?;
        recovered.load_snapshot(directory, &file, &mut *replay)?;
    }
    let boot = directory.disk().boot_id();
    recovered.replay(directory, &files, boot, snapshot.is_some(), replay)?;
    Ok(recovered)
}

impl Recovered {
    pub(super) fn empty() -> Self {
        Self {
            image: Image::default(),
            timeline_id: SegmentId::random().to_bytes(),
            next_file: 1,
            next_frame: 1,
            log_bytes: 0,
            logs: 0,
            snapshot_bytes: 0,
            may_lack_end: false,
            has_lost_frame: false,
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

    /// Returns whether there was neither a frame nor a snapshot.
    pub(super) fn is_empty(&self) -> bool {
        self.next_frame == 1 && self.snapshot_bytes == 0
    }

    /// Counts a file that was made after the recovery.
    pub(super) fn add_log(&mut self, name: &str) {
        self.next_file += 1;
        self.logs += 1;
        self.kept.push(name.to_owned());
    }

    /// Forgets the files that a snapshot has replaced: all but the last log.
    pub(super) fn keep_last_log(&mut self) {
        self.kept.drain(..self.kept.len().saturating_sub(1));
        self.logs = self.kept.len();
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
        file: &RecoveredFile,
        replay: Replay<'_>,
    ) -> Result<()> {
        let damaged = |at| damaged_error(directory, file, at);
        let header = file.header.ok_or_else(|| damaged(0))?;
        self.timeline_id = header.timeline_id;
        let mut frames = file.frames_from(directory, HEADER_BYTES);
        loop {
            let at = frames.offset();
            let frame = frames.next_frame()?.ok_or_else(|| damaged(at))?;
            if frame.number == SNAPSHOT_END {
                self.next_frame = frame.synced;
                self.snapshot_bytes = (at + FRAME_BYTES) as u64;
                return Ok(());
            }
            replay(&mut self.image, frame.payload).map_err(|_| damaged(at))?;
        }
    }

    fn replay(
        &mut self,
        directory: &Directory,
        files: &[RecoveredFile],
        boot: [u8; 16],
        has_snapshot: bool,
        replay: Replay<'_>,
    ) -> Result<()> {
        for (nth, file) in files.iter().enumerate() {
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
            let has_effects = |frame: &Frame<'_>| !frame.payload.is_empty();
            if nth == 0 || file.any_frame(directory, 2, has_effects)? {
                self.may_lack_end = header.boot != boot && header.synced != Synced::Always;
            }
            let mut frames = file.frames_from(directory, HEADER_BYTES);
            while !frames.is_at_end()? {
                let at = frames.offset();
                let frame = frames.next_frame()?;
                let Some(frame) = frame.filter(|frame| frame.number == self.next_frame) else {
                    self.log_bytes += at as u64;
                    return self.cut_torn_end(directory, &files[nth..], at, boot);
                };
                replay(&mut self.image, frame.payload)
                    .map_err(|_| damaged_error(directory, file, at))?;
                self.next_frame += 1;
            }
            self.log_bytes += frames.offset() as u64;
        }
        Ok(())
    }

    /// Handles the first invalid frame, at offset `at` of the first file: decides whether the log
    /// may end there. If so, truncates the rest, so that a later recovery cannot replay it.
    fn cut_torn_end(
        &mut self,
        directory: &Directory,
        files: &[RecoveredFile],
        at: usize,
        boot: [u8; 16],
    ) -> Result<()> {
        let Some((first, later)) = files.split_first() else { return Ok(()) };
        let same_boot = files.iter().filter_map(|file| file.header).any(|h| h.boot == boot);
        let (mut is_lost, mut is_whole, mut cut) = (false, false, 0);
        for (nth, file) in files.iter().enumerate() {
            let bytes = file.read_whole(directory)?;
            let from = if nth == 0 { at.min(bytes.len()) } else { 0 };
            cut += bytes.len() - from;
            // A write that ended early leaves a shorter frame.
            is_whole |= nth == 0
                && from >= HEADER_BYTES
                && log_frame::frame_bytes(&bytes[from..]).is_some_and(|n| n <= bytes.len() - from);
            // Frame numbers keep rising, so a frame of an earlier log does not match.
            let mut behind = frames_in(&bytes[from..], self.next_frame);
            // Written data can be read again unless the machine went down. After a crash of the machine
            // only what a sound frame says to be on disk is certain.
            is_lost |= if same_boot {
                (nth > 0 && bytes.len() > HEADER_BYTES) || behind.next().is_some()
            } else {
                behind.any(|frame| frame.synced > self.next_frame)
            };
        }
        if is_lost {
            return Err(damaged_error(directory, first, at));
        }
        // A part of a frame was not synced, so that nobody was told that it is.
        let is_unconfirmed =
            later.is_empty() && first.header.is_some_and(|header| header.synced == Synced::Always);
        self.has_lost_frame |= is_whole;
        self.may_lack_end |= is_whole || !(same_boot || is_unconfirmed);
        tracing::warn!(
            file = %directory.path_of(&first.name).display(),
            offset = at,
            bytes = cut,
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

/// Reads frames one after the other from the log files.
#[derive(Debug)]
pub(super) struct FrameSource<'a> {
    directory: &'a Directory,
    next: u64,
    /// The file that is read, and the place in it.
    place: Option<(u64, usize)>,
}

impl<'a> FrameSource<'a> {
    /// Reads from the frame of that number on.
    pub(super) const fn new(directory: &'a Directory, next: u64) -> Self {
        Self { directory, next, place: None }
    }

    /// Returns the number of the next frame.
    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    /// Returns the next frames before `end`, about `bytes_max` bytes of them; `None` if the next one is
    /// in no file any more.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn read(&mut self, end: u64, bytes_max: usize) -> Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        let numbers = self.directory.numbers(Kind::Log)?;
        let first = match self.place {
            Some((file, _)) => numbers.partition_point(|number| *number < file),
            None => self.first_file(&numbers)?,
        };
        for &number in &numbers[first..] {
            if self.next >= end || bytes.len() >= bytes_max {
                break;
            }
            self.read_file(number, end, bytes_max, &mut bytes)?;
        }
        Ok((self.next >= end || !bytes.is_empty()).then_some(bytes))
    }

    /// Returns the index of the last file that begins at or before the next frame.
    fn first_file(&self, numbers: &[u64]) -> Result<usize> {
        for (index, &number) in numbers.iter().enumerate().rev() {
            let file = RecoveredFile::open(self.directory, Kind::Log, number)?;
            let mut frames = file.frames_from(self.directory, HEADER_BYTES);
            if frames.next_frame()?.is_some_and(|frame| frame.number <= self.next) {
                return Ok(index);
            }
        }
        Ok(0)
    }

    fn read_file(
        &mut self,
        number: u64,
        end: u64,
        bytes_max: usize,
        into: &mut Vec<u8>,
    ) -> Result<()> {
        let at = self.place.filter(|(file, _)| *file == number).map_or(HEADER_BYTES, |(_, at)| at);
        let file = RecoveredFile::open(self.directory, Kind::Log, number)?;
        let mut frames = file.frames_from(self.directory, at);
        while self.next < end && into.len() < bytes_max {
            let Some(frame) = frames.next_frame()? else { break };
            if frame.number == self.next {
                let start = into.len();
                into.resize(start + FRAME_BYTES, 0);
                into.extend_from_slice(frame.payload);
                log_frame::seal(&mut into[start..], self.next, frame.synced);
                self.next += 1;
            }
        }
        self.place = Some((number, frames.offset()));
        Ok(())
    }
}

/// Returns all sound frames, wherever they begin.
fn frames_in(bytes: &[u8], at_least: u64) -> impl Iterator<Item = Frame<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (frame, behind) = Frame::find(rest, at_least)?;
        rest = behind;
        Some(frame)
    })
}

/// Returns whether the timeline of these files was given up.
fn is_void(
    directory: &Directory,
    snapshot: Option<&RecoveredFile>,
    logs: &[RecoveredFile],
) -> Result<bool> {
    let header = snapshot.or_else(|| logs.first()).and_then(|file| file.header);
    header.map_or(Ok(false), |header| directory.is_void(header.timeline_id))
}

/// Returns whether the machine crashed after a process ran without syncing, and no later process
/// has made sure that its frames are on disk.
fn is_useless(
    directory: &Directory,
    snapshot: Option<&RecoveredFile>,
    logs: &[RecoveredFile],
    boot: [u8; 16],
) -> Result<bool> {
    let is_never = |file: &RecoveredFile| {
        file.header.is_some_and(|header| header.synced == Synced::Never && header.boot != boot)
    };
    let Some(last) = logs.iter().rposition(is_never) else {
        // The log that began with the snapshot may be what was lost.
        return Ok(logs.is_empty() && snapshot.is_some_and(is_never));
    };
    // A process that syncs says so in its first frame, before which it has synced all files.
    for file in &logs[last + 1..] {
        if file.any_frame(directory, usize::MAX, |frame| frame.synced > 0)? {
            return Ok(false);
        }
    }
    Ok(true)
}
