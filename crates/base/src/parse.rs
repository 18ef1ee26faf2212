//! Values as people write them in flags, files and variables.

use std::time::Duration;

use crate::{ByteSize, Error, Result};

/// Parses a boolean in the spellings of the upstream programs.
///
/// # Errors
/// If the text is not a boolean.
pub fn read_bool(text: &str) -> Result<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" | "enable" => Ok(true),
        "0" | "false" | "f" | "no" | "n" | "off" | "disable" => Ok(false),
        _ => Err(Error::invalid("not a boolean; write true or false").with("text", text)),
    }
}

/// Parses a log level in upstream's and our spellings.
///
/// # Errors
/// If the text is not a level.
pub fn read_level(text: &str) -> Result<&'static str> {
    match text.trim().to_ascii_lowercase().as_str() {
        "trace" => Ok("trace"),
        "debug" => Ok("debug"),
        "info" | "0" => Ok("info"),
        "warn" | "warning" | "1" => Ok("warn"),
        "error" | "fatal" | "2" | "3" => Ok("error"),
        "off" | "none" => Ok("off"),
        _ => {
            let why = "not a log level; write trace, debug, info, warn, error or off";
            Err(Error::invalid(why).with("text", text))
        }
    }
}

/// Parses a number of any type with `FromStr`.
///
/// # Errors
/// If the text is not a number, or the number does not fit.
pub fn read_number<N: std::str::FromStr>(text: &str) -> Result<N> {
    text.trim()
        .parse()
        .map_err(|_| Error::invalid("not a number in the range of this option").with("text", text))
}

/// Parses a share: more than 0, at most 1.
///
/// # Errors
/// If the text is no such number.
pub fn read_share(text: &str) -> Result<f64> {
    match text.trim().parse() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(Error::invalid("not a number above 0 and up to 1").with("text", text)),
    }
}

/// Parses a size.
///
/// # Errors
/// If the text is not a size.
pub fn read_size(text: &str) -> Result<ByteSize> {
    text.parse()
}

/// Parses a duration: bare milliseconds, or with `ms`, `s`, `m` or `h`.
///
/// # Errors
/// If the text is not a duration.
pub fn read_millis(text: &str) -> Result<Duration> {
    read_duration(text, Duration::from_millis(1))
}

/// Parses a duration: bare seconds, or with `ms`, `s`, `m` or `h`.
///
/// # Errors
/// If the text is not a duration.
pub fn read_seconds(text: &str) -> Result<Duration> {
    read_duration(text, Duration::from_secs(1))
}

fn read_duration(text: &str, bare: Duration) -> Result<Duration> {
    let bad =
        || Error::invalid("not a duration; write a number with ms, s, m or h").with("text", text);
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, suffix) = trimmed.split_at(digits);
    let number: u32 = number.parse().map_err(|_| bad())?;
    let unit = match suffix.trim() {
        "" => bare,
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3600),
        _ => return Err(bad()),
    };
    unit.checked_mul(number).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_duration_has_the_unit_of_the_option() {
        assert_eq!(read_millis("250").unwrap(), Duration::from_millis(250));
        assert_eq!(read_seconds("250").unwrap(), Duration::from_secs(250));
        for (text, seconds) in [("5s", 5), ("30m", 1800), ("1 h", 3600)] {
            assert_eq!(read_millis(text).unwrap(), Duration::from_secs(seconds), "{text}");
        }
    }

    #[test]
    fn parses_every_spelling_of_a_level() {
        let levels =
            [("INFO", "info"), ("1", "warn"), ("0", "info"), ("Warning", "warn"), ("2", "error")];
        for (text, level) in levels {
            assert_eq!(read_level(text).unwrap(), level, "{text}");
        }
        assert!(read_level("loud").unwrap_err().to_string().contains("loud"));
    }

    #[test]
    fn rejects_and_names_invalid_values() {
        for text in ["", "maybe", "2"] {
            assert!(read_bool(text).unwrap_err().to_string().contains(text), "{text:?}");
        }
        for text in ["", "-1", "5 parsecs", "99999999999s"] {
            assert!(read_millis(text).is_err(), "{text:?}");
        }
        assert!(read_number::<u8>("256").is_err());
    }
}
