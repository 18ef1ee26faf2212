//! Ids of the state's tables: one type per table, so that two ids cannot be swapped by mistake.
//!
//! ```
//! use mooncake_master::state::{
//!     KeyHash, ObjectSlot,
//!     eviction::{EvictionPolicy, Lru},
//! };
//!
//! Lru::default().insert(ObjectSlot::new(1), KeyHash::new(2));
//! ```
//!
//! A swapped pair does not compile:
//!
//! ```compile_fail,E0308
//! use mooncake_master::state::{
//!     KeyHash, ObjectSlot,
//!     eviction::{EvictionPolicy, Lru},
//! };
//!
//! Lru::default().insert(KeyHash::new(2), ObjectSlot::new(1));
//! ```

/// Declares a number that names one entry of a table.
macro_rules! id {
    ($(#[$doc:meta])* $vis:vis $name:ident($number:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        $vis struct $name($number);

        impl $name {
            /// Wraps a number.
            $vis const fn new(number: $number) -> Self {
                Self(number)
            }

            /// Returns the number.
            $vis const fn number(self) -> $number {
                self.0
            }
        }
    };
}

id!(
    /// Position of an object in the object table; reused after the object is gone.
    pub ObjectSlot(u32)
);

id!(
    /// Position of a segment in the segment table; reused, unlike a
    /// [`SegmentNumber`](super::SegmentNumber).
    pub SegmentSlot(u32)
);

id!(
    /// Position of a disk in the table of disks; reused, unlike its number in the log.
    pub DiskSlot(u16)
);

id!(
    /// Position of an unfinished put in the table of puts.
    pub(crate) WriteSlot(u32)
);

id!(
    /// Position of a tenant in the tenant table.
    pub(crate) TenantIndex(u16)
);

id!(
    /// Seeded hash of a tenant and a key.
    pub KeyHash(u32)
);

impl ObjectSlot {
    /// No object.
    pub(in crate::state) const NONE: Self = Self(u32::MAX);
}

impl DiskSlot {
    /// No disk.
    pub(in crate::state) const NONE: Self = Self(u16::MAX);
}

impl WriteSlot {
    /// No put.
    pub(in crate::state) const NONE: Self = Self(u32::MAX);
}

/// A position in a table.
pub(crate) trait Slot: Copy {
    /// Wraps a position.
    fn from_number(number: u32) -> Self;

    /// Returns the position.
    fn to_number(self) -> u32;

    /// Returns the position as an index of a vector.
    fn index(self) -> usize {
        self.to_number() as usize
    }

    /// Wraps the index of a vector that has fewer than 2^32 entries.
    fn from_index(index: usize) -> Self {
        Self::from_number(index as u32)
    }

    /// Returns the slots from `start` up to, but not including, `end`.
    fn range(start: u32, end: u32) -> impl Iterator<Item = Self> + Clone {
        (start..end).map(Self::from_number)
    }
}

impl Slot for ObjectSlot {
    fn from_number(number: u32) -> Self {
        Self::new(number)
    }

    fn to_number(self) -> u32 {
        self.number()
    }
}

impl Slot for SegmentSlot {
    fn from_number(number: u32) -> Self {
        Self::new(number)
    }

    fn to_number(self) -> u32 {
        self.number()
    }
}

impl Slot for WriteSlot {
    fn from_number(number: u32) -> Self {
        Self::new(number)
    }

    fn to_number(self) -> u32 {
        self.number()
    }
}

impl TenantIndex {
    /// The default tenant.
    pub(in crate::state) const DEFAULT: Self = Self(0);

    /// Returns the position as an index of a vector.
    pub(in crate::state) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// An allocated block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub(in crate::state) u32);

impl BlockId {
    /// The lowest id.
    pub(in crate::state) const FIRST: Self = Self(0);
}
