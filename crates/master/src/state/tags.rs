//! Tags: text that a writer stores beside an object.

use mooncake_base::{Error, Result};

/// Maximum number of tags of an object.
const TAGS_MAX: usize = 32;

/// Maximum length of all names and values of the tags of an object.
const TAG_BYTES_MAX: usize = 1024;

/// Text that the writer stores beside an object: names and values, sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tags(Box<[(Box<str>, Box<str>)]>);

impl Tags {
    /// Checks the tags of a put.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: too many tags, too long ones, an empty name, or a name twice.
    pub fn new<'a>(tags: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut sorted: Vec<(Box<str>, Box<str>)> =
            tags.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        sorted.sort_unstable();
        let bytes: usize = sorted.iter().map(|(name, value)| name.len() + value.len()).sum();
        if sorted.len() > TAGS_MAX || bytes > TAG_BYTES_MAX {
            return Err(Error::invalid("an object takes few and short tags")
                .with("tags", sorted.len())
                .with("limit", TAGS_MAX)
                .with("tag_bytes", bytes)
                .with("limit_bytes", TAG_BYTES_MAX));
        }
        if sorted.first().is_some_and(|(name, _)| name.is_empty()) {
            return Err(Error::invalid("a tag has a name"));
        }
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::invalid("a tag is given twice").with("tag", &pair[0].0));
        }
        Ok(Self(sorted.into()))
    }

    /// Returns names and values in the order of the names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Returns the value of a tag.
    pub fn value(&self, name: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(own, _)| (**own).cmp(name)).ok()?;
        Some(&self.0[at].1)
    }

    /// Returns whether there are no tags.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
