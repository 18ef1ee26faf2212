//! The metrics of the process, under the names that Prometheus clients share.

use mooncake_base::exposition::Exposition;
use mooncake_os::{process, rlimit};

/// Adds the metrics, as far as the kernel tells them.
pub(super) fn add(out: &mut Exposition) {
    let Some(usage) = process::usage() else { return };
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
