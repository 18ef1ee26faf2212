//! Replays block traces against the eviction policies of the master's state machine, and prints the
//! hit rate of each policy as a table and, with `--svg`, as a chart of hit rate by pool size.
//!
//! `cargo run --profile bench -p mooncake-benches --bin eviction -- TRACE.jsonl... [--svg FILE]
//! [--blocks 3000,10000] [--clients 8] [--generated]`
//!
//! A trace has one request per line with `"hash_ids": [...]`, the blocks of the prompt in order. A
//! block counts as a hit only if all blocks before it in the request are hits, too.
#![allow(clippy::print_stdout, reason = "the program prints a table")]
#![allow(clippy::print_stderr, reason = "usage and errors go to stderr")]

#[path = "eviction/chart.rs"]
mod chart;
#[path = "eviction/generate.rs"]
mod generate;
#[path = "eviction/replay.rs"]
mod replay;

use std::{fs, process::ExitCode};

use mooncake_master::state::EvictionKind;

/// The blocks of a request's prompt, in order.
type Request = Vec<u32>;
/// A name and a list of requests.
type Trace = (String, Vec<Request>);

/// The compared policies and their names.
const POLICIES: [(&str, EvictionKind); 3] = [
    ("lru", EvictionKind::Lru),
    ("s3fifo", EvictionKind::S3Fifo),
    ("adaptive", EvictionKind::Adaptive),
];

/// The command line.
#[derive(Debug)]
struct Options {
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
    /// One rate per entry of [`POLICIES`].
    rates: Vec<f64>,
    optimum: f64,
}

fn main() -> ExitCode {
    match read_arguments().and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), String> {
    let mut traces = Vec::new();
    for path in &options.traces {
        let name = path.rsplit('/').next().unwrap_or(path).trim_end_matches(".jsonl").to_owned();
        let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
        let requests: Option<Vec<Request>> = text.lines().map(blocks_of).collect();
        traces.push((name, requests.ok_or_else(|| format!("{path}: a line has no hash_ids"))?));
    }
    if options.is_generated {
        traces.extend(generate::all());
    }
    print!("{:<24} {:>7}", "trace", "blocks");
    POLICIES.iter().for_each(|(name, _)| print!(" {name:>9}"));
    println!(" {:>9}", "optimum");
    let mut all = Vec::new();
    for (name, requests) in &traces {
        let mut rows = Vec::new();
        for &blocks in &options.sizes {
            let rate = |(_, kind): &(_, EvictionKind)| {
                replay::replay(requests, blocks, options.clients, *kind)
            };
            let rates: Vec<f64> = POLICIES.iter().map(rate).collect();
            let optimum = replay::optimum(requests, blocks);
            print!("{name:<24} {blocks:>7}");
            rates.iter().chain([&optimum]).for_each(|rate| print!(" {rate:>9.4}"));
            println!();
            rows.push(Row { blocks, rates, optimum });
        }
        all.push((name.clone(), rows));
    }
    if let Some(path) = &options.svg {
        fs::write(path, chart::draw(&all)).map_err(|error| format!("{path}: {error}"))?;
    }
    Ok(())
}

fn read_arguments() -> Result<Options, String> {
    let mut options = Options {
        traces: Vec::new(),
        sizes: vec![1_000, 3_000, 10_000, 30_000],
        clients: 1,
        is_generated: false,
        svg: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("option {word} needs a value"));
        let number = |text: &str| text.parse().map_err(|_| format!("not a number: {text}"));
        match word.as_str() {
            "--blocks" => {
                options.sizes = value()?.split(',').map(number).collect::<Result<_, _>>()?;
            }
            "--clients" => options.clients = number(&value()?)?.max(1),
            "--generated" => options.is_generated = true,
            "--svg" => options.svg = Some(value()?),
            _ if word.starts_with('-') => return Err(format!("unknown option {word}")),
            _ => options.traces.push(word),
        }
    }
    if options.traces.is_empty() && !options.is_generated {
        return Err("name at least one trace, or use --generated".to_owned());
    }
    Ok(options)
}

/// Parses the blocks of one line of a trace.
fn blocks_of(line: &str) -> Option<Request> {
    let (_, rest) = line.split_once("\"hash_ids\"")?;
    let (_, rest) = rest.split_once('[')?;
    let (list, _) = rest.split_once(']')?;
    let numbers = list.split(',').map(str::trim).filter(|word| !word.is_empty());
    numbers.map(|word| word.parse().ok()).collect()
}
