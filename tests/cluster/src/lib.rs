//! Real processes on loopback: a master, and nodes that take commands on stdin.

pub mod listeners;
pub mod load;
pub mod overload;
pub mod pattern;
pub mod power_loss;
pub mod tally;

use std::{
    env::current_exe,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Once, mpsc},
    time::Duration,
};

use self::tally::Tally;

/// The longest start-up of a process.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest wait for a reply of a node: far above the longest call, so that a slow call is measured
/// and not cut off.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Variables that cargo sets for a test, and that build scripts of dependencies look at.
const SET_FOR_A_TEST: [&str; 9] = [
    "CARGO_MANIFEST_DIR",
    "CARGO_MANIFEST_LINKS",
    "CARGO_MANIFEST_PATH",
    "CARGO_PKG_NAME",
    "CARGO_PKG_VERSION",
    "CARGO_PKG_VERSION_MAJOR",
    "CARGO_PKG_VERSION_MINOR",
    "CARGO_PKG_VERSION_PATCH",
    "CARGO_PKG_VERSION_PRE",
];

/// The most unread output lines of a process.
const LINES_MAX: usize = 64;

/// A child process, killed on drop.
#[derive(Debug)]
struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
}

/// A running `mooncake_master`.
#[derive(Debug)]
pub struct MasterProcess {
    process: Process,
    /// The RPC address.
    pub address: String,
}

/// A running node: one client with its engine, in a process of its own.
#[derive(Debug)]
pub struct NodeProcess {
    process: Process,
    stdin: ChildStdin,
}

impl MasterProcess {
    /// Starts a master at an address (port 0: any free port). It keeps no log, unless `flags` name a
    /// `--state_dir`.
    ///
    /// # Panics
    /// If the master does not start.
    pub fn start(address: &str, flags: &[&str]) -> Self {
        let (host, port) = address.rsplit_once(':').expect("an address has a port");
        let mut command = Command::new(master_binary());
        command
            .arg(format!("--rpc_address={host}"))
            .arg(format!("--rpc_port={port}"))
            .args(["--enable_metric_reporting=false", "--metrics_port=0", "--state_dir=none"])
            .args(flags);
        let (process, _) = Process::start(command);
        let ready = process.line(START_TIMEOUT).expect("the master prints its ready line");
        let address = ready
            .split_whitespace()
            .find_map(|word| word.strip_prefix("rpc="))
            .unwrap_or_else(|| panic!("no address in {ready:?}"))
            .to_owned();
        Self { process, address }
    }

    /// Kills it at once, and is sure that it is gone.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Suspends the process (SIGSTOP) until [`resume`](Self::resume).
    pub fn suspend(&self) {
        self.process.signal("-STOP");
    }

    /// Resumes the process (SIGCONT).
    pub fn resume(&self) {
        self.process.signal("-CONT");
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.process.child.id()
    }
}

impl NodeProcess {
    /// Starts a node, which by default mounts a segment of 64 MiB. For `flags` see `bin/node.rs`.
    ///
    /// # Panics
    /// If the node does not join the master.
    pub fn start(master: &str, flags: &[&str]) -> Self {
        let mut command = Command::new(target_path("cluster_node"));
        command.arg(master).args(flags);
        let (process, stdin) = Process::start(command);
        let ready = process.line(START_TIMEOUT).expect("the node prints its ready line");
        assert_eq!(ready, "ready");
        Self { process, stdin }
    }

    /// Sends a command and returns the reply line.
    ///
    /// # Panics
    /// If there is no reply in time.
    pub fn request(&mut self, command: &str) -> String {
        self.send(command);
        self.reply(command)
    }

    /// Sends a command and checks the reply line.
    ///
    /// # Panics
    /// If the reply is another one, or late.
    pub fn expect_reply(&mut self, command: &str, expected: &str) {
        assert_eq!(self.request(command), expected, "{command}");
    }

