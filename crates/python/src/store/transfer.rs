//! Puts and gets between caller memory and the pool, one batch per call.

use mooncake_base::{Error, ErrorCode, ObjectKey, Result, Version};
use mooncake_store_client::{Client, Located, PutItem, PutOptions, PutOutcome, Read};
use mooncake_transfer_engine::LocalRange;
use pyo3::{prelude::*, types::PyBytes};

use super::advice;
use crate::{
    argument::{PackedKeys, call_with_valid, partition_valid},
    buffer::{Buffer, uninit_bytes},
};

/// Puts the valid items. Returns the version of each new object; `None`: an existing object was kept.
pub(crate) fn put(
    client: &Client,
    names: &PackedKeys,
    values: &[&[LocalRange]],
    mut options: PutOptions,
) -> Vec<Result<Option<Version>>> {
    let mut groups = std::mem::take(&mut options.groups).into_iter();
    let checked = names.iter().zip(values).map(|(key, parts)| {
        let group = groups.next();
        let key = key?;
        check_source(parts)?;
        // There is one group per item, so the groups of invalid items are dropped, too.
        options.groups.extend(group);
        Ok(PutItem { key, parts })
    });
    let (items, invalid) = partition_valid(checked);
    let outcomes = invalid.merge_into(client.put(&items, &options));
    advice::warn(client, &outcomes, &options);
    let version = |outcome| match outcome {
        PutOutcome::Stored { version, .. } => Some(version),
        PutOutcome::Existed => None,
    };
    outcomes.into_iter().map(|outcome| outcome.map(version)).collect()
}

/// Locates objects, to be read next. Leases them if `takes_lease` is set.
pub(crate) fn locate(
    client: &Client,
    keys: Vec<Result<ObjectKey>>,
    takes_lease: bool,
) -> Vec<Result<Located>> {
    call_with_valid(keys, |keys| client.locate_owned(keys, takes_lease))
}

/// Memory that a get allocates for an object and fills.
pub(crate) trait GetTarget: Sized {
    /// Allocates memory of that length; returns it with the range to fill.
    fn allocate(py: Python<'_>, length: u64) -> PyResult<(Self, LocalRange)>;
}

impl GetTarget for Py<PyBytes> {
    fn allocate(py: Python<'_>, length: u64) -> PyResult<(Self, LocalRange)> {
        uninit_bytes(py, length)
    }
}

/// A [`Buffer`] whose bytes Python sees as unsigned.
pub(crate) struct UnsignedBuffer(pub(crate) Buffer);

impl GetTarget for UnsignedBuffer {
    fn allocate(_: Python<'_>, length: u64) -> PyResult<(Self, LocalRange)> {
        Buffer::uninit(length, false).map(|(buffer, range)| (Self(buffer), range))
    }
}

/// A [`Buffer`] whose bytes Python sees as signed.
pub(crate) struct SignedBuffer(pub(crate) Buffer);

impl GetTarget for SignedBuffer {
    fn allocate(_: Python<'_>, length: u64) -> PyResult<(Self, LocalRange)> {
        Buffer::uninit(length, true).map(|(buffer, range)| (Self(buffer), range))
    }
}

/// Reads whole objects into memory; returns their lengths.
pub(crate) fn read(
    client: &Client,
    located: Vec<Result<&Located>>,
    into: &[LocalRange],
) -> Vec<Result<u64>> {
    let mut ranges = into.iter();
    call_with_valid(located, |located| {
        let reads: Vec<Read<'_>> = located
            .into_iter()
            .zip(ranges.by_ref())
            .map(|(located, range)| Read::whole(located, std::slice::from_ref(range)))
            .collect();
        client.read(&reads)
    })
}

/// How whole objects are read into caller memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GetTerms {
    /// The memory must be exactly as large as the object.
    pub(crate) is_exact: bool,
    /// Lease the objects.
    pub(crate) takes_lease: bool,
}

/// Reads whole objects into caller memory.
pub(crate) fn get_into(
    client: &Client,
    keys: Vec<Result<ObjectKey>>,
    into: &[&[LocalRange]],
    terms: GetTerms,
) -> Vec<Result<u64>> {
    let located = locate(client, keys, terms.takes_lease);
    let fitting: Vec<Result<(&Located, &[LocalRange])>> = located
        .iter()
        .zip(into)
        .map(|(located, into)| {
            let located = located.as_ref().map_err(Clone::clone)?;
            check_destination(located.length(), into, terms.is_exact)?;
            Ok((located, *into))
        })
        .collect();
    call_with_valid(fitting, |fitting| {
        let reads: Vec<Read<'_>> =
            fitting.into_iter().map(|(located, into)| Read::whole(located, into)).collect();
        client.read(&reads)
    })
}

fn check_source(value: &[LocalRange]) -> Result<()> {
    if length(value) == 0 {
        return Err(Error::invalid("the value is empty; an object has at least one byte"));
    }
    check_addresses(value)
}

fn check_destination(object: u64, into: &[LocalRange], is_exact: bool) -> Result<()> {
    let room = length(into);
    if room < object {
        return Err(Error::invalid("the destination is smaller than the object")
            .with("object_bytes", object)
            .with("destination_bytes", room));
    }
    if is_exact && room > object {
        return Err(Error::new(
            ErrorCode::TRANSFER_FAIL,
            "the buffers together are larger than the object",
        )
        .with("object_bytes", object)
        .with("destination_bytes", room));
    }
    check_addresses(into)
}

fn check_addresses(ranges: &[LocalRange]) -> Result<()> {
    if ranges.iter().any(|range| range.address() == 0 && range.length() > 0) {
        return Err(Error::invalid("a buffer address is null"));
    }
    Ok(())
}

fn length(ranges: &[LocalRange]) -> u64 {
    ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(range.length() as u64))
}
