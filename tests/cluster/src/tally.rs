//! Counts of the load loops, written as one line for another process.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

/// Counts of the calls of one or more loops.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Successful calls. A read counts if all bytes are correct.
    pub good: u64,
    /// Reads that found no object.
    pub missing: u64,
    /// Reads with bytes of another key or of a stale version.
    pub wrong: u64,
    /// Acknowledged puts whose object was missing when their writer read it.
    pub lost: u64,
    /// The longest latency.
    pub latency_max: Duration,
    /// Failed calls by the name of their error code.
    pub errors: BTreeMap<String, u64>,
    /// A description of the first wrong read.
    pub first_wrong: String,
}

impl Tally {
    /// Records the latency of a call.
    pub fn record_latency(&mut self, taken: Duration) {
        self.latency_max = self.latency_max.max(taken);
    }

    /// Counts a failed call.
    pub fn record_error(&mut self, code: &str) {
        *self.errors.entry(code.to_owned()).or_default() += 1;
    }

    /// Counts a read with wrong bytes.
    pub fn record_wrong(&mut self, what: String) {
        self.wrong += 1;
        if self.first_wrong.is_empty() {
            self.first_wrong = what;
        }
    }

    /// Returns the number of failed calls.
    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Adds the counts of another loop.
    pub fn add(&mut self, other: &Self) {
        self.good += other.good;
        self.missing += other.missing;
        self.wrong += other.wrong;
        self.lost += other.lost;
        self.latency_max = self.latency_max.max(other.latency_max);
        for (code, count) in &other.errors {
            *self.errors.entry(code.clone()).or_default() += count;
        }
        if self.first_wrong.is_empty() {
            self.first_wrong.clone_from(&other.first_wrong);
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let latency_max = self.latency_max.as_millis();
        write!(f, "{} {} {} {} {latency_max} ", self.good, self.missing, self.wrong, self.lost)?;
        let errors: Vec<_> = self.errors.iter().map(|(code, n)| format!("{code}={n}")).collect();
        write!(f, "{};{}", errors.join(","), self.first_wrong)
    }
}

impl FromStr for Tally {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let bad = || format!("not a tally: {line:?}");
        let (counts, first_wrong) = line.split_once(';').ok_or_else(bad)?;
        let mut words = counts.splitn(6, ' ');
        let mut number = || words.next().and_then(|word| word.parse().ok()).ok_or_else(bad);
        let (good, missing, wrong) = (number()?, number()?, number()?);
        let (lost, latency_max) = (number()?, Duration::from_millis(number()?));
        let mut errors = BTreeMap::new();
        for entry in words.next().ok_or_else(bad)?.split(',').filter(|entry| !entry.is_empty()) {
            let (code, count) = entry.split_once('=').ok_or_else(bad)?;
            errors.insert(code.to_owned(), count.parse().map_err(|_| bad())?);
        }
        let first_wrong = first_wrong.to_owned();
        Ok(Self { good, missing, wrong, lost, latency_max, errors, first_wrong })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tally_round_trips_through_text() {
        let mut tally = Tally { good: 3, missing: 2, lost: 1, ..Tally::default() };
        assert_eq!(tally.to_string().parse(), Ok(tally.clone()));
        tally.record_latency(Duration::from_millis(12));
        tally.record_error("RPC_FAIL");
        tally.record_error("TRANSFER_FAIL");
        tally.record_wrong("key=a version=7".to_owned());
        assert_eq!(tally.to_string().parse(), Ok(tally));
        assert!("error unknown command".parse::<Tally>().is_err());
    }
}
