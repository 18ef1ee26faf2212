//! A peer in a process of its own: this very test program, started again for one test.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
};

use crate::pair::{Lent, runtime, start};

/// A running peer, killed on drop.
pub(crate) struct ChildPeer {
    child: Child,
    pub(crate) segment: String,
    pub(crate) shared: u64,
    pub(crate) user: u64,
}

/// How many bytes of each kind a peer lends.
pub(crate) const LENT_BYTES: usize = 4 << 20;

impl ChildPeer {
    pub(crate) fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child::serve_until_the_input_ends", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let told = lines.find_map(|line| {
            let line = line.unwrap();
            let (_, told) = line.split_once("lends ")?;
            Some(told.to_owned())
        });
        let told = told.expect("the child says what it lends");
        let words: Vec<&str> = told.split(' ').collect();
        let (shared, user) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        // Its output has no reader from here on, and it writes no more.
        Self { child, segment: words[0].to_owned(), shared, user }
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

#[test]
#[ignore = "not a test: other tests start it in a process of its own"]
fn serve_until_the_input_ends() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let (shared, user) = (Lent::shared(&engine, LENT_BYTES), Lent::user(&engine, LENT_BYTES));
    println!("lends {} {} {}", engine.segment_name(), shared.base(), user.base());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}
