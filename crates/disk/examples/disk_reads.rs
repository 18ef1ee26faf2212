//! Measures batch reads of records that are only on the device, beside `fio` in the same directory, and
//! the start of a directory of a million records.
//!
//! `cargo run --profile bench -p mooncake-disk --example disk_reads -- DIR [--threads]`
//!
//! `fio` runs before and after each measurement, and has to be installed. Each row has reads a second
//! of batches of 256 records as a share of the mean of these two: into memory that is aligned to pages,
//! and, as arrays of Python are, to 64 bytes. Medians of five rounds.
#![allow(clippy::print_stdout, reason = "the program prints a table")]

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use mooncake_base::random::SplitMix64;
use mooncake_disk::{Disk, Name, Options, Read, ReadMethod, ReadOutcome, Write};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const BATCH: usize = 256;
const TIME: Duration = Duration::from_secs(1);
const ROUNDS: usize = 5;

/// The bytes of all records of a size, which no cache of a virtual disk should hold. Also of `fio`'s file.
const TOTAL_BYTES: usize = 2 << 30;

/// The sizes, and the share of the reads of `fio` that is the goal.
const SIZES: [(usize, &str, f64); 3] =
    [(4 << 10, "4k", 0.7), (64 << 10, "64k", 0.9), (1 << 20, "1m", 0.9)];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().ok_or("which directory?")?);
    let read_method = match arguments.next().as_deref() {
        None => ReadMethod::Probe,
        Some("--threads") => ReadMethod::Threads,
        Some(other) => return Err(format!("{other} is no option").into()),
    };
    std::fs::create_dir_all(&directory)?;
    let records = directory.join("records");
    println!("| Record | fio, reads/s | aligned to 4096 | share | aligned to 64 | share | goal |");
    println!("|---|---|---|---|---|---|---|");
    for (bytes, size, goal) in SIZES {
        let options = Options { read_method, ..Options::new(4 << 30) };
        let disk = fill(&records, options, bytes)?;
        let mut rows = Vec::new();
        let mut before = fio(&directory, size)?;
        for _ in 0..ROUNDS {
            let aligned = reads_a_second(&disk, bytes, 4096)?;
            let between = fio(&directory, size)?;
            let shifted = reads_a_second(&disk, bytes, 64)?;
            let after = fio(&directory, size)?;
            let share = aligned / f64::midpoint(before, between);
            rows.push([between, aligned, share, shifted, shifted / f64::midpoint(between, after)]);
            before = after;
        }
        let [limit, aligned, share, shifted, shifted_share] =
            std::array::from_fn(|column| median(rows.iter().map(|row| row[column]).collect()));
        println!(
            "| {size} | {limit:.0} | {aligned:.0} | {share:.2} | {shifted:.0} | \
             {shifted_share:.2} | {goal} |"
        );
        let method = disk.read_method().to_string();
        drop(disk);
        std::fs::remove_dir_all(&records)?;
        if bytes == SIZES[SIZES.len() - 1].0 {
            println!("\nread through {method}");
        }
    }
    restart(&records)?;
    std::fs::remove_dir_all(&records)?;
    Ok(std::fs::remove_file(directory.join("fio"))?)
}

/// Fills a directory with records of a size, and opens it again: all of them are sealed.
fn fill(path: &Path, options: Options, bytes: usize) -> Result<Disk> {
    let disk = Disk::open(path, options.clone())?;
    let payload: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    for number in 0..records_of(bytes) as u64 {
        let name = Name { tenant: "default", key: &number.to_le_bytes(), version: 1 };
        let report = disk.write(&[Write { name, payload: &payload }]);
        if !report.evicted.is_empty() {
            return Err("the records do not fit".into());
        }
    }
    disk.close()?;
    Ok(Disk::open(path, options)?)
}

const fn records_of(bytes: usize) -> usize {
    let count = TOTAL_BYTES / bytes;
    if count < 1 << 17 { count } else { 1 << 17 }
}

/// Reads batches of random records into memory whose address is a multiple of this, and of nothing more.
fn reads_a_second(disk: &Disk, bytes: usize, alignment: usize) -> Result<f64> {
    let stride = bytes.next_multiple_of(4096) + 4096;
    let mut memory = vec![1_u8; BATCH * stride + 4096];
    let start = memory.as_ptr().align_offset(4096) + alignment % 4096;
    let mut random = SplitMix64::new(1);
    let (mut spent, mut count) = (Duration::ZERO, 0);
    while spent < TIME {
        let keys: Vec<_> =
            (0..BATCH).map(|_| (random.below(records_of(bytes)) as u64).to_le_bytes()).collect();
        let mut reads: Vec<_> = memory[start..]
            .chunks_exact_mut(stride)
            .zip(&keys)
            .map(|(memory, key)| Read {
                name: Name { tenant: "default", key, version: 1 },
                into: &mut memory[..bytes],
            })
            .collect();
        let begun = Instant::now();
        let outcomes = disk.read(&mut reads);
        spent += begun.elapsed();
        count += outcomes.len();
        if let Some(outcome) = outcomes.iter().find(|outcome| **outcome != ReadOutcome::Good) {
            return Err(format!("a record could not be read: {outcome:?}").into());
        }
    }
    Ok(count as f64 / spent.as_secs_f64())
}

/// Returns the reads of this size that `fio` does in a second.
fn fio(directory: &Path, size: &str) -> Result<f64> {
    let output = Command::new("fio")
        .args(["--name=reads", "--direct=1", "--rw=randread", "--iodepth=32", "--ioengine=libaio"])
        .args(["--time_based", "--runtime=1", "--output-format=terse", "--terse-version=3"])
        .arg(format!("--bs={size}"))
        .arg(format!("--size={TOTAL_BYTES}"))
        .arg(format!("--filename={}", directory.join("fio").display()))
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let row = text.lines().find(|line| line.starts_with("3;")).ok_or("fio printed no result")?;
    Ok(row.split(';').nth(7).ok_or("fio printed no reads a second")?.parse()?)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures the start of a directory of a million records.
fn restart(path: &Path) -> Result<()> {
    const RECORDS: u64 = 1_000_000;
    let options = Options::new(4 << 30);
    let disk = Disk::open(path, options.clone())?;
    for number in 0..RECORDS {
        let name = Name { tenant: "default", key: &number.to_le_bytes(), version: 1 };
        disk.write(&[Write { name, payload: &[7; 1000] }]);
    }
    disk.close()?;
    let begun = Instant::now();
    let disk = Disk::open(path, options)?;
    let opened = begun.elapsed();
    let statistics = disk.statistics();
    let mut into = [0; 1000];
    let name = Name { tenant: "default", key: &7_u64.to_le_bytes(), version: 1 };
    let outcome = disk.read(&mut [Read { name, into: &mut into }]).remove(0);
    println!(
        "{} records found again: {:.2} s, {:.2} s until the first read ({outcome:?}), {:.1} bytes of \
         memory a record",
        statistics.records,
        opened.as_secs_f64(),
        begun.elapsed().as_secs_f64(),
        statistics.index_bytes as f64 / statistics.records as f64,
    );
    Ok(())
}
