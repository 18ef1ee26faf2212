//! Tests that need a resource that not every machine has, or much time. Where the resource is
//! missing, a test is reported as ignored, with the reason before its name.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

#[path = "../behaviour/child.rs"]
#[allow(dead_code, reason = "shared with the behaviour suite, which uses all of it")]
mod child;
mod gibibyte;
mod huge_pages;
mod ipv6;
mod other_user;
#[path = "../behaviour/pair.rs"]
#[allow(dead_code, reason = "shared with the behaviour suite, which uses all of it")]
mod pair;
mod shortened_file;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use mooncake_base::requirement::{long_tests, trial};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let serve = || {
        child::serve();
        Ok(())
    };
    let mut trials = vec![Trial::test(child::CHILD, serve).with_ignored_flag(true)];
    // A process started as the peer does not check the requirements of the tests.
    if arguments.filter.as_deref() != Some(child::CHILD) {
        trials.extend([
            trial(
                huge_pages::missing(),
                "huge_pages_are_lent_over_every_transport_and_given_back",
                huge_pages::are_lent_over_every_transport_and_given_back,
            ),
            trial(
                ipv6::missing(),
                "listens_on_ipv6_with_any_backlog",
                ipv6::listens_with_any_backlog,
            ),
            trial(
                other_user::missing(),
                "reaches_a_peer_of_another_user_over_tcp",
                other_user::reaches_a_peer_of_another_user_over_tcp,
            ),
            trial(
                shortened_file::missing(),
                "shortened_file_of_a_caller_crashes_nothing",
                shortened_file::fails_copies_and_crashes_nothing,
            ),
            trial(long_tests(), "gibibyte_arrives_over_memory", gibibyte::arrives_over_memory),
            trial(long_tests(), "gibibyte_arrives_over_shm", gibibyte::arrives_over_shm),
            trial(long_tests(), "gibibyte_arrives_over_tcp", gibibyte::arrives_over_tcp),
        ]);
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
