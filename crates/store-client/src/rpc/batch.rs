//! Splits batches into messages of limited size and packs keys into one buffer.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use mooncake_base::{KeyBatch, ObjectKey, Result};

/// Maximum items per message. Bounds the master's work per message. Together with
/// [`KEY_BYTES_MAX`], keeps the request and its response well below the frame limit.
pub(crate) const ITEMS_MAX: usize = 8192;

/// Maximum bytes of keys and names per message.
pub(crate) const KEY_BYTES_MAX: usize = 4 << 20;

/// Splits a batch into ranges that each fit one message and hold at most `bytes_max` bytes. An item
/// larger than that gets a range of its own.
pub(crate) fn split(sizes: impl Iterator<Item = usize>, bytes_max: usize) -> Vec<Range<usize>> {
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

/// Packs keys for a message with a single allocation.
pub(crate) fn pack<'a>(keys: impl Iterator<Item = &'a ObjectKey> + Clone) -> Vec<Bytes> {
    let mut packed = BytesMut::with_capacity(keys.clone().map(|key| key.as_bytes().len()).sum());
    keys.map(|key| {
        packed.extend_from_slice(key.as_bytes());
        packed.split().freeze()
    })
    .collect()
}

/// Splits the keys into messages without copying them again.
pub(crate) fn messages(keys: KeyBatch) -> impl Iterator<Item = Vec<Bytes>> {
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

/// Calls `call` once per message of keys. If a message fails, each of its keys gets the error.
pub(crate) fn for_keys<T>(
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
    fn splits_batch_by_count_and_bytes() {
        assert!(split(std::iter::empty(), 10).is_empty());
        assert_eq!(split([1; 10].into_iter(), 10), vec![0..10]);
        assert_eq!(split([5; 3].into_iter(), 10), [0..2, 2..3]);
        assert_eq!(split([20; 2].into_iter(), 10), [0..1, 1..2], "an oversized item goes alone");
        let many = split(std::iter::repeat_n(0, ITEMS_MAX + 1), 10);
        assert_eq!(many, [0..ITEMS_MAX, ITEMS_MAX..ITEMS_MAX + 1]);
    }

    #[test]
    fn packing_preserves_keys() {
        let keys: Vec<_> = ["a", "bc", "d"].map(|k| ObjectKey::new(k.as_bytes()).unwrap()).into();
        let packed = pack(keys.iter());
        assert_eq!(packed, [&b"a"[..], b"bc", b"d"]);
        let mut batch = KeyBatch::default();
        ["a", "", "bc"].iter().for_each(|key| batch.push(key.as_bytes()));
        assert_eq!(messages(batch).collect::<Vec<_>>(), [[&b"a"[..], b"", b"bc"]]);
    }
}
