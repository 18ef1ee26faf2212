//! What a loss of power leaves of a master's state directory. The offsets are those of
//! `crates/master/src/journal/log_frame.rs`.

use std::{
    fs::{self, File},
    io::Result,
    path::{Path, PathBuf},
};

const MAGIC: &[u8] = b"MOONLOG\n\x02\0\0\0";
const BOOT_AT: usize = 40;
const HEADER_CHECKSUM_AT: usize = 56;
const HEADER_BYTES: usize = 60;
const FRAME_BYTES: usize = 24;

/// Copies the files of a state directory that is in use, each cut somewhere at its present end.
///
/// # Errors
/// A file cannot be copied.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for path in files(from)? {
        fs::copy(&path, to.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

/// Removes what the log itself does not call synced. Returns the number of frames that are left.
///
/// # Errors
/// A file cannot be read or truncated.
pub fn drop_unsynced(folder: &Path) -> Result<u64> {
    let mut logs: Vec<PathBuf> = files(folder)?;
    logs.retain(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"log"))
    });
    let synced = logs.iter().map(|log| Ok(frames(&fs::read(log)?).map(|frame| frame.synced).max()));
    let synced = synced.collect::<Result<Vec<_>>>()?.into_iter().flatten().max().unwrap_or(0);
    let mut left = 0;
    for log in logs {
        let bytes = fs::read(&log)?;
        let end = frames(&bytes).find(|frame| frame.number >= synced).map(|frame| frame.at);
        left += frames(&bytes).filter(|frame| frame.number < synced).count() as u64;
        File::options().write(true).open(&log)?.set_len(end.unwrap_or(bytes.len()) as u64)?;
    }
    Ok(left)
}

/// Makes the files those of another boot of the machine.
///
/// # Errors
/// A file cannot be read or written.
///
/// # Panics
/// A file has another format than that of this module.
pub fn change_boot(folder: &Path) -> Result<()> {
    for path in files(folder)? {
        let mut bytes = fs::read(&path)?;
        let Some(header) = bytes.get_mut(..HEADER_BYTES) else { continue };
        assert!(header.starts_with(MAGIC), "{} has another format", path.display());
        header[BOOT_AT] ^= 1;
        let checksum = crc32fast::hash(&header[..HEADER_CHECKSUM_AT]);
        header[HEADER_CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        fs::write(&path, bytes)?;
    }
    Ok(())
}

struct Frame {
    at: usize,
    number: u64,
    /// Frames with a lower number were on disk when this one was written.
    synced: u64,
}

/// Returns the frames of a log, up to a torn one.
fn frames(bytes: &[u8]) -> impl Iterator<Item = Frame> {
    let mut at = HEADER_BYTES;
    std::iter::from_fn(move || {
        let head = bytes.get(at..at + FRAME_BYTES)?;
        let word = |from: usize| head[from..from + 8].try_into().map(u64::from_le_bytes).ok();
        let length = u32::from_le_bytes(head[..4].try_into().ok()?) as usize;
        bytes.get(at..at + FRAME_BYTES + length)?;
        let frame = Frame { at, number: word(8)?, synced: word(16)? };
        at += FRAME_BYTES + length;
        Some(frame)
    })
}

/// Returns the paths of the log's files in order.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>();
    let mut paths = paths?;
    paths.retain(|path| path.file_name().is_some_and(|name| name != "lock"));
    paths.sort();
    Ok(paths)
}
