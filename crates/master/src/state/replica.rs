//! Replicas: where the memory of an object lies.

use std::ops::Deref;

use mooncake_base::ReplicaId;

use crate::state::ids::{BlockId, SegmentSlot};

/// The id of a replica is the low half of the version, and the ordinal of the replica.
const ORDINAL_BITS: u32 = 32;

/// The same in masters up to version 0.4.0. The writer of a put that began under such a master may name
/// its replicas by these ids after a restart.
const ORDINAL_BITS_BEFORE: u32 = 16;

/// The ordinal of the copy on disk, of which an object has at most one.
pub(in crate::state) const DISK_ORDINAL: u32 = u32::MAX;

/// Returns the id of the copy on disk of that version.
pub(in crate::state) fn disk_copy_id(version: u64) -> ReplicaId {
    ReplicaId(version << ORDINAL_BITS | u64::from(DISK_ORDINAL))
}

/// One replica: where its memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) struct Replica {
    pub(in crate::state) segment: SegmentSlot,
    pub(in crate::state) block: BlockId,
    pub(in crate::state) ordinal: u32,
}

impl Replica {
    /// Returns the id, which no other replica of that version has.
    pub(in crate::state) fn id(self, version: u64) -> ReplicaId {
        ReplicaId(version << ORDINAL_BITS | u64::from(self.ordinal))
    }

    /// Returns whether the writer of that version names the replica.
    pub(in crate::state) fn is_in(self, named: &[ReplicaId], version: u64) -> bool {
        let before = version << ORDINAL_BITS_BEFORE | u64::from(self.ordinal);
        named.contains(&self.id(version)) || named.contains(&ReplicaId(before))
    }
}

/// Replicas of an object. The usual single replica needs no heap memory.
#[derive(Debug, Clone, Default)]
pub(in crate::state) enum Replicas {
    #[default]
    None,
    One(Replica),
    #[expect(clippy::box_collection, reason = "one pointer wide, which keeps every object small")]
    Many(Box<Vec<Replica>>),
}

impl Replicas {
    /// Appends a replica.
    pub(in crate::state) fn push(&mut self, replica: Replica) {
        match self {
            Self::None => *self = Self::One(replica),
            Self::One(first) => *self = Self::Many(Box::new(vec![*first, replica])),
            Self::Many(replicas) => replicas.push(replica),
        }
    }

    /// Keeps the replicas for which `is_kept` returns `true`.
    pub(in crate::state) fn retain(&mut self, mut is_kept: impl FnMut(&Replica) -> bool) {
        match self {
            Self::None => {}
            Self::One(replica) => {
                if !is_kept(replica) {
                    *self = Self::None;
                }
            }
            Self::Many(replicas) => {
                replicas.retain(is_kept);
                *self = std::mem::take(&mut **replicas).into();
            }
        }
    }
}

impl Deref for Replicas {
    type Target = [Replica];

    fn deref(&self) -> &[Replica] {
        match self {
            Self::None => &[],
            Self::One(replica) => std::slice::from_ref(replica),
            Self::Many(replicas) => replicas,
        }
    }
}

impl From<Vec<Replica>> for Replicas {
    fn from(mut replicas: Vec<Replica>) -> Self {
        match replicas[..] {
            [] => Self::None,
            [replica] => Self::One(replica),
            _ => {
                replicas.shrink_to_fit();
                Self::Many(Box::new(replicas))
            }
        }
    }
}
