//! A secret that is never printed.

use std::fmt;

/// A token. An empty token matches nothing.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// Wraps the text.
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Compares in a time that does not depend on the number of matching bytes.
    pub fn is(&self, shown: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differing = own.iter().zip(shown).fold(0, |all, (a, b)| all | (a ^ b));
        !own.is_empty() && own.len() == shown.len() && differing == 0
    }

    /// Returns whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "(secret)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_exact_text_and_is_not_printed() {
        let secret = Secret::new("abc");
        assert!(secret.is(b"abc"));
        assert!(!secret.is(b"abx") && !secret.is(b"ab") && !secret.is(b"abcd") && !secret.is(b""));
        assert!(!Secret::default().is(b""));
        assert_eq!(format!("{secret:?}"), "(secret)");
    }
}
