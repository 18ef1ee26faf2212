//! Log records of tasks and drain jobs, one per id, with their own encoding.
//!
//! The record of a finished task or job is complete. The record of an unfinished one has what a
//! restarted master needs to start it again: an attempt dies with the master, and the space it
//! wrote to is quarantined. Tasks of a drain have no records, since the job finds their objects
//! again.

use mooncake_base::Moment;

use crate::state::ledger::effect::{reader::Reader, writer::Writer};

/// The id of the record about all tasks.
pub(in crate::state) const ALL: u128 = 0;

/// The kind of a record, stored in its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum RecordKind {
    /// A copy or a move created by a caller.
    Task,
    /// A drain job.
    Job,
}

impl RecordKind {
    fn code(self) -> u8 {
        match self {
            Self::Task => 1,
            Self::Job => 2,
        }
    }

    pub(in crate::state) fn from_code(code: u8) -> Option<Self> {
        [Self::Task, Self::Job].into_iter().find(|kind| kind.code() == code)
    }

    /// Starts a record of this kind.
    pub(in crate::state) fn begin(self) -> Vec<u8> {
        vec![self.code()]
    }
}

/// Encodes a moment. The value is meaningless after a reboot.
pub(in crate::state) fn write_moment(out: &mut Writer<'_>, moment: Moment) {
    out.time(moment.since_boot());
}

/// Decodes a moment, limited to the present.
pub(in crate::state) fn read_moment(input: &mut Reader<'_>, now: Moment) -> Option<Moment> {
    Some(now.min(Moment::from_boot(input.time()?)))
}

/// Encodes a list of strings: their number, then each of them.
pub(in crate::state) fn write_texts(out: &mut Writer<'_>, texts: &[impl AsRef<str>]) {
    out.int(texts.len() as u64);
    for text in texts {
        out.text(text.as_ref());
    }
}

/// Decodes a list of strings.
pub(in crate::state) fn read_texts<T: for<'a> From<&'a str>>(
    input: &mut Reader<'_>,
) -> Option<Vec<T>> {
    let count = input.int()?;
    // A damaged count ends at the end of the bytes.
    (0..count).map(|_| input.text().map(T::from)).collect()
}

/// Decodes the ordinal of the next replica, if the record contains it.
pub(in crate::state) fn next_ordinal(id: u128, record: Option<&[u8]>) -> Option<u32> {
    (id == ALL).then(|| u32::try_from(Reader::new(record?).int()?).ok())?
}
