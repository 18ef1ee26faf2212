//! The history of all changes in the order of the master's log, and the check of reads against it.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use mooncake_base::{Moment, Version};

use crate::{
    audit::allocation_model::Change,
    call::{PutTerms, Viewed, key_name},
    directory::RecordName,
};

/// All changes of all keys, and when each was acknowledged.
#[derive(Debug, Default)]
pub(crate) struct History {
    entries: Vec<Entry>,
    by_key: HashMap<Vec<u8>, Vec<usize>>,
    /// The started puts by version. After the end of the log was lost with the power, a master may
    /// give a version again that its predecessors gave.
    started: HashMap<u64, Vec<StartedPut>>,
    /// Puts that their clients gave up, by version: the client and the time.
    given_up: HashMap<u64, (u64, Moment)>,
    /// The versions that their writers know.
    known_starts: HashSet<u64>,
}

#[derive(Debug)]
struct Entry {
    key: Vec<u8>,
    change: Change,
    /// When the caller that made the change learned of it.
    acknowledged: Option<Moment>,
    /// When the change was lost with the unsynced end of the log.
    undone: Option<Moment>,
}

/// A started put.
#[derive(Debug, Clone, Copy)]
struct StartedPut {
    key: u64,
    length: u64,
    client: u64,
    at: Moment,
    terms: PutTerms,
}

