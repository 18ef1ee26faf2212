//! The log of a standby: frames of the leader are checked, written to the own log under the same
//! numbers, and applied to an image.
//!
//! The files bound themselves as those of a leader do: once the log is long, it continues in another
//! file, and [`Compaction`] makes a snapshot of the earlier ones, beside the thread that receives.

mod compaction;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mooncake_base::{Error, ErrorCode, Moment, Result};

use self::compaction::Compaction;
use super::{
    Directory, Journal, LOG_BYTES_MAX, LogFile, LogSync, RecoveredJournal,
    directory::{UNFINISHED, file_error, file_name},
    level::{self, RecordLevel},
    log_frame::{self, Frame, HEADER_BYTES, Header, Kind},
    recovery::{self, Recovered},
};
use crate::state::{DecodeError, Effect, Image, LeaseNotes};

/// The log and the image of a standby.
#[derive(Debug)]
pub(crate) struct StandbyLog {
    directory: Arc<Directory>,
    sync: LogSync,
    file: Arc<dyn LogFile>,
    file_name: String,
    /// What the log has, up to the last frame that was received.
    recovered: Recovered,
    /// Own frames with lower numbers are on disk.
    synced_frame: u64,
    /// The frames that are written next.
    frames: Vec<u8>,
    /// A write failed, so that the end of the file is not known.
    is_broken: bool,
    /// The image lacks frames that are in the log.
    is_behind: bool,
    /// Ends a compaction that runs.
    is_ended: Arc<AtomicBool>,
    /// Which kinds of records the leader may write, as far as it has said so.
    level: Option<RecordLevel>,
}

/// The changes of frames that are in the log, to be applied.
#[derive(Debug, Default)]
#[must_use = "the image lacks them"]
pub(crate) struct Accepted<'a> {
    has_frames: bool,
    effects: Vec<Effect<'a>>,
}

/// A snapshot file that is being received.
#[derive(Debug)]
pub(crate) struct IncomingSnapshot {
    directory: Arc<Directory>,
    header: Header,
    file: Arc<dyn LogFile>,
    /// Bytes of the leader's header, which is not the own one.
    skipped: usize,
}

/// The end of what a standby has received, to be synced.
#[derive(Debug)]
pub(crate) struct SyncPoint {
    file: Arc<dyn LogFile>,
    next_frame: u64,
}

impl StandbyLog {
    /// Recovers the image from the directory, and starts a file of the log.
    ///
    /// # Errors
    /// The log is damaged, or cannot be read or written.
    pub(crate) fn open(directory: Arc<Directory>, sync: LogSync) -> Result<Self> {
        let recovered = recover(&directory)?;
        recovered.sync(&directory)?;
        Self::start(directory, sync, recovered)
    }

    /// Starts the next file after what was recovered.
    fn start(directory: Arc<Directory>, sync: LogSync, mut recovered: Recovered) -> Result<Self> {
        let (file, file_name) = make_file(&directory, sync, &mut recovered)?;
        let synced_frame = recovered.next_frame;
        Ok(Self {
            directory,
            sync,
            file,
            file_name,
            recovered,
            synced_frame,
            frames: Vec::new(),
            is_broken: false,
            is_behind: false,
            is_ended: Arc::default(),
            level: None,
        })
    }

    /// Gives up what the log has, and begins the log of a leader with its first frame.
    ///
    /// # Errors
    /// The files cannot be removed or written.
    pub(crate) fn begin_anew(&mut self, timeline_id: [u8; 16]) -> Result<()> {
        let directory = Arc::clone(&self.directory);
        let _no_snapshot = directory.snapshots().lock();
        self.directory.remove_all()?;
        let mut recovered = Recovered::empty();
        recovered.timeline_id = timeline_id;
        *self = Self::start(Arc::clone(&self.directory), self.sync, recovered)?;
        Ok(())
    }

