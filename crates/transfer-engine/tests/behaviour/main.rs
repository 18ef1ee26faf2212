//! What every way to move bytes must do, said once and run over each of them; and what only the
//! engine, or only a peer in another process, can show.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

mod child;
mod engine;
mod huge;
mod metrics;
mod pair;
mod process;
mod submit;
mod suite;
mod token;

/// One test a claim and way.
///
/// A macro because the name of a test must be written where the harness finds it.
macro_rules! behaviour {
    ($($way:ident: $pair:expr, [$($claim:ident),* $(,)?];)*) => {
        $(mod $way {
            $(#[test]
            fn $claim() {
                crate::suite::$claim(&$pair);
            })*
        })*
    };
}

behaviour! {
    memory: crate::pair::Pair::over_memory(), [
        every_size_and_alignment_arrives_whole,
        a_batch_of_many_pieces_arrives_whole,
        batches_of_every_count_arrive_whole,
        pieces_that_overlap_leave_bytes_of_one_of_them,
        a_range_that_is_registered_only_in_part_is_refused,
        unregistering_ends_transfers_that_are_under_way,
        sixty_four_threads_share_few_connections,
        a_gibibyte_arrives_whole,
        a_range_outside_of_registered_memory_is_refused,
        bad_local_memory_is_an_error,
        after_unregistering_transfers_fail,
        many_threads_share_an_engine,
        a_passed_deadline_is_an_error,
        pieces_that_fail_leave_the_others_alone,
        a_closed_peer_is_an_error_within_the_deadline,
    ];
    shm: crate::pair::Pair::over_shm(), [
        every_size_and_alignment_arrives_whole,
        a_batch_of_many_pieces_arrives_whole,
        batches_of_every_count_arrive_whole,
        pieces_that_overlap_leave_bytes_of_one_of_them,
        a_range_that_is_registered_only_in_part_is_refused,
        unregistering_ends_transfers_that_are_under_way,
        sixty_four_threads_share_few_connections,
        a_gibibyte_arrives_whole,
        a_range_outside_of_registered_memory_is_refused,
        bad_local_memory_is_an_error,
        after_unregistering_transfers_fail,
        many_threads_share_an_engine,
        a_passed_deadline_is_an_error,
        pieces_that_fail_leave_the_others_alone,
        a_closed_peer_is_an_error_within_the_deadline,
    ];
    tcp: crate::pair::Pair::over_tcp(), [
        every_size_and_alignment_arrives_whole,
        a_batch_of_many_pieces_arrives_whole,
        batches_of_every_count_arrive_whole,
        pieces_that_overlap_leave_bytes_of_one_of_them,
        a_range_that_is_registered_only_in_part_is_refused,
        unregistering_ends_transfers_that_are_under_way,
        sixty_four_threads_share_few_connections,
        a_gibibyte_arrives_whole,
        a_range_outside_of_registered_memory_is_refused,
        bad_local_memory_is_an_error,
        after_unregistering_transfers_fail,
        many_threads_share_an_engine,
        a_passed_deadline_is_an_error,
        pieces_that_fail_leave_the_others_alone,
        a_closed_peer_is_an_error_within_the_deadline,
    ];
}
