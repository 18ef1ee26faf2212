//! Selection of many objects by their keys, for lists and removals, which run in slices.

pub(in crate::state) mod listing;
pub(in crate::state) mod removal;

use mooncake_base::{Error, Result};
use regex::bytes::{Regex, RegexBuilder};

use crate::state::{catalog::object::Objects, ids::ObjectSlot, inventory::removal::SLICE};

/// Key bytes after which a slice ends early.
const SLICE_KEY_BYTES: usize = 256 << 10;

/// Maximum size of a compiled pattern. A match takes a time in proportion to it, and to the key.
const REGEX_BYTES_MAX: usize = 256 << 10;

/// Maximum length of a pattern.
const PATTERN_BYTES_MAX: usize = 16 * 1024;

/// A condition on keys.
#[derive(Debug, Clone)]
pub enum Selector {
    /// Every key.
    All,
    /// Keys that contain a match of the pattern.
    Regex(Regex),
    /// Keys with this prefix.
    Prefix(Box<[u8]>),
}

impl Selector {
    /// Selects keys that contain a match of the pattern (searched, not anchored).
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the pattern is malformed, longer than 16 KiB or needs more than 256 KiB.
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
            Err(error) => {
                // The last line has the reason, those before it the position.
                let text = error.to_string();
                let why = text.lines().last().unwrap_or_default().trim_start_matches("error: ");
                Err(Error::invalid("the pattern is not a regular expression")
                    .with("pattern", pattern)
                    .with("why", why))
            }
        }
    }

    /// Returns whether the key is selected.
    pub fn matches(&self, key: &[u8]) -> bool {
        match self {
            Self::All => true,
            Self::Regex(regex) => regex.is_match(key),
            Self::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

/// The objects of a slice whose keys a pattern is still to be matched with. That can take seconds for
/// long keys, so the state must not be locked meanwhile.
#[derive(Debug, Default)]
pub(in crate::state) struct Candidates {
    pub(in crate::state) found: Vec<(ObjectSlot, Box<[u8]>)>,
    is_matched: bool,
}

impl Candidates {
    fn push(&mut self, slot: ObjectSlot, key: &[u8]) {
        self.found.push((slot, Box::from(key)));
        self.is_matched = false;
    }

    /// Keeps the objects whose keys are selected.
    fn match_keys(&mut self, selector: &Selector) {
        if !std::mem::replace(&mut self.is_matched, true) {
            self.found.retain(|(_, key)| selector.matches(key));
        }
    }
}

/// Returns the end of the slice that begins at a slot number.
fn end_of_slice(objects: &Objects, start: u32) -> u32 {
    start.saturating_add(SLICE).min(objects.slot_count())
}
