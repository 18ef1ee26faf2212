//! A peer in a separate process: this test program, started again to run a single function.

use std::{
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdout, Command, Stdio},
};

use mooncake_transfer_engine::{Engine, Opcode, Peer};

use crate::pair::{Lent, held, move_one, runtime, soon, start};

/// A running peer, killed on drop.
pub(crate) struct ChildPeer {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
    pub(crate) segment: String,
    pub(crate) shared: u64,
    pub(crate) user: u64,
}

/// The number of bytes of each kind of memory that a peer registers.
pub(crate) const LENT_BYTES: usize = 4 << 20;

impl ChildPeer {
    pub(crate) fn start() -> Self {
        Self::start_from(&mut program()).unwrap()
    }

    pub(crate) fn start_from(program: &mut Command) -> std::io::Result<Self> {
        program.spawn().map(Self::from_child)
    }

    /// Returns the number of its threads.
    pub(crate) fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }

    fn from_child(mut child: Child) -> Self {
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = await_line(&mut output, "lends ");
        let words: Vec<&str> = line.split(' ').collect();
        let (shared, user) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        Self { child, output, segment: words[0].to_owned(), shared, user }
    }

    /// Makes the peer read a byte of an engine of this process.
    pub(crate) fn touch(&mut self, engine: &Engine, address: u64) {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{} {address}", engine.segment_name()).unwrap();
        await_line(&mut self.output, "touched");
    }

    /// Makes the peer write repeatedly to memory of an engine of this process until it is refused.
    pub(crate) fn begin_flood(&mut self, engine: &Engine, address: u64, length: usize) {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{} {address} {length}", engine.segment_name()).unwrap();
    }

    /// Waits until a write was refused. Returns the number of writes that succeeded.
    pub(crate) fn await_refusal(&mut self) -> usize {
        await_line(&mut self.output, "refused after ").parse().unwrap()
    }

    /// Stops the peer with SIGSTOP. Returns once it has stopped, which is some time after the
    /// signal.
    pub(crate) fn stop(&self) {
        let process = self.child.id() as libc::pid_t;
        // SAFETY: sends a signal to a child that this test has not yet waited for.
        assert_eq!(unsafe { libc::kill(process, libc::SIGSTOP) }, 0);
        let mut status = 0;
        // SAFETY: the pointer refers to a live local; a stopped child is reported, not reaped.
        assert_eq!(unsafe { libc::waitpid(process, &raw mut status, libc::WUNTRACED) }, process);
        assert!(libc::WIFSTOPPED(status), "{status}");
    }

    /// Lets the stopped peer go on.
    pub(crate) fn resume(&self) {
        // SAFETY: sends a signal to a child that this test has not yet waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGCONT) }, 0);
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ChildPeer {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the command that runs this test program as a peer.
pub(crate) fn program() -> Command {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program
        .args([CHILD, "--exact", "--ignored", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    program
}

/// The name of the test that is the peer's main function.
pub(crate) const CHILD: &str = "child::serve_until_the_input_ends";

#[test]
#[ignore = "not a test: other tests start it in a separate process"]
fn serve_until_the_input_ends() {
    serve();
}

/// Registers memory and executes the commands on standard input until its end.
#[allow(clippy::print_stdout, reason = "the parent process reads the standard output")]
pub(crate) fn serve() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let (shared, user) = (Lent::shared(&engine, LENT_BYTES), Lent::user(&engine, LENT_BYTES));
    println!("lends {} {} {}", engine.segment_name(), shared.base(), user.base());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let peer = engine.open(words[0], soon()).unwrap();
        let address = words[1].parse().unwrap();
        if let Some(length) = words.get(2) {
            let count = flood(&engine, &peer, address, length.parse().unwrap());
            println!("refused after {count}");
        } else {
            move_one(&engine, &peer, Opcode::Read, (held(&mut [0]), address)).unwrap();
            println!("touched");
        }
    }
}

/// Writes until a write is refused, with another byte each time. Returns the number of writes that
/// succeeded.
fn flood(engine: &Engine, peer: &Peer, address: u64, length: usize) -> usize {
    let mut bytes = vec![0; length];
    for count in 0.. {
        bytes.fill((count % 255) as u8 + 1);
        if move_one(engine, peer, Opcode::Write, (held(&mut bytes), address)).is_err() {
            return count;
        }
    }
    unreachable!("a write is refused in the end");
}

/// Returns the rest of the first line that contains `words`. The test harness prints lines, too.
fn await_line(output: &mut Lines<BufReader<ChildStdout>>, words: &str) -> String {
    let line = output.find_map(|line| Some(line.unwrap().split_once(words)?.1.to_owned()));
    line.expect("the child prints the line before it ends")
}
