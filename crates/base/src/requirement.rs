//! Tests that need a resource that not every machine has, ignored where the resource is missing.
//!
//! The built-in test harness cannot ignore a test at run time, and a test that returns early counts
//! as passed. Such tests are trials of `libtest-mimic`, in a test target with `harness = false`.

use libtest_mimic::Trial;

use crate::env::{EnvVar, ValueKind};

static MOONCAKE_LONG_TESTS: EnvVar = EnvVar {
    name: "MOONCAKE_LONG_TESTS",
    aliases: &[],
    default: "",
    kind: ValueKind::Text,
    help: "Set to anything, tests also do what takes minutes or gibibytes.",
};

/// Returns whether the tests that take minutes or gibibytes are enabled.
pub fn is_long_run() -> bool {
    MOONCAKE_LONG_TESTS.read().is_some()
}

/// Returns the reason why tests that take minutes or gibibytes are disabled; `None` if they are
/// enabled.
pub fn long_tests() -> Option<String> {
    (!is_long_run()).then(|| "needs MOONCAKE_LONG_TESTS=1, since it takes long".to_owned())
}

/// Creates a test that is ignored if `missing` holds a reason; the reason is printed before the
/// name.
pub fn trial(
    missing: Option<String>,
    name: impl Into<String>,
    test: impl FnOnce() + Send + 'static,
) -> Trial {
    let is_missing = missing.is_some();
    let run = move || {
        test();
        Ok(())
    };
    Trial::test(name, run).with_kind(missing.unwrap_or_default()).with_ignored_flag(is_missing)
}

#[cfg(test)]
mod tests {
    use libtest_mimic::{Arguments, run};

    use super::*;

    #[test]
    fn missing_requirement_counts_as_ignored_not_passed() {
        let present = trial(None, "present", || {});
        let absent = trial(Some("needs a device".to_owned()), "absent", || panic!("it ran"));
        assert_eq!(absent.kind(), "needs a device");
        let arguments = Arguments { test_threads: Some(1), quiet: true, ..Arguments::default() };
        let conclusion = run(&arguments, vec![present, absent]);
        assert_eq!((conclusion.num_passed, conclusion.num_ignored), (1, 1));
        assert!(!conclusion.has_failed());
    }
}
