//! Measures how fast a directory is written and read.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use crate::{
    Destination, Disk, Name, Options, ReadMethod, ReadOutcome, ReadRequest, Write, WriteOutcome,
    error::{Error, Result},
    reader::ChosenReadMethod,
};

/// The length of a record: about a block of keys and values of a model.
const RECORD_BYTES: usize = 1 << 20;

/// The records of a batch.
const BATCH: usize = 64;

/// How long records are read, over and over if need be.
const READ_TIME: Duration = Duration::from_secs(1);

/// What a directory reaches.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Bytes written in a second, until all are on the device.
    pub write_rate: f64,
    /// Bytes read in a second, in batches of records of 1 MiB that are not in the page cache.
    pub read_rate: f64,
    /// What read them, and why.
    pub read_method: ChosenReadMethod,
    /// Reads past the page cache that the system refused: the rate is that of the page cache then.
    pub direct_refused: u64,
}

/// Writes so many bytes, at least one batch, to a directory that is empty or absent, and reads them.
/// The files stay there.
///
/// # Errors
/// As for [`Disk::open`], if the bytes do not fit, and those of the system.
pub fn measure(path: &Path, method: ReadMethod, bytes: u64) -> Result<Measured> {
    let batches = (bytes / (BATCH * RECORD_BYTES) as u64).max(1);
    let options = Options {
        read_method: method,
        // Room for heads, the lists of the extents, and an extent that stays unused.
        ..Options::new(bytes.max((BATCH * RECORD_BYTES) as u64) * 3 / 2 + (64 << 20))
    };
    let disk = Disk::open(path, options)?;
    // Not zeros, which some devices and file systems do not store.
    let payload: Vec<u8> = (0..RECORD_BYTES + BATCH).map(|at| (at * 7 % 251) as u8).collect();
    let begin = Instant::now();
    for batch in 0..batches {
        let keys: Vec<_> = keys(batch).collect();
        let writes: Vec<_> = keys
            .iter()
            .enumerate()
            .map(|(at, key)| Write { name: name(key), payload: &payload[at..at + RECORD_BYTES] })
            .collect();
        let report = disk.write(&writes);
        let refused =
            report.outcomes.into_iter().find(|one| !matches!(one, WriteOutcome::Written(_)));
        if refused.is_some() || !report.evicted.is_empty() {
            let why = refused.map_or_else(|| "evicted".to_owned(), |one| format!("{one:?}"));
            return Err(Error::Invalid(format!("the records do not fit: {why}")));
        }
    }
    disk.sync()?;
    let written = (batches as usize * BATCH * RECORD_BYTES) as f64;
    let write_rate = written / begin.elapsed().as_secs_f64();
    let read_rate = read(&disk, batches)?;
    let direct_refused = disk.statistics().direct_refused;
    let read_method = disk.read_method().clone();
    disk.close()?;
    Ok(Measured { write_rate, read_rate, read_method, direct_refused })
}

/// Reads all batches, for a while at least; returns the bytes in a second.
fn read(disk: &Disk, batches: u64) -> Result<f64> {
    // Touched before, so that the first read does not wait for pages.
    let mut memory = vec![1_u8; BATCH * RECORD_BYTES + 4096];
    let start = memory.as_ptr().align_offset(4096).min(4096);
    let begin = Instant::now();
    let mut bytes = 0_usize;
    for batch in (0..batches).cycle() {
        let keys: Vec<_> = keys(batch).collect();
        let mut requests: Vec<_> = memory[start..]
            .chunks_exact_mut(RECORD_BYTES)
            .zip(&keys)
            .map(|(into, key)| ReadRequest {
                name: name(key),
                offset: 0,
                into: Destination::from(into),
            })
            .collect();
        let outcomes = disk.read_batch(&mut requests);
        if let Some(bad) = outcomes.into_iter().find(|one| *one != ReadOutcome::Good) {
            return Err(Error::Invalid(format!("a record cannot be read: {bad:?}")));
        }
        bytes += BATCH * RECORD_BYTES;
        if batch + 1 == batches && begin.elapsed() >= READ_TIME {
            break;
        }
    }
    Ok(bytes as f64 / begin.elapsed().as_secs_f64())
}

fn keys(batch: u64) -> impl Iterator<Item = [u8; 8]> {
    (0..BATCH as u64).map(move |at| (batch * BATCH as u64 + at).to_le_bytes())
}

const fn name(key: &[u8; 8]) -> Name<'_> {
    Name { tenant: "default", key, version: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_the_reader_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let measured = measure(folder.path(), ReadMethod::Threads, 80 << 20).unwrap();
        assert!(measured.write_rate > 0.0 && measured.read_rate > 0.0, "{measured:?}");
        assert_eq!(measured.read_method.method, ReadMethod::Threads);
    }
}
