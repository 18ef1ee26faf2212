//! Runs worlds, many seeds after each other, or one with a trace.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints")]

use std::{process::ExitCode, time::Instant};

use mooncake_simulation::{Bug, Plan, run};

const HELP: &str = "\
simulate: a cluster in one thread, with a hand-moved clock and seeded faults

  --first N    the first seed (0)
  --seeds N    how many (1000)
  --bug NAME   break something on purpose and stop when it is found
  --trace      print every event (with --seeds 1)";

fn main() -> ExitCode {
    let (mut first, mut seeds, mut bug, mut is_traced) = (0_u64, 1000_u64, None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse().ok());
        match argument.as_str() {
            "--first" => first = number().unwrap_or(first),
            "--seeds" => seeds = number().unwrap_or(seeds),
            "--trace" => is_traced = true,
            "--bug" => {
                let name = arguments.next().unwrap_or_default();
                bug = Bug::ALL.iter().find(|(known, _)| *known == name).map(|(_, bug)| *bug);
                if bug.is_none() {
                    let names: Vec<_> = Bug::ALL.iter().map(|(name, _)| *name).collect();
                    eprintln!("simulate: no such bug; there are {}", names.join(", "));
                    return ExitCode::from(2);
                }
            }
            _ => {
                println!("{HELP}");
                return ExitCode::from(u8::from(argument != "--help") * 2);
            }
        }
    }
    let begun = Instant::now();
    let mut sums = mooncake_simulation::Outcome::default();
    for seed in first..first + seeds {
        let mut plan = Plan::new(seed);
        if let Some(bug) = bug {
            plan = plan.with_bug(bug);
        }
        plan.is_traced = is_traced;
        match run(plan) {
            Ok(outcome) => sums.add(&outcome),
            Err(violation) => {
                println!("{violation}");
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{seeds} worlds were found right in {:.1?}: {sums:#?}", begun.elapsed());
    ExitCode::SUCCESS
}
