//! Real etcd and Redis servers for tests, each in a process of its own.
#![allow(clippy::unwrap_used, reason = "only tests use it, and they fail by panics")]

use std::{
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// A server process that is killed on drop.
#[derive(Debug)]
pub struct RealServer {
    process: Child,
    /// The port of clients.
    pub port: u16,
    _folder: TempDir,
}

/// Returns the arguments of a server for a data folder and two ports.
pub type Recipe = fn(&str, u16, u16) -> Vec<String>;

/// Arguments of etcd.
pub fn etcd(folder: &str, port: u16, peer_port: u16) -> Vec<String> {
    let (own, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
    [
        ("--data-dir", folder),
        ("--listen-client-urls", &own),
        ("--advertise-client-urls", &own),
        ("--listen-peer-urls", &peer),
        ("--initial-advertise-peer-urls", &peer),
        ("--initial-cluster", &format!("default={peer}")),
        ("--log-level", "error"),
    ]
    .iter()
    .flat_map(|(flag, value)| [(*flag).to_owned(), (*value).to_owned()])
    .collect()
}

/// Arguments of Redis.
pub fn redis(folder: &str, port: u16, _: u16) -> Vec<String> {
    let port = port.to_string();
    [("--port", &port[..]), ("--bind", "127.0.0.1"), ("--dir", folder), ("--save", "")]
        .iter()
        .flat_map(|(flag, value)| [(*flag).to_owned(), (*value).to_owned()])
        .collect()
}

/// Returns why a server cannot be started.
pub fn missing(program: &str, package: &str) -> Option<String> {
    let run = Command::new(program).arg("--version").stdout(Stdio::null()).status();
    run.is_err().then(|| format!("needs {program}: apt-get install {package}"))
}

impl RealServer {
    /// Starts a server and waits until it listens.
    pub fn start(program: &str, recipe: Recipe, more: &[&str]) -> Self {
        // Another process may take a port before the server binds it.
        let started = (0..5).find_map(|_| Self::try_start(program, recipe, more));
        started.unwrap_or_else(|| panic!("{program} ended at each of five starts"))
    }

    fn try_start(program: &str, recipe: Recipe, more: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [port, peer_port] = listeners.map(|listener| listener.local_addr().unwrap().port());
        let process = Command::new(program)
            .args(recipe(folder.path().to_str().unwrap(), port, peer_port))
            .args(more)
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { process, port, _folder: folder };
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(60) {
            if server.process.try_wait().unwrap().is_some() {
                return None;
            }
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(server);
            }
            thread::yield_now();
        }
        panic!("{program} did not listen within a minute");
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Stops the server by a signal: it still accepts connections but does not answer.
    pub fn freeze(&self) {
        let process = self.process.id().to_string();
        assert!(Command::new("kill").args(["-STOP", &process]).status().unwrap().success());
        // All of its threads, which stop some time after the signal was sent.
        let stopped = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        };
        let tasks = format!("/proc/{process}/task");
        let begin = Instant::now();
        while !std::fs::read_dir(&tasks).unwrap().all(|task| stopped(task.unwrap())) {
            assert!(begin.elapsed() < Duration::from_secs(20), "it does not stop");
            thread::yield_now();
        }
    }
}

impl Drop for RealServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
