//! A peer in a process of its own: this very test program, started again for one test.

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

/// How many bytes of each kind a peer lends.
pub(crate) const LENT_BYTES: usize = 4 << 20;

impl ChildPeer {
    pub(crate) fn start() -> Self {
        Self::start_from(&mut program()).unwrap()
    }

    pub(crate) fn start_from(program: &mut Command) -> std::io::Result<Self> {
        program.spawn().map(Self::meet)
    }

    /// How many threads it has.
    pub(crate) fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }

    fn meet(mut child: Child) -> Self {
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let told = await_line(&mut output, "lends ");
        let words: Vec<&str> = told.split(' ').collect();
        let (shared, user) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        Self { child, output, segment: words[0].to_owned(), shared, user }
    }

    /// Has the peer read a byte of an engine here.
    pub(crate) fn touch(&mut self, engine: &Engine, address: u64) {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{} {address}", engine.segment_name()).unwrap();
        await_line(&mut self.output, "touched");
    }

    /// Has the peer write to memory of an engine here, again and again, until it is refused.
    pub(crate) fn begin_flood(&mut self, engine: &Engine, address: u64, length: usize) {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{} {address} {length}", engine.segment_name()).unwrap();
    }

    /// Waits until it was refused; how often it was not.
    pub(crate) fn await_refusal(&mut self) -> usize {
        await_line(&mut self.output, "refused after ").parse().unwrap()
    }

    /// Has it do nothing more, as if the machine were stuck. Returns once it has stopped, which is
    /// some time after the signal.
    pub(crate) fn stop(&self) {
        let process = self.child.id() as libc::pid_t;
        // SAFETY: a signal to a process that this test started and has not yet waited for.
        assert_eq!(unsafe { libc::kill(process, libc::SIGSTOP) }, 0);
        let mut status = 0;
        // SAFETY: the pointer is to a live local; a stopped child is reported, not reaped.
        assert_eq!(unsafe { libc::waitpid(process, &raw mut status, libc::WUNTRACED) }, process);
        assert!(libc::WIFSTOPPED(status), "{status}");
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ChildPeer {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This test program, told to be a peer.
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
#[ignore = "not a test: other tests start it in a process of its own"]
fn serve_until_the_input_ends() {
    serve();
}

/// Lends memory, and carries out the orders on standard input until it ends.
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

/// Writes until it is refused, each time another byte; how often it was not.
fn flood(engine: &Engine, peer: &Peer, address: u64, length: usize) -> usize {
    let mut bytes = vec![0; length];
    for count in 0.. {
        bytes.fill((count % 255) as u8 + 1);
        if move_one(engine, peer, Opcode::Write, (held(&mut bytes), address)).is_err() {
            return count;
        }
    }
    unreachable!("it is refused in the end");
}

/// What follows these words, where the test program itself says things too.
fn await_line(output: &mut Lines<BufReader<ChildStdout>>, words: &str) -> String {
    let line = output.find_map(|line| Some(line.unwrap().split_once(words)?.1.to_owned()));
    line.expect("the child says so before it ends")
}
