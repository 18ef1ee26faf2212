//! The behaviour suite that every transport passes, and tests that need a whole engine or a peer in
//! another process. Tests that need a resource that not every machine has are in
//! `tests/environment`.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

mod child;
mod close;
mod engine;
mod files;
mod metrics;
mod pair;
mod process;
#[cfg(feature = "rdma")]
mod rdma_devices;
mod submit;
mod suite;
mod token;
mod withdrawals;

/// Makes one test per transport and claim of the suite.
///
/// The claims are listed once. A function of `suite` that is missing in the list is dead code, which
/// `make check` refuses. A macro, because the test harness finds tests by their names in the source.
macro_rules! behaviour_suite {
    ($($transport:ident: $pair:expr;)*) => {
        $(mod $transport {
            behaviour_suite! { @claims $pair =>
                arrives_whole_at_every_size_and_alignment,
                arrives_whole_in_a_batch_of_20000,
                arrives_whole_in_batches_of_every_count,
                overlapping_entries_leave_bytes_of_either,
                refuses_a_partly_registered_range,
                refuses_a_range_outside_registered_memory,
                refuses_a_segment_of_an_engine_that_has_left,
                refuses_bad_local_memory,
                refuses_transfers_after_unregistering,
                unregistering_ends_transfers_in_flight,
                many_threads_share_an_engine,
                sixty_four_threads_share_few_connections,
                refuses_a_passed_deadline,
                failed_entries_leave_the_others_alone,
                closed_peer_is_an_error_before_the_deadline,
                closed_engine_ends_transfers_in_flight,
                closed_engine_uses_no_memory_of_batches,
            }
        })*
    };
    (@claims $pair:expr => $($claim:ident),* $(,)?) => {
        $(#[test]
        fn $claim() {
            crate::suite::$claim(&$pair);
        })*
    };
}

behaviour_suite! {
    memory: crate::pair::Pair::over_memory();
    shm: crate::pair::Pair::over_shm();
    tcp: crate::pair::Pair::over_tcp();
}

#[cfg(feature = "rdma")]
behaviour_suite! {
    rdma: crate::pair::Pair::over_rdma();
}
