//! Starting and stopping: ports, addresses, several masters on one host.

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use mooncake_master::{MasterConfig, Origin};
use mooncake_proto::v1::{self, request, response};

use crate::support::{NativeClient, Running, connect, eventually, get, runtime, whole_config};

#[test]
fn embedded_master_answers_in_process() {
    let running = Running::new(MasterConfig::embedded());
    let addresses = running.addresses();
    assert!(addresses.rpc.ip().is_loopback() && addresses.rpc.port() != 0);
    assert_eq!((addresses.admin, addresses.metadata), (None, None));
    let call = Some(request::Call::Status(v1::StatusRequest { caller: None }));
    let service = running.master().service();
    let answer =
        service.dispatch(v1::Request { call, ..Default::default() }, &Origin::in_process());
    assert!(matches!(answer.call, Some(response::Call::Status(_))));
}

#[test]
fn occupied_port_error_names_option() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let runtime = runtime();
    for (config, option) in [
        (MasterConfig { rpc_port: Some(port), ..MasterConfig::embedded() }, "rpc_port"),
        (MasterConfig { admin_port: Some(port), ..whole_config() }, "metrics_port"),
        (MasterConfig { metadata_port: port, ..whole_config() }, "http_metadata_server_port"),
    ] {
        let error = runtime.block_on(mooncake_master::start(config)).unwrap_err().to_string();
        assert!(error.contains(option) && error.contains(&port.to_string()), "{error}");
    }
}

#[test]
fn two_masters_start_with_default_admin_port() {
    let config = || MasterConfig {
        has_admin: true,
        admin_host: "127.0.0.1".to_owned(),
        admin_port: None,
        ..MasterConfig::embedded()
    };
    let (first, second) = (Running::new(config()), Running::new(config()));
    assert_ne!(first.admin(), second.admin());
    for running in [&first, &second] {
        assert_eq!(get(running.admin(), "/role").text(), "leader");
    }
    assert_ne!(first.native().greeting.master, second.native().greeting.master);
}

#[test]
fn refuses_host_with_port_or_empty_host() {
    let runtime = runtime();
    for host in ["127.0.0.1:1", "", "no such host"] {
        let rpc_address = host.to_owned();
        let config = MasterConfig { rpc_address, ..MasterConfig::embedded() };
        assert!(runtime.block_on(mooncake_master::start(config)).is_err(), "{host:?}");
    }
}

#[test]
fn stop_closes_idle_connections_and_frees_ports() {
    let running = Running::whole();
    let addresses = running.addresses();
    let mut native = running.native();
    let _unix = running.unix();
    let silent = connect(addresses.rpc);
    let _open = connect(addresses.admin.unwrap());
    let begun = Instant::now();
    running.stop();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(std::io::Read::read(&mut native.stream, &mut [0; 1]).is_ok_and(|count| count == 0));
    drop(silent);
    TcpListener::bind(addresses.rpc).unwrap();
}

#[test]
fn dropped_master_stops_serving() {
    let runtime = runtime();
    let master = runtime.block_on(mooncake_master::start(MasterConfig::embedded())).unwrap();
    let address = master.addresses().rpc;
    NativeClient::over(connect(address)).unwrap().status();
    drop(master);
    eventually("the port is closed", || std::net::TcpStream::connect(address).is_err());
}

#[test]
fn closes_idle_connection_after_timeout() {
    let rpc_idle_timeout = Duration::from_millis(50);
    let running = Running::new(MasterConfig { rpc_idle_timeout, ..MasterConfig::embedded() });
    let mut client = running.native();
    assert!(std::io::Read::read(&mut client.stream, &mut [0; 1]).is_ok_and(|count| count == 0));
}
