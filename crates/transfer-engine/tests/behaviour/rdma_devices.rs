//! Engines with RDMA devices: which are used, what is published about them, and their metrics.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Arc, time::Instant};

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
    let segment = far.new_segment_id();
    let pair = Pair { near, far, peer, segment, runtime: crate::pair::runtime() };
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

#[test]
fn changed_address_is_in_the_descriptor() {
    let (fabric, runtime) = (Fabric::of(1), runtime());
    let settings = RdmaSettings::default();
    let start = || {
        Engine::start(with_devices(&fabric, settings.clone()), runtime.handle().clone()).unwrap()
    };
    let far = start();
    // A new engine asks each time.
    let gid = || {
        let peer = start().open(far.segment_name(), crate::pair::soon()).unwrap();
        peer.descriptor().devices[0].gid.clone()
    };
    assert!(gid().ends_with("0a:4d:00:01"));
    fabric.set_address(0, Some((3, Ipv4Addr::new(10, 77, 0, 200))));
    let started = Instant::now();
    while !gid().ends_with("0a:4d:00:c8") {
        assert!(started.elapsed().as_secs() < 30, "{}", gid());
    }
}

#[test]
fn devices_are_connected_by_their_own_address() {
    let (fabric, runtime) = (Fabric::of(1), runtime());
    let start = |address: Option<&str>| {
        let config = EngineConfig {
            rdma_bind_address: address.map(str::to_owned),
            ..with_devices(&fabric, RdmaSettings::default())
        };
        Engine::start(config, runtime.handle().clone()).unwrap()
    };
    let (near, far) = (start(None), start(Some("127.0.0.3")));
    let peer = near.open(far.segment_name(), crate::pair::soon()).unwrap();
    let server = &peer.descriptor().rdma_server_name;
    let port = far.segment_name().rsplit_once(':').unwrap().1;
    assert_eq!(*server, format!("127.0.0.3:{port}"));
    let segment = far.new_segment_id();
    let pair = Pair { near, far, peer, segment, runtime: crate::pair::runtime() };
    let [lent, _other] = pair.lend(4096);
    pair.write(lent.base(), &mut [1; 100]).unwrap();
    assert_eq!(pair.near.snapshot().devices[0].bytes_written, 100);
}
