//! Members that call different operations at one place, and what a rank gives up.

use std::{thread, time::Instant};

use mooncake_collective::{Dtype, HostRange, Operation, Reduction};

use super::{
    I64, LIMIT, add_up, context, contexts, contexts_of_two_hosts, done, groups, range, sum,
};

/// Returns an operation of each kind, and of others on the same memory that differ in one point.
fn calls(own: HostRange, whole: HostRange) -> Vec<Operation> {
    let parts = || (0..3).map(|_| own).collect::<Vec<_>>();
    let reduce =
        |dtype, how, root| Operation::Reduce { source: own, target: own, dtype, how, root };
    let gather =
        |elements, root| Operation::Gather { source: own, targets: parts(), elements, root };
    let scatter = |how| {
        let (sources, target) = (parts(), own);
        Operation::ReduceScatter { sources, target, dtype: Dtype::I64, how }
    };
    vec![
        reduce(Dtype::I64, Reduction::Sum, None),
        reduce(Dtype::I64, Reduction::Max, None),
        reduce(Dtype::F64, Reduction::Sum, None),
        reduce(Dtype::I64, Reduction::Sum, Some(0)),
        reduce(Dtype::I64, Reduction::Sum, Some(2)),
        Operation::Broadcast { range: own, elements: I64, root: 0 },
        Operation::Broadcast { range: own, elements: I64, root: 1 },
        Operation::Broadcast { range: whole, elements: I64, root: 1 },
        gather(I64, None),
        gather(I64 + 2, None),
        gather(I64, Some(0)),
        gather(I64, Some(1)),
        scatter(Reduction::Sum),
        scatter(Reduction::Min),
        Operation::Scatter { sources: parts(), target: own, elements: I64, root: 0 },
        Operation::AllToAll { sources: parts(), targets: parts(), elements: I64 },
        Operation::Barrier,
    ]
}

#[test]
fn different_calls_fail_at_each_rank_and_leave_the_group_usable() {
    let contexts = contexts(3);
    let groups = groups(&contexts, 3);
    let mut memory = [[0; 6]; 3];
    let lists: Vec<_> = memory
        .iter_mut()
        .map(|values| {
            let whole = range(values);
            // SAFETY: as for `range`.
            let own = unsafe { HostRange::new(values.as_ptr() as usize, whole.length() / 2) };
            calls(own, whole)
        })
        .collect();
    let count = lists[0].len();
    for (usual, other, odd) in (0..count).map(|i| (i, (i + 1) % count, i % 3)) {
        let begun = Instant::now();
        let completions: Vec<_> = groups
            .iter()
            .zip(&lists)
            .enumerate()
            .map(|(slot, (group, list))| {
                group.begin(list[if slot == odd { other } else { usual }].clone()).unwrap()
            })
            .collect();
        for (slot, completion) in completions.iter().enumerate() {
            let error = done(completion).error.map(|error| error.to_string()).unwrap_or_default();
            let names_both = error.contains(" call=") && error.contains(" other_call=");
            let names_odd = error.contains(&format!("rank={odd} "));
            assert!(names_both && names_odd, "{usual} {other} at {slot}: {error}");
        }
        assert!(begun.elapsed() < LIMIT / 4, "{usual} {other}");
        for (value, outcome) in add_up(&groups, &[0, 1, 2], 1) {
            assert!(value == 7 && outcome.error.is_none(), "{outcome:?}");
        }
    }
}

#[test]
fn output_without_a_place_for_a_member_is_an_error_at_each_rank() {
    let contexts = contexts(3);
    let groups = groups(&contexts, 4);
    let mut memory = [[1; 4]; 3];
    for (places, is_enough) in [(2, false), (3, true), (4, true), (1, false)] {
        let begun: Vec<_> = groups
            .iter()
            .zip(&mut memory)
            .map(|(group, values)| {
                let parts = values.chunks_mut(1).take(places).map(range);
                let targets: Vec<_> = parts.collect();
                let (source, elements) = (targets[0], I64);
                group.begin(Operation::Gather { source, targets, elements, root: None }).unwrap()
            })
            .collect();
        assert!(begun.iter().map(done).all(|outcome| outcome.error.is_none() == is_enough));
    }
}

#[test]
fn cancelled_receive_leaves_its_message_to_a_later_one() {
    let contexts = contexts(2);
    let groups = groups(&contexts, 2);
    let (mut sent, mut unused, mut got) = ([7], [1], [2]);
    let given_up = groups[0].receive(range(&mut unused), Some(1), 9).unwrap();
    assert!(groups[0].cancel_receive(&given_up));
    assert!(done(&given_up).error.is_some());
    assert!(!groups[0].cancel_receive(&given_up));
    let sending = groups[1].send(range(&mut sent), 0, 9).unwrap();
    done(&groups[0].receive(range(&mut got), Some(1), 9).unwrap());
    done(&sending);
    assert_eq!((unused, got), ([1], [7]));
}

