//! Runs the simulator over a range of seeds, or over one seed with a trace.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints")]

use std::{process::ExitCode, time::Instant};

use mooncake_simulation::{Bug, Outcome, Plan, run};

const HELP: &str = "\
simulate: runs a simulated cluster in one thread, with a manual clock and injected faults

  --first N    first seed (default 0)
  --seeds N    number of seeds (default 1000)
  --bug NAME   plant a bug and stop at the first violation; an unknown NAME lists all
  --disks      give the clients of all seeds directories of records; else those of some have them
  --all        do not stop at a violation; count the seeds by their violation
  --trace      print every event (use with --seeds 1)";

fn main() -> ExitCode {
    let (mut first, mut seeds, mut bug, mut is_traced) = (0_u64, 1000_u64, None, false);
    let (mut goes_on, mut has_disks, mut violated) = (false, false, 0_u64);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse().ok());
        match argument.as_str() {
            "--first" => first = number().unwrap_or(first),
            "--seeds" => seeds = number().unwrap_or(seeds),
            "--trace" => is_traced = true,
            "--all" => goes_on = true,
            "--disks" => has_disks = true,
            "--bug" => {
                let name = arguments.next().unwrap_or_default();
                bug = Bug::ALL.iter().find(|(known, _)| *known == name).map(|(_, bug)| *bug);
                if bug.is_none() {
                    let names: Vec<_> = Bug::ALL.iter().map(|(name, _)| *name).collect();
                    eprintln!(
                        "simulate: unknown bug {name:?}, expected one of {}",
                        names.join(", ")
                    );
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
    let (mut sums, mut seen) = (Outcome::default(), Outcome::default());
    for seed in first..first + seeds {
        let mut plan = Plan::new(seed);
        if has_disks {
            plan = plan.with_directories();
        }
        if let Some(bug) = bug {
            plan = plan.with_bug(bug);
        }
        plan.is_traced = is_traced;
        match run(plan) {
            Ok(outcome) => {
                sums.add(&outcome);
                seen.add(&outcome.seen());
            }
            Err(violation) => {
                println!("{violation}");
                violated += 1;
                if !goes_on {
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    println!("{seeds} runs, {violated} with a violation, in {:.1?}: {sums:#?}", begun.elapsed());
    println!("runs that have each of these: {seen:#?}");
    ExitCode::from(u8::from(violated > 0))
}
