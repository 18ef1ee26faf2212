//! Replays block traces against the orders of eviction of the real master's rules, and says how
//! many blocks each would have served: a table, and a picture of hit rate against size.
//!
//! `cargo run --profile bench -p mooncake-benches --bin eviction -- TRACE.jsonl... [--svg FILE]
//! [--blocks 3000,10000] [--clients 8] [--generated]`
//!
//! A trace has one request a line with `"hash_ids": [...]`, the blocks of its prompt in order. A
//! block counts as served only if all before it in its request were held.
#![allow(clippy::print_stdout, reason = "the table is what the program is for")]
#![allow(clippy::print_stderr, reason = "usage and errors go where a terminal shows them")]

#[path = "eviction/generate.rs"]
mod generate;
#[path = "eviction/picture.rs"]
mod picture;
#[path = "eviction/replay.rs"]
mod replay;

use std::{fs, process::ExitCode};

use mooncake_master::state::EvictionKind;

/// A request: the blocks of its prompt.
type Request = Vec<u32>;
/// A named list of requests.
type Trace = (String, Vec<Request>);

/// The orders that are compared, by the names of the flag.
const ORDERS: [(&str, EvictionKind); 3] = [
    ("lru", EvictionKind::Lru),
    ("s3fifo", EvictionKind::S3Fifo),
    ("adaptive", EvictionKind::Adaptive),
];

/// What was asked for.
#[derive(Debug)]
struct CliCommand {
    traces: Vec<String>,
    sizes: Vec<usize>,
    clients: usize,
    is_generated: bool,
    svg: Option<String>,
}

/// The hit rates of one trace at one size.
#[derive(Debug)]
struct Row {
    blocks: usize,
    /// One for each of [`ORDERS`].
    rates: Vec<f64>,
    optimum: f64,
}

fn main() -> ExitCode {
    match read_arguments().and_then(|asked| run(&asked)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(asked: &CliCommand) -> Result<(), String> {
    let mut traces = Vec::new();
    for path in &asked.traces {
        let name = path.rsplit('/').next().unwrap_or(path).trim_end_matches(".jsonl").to_owned();
        let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
        let requests: Option<Vec<Request>> = text.lines().map(blocks_of).collect();
        traces.push((name, requests.ok_or_else(|| format!("{path}: a line without hash_ids"))?));
    }
    if asked.is_generated {
        traces.extend(generate::all());
    }
    print!("{:<24} {:>7}", "trace", "blocks");
    ORDERS.iter().for_each(|(name, _)| print!(" {name:>9}"));
    println!(" {:>9}", "optimum");
    let mut all = Vec::new();
    for (name, requests) in &traces {
        let mut rows = Vec::new();
        for &blocks in &asked.sizes {
            let rate = |(_, kind): &(_, EvictionKind)| {
                replay::replay(requests, blocks, asked.clients, *kind)
            };
            let rates: Vec<f64> = ORDERS.iter().map(rate).collect();
            let optimum = replay::optimum(requests, blocks);
            print!("{name:<24} {blocks:>7}");
            rates.iter().chain([&optimum]).for_each(|rate| print!(" {rate:>9.4}"));
            println!();
            rows.push(Row { blocks, rates, optimum });
        }
        all.push((name.clone(), rows));
    }
    if let Some(path) = &asked.svg {
        fs::write(path, picture::draw(&all)).map_err(|error| format!("{path}: {error}"))?;
    }
    Ok(())
}

fn read_arguments() -> Result<CliCommand, String> {
    let mut asked = CliCommand {
        traces: Vec::new(),
        sizes: vec![1_000, 3_000, 10_000, 30_000],
        clients: 1,
        is_generated: false,
        svg: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        let number = |text: &str| text.parse().map_err(|_| format!("not a number: {text}"));
        match word.as_str() {
            "--blocks" => {
                asked.sizes = value()?.split(',').map(number).collect::<Result<_, _>>()?;
            }
            "--clients" => asked.clients = number(&value()?)?.max(1),
            "--generated" => asked.is_generated = true,
            "--svg" => asked.svg = Some(value()?),
            _ if word.starts_with('-') => return Err(format!("not an option: {word}")),
            _ => asked.traces.push(word),
        }
    }
    if asked.traces.is_empty() && !asked.is_generated {
        return Err("name a trace, or ask for --generated".to_owned());
    }
    Ok(asked)
}

/// The blocks of one line of a trace.
fn blocks_of(line: &str) -> Option<Request> {
    let (_, rest) = line.split_once("\"hash_ids\"")?;
    let (_, rest) = rest.split_once('[')?;
    let (list, _) = rest.split_once(']')?;
    let numbers = list.split(',').map(str::trim).filter(|word| !word.is_empty());
    numbers.map(|word| word.parse().ok()).collect()
}
