//! Read and write sessions: objects that are located once and read by many calls, and objects that
//! are reserved once, written by many calls and published at the end.
//!
//! The client keeps sessions by key, for callers that have only the key from one call to the next.

use std::{collections::hash_map::Entry, sync::Arc};

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, ErrorCode, ObjectKey, Result};
use rustc_hash::FxHashMap;

use super::{Reservation, Write, total};
use crate::{
    client::Client,
    object::{BufferScope, Located, Parts, PutOptions, PutOutcome},
};

/// Maximum open read sessions and maximum open write sessions.
const SESSIONS_MAX: usize = 1 << 20;

/// The open sessions of a client.
#[derive(Debug, Default)]
pub(in crate::client) struct IoSessions {
    reads: Mutex<FxHashMap<ObjectKey, Arc<Located>>>,
    writes: Mutex<FxHashMap<ObjectKey, OpenWrite>>,
}

#[derive(Debug)]
struct OpenWrite {
    reservation: Reservation,
    /// Calls that are writing now. The session cannot end before them: a late write must not reach
    /// memory that was given to another object.
    writers: usize,
}

/// The sessions of a client; see [`Client::sessions`].
#[derive(Debug, Clone, Copy)]
pub struct Sessions<'a>(&'a Client);

impl Client {
    /// Returns the calls about objects that are located or reserved once and read or written by many
    /// calls.
    pub fn sessions(&self) -> Sessions<'_> {
        Sessions(self)
    }
}

