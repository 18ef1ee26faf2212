//! Recovery at the start: reads the newest snapshot, then every later log.
//!
//! The last frame may be torn: by a crash during a write or, if the machine itself crashed, by
//! pages that never reached the disk. A torn end is truncated. A damaged frame that was once
//! complete is different: the data behind it cannot be trusted, and the master refuses to start.

use std::{fs, path::PathBuf};

use mooncake_base::{Error, ErrorCode, Result, SegmentId};

use super::{
    directory::{Directory, file_error},
    frame::{Frame, HEADER_BYTES, Header, Kind},
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
}

/// A log file or snapshot, read into memory.
struct LogFile {
    path: PathBuf,
    number: u64,
    header: Option<Header>,
    bytes: Vec<u8>,
}

/// Recovers the state from the directory; `boot` is the present boot of the machine.
///
/// # Errors
/// A file cannot be read, is not a file of the log, has another version, or is damaged in the
/// middle.
pub(super) fn recover(directory: &Directory, boot: [u8; 16]) -> Result<Recovered> {
    let mut recovered = Recovered {
        image: Image::default(),
        timeline_id: SegmentId::random().to_bytes(),
        next_file: 1,
        next_frame: 1,
        log_bytes: 0,
        logs: 0,
        snapshot_bytes: 0,
        may_lack_end: false,
    };
    let snapshot = directory.numbers(Kind::Snapshot)?.pop();
    let mut logs = directory.numbers(Kind::Log)?;
    recovered.next_file = 1 + logs.last().copied().max(snapshot).unwrap_or(0);
    if let Some(number) = snapshot {
        recovered.load_snapshot(&read(directory, Kind::Snapshot, number)?)?;
        logs.retain(|log| *log >= number);
    } else if logs.first().is_some_and(|first| *first != 1) {
        // The first log file was removed when the log failed, and no snapshot followed.
        tracing::warn!(
            state_dir = %directory.path().display(),
            "the log failed earlier and lacks its first file; starting with an empty pool"
        );
        directory.remove_all()?;
        recovered.next_file = 1;
        return Ok(recovered);
    }
    let files = logs.iter().map(|&log| read(directory, Kind::Log, log));
    let files: Vec<LogFile> = files.collect::<Result<_>>()?;
    recovered.logs = files.len();
    recovered.replay(&files, boot, snapshot.is_some())?;
    Ok(recovered)
}

impl Recovered {
    fn load_snapshot(&mut self, file: &LogFile) -> Result<()> {
        let header = file.header.ok_or_else(|| damaged_error(file, 0))?;
        self.timeline_id = header.timeline_id;
        self.snapshot_bytes = file.bytes.len() as u64;
        let mut at = HEADER_BYTES;
        loop {
            let frame = Frame::read(&file.bytes[at..]).ok_or_else(|| damaged_error(file, at))?;
            if frame.number == SNAPSHOT_END {
                self.next_frame = frame.synced;
                return Ok(());
            }
            self.image.replay(frame.payload).map_err(|_| damaged_error(file, at))?;
            at += frame.bytes();
        }
    }

    fn replay(&mut self, files: &[LogFile], boot: [u8; 16], has_snapshot: bool) -> Result<()> {
        for (nth, file) in files.iter().enumerate() {
            self.log_bytes += file.bytes.len() as u64;
            let Some(header) = file.header else {
                return self.cut_torn_end(&files[nth..], 0, boot);
            };
            if nth == 0 && !has_snapshot {
                self.timeline_id = header.timeline_id;
            } else if header.timeline_id != self.timeline_id {
                return Err(
                    damaged_error(file, 0).with("because", "it belongs to another timeline")
                );
            }
            self.may_lack_end = header.boot != boot && !header.is_synced;
            let mut at = HEADER_BYTES;
            while at < file.bytes.len() {
                let frame = Frame::read(&file.bytes[at..]);
                let Some(frame) = frame.filter(|frame| frame.number == self.next_frame) else {
                    return self.cut_torn_end(&files[nth..], at, boot);
                };
                self.image.replay(frame.payload).map_err(|_| damaged_error(file, at))?;
                self.next_frame += 1;
                at += frame.bytes();
            }
        }
        Ok(())
    }

    /// Handles the first invalid frame, at offset `at` of the first file: decides whether the log
    /// may end there. If so, truncates the rest, so that a later recovery cannot replay it.
    fn cut_torn_end(&mut self, files: &[LogFile], at: usize, boot: [u8; 16]) -> Result<()> {
        let Some((first, later)) = files.split_first() else { return Ok(()) };
        let same_boot = files.iter().filter_map(|file| file.header).any(|h| h.boot == boot);
        // Frame numbers keep rising, so a frame of an earlier log does not match.
        let next = Frame::find(&first.bytes[at..], self.next_frame);
        let synced = next.map_or(0, |frame| frame.synced);
        let has_later = later.iter().any(|file| file.bytes.len() > HEADER_BYTES);
        // Written data can be read again unless the machine went down. After a crash of the machine
        // only synced data is certain.
        let is_lost = if same_boot { next.is_some() || has_later } else { synced > at as u64 };
        if is_lost {
            return Err(damaged_error(first, at));
        }
        self.may_lack_end |= !same_boot;
        let cut: usize = later.iter().map(|file| file.bytes.len()).sum();
        tracing::warn!(
            file = %first.path.display(),
            offset = at,
            bytes = first.bytes.len() - at + cut,
            "the log ends in a torn write, which was truncated"
        );
        for file in later {
            fs::remove_file(&file.path)
                .map_err(|source| file_error("cannot be removed", &file.path, source))?;
        }
        let cut = |keep: u64| fs::File::options().write(true).open(&first.path)?.set_len(keep);
        match at < HEADER_BYTES {
            true => {
                self.next_file = first.number;
                fs::remove_file(&first.path)
            }
            false => cut(at as u64),
        }
        .map_err(|source| file_error("cannot be truncated", &first.path, source))
    }
}

fn read(directory: &Directory, kind: Kind, number: u64) -> Result<LogFile> {
    let path = directory.file(kind, number);
    let bytes = fs::read(&path).map_err(|source| file_error("cannot be read", &path, source))?;
    let header = Header::decode(&bytes).map_err(|error| error.with("file", path.display()))?;
    let mut file = LogFile { path, number, header, bytes };
    if let Some(header) = file.header
        && (header.kind, header.number) != (kind, number)
    {
        file.header = None;
        return Err(damaged_error(&file, 0).with("because", "its header does not match its name"));
    }
    Ok(file)
}

fn damaged_error(file: &LogFile, at: usize) -> Error {
    Error::new(
        ErrorCode::PERSISTENT_FAIL,
        "the log of the master is damaged; restore a good copy, or move the state directory away \
         to start with an empty pool",
    )
    .with("file", file.path.display())
    .with("offset", at)
}