    /// Gives up what the log has, and begins to receive a snapshot of a leader.
    ///
    /// # Errors
    /// The files cannot be removed or written.
    pub(crate) fn receive_snapshot(
        &mut self,
        timeline_id: [u8; 16],
        number: u64,
    ) -> Result<IncomingSnapshot> {
        self.begin_anew(timeline_id)?;
        let header = header(&self.directory, self.sync, timeline_id, Kind::Snapshot, number);
        IncomingSnapshot::begin(Arc::clone(&self.directory), header)
    }

    /// Continues from a snapshot that was received as a whole.
    ///
    /// # Errors
    /// It is damaged, or cannot be put in place; nothing is left of it then.
    pub(crate) fn adopt_snapshot(&mut self, snapshot: IncomingSnapshot) -> Result<()> {
        let timeline_id = snapshot.header.timeline_id;
        snapshot.put_in_place()?;
        // Its files have other numbers than those of the leader.
        let recovered = recover(&self.directory).and_then(|recovered| {
            recovered.sync(&self.directory)?;
            Self::start(Arc::clone(&self.directory), self.sync, recovered)
        });
        match recovered {
            Ok(log) => {
                *self = log;
                Ok(())
            }
            Err(error) => {
                self.begin_anew(timeline_id)?;
                Err(error)
            }
        }
    }

    /// Returns whether the log has no frame.
    pub(crate) fn is_empty(&self) -> bool {
        self.recovered.is_empty()
    }

    /// Returns whether acknowledged changes may be missing at the end of what was recovered, because the
    /// machine went down.
    pub(crate) fn may_lack_end(&self) -> bool {
        self.recovered.may_lack_end
    }

    /// Takes over which kinds of records the leader may write.
    ///
    /// # Errors
    /// The level cannot be kept.
    pub(crate) fn set_level(&mut self, level: RecordLevel) -> Result<()> {
        if self.level != Some(level) {
            level::write(&self.directory, level)?;
            self.level = Some(level);
        }
        Ok(())
    }

    /// Returns whether a frame at the end of what was recovered was damaged.
    pub(crate) fn has_lost_frame(&self) -> bool {
        self.recovered.has_lost_frame
    }

    /// Returns the timeline and the number of the frame that is to be received next.
    pub(crate) fn place(&self) -> ([u8; 16], u64) {
        (self.recovered.timeline_id, self.recovered.next_frame)
    }

    /// Returns what was received.
    #[cfg(test)]
    pub(crate) fn image(&self) -> &Image {
        &self.recovered.image
    }

    /// Returns whether a write failed, or what was accepted last was not applied, so that
    /// [`mend`](Self::mend) comes first.
    pub(crate) const fn is_broken(&self) -> bool {
        self.is_broken || self.is_behind
    }

    /// Opens the log anew if it [is broken](Self::is_broken).
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub(crate) fn mend(&mut self) -> Result<()> {
        if self.is_broken() {
            *self = Self::open(Arc::clone(&self.directory), self.sync)?;
        }
        Ok(())
    }

    /// Takes whole frames into the log and applies them.
    ///
    /// # Errors
    /// Those of [`accept`](Self::accept).
    #[cfg(test)]
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<()> {
        let accepted = self.accept(bytes)?;
        self.apply(accepted);
        Ok(())
    }

