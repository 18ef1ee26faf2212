//! Pages of a listing.

use mooncake_base::ObjectKey;
use mooncake_store_client::{Client, Selector};
use pyo3::{IntoPyObjectExt, prelude::*};

use super::{Begun, Driver, methods};
use crate::{error::or_raise, store::outcome::listing};

methods! {
    /// Lists one page of the objects whose key has a prefix, in key order.
    #[pyo3(signature = (*, prefix = Vec::new(), after = None, limit = 0))]
    fn list(
        &self,
        py: Python<'_>,
        prefix: Vec<u8>,
        after: Option<Vec<u8>>,
        limit: u32,
    ) -> PyResult<Begun<Self>> {
        let after = or_raise(py, after.map(ObjectKey::new).transpose())?;
        let prefix = Selector::Prefix(prefix);
        let work = move |client: &Client, (): &()| client.list(&prefix, after.as_ref(), limit);
        self.drive(py, (), work, |py, page| listing(py, page).into_py_any(py))
    }
}
