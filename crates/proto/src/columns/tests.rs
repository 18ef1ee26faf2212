//! Tests of columns: packing round-trips, and inconsistent columns are rejected.

use proptest::prelude::*;

use super::*;
use crate::v1;

fn place(segment: u32, offset: u64) -> v1::Place {
    v1::Place { segment, offset, length: 3, replica: offset + 1 }
}

fn packed(items: &[Vec<v1::Place>]) -> v1::PlaceColumns {
    let mut columns = v1::PlaceColumns::default();
    items.iter().enumerate().for_each(|(item, places)| columns.push(item, places.iter().copied()));
    collapse_if_uniform(&mut columns.segments);
    columns
}

#[test]
fn keys_round_trip_and_need_all_their_bytes() {
    let mut column = v1::KeyColumn::pack(["a", "bc", "def"]);
    assert_eq!(column.keys().unwrap(), [&b"a"[..], b"bc", b"def"]);
    assert_eq!(column.first(), &b"a"[..]);
    column.lengths[2] = 2;
    assert_eq!(column.keys(), Err(ColumnMismatch), "a byte is left");
    column.lengths[2] = u32::MAX;
    assert_eq!(column.keys(), Err(ColumnMismatch), "bytes are missing");
    column.lengths[0] = u32::MAX;
    assert_eq!(column.first(), &b"abcdef"[..], "truncated to the bytes present");
    assert_eq!(v1::KeyColumn::default().keys().unwrap(), [&b""[..]; 0]);
    assert_eq!(v1::KeyColumn::default().first(), &b""[..]);
}

#[test]
fn uniform_column_collapses_to_one_value() {
    let mut same = vec![5; 3];
    collapse_if_uniform(&mut same);
    assert_eq!(same, [5]);
    let column = Column::each_or_uniform(&same, 3).unwrap();
    assert_eq!([0, 1, 2].map(|item| *column.at(item)), [5; 3]);
    assert_eq!(Column::each(&same, 3).unwrap_err(), ColumnMismatch);
    let mut other = vec![5, 5, 6];
    collapse_if_uniform(&mut other);
    let column = Column::each_or_uniform(&other, 3).unwrap();
    assert_eq!([0, 1, 2].map(|item| *column.at(item)), [5, 5, 6]);
    assert_eq!(Column::each_or_uniform(&other, 2).unwrap_err(), ColumnMismatch);
    assert_eq!(Column::each_or_uniform(&other, 4).unwrap_err(), ColumnMismatch);
}

#[test]
fn failures_and_checksums_need_ascending_item_numbers() {
    let failure = |item| v1::ItemFailure { item, failure: Some(v1::Failure::default()) };
    let read = |items: &[u32]| {
        let failures: Vec<_> = items.iter().map(|&item| failure(item)).collect();
        let column = v1::ChecksumColumn { items: items.to_vec(), checksums: vec![7; items.len()] };
        let both =
            [Failures::read(&failures, 3).is_ok(), Checksums::read(Some(&column), 3).is_ok()];
        assert_eq!(both[0], both[1]);
        both[0]
    };
    assert!(read(&[]) && read(&[0]) && read(&[0, 2]) && read(&[0, 1, 2]));
    assert!(!read(&[3]) && !read(&[1, 1]) && !read(&[2, 1]) && !read(&[u32::MAX]));
    let failures = [failure(1)];
    let mut failures = Failures::read(&failures, 3).unwrap();
    assert_eq!([0, 1, 2].map(|item| failures.take(item).is_some()), [false, true, false]);
    let empty = [v1::ItemFailure { item: 0, failure: None }];
    assert!(Failures::read(&empty, 3).is_err(), "it has no failure");
    let short = v1::ChecksumColumn { items: vec![0, 1], checksums: vec![1] };
    assert!(Checksums::read(Some(&short), 3).is_err());
    assert_eq!(Checksums::read(None, 3).unwrap().take(0), None);
}

proptest! {
    #[test]
    fn places_round_trip_item_by_item(
        items in prop::collection::vec(prop::collection::vec((0..3_u32, 0..9_u64), 0..3), 0..9)
    ) {
        let items: Vec<Vec<_>> =
            items.iter().map(|at| at.iter().map(|&(s, o)| place(s, o)).collect()).collect();
        let columns = packed(&items);
        prop_assert_eq!(columns.counts.is_empty(), items.iter().all(|item| item.len() == 1));
        let mut places = columns.read(items.len()).unwrap();
        for item in &items {
            prop_assert_eq!(&places.take().to_messages(3).collect::<Vec<_>>(), item);
        }
        prop_assert!(columns.read(items.len() + 1).is_err());
    }

    #[test]
    fn inconsistent_places_are_rejected_without_panic(
        counts: Vec<u32>,
        lists in prop::array::uniform3(0..5_usize),
        items in 0..5_usize,
    ) {
        let [segments, offsets, replicas] = lists;
        let columns = v1::PlaceColumns {
            counts,
            segments: vec![0; segments],
            offsets: vec![0; offsets],
            replicas: vec![0; replicas],
        };
        if let Ok(mut places) = columns.read(items) {
            let found: usize = (0..items).map(|_| places.take().to_messages(1).count()).sum();
            prop_assert_eq!((found, found), (offsets, replicas));
        }
    }
}
