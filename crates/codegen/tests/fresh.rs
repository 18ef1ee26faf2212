//! The wire code and the reference pages in the tree are those that the program would write.

use std::process::Command;

#[test]
fn generated_files_are_up_to_date() {
    let output = Command::new(env!("CARGO_BIN_EXE_mooncake-codegen")).arg("--check").output();
    let output = output.expect("the program was built with this test");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "run `make generate`: {said}");
}
