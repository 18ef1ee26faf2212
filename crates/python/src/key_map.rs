//! `KeyMap`: a dictionary by strings, whose batched look-ups wait for memory side by side.

use std::{
    borrow::Cow,
    hash::{BuildHasher, RandomState},
    hint::black_box,
};

use hashbrown::HashTable;
use mooncake_base::sync::Mutex;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyList, PyString},
};

/// Vacant places that a map keeps before it closes them.
const VACANT_MAX: usize = 64;

/// A dictionary by strings in the order of their insertion.
///
/// A look-up in a dictionary of millions of keys waits several times for memory that is in no cache.
/// `find` does each step for all keys before the next step, so that the waits of the keys overlap.
///
/// The garbage collector does not see the values: they must not refer to the map.
#[pyclass(frozen, mapping, module = "mooncake._native", name = "KeyMap")]
pub(crate) struct KeyMap(Mutex<Table<Py<PyAny>>>);

#[pymethods]
impl KeyMap {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(Table::default()))
    }

    fn __len__(&self) -> usize {
        self.0.lock().index.len()
    }

    fn __contains__(&self, key: &Bound<'_, PyString>) -> PyResult<bool> {
        let key = encoded(key)?;
        Ok(self.0.lock().find(&key).is_some())
    }

    fn __setitem__(&self, key: &Bound<'_, PyString>, value: Py<PyAny>) -> PyResult<()> {
        let key = encoded(key)?;
        let replaced = self.0.lock().insert(&key, value);
        // Dropped without the lock: the end of a value may run code that uses the map.
        drop(replaced);
        Ok(())
    }

    /// Returns the value of a key, None if there is none.
    fn get(&self, py: Python<'_>, key: &Bound<'_, PyString>) -> PyResult<Option<Py<PyAny>>> {
        let key = encoded(key)?;
        Ok(self.0.lock().find(&key).map(|value| value.clone_ref(py)))
    }

    /// Returns the value of each key, None for those that have none.
    fn find<'py>(
        &self,
        py: Python<'py>,
        keys: Vec<Bound<'py, PyString>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = keys.iter().map(encoded).collect::<PyResult<Vec<_>>>()?;
        let values: Vec<Option<Py<PyAny>>> = {
            let table = self.0.lock();
            let found = table.find_each(&keys);
            found.into_iter().map(|value| value.map(|value| value.clone_ref(py))).collect()
        };
        PyList::new(py, values)
    }

    /// Removes a key; returns its value, None if there was none.
    fn pop(&self, key: &Bound<'_, PyString>) -> PyResult<Option<Py<PyAny>>> {
        let key = encoded(key)?;
        Ok(self.0.lock().remove(&key))
    }

    /// Returns the keys and their values.
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyAny>, Py<PyAny>)>> {
        let items: Vec<(Box<[u8]>, Py<PyAny>)> = {
            let table = self.0.lock();
            let items = table.items.iter().flatten();
            items.map(|item| (item.key.clone(), item.value.clone_ref(py))).collect()
        };
        items.into_iter().map(|(key, value)| Ok((decoded(py, &key)?, value))).collect()
    }
}

/// Returns the bytes of a key. Strings with halves of surrogate pairs have some, too.
fn encoded<'a>(key: &'a Bound<'_, PyString>) -> PyResult<Cow<'a, [u8]>> {
    if let Ok(text) = key.to_str() {
        return Ok(Cow::Borrowed(text.as_bytes()));
    }
    let bytes = key.call_method1("encode", ("utf-8", "surrogatepass"))?;
    Ok(Cow::Owned(bytes.cast::<PyBytes>()?.as_bytes().to_vec()))
}

/// Returns the key with these bytes.
fn decoded<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(PyString::new(py, text).into_any()),
        Err(_) => PyBytes::new(py, bytes).call_method1("decode", ("utf-8", "surrogatepass")),
    }
}

struct Table<V> {
    hasher: RandomState,
    index: HashTable<Place>,
    /// In the order of their insertion; `None` where one was removed.
    items: Vec<Option<Item<V>>>,
}

/// The hash of a key, and where its item is.
struct Place {
    hash: u64,
    at: usize,
}

struct Item<V> {
    key: Box<[u8]>,
    value: V,
}

impl<V> Default for Table<V> {
    fn default() -> Self {
        Self { hasher: RandomState::new(), index: HashTable::new(), items: Vec::new() }
    }
}

impl<V> Table<V> {
    /// Sets the value of a key; returns the previous one.
    fn insert(&mut self, key: &[u8], value: V) -> Option<V> {
        let hash = self.hasher.hash_one(key);
        if let Some(at) = self.place(hash, key) {
            let item = self.items[at].as_mut()?;
            return Some(std::mem::replace(&mut item.value, value));
        }
        let place = Place { hash, at: self.items.len() };
        self.items.push(Some(Item { key: key.into(), value }));
        self.index.insert_unique(hash, place, |place| place.hash);
        None
    }

    /// Removes a key; returns its value.
    fn remove(&mut self, key: &[u8]) -> Option<V> {
        let hash = self.hasher.hash_one(key);
        let at = self.place(hash, key)?;
        if let Ok(entry) = self.index.find_entry(hash, |place| place.at == at) {
            entry.remove();
        }
        let item = self.items[at].take()?;
        if self.items.len() > 2 * self.index.len() + VACANT_MAX {
            self.close_vacant();
        }
        Some(item.value)
    }

    /// Moves the items together.
    fn close_vacant(&mut self) {
        let mut moved_to = 0;
        for at in 0..self.items.len() {
            let Some(item) = &self.items[at] else { continue };
            let hash = self.hasher.hash_one(&*item.key);
            if let Some(place) = self.index.find_mut(hash, |place| place.at == at) {
                place.at = moved_to;
            }
            self.items.swap(at, moved_to);
            moved_to += 1;
        }
        self.items.truncate(moved_to);
        self.items.shrink_to_fit();
        self.index.shrink_to_fit(|place| place.hash);
    }

    fn find(&self, key: &[u8]) -> Option<&V> {
        self.value_at(self.place(self.hasher.hash_one(key), key)?)
    }

    /// Finds the value of each key.
    fn find_each(&self, keys: &[Cow<'_, [u8]>]) -> Vec<Option<&V>> {
        let hashes: Vec<u64> = keys.iter().map(|key| self.hasher.hash_one(&**key)).collect();
        // These loops only read what the last one needs, each for all keys: the processor has several
        // reads of one loop under way at once.
        let places = hashes.iter().map(|&hash| self.index.find(hash, |place| place.hash == hash));
        let places: Vec<Option<usize>> = places.map(|place| Some(place?.at)).collect();
        let items = places.iter().map(|&at| self.items[at?].as_ref());
        black_box(items.filter_map(|item| item?.key.first()).fold(0, |all, byte| all ^ byte));
        let probable = places.into_iter().zip(hashes).zip(keys);
        let found = probable.map(|((at, hash), key)| {
            let at = at.filter(|&at| self.is_at(at, key)).or_else(|| self.place(hash, key));
            self.value_at(at?)
        });
        found.collect()
    }

    fn place(&self, hash: u64, key: &[u8]) -> Option<usize> {
        let is_meant = |place: &Place| place.hash == hash && self.is_at(place.at, key);
        self.index.find(hash, is_meant).map(|place| place.at)
    }

    fn is_at(&self, at: usize, key: &[u8]) -> bool {
        self.items[at].as_ref().is_some_and(|item| &*item.key == key)
    }

    fn value_at(&self, at: usize) -> Option<&V> {
        self.items[at].as_ref().map(|item| &item.value)
    }
}