    /// Returns the counts of the load loops so far.
    ///
    /// # Panics
    /// If there is no reply in time.
    pub fn tally(&mut self) -> Tally {
        self.request("tally").parse().expect("the node answers with a tally")
    }

    /// Ends the load loops and returns their counts.
    ///
    /// # Panics
    /// If the loops do not end in time.
    pub fn stop_loops(&mut self) -> Tally {
        self.request("stop").parse().expect("the node answers with a tally")
    }

    /// Sends a command without waiting for the reply.
    pub fn send(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").expect("the node is running");
    }

    /// Waits for the next reply line, or returns `None` after `limit`.
    pub fn reply_within(&self, limit: Duration) -> Option<String> {
        self.process.line(limit)
    }

    /// Waits for the next reply line: that of `command`.
    ///
    /// # Panics
    /// If there is none in time.
    pub fn reply(&self, command: &str) -> String {
        let line = self.reply_within(REPLY_TIMEOUT);
        line.unwrap_or_else(|| panic!("no reply to {command:?} within {REPLY_TIMEOUT:?}"))
    }

    /// Kills it at once, and is sure that it is gone.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Suspends the process (SIGSTOP), as an overloaded machine does, until [`resume`](Self::resume).
    pub fn suspend(&self) {
        self.process.signal("-STOP");
    }

    /// Resumes the process (SIGCONT).
    pub fn resume(&self) {
        self.process.signal("-CONT");
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.process.child.id()
    }

    /// Asks the node to quit. Returns true if it exits with code 0.
    pub fn exits(mut self) -> bool {
        self.send("quit");
        let child = &mut self.process.child;
        mooncake_testkit::until(REPLY_TIMEOUT, "the node exits", || child.try_wait().ok().flatten())
            .success()
    }
}

impl Process {
    fn start(mut command: Command) -> (Self, ChildStdin) {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        let stdin = child.stdin.take().expect("stdin is piped");
        let stdout = child.stdout.take().expect("stdout is piped");
        let (sender, lines) = mpsc::sync_channel(LINES_MAX);
        // The thread ends at end of file, when the process exits.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        (Self { child, lines }, stdin)
    }

    fn line(&self, limit: Duration) -> Option<String> {
        self.lines.recv_timeout(limit).ok()
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "{name}");
    }

    fn kill(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the path of the master's binary, built if missing or stale.
fn master_binary() -> PathBuf {
    build_programs();
    target_path("mooncake_master")
}

/// Builds the example of the README and returns its path.
pub fn hello_example() -> PathBuf {
    build_programs();
    target_path("examples").join("hello")
}

/// Builds the programs that the tests start, with the profile and the target folder of the tests.
///
/// The selection of packages and features is that of `make test`, and the variables that cargo sets for
/// a test are removed: with others cargo would build dependencies once more, and the doc tests after it
/// a third time.
fn build_programs() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let profile = target_path("");
        let target = profile.parent().expect("the profile's folder is in the target folder");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet"]).args(selection_of_tests());
        build.args(["--bin", "mooncake_master", "--example", "hello", "--target-dir"]).arg(target);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        for name in SET_FOR_A_TEST {
            build.env_remove(name);
        }
        let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
        assert!(status.is_ok_and(|status| status.success()), "the programs do not build");
    });
}

/// Returns the arguments by which `make test` selects packages and features.
fn selection_of_tests() -> Vec<String> {
    let makefile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Makefile");
    let text = fs::read_to_string(makefile).expect("the Makefile is readable");
    text.lines()
        .find_map(|line| line.strip_prefix("RUST_TESTED :="))
        .expect("the Makefile says which packages are tested")
        .split_whitespace()
        .map(str::to_owned)
        .collect()
}

/// Returns the path of a program of this workspace, one folder above the tests in `deps`.
fn target_path(name: &str) -> PathBuf {
    let test = current_exe().expect("a test has a path");
    let deps = test.parent().expect("the test is in a folder");
    let folder =
        if deps.ends_with("deps") { deps.parent().expect("deps has a parent") } else { deps };
    folder.join(name)
}
