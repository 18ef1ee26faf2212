//! What the master knows of an object, as a dictionary.

use std::{collections::BTreeMap, time::Duration};

use mooncake_store_client::ObjectDetails;
use pyo3::prelude::*;

/// The dictionary.
#[derive(Debug, IntoPyObject)]
pub(crate) struct Details {
    version: Option<u64>,
    size: u64,
    replicas: u32,
    data_type: u32,
    expires_in_s: Option<f64>,
    tags: BTreeMap<String, String>,
    is_hard_pinned: bool,
    soft_pin_ttl_s: Option<f64>,
    group: String,
}

impl From<ObjectDetails> for Details {
    fn from(found: ObjectDetails) -> Self {
        Self {
            version: found.version.map(|version| version.0),
            size: found.length,
            replicas: found.replicas,
            data_type: found.data_type,
            expires_in_s: found.expires_in.as_ref().map(Duration::as_secs_f64),
            tags: found.tags,
            is_hard_pinned: found.is_hard_pinned,
            soft_pin_ttl_s: found.soft_pin_ttl.as_ref().map(Duration::as_secs_f64),
            group: String::from_utf8_lossy(&found.group).into_owned(),
        }
    }
}