impl Sessions<'_> {
    /// Opens read sessions: locates objects and keeps their places for
    /// [`read`](Self::read). An object with an open session is located again.
    ///
    /// # Errors
    /// By key: as [`Client::locate`], or too many sessions are open.
    pub fn begin_reads(&self, keys: &[ObjectKey]) -> Vec<Result<()>> {
        let located = self.0.locate(keys);
        let mut reads = self.0.inner.io_sessions.reads.lock();
        let mut insert = |(located, key): (Result<Located>, &ObjectKey)| {
            Room::beside(reads.len()).take()?;
            reads.insert(key.clone(), Arc::new(located?));
            Ok(())
        };
        located.into_iter().zip(keys).map(&mut insert).collect()
    }

    /// Reads parts of objects with an open read session and returns the number of bytes read from
    /// each object. All parts come from the located version; replicas that have gone since then are
    /// detected.
    ///
    /// # Errors
    /// By object: no read session is open, a part is outside the object (`INVALID_PARAMS`), or as
    /// [`Client::read`].
    pub fn read(&self, wanted: &[Parts<'_>]) -> Vec<Result<u64>> {
        let located: Vec<Result<Arc<Located>>> = {
            let reads = self.0.inner.io_sessions.reads.lock();
            let find = |parts: &Parts<'_>| {
                reads.get(parts.key).cloned().ok_or_else(|| not_begun("read", parts.key))
            };
            wanted.iter().map(find).collect()
        };
        let located: Vec<Result<&Located>> =
            located.iter().map(|l| l.as_ref().map(|l| &**l).map_err(Clone::clone)).collect();
        let read = self.0.read_parts_of(&located, wanted, BufferScope::Anywhere, None);
        read.into_iter().map(|parts| parts?.into_iter().sum()).collect()
    }

    /// Closes read sessions. Keys without a session are ignored.
    pub fn end_reads(&self, keys: &[ObjectKey]) {
        let mut reads = self.0.inner.io_sessions.reads.lock();
        for key in keys {
            reads.remove(key);
        }
    }

    /// Opens write sessions: reserves space for objects of the given lengths, for
    /// [`write`](Self::write).
    ///
    /// # Errors
    /// By object: as [`Client::reserve`]; `OBJECT_ALREADY_EXISTS`; a write session is open
    /// already (`INVALID_PARAMS`), or too many are open.
    pub fn begin_writes(
        &self,
        items: &[(ObjectKey, u64)],
        options: &PutOptions,
    ) -> Vec<Result<()>> {
        let mut outcomes: Vec<Option<Result<()>>> = {
            let writes = self.0.inner.io_sessions.writes.lock();
            let mut room = Room::beside(writes.len());
            let mut refuse = |(key, _): &(ObjectKey, u64)| {
                if writes.contains_key(key) {
                    Some(Err(already_begun(key)))
                } else {
                    room.take().err().map(Err)
                }
            };
            items.iter().map(&mut refuse).collect()
        };
        let fresh: Vec<usize> = (0..items.len()).filter(|&at| outcomes[at].is_none()).collect();
        let wanted: Vec<_> = fresh.iter().map(|&at| items[at].clone()).collect();
        let mut options = options.clone();
        if options.groups.len() == items.len() {
            options.groups = fresh.iter().map(|&at| options.groups[at].clone()).collect();
        }
        if options.if_versions.len() == items.len() {
            options.if_versions = fresh.iter().map(|&at| options.if_versions[at]).collect();
        }
        let reserved = self.0.reserve(&wanted, &options);
        let mut duplicates = Vec::new();
        let mut writes = self.0.inner.io_sessions.writes.lock();
        // Others may have opened sessions meanwhile.
        let mut room = Room::beside(writes.len());
        for (&at, reserved) in fresh.iter().zip(reserved) {
            outcomes[at] = Some(reserved.and_then(|reserved| {
                let reservation = reserved.ok_or_else(|| already_exists(&items[at].0))?;
                match writes.entry(items[at].0.clone()) {
                    Entry::Vacant(vacant) => {
                        if let Err(error) = room.take() {
                            duplicates.push(reservation);
                            return Err(error);
                        }
                        vacant.insert(OpenWrite { reservation, writers: 0 });
                        Ok(())
                    }
                    Entry::Occupied(_) => {
                        duplicates.push(reservation);
                        Err(already_begun(&items[at].0))
                    }
                }
            }));
        }
        drop(writes);
        for error in self.0.revoke(duplicates).into_iter().filter_map(Result::err) {
            tracing::debug!(%error, "cannot revoke a duplicate reservation");
        }
        let missing = || Err(Error::internal("a write was left out of its batch"));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect()
    }

    /// Writes parts of objects with an open write session and returns the number of bytes written
    /// to each object.
    ///
    /// # Errors
    /// By object: no write session is open, a part is outside the object, the lists differ in
    /// length (`INVALID_PARAMS`), or as [`Client::write`].
    pub fn write(&self, parts: &[Parts<'_>]) -> Vec<Result<u64>> {
        let mut taken: Vec<Result<Reservation>> = {
            let mut writes = self.0.inner.io_sessions.writes.lock();
            let mut take = |parts: &Parts<'_>| {
                check_lists(parts)?;
                let open =
                    writes.get_mut(parts.key).ok_or_else(|| not_begun("write", parts.key))?;
                open.writers += 1;
                Ok(open.reservation.clone())
            };
            parts.iter().map(&mut take).collect()
        };
        let mut writes = Vec::new();
        for (reservation, parts) in taken.iter_mut().zip(parts) {
            if let Ok(reservation) = reservation {
                let ranges = parts.offsets.iter().copied().zip(parts.memory.iter().copied());
                writes.push(Write { reservation, ranges: ranges.collect() });
            }
        }
        let mut written = self.0.write(&mut writes).into_iter();
        let missing = || Err(Error::internal("a write was left out of its batch"));
        let mut open = self.0.inner.io_sessions.writes.lock();
        let mut finish = |(taken, parts): (Result<Reservation>, &Parts<'_>)| {
            let reservation = taken?;
            if let Some(open) = open.get_mut(parts.key) {
                open.writers -= 1;
                open.reservation.merge(reservation);
            }
            written.next().unwrap_or_else(missing)?;
            Ok(total(parts.memory))
        };
        taken.into_iter().zip(parts).map(&mut finish).collect()
    }

    /// Closes write sessions and makes their objects readable.
    ///
    /// # Errors
    /// By key: no write session is open, another thread is writing the object now, or as
    /// [`Client::publish`].
    pub fn end_writes(&self, keys: &[ObjectKey]) -> Vec<Result<()>> {
        self.finish_writes(keys, |reservations| {
            let published = self.0.publish(reservations);
            published.into_iter().map(|outcome| outcome.map(|_: PutOutcome| ())).collect()
        })
    }

    /// Closes write sessions and releases their space.
    ///
    /// # Errors
    /// By key: no write session is open, another thread is writing the object now, or as
    /// [`Client::revoke`].
    pub fn revoke_writes(&self, keys: &[ObjectKey]) -> Vec<Result<()>> {
        self.finish_writes(keys, |reservations| self.0.revoke(reservations))
    }

    fn finish_writes(
        &self,
        keys: &[ObjectKey],
        finish: impl FnOnce(Vec<Reservation>) -> Vec<Result<()>>,
    ) -> Vec<Result<()>> {
        let mut reservations = Vec::with_capacity(keys.len());
        let taken: Vec<Result<()>> = {
            let mut writes = self.0.inner.io_sessions.writes.lock();
            let mut take = |key: &ObjectKey| {
                let open = writes.get(key).ok_or_else(|| not_begun("write", key))?;
                if open.writers > 0 {
                    let text = "another thread is writing the object right now";
                    return Err(Error::invalid(text).with("key", key));
                }
                reservations.extend(writes.remove(key).map(|open| open.reservation));
                Ok(())
            };
            keys.iter().map(&mut take).collect()
        };
        let mut finished = finish(reservations).into_iter();
        let missing = || Err(Error::internal("a write was left out of its batch"));
        let outcome =
            |taken: Result<()>| taken.and_then(|()| finished.next().unwrap_or_else(missing));
        taken.into_iter().map(outcome).collect()
    }
}

