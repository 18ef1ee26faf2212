//! The program in `examples/` does what it says: it moves bytes between two processes.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test that may skip itself")]

use std::process::Command;

#[test]
fn the_example_moves_bytes_between_two_processes() {
    let here = std::env::current_exe().unwrap();
    // `target/PROFILE/deps/example-…`, beside which cargo puts the examples.
    let program = here.parent().unwrap().with_file_name("examples").join("two_processes");
    if !program.exists() {
        eprintln!("skipped: the example is built by `cargo test` without a choice of targets only");
        return;
    }
    let done = Command::new(program).output().unwrap();
    let (text, told) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{told}");
    let ways = ["shm", "tcp"];
    let is_said = |line: &str| ways.iter().any(|way| text.contains(&format!("{line} over {way}")));
    assert!(is_said("read \"hello from the lender\""), "{text}");
    assert!(is_said("wrote 4096 bytes"), "{text}");
}
