//! The program in `examples/` moves bytes between two processes, as it says.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::Command;

#[test]
fn example_moves_bytes_between_two_processes() {
    let here = std::env::current_exe().unwrap();
    // `target/PROFILE/deps/example-…`, beside which cargo puts the examples.
    let program = here.parent().unwrap().with_file_name("examples").join("two_processes");
    let remedy = "build it with `cargo build --examples -p mooncake-transfer-engine`";
    assert!(program.exists(), "{} is missing; {remedy}", program.display());
    let done = Command::new(program).output().unwrap();
    let (text, told) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{told}");
    let ways = ["shm", "tcp"];
    let is_said = |line: &str| ways.iter().any(|way| text.contains(&format!("{line} over {way}")));
    assert!(is_said("read \"hello from the lender\""), "{text}");
    assert!(is_said("wrote 4096 bytes"), "{text}");
}
