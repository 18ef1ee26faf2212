//! Questions which objects exist, and how long they are.

use mooncake_store_client::{Presence, ProbeTerms};
use pyo3::{prelude::*, types::PyList};

use super::{Begun, Driver, methods};
use crate::{
    argument::key_batch,
    error::exception,
    store::{
        Keys, Store,
        outcome::{is_there, length_of, probe, probe_suffixes},
    },
};

methods! {
    /// Returns which objects exist and are complete. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true, prefetch = false))]
    fn exists(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        lease: bool,
        prefetch: bool,
    ) -> PyResult<Begun<Self>> {
        let terms = ProbeTerms { takes_lease: lease, prefetches: prefetch };
        self.drive_for_keys(py, keys, move |client, names| {
            probe(client, names, terms).into_iter().map(is_there).collect()
        })
    }

    /// Looks for objects with the keys, or else with keys that are these with a suffix; leases none.
    /// Returns 1 for an object with the key itself, else the sum of `2 << n` for each suffix `n`.
    fn exists_or_suffixed(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        suffixes: Vec<Vec<u8>>,
    ) -> PyResult<Begun<Self>> {
        self.drive_for_keys(py, keys, move |client, names| probe_suffixes(client, names, &suffixes))
    }

    /// Returns the lengths of objects. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn sizes(&self, py: Python<'_>, keys: Keys<'_>, lease: bool) -> PyResult<Begun<Self>> {
        let terms = ProbeTerms { takes_lease: lease, prefetches: false };
        self.drive_for_keys(py, keys, move |client, names| {
            probe(client, names, terms).into_iter().map(length_of).collect()
        })
    }
}

#[pymethods]
impl Store {
    /// Does what `exists` does, with numbers: 1, 0, or an error code where the answer is unknown,
    /// and the last error.
    #[pyo3(signature = (keys, *, lease = true, prefetch = false))]
    fn presence<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        lease: bool,
        prefetch: bool,
    ) -> PyResult<(Bound<'py, PyList>, Option<Bound<'py, PyAny>>)> {
        let (keys, terms) =
            (key_batch(keys)?, ProbeTerms { takes_lease: lease, prefetches: prefetch });
        let Presence { found, failure } = self.call(py, |client| client.presence(keys, terms))?;
        let unknown = failure.as_ref().map_or(0, |error| error.code().number());
        let numbers = found.into_iter().map(|found| found.map_or(unknown, i32::from));
        let failure = failure.map(|error| exception(py, &error, None)).transpose()?;
        Ok((PyList::new(py, numbers)?, failure))
    }
}