    /// Checks whole frames and writes them to the log. Returns what is to be [applied](Self::apply) next.
    /// All of them are in the log then, and none is if a frame is damaged or out of turn.
    ///
    /// # Errors
    /// A frame is damaged, not the next one or of a later version: the standby must attach anew. Or the
    /// log cannot be written; then [`mend`](Self::mend) comes first.
    pub(crate) fn accept<'a>(&mut self, bytes: &'a [u8]) -> Result<Accepted<'a>> {
        if self.is_broken() {
            return Err(Error::new(ErrorCode::PERSISTENT_FAIL, "the log of the standby is broken"));
        }
        self.frames.clear();
        let (mut rest, mut next, mut effects) = (bytes, self.recovered.next_frame, Vec::new());
        while !rest.is_empty() {
            rest = &rest[self.check(rest, next, &mut effects)?..];
            next += 1;
        }
        let has_frames = !self.frames.is_empty();
        if has_frames {
            self.file.append(&self.frames).map_err(|source| {
                self.is_broken = true;
                file_error("cannot be written", &self.directory.path_of(&self.file_name), source)
            })?;
            self.is_behind = true;
            self.recovered.next_frame = next;
            self.recovered.log_bytes += self.frames.len() as u64;
        }
        Ok(Accepted { has_frames, effects })
    }

    /// Checks the first of these frames, and adds it to those that are written, and its changes to those
    /// that are applied. Returns its length.
    fn check<'a>(
        &mut self,
        bytes: &'a [u8],
        next: u64,
        effects: &mut Vec<Effect<'a>>,
    ) -> Result<usize> {
        let frame = Frame::read(bytes).ok_or_else(|| refused("is damaged", next))?;
        if frame.number != next {
            return Err(refused("is not the next one", next).with("number", frame.number));
        }
        Effect::decode_all(frame.payload, |effect| effects.push(effect)).map_err(|_| {
            refused("has changes that this version does not know; install the leader's", next)
        })?;
        let (start, length) = (self.frames.len(), frame.bytes());
        self.frames.extend_from_slice(&bytes[..length]);
        // The frame says what is on the disk of the leader; here it is the own disk that counts.
        log_frame::seal(&mut self.frames[start..], next, self.synced_frame);
        Ok(length)
    }

    /// Applies what was accepted last. Nothing waits for it: it is in the log.
    pub(crate) fn apply(&mut self, accepted: Accepted<'_>) {
        if accepted.has_frames {
            self.recovered.image.apply_all(accepted.effects);
            self.is_behind = false;
        }
    }

    /// Takes notes of leases, which are kept in memory only.
    pub(crate) fn receive_leases(&mut self, now: Moment, notes: &LeaseNotes) {
        self.recovered.image.receive_leases(now, notes);
    }

    /// Takes it from the leader that all memory which must rest is in what was received.
    pub(crate) fn set_rest_logged(&mut self) {
        self.recovered.image.set_rest_logged();
    }

    /// Forgets all notes of leases: some may be missing. Called for each connection to a leader.
    pub(crate) fn forget_leases(&mut self) {
        self.recovered.image.forget_leases();
    }

    /// Returns what is to be synced, so that everything that was received survives a crash of the
    /// machine; `None` if it does already. The sync needs no lock on the log.
    pub(crate) fn sync_point(&self) -> Option<SyncPoint> {
        let next_frame = self.recovered.next_frame;
        (self.synced_frame < next_frame)
            .then(|| SyncPoint { file: Arc::clone(&self.file), next_frame })
    }

    /// Records that a sync has ended.
    pub(crate) fn end_sync(&mut self, point: &SyncPoint) {
        self.synced_frame = self.synced_frame.max(point.next_frame);
    }

    /// Returns whether the log is long enough to be compacted.
    pub(crate) fn is_long(&self) -> bool {
        self.recovered.log_bytes > LOG_BYTES_MAX.max(2 * self.recovered.snapshot_bytes)
    }

    /// Continues in another file if the log is long, so that the earlier ones can be replaced by a
    /// snapshot.
    ///
    /// # Errors
    /// A file cannot be synced or made.
    pub(crate) fn begin_compaction(&mut self) -> Result<Option<Compaction>> {
        if self.is_long() { self.compact().map(Some) } else { Ok(None) }
    }

    pub(crate) fn compact(&mut self) -> Result<Compaction> {
        if let Some(point) = self.sync_point() {
            point.sync()?;
            self.end_sync(&point);
        }
        let number = self.recovered.next_file;
        (self.file, self.file_name) = make_file(&self.directory, self.sync, &mut self.recovered)?;
        self.recovered.log_bytes = 0;
        Ok(Compaction {
            directory: Arc::downgrade(&self.directory),
            sync: self.sync,
            number,
            first_frame: self.recovered.next_frame,
            is_cancelled: Arc::clone(&self.is_ended),
        })
    }

    /// Records a snapshot of that size.
    pub(crate) fn end_compaction(&mut self, bytes: u64) {
        self.recovered.snapshot_bytes = bytes;
        self.recovered.keep_last_log();
    }

    /// Makes a compaction that runs end soon, with an error.
    pub(crate) fn cancel_compaction(&self) {
        self.is_ended.store(true, Ordering::Release);
    }

    /// Ends following: returns the log to write to as leader, and the state. `is_complete`: the log lacks
    /// nothing that was acknowledged.
    ///
    /// # Errors
    /// The log cannot be written.
    pub(crate) fn lead(mut self, is_complete: bool) -> Result<RecoveredJournal> {
        self.mend()?;
        self.recovered.may_lack_end = !is_complete;
        Journal::from_recovered(self.directory, self.sync, self.recovered)
    }
}

