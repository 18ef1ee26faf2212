//! Batches as messages: keys packed into one buffer, batches cut where a message would grow too
//! large.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use mooncake_base::{KeyBatch, ObjectKey, Result};

/// The most items of one message. Bounds how long the master is busy with it, and with
/// [`KEY_BYTES_MAX`] keeps it and its answer well below the limit of a frame.
pub(super) const ITEMS_MAX: usize = 8192;

/// The most bytes of keys and names in one message.
pub(super) const KEY_BYTES_MAX: usize = 4 << 20;

/// Cuts a batch into ranges that fit a message each and bring along at most so many bytes, unless
/// a single item does.
pub(super) fn split(sizes: impl Iterator<Item = usize>, bytes_max: usize) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let (mut start, mut end, mut bytes) = (0, 0, 0_usize);
    for size in sizes {
        if end > start && (end - start == ITEMS_MAX || bytes.saturating_add(size) > bytes_max) {
            ranges.push(start..end);
            (start, bytes) = (end, 0);
        }
        bytes = bytes.saturating_add(size);
        end += 1;
    }
    if end > start {
        ranges.push(start..end);
    }
    ranges
}

/// The keys as they go into a message, in one allocation.
pub(super) fn pack<'a>(keys: impl Iterator<Item = &'a ObjectKey> + Clone) -> Vec<Bytes> {
    let mut packed = BytesMut::with_capacity(keys.clone().map(|key| key.as_bytes().len()).sum());
    keys.map(|key| {
        packed.extend_from_slice(key.as_bytes());
        packed.split().freeze()
    })
    .collect()
}

/// The keys, without another copy, in messages that fit.
pub(super) fn messages(keys: KeyBatch) -> impl Iterator<Item = Vec<Bytes>> {
    let (bytes, ends) = keys.into_bytes();
    let bytes = Bytes::from(bytes);
    let mut start = 0;
    let ranges: Vec<Range<usize>> =
        ends.into_iter().map(|end| std::mem::replace(&mut start, end)..end).collect();
    let parts = split(ranges.iter().map(Range::len), KEY_BYTES_MAX);
    parts
        .into_iter()
        .map(move |keys| ranges[keys].iter().map(|range| bytes.slice(range.clone())).collect())
}

/// Does a batch of keys in messages that fit. The failure of a message is that of its keys.
pub(super) fn for_keys<T>(
    keys: &[ObjectKey],
    mut call: impl FnMut(&[ObjectKey], Vec<Bytes>) -> Result<Vec<Result<T>>>,
) -> Vec<Result<T>> {
    let mut results = Vec::with_capacity(keys.len());
    for range in split(keys.iter().map(|key| key.as_bytes().len()), KEY_BYTES_MAX) {
        let part = &keys[range];
        match call(part, pack(part.iter())) {
            Ok(part) => results.extend(part),
            Err(error) => results.extend(part.iter().map(|_| Err(error.clone()))),
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_cut_by_count_and_by_bytes_and_loses_nothing() {
        assert!(split(std::iter::empty(), 10).is_empty());
        assert_eq!(split([1; 10].into_iter(), 10), vec![0..10]);
        assert_eq!(split([5; 3].into_iter(), 10), [0..2, 2..3]);
        assert_eq!(split([20; 2].into_iter(), 10), [0..1, 1..2], "one always goes");
        let many = split(std::iter::repeat_n(0, ITEMS_MAX + 1), 10);
        assert_eq!(many, [0..ITEMS_MAX, ITEMS_MAX..ITEMS_MAX + 1]);
    }

    #[test]
    fn packed_keys_are_the_keys() {
        let keys: Vec<_> = ["a", "bc", "d"].map(|k| ObjectKey::new(k.as_bytes()).unwrap()).into();
        let packed = pack(keys.iter());
        assert_eq!(packed, [&b"a"[..], b"bc", b"d"]);
        let mut batch = KeyBatch::default();
        ["a", "", "bc"].iter().for_each(|key| batch.push(key.as_bytes()));
        assert_eq!(messages(batch).collect::<Vec<_>>(), [[&b"a"[..], b"", b"bc"]]);
    }
}
