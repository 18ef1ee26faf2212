//! A master on the IPv6 loopback address; the test is ignored where the machine has none.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

#[path = "wire/support.rs"]
#[allow(dead_code, reason = "shared with the tests in `wire`, which use all of it")]
mod support;

use std::{
    net::{Ipv6Addr, TcpListener},
    process::ExitCode,
};

use libtest_mimic::Arguments;
use mooncake_base::requirement::trial;
use mooncake_master::MasterConfig;

use self::support::Running;

fn main() -> ExitCode {
    let is_missing = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err();
    let missing = is_missing.then(|| "needs IPv6 on the loopback device".to_owned());
    let test = trial(missing, "serves_ipv6_with_and_without_brackets", serves_ipv6);
    libtest_mimic::run(&Arguments::from_args(), vec![test]).exit_code()
}

fn serves_ipv6() {
    for host in ["::1", "[::1]"] {
        let rpc_address = host.to_owned();
        let running = Running::new(MasterConfig { rpc_address, ..MasterConfig::embedded() });
        assert!(running.addresses().rpc.is_ipv6());
        running.native().status();
    }
}
