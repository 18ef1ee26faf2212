//! The program as a process: exit codes, messages, the ready line, signals.
#![allow(
    clippy::unwrap_used,
    reason = "integration tests are tests as a whole, which the lint does not see"
)]

use std::{
    io::{BufRead, BufReader},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

const DEADLINE: Duration = Duration::from_secs(10);

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mooncake_master"));
    command.args(arguments).env_remove("MC_LOG_LEVEL").env_remove("MOONCAKE_LOG");
    command
}

fn ended(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = program(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// A running program; killed when dropped.
struct Started {
    child: Child,
    ready: String,
}

impl Started {
    fn new(arguments: &[&str]) -> Self {
        let mut child = program(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        Self { child, ready }
    }

    fn address(&self, name: &str) -> SocketAddr {
        let word = self.ready.split_whitespace().find_map(|word| word.strip_prefix(name));
        word.and_then(|word| word.strip_prefix('=')).expect(&self.ready).parse().unwrap()
    }

    /// Sends the signal and waits for the end.
    fn end(&mut self, signal: &str) -> Option<i32> {
        let sent = Command::new("kill").arg(signal).arg(self.child.id().to_string()).status();
        assert!(sent.unwrap().success());
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "the program does not end");
            std::thread::yield_now();
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const FREE: [&str; 4] =
    ["--rpc_port=0", "--rpc_address=127.0.0.1", "--metrics_port=0", "--metrics_host=127.0.0.1"];

#[test]
fn help_and_version_end_well() {
    let (code, help, _) = ended(&["--help"]);
    assert_eq!(code, 0);
    assert!(help.contains("--default_kv_lease_ttl") && help.contains("(default: 10000)"), "{help}");
    let (code, version, _) = ended(&["--version"]);
    assert_eq!((code, version.trim()), (0, concat!("mooncake_master ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn an_unknown_flag_ends_with_one_and_names_the_nearest() {
    let (code, _, error) = ended(&["--rpc_prt=1"]);
    assert_eq!(code, 1);
    assert!(error.starts_with("ERROR: unknown command line flag 'rpc_prt'"), "{error}");
    assert!(error.contains("rpc_port"), "{error}");
}

#[test]
fn what_the_established_program_dies_of_ends_with_one_and_a_sentence() {
    for argument in ["--eviction_ratio=2", "--memory_allocator=x", "--enable_ha", "--port=99999"] {
        let (code, _, error) = ended(&[argument]);
        assert_eq!(code, 1, "{argument}");
        assert!(error.starts_with("ERROR: ") && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn an_occupied_port_ends_with_one_and_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let rpc = format!("--rpc_port={port}");
    let (code, _, error) = ended(&["--rpc_address=127.0.0.1", &rpc]);
    assert_eq!(code, 1);
    assert!(error.contains(&port) && error.contains("in use"), "{error}");
    let admin = format!("--metrics_port={port}");
    let (code, _, error) = ended(&[FREE[0], FREE[1], FREE[3], &admin]);
    assert_eq!(code, 1);
    assert!(error.contains(&port) && error.contains("metrics_port"), "{error}");
}

#[test]
fn the_ready_line_names_every_address_and_both_signals_end_well() {
    for signal in ["-TERM", "-INT"] {
        let metadata = [
            "--enable_http_metadata_server",
            "--http_metadata_server_port=0",
            "-http_metadata_server_host=127.0.0.1",
        ];
        let mut started = Started::new(&[&FREE[..], &metadata[..]].concat());
        assert!(started.ready.starts_with("mooncake_master ready rpc="), "{}", started.ready);
        for name in ["rpc", "admin", "metadata"] {
            TcpStream::connect(started.address(name)).unwrap();
        }
        assert_eq!(started.end(signal), Some(0), "{signal}");
    }
}

#[test]
fn a_feature_that_is_not_here_yet_is_accepted_with_one_warning() {
    let mut child = program(&[&FREE[..], &["--enable_offload"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let mut started = Started { child, ready };
    assert_eq!(started.end("-TERM"), Some(0));
    let stderr = started.child.stderr.take().unwrap();
    let lines: Vec<String> = BufReader::new(stderr).lines().map(Result::unwrap).collect();
    let said = lines.iter().filter(|line| line.contains("enable_offload=true")).count();
    assert_eq!((said, lines.len()), (1, 1), "{lines:?}");
}
