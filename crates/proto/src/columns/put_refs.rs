//! The puts that a call ends.

use super::{Checked, ColumnMismatch, checksums::Checksums};
use crate::v1;

/// The end of one put, read from columns.
#[derive(Debug, Clone, Copy)]
pub struct PutRef<'a> {
    /// The key; empty if the call does not contain it.
    pub key: &'a [u8],
    /// The version, which no other put has.
    pub version: u64,
    /// The checksum of the whole object, if the writer computed one.
    pub checksum: Option<u64>,
    /// The copies that were not written.
    pub failed_replicas: &'a [u64],
    /// The copies that were written, and at which bytes of an earlier attempt may still arrive.
    pub late_replicas: &'a [u64],
}

/// Replicas of some items, by the number of the item.
#[derive(Debug, Clone, Copy)]
struct ReplicasByItem<'a> {
    items: &'a [u32],
    replicas: &'a [u64],
}

impl<'a> ReplicasByItem<'a> {
    fn read(items: &'a [u32], replicas: &'a [u64], count: usize) -> Checked<Self> {
        let last = items.last().map_or(0, |&item| item as usize + 1);
        let is_consistent = items.len() == replicas.len() && items.is_sorted() && last <= count;
        if is_consistent { Ok(Self { items, replicas }) } else { Err(ColumnMismatch) }
    }

    /// Takes the replicas of an item; the items before it were taken.
    fn take(&mut self, item: usize) -> &'a [u64] {
        let count = self.items.iter().take_while(|&&other| other as usize == item).count();
        let (taken, others) = self.replicas.split_at(count);
        (self.items, self.replicas) = (&self.items[count..], others);
        taken
    }
}

/// An iterator over the puts that a call ends.
#[derive(Debug, Clone)]
pub struct PutRefs<'a> {
    versions: std::slice::Iter<'a, u64>,
    item: usize,
    /// Empty if the call contains no keys.
    keys: std::vec::IntoIter<&'a [u8]>,
    checksums: Checksums<'a>,
    failed: ReplicasByItem<'a>,
    late: ReplicasByItem<'a>,
}

impl<'a> PutRefs<'a> {
    /// Checks the columns.
    ///
    /// # Errors
    /// If the columns are inconsistent.
    pub fn read(columns: &'a v1::PutRefColumns) -> Checked<Self> {
        let versions = &columns.versions;
        let items = versions.len();
        let failed = ReplicasByItem::read(&columns.failed_items, &columns.failed_replicas, items)?;
        let late = ReplicasByItem::read(&columns.late_items, &columns.late_replicas, items)?;
        let keys = match &columns.keys {
            None => Vec::new(),
            Some(keys) if keys.lengths.len() == items => keys.keys()?,
            Some(_) => return Err(ColumnMismatch),
        };
        let checksums = Checksums::read(columns.checksums.as_ref(), items)?;
        Ok(Self {
            versions: versions.iter(),
            item: 0,
            keys: keys.into_iter(),
            checksums,
            failed,
            late,
        })
    }
}

impl<'a> Iterator for PutRefs<'a> {
    type Item = PutRef<'a>;

    fn next(&mut self) -> Option<PutRef<'a>> {
        let version = *self.versions.next()?;
        let item = self.item;
        self.item += 1;
        let key = self.keys.next().unwrap_or_default();
        let checksum = self.checksums.take(item);
        let (failed_replicas, late_replicas) = (self.failed.take(item), self.late.take(item));
        Some(PutRef { key, version, checksum, failed_replicas, late_replicas })
    }
}
