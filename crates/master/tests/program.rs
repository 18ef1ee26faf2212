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

use mooncake_proto::{
    native_frame::{self, client_greeting},
    v1,
};

const DEADLINE: Duration = Duration::from_secs(10);

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mooncake_master"));
    command.args(arguments).env_remove("MC_LOG_LEVEL").env_remove("MOONCAKE_LOG");
    // The tests must not write to the home directory of the user who runs them.
    command.env("MOONCAKE_STATE_DIR", "none");
    command
}

fn ended(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = program(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// A running program, killed on drop.
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

    /// Sends the signal and waits for the exit.
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
fn help_and_version_exit_zero() {
    let (code, help, _) = ended(&["--help"]);
    assert_eq!(code, 0);
    assert!(help.contains("--default_kv_lease_ttl=…  (default: 10000)"), "{help}");
    let (code, version, _) = ended(&["--version"]);
    assert_eq!((code, version.trim()), (0, concat!("mooncake_master ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn unknown_flag_exits_one_and_suggests_nearest() {
    let (code, _, error) = ended(&["--rpc_prt=1"]);
    assert_eq!(code, 1);
    assert!(error.starts_with("ERROR: unknown command line flag 'rpc_prt'"), "{error}");
    assert!(error.contains("rpc_port"), "{error}");
}

#[test]
fn fatal_settings_exit_one_with_message() {
    for argument in ["--eviction_ratio=2", "--memory_allocator=x", "--enable_ha", "--port=99999"] {
        let (code, _, error) = ended(&[argument]);
        assert_eq!(code, 1, "{argument}");
        assert!(error.starts_with("ERROR: ") && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn unusable_state_dir_is_named_with_its_option() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        let flag = format!("--state_dir={}", path.display());
        let (code, _, error) = ended(&[FREE[0], FREE[1], FREE[2], FREE[3], &flag]);
        assert_eq!(code, 1);
        let words = format!("by --state_dir state_dir={}", path.display());
        assert!(error.contains(&words), "{error}");
    }
}

#[test]
fn occupied_port_exits_one_and_is_named() {
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
fn foreign_address_error_names_option() {
    // An address reserved for documentation, which no host has.
    for (host, port) in [("rpc_address", "rpc_port"), ("metrics_host", "metrics_port")] {
        let (host_flag, port_flag) = (format!("--{host}=203.0.113.77"), format!("--{port}=0"));
        let (code, _, error) = ended(&[FREE[0], FREE[1], FREE[2], FREE[3], &host_flag, &port_flag]);
        assert_eq!(code, 1);
        assert!(error.contains("203.0.113.77") && error.contains(host), "{error}");
    }
}

#[test]
fn ready_line_names_addresses_and_signals_exit_zero() {
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
fn unsupported_feature_gives_one_warning() {
    let mut child = program(&[&FREE[..], &["--enable_cxl"]].concat())
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
    let warnings = lines.iter().filter(|line| line.contains("enable_cxl=true")).count();
    assert_eq!((warnings, lines.len()), (1, 1), "{lines:?}");
}

#[test]
fn ports_file_names_ports_and_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ports.json");
    let flag = format!("--ports-file={}", path.display());
    let mut started = Started::new(&[&FREE[..], &[flag.as_str()]].concat());
    // The warning may appear before or after the ready line.
    let end = Instant::now() + DEADLINE;
    let text = loop {
        if let Ok(text) = std::fs::read_to_string(&path) {
            break text;
        }
        assert!(Instant::now() < end, "no file of ports");
        std::thread::yield_now();
    };
    let ports: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(ports["rpc"], started.address("rpc").to_string());
    assert_eq!(ports["metrics_port"], started.address("admin").port());
    assert_eq!(ports["pid"], started.child.id());
    assert_eq!(started.end("-TERM"), Some(0));
    assert!(!path.exists());
}

#[test]
fn reads_flags_from_environment_on_request() {
    let mut command =
        program(&["--fromenv=rpc_port", "--tryfromenv=port,metrics_port", "--version"]);
    let output = command.env("FLAGS_rpc_port", "1").output().unwrap();
    assert!(output.status.success());
    let (code, _, error) = ended(&["--fromenv=rpc_port"]);
    assert_eq!(code, 1);
    assert!(error.contains("FLAGS_rpc_port"), "{error}");
    let output = program(&["--fromenv", "rpc_port"]).env("FLAGS_rpc_port", "x").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("rpc_port") && error.contains("not a number"), "{error}");
}

/// Runs the program under descriptor limits set by a shell.
fn started_under(limits: &str) -> (Started, BufReader<std::process::ChildStderr>) {
    let script = format!("{limits}; exec \"$0\" \"$@\"");
    let mut child = Command::new("sh")
        .args(["-c", &script, env!("CARGO_BIN_EXE_mooncake_master")])
        .args(FREE)
        .env_remove("MC_LOG_LEVEL")
        .env_remove("MOONCAKE_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    (Started { child, ready }, stderr)
}

#[test]
fn raises_descriptor_limit_at_start() {
    let (started, _) = started_under("ulimit -Sn 64");
    let limits = format!("/proc/{}/limits", started.child.id());
    let limits = std::fs::read_to_string(limits).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "{line}");
}

#[test]
fn low_descriptor_limit_is_logged_and_enforced() {
    let (mut started, mut stderr) = started_under("ulimit -n 300");
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("descriptors=300") && line.contains("connections=75"), "{line}");
    let rpc = started.address("rpc");
    let call = || {
        let caller = Some(v1::Caller { client: vec![1; 16].into(), tenant: String::new() });
        let register = v1::RegisterRequest { caller, name: "h:1".to_owned(), ..Default::default() };
        let (stream, answers) = answers_to(rpc, vec![v1::request::Call::Register(register)]);
        (stream, answers.len() == 1)
    };
    let mut open = Vec::new();
    let refused = (0..200).find(|_| {
        let (stream, is_answered) = call();
        open.push(stream);
        !is_answered
    });
    // An eighth of the connections is for peers that have not greeted yet.
    assert_eq!(refused, Some(75 - 75 / 8));
    // Open connections are still served, and a closed one makes space for another.
    drop(open.drain(..40));
    let end = Instant::now() + DEADLINE;
    while !call().1 {
        assert!(Instant::now() < end, "no place comes free");
    }
    assert_eq!(started.end("-TERM"), Some(0));
}

#[test]
fn refuses_shared_state_directory() {
    let folder = tempfile::tempdir().unwrap();
    let directory = format!("--state_dir={}", folder.path().display());
    let arguments = ["--rpc_port=0", "--rpc_address=127.0.0.1", "--metrics_port=0", &directory];
    let mut first = Started::new(&arguments);
    let (code, _, stderr) = ended(&arguments);
    assert_eq!(code, 1);
    assert!(stderr.contains("another master") && stderr.contains("--state_dir"), "{stderr}");
    assert_eq!(first.end("-TERM"), Some(0));
    let mut second = Started::new(&arguments);
    assert_eq!(second.end("-KILL"), None);
    let mut third = Started::new(&arguments);
    assert_eq!(third.end("-TERM"), Some(0));
}

#[test]
fn log_is_in_user_state_dir_for_fixed_port() {
    let home = tempfile::tempdir().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |port: u16| {
        let port = format!("--rpc_port={port}");
        let mut child = program(&["--rpc_address=127.0.0.1", "--metrics_port=0", &port])
            .env("MOONCAKE_STATE_DIR", "default")
            .env("XDG_STATE_HOME", home.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        let mut started = Started { child, ready };
        assert_eq!(started.end("-TERM"), Some(0));
    };
    start(0);
    assert!(!home.path().join("mooncake").exists());
    start(free);
    let directory = home.path().join(format!("mooncake/mooncake_cluster-{free}"));
    assert!(directory.join("log-0000000000000001").is_file());
}

/// A pipe that is full, and that nobody reads.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut filling = writer.try_clone().unwrap();
    // Ends when the reader is dropped.
    std::thread::spawn(
        move || while std::io::Write::write_all(&mut filling, &[b'x'; 4096]).is_ok() {},
    );
    (reader, writer)
}

#[test]
fn stderr_that_nobody_reads_stops_no_call() {
    let (reader, writer) = full_pipe();
    let mut command = program(&FREE);
    // Several lines for each request.
    command.env("MOONCAKE_LOG", "trace").stderr(writer).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let mut started = Started { child, ready };
    for _ in 0..200 {
        let mut stream = TcpStream::connect(started.address("admin")).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let request = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
        let mut reply = String::new();
        std::io::Read::read_to_string(&mut stream, &mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    }
    assert_eq!(started.end("-TERM"), Some(0));
    drop(reader);
}

/// Calls a master over a new connection. Returns the connection, and fewer answers than calls if the
/// master closed it.
fn answers_to(rpc: SocketAddr, calls: Vec<v1::request::Call>) -> (TcpStream, Vec<v1::Response>) {
    let mut stream = TcpStream::connect(rpc).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let expected = calls.len();
    let mut sent = bytes::BytesMut::from(&client_greeting()[..]);
    for call in calls {
        let request = v1::Request { call: Some(call), ..Default::default() };
        native_frame::encode(&request, &mut sent).unwrap();
    }
    // The master may have closed the connection.
    let _ = std::io::Write::write_all(&mut stream, &sent);
    // The greeting, and then the answers.
    let mut received = bytes::BytesMut::new();
    let mut answers = Vec::new();
    let mut has_greeting = false;
    while answers.len() < expected {
        let mut piece = [0; 4096];
        match std::io::Read::read(&mut stream, &mut piece) {
            Ok(0) | Err(_) => break,
            Ok(count) => received.extend_from_slice(&piece[..count]),
        }
        if !has_greeting {
            let greeting: Option<native_frame::ServerGreeting> =
                native_frame::decode(&mut received, 1 << 20).unwrap();
            has_greeting = greeting.is_some();
        }
        while has_greeting
            && let Some(answer) = native_frame::decode(&mut received, 1 << 20).unwrap()
        {
            answers.push(answer);
        }
    }
    (stream, answers)
}

/// Registers a client and mounts two segments with long names. Returns whether both were answered.
fn lends_memory(rpc: SocketAddr) -> bool {
    let caller = Some(v1::Caller { client: vec![1; 16].into(), tenant: String::new() });
    let segment = |number: u8| v1::Segment {
        id: vec![number; 16].into(),
        incarnation: 1,
        name: "n".repeat(1000),
        endpoint: "h:1".to_owned(),
        base: u64::from(number) << 32,
        length: 1 << 20,
        protocol: "tcp".to_owned(),
        kind: v1::SegmentKind::Memory.into(),
    };
    let name = "h:1".to_owned();
    let register = v1::RegisterRequest { caller: caller.clone(), name, ..Default::default() };
    let segments = vec![segment(1), segment(2)];
    let mount = v1::MountRequest { caller, segments, ..Default::default() };
    let calls = [v1::request::Call::Register(register), v1::request::Call::Mount(mount)];
    let (_, answers) = answers_to(rpc, calls.into());
    if answers.len() < 2 {
        return false;
    }
    let is_done = |answer: &v1::Response| match &answer.call {
        Some(v1::response::Call::Failure(_)) | None => false,
        Some(v1::response::Call::Mount(mounted)) => {
            mounted.results.iter().all(|result| result.failure.is_none())
        }
        Some(_) => true,
    };
    answers.iter().all(is_done)
}

/// Starts the program with files of at most one kibibyte.
fn started_with_small_disk(arguments: &[&str]) -> (Started, BufReader<std::process::ChildStderr>) {
    let mut command = Command::new("bash");
    let script = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
    command.args(["-c", script, env!("CARGO_BIN_EXE_mooncake_master")]).args(FREE).args(arguments);
    command.env_remove("MC_LOG_LEVEL").env_remove("MOONCAKE_LOG");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    (Started { child, ready }, stderr)
}

#[test]
fn full_disk_ends_master_that_syncs_before_each_answer() {
    let folder = tempfile::tempdir().unwrap();
    let directory = format!("--state_dir={}", folder.path().display());
    let (mut started, mut stderr) = started_with_small_disk(&[&directory, "--log_sync=always"]);
    assert!(!lends_memory(started.address("rpc")), "acknowledged, not in the log");
    let mut text = String::new();
    std::io::Read::read_to_string(&mut stderr, &mut text).unwrap();
    assert_eq!(started.child.wait().unwrap().code(), Some(1));
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("ERROR: the log failed, and --on_log_failure is stop"), "{text}");
    // What is there is a log that can be read.
    assert_eq!(Started::new(&[FREE[0], FREE[1], FREE[2], &directory]).end("-TERM"), Some(0));
}

#[test]
fn full_disk_leaves_master_that_continues_without_log() {
    let folder = tempfile::tempdir().unwrap();
    let directory = format!("--state_dir={}", folder.path().display());
    let (mut started, mut stderr) = started_with_small_disk(&[&directory]);
    assert!(lends_memory(started.address("rpc")));
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("ERROR") && line.contains("the log failed"), "{line}");
    assert_eq!(started.end("-KILL"), None);
    let kept = std::fs::read_dir(folder.path()).unwrap();
    let logs = kept.filter(|file| {
        let name = file.as_ref().unwrap().file_name();
        name.to_string_lossy() == "log-0000000000000001"
    });
    assert_eq!(logs.count(), 0, "it would be out of date");
}
