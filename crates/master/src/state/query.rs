//! Which objects are meant, and how they are listed: in byte order, in pages, in slices.

use mooncake_base::{Error, ObjectKey, Result, TenantId};
use regex::bytes::{Regex, RegexBuilder};

/// The compiled form of a pattern may take so many bytes.
const REGEX_BYTES_MAX: usize = 1 << 20;
/// A pattern may be so long.
const PATTERN_BYTES_MAX: usize = 16 * 1024;
/// The most objects of one page.
pub const PAGE_MAX: usize = 10_000;

/// A condition on keys.
#[derive(Debug, Clone)]
pub enum Selector {
    /// Every key.
    All,
    /// Keys in which the pattern is found somewhere.
    Regex(Regex),
    /// Keys that begin so.
    Prefix(Box<[u8]>),
}

impl Selector {
    /// Keys in which the pattern is found somewhere (searched, not anchored).
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the pattern is malformed, longer than 16 KiB or needs more than 1 MiB.
    pub fn regex(pattern: &str) -> Result<Self> {
        if pattern.len() > PATTERN_BYTES_MAX {
            return Err(Error::invalid("the pattern is too long")
                .with("pattern_bytes", pattern.len())
                .with("limit", PATTERN_BYTES_MAX));
        }
        let built = RegexBuilder::new(pattern)
            .size_limit(REGEX_BYTES_MAX)
            .dfa_size_limit(REGEX_BYTES_MAX)
            .build();
        match built {
            Ok(regex) => Ok(Self::Regex(regex)),
            Err(error) => Err(Error::invalid("the pattern is not a regular expression")
                .with("pattern", pattern)
                .caused_by(error)),
        }
    }

    /// Whether the key is meant.
    pub fn matches(&self, key: &[u8]) -> bool {
        match self {
            Self::All => true,
            Self::Regex(regex) => regex.is_match(key),
            Self::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

/// Absent, being written, or complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectState {
    /// No object has the key.
    Absent,
    /// There is a writer, and nothing to read yet.
    Writing,
    /// There is something to read.
    Complete,
}

/// An object as lists show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectSummary {
    /// Its key.
    pub key: ObjectKey,
    /// Its length in bytes; of the newest writer while there is nothing to read.
    pub length: u64,
    /// Complete or being written, never absent.
    pub state: ObjectState,
    /// How many copies there are (or will be).
    pub replicas: u32,
}

/// A listing on its way. Each slice looks at a part of the objects, so that others may call in
/// between; an object that exists all the while is never left out.
#[derive(Debug)]
pub struct Listing {
    pub(super) tenant: TenantId,
    pub(super) selector: Selector,
    pub(super) after: Option<Box<[u8]>>,
    pub(super) limit: usize,
    pub(super) next_slot: u32,
    pub(super) found: std::collections::BTreeMap<ObjectKey, ObjectSummary>,
    pub(super) is_last: bool,
}

impl Listing {
    /// A page of at most `limit` objects after the key `after`. A limit of 0, or one above
    /// [`PAGE_MAX`], counts as that.
    pub fn new(tenant: TenantId, selector: Selector, after: Option<&[u8]>, limit: usize) -> Self {
        let limit = if limit == 0 { PAGE_MAX } else { limit.min(PAGE_MAX) };
        Self {
            tenant,
            selector,
            after: after.map(Box::from),
            limit,
            next_slot: 0,
            found: std::collections::BTreeMap::new(),
            is_last: true,
        }
    }

    /// What was found, in byte order of the keys, and whether nothing comes after it.
    pub fn into_page(self) -> Page {
        Page { objects: self.found.into_values().collect(), is_last: self.is_last }
    }
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// In byte order of the keys.
    pub objects: Vec<ObjectSummary>,
    /// Whether no object comes after these.
    pub is_last: bool,
}

/// A removal of many objects on its way, in slices like [`Listing`].
#[derive(Debug)]
pub struct Removal {
    pub(super) tenant: TenantId,
    pub(super) selector: Selector,
    pub(super) is_forced: bool,
    pub(super) next_slot: u32,
    pub(super) removed: u64,
}

impl Removal {
    /// Removes what is meant and complete. Leased objects are skipped unless forced, objects
    /// without anything to read always.
    pub fn new(tenant: TenantId, selector: Selector, is_forced: bool) -> Self {
        Self { tenant, selector, is_forced, next_slot: 0, removed: 0 }
    }

    /// How many objects were removed up to now.
    pub fn removed(&self) -> u64 {
        self.removed
    }
}
