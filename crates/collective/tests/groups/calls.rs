//! Members that call different operations at one place, and what a rank gives up.

use std::time::Instant;

use mooncake_collective::{Dtype, HostRange, Operation, Reduction};

use super::{I64, LIMIT, add_up, contexts, done, groups, range};

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
