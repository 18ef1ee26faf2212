//! Reads of parts of many objects: one locate call, and one transfer per peer for all parts.

use mooncake_base::{Error, Moment, ObjectKey, Result, Version};
use mooncake_transfer_engine::LocalRange;
use rustc_hash::FxHashMap;

use super::{allowed_memory::AllowedMemory, destination::check_part, locate::Grants};
use crate::{
    client::Client,
    object::{BufferScope, GridParts, Located, Parts, Read},
};

/// Outcome of the parts of one object: an error for the whole object, or a result per part.
pub type PartOutcomes = Result<Vec<Result<u64>>>;

/// What was read of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GridsRead {
    /// Number of bytes.
    pub nbytes: u64,
    /// The version of the object whose bytes were read.
    pub version: Version,
    /// The value of the wanted tag; empty if the object does not have it.
    pub tag: Box<str>,
}

impl Client {
    /// Reads parts of objects, each into its own memory, with one locate call (however often an
    /// object is named) and one transfer per peer. Returns the number of bytes read for each part.
    ///
    /// Checksums are not verified, since they cover whole objects.
    ///
    /// # Errors
    /// By object: as [`locate`](Self::locate) and [`read`](Self::read), or the number of
    /// destinations differs from the number of parts. By part: the part is outside the object, or
    /// `scope` does not allow its memory (`INVALID_PARAMS`); the other parts of the object are
    /// still read.
    pub fn read_parts(&self, wanted: &[Parts<'_>], scope: BufferScope<'_>) -> Vec<PartOutcomes> {
        let (keys, objects) = once(wanted.iter().map(|parts| parts.key));
        let found = self.locate_owned(keys, true);
        let located: Vec<_> =
            objects.iter().map(|&at| found[at].as_ref().map_err(Clone::clone)).collect();
        let begin = located.iter().flatten().next().map(|located| located.requested_at);
        self.read_parts_of(&located, wanted, scope, begin)
    }

    /// Like [`read_parts`](Self::read_parts) for ranges at regular distances. An object fails as a
    /// whole if one of its ranges cannot be read. Leases the objects if `takes_lease` is set. `tag` is
    /// the name of a tag whose value is wanted, too; empty for none.
    ///
    /// # Errors
    /// By object: as [`read_parts`](Self::read_parts), for the object or its first grid that fails.
    pub fn read_grids(
        &self,
        wanted: &[GridParts<'_>],
        scope: BufferScope<'_>,
        takes_lease: bool,
        tag: &str,
    ) -> Vec<Result<GridsRead>> {
        let (keys, objects) = once(wanted.iter().map(|parts| parts.key));
        let found = self.locate_with(keys, Grants { lease: takes_lease, fence: true, tag });
        let allowed = AllowedMemory::new(self.engine(), scope);
        let checked = objects.iter().zip(wanted).enumerate().map(|(at, (&object, parts))| {
            let located = found[object].as_ref().map_err(Clone::clone)?;
            parts.grids.iter().try_for_each(|grid| allowed.check(at, grid.memory()))?;
            Ok(Read::grids(located, parts.grids))
        });
        let checked: Vec<Result<Read<'_>>> = checked.collect();
        let reads: Vec<_> = checked.iter().flatten().copied().collect();
        let begin = reads.first().map(|read| read.located.requested_at);
        let mut read = self.read_since(begin, &reads).into_iter();
        let outcome = |checked: Result<Read<'_>>| {
            let located = checked?.located;
            let nbytes = next_of(&mut read)?;
            Ok(GridsRead { nbytes, version: located.version, tag: located.tag.clone() })
        };
        checked.into_iter().map(outcome).collect()
    }

    /// Reads parts of objects that are already located. The operation's duration counts from
    /// `begin`, or from now if `None`.
    pub(in crate::client) fn read_parts_of(
        &self,
        located: &[Result<&Located>],
        wanted: &[Parts<'_>],
        scope: BufferScope<'_>,
        begin: Option<Moment>,
    ) -> Vec<PartOutcomes> {
        let allowed = AllowedMemory::new(self.engine(), scope);
        let checked: Vec<Result<CheckedParts<'_>>> = located
            .iter()
            .zip(wanted)
            .enumerate()
            .map(|(at, (located, parts))| {
                CheckedParts::new(located.clone()?, parts, &|range| allowed.check(at, range))
            })
            .collect();
        let reads: Vec<_> = checked.iter().flatten().map(CheckedParts::read).collect();
        let mut read = self.read_since(begin, &reads).into_iter();
        checked
            .into_iter()
            .zip(wanted)
            .map(|(checked, parts)| {
                let checked = checked?;
                next_of(&mut read)?;
                Ok(checked.outcomes(parts))
            })
            .collect()
    }
}

/// Returns each key once, however often it is named, and for each item the index of its key.
fn once<'a>(wanted: impl Iterator<Item = &'a ObjectKey>) -> (Vec<ObjectKey>, Vec<usize>) {
    let mut numbers: FxHashMap<&ObjectKey, usize> = FxHashMap::default();
    let mut keys = Vec::new();
    let indices = wanted
        .map(|key| {
            *numbers.entry(key).or_insert_with(|| {
                keys.push(key.clone());
                keys.len() - 1
            })
        })
        .collect();
    (keys, indices)
}

/// Returns the outcome of the next object of a batch.
fn next_of(outcomes: &mut impl Iterator<Item = Result<u64>>) -> Result<u64> {
    let missing = || Err(Error::internal("parts of an object were left out of their batch"));
    outcomes.next().unwrap_or_else(missing)
}

/// The parts of one object, split into readable and refused ones.
struct CheckedParts<'a> {
    located: &'a Located,
    parts: ReadableParts<'a>,
    refused: Vec<(usize, Error)>,
}

