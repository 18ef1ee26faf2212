//! What this process uses of its machine, as the kernel shows it.

use std::{fs, time::Duration};

use mooncake_base::exposition::Exposition;

use crate::rlimit;

/// CPU time, memory, threads and open files of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessUsage {
    /// CPU time in user and system mode.
    pub cpu_time: Duration,
    /// Bytes in physical memory.
    pub resident_bytes: u64,
    /// Bytes of address space.
    pub virtual_bytes: u64,
    /// Number of threads.
    pub threads: u64,
    /// Number of open files.
    pub open_files: u64,
    /// Time of the start since 1970.
    pub started_at: Duration,
}

/// Returns the name of this host.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns what this process uses now; `None` where the kernel does not tell.
pub fn usage() -> Option<ProcessUsage> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let boot = fs::read_to_string("/proc/stat").ok()?;
    let open_files = fs::read_dir("/proc/self/fd").ok()?.count();
    // The directory that is being read is itself an open file.
    parse(
        &stat,
        &boot,
        rustix::param::clock_ticks_per_second(),
        u64::try_from(open_files.saturating_sub(1)).ok()?,
    )
}

/// Adds the metrics of this process under the names that Prometheus clients share, as far as the
/// kernel tells them.
pub fn add_metrics(out: &mut Exposition) {
    let Some(usage) = usage() else { return };
    let cpu = usage.cpu_time.as_secs_f64();
    out.counter("process_cpu_seconds_total", "CPU time in user and system mode.", cpu);
    let start = usage.started_at.as_secs_f64();
    out.gauge("process_start_time_seconds", "Start of the process since 1970.", start);
    for (name, help, value) in [
        ("resident_memory_bytes", "Physical memory.", usage.resident_bytes),
        ("virtual_memory_bytes", "Address space.", usage.virtual_bytes),
        ("open_fds", "Open files.", usage.open_files),
        ("max_fds", "Limit of open files.", rlimit::limit()),
        ("threads", "Threads.", usage.threads),
    ] {
        out.gauge(&format!("process_{name}"), help, value);
    }
}

/// Parses the lines of the kernel.
fn parse(stat: &str, boot: &str, ticks: u64, open_files: u64) -> Option<ProcessUsage> {
    // The name of the program is in parentheses and may contain anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // proc(5) counts from 1, and the state, the first field here, is its third.
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let time = |count: u64| {
        let millis = u128::from(count) * 1000 / u128::from(ticks.max(1));
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    };
    let line = boot.lines().find_map(|line| line.strip_prefix("btime "))?;
    let booted_at = Duration::from_secs(line.trim().parse().ok()?);
    Some(ProcessUsage {
        cpu_time: time(field(14)?.saturating_add(field(15)?)),
        threads: field(20)?,
        started_at: booted_at.saturating_add(time(field(22)?)),
        virtual_bytes: field(23)?,
        resident_bytes: field(24)?.saturating_mul(crate::memory::page_size() as u64),
        open_files,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_any_name() {
        let stat = "7 (a) b) c) S 1 7 7 0 -1 4194560 99 0 0 0 150 50 0 0 20 0 5 0 1000 4096 3 x";
        let seen = parse(stat, "cpu 1 2\nbtime 1700000000\n", 100, 9).unwrap();
        assert_eq!(seen.cpu_time, Duration::from_secs(2));
        assert_eq!((seen.threads, seen.virtual_bytes, seen.open_files), (5, 4096, 9));
        assert_eq!(seen.resident_bytes, 3 * crate::memory::page_size() as u64);
        assert_eq!(seen.started_at, Duration::from_secs(1_700_000_010));
        assert_eq!(parse("7 (a) S 1", "btime 1\n", 100, 0), None);
    }

    #[test]
    fn this_process_uses_memory_and_files() {
        let seen = usage().unwrap();
        assert!(seen.resident_bytes > 0 && seen.threads > 0 && seen.open_files > 0);
        assert!(seen.started_at > Duration::from_secs(1_000_000_000));
    }
}
