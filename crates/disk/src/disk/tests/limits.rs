//! Tests of capacities and lengths: what a directory takes, and what it refuses.

use super::*;
use crate::{Error, format::LARGE_BYTES};

const EXTENT: u64 = 1 << 20;

#[test]
fn longest_payload_is_taken_and_one_byte_more_is_not() {
    let folder = tempfile::tempdir().unwrap();
    for extents in [16 * EXTENT, 16 * 16_384] {
        let path = folder.path().join(extents.to_string());
        let disk = Disk::open(&path, Options::new(extents)).unwrap();
        for key in [&b"k"[..], &[7; 900]] {
            let name = name(key, 1);
            let max = disk.payload_bytes_max(name.tenant.len(), key.len());
            assert_eq!(max < LARGE_BYTES, extents < 16 * LARGE_BYTES, "{max}");
            assert_eq!(write(&disk, name, max as usize + 1), WriteOutcome::TooLong);
            assert!(matches!(write(&disk, name, max as usize), WriteOutcome::Written(_)));
            assert_eq!(read(&disk, name), ReadOutcome::Good);
        }
        assert_eq!(disk.payload_bytes_max(1 << 20, 1), 0, "the name alone is too long");
    }
}

#[test]
fn capacity_below_one_extent_is_refused_with_the_least_one() {
    let folder = tempfile::tempdir().unwrap();
    let open = |capacity| Disk::open(folder.path(), Options::new(capacity));
    drop(open(16 * EXTENT).unwrap());
    let refusal = open(EXTENT - 1).unwrap_err();
    assert!(matches!(refusal, Error::Invalid(_)), "{refusal:?}");
    assert!(refusal.to_string().contains("at least 1048576 bytes"), "{refusal}");
    // One extent is used again and again.
    let disk = open(EXTENT).unwrap();
    for number in 0..5_u32 {
        let key = number.to_le_bytes();
        assert!(matches!(write(&disk, name(&key, 1), 600_000), WriteOutcome::Written(_)));
        assert_eq!(read(&disk, name(&key, 1)), ReadOutcome::Good);
    }
    assert_eq!(disk.statistics().allocated_bytes, EXTENT);
}

#[test]
fn directory_on_a_full_file_system_is_opened_and_read() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 16 << 20).unwrap();
    for number in 0..40_u32 {
        write(&disk, name(&number.to_le_bytes(), 1), 600_000);
    }
    let live: Vec<u32> = (0..40_u32)
        .filter(|number| disk.length(name(&number.to_le_bytes(), 1)).is_some())
        .collect();
    let extents = disk.statistics().allocated_bytes;
    disk.close().unwrap();
    files.kill();
    files.set(Faults { free: Some(0), ..Faults::default() });
    let disk = faulty(&files, 16 << 20).unwrap();
    assert_eq!(disk.statistics().allocated_bytes, extents - EXTENT, "the oldest one is given up");
    for number in live.iter().skip(1) {
        assert_eq!(read(&disk, name(&number.to_le_bytes(), 1)), ReadOutcome::Good, "{number}");
    }
    assert!(matches!(write(&disk, name(b"later", 1), 100), WriteOutcome::Written(_)));
}

#[test]
fn last_extent_is_kept_on_a_full_file_system() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 16 << 20).unwrap();
    write(&disk, name(b"key", 1), 100);
    disk.close().unwrap();
    files.kill();
    files.set(Faults { free: Some(0), ..Faults::default() });
    let refusal = faulty(&files, 16 << 20).unwrap_err().to_string();
    assert!(refusal.contains("identity"), "{refusal}");
    files.set(Faults::default());
    let disk = faulty(&files, 16 << 20).unwrap();
    assert_eq!(read(&disk, name(b"key", 1)), ReadOutcome::Good);
}
