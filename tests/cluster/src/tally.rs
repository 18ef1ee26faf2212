//! What loops of calls came to, as one line that another process reads.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

/// How the calls of one or more loops ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Calls that did what they were asked for; reads: the whole right bytes.
    pub good: u64,
    /// Reads that found no such object.
    pub missing: u64,
    /// Reads whose bytes are not, or not any more, those of the key.
    pub wrong: u64,
    /// Puts that were acknowledged and could not be read at once by their writer.
    pub lost: u64,
    /// The slowest call.
    pub worst: Duration,
    /// Calls that failed, by the name of their code.
    pub errors: BTreeMap<String, u64>,
    /// What the first wrong read was.
    pub first_wrong: String,
}

impl Tally {
    /// Counts a call that took so long.
    pub fn time(&mut self, taken: Duration) {
        self.worst = self.worst.max(taken);
    }

    /// Counts a failed call.
    pub fn fail(&mut self, code: &str) {
        *self.errors.entry(code.to_owned()).or_default() += 1;
    }

    /// Counts a read that brought wrong bytes.
    pub fn mark_wrong(&mut self, what: String) {
        self.wrong += 1;
        if self.first_wrong.is_empty() {
            self.first_wrong = what;
        }
    }

    /// How many calls failed.
    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Adds what another loop came to.
    pub fn add(&mut self, other: &Self) {
        self.good += other.good;
        self.missing += other.missing;
        self.wrong += other.wrong;
        self.lost += other.lost;
        self.worst = self.worst.max(other.worst);
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
        let worst = self.worst.as_millis();
        write!(f, "{} {} {} {} {worst} ", self.good, self.missing, self.wrong, self.lost)?;
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
        let (lost, worst) = (number()?, Duration::from_millis(number()?));
        let mut errors = BTreeMap::new();
        for entry in words.next().ok_or_else(bad)?.split(',').filter(|entry| !entry.is_empty()) {
            let (code, count) = entry.split_once('=').ok_or_else(bad)?;
            errors.insert(code.to_owned(), count.parse().map_err(|_| bad())?);
        }
        let first_wrong = first_wrong.to_owned();
        Ok(Self { good, missing, wrong, lost, worst, errors, first_wrong })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_is_read_as_it_was_written() {
        let mut tally = Tally { good: 3, missing: 2, lost: 1, ..Tally::default() };
        assert_eq!(tally.to_string().parse(), Ok(tally.clone()));
        tally.time(Duration::from_millis(12));
        tally.fail("RPC_FAIL");
        tally.fail("TRANSFER_FAIL");
        tally.mark_wrong("key=a version=7".to_owned());
        assert_eq!(tally.to_string().parse(), Ok(tally));
        assert!("error no such order".parse::<Tally>().is_err());
    }
}
