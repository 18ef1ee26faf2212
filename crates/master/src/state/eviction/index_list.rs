//! Doubly linked lists of numbers, whose links lie in one vector.

/// No number.
const NONE: u32 = u32::MAX;
/// In no list.
const OUT: u32 = u32::MAX - 1;

/// The links of the numbers, each of which is in one list at most.
#[derive(Debug, Default)]
pub(crate) struct IndexLinks(Vec<Link>);

#[derive(Debug, Clone, Copy)]
struct Link {
    earlier: u32,
    later: u32,
}

/// The ends of one list.
#[derive(Debug)]
pub(crate) struct IndexList {
    first: u32,
    last: u32,
    count: usize,
}

impl Default for IndexList {
    fn default() -> Self {
        Self { first: NONE, last: NONE, count: 0 }
    }
}

impl IndexLinks {
    pub(crate) fn contains(&self, number: u32) -> bool {
        self.0.get(number as usize).is_some_and(|link| link.earlier != OUT)
    }

    fn link(&mut self, number: u32) -> &mut Link {
        let index = number as usize;
        if index >= self.0.len() {
            self.0.resize(index + 1, Link { earlier: OUT, later: OUT });
        }
        &mut self.0[index]
    }
}

impl IndexList {
    /// How many are in it.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The first, left where it is.
    pub(crate) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Takes the first out.
    pub(crate) fn pop_first(&mut self, links: &mut IndexLinks) -> Option<u32> {
        let first = self.first()?;
        self.remove(links, first);
        Some(first)
    }

    /// Puts a number that is in no list at the end.
    pub(crate) fn push_last(&mut self, links: &mut IndexLinks, number: u32) {
        *links.link(number) = Link { earlier: self.last, later: NONE };
        match self.last {
            NONE => self.first = number,
            last => links.0[last as usize].later = number,
        }
        self.last = number;
        self.count += 1;
    }

    /// Puts a number that is in no list at the start.
    pub(crate) fn push_first(&mut self, links: &mut IndexLinks, number: u32) {
        *links.link(number) = Link { earlier: NONE, later: self.first };
        match self.first {
            NONE => self.last = number,
            first => links.0[first as usize].earlier = number,
        }
        self.first = number;
        self.count += 1;
    }

    /// Takes a number out that is in this list.
    pub(crate) fn remove(&mut self, links: &mut IndexLinks, number: u32) {
        let Link { earlier, later } = links.0[number as usize];
        match earlier {
            NONE => self.first = later,
            earlier => links.0[earlier as usize].later = later,
        }
        match later {
            NONE => self.last = earlier,
            later => links.0[later as usize].earlier = earlier,
        }
        links.0[number as usize] = Link { earlier: OUT, later: OUT };
        self.count -= 1;
    }
}
