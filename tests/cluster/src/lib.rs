//! Real processes on loopback: a master and nodes that are told what to do over their stdin.

pub mod load;
pub mod pattern;
pub mod tally;

use std::{
    env::current_exe,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Once, mpsc},
    time::Duration,
};

/// How long a process may take to come up.
const START: Duration = Duration::from_secs(30);

/// Lines that a process may have printed and nobody has read.
const LINES_MAX: usize = 64;

/// A process that is killed when this is dropped.
#[derive(Debug)]
struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
}

/// A running `mooncake_master`.
#[derive(Debug)]
pub struct MasterProcess {
    process: Process,
    /// Where it answers.
    pub address: String,
}

/// A running node: one client with its engine, in a process of its own.
#[derive(Debug)]
pub struct NodeProcess {
    process: Process,
    stdin: ChildStdin,
}

impl MasterProcess {
    /// Starts one at that address (port 0: any), without a log, with more flags that may say
    /// otherwise.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start(address: &str, flags: &[&str]) -> Self {
        let (host, port) = address.rsplit_once(':').expect("an address has a port");
        let mut command = Command::new(master_binary());
        command
            .arg(format!("--rpc_address={host}"))
            .arg(format!("--rpc_port={port}"))
            .args(["--enable_metric_reporting=false", "--metrics_port=0", "--state_dir=none"])
            .args(flags);
        let (process, _) = Process::start(command);
        let ready = process.line(START).expect("the master says that it is ready");
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

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.child.id()
    }
}

impl NodeProcess {
    /// Starts one that lends 64 MiB. `flags` are `node`'s own.
    ///
    /// # Panics
    /// If it does not join the master.
    pub fn start(master: &str, flags: &[&str]) -> Self {
        let mut command = Command::new(beside_tests("cluster_node"));
        command.arg(master).args(flags);
        let (process, stdin) = Process::start(command);
        let ready = process.line(START).expect("the node says that it is ready");
        assert_eq!(ready, "ready");
        Self { process, stdin }
    }

    /// Has it do something and hands out its one line of answer; `None` if none came in time.
    pub fn ask(&mut self, order: &str, limit: Duration) -> Option<String> {
        self.tell(order);
        self.answer(limit)
    }

    /// Has it begin something.
    pub fn tell(&mut self, order: &str) {
        writeln!(self.stdin, "{order}").expect("the node lives");
    }

    /// The answer to what it was told.
    pub fn answer(&self, limit: Duration) -> Option<String> {
        self.process.line(limit)
    }

    /// Kills it at once, and is sure that it is gone.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Stops it where it is, as a machine that is too busy does, until [`thaw`](Self::thaw).
    pub fn freeze(&self) {
        self.process.signal("-STOP");
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.process.signal("-CONT");
    }

    /// Whether it ends by itself, with code 0, once its orders have ended.
    pub fn ends(mut self, limit: Duration) -> bool {
        self.tell("quit");
        let child = &mut self.process.child;
        mooncake_testkit::until(limit, "the node ends", || child.try_wait().ok().flatten())
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
        let stdin = child.stdin.take().expect("it was asked for");
        let stdout = child.stdout.take().expect("it was asked for");
        let (sender, lines) = mpsc::sync_channel(LINES_MAX);
        // Ends with the process: its stdout ends then.
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
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The master's program, built if it is not there or not up to date.
fn master_binary() -> PathBuf {
    static BUILT: Once = Once::new();
    let binary = beside_tests("mooncake_master");
    BUILT.call_once(|| build(&["--package", "mooncake-master"]));
    binary
}

/// The program of the README, built.
pub fn hello_example() -> PathBuf {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| build(&["--package", "mooncake-store-client", "--example", "hello"]));
    beside_tests("examples").join("hello")
}

/// Builds where the tests were built.
fn build(what: &[&str]) {
    let profile = beside_tests("");
    let target = profile.parent().expect("the profile's folder lies in the target folder");
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet"]).args(what).arg("--target-dir").arg(target);
    if profile.ends_with("release") {
        build.arg("--release");
    }
    let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
    assert!(status.is_ok_and(|status| status.success()), "{what:?} does not build");
}

/// A program of this workspace: tests lie in `deps`, one folder below.
fn beside_tests(name: &str) -> PathBuf {
    let test = current_exe().expect("a test knows where it lies");
    let deps = test.parent().expect("in a folder");
    let folder = if deps.ends_with("deps") { deps.parent().expect("below another") } else { deps };
    folder.join(name)
}
