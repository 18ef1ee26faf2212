//! Which kinds of records the log may have. A master writes kinds that its predecessor cannot read only
//! after an operator has said so (`mooncake finalize`): until then there is a way back after an upgrade.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use mooncake_base::{Error, ErrorCode, Result};

use super::{Directory, Journal};
use crate::state::Image;

/// A set of kinds of records; each level has those of the levels below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RecordLevel(pub(crate) u32);

impl RecordLevel {
    /// The kinds of the first masters with a log.
    pub(crate) const FIRST: Self = Self(0);
    /// Disks.
    pub(crate) const DISKS: Self = Self(1);
    /// All kinds that this master knows.
    pub(crate) const PRESENT: Self = Self::DISKS;
}

/// The name of the file.
const FILE: &str = "level";

/// Reads the level of a log. One that is empty begins with all kinds; one without a file was written by
/// a master that knew none of them.
///
/// # Errors
/// The file cannot be read or written, or the log was finalized by a later master.
pub(super) fn open(directory: &Directory, image: &Image, is_empty: bool) -> Result<RecordLevel> {
    let kept = match directory.read_note(FILE)? {
        Some(bytes) => Some(parse(&bytes).map_err(|error| error.with("file", FILE))?),
        None => None,
    };
    let found = if image.has_disks() { RecordLevel::DISKS } else { RecordLevel::FIRST };
    let level = match kept {
        _ if is_empty => RecordLevel::PRESENT,
        Some(kept) => kept.max(found),
        None => found,
    };
    if level > RecordLevel::PRESENT {
        let text = "the log was finalized by a later master, and may have records that this one does not \
                    know: start that version";
        return Err(Error::new(ErrorCode::PERSISTENT_FAIL, text)
            .with("level", level.0)
            .with("our_level", RecordLevel::PRESENT.0));
    }
    if kept != Some(level) {
        write(directory, level)?;
    }
    Ok(level)
}

/// Keeps a level.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write(directory: &Directory, level: RecordLevel) -> Result<()> {
    directory.write_note(FILE, level.0.to_string().as_bytes())
}

fn parse(bytes: &[u8]) -> Result<RecordLevel> {
    let number = std::str::from_utf8(bytes).ok().and_then(|text| text.trim().parse().ok());
    let damaged =
        || Error::new(ErrorCode::PERSISTENT_FAIL, "the file of the log's level is damaged");
    number.map(RecordLevel).ok_or_else(damaged)
}

/// Which kinds of records a log may have, and where that is kept.
#[derive(Debug)]
pub(crate) struct KeptLevel {
    directory: Arc<Directory>,
    level: AtomicU32,
}

impl KeptLevel {
    pub(super) const fn new(directory: Arc<Directory>, level: RecordLevel) -> Self {
        Self { directory, level: AtomicU32::new(level.0) }
    }

    /// Returns which kinds of records may be written.
    pub(crate) fn get(&self) -> RecordLevel {
        RecordLevel(self.level.load(Ordering::Acquire))
    }

    /// Lets all kinds of records be written that this master knows. Earlier masters cannot read the log
    /// from the first such record on.
    ///
    /// # Errors
    /// The level cannot be kept.
    fn finalize(&self) -> Result<()> {
        write(&self.directory, RecordLevel::PRESENT)?;
        self.level.store(RecordLevel::PRESENT.0, Ordering::Release);
        Ok(())
    }
}

/// Lets all kinds of records be written, unless a standby could not read the log then.
///
/// # Errors
/// There is such a standby, or the level cannot be kept.
pub(crate) fn finalize(journal: &Journal) -> Result<()> {
    let standbys = journal.followers().status();
    if let Some(earlier) = standbys.iter().find(|standby| standby.level < RecordLevel::PRESENT) {
        let text = "a standby is of an earlier version, which could not read the log any more: install \
                    this version there first";
        return Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text)
            .with("standby", &earlier.address));
    }
    journal.level().finalize()
}

/// Refuses what needs a kind of record that may not be written yet.
///
/// # Errors
/// The log is not finalized.
pub(crate) fn check(journal: Option<&Journal>, needed: RecordLevel, what: &str) -> Result<()> {
    match journal.map(|journal| journal.level().get()) {
        Some(level) if level < needed => {
            let text = format!(
                "{what} would write records that earlier masters cannot read, and the log may still be \
                 one of theirs: run `mooncake finalize` once no master has to go back to the earlier \
                 version"
            );
            Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text))
        }
        _ => Ok(()),
    }
}
