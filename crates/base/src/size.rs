//! Sizes in bytes, as people write them.

use std::{fmt, str::FromStr};

use crate::{Error, Result};

/// A number of bytes. Suffixes are powers of 1024, with or without the `i`: `16mb`, `1.5 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// Creates a size in KiB.
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// Creates a size in MiB.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// Creates a size in GiB.
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// Returns the bare number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid("not a size; write a number with B, KB, MB, GB or TB").with("text", text)
        };
        let trimmed = text.trim();
        let digits =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, suffix) = trimmed.split_at(digits);
        let shift = match suffix.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(1 << shift).map(Self).ok_or_else(bad);
        }
        let real: f64 = number.parse().map_err(|_| bad())?;
        let bytes = real * (1_u64 << shift) as f64;
        if (0.0..u64::MAX as f64).contains(&bytes) { Ok(Self(bytes as u64)) } else { Err(bad()) }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if value.fract() == 0.0 {
            write!(f, "{value} {}", UNITS[unit])
        } else {
            write!(f, "{value:.2} {}", UNITS[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_common_spellings() {
        let check = |text: &str, bytes: u64| {
            assert_eq!(text.parse::<ByteSize>().unwrap(), ByteSize(bytes), "{text}");
        };
        check("0", 0);
        check("32MB", 32 << 20);
        check("16 mb", 16 << 20);
        check("16777216.0", 16 << 20);
        check("1.5gb", 3 << 29);
        check(" 4 GiB ", 4 << 30);
    }

    #[test]
    fn rejects_malformed_sizes() {
        for text in ["", "abc", "-1", "1 pb", "1.2.3", "gb", "99999999999999999999", "1e30tb"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn prints_in_the_largest_unit() {
        assert_eq!(ByteSize::mib(512).to_string(), "512 MiB");
        assert_eq!(ByteSize(1536).to_string(), "1.50 KiB");
    }
}
