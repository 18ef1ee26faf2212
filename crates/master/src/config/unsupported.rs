//! Options of features that are not here yet: accepted, checked for what the established program
//! refuses, kept, and named at the start when they would have changed anything.

use std::collections::BTreeMap;

use mooncake_base::{Error, Result};

use super::{MasterConfig, OPTIONS};

/// Options that only tune the log of the established program or are ignored there too.
const SILENT: &[&str] = &[
    "alsologtostderr",
    "colorlogtostderr",
    "kv_events_tenant_id",
    "log_dir",
    "logbufsecs",
    "logtostderr",
    "max_log_size",
    "memory_allocator",
    "minloglevel",
    "stderrthreshold",
    "v",
    "vmodule",
];

/// Options that matter only together with one that switches their feature on.
const TUNING: &[(&str, &str)] = &[
    ("nof_", "enable_nof"),
    ("cxl_", "enable_cxl"),
    ("offload", "enable_offload"),
    ("promotion_", "promotion_on_hit"),
    ("snapshot_", "enable_snapshot"),
    ("oplog_", "enable_oplog"),
    ("batch_oplog_", "enable_oplog"),
    ("ha_", "enable_ha"),
];

/// Refuses what the established program refuses to start with.
pub(super) fn check(given: &BTreeMap<&'static str, String>) -> Result<()> {
    let is_on = |name| given.get(name).is_some_and(|text| text == "true");
    let is_empty = |name| given.get(name).is_none_or(String::is_empty);
    let refuse = |option: &'static str, why: &str| Err(Error::invalid(why).with("option", option));
    let number = |name: &'static str| given.get(name).and_then(|text| text.parse::<f64>().ok());
    if is_on("enable_ha") && is_empty("ha_backend_connstring") && is_empty("etcd_endpoints") {
        return refuse("enable_ha", "high availability needs --ha_backend_connstring");
    }
    if is_on("enable_oplog") && !is_on("enable_ha") {
        return refuse("enable_oplog", "the log needs --enable_ha");
    }
    for name in ["nof_eviction_ratio", "nof_eviction_high_watermark_ratio", "offload_cap_ratio"] {
        if number(name).is_some_and(|ratio| !(0.0..=1.0).contains(&ratio)) {
            return refuse(name, "the ratio is not between 0 and 1");
        }
    }
    if number("offloading_queue_limit").is_some_and(|limit| !(1.0..=1e8).contains(&limit)) {
        return refuse("offloading_queue_limit", "the limit is not between 1 and 100000000");
    }
    if given.get("tenant_quota_connector_type").is_some_and(|kind| kind == "etcd") {
        return refuse("tenant_quota_connector_type", "quotas are kept in a file, not in etcd");
    }
    Ok(())
}

/// Those that were given a value other than their default and would have changed something.
pub(super) fn ineffective<'a>(
    given: &'a BTreeMap<&'static str, String>,
) -> impl Iterator<Item = (&'static str, &'a str)> {
    let defaults = MasterConfig::default();
    given
        .iter()
        .filter(move |(name, value)| {
            OPTIONS.iter().any(|spec| spec.name == **name && (spec.show)(&defaults) != **value)
        })
        .filter(|(name, _)| !SILENT.contains(name))
        .filter(|(name, _)| {
            // A number that tunes a feature nobody switched on changes nothing here or there.
            TUNING.iter().filter(|(prefix, _)| name.starts_with(prefix)).all(|(_, feature)| {
                *name == feature || given.get(feature).is_some_and(|text| text == "true")
            })
        })
        .map(|(name, value)| (*name, value.as_str()))
}
