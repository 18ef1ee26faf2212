//! Who leads, and in which view.

use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

use mooncake_base::{Error, Result};
use serde::{Deserialize, Serialize};

/// The number of a leadership. Each change of leader raises it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct View(pub u64);

/// Seconds are counted in units of 2^20 by [`View::of_clock`]: no service counts so many changes in a
/// second, and numbers of the next two centuries are below 2^53, which every reader of JSON reads
/// exactly.
const SECOND_BITS: u32 = 20;

impl View {
    /// Returns a number that grows with the wall clock, faster than services count.
    pub fn of_clock(time: SystemTime) -> Self {
        let since_1970 = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(since_1970.as_secs().saturating_mul(1 << SECOND_BITS))
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A random number that one attempt to become leader puts into the service, so that nobody else takes
/// its key for theirs. Never 0, and at most 63 bits, as the id of a lease in etcd is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerToken(u64);

impl OwnerToken {
    /// Makes a token of a random number.
    pub const fn new(random: u64) -> Self {
        let number = random & (u64::MAX >> 1);
        Self(if number == 0 { 1 } else { number })
    }

    /// Returns the number.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Parses the text of a token; `None` for one that another program made.
    pub fn parse(text: &str) -> Option<Self> {
        let number = u64::from_str_radix(text, 16).ok()?;
        let token = Self::new(number);
        (token.0 == number && token.to_string() == text).then_some(token)
    }
}

impl fmt::Display for OwnerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The address in the leader's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaderAddress {
    /// The leader has the lease, but does not serve yet.
    Warming,
    /// The leader serves at this address.
    Serving(String),
}

/// Upstream's prefix of the value of a leader that does not serve yet.
const WARMING: &str = "__mooncake_service_warming__:";

/// Maximum length of an address. Longer values were not written by a master.
const ADDRESS_BYTES_MAX: usize = 1024;

impl LeaderAddress {
    /// The value in the service.
    pub fn value(&self, owner: OwnerToken) -> String {
        match self {
            Self::Warming => format!("{WARMING}{owner}"),
            Self::Serving(address) => address.clone(),
        }
    }

    /// Reads the value in the service.
    ///
    /// # Errors
    /// The value is no address.
    pub fn read(value: &[u8]) -> Result<Self> {
        let text = std::str::from_utf8(value).ok().filter(|text| text.len() <= ADDRESS_BYTES_MAX);
        match text {
            Some(text) if text.starts_with(WARMING) => Ok(Self::Warming),
            Some(text) if !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic()) => {
                Ok(Self::Serving(text.to_owned()))
            }
            _ => {
                let quoted: String = String::from_utf8_lossy(value).chars().take(64).collect();
                Err(Error::internal("the key of the leader holds no address")
                    .with("value", format_args!("{quoted:?}")))
            }
        }
    }
}

/// The leader that the service names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    /// Where it serves.
    pub address: LeaderAddress,
    /// The number of its leadership.
    pub view: View,
    /// The token of its attempt; `None` for a leader of another program.
    pub owner: Option<OwnerToken>,
}

/// The lease of a leader: the attempt that won, and the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The token of the attempt.
    pub owner: OwnerToken,
    /// The number of the leadership.
    pub view: View,
    /// The part of the view that the service did not count; see [`InSyncSet`](crate::InSyncSet).
    pub view_base: u64,
}

impl Lease {
    /// The number that the service counted.
    pub const fn term(&self) -> u64 {
        self.view.0.saturating_sub(self.view_base)
    }
}

/// The name of a cluster, a part of its keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterId(String);

/// Maximum length of the name of a cluster.
const CLUSTER_BYTES_MAX: usize = 128;

impl ClusterId {
    /// Checks a name: letters, digits, `_`, `.` and `-`, at most 128 of them.
    ///
    /// # Errors
    /// The name is empty, too long, or has other characters.
    pub fn new(name: &str) -> Result<Self> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        if (1..=CLUSTER_BYTES_MAX).contains(&name.len()) && name.chars().all(is_allowed) {
            return Ok(Self(name.to_owned()));
        }
        let text = "the name of a cluster has 1 to 128 letters, digits, '_', '.' and '-'";
        Err(Error::invalid(text).with("cluster_id", format_args!("{name:?}")))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn values_of_the_leaders_key_are_those_of_upstream() {
        let owner = OwnerToken::new(0xfe);
        assert_eq!(
            LeaderAddress::Warming.value(owner),
            "__mooncake_service_warming__:00000000000000fe"
        );
        for address in [LeaderAddress::Warming, LeaderAddress::Serving("10.0.0.1:50051".into())] {
            assert_eq!(LeaderAddress::read(address.value(owner).as_bytes()).unwrap(), address);
        }
        for bad in [&b""[..], b"a b", b"\xFF", &[b'a'; 1025]] {
            LeaderAddress::read(bad).unwrap_err();
        }
    }

    #[test]
    fn token_is_never_zero_and_fits_a_lease_id() {
        for random in [0, 1, u64::MAX, 1 << 63] {
            let token = OwnerToken::new(random);
            assert!((1..=i64::MAX as u64).contains(&token.number()));
            assert_eq!(OwnerToken::parse(&token.to_string()), Some(token));
        }
        for foreign in ["", "x", "7", "0000000000000000", "ffffffffffffffff", "+00000000000000f"] {
            assert_eq!(OwnerToken::parse(foreign), None);
        }
    }

    #[test]
    fn numbers_of_the_clock_are_exact_in_json() {
        let view =
            |years: u64| View::of_clock(UNIX_EPOCH + Duration::from_secs(years * 31_557_600));
        assert_eq!(view(0), View(0));
        assert!(view(57).0 - view(56).0 > 1 << 44);
        assert!(view(57 + 200).0 < 1 << 53);
    }

    #[test]
    fn cluster_names_are_checked() {
        for good in ["mooncake_cluster", "a", "A-1.b"] {
            assert_eq!(ClusterId::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "a/b", "a}b", "a b", "ä", &"x".repeat(129)] {
            ClusterId::new(bad).unwrap_err();
        }
    }
}
