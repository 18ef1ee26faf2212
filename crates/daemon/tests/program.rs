//! Tests of the program's output, files and errors.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::Duration,
};

use mooncake_testkit::{Cluster, ClusterSettings, until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_mooncake_client");
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon that is killed when this is dropped.
struct Daemon {
    process: Child,
    ready: String,
}

impl Daemon {
    fn start(master: &str, more: &[&str]) -> Self {
        let mut process = Command::new(PROGRAM)
            .arg(format!("--master_server_address={master}"))
            .args(["--metadata_server=P2PHANDSHAKE", "--port=0", "--global_segment_size=16MB"])
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        Self { process, ready }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn serves_until_sigterm_and_writes_ports_file() {
    let cluster = Cluster::start(ClusterSettings::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let ports = folder.path().join("ports.json");
    let flag = format!("--ports_file={}", ports.display());
    let more = [&flag, "--enable_http_server", "--http_port=0"];
    let mut daemon = Daemon::start(&cluster.address().to_string(), &more);
    assert!(daemon.ready.starts_with("mooncake_client ready rpc=127.0.0.1:"), "{}", daemon.ready);
    let text = fs::read_to_string(&ports).unwrap();
    for word in ["\"rpc_port\":", "\"name\":\"127.0.0.1:", "\"http_port\":"] {
        assert!(text.contains(word), "{text}");
    }
    let member = &cluster.nodes[0].client;
    let capacity = member.status().unwrap().capacity;
    assert_eq!(capacity, (64 + 16) << 20, "capacity of the cluster's node and of the daemon");
    let id = daemon.process.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let ended = until(PATIENCE, "the daemon ends", || daemon.process.try_wait().unwrap());
    assert_eq!(ended.code(), Some(0));
    assert!(!ports.exists());
    assert_eq!(member.status().unwrap().capacity, 64 << 20, "its memory has left the pool");
}

#[test]
fn reports_invalid_settings() {
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = format!("--port={}", taken.local_addr().unwrap().port());
    let check = |arguments: &[&str], words: &str| {
        let done = Command::new(PROGRAM).args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{arguments:?}: {stderr}");
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    };
    let cluster = Cluster::start(ClusterSettings::default()).unwrap();
    let (master, http) = (
        format!("--master_server_address={}", cluster.address()),
        format!("--http_port={}", taken.local_addr().unwrap().port()),
    );
    let own = ["--port=0", "--metadata_server=P2PHANDSHAKE", "--enable_http_server"];
    let words = "option=--http_port: ";
    check(&[&[&*master, &*http], &own[..]].concat(), words);
    check(&[&[&*master, &*http], &own[..]].concat(), &format!("(pid {})", std::process::id()));
    let no_master = "--master_server_address=127.0.0.1:1";
    check(&["--prot=1"], "port");
    check(&["--protocol=carrier-pigeon"], "carrier-pigeon");
    check(&[no_master, &port], "cannot listen");
    let p2p = "--metadata_server=P2PHANDSHAKE";
    check(&[no_master, p2p, "--port=0"], "no connection to the master");
}

#[test]
fn prints_help_and_version() {
    let help = Command::new(PROGRAM).arg("--help").output().unwrap();
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(help.status.success() && text.contains("--master_server_address"), "{text}");
    let version = Command::new(PROGRAM).arg("--version").output().unwrap();
    assert!(String::from_utf8_lossy(&version.stdout).starts_with("mooncake_client "));
}
