//! The values that a variable takes, and what is wrong with another one.

use crate::{
    Error, Result,
    parse::{read_bool, read_level, read_millis, read_number, read_seconds, read_share, read_size},
    token::Token,
};

/// The values that a variable takes. Empty text counts as not set, except for a [`Self::Switch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// Any text; the code that uses it may refuse it.
    Text,
    /// On or off. Any other text, also an empty one, counts as on, as in upstream.
    Switch,
    /// On or off. Any other text counts as off, as in upstream.
    SwitchElseOff,
    /// On or off. Other text is refused.
    Boolean,
    /// A log level. Any other text counts as `warn`.
    Level,
    /// A whole number from the first to the second.
    Number(i64, i64),
    /// A number above 0, at most 1.
    Share,
    /// A duration, bare in seconds.
    Seconds,
    /// A duration of more than 0, bare in seconds.
    Interval,
    /// A duration, bare in milliseconds.
    Millis,
    /// A size in bytes.
    Size,
    /// A size in bytes or a number, of the listed ones.
    OneOf(&'static [&'static str]),
    /// A shared secret.
    Token,
}

/// Why a value is invalid, and what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// What is wrong; never the value itself, which may be a secret.
    pub reason: String,
    /// What the value does nevertheless; empty if it is refused where it is read.
    pub effect: &'static str,
}

impl Invalid {
    /// Returns the reason and the effect in one line.
    pub fn text(&self) -> String {
        match self.effect {
            "" => self.reason.clone(),
            effect => format!("{}; the value {effect}", self.reason),
        }
    }
}

impl ValueKind {
    /// Returns what is wrong with a value.
    pub fn invalid(self, text: &str) -> Option<Invalid> {
        if text.trim().is_empty() && self != Self::Switch {
            return None;
        }
        let error = self.check(text).err()?;
        let effect = match self {
            Self::Switch => "counts as on",
            Self::SwitchElseOff => "counts as off",
            Self::Level => "counts as warn",
            _ => "",
        };
        Some(Invalid { reason: error.message().to_owned(), effect })
    }

    fn check(self, text: &str) -> Result<()> {
        match self {
            Self::Text => Ok(()),
            Self::Switch | Self::SwitchElseOff | Self::Boolean => read_bool(text).map(drop),
            Self::Level => read_level(text).map(drop),
            Self::Number(least, most) => match read_number::<i64>(text) {
                Ok(number) if (least..=most).contains(&number) => Ok(()),
                _ if most == i64::MAX => {
                    Err(Error::invalid(format!("not a whole number of {least} or more")))
                }
                _ => Err(Error::invalid(format!("not a whole number from {least} to {most}"))),
            },
            Self::Share => read_share(text).map(drop),
            Self::Seconds => read_seconds(text).map(drop),
            Self::Interval => {
                if read_seconds(text)?.is_zero() {
                    Err(Error::invalid("an interval must be longer than 0"))
                } else {
                    Ok(())
                }
            }
            Self::Millis => read_millis(text).map(drop),
            Self::Size => read_size(text).map(drop),
            Self::OneOf(allowed) => {
                let size = read_size(text).ok();
                if allowed.iter().any(|one| size.is_some() && read_size(one).ok() == size) {
                    Ok(())
                } else {
                    Err(Error::invalid(format!("not one of {}", allowed.join(", "))))
                }
            }
            Self::Token => Token::new(text).map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(kind: ValueKind, value: &str) -> String {
        kind.invalid(value).map_or_else(String::new, |invalid| invalid.text())
    }

    #[test]
    fn switch_says_what_a_wrong_value_does() {
        for value in ["1", "off", "TRUE", "no"] {
            assert_eq!(text(ValueKind::Switch, value), "");
        }
        let wrong = "not a boolean; write true or false; the value counts as on";
        assert_eq!(text(ValueKind::Switch, "maybe"), wrong);
        assert_eq!(text(ValueKind::Switch, ""), wrong);
        assert!(text(ValueKind::SwitchElseOff, "maybe").ends_with("counts as off"));
        assert_eq!(text(ValueKind::SwitchElseOff, ""), "");
        assert_eq!(text(ValueKind::Boolean, "maybe"), "not a boolean; write true or false");
        assert!(text(ValueKind::Level, "loud").ends_with("counts as warn"));
        assert_eq!(text(ValueKind::Level, "WARNING"), "");
    }

    #[test]
    fn numbers_and_sizes_outside_of_their_range_are_invalid() {
        let port = ValueKind::Number(0, 65_535);
        assert_eq!((text(port, "65535"), text(port, " 7 ")), (String::new(), String::new()));
        assert_eq!(text(port, "65536"), "not a whole number from 0 to 65535");
        assert_eq!(text(ValueKind::Number(1, i64::MAX), "0"), "not a whole number of 1 or more");
        let mtu = ValueKind::OneOf(&["256", "2MB"]);
        assert_eq!((text(mtu, "256"), text(mtu, "2048KiB")), (String::new(), String::new()));
        assert_eq!(
            (&*text(mtu, "257"), &*text(mtu, "x")),
            ("not one of 256, 2MB", "not one of 256, 2MB")
        );
        assert_eq!(
            (text(ValueKind::Share, "0.8"), text(ValueKind::Share, "1")),
            Default::default()
        );
        for wrong in ["0", "1.01", "-1", "nan", "80 %"] {
            assert!(text(ValueKind::Share, wrong).contains("up to 1"), "{wrong}");
        }
        assert!(text(ValueKind::Seconds, "abc").starts_with("not a duration"));
        assert!(text(ValueKind::Interval, "0").contains("longer than 0"));
        assert!(text(ValueKind::Millis, "-1").starts_with("not a duration"));
        assert!(text(ValueKind::Size, "much").starts_with("not a size"));
    }

    #[test]
    fn secret_is_not_in_the_reason() {
        let invalid = ValueKind::Token.invalid("sesame").unwrap();
        assert!(!invalid.text().contains("sesame"), "{}", invalid.text());
        assert_eq!(ValueKind::Token.invalid("a longer secret"), None);
    }
}
