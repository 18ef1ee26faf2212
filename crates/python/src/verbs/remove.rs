//! Removal of objects, by key or by a rule.

use mooncake_base::Version;
use mooncake_store_client::RemovalTerms;
use pyo3::prelude::*;

use super::{Begun, Driver, methods};
use crate::{
    argument::{call_with_valid, selector},
    error::or_raise,
    store::{
        Keys,
        outcome::{done, removal_numbers, terms_of_sweep},
    },
};

methods! {
    /// Removes objects, or those that have a version; with `force` also leased ones. Hard-pinned
    /// ones stay if they are spared.
    #[pyo3(signature = (keys, *, force = false, spare_pinned = false, if_version = None))]
    fn remove(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        force: bool,
        spare_pinned: bool,
        if_version: Option<u64>,
    ) -> PyResult<Begun<Self>> {
        let if_version = if_version.map(Version);
        let terms = RemovalTerms { is_forced: force, spares_hard_pinned: spare_pinned, if_version };
        self.drive_for_keys(py, keys, move |client, names| {
            done(call_with_valid(names, |names| client.remove_under(&names, &terms)))
        })
    }

    /// Removes all objects, or those that a regex or a prefix selects. Returns the number of removed
    /// ones, and of those that stayed: leased, hard-pinned, being copied.
    #[pyo3(signature = (*, regex = None, prefix = None, force = false, spare_pinned = false))]
    fn remove_matching(
        &self,
        py: Python<'_>,
        regex: Option<String>,
        prefix: Option<Vec<u8>>,
        force: bool,
        spare_pinned: bool,
    ) -> PyResult<Begun<Self>> {
        let which = or_raise(py, selector(regex, prefix))?;
        let terms = terms_of_sweep(force, spare_pinned);
        self.drive_value(py, (), move |client, ()| {
            client.remove_matching_under(&which, &terms).map(removal_numbers)
        })
    }
}