/// Gives up a receive of a message whose bytes stay at the sender, at any point of their way.
#[test]
fn cancelled_receive_leaves_a_large_message_to_a_later_one() {
    for contexts in [contexts(2), contexts_of_two_hosts()] {
        let groups = groups(&contexts, 2);
        for round in 1..40 {
            let mut sent = vec![round; 2 << 20];
            let (mut unused, mut got) = (vec![0; 2 << 20], vec![0; 2 << 20]);
            let sending = groups[1].send(range(&mut sent), 0, 9).unwrap();
            let given_up = groups[0].receive(range(&mut unused), Some(1), 9).unwrap();
            (0..round * 4).for_each(|_| thread::yield_now());
            if groups[0].cancel_receive(&given_up) {
                assert!(done(&given_up).error.is_some());
                let received = groups[0].receive(range(&mut got), Some(1), 9).unwrap();
                assert_eq!(done(&received).source, Some(1));
                assert!(got.iter().all(|value| *value == round));
            } else {
                assert_eq!(done(&given_up).source, Some(1));
                assert!(unused.iter().all(|value| *value == round));
            }
            assert!(done(&sending).error.is_none());
        }
    }
}

/// A root that has left before the operation: the others must not take old bytes for its own.
#[test]
fn absent_root_is_a_failed_slot_of_each_operation() {
    let contexts = contexts(3);
    let mut groups = groups(&contexts, 3);
    groups.pop().unwrap().close();
    let root = 2;
    let begun = Instant::now();
    while groups.iter().any(|group| group.active()[root]) {
        assert!(begun.elapsed() < LIMIT, "the root has not left");
        thread::yield_now();
    }
    // The first operation reports the loss anyway.
    add_up(&groups, &[0, 1], 1);
    let mut memory = [[1_i64], [1]];
    for number in 0..4 {
        let begun: Vec<_> = groups
            .iter()
            .zip(&mut memory)
            .map(|(group, values)| {
                let range = range(values);
                let operation = match number {
                    0 => Operation::Broadcast { range, elements: I64, root },
                    1 => Operation::Scatter { sources: vec![], target: range, elements: I64, root },
                    2 => Operation::Gather {
                        source: range,
                        targets: vec![],
                        elements: I64,
                        root: Some(root),
                    },
                    _ => Operation::Reduce {
                        source: range,
                        target: range,
                        dtype: Dtype::I64,
                        how: Reduction::Sum,
                        root: Some(root),
                    },
                };
                group.begin(operation).unwrap()
            })
            .collect();
        for outcome in begun.iter().map(done) {
            assert!(outcome.error.is_none(), "{outcome:?}");
            assert_eq!(outcome.failed_slots, [root], "operation {number}");
        }
    }
    assert_eq!(memory, [[1], [1]]);
    for (_, outcome) in add_up(&groups, &[0, 1], 1) {
        assert!(outcome.failed_slots.is_empty());
    }
}

#[test]
fn withdrawn_message_is_not_received() {
    for contexts in [contexts(2), contexts_of_two_hosts()] {
        let groups = groups(&contexts, 2);
        // Sent as bytes; lent, or only announced.
        for length in [1, 2 << 20] {
            let (mut first, mut second) = (vec![1; length], vec![2; length]);
            let mut got = vec![0; length];
            let withdrawn = groups[0].send(range(&mut first), 1, 9).unwrap();
            assert!(groups[0].cancel_send(&withdrawn));
            assert!(done(&withdrawn).error.is_some());
            assert!(!groups[0].cancel_send(&withdrawn));
            first.fill(3);
            let sending = groups[0].send(range(&mut second), 1, 9).unwrap();
            done(&groups[1].receive(range(&mut got), Some(0), 9).unwrap());
            assert!(done(&sending).error.is_none());
            assert!(got.iter().all(|value| *value == 2), "{}", got[0]);
        }
    }
}

/// Withdraws a large message at any point of its way: its receiver gets it whole, or the next one.
#[test]
fn message_is_withdrawn_while_it_is_received() {
    for contexts in [contexts(2), contexts_of_two_hosts()] {
        let groups = groups(&contexts, 2);
        for round in 1..40 {
            let (mut first, mut second) = (vec![round; 2 << 20], vec![-round; 2 << 20]);
            let mut got = [vec![0; 2 << 20], vec![0; 2 << 20]];
            let sending = groups[0].send(range(&mut first), 1, 9).unwrap();
            let receiving = groups[1].receive(range(&mut got[0]), Some(0), 9).unwrap();
            (0..round * 4).for_each(|_| thread::yield_now());
            if groups[0].cancel_send(&sending) {
                first.fill(0);
            }
            let next = groups[0].send(range(&mut second), 1, 9).unwrap();
            assert!(done(&receiving).error.is_none());
            let value = got[0][0];
            assert!(value == round || value == -round, "{value}");
            assert!(got[0].iter().all(|it| *it == value), "a torn message");
            if value == round {
                done(&groups[1].receive(range(&mut got[1]), Some(0), 9).unwrap());
                assert_eq!(got[1][0], -round);
            }
            done(&next);
        }
    }
}

#[test]
fn displaced_rank_is_told_that_another_has_its_number() {
    let contexts = contexts(2);
    let groups = groups(&contexts, 2);
    let _other = context(1, Some(contexts[0].coordinator_address()), None);
    let mut value = [1_i64];
    let begun = Instant::now();
    let error = loop {
        assert!(begun.elapsed() < LIMIT, "the rank is not told");
        match groups[1].begin(sum(&mut value)) {
            // It may be a group of one until it knows.
            Ok(completion) => match done(&completion).error {
                Some(error) if error.to_string().contains("not active") => {}
                Some(error) => break error,
                None => {}
            },
            Err(error) if error.to_string().contains("not active") => {}
            Err(error) => break error,
        }
    };
    let text = error.to_string();
    assert!(text.contains("another process has registered as rank 1"), "{text}");
}
