//! Doubly linked lists of indices, with all links in one vector.

use std::marker::PhantomData;

use crate::state::ids::Slot;

/// The end of a list.
const NONE: u32 = u32::MAX;

/// The mark of an index in no list.
const OUT: u32 = u32::MAX - 1;

/// The links of all indices. Each index is in at most one list.
#[derive(Debug)]
pub(crate) struct IndexLinks<I> {
    links: Vec<Link>,
    index: PhantomData<I>,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    earlier: u32,
    later: u32,
}

/// The ends of one list.
#[derive(Debug)]
pub(crate) struct IndexList<I> {
    first: u32,
    last: u32,
    count: usize,
    index: PhantomData<I>,
}

impl<I> Default for IndexLinks<I> {
    fn default() -> Self {
        Self { links: Vec::new(), index: PhantomData }
    }
}

impl<I> Default for IndexList<I> {
    fn default() -> Self {
        Self { first: NONE, last: NONE, count: 0, index: PhantomData }
    }
}

impl<I: Slot> IndexLinks<I> {
    pub(crate) fn contains(&self, number: I) -> bool {
        self.links.get(number.index()).is_some_and(|link| link.earlier != OUT)
    }

    fn link(&mut self, number: I) -> &mut Link {
        let index = number.index();
        if index >= self.links.len() {
            self.links.resize(index + 1, Link { earlier: OUT, later: OUT });
        }
        &mut self.links[index]
    }
}

impl<I: Slot> IndexList<I> {
    /// Returns the number of entries.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the first entry without removing it.
    pub(crate) fn first(&self) -> Option<I> {
        (self.first != NONE).then(|| I::from_number(self.first))
    }

    /// Returns the entries in order.
    pub(crate) fn iter(&self, links: &IndexLinks<I>) -> impl Iterator<Item = I> {
        let known = |number: u32| (number != NONE).then(|| I::from_number(number));
        std::iter::successors(known(self.first), move |number| {
            known(links.links[number.index()].later)
        })
    }

    /// Removes and returns the first entry.
    pub(crate) fn pop_first(&mut self, links: &mut IndexLinks<I>) -> Option<I> {
        let first = self.first()?;
        self.remove(links, first);
        Some(first)
    }

    /// Appends an index that is in no list.
    pub(crate) fn push_last(&mut self, links: &mut IndexLinks<I>, number: I) {
        debug_assert!(!links.contains(number), "an index is in one list at most");
        *links.link(number) = Link { earlier: self.last, later: NONE };
        match self.last {
            NONE => self.first = number.to_number(),
            last => links.links[last as usize].later = number.to_number(),
        }
        self.last = number.to_number();
        self.count += 1;
    }

    /// Prepends an index that is in no list.
    pub(crate) fn push_first(&mut self, links: &mut IndexLinks<I>, number: I) {
        debug_assert!(!links.contains(number), "an index is in one list at most");
        *links.link(number) = Link { earlier: NONE, later: self.first };
        match self.first {
            NONE => self.last = number.to_number(),
            first => links.links[first as usize].earlier = number.to_number(),
        }
        self.first = number.to_number();
        self.count += 1;
    }

    /// Removes an index from this list.
    pub(crate) fn remove(&mut self, links: &mut IndexLinks<I>, number: I) {
        debug_assert!(links.contains(number), "an index that is removed is in a list");
        let Link { earlier, later } = links.links[number.index()];
        match earlier {
            NONE => self.first = later,
            earlier => links.links[earlier as usize].later = later,
        }
        match later {
            NONE => self.last = earlier,
            later => links.links[later as usize].earlier = earlier,
        }
        links.links[number.index()] = Link { earlier: OUT, later: OUT };
        self.count -= 1;
    }
}
