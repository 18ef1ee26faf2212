//! Puts of values.

use mooncake_base::Version;
use mooncake_transfer_engine::LocalRange;
use pyo3::prelude::*;

use super::{Begun, Driver, methods};
use crate::{
    argument::{PackedKeys, check_same_length},
    caller_memory::{Ranges, Views},
    error::or_raise,
    options::PutOptions,
    store::{
        Keys, Store,
        outcome::{Absent, batch_options},
        transfer,
    },
};

methods! {
    /// Puts values: true where the value was stored, false where an existing object was kept.
    #[pyo3(signature = (keys, values, *, options = None, is_upsert = false, if_absent = None))]
    fn put<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        values: Vec<Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
        if_absent: Option<Absent<'py>>,
    ) -> PyResult<Begun<Self>> {
        let options = batch_options(py, options, is_upsert, keys.len(), if_absent.as_ref())?;
        put_values(self, py, keys, &values, options, |version| version.is_some())
    }
}

#[pymethods]
impl Store {
    /// Puts values: the version of each new object, 0 where an existing object was kept.
    #[pyo3(signature = (keys, values, *, options = None, is_upsert = false, if_absent = None))]
    fn put_versions<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        values: Vec<Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
        if_absent: Option<Absent<'py>>,
    ) -> PyResult<Begun<Self>> {
        let options = batch_options(py, options, is_upsert, keys.len(), if_absent.as_ref())?;
        let number = |version: Option<Version>| version.map_or(0, |version| version.0);
        put_values(self, py, keys, &values, options, number)
    }

    /// Puts values from addresses: true where the value was stored, false where an existing object
    /// was kept.
    #[pyo3(signature = (keys, ranges, *, options = None, is_upsert = false))]
    fn put_from(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        ranges: Ranges,
        options: Option<&Bound<'_, PutOptions>>,
        is_upsert: bool,
    ) -> PyResult<Begun<Self>> {
        or_raise(py, check_same_length("ranges", ranges.len(), keys.len()))?;
        let options = batch_options(py, options, is_upsert, keys.len(), None)?;
        let names = PackedKeys::from_slice(&keys)?;
        self.drive_each(py, keys, ranges, move |client, ranges| {
            let stored = transfer::put(client, &names, &ranges.items(), options);
            stored.into_iter().map(|stored| stored.map(|version| version.is_some())).collect()
        })
    }
}

/// Puts values. Returns what `outcome` makes of each new version, or the failure.
fn put_values<D, T>(
    driver: &D,
    py: Python<'_>,
    keys: Keys<'_>,
    values: &[Bound<'_, PyAny>],
    options: mooncake_store_client::PutOptions,
    outcome: fn(Option<Version>) -> T,
) -> PyResult<Begun<D>>
where
    D: Driver,
    T: for<'py> IntoPyObject<'py> + Send + 'static,
{
    or_raise(py, check_same_length("values", values.len(), keys.len()))?;
    let views = values.iter().map(Views::of).collect::<PyResult<Vec<_>>>()?;
    let names = PackedKeys::from_slice(&keys)?;
    driver.drive_each(py, keys, views, move |client, views| {
        let ranges: Vec<&[LocalRange]> = views.iter().map(Views::ranges).collect();
        let stored = transfer::put(client, &names, &ranges, options);
        stored.into_iter().map(|stored| stored.map(outcome)).collect()
    })
}