/// The sessions of one kind that may still be opened.
#[derive(Debug)]
struct Room(usize);

impl Room {
    /// Returns the room beside those that are open.
    fn beside(open: usize) -> Self {
        Self(SESSIONS_MAX.saturating_sub(open))
    }

    /// Takes the room of one session.
    fn take(&mut self) -> Result<()> {
        let text = "too many read or write sessions are open";
        let left = self.0.checked_sub(1);
        self.0 = left.ok_or_else(|| Error::invalid(text).with("limit", SESSIONS_MAX))?;
        Ok(())
    }
}

fn check_lists(parts: &Parts<'_>) -> Result<()> {
    if parts.offsets.len() == parts.memory.len() {
        return Ok(());
    }
    Err(Error::invalid("there must be one offset for each part")
        .with("key", parts.key)
        .with("offsets", parts.offsets.len())
        .with("parts", parts.memory.len()))
}

fn already_begun(key: &ObjectKey) -> Error {
    Error::invalid("a write of the object has begun already").with("key", key)
}

fn not_begun(what: &str, key: &ObjectKey) -> Error {
    Error::invalid(format!("no {what} of the object has begun")).with("key", key)
}

fn already_exists(key: &ObjectKey) -> Error {
    let text = "an object with this key exists or is being written";
    Error::new(ErrorCode::OBJECT_ALREADY_EXISTS, text).with("key", key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_opens_no_more_sessions_than_there_is_room_for() {
        let opened = |open, wanted: usize| {
            let mut room = Room::beside(open);
            (0..wanted).map(|_| room.take()).filter(Result::is_ok).count()
        };
        assert_eq!(opened(0, 3), 3);
        assert_eq!(opened(SESSIONS_MAX - 2, 3), 2, "each item takes room");
        assert_eq!(opened(SESSIONS_MAX, 3), 0);
        assert_eq!(opened(SESSIONS_MAX + 1, 3), 0);
    }
}
