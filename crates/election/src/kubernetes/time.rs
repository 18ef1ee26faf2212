//! The time of day in the form that Kubernetes reads.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the time of day, for people and other programs; no rule of ours depends on it.
pub(super) fn rfc3339() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format(since.as_secs(), since.subsec_micros())
}

fn format(seconds: u64, micros: u32) -> String {
    let (year, month, day) = date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// The date of a day after 1970-01-01, in the Gregorian calendar.
fn date(mut days: u64) -> (u64, usize, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    loop {
        let length = if is_leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000005Z"),
            (951_782_399, "2000-02-28T23:59:59.000005Z"),
            (951_782_400, "2000-02-29T00:00:00.000005Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000005Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000005Z"),
        ] {
            assert_eq!(format(seconds, 5), text);
        }
        assert_eq!(rfc3339().len(), "1970-01-01T00:00:00.000000Z".len());
    }
}
