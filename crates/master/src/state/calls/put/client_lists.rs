//! Unfinished puts by client. Few clients put at a time, and each makes many puts in a row: neither a
//! put of the client that put last nor the end of a put looks a client up.

use mooncake_base::ClientId;
use rustc_hash::FxHashMap;

use crate::state::{
    catalog::eviction::{IndexLinks, IndexList},
    ids::{Slot, WriteSlot},
};

/// A list of puts for each client that has any.
#[derive(Debug, Default)]
pub(super) struct ClientLists {
    by_client: FxHashMap<ClientId, usize>,
    /// Vacant ones are empty.
    lists: Vec<IndexList<WriteSlot>>,
    vacant: Vec<usize>,
    /// The list of each put, by the number of the put.
    of_write: Vec<usize>,
    links: IndexLinks<WriteSlot>,
    /// The client that put last, if it still has a list.
    latest: Option<(ClientId, usize)>,
}

impl ClientLists {
    /// Appends a put that is in no list.
    pub(super) fn push(&mut self, client: ClientId, number: WriteSlot) {
        let list = match self.latest {
            Some((latest, list)) if latest == client => list,
            _ => self.list_of(client),
        };
        if number.index() >= self.of_write.len() {
            self.of_write.resize(number.index() + 1, 0);
        }
        self.of_write[number.index()] = list;
        self.lists[list].push_last(&mut self.links, number);
    }

    /// Removes a put of a client from its list.
    pub(super) fn remove(&mut self, client: ClientId, number: WriteSlot) {
        let index = self.of_write[number.index()];
        let list = &mut self.lists[index];
        list.remove(&mut self.links, number);
        if list.count() == 0 {
            self.by_client.remove(&client);
            self.vacant.push(index);
            self.latest = self.latest.filter(|(latest, _)| *latest != client);
        }
    }

    /// Returns the number of puts of a client.
    pub(super) fn count_of(&self, client: ClientId) -> u64 {
        self.by_client.get(&client).map_or(0, |&list| self.lists[list].count() as u64)
    }

    /// Returns the puts of a client in the order of their starts.
    pub(super) fn of_client(&self, client: ClientId) -> impl Iterator<Item = WriteSlot> {
        let list = self.by_client.get(&client).into_iter();
        list.flat_map(|&list| self.lists[list].iter(&self.links))
    }

    fn list_of(&mut self, client: ClientId) -> usize {
        let Self { by_client, lists, vacant, .. } = self;
        let list = *by_client.entry(client).or_insert_with(|| {
            vacant.pop().unwrap_or_else(|| {
                lists.push(IndexList::default());
                lists.len() - 1
            })
        });
        self.latest = Some((client, list));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lists: &ClientLists, client: u128, expected: &[usize]) {
        let client = ClientId::from_bits(client);
        let found: Vec<usize> = lists.of_client(client).map(Slot::index).collect();
        assert_eq!((&found[..], lists.count_of(client)), (expected, expected.len() as u64));
    }

    #[test]
    fn list_of_a_client_without_puts_goes_to_another_client() {
        let mut lists = ClientLists::default();
        let [a, b, c] = [1, 2, 3].map(ClientId::from_bits);
        for (client, number) in [(a, 0), (a, 1), (b, 2), (a, 3)] {
            lists.push(client, WriteSlot::from_index(number));
        }
        check(&lists, 1, &[0, 1, 3]);
        check(&lists, 2, &[2]);
        lists.remove(a, WriteSlot::from_index(1));
        check(&lists, 1, &[0, 3]);
        // The client that put last has no list any more when it puts again.
        lists.remove(a, WriteSlot::from_index(0));
        lists.remove(a, WriteSlot::from_index(3));
        check(&lists, 1, &[]);
        lists.push(c, WriteSlot::from_index(0));
        lists.push(a, WriteSlot::from_index(1));
        check(&lists, 1, &[1]);
        check(&lists, 2, &[2]);
        check(&lists, 3, &[0]);
    }
}
