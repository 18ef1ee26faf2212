//! Arena for key bytes: with one heap allocation per key, tens of millions of keys would cost a
//! fifth more.

/// Entry sizes are multiples of this.
const STEP_BYTES: usize = 8;

/// Longer keys are boxed.
const SHORT_BYTES_MAX: usize = 256;

/// Entries of one size that are allocated together.
const CHUNK_PLACES: usize = 512;

/// No entry.
const NONE: u32 = u32::MAX;

/// Position and length of a key.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct KeyHandle {
    place: u32,
    /// Length less one, since no key is empty and the longest has 2^16 bytes.
    length: u16,
}

/// Keys, each in an entry that it keeps.
#[derive(Debug, Clone)]
pub(in crate::state) struct KeyArena {
    /// By size.
    classes: [KeySizeClass; SHORT_BYTES_MAX / STEP_BYTES],
    long: Vec<Box<[u8]>>,
    vacant_long: Vec<u32>,
}

/// Entries of one size.
#[derive(Debug, Clone)]
struct KeySizeClass {
    chunks: Vec<Box<[u8]>>,
    /// Entries ever allocated.
    count: u32,
    /// First entry of the free list; each holds the number of the next one in its first bytes.
    vacant: u32,
}

impl Default for KeyArena {
    fn default() -> Self {
        let none = |_| KeySizeClass { chunks: Vec::new(), count: 0, vacant: NONE };
        Self { classes: std::array::from_fn(none), long: Vec::new(), vacant_long: Vec::new() }
    }
}

impl KeyArena {
    /// Stores a key of 1 to 2^16 bytes.
    pub(in crate::state) fn insert(&mut self, key: &[u8]) -> KeyHandle {
        let length = u16::try_from(key.len() - 1).expect("a key has at most 2^16 bytes");
        let place = match self.classes.get_mut(class_of(key.len())) {
            Some(places) => {
                let place = places.allocate(bytes_of(key.len()));
                places.at_mut(place, bytes_of(key.len()))[..key.len()].copy_from_slice(key);
                place
            }
            None => self.insert_long(key),
        };
        KeyHandle { place, length }
    }

    /// Returns a stored key.
    pub(in crate::state) fn get(&self, at: KeyHandle) -> &[u8] {
        let length = usize::from(at.length) + 1;
        match self.classes.get(class_of(length)) {
            Some(places) => &places.at(at.place, bytes_of(length))[..length],
            None => &self.long[at.place as usize],
        }
    }

    /// Frees the entry of a key.
    pub(in crate::state) fn remove(&mut self, at: KeyHandle) {
        let length = usize::from(at.length) + 1;
        match self.classes.get_mut(class_of(length)) {
            Some(places) => places.release(at.place, bytes_of(length)),
            None => {
                self.long[at.place as usize] = Box::default();
                self.vacant_long.push(at.place);
            }
        }
    }

    fn insert_long(&mut self, key: &[u8]) -> u32 {
        if let Some(place) = self.vacant_long.pop() {
            self.long[place as usize] = Box::from(key);
            return place;
        }
        self.long.push(Box::from(key));
        number_of(self.long.len() - 1)
    }
}

impl KeySizeClass {
    fn at(&self, place: u32, bytes: usize) -> &[u8] {
        let (chunk, start) = (place as usize / CHUNK_PLACES, place as usize % CHUNK_PLACES * bytes);
        &self.chunks[chunk][start..start + bytes]
    }

    fn at_mut(&mut self, place: u32, bytes: usize) -> &mut [u8] {
        let (chunk, start) = (place as usize / CHUNK_PLACES, place as usize % CHUNK_PLACES * bytes);
        &mut self.chunks[chunk][start..start + bytes]
    }

    fn allocate(&mut self, bytes: usize) -> u32 {
        if self.vacant != NONE {
            let place = self.vacant;
            let next =
                self.at(place, bytes).first_chunk().expect("a place has eight bytes or more");
            self.vacant = u32::from_le_bytes(*next);
            return place;
        }
        if self.count as usize == self.chunks.len() * CHUNK_PLACES {
            self.chunks.push(vec![0; CHUNK_PLACES * bytes].into());
        }
        self.count += 1;
        self.count - 1
    }

    fn release(&mut self, place: u32, bytes: usize) {
        let next = self.vacant.to_le_bytes();
        self.at_mut(place, bytes)[..next.len()].copy_from_slice(&next);
        self.vacant = place;
    }
}

/// Returns the size class of a key.
fn class_of(length: usize) -> usize {
    (length - 1) / STEP_BYTES
}

/// Returns the entry size of a key.
fn bytes_of(length: usize) -> usize {
    length.next_multiple_of(STEP_BYTES)
}

fn number_of(index: usize) -> u32 {
    u32::try_from(index).expect("there are fewer keys than numbers")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use mooncake_base::key::KEY_BYTES_MAX;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn handle_takes_8_bytes() {
        assert_eq!(size_of::<KeyHandle>(), 8);
    }

    #[test]
    fn entries_of_every_length_are_reused() {
        let mut keys = KeyArena::default();
        let lengths = (1..=SHORT_BYTES_MAX + 2).chain([KEY_BYTES_MAX]);
        let all: Vec<Vec<u8>> = lengths.map(|length| vec![length as u8; length]).collect();
        for _ in 0..3 {
            let kept: Vec<KeyHandle> = all.iter().map(|key| keys.insert(key)).collect();
            for (key, at) in all.iter().zip(&kept) {
                assert_eq!(keys.get(*at), &key[..]);
            }
            kept.into_iter().for_each(|at| keys.remove(at));
        }
        assert!(keys.classes.iter().all(|places| places.count as usize == STEP_BYTES));
        assert_eq!(keys.long.len(), 3);
    }

    proptest! {
        #[test]
        fn keys_are_unaffected_by_other_keys(
            steps in prop::collection::vec((any::<u8>(), 1..40_usize, any::<bool>()), 1..2000),
        ) {
            let mut keys = KeyArena::default();
            let mut kept: BTreeMap<u8, (KeyHandle, Vec<u8>)> = BTreeMap::new();
            for (name, length, is_kept) in steps {
                if let Some((at, key)) = kept.remove(&name) {
                    prop_assert_eq!(keys.get(at), &key[..]);
                    keys.remove(at);
                }
                if is_kept {
                    let key = vec![name; length];
                    kept.insert(name, (keys.insert(&key), key));
                }
            }
            for (at, key) in kept.values() {
                prop_assert_eq!(keys.get(*at), &key[..]);
            }
        }
    }
}
