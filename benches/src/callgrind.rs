//! Counts instructions with valgrind's callgrind: the one measure of speed that is the same on a busy
//! machine.
//!
//! A program runs itself once more under callgrind, and passes the calls to be counted to
//! [`counted`]. Only the thread of these calls counts, and only code of the program itself: system
//! libraries choose their routines by the processor.

use std::{
    collections::HashMap,
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

/// Runs a call whose instructions count. Not inlined, so that callgrind finds it.
#[inline(never)]
pub fn counted(call: &mut dyn FnMut()) {
    call();
}

/// Returns why nothing can be counted here; `None` if callgrind runs.
pub fn missing() -> Option<String> {
    let mut valgrind = Command::new("valgrind");
    let found = valgrind.arg("--version").stdout(Stdio::null()).status();
    (!found.is_ok_and(|status| status.success())).then(|| "needs valgrind".to_owned())
}

/// What is counted.
#[derive(Debug, Clone, Copy)]
pub enum Scope {
    /// All [`counted`] calls.
    Calls,
    /// All [`counted`] calls without what they spend in functions with this in their names, but with
    /// the system libraries.
    CallsWithout(&'static str),
    /// The calls of functions whose name fits this pattern, on any thread.
    Functions(&'static str),
}

/// Runs this program with these arguments under callgrind. Returns the instructions of all that is in
/// the scope.
///
/// # Errors
/// If valgrind cannot be run, the program fails, or it counts nothing.
pub fn count(scope: Scope, arguments: &[&str]) -> Result<u64> {
    let pattern = match scope {
        Scope::Calls | Scope::CallsWithout(_) => "*callgrind::counted*",
        Scope::Functions(pattern) => pattern,
    };
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("counts");
    let program = std::env::current_exe()?;
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", &format!("--toggle-collect={pattern}")])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(&program)
        .args(arguments)
        .output()
        .context("cannot run valgrind")?;
    if !run.status.success() {
        bail!("the counted program failed: {}", String::from_utf8_lossy(&run.stderr));
    }
    let dump = fs::read_to_string(out)?;
    let instructions = match scope {
        Scope::CallsWithout(name) => instructions_without(&dump, name)?,
        Scope::Calls | Scope::Functions(_) => instructions_of(&dump, &program.to_string_lossy())?,
    };
    ensure!(instructions > 0, "nothing was counted");
    Ok(instructions)
}

/// Adds up the instructions of one object file in a dump of callgrind.
fn instructions_of(dump: &str, object: &str) -> Result<u64> {
    // A name follows its number the first time only: `ob=(3) /lib/libc.so.6`, then `ob=(3)`.
    let mut objects: HashMap<&str, bool> = HashMap::new();
    let (mut is_counted, mut is_call, mut total) = (false, false, 0);
    for line in dump.lines() {
        if let Some((key @ ("ob" | "cob"), value)) = line.split_once('=') {
            let (number, name) = value.split_once(' ').unwrap_or((value, ""));
            let is_object = *objects.entry(number).or_insert(name == object);
            if key == "ob" {
                is_counted = is_object;
            }
        } else if line.starts_with("calls=") {
            // The next line has the instructions of the callee.
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost = line.split(' ').nth(1).context("a line without costs")?;
            if !std::mem::take(&mut is_call) && is_counted {
                total += cost.parse::<u64>()?;
            }
        }
    }
    Ok(total)
}

/// Adds up the instructions of a dump of callgrind, without those of functions with this in their
/// names, and of what these call.
fn instructions_without(dump: &str, excluded: &str) -> Result<u64> {
    let mut functions: HashMap<&str, bool> = HashMap::new();
    let (mut is_callee_excluded, mut is_call) = (false, false);
    let (mut total, mut left_out) = (0, 0);
    for line in dump.lines() {
        if let Some((key @ ("fn" | "cfn"), value)) = line.split_once('=') {
            let (number, name) = value.split_once(' ').unwrap_or((value, ""));
            let is_excluded = *functions.entry(number).or_insert_with(|| name.contains(excluded));
            is_callee_excluded = key == "cfn" && is_excluded;
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost = line.split(' ').nth(1).context("a line without costs")?.parse::<u64>()?;
            if !std::mem::take(&mut is_call) {
                total += cost;
            } else if is_callee_excluded {
                left_out += cost;
            }
        }
    }
    total.checked_sub(left_out).context("a function calls itself")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_instructions_of_the_object_count() {
        let dump = "positions: line\nevents: Ir\n\nob=(1) /program\nfl=(1) a.rs\nfn=(1) a\n10 5\n\
                    cob=(2) /lib/libc.so.6\ncfn=(2) memcpy\ncalls=1 0\n11 100\n+1 2\n\nob=(2)\n\
                    fn=(2)\n0 100\n\nob=(1)\nfn=(3) b\n* 7\n\ntotals: 114\n";
        assert_eq!(instructions_of(dump, "/program").unwrap(), 14);
        assert_eq!(instructions_of(dump, "/lib/libc.so.6").unwrap(), 100);
        assert_eq!(instructions_without(dump, "memcpy").unwrap(), 14);
    }
}
