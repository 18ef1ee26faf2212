//! What the master knows of objects: their details, copies and expiry.

use std::time::Duration;

use pyo3::prelude::*;

use super::{Begun, Driver, methods};
use crate::{
    argument::call_with_valid,
    store::{Keys, Store, describe::Places, details::Details, outcome::done},
};

methods! {
    /// Returns what the master knows of objects: a dictionary for each.
    fn describe(&self, py: Python<'_>, keys: Keys<'_>) -> PyResult<Begun<Self>> {
        self.drive_for_keys(py, keys, |client, names| {
            let found = call_with_valid(names, |names| client.details(&names));
            found.into_iter().map(|found| found.map(Details::from)).collect()
        })
    }

    /// Returns where the copies of objects are. Leases the objects unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn replicas(&self, py: Python<'_>, keys: Keys<'_>, lease: bool) -> PyResult<Begun<Self>> {
        self.drive_for_keys(py, keys, move |client, names| {
            let located = call_with_valid(names, |names| client.describe(&names, lease));
            located.into_iter().map(|located| located.map(Places)).collect()
        })
    }

    /// Lets objects expire after that time from now; `None`: never.
    fn set_expiry(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        ttl_ms: Option<u64>,
    ) -> PyResult<Begun<Self>> {
        let ttl = ttl_ms.map(Duration::from_millis);
        self.drive_for_keys(py, keys, move |client, names| {
            done(call_with_valid(names, |names| client.set_expiry(&names, ttl)))
        })
    }
}

#[pymethods]
impl Store {
    /// Drops the copies of objects in segments of that name, or all copies.
    #[pyo3(signature = (keys, *, segment = String::new()))]
    fn clear_replicas(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        segment: String,
    ) -> PyResult<Begun<Self>> {
        self.drive_for_keys(py, keys, move |client, names| {
            call_with_valid(names, |names| client.clear_replicas(&names, &segment))
        })
    }
}
