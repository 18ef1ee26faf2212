//! The benchmark as two processes on one host, over two transports, and its error messages.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Output, Stdio},
};

const BENCH: &str = env!("CARGO_BIN_EXE_transfer_engine_bench");
const DUMP: &str = env!("CARGO_BIN_EXE_transfer_engine_topology_dump");

/// A running target, killed on drop.
struct Target {
    process: Child,
    segment: String,
}

impl Target {
    fn start() -> Self {
        let mut process =
            bench(&["--mode=target", "--buffer_size=8mb"]).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        let wanted = "Transfer Engine RPC using P2P handshake, listening on ";
        let segment = line.trim().strip_prefix(wanted).unwrap_or_else(|| panic!("{line}"));
        let segment = segment.to_owned();
        // Kept open, so that the target can continue to write.
        process.stderr = Some(stderr.into_inner());
        Self { process, segment }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(BENCH);
    command.args(["--local_server_name=127.0.0.1", "--protocol=tcp"]).args(arguments);
    command
}

fn initiator(target: &Target, more: &[&str]) -> Command {
    let segment = format!("--segment_id={}", target.segment);
    let mut command = bench(&["--buffer_size=8mb", "--duration=1", "--batch_size=4", &segment]);
    command.args(["--threads=2", "--block_size=64kb"]).args(more);
    command
}

fn last_line(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn moves_bytes_and_reports_like_upstream() {
    let target = Target::start();
    for (operation, is_tcp_forced) in [("read", false), ("write", true)] {
        let folder = tempfile::tempdir().unwrap();
        let report = folder.path().join("report.html");
        let operation_flag = format!("--operation={operation}");
        let mut command = initiator(&target, &["--json", &operation_flag]);
        command.arg(format!("--report={}", report.display()));
        if is_tcp_forced {
            command.env("MC_FORCE_TCP", "1");
        }
        let output = command.output().unwrap();
        let line = last_line(&output);
        assert!(line.starts_with("Test completed: duration 1."), "{line}");
        assert!(line.contains(", batch count ") && line.ends_with(" GB/s"), "{line}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["operation"], operation);
        if is_tcp_forced {
            assert_eq!(json["transport"], "tcp");
        }
        let batches = json["batch_count"].as_u64().unwrap();
        assert_eq!(json["bytes"].as_u64().unwrap(), batches * 4 * 65536);
        assert!(json["latency_us"]["p50"].as_f64().unwrap() > 0.0);
        let page = std::fs::read_to_string(&report).unwrap();
        assert!(page.contains(&format!("{operation} over ")) && page.matches("<svg").count() == 2);
        assert!(!page.contains("<script") && !page.contains("NaN") && !page.contains("inf"));
    }
}

#[test]
fn target_exits_cleanly_on_sigterm() {
    let mut target = Target::start();
    let process = target.process.id().to_string();
    assert!(Command::new("kill").arg(&process).status().unwrap().success());
    assert!(target.process.wait().unwrap().success());
    let mut rest = String::new();
    target.process.stderr.take().unwrap().read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
}

#[test]
fn missing_target_is_reported_like_upstream() {
    let output = bench(&["--segment_id=127.0.0.1:1", "--buffer_size=8mb"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("Unable to get target segment ID, please recheck"), "{text}");
    assert!(text.contains("127.0.0.1:1"), "{text}");
}

#[test]
fn rejects_invalid_arguments_with_a_reason() {
    let target = Target::start();
    for (arguments, word) in [
        (&["--operation=copy"][..], "read, write"),
        (&["--backend=tent"], "classic"),
        (&["--report_unit=PB"], "KiB"),
        (&["--threads=0"], "threads"),
        (&["--block_sizes=1"], "block_size"),
        (&["word"], "word"),
        (&["--block_size=9mb", "--batch_size=1"], "does not fit"),
        (&["--block_size=16mb", "--buffer_size=64mb", "--batch_size=1"], "target's memory"),
        (&["--report=/nowhere/at/all.html"], "report"),
    ] {
        let output = initiator(&target, arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?} {text}");
        assert!(text.contains(word), "{arguments:?} {text}");
    }
    let output = bench(&[]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("--segment_id"));
    let output = bench(&["--help"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("--report_unit"));
}

#[test]
fn prints_the_topology() {
    let output = Command::new(DUMP).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("Local topology [te/discover]: {"), "{text}");
}
