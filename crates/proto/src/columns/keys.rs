//! Keys, one behind the other, alone and with what a put says of each.

use bytes::{Bytes, BytesMut};

use super::{Checked, ColumnMismatch, collapse_if_uniform};
use crate::v1;

impl v1::KeyColumn {
    /// Concatenates keys.
    pub fn pack<K: AsRef<[u8]>>(keys: impl IntoIterator<Item = K, IntoIter: Clone>) -> Self {
        let keys = keys.into_iter();
        let total = keys.clone().map(|key| key.as_ref().len()).sum();
        let mut bytes = BytesMut::with_capacity(total);
        let length = |key: K| {
            bytes.extend_from_slice(key.as_ref());
            u32::try_from(key.as_ref().len()).expect("keys are short")
        };
        let lengths = keys.map(length).collect();
        Self { bytes: bytes.freeze(), lengths }
    }

    /// Returns the keys, without checking that their lengths are valid for keys.
    ///
    /// # Errors
    /// If the bytes are more or fewer than the sum of the lengths.
    pub fn keys(&self) -> Checked<Vec<&[u8]>> {
        let mut rest = &self.bytes[..];
        let mut keys = Vec::with_capacity(self.lengths.len());
        for &length in &self.lengths {
            let (key, after) = rest.split_at_checked(length as usize).ok_or(ColumnMismatch)?;
            keys.push(key);
            rest = after;
        }
        if rest.is_empty() { Ok(keys) } else { Err(ColumnMismatch) }
    }

    /// Returns the first key, truncated to the bytes present.
    pub fn first(&self) -> Bytes {
        let length = self.lengths.first().map_or(0, |&length| length as usize);
        self.bytes.slice(..length.min(self.bytes.len()))
    }
}

impl v1::PutColumns {
    /// Packs keys and lengths of objects without groups.
    pub fn pack<K: AsRef<[u8]>>(
        items: impl IntoIterator<Item = (K, u64), IntoIter: Clone>,
    ) -> Self {
        let items = items.into_iter();
        let mut lengths: Vec<u64> = items.clone().map(|(_, length)| length).collect();
        collapse_if_uniform(&mut lengths);
        let keys = Some(v1::KeyColumn::pack(items.map(|(key, _)| key)));
        Self { keys, lengths, groups: Vec::new(), if_versions: Vec::new() }
    }
}
