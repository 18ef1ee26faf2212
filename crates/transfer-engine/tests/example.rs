//! The program in `examples/` works as documented: it moves bytes between two processes.
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
    let (text, errors) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{errors}");
    let transports = ["shm", "tcp"];
    let is_printed = |line: &str| {
        transports.iter().any(|transport| text.contains(&format!("{line} over {transport}")))
    };
    assert!(is_printed("read \"hello from the target\""), "{text}");
    assert!(is_printed("wrote 4096 bytes"), "{text}");
}
