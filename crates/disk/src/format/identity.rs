//! The identity file: lines of text, so that people can read what a directory is.

use std::fmt::Write;

use super::{UNIT_MAX, UNIT_MIN, VERSION};

const FIRST_LINE: &str = "mooncake records";

/// What a directory is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Random, and the same for the life of the directory; a copy of the directory has it, too.
    pub id: [u8; 16],
    /// Counts how often the directory was opened for writing.
    pub incarnation: u64,
    /// Bits of additions to the format. A reader refuses those that it does not know.
    pub features: u64,
    /// The multiple of offsets and lengths of direct reads.
    pub unit: u64,
    /// The length of each extent.
    pub extent_bytes: u64,
}

/// Why a text is no identity that this version can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityRefusal {
    /// A later version wrote it.
    Newer(String),
    /// It is damaged, or not of ours.
    Damaged(String),
}

impl Identity {
    /// Returns the id as text.
    pub fn id_text(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.id))
    }

    /// Encodes the identity.
    pub fn encode(&self) -> String {
        let Self { incarnation, features, unit, extent_bytes, .. } = self;
        let mut text = format!(
            "{FIRST_LINE}\nformat {VERSION}\nfeatures {features}\nid {}\n\
             incarnation {incarnation}\nunit {unit}\nextent_bytes {extent_bytes}\n",
            self.id_text()
        );
        let sum = crc32c::crc32c(text.as_bytes());
        writeln!(text, "crc32c {sum:08x}").expect("a String takes all text");
        text
    }

    /// Decodes an identity.
    ///
    /// # Errors
    /// If a later version wrote it, or if it is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self, IdentityRefusal> {
        let damaged = |why: &str| IdentityRefusal::Damaged(format!("its identity file {why}"));
        let text = std::str::from_utf8(bytes).map_err(|_| damaged("is not text"))?;
        if text.lines().next() != Some(FIRST_LINE) {
            return Err(damaged("is of another program"));
        }
        // The format comes before all else: what follows may be different there.
        let format = number(text, "format").ok_or_else(|| damaged("names no format"))?;
        if format > u64::from(VERSION) {
            return Err(IdentityRefusal::Newer(format!(
                "format {format}, this one knows {VERSION}"
            )));
        }
        let (body, sum) =
            text.rsplit_once("crc32c ").ok_or_else(|| damaged("has no checksum at its end"))?;
        if u32::from_str_radix(sum.trim_end(), 16) != Ok(crc32c::crc32c(body.as_bytes())) {
            return Err(damaged("does not match its checksum"));
        }
        let field = |name: &str| {
            number(text, name).ok_or_else(|| damaged(&format!("has no valid `{name}`")))
        };
        let features = field("features")?;
        if features != 0 {
            return Err(IdentityRefusal::Newer(format!(
                "features {features:#x}, this one knows none"
            )));
        }
        let id = value(text, "id").filter(|id| id.len() == 32);
        let id = id.and_then(|id| u128::from_str_radix(id, 16).ok());
        let (unit, extent_bytes) = (field("unit")?, field("extent_bytes")?);
        let is_unit = unit.is_power_of_two() && (UNIT_MIN..=UNIT_MAX).contains(&unit);
        let is_size = (4 * UNIT_MIN..=1 << 30).contains(&extent_bytes) && extent_bytes % unit == 0;
        if !is_unit || !is_size {
            return Err(damaged("has sizes out of their range"));
        }
        Ok(Self {
            id: id.ok_or_else(|| damaged("has no valid `id`"))?.to_be_bytes(),
            incarnation: field("incarnation")?,
            features,
            unit,
            extent_bytes,
        })
    }
}

fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
}

fn number(text: &str, name: &str) -> Option<u64> {
    value(text, name)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity { id: [7; 16], incarnation: 3, features: 0, unit: 4096, extent_bytes: 1 << 28 }
    }

    #[test]
    fn an_identity_is_read_as_it_was_written_and_damage_is_named() {
        let text = identity().encode();
        assert_eq!(Identity::decode(text.as_bytes()), Ok(identity()));
        let refusal = Identity::decode(text.replace("incarnation 3", "incarnation 4").as_bytes());
        assert!(matches!(&refusal, Err(IdentityRefusal::Damaged(why)) if why.contains("checksum")));
        let refusal = Identity::decode(b"something else\n");
        assert!(
            matches!(&refusal, Err(IdentityRefusal::Damaged(why)) if why.contains("another program"))
        );
    }

    #[test]
    fn a_later_format_or_an_unknown_feature_is_refused_by_name() {
        let later = identity().encode().replace("format 1", "format 2");
        assert_eq!(
            Identity::decode(later.as_bytes()),
            Err(IdentityRefusal::Newer("format 2, this one knows 1".to_owned()))
        );
        let text = Identity { features: 4, ..identity() }.encode();
        assert!(
            matches!(Identity::decode(text.as_bytes()), Err(IdentityRefusal::Newer(what)) if what.contains("0x4"))
        );
    }
}