enum ReadableParts<'a> {
    All(&'a Parts<'a>),
    Some(Vec<u64>, Vec<LocalRange>),
}

impl<'a> CheckedParts<'a> {
    fn new(
        located: &'a Located,
        parts: &'a Parts<'a>,
        check_memory: &dyn Fn(&LocalRange) -> Result<()>,
    ) -> Result<Self> {
        let (offsets, memory) = (parts.offsets, parts.memory);
        if offsets.len() != memory.len() {
            return Err(Error::invalid("there must be one destination for each part")
                .with("key", parts.key)
                .with("parts", offsets.len())
                .with("destinations", memory.len()));
        }
        let check = |(&offset, range): (&u64, &LocalRange)| {
            check_part(located, offset, range.length() as u64)?;
            check_memory(range)
        };
        let refused: Vec<_> = offsets
            .iter()
            .zip(memory)
            .enumerate()
            .filter_map(|(at, part)| Some((at, check(part).err()?)))
            .collect();
        if refused.is_empty() {
            return Ok(Self { located, parts: ReadableParts::All(parts), refused });
        }
        let mut bad = refused.iter().map(|(at, _)| *at).peekable();
        let good = |at: &usize| bad.next_if_eq(at).is_none();
        let good: Vec<usize> = (0..offsets.len()).filter(good).collect();
        let parts = ReadableParts::Some(
            good.iter().map(|&at| offsets[at]).collect(),
            good.iter().map(|&at| memory[at]).collect(),
        );
        Ok(Self { located, parts, refused })
    }

    fn read(&self) -> Read<'_> {
        match &self.parts {
            ReadableParts::All(parts) => Read::scattered(self.located, parts.offsets, parts.memory),
            ReadableParts::Some(offsets, memory) => Read::scattered(self.located, offsets, memory),
        }
    }

    fn outcomes(self, parts: &Parts<'_>) -> Vec<Result<u64>> {
        let mut outcomes: Vec<_> =
            parts.memory.iter().map(|range| Ok(range.length() as u64)).collect();
        for (at, error) in self.refused {
            outcomes[at] = Err(error);
        }
        outcomes
    }
}
