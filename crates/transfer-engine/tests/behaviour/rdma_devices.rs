//! Engines with RDMA devices: which are used, what is published about them, and their metrics.

use std::{collections::BTreeMap, sync::Arc};

use mooncake_rdma::RdmaSettings;
use mooncake_transfer_engine::{Engine, EngineConfig, TransportKind, config::RdmaFabric};
use mooncake_verbs::fake::Fabric;

use crate::pair::{Pair, config, runtime};

fn with_devices(fabric: &Arc<Fabric>, settings: RdmaSettings) -> EngineConfig {
    EngineConfig {
        rdma: Some(settings),
        rdma_fabric: Some(RdmaFabric(fabric.library())),
        ..config(Some(TransportKind::Rdma))
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Starts an engine and returns the names of the devices that it uses.
fn used(settings: RdmaSettings) -> mooncake_base::Result<Vec<String>> {
    let (fabric, runtime) = (Fabric::of(3), runtime());
    let engine = Engine::start(with_devices(&fabric, settings), runtime.handle().clone())?;
    Ok(engine.snapshot().devices.into_iter().map(|device| device.name).collect())
}

#[test]
fn lists_of_devices_limit_the_choice() {
    let default = RdmaSettings::default;
    assert_eq!(used(default()).unwrap(), ["fake0", "fake1", "fake2"]);
    let allowed = RdmaSettings { allowed: names(&["fake2", "other"]), ..default() };
    assert_eq!(used(allowed).unwrap(), ["fake2"]);
    let excluded = RdmaSettings { excluded: names(&["fake1"]), ..default() };
    assert_eq!(used(excluded).unwrap(), ["fake0", "fake2"]);
    let named = RdmaSettings {
        devices: names(&["fake0", "fake1"]),
        allowed: names(&["fake1", "fake2"]),
        ..default()
    };
    assert_eq!(used(named).unwrap(), ["fake1"]);
}

#[test]
fn required_devices_that_are_missing_are_an_error() {
    let none = RdmaSettings { allowed: names(&["other"]), ..RdmaSettings::default() };
    assert_eq!(used(none.clone()).unwrap(), [""; 0], "works over TCP");
    let error = used(RdmaSettings { is_required: true, ..none }).unwrap_err().to_string();
    for part in ["no RDMA device can be used", "fake0 is not in the list", "MC_FORCE_HCA"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn metrics_and_near_devices_are_of_each_device() {
    let fabric = Fabric::of(2);
    let near = BTreeMap::from([("cpu:0".to_owned(), names(&["fake1", "absent"]))]);
    let settings = RdmaSettings { near, ..RdmaSettings::default() };
    let runtime = runtime();
    let start = || {
        Engine::start(with_devices(&fabric, settings.clone()), runtime.handle().clone()).unwrap()
    };
    let (near, far) = (start(), start());
    let peer = near.open(far.segment_name(), crate::pair::soon()).unwrap();
    let pair = Pair { near, far, peer, runtime: crate::pair::runtime() };
    let native = pair.peer.descriptor().mooncake.clone().unwrap();
    assert_eq!(native.near_devices["cpu:0"], ["fake1"]);
    let [lent, _other] = pair.lend(4096);
    pair.write(lent.base(), &mut [1; 100]).unwrap();
    pair.read(lent.base(), &mut [0; 30]).unwrap();
    let page = pair.near.snapshot().prometheus();
    let value = |name: &str| -> u64 {
        let rows = page.lines().filter(|line| line.starts_with(name));
        rows.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    };
    let sum = |of: &str| {
        let one = |device: &str| {
            value(&format!(
                "mooncake_transfer_device_bytes_total{{device=\"{device}\",operation=\"{of}\"}}"
            ))
        };
        one("fake0") + one("fake1")
    };
    assert_eq!((sum("write"), sum("read")), (100, 30), "{page}");
    assert_eq!(value("mooncake_transfer_device_slices_total"), 2, "{page}");
    assert_eq!(value("mooncake_transfer_device_active{"), 2, "{page}");
    assert_eq!(value("mooncake_transfer_device_errors_total{"), 0, "{page}");
    assert!(
        page.contains("device_errors_total{device=\"fake0\",reason=\"no_answer\"} 0"),
        "{page}"
    );
}
