//! Options of unsupported features: accepted and stored, checked like upstream does, and warned
//! about at the start if they would have had an effect.

use std::collections::BTreeMap;

use mooncake_base::{Error, Result};

use super::{MasterConfig, OPTIONS};

/// Options that only tune upstream's log, or that upstream ignores, too.
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

/// Options that have an effect only if the option of their feature is on.
const TUNING: &[(&str, &str)] = &[
    ("nof_", "enable_nof"),
    ("cxl_", "enable_cxl"),
    // Of an option that has an effect: silent.
    ("promotion_", "promotion_on_hit"),
    ("snapshot_", "enable_snapshot"),
    ("oplog_", "enable_oplog"),
    ("batch_oplog_", "enable_oplog"),
];

/// What happens in place of an option.
const INSTEAD: &[(&str, &str)] = &[
    ("client_suspicion_ttl_sec", "a client expires after --client_ttl"),
    ("enable_oplog", "the master always has a log, in its --state_dir"),
    ("enable_oplog_snapshot", "the log in --state_dir always has snapshots"),
    ("enable_snapshot", "the log in --state_dir always has snapshots"),
    (
        "enable_snapshot_restore",
        "the master goes on from the log in its --state_dir, and reads no snapshot of upstream's",
    ),
    (
        "tenant_eviction_high_watermark_ratio",
        "a put evicts objects of its tenant when the quota is used up",
    ),
];

/// Returns what happens in place of an option without effect.
pub(super) fn instead_of(option: &str) -> Option<&'static str> {
    INSTEAD.iter().find(|(name, _)| *name == option).map(|(_, instead)| *instead)
}

/// Refuses values with which upstream's master does not start.
pub(super) fn check(given: &BTreeMap<&'static str, String>) -> Result<()> {
    // A warning could be missed: a pool would start empty.
    let refuse = |option: &'static str, why: &str| Err(Error::invalid(why).with("option", option));
    let number = |name: &'static str| given.get(name).and_then(|text| text.parse::<f64>().ok());
    if given.get("root_fs_dir").is_some_and(|path| !path.trim().is_empty()) {
        let why = "a directory that several hosts share is not supported, so that no object would be \
            written there; leave the option out, start the master with --enable_offload, and give each \
            host a directory of its own (mooncake_client --enable_offload)";
        return refuse("root_fs_dir", why);
    }
    for name in [
        "nof_eviction_ratio",
        "nof_eviction_high_watermark_ratio",
        "tenant_eviction_high_watermark_ratio",
    ] {
        if number(name).is_some_and(|ratio| !(0.0..=1.0).contains(&ratio)) {
            return refuse(name, "the ratio is not between 0 and 1");
        }
    }
    if given.get("tenant_quota_connector_type").is_some_and(|kind| kind == "etcd") {
        return refuse(
            "tenant_quota_connector_type",
            "quotas in etcd are not supported; use a file",
        );
    }
    Ok(())
}

/// Returns the options with a value other than the default that would have had an effect.
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
            // An option that tunes a disabled feature has no effect in upstream, either.
            TUNING.iter().filter(|(prefix, _)| name.starts_with(prefix)).all(|(_, feature)| {
                *name == feature || given.get(feature).is_some_and(|text| text == "true")
            })
        })
        .map(|(name, value)| (*name, value.as_str()))
}
