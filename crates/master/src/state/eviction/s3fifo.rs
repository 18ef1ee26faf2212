//! Three queues first in, first out: newcomers, proven ones, and the names of those just gone.

use super::{Chain, EvictionPolicy, Links};

/// Newcomers may hold this share of all objects before they go first: one in so many.
const NEWCOMER_SHARE: usize = 10;
/// Uses are counted so far; each saves an object from one pass.
const USES_MAX: u8 = 3;

/// Evicts newcomers that were not used again, before anything that was.
///
/// An object used while it is a newcomer becomes a proven one; one whose name is still remembered
/// when it comes again is proven at once. A scan over many objects passes through the newcomers.
#[derive(Debug, Default)]
pub struct S3Fifo {
    links: Links,
    newcomers: Chain,
    proven: Chain,
    notes: Vec<Note>,
    gone: Gone,
}

#[derive(Debug, Clone, Copy, Default)]
struct Note {
    uses: u8,
    is_proven: bool,
}

impl S3Fifo {
    fn chain(&mut self, object: u32) -> (&mut Chain, &mut Links) {
        let is_proven = self.notes[object as usize].is_proven;
        (if is_proven { &mut self.proven } else { &mut self.newcomers }, &mut self.links)
    }

    fn enter(&mut self, object: u32, is_proven: bool) {
        self.notes[object as usize].is_proven = is_proven;
        let (chain, links) = self.chain(object);
        chain.push_last(links, object);
    }

    fn pop_newcomer(&mut self) -> Option<u32> {
        while let Some(object) = self.newcomers.pop_first(&mut self.links) {
            let note = &mut self.notes[object as usize];
            if note.uses == 0 {
                return Some(object);
            }
            note.uses = 0;
            self.enter(object, true);
        }
        None
    }

    fn pop_proven(&mut self) -> Option<u32> {
        while let Some(object) = self.proven.pop_first(&mut self.links) {
            let note = &mut self.notes[object as usize];
            if note.uses == 0 {
                return Some(object);
            }
            note.uses -= 1;
            self.enter(object, true);
        }
        None
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&mut self, object: u32, hash: u32) {
        if self.links.contains(object) {
            return;
        }
        if object as usize >= self.notes.len() {
            self.notes.resize(object as usize + 1, Note::default());
        }
        self.notes[object as usize] = Note { uses: 0, is_proven: false };
        self.gone.make_room(self.proven.count());
        let is_proven = self.gone.recall(hash);
        self.enter(object, is_proven);
    }

    fn touch(&mut self, object: u32) {
        if self.links.contains(object) {
            let note = &mut self.notes[object as usize];
            note.uses = USES_MAX.min(note.uses + 1);
        }
    }

    fn remove(&mut self, object: u32) {
        if self.links.contains(object) {
            let (chain, links) = self.chain(object);
            chain.remove(links, object);
        }
    }

    fn pop(&mut self) -> Option<u32> {
        let all = self.newcomers.count() + self.proven.count();
        if self.newcomers.count() * NEWCOMER_SHARE > all {
            self.pop_newcomer().or_else(|| self.pop_proven())
        } else {
            self.pop_proven().or_else(|| self.pop_newcomer())
        }
    }

    fn put_back(&mut self, object: u32) {
        // Among the newcomers if those are looked at first, so that it is the next one.
        let all = self.newcomers.count() + self.proven.count() + 1;
        let is_newcomer = (self.newcomers.count() + 1) * NEWCOMER_SHARE > all;
        let note = &mut self.notes[object as usize];
        (note.is_proven, note.uses) = (!is_newcomer, 0);
        let (chain, links) = self.chain(object);
        chain.push_first(links, object);
    }

    fn evicted(&mut self, object: u32, hash: u32) {
        let is_newcomer = self.notes.get(object as usize).is_some_and(|note| !note.is_proven);
        if is_newcomer {
            self.gone.remember(hash);
        }
    }
}

/// Names of objects that went as newcomers: a table in which the later overwrites the earlier.
#[derive(Debug, Default)]
struct Gone(Vec<Option<u32>>);

impl Gone {
    /// Grows with the objects that are proven; what was remembered is forgotten then.
    fn make_room(&mut self, objects: usize) {
        if self.0.len() < objects.max(64) {
            self.0 = vec![None; objects.max(64).next_power_of_two() * 2];
        }
    }

    fn remember(&mut self, hash: u32) {
        if let Some(place) = self.place(hash) {
            self.0[place] = Some(hash);
        }
    }

    /// Whether it is remembered; it no longer is afterwards.
    fn recall(&mut self, hash: u32) -> bool {
        self.place(hash).is_some_and(|place| self.0[place].take_if(|held| *held == hash).is_some())
    }

    fn place(&self, hash: u32) -> Option<usize> {
        let mask = self.0.len().checked_sub(1)?;
        Some(hash as usize & mask)
    }
}
