//! The in-sync set: the members that have every change that was acknowledged.

use std::{collections::BTreeSet, fmt};

use mooncake_base::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::view::View;

/// Maximum number of members.
const MEMBERS_MAX: usize = 16;

/// Maximum length of the id of a member.
const ID_BYTES_MAX: usize = 128;

/// Maximum length of the value in the service.
const VALUE_BYTES_MAX: usize = 4096;

/// The id of a member. It belongs to the data of the member, not to its address: an empty folder is a
/// new member.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId(String);

impl MemberId {
    /// Checks an id: 1 to 128 visible characters of ASCII.
    ///
    /// # Errors
    /// The id is empty, too long, or has other characters.
    pub fn new(id: &str) -> Result<Self> {
        if (1..=ID_BYTES_MAX).contains(&id.len()) && id.chars().all(|c| c.is_ascii_graphic()) {
            return Ok(Self(id.to_owned()));
        }
        let text = "the id of a member has 1 to 128 visible ASCII characters";
        Err(Error::invalid(text).with("member", format_args!("{id:?}")))
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The set, as the service holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InSyncSet {
    /// Each change has another number, so that no two sets of a cluster are equal.
    pub number: u64,
    /// The view of the leader that wrote the set.
    pub view: View,
    /// Added to the numbers of the service to get views. It is raised where the service has lost its
    /// numbers, so that views rise all the same.
    pub view_base: u64,
    /// The members. An empty set elects nobody.
    pub members: BTreeSet<MemberId>,
}

impl InSyncSet {
    /// The set of a cluster without a history.
    pub fn founded_by(member: &MemberId) -> Self {
        let members = BTreeSet::from([member.clone()]);
        Self { number: 1, view: View(0), view_base: 0, members }
    }

    /// The set of a cluster whose set was lost. It elects nobody.
    pub const fn lost(view: View) -> Self {
        Self { number: 1, view, view_base: 0, members: BTreeSet::new() }
    }

    /// Returns the set with other members, as the leader of a view writes it.
    ///
    /// # Errors
    /// There are none or too many members.
    pub fn changed(&self, view: View, members: BTreeSet<MemberId>) -> Result<Self> {
        if !(1..=MEMBERS_MAX).contains(&members.len()) {
            let text = "an in-sync set has 1 to 16 members";
            return Err(Error::invalid(text).with("members", members.len()));
        }
        Ok(Self { number: self.number + 1, view, view_base: self.view_base, members })
    }

    /// Encodes the set. Equal sets have equal values, which the services compare.
    pub fn value(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings are always JSON")
    }

    /// Decodes a value.
    ///
    /// # Errors
    /// The value is not exactly what [`value`](Self::value) makes of a set.
    pub fn read(value: &[u8]) -> Result<Self> {
        let bad = || {
            let quoted: String = String::from_utf8_lossy(value).chars().take(200).collect();
            Error::internal("the in-sync set cannot be read")
                .with("value", format_args!("{quoted:?}"))
        };
        if value.len() > VALUE_BYTES_MAX {
            return Err(bad());
        }
        let set: Self = serde_json::from_slice(value).map_err(|error| bad().caused_by(error))?;
        let is_valid = set.members.len() <= MEMBERS_MAX
            && set.members.iter().all(|member| MemberId::new(&member.0).is_ok())
            && set.number < u64::MAX
            && set.value().as_bytes() == value;
        if is_valid { Ok(set) } else { Err(bad()) }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::fuzz::{self, Target, outcome};

    use super::*;

    fn member(id: &str) -> MemberId {
        MemberId::new(id).unwrap()
    }

    #[test]
    fn each_change_makes_another_set() {
        let (a, b) = (member("a"), member("b"));
        let founded = InSyncSet::founded_by(&a);
        assert_eq!(founded.value(), r#"{"number":1,"view":0,"view_base":0,"members":["a"]}"#);
        let both = founded.changed(View(3), BTreeSet::from([a.clone(), b])).unwrap();
        let again = both.changed(View(3), BTreeSet::from([a])).unwrap();
        assert_ne!(again, founded);
        assert_eq!((again.number, again.view), (3, View(3)));
        assert!(founded.changed(View(3), BTreeSet::new()).is_err());
        let many = (0..=MEMBERS_MAX).map(|n| member(&n.to_string())).collect();
        assert!(founded.changed(View(3), many).is_err());
    }

    #[test]
    fn fuzzed_values_decode_to_what_is_encoded() {
        let set = InSyncSet::founded_by(&member("10.0.0.1:50051#4f"));
        let seeds = vec![
            set.value().into_bytes(),
            InSyncSet::lost(View(7)).value().into_bytes(),
            br#"{"number":1,"view":0,"view_base":0,"members":["b","a"]}"#.to_vec(),
        ];
        let run = |bytes: &[u8]| match InSyncSet::read(bytes) {
            Err(_) => 0,
            Ok(set) => {
                assert_eq!(set.value().as_bytes(), bytes);
                outcome((set.members.len(), set.number))
            }
        };
        fuzz::check(&[Target { name: "in-sync set", seeds, run }]);
    }
}