impl SyncPoint {
    /// Syncs the file.
    ///
    /// # Errors
    /// It cannot be synced.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync().map_err(|source| {
            Error::new(ErrorCode::PERSISTENT_FAIL, "the log of the standby cannot be synced")
                .caused_by(source)
        })
    }
}

impl IncomingSnapshot {
    fn begin(directory: Arc<Directory>, header: Header) -> Result<Self> {
        let make = || {
            let file = directory.disk().create(UNFINISHED)?;
            file.append(&header.encode())?;
            Ok(file)
        };
        let file = make().map_err(|source| unfinished_error(&directory, source))?;
        Ok(Self { directory, header, file, skipped: 0 })
    }

    /// Writes the next bytes of the leader's file.
    ///
    /// # Errors
    /// They cannot be written.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let skip = bytes.len().min(HEADER_BYTES - self.skipped);
        self.skipped += skip;
        let appended = self.file.append(&bytes[skip..]);
        appended.map_err(|source| unfinished_error(&self.directory, source))
    }

    fn put_in_place(self) -> Result<()> {
        let Self { directory, header, file, .. } = self;
        let name = file_name(Kind::Snapshot, header.number);
        let put = || {
            file.sync()?;
            directory.disk().rename(UNFINISHED, &name)?;
            directory.disk().sync_directory()
        };
        put().map_err(|source| unfinished_error(&directory, source))?;
        directory.remove_before(header.number)
    }
}

fn replay(image: &mut Image, effects: &[u8]) -> Result<(), DecodeError> {
    image.replay(effects)
}

fn recover(directory: &Directory) -> Result<Recovered> {
    recovery::recover(directory, directory.disk().boot_id(), &mut replay)
}

fn header(
    directory: &Directory,
    sync: LogSync,
    timeline_id: [u8; 16],
    kind: Kind,
    number: u64,
) -> Header {
    let boot = directory.disk().boot_id();
    Header { timeline_id, boot, ..Header::new(kind, sync.into(), number) }
}

/// Makes the next file, with nothing but a header.
fn make_file(
    directory: &Directory,
    sync: LogSync,
    recovered: &mut Recovered,
) -> Result<(Arc<dyn LogFile>, String)> {
    let (number, timeline_id) = (recovered.next_file, recovered.timeline_id);
    let header = header(directory, sync, timeline_id, Kind::Log, number);
    let name = file_name(Kind::Log, number);
    let make = || {
        let file = directory.disk().create(&name)?;
        file.append(&header.encode())?;
        file.sync()?;
        directory.disk().sync_directory()?;
        Ok(file)
    };
    let file = make().map_err(|e| file_error("cannot be written", &directory.path_of(&name), e))?;
    recovered.add_log(&name);
    Ok((file, name))
}

fn unfinished_error(directory: &Directory, source: io::Error) -> Error {
    file_error("cannot be written", &directory.path_of(UNFINISHED), source)
}

fn refused(what: &str, awaited: u64) -> Error {
    Error::new(ErrorCode::PERSISTENT_FAIL, format!("a frame from the leader {what}"))
        .with("awaited", awaited)
}