/// Returns the word that the writer of a version writes at an index. Words differ in all places.
pub(crate) fn word(version: Version, index: u64) -> u64 {
    let mixed = version.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
    (mixed ^ (index + 1)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// Returns the checksum that the writer of a version gives.
pub(crate) fn checksum(version: Version) -> u64 {
    word(version, u64::MAX >> 1)
}

impl History {
    /// Records the start of a put by a client.
    pub(crate) fn record_start(
        &mut self,
        at: Moment,
        client: u64,
        version: Version,
        (key, length): (u64, u64),
        terms: PutTerms,
    ) {
        let started = self.started.entry(version.0).or_default();
        started.push(StartedPut { key, length, client, at, terms });
    }

    /// Returns how often a put was given this version.
    pub(crate) fn starts_of(&self, version: Version) -> usize {
        self.started.get(&version.0).map_or(0, Vec::len)
    }

    /// Records that the writer of a version knows its places.
    pub(crate) fn learn_start(&mut self, version: Version) {
        self.known_starts.insert(version.0);
    }

    /// Returns whether the writer of a version knows its places.
    pub(crate) fn is_start_known(&self, version: u64) -> bool {
        self.known_starts.contains(&version)
    }

    /// Records that a client told its caller that a put has failed.
    pub(crate) fn record_given_up(&mut self, now: Moment, client: u64, version: Version) {
        self.given_up.insert(version.0, (client, now));
    }

    /// Records that the writer of a version knows from `now` on that it is published.
    pub(crate) fn acknowledge_put(&mut self, now: Moment, key: u64, version: Version) {
        let numbers = self.by_key.get(&key_name(key)).map_or(&[][..], Vec::as_slice);
        let published = Change::Published(version.0);
        let last = numbers.iter().rev().find(|&&number| self.entries[number].change == published);
        if let Some(&number) = last {
            self.entries[number].acknowledged.get_or_insert(now);
        }
    }

    /// Returns whether an object of this version may expire.
    pub(crate) fn may_expire(&self, version: u64) -> bool {
        let started = self.started.get(&version);
        started.is_some_and(|puts| puts.iter().any(|put| put.terms.ttl.is_some()))
    }

    /// Checks that a description shows an object as it was put. A record that became an object again
    /// after the log was lost has no tags.
    ///
    /// # Errors
    /// It does not.
    pub(crate) fn check_view(&self, viewed: &Viewed, may_lack_tags: bool) -> Result<(), String> {
        let Some(version) = viewed.version else { return Ok(()) };
        let is_match = |put: &StartedPut| {
            let lacks_tags = may_lack_tags && !viewed.has_tag;
            put.length == viewed.length && (lacks_tags || put.terms.has_tag == viewed.has_tag)
        };
        match self.started.get(&version.0) {
            Some(puts) if puts.iter().any(is_match) => Ok(()),
            puts => Err(format!("{viewed:?} describes an object that was put as {puts:?}")),
        }
    }

    /// Checks that no put that its client gave up has replaced an acknowledged value that the same
    /// client put afterwards.
    ///
    /// # Errors
    /// One of the entries is such a put.
    pub(crate) fn check_late_ends(&self, entries: Range<usize>) -> Result<(), String> {
        for number in entries {
            let Change::Published(version) = self.entries[number].change else { continue };
            let Some(&(client, given_up)) = self.given_up.get(&version) else { continue };
            let Some(key) = self.last_started(version).map(|started| key_name(started.key)) else {
                continue;
            };
            let numbers = self.by_key.get(&key).map_or(&[][..], Vec::as_slice);
            let Some(&before) = numbers.iter().rev().find(|&&other| other < number) else {
                continue;
            };
            let Entry {
                change: Change::Published(replaced),
                acknowledged: Some(_),
                undone: None,
                ..
            } = self.entries[before]
            else {
                continue;
            };
            let is_later = |started: &StartedPut| started.client == client && started.at > given_up;
            if self.last_started(replaced).is_some_and(is_later) {
                return Err(format!(
                    "version {version}, whose put was given up, replaced version {replaced}, which \
                     the same client put afterwards"
                ));
            }
        }
        Ok(())
    }

    /// Returns the last put that was given this version.
    fn last_started(&self, version: u64) -> Option<&StartedPut> {
        self.started.get(&version)?.last()
    }

    /// Appends changes and returns the indexes of their entries.
    pub(crate) fn append(&mut self, changes: Vec<(Vec<u8>, Change)>) -> Range<usize> {
        let first = self.entries.len();
        for (key, change) in changes {
            self.by_key.entry(key.clone()).or_default().push(self.entries.len());
            self.entries.push(Entry { key, change, acknowledged: None, undone: None });
        }
        first..self.entries.len()
    }

    /// Returns the changes of these entries, with their keys.
    pub(crate) fn changes(&self, entries: Range<usize>) -> impl Iterator<Item = (&[u8], Change)> {
        self.entries[entries].iter().map(|entry| (&entry.key[..], entry.change))
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Takes back all entries from `first` on, which the master lost when its machine crashed.
    /// Returns their number.
    ///
    /// # Errors
    /// One of them was acknowledged although it must not be lost: before the log was synced last, or
    /// at all if `synced` is `None`.
    pub(crate) fn undo(
        &mut self,
        first: usize,
        crashed: Moment,
        synced: Option<Moment>,
    ) -> Result<u64, String> {
        let mut count = 0;
        for entry in &mut self.entries[first..] {
            if entry.undone.is_some() {
                continue;
            }
            count += 1;
            entry.undone = Some(crashed);
            if let Some(acknowledged) = entry.acknowledged
                && synced.is_none_or(|synced| acknowledged < synced)
            {
                return Err(format!(
                    "{:?} was acknowledged {:?} before the crash, and is lost",
                    entry.change,
                    crashed.since(acknowledged)
                ));
            }
        }
        Ok(count)
    }

    /// Checks that a record has the words of its version.
    ///
    /// # Errors
    /// A word is wrong.
    pub(crate) fn check_words(&self, name: &RecordName, words: &[u64]) -> Result<(), String> {
        let wrong = (0..).zip(words).find(|&(index, &read)| read != word(name.version, index));
        match wrong {
            Some((index, _)) => {
                Err(format!("{name:?} is written with a wrong word at index {index}"))
            }
            None => Ok(()),
        }
    }

    /// Records that a client knows of these entries from `now` on.
    pub(crate) fn acknowledge(&mut self, now: Moment, entries: Range<usize>) {
        for entry in &mut self.entries[entries] {
            entry.acknowledged.get_or_insert(now);
        }
    }

    /// Checks that a reader whose call began at `asked` may get this version and these words.
    ///
    /// # Errors
    /// The version is unknown, unpublished or stale, or a word is wrong.
    pub(crate) fn check_read(
        &self,
        asked: Moment,
        key: u64,
        version: Version,
        words: &[u64],
    ) -> Result<(), String> {
        let Some(started) = self.started.get(&version.0) else {
            return Err(format!(
                "read version {version} of key {key}, whose put was never started"
            ));
        };
        let is_read =
            |started: &StartedPut| started.key == key && started.length == words.len() as u64;
        if !started.iter().any(is_read) {
            return Err(format!(
                "read {} words of key {key}, but the put is {started:?}",
                words.len()
            ));
        }
        let wrong = (0..).zip(words).find(|&(index, &read)| read != word(version, index));
        if let Some((index, _)) = wrong {
            return Err(format!(
                "read a wrong word of key {key}, version {version}, at index {index} of {}",
                words.len()
            ));
        }
        let entries = self.by_key.get(&key_name(key)).map_or(&[][..], Vec::as_slice);
        let is_match =
            |&number: &usize| self.entries[number].change == Change::Published(version.0);
        if !entries.iter().any(is_match) {
            return Err(format!("read version {version} of key {key}, which is not published"));
        }
        // One that was released ahead and taken back is published again.
        let is_kept = |number: &usize| {
            is_match(number) && self.entries[*number].undone.is_none_or(|undone| undone >= asked)
        };
        let Some(published) = entries.iter().rposition(is_kept) else {
            return Err(format!("read version {version} of key {key}, which was lost"));
        };
        let newer = entries[published + 1..].iter().find(|&&number| {
            let entry = &self.entries[number];
            entry.undone.is_none()
                && entry.acknowledged.is_some_and(|acknowledged| acknowledged <= asked)
        });
        match newer {
            Some(&number) => Err(format!(
                "read version {version} of key {key} after {:?} was acknowledged",
                self.entries[number].change
            )),
            None => Ok(()),
        }
    }

    /// Returns the current version of the key.
    pub(crate) fn current_version(&self, key: u64) -> Option<Version> {
        let entries = self.by_key.get(&key_name(key))?.iter().rev();
        let mut entries = entries.map(|&number| &self.entries[number]);
        match entries.find(|entry| entry.undone.is_none())?.change {
            Change::Published(version) => Some(Version(version)),
            Change::Gone(_) => None,
        }
    }
}
