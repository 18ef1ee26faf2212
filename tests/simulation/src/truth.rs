//! What really happened, in the order in which the master put it, and who has been told.

use std::{collections::HashMap, ops::Range};

use mooncake_base::{Moment, Version};

use crate::{call::key_name, ledger::Change};

/// All that happened to the values of the keys.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    facts: Vec<Fact>,
    by_key: HashMap<Vec<u8>, Vec<usize>>,
    begun: HashMap<u64, Begun>,
}

#[derive(Debug)]
struct Fact {
    change: Change,
    /// When the one who caused it was told.
    told: Option<Moment>,
}

/// A put that was started.
#[derive(Debug, Clone, Copy)]
struct Begun {
    key: u64,
    length: u64,
}

/// What the writer of a version writes at a place of it: no two words are alike.
pub(crate) fn word(version: Version, index: u64) -> u64 {
    let mixed = version.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
    (mixed ^ (index + 1)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

impl Truth {
    /// A put was started.
    pub(crate) fn begin(&mut self, version: Version, key: u64, length: u64) {
        self.begun.insert(version.0, Begun { key, length });
    }

    /// Enters what happened; the numbers of these facts.
    pub(crate) fn enter(&mut self, changes: Vec<(Vec<u8>, Change)>) -> Range<usize> {
        let first = self.facts.len();
        for (key, change) in changes {
            self.by_key.entry(key).or_default().push(self.facts.len());
            self.facts.push(Fact { change, told: None });
        }
        first..self.facts.len()
    }

    /// Somebody learns of these facts.
    pub(crate) fn tell(&mut self, now: Moment, facts: Range<usize>) {
        for fact in &mut self.facts[facts] {
            fact.told.get_or_insert(now);
        }
    }

    /// Whether a reader who asked then may have got that version, and these words of it.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn judge(
        &self,
        asked: Moment,
        key: u64,
        version: Version,
        words: &[u64],
    ) -> Result<(), String> {
        let Some(begun) = self.begun.get(&version.0) else {
            return Err(format!("read version {version} of key {key}, which nobody began"));
        };
        if begun.key != key || begun.length != words.len() as u64 {
            return Err(format!("read {} words of key {key} as {begun:?}", words.len()));
        }
        let wrong = (0..).zip(words).find(|&(index, &read)| read != word(version, index));
        if let Some((index, _)) = wrong {
            return Err(format!(
                "read bytes of key {key}, version {version}, that nobody put there, at word {index} \
                 of {}",
                words.len()
            ));
        }
        let facts = self.by_key.get(&key_name(key)).map_or(&[][..], Vec::as_slice);
        let is_it = |&number: &usize| self.facts[number].change == Change::Published(version.0);
        let Some(published) = facts.iter().rposition(is_it) else {
            return Err(format!("read version {version} of key {key}, which was not published"));
        };
        let newer = facts[published + 1..]
            .iter()
            .find(|&&number| self.facts[number].told.is_some_and(|told| told <= asked));
        match newer {
            Some(&number) => Err(format!(
                "read version {version} of key {key} after somebody was told of {:?}",
                self.facts[number].change
            )),
            None => Ok(()),
        }
    }

    /// The version that stands under the key.
    pub(crate) fn standing(&self, key: u64) -> Option<Version> {
        let last = *self.by_key.get(&key_name(key))?.last()?;
        match self.facts[last].change {
            Change::Published(version) => Some(Version(version)),
            Change::Gone(_) => None,
        }
    }
}
