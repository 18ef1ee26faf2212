//! Object keys and tenants. The tenant is a type of its own, not a part of the key's text.

use std::{borrow::Borrow, fmt, sync::Arc};

use crate::{Error, ErrorCode, Result};

/// The maximum length of a key in bytes.
pub const KEY_BYTES_MAX: usize = 64 * 1024;

/// The tenant whose namespace a key belongs to.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(Arc<str>);

impl TenantId {
    /// The name of the tenant of callers that name none.
    pub const DEFAULT: &'static str = "default";

    /// Creates the tenant with this name; an empty name means the default tenant.
    pub fn new(name: &str) -> Self {
        Self(Arc::from(if name.is_empty() { Self::DEFAULT } else { name }))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for TenantId {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// The name of an object within its tenant: 1 to [`KEY_BYTES_MAX`] arbitrary bytes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey(Box<[u8]>);

impl ObjectKey {
    /// Creates a key from the bytes.
    ///
    /// # Errors
    /// If the key is empty or too long.
    pub fn new(bytes: impl Into<Box<[u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        KeyRef::new(&bytes)?;
        Ok(Self(bytes))
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A borrowed [`ObjectKey`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyRef<'a>(&'a [u8]);

impl<'a> KeyRef<'a> {
    /// Borrows the bytes as a key.
    ///
    /// # Errors
    /// The same as for [`ObjectKey::new`].
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        match bytes.len() {
            0 => Err(Error::invalid("the key is empty")),
            1..=KEY_BYTES_MAX => Ok(Self(bytes)),
            length => Err(Error::new(ErrorCode::INVALID_KEY, "the key is too long")
                .with("key_bytes", length)
                .with("limit", KEY_BYTES_MAX)),
        }
    }

    /// Returns the bytes.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }
}

impl<'a> From<&'a ObjectKey> for KeyRef<'a> {
    fn from(key: &'a ObjectKey) -> Self {
        Self(&key.0)
    }
}

impl AsRef<[u8]> for KeyRef<'_> {
    fn as_ref(&self) -> &[u8] {
        self.0
    }
}

impl fmt::Display for KeyRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Printed(self.0).fmt(f)
    }
}

/// The keys of one call, concatenated in one buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyBatch {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl KeyBatch {
    /// Creates an empty batch with capacity for this number of keys.
    pub fn with_capacity(keys: usize) -> Self {
        Self { bytes: Vec::new(), ends: Vec::with_capacity(keys) }
    }

    /// Appends a key. A key that is too long for any object becomes the empty key, which no object
    /// has either.
    pub fn push(&mut self, key: &[u8]) {
        if key.len() <= KEY_BYTES_MAX {
            self.bytes.extend_from_slice(key);
        }
        self.ends.push(self.bytes.len());
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the concatenated bytes and the end offset of each key.
    pub fn into_bytes(self) -> (Vec<u8>, Vec<usize>) {
        (self.bytes, self.ends)
    }
}

impl Borrow<[u8]> for ObjectKey {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Printed(&self.0).fmt(f)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Displays key bytes for people: quoted, truncated when long, and escaped where they are control
/// characters or no text.
#[derive(Debug, Clone, Copy)]
pub struct Printed<'a>(pub &'a [u8]);

impl fmt::Display for Printed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 128;
        let shown = &self.0[..self.0.len().min(SHOWN)];
        f.write_str("\"")?;
        for chunk in shown.utf8_chunks() {
            write!(f, "{}{}", chunk.valid().escape_debug(), chunk.invalid().escape_ascii())?;
        }
        f.write_str("\"")?;
        if shown.len() < self.0.len() {
            write!(f, "… ({} bytes)", self.0.len())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_length_is_checked() {
        assert!(ObjectKey::new(*b"a\0\xff").is_ok());
        assert!(ObjectKey::new(vec![7; KEY_BYTES_MAX]).is_ok());
        assert!(ObjectKey::new(vec![7; KEY_BYTES_MAX + 1]).is_err());
        let empty = ObjectKey::new([]).unwrap_err();
        assert_eq!(empty.code(), ErrorCode::INVALID_PARAMS);
    }

    #[test]
    fn batch_keeps_the_position_of_oversized_keys() {
        let mut batch = KeyBatch::with_capacity(4);
        for key in [&b"ab"[..], &[7; KEY_BYTES_MAX + 1], b"", b"c"] {
            batch.push(key);
        }
        assert_eq!(batch.len(), 4);
        assert_eq!(batch.into_bytes(), (b"abc".to_vec(), vec![2, 2, 2, 3]));
    }

    #[test]
    fn printed_key_is_escaped_and_truncated() {
        assert_eq!(Printed(b"a\nb").to_string(), "\"a\\nb\"");
        assert_eq!(
            Printed("na\u{ef}ve \u{1b}\"".as_bytes()).to_string(),
            "\"na\u{ef}ve \\u{1b}\\\"\""
        );
        assert_eq!(Printed(b"\xff\xc3").to_string(), "\"\\xff\\xc3\"");
        assert!(Printed(&[b'x'; 1000]).to_string().len() < 200);
    }
}
