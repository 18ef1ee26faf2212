//! Metrics of copies, moves and drains: their number by state, and the progress of drains.

use mooncake_base::exposition::Exposition;

use crate::service::Service;

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let work = service.work(0);
    let c = service.totals().counters;
    let running: Vec<_> = work.jobs.iter().filter(|job| !job.status.is_over()).collect();
    let name = "mooncake_master_tasks";
    out.head(name, "gauge", "Pending and running copies and moves.");
    out.sample(name, &[("state", "pending")], work.pending);
    out.sample(name, &[("state", "processing")], work.processing);
    let name = "mooncake_master_tasks_ended_total";
    out.head(name, "counter", "Finished copies and moves.");
    out.sample(name, &[("outcome", "success")], c.tasks_done);
    out.sample(name, &[("outcome", "failed")], c.tasks_failed);
    out.gauge("mooncake_master_drain_jobs", "Running drain jobs.", running.len());
    let name = "mooncake_master_drain_jobs_ended_total";
    out.head(name, "counter", "Finished drain jobs.");
    for (outcome, count) in [
        ("succeeded", c.drains_done),
        ("failed", c.drains_failed),
        ("canceled", c.drains_cancelled),
    ] {
        out.sample(name, &[("outcome", outcome)], count);
    }
    for (name, help) in [
        ("moved_objects", "Objects moved by a running drain job."),
        ("moved_bytes", "Bytes moved by a running drain job."),
        ("active_objects", "Objects being moved by a running drain job."),
        ("failed_objects", "Objects that a running drain job failed to move."),
    ] {
        let full = format!("mooncake_master_drain_{name}");
        out.head(&full, "gauge", help);
        for job in &running {
            let value = match name {
                "moved_objects" => job.succeeded,
                "moved_bytes" => job.moved_bytes,
                "active_objects" => u64::from(job.active),
                _ => job.failed,
            };
            let id = job.id.to_string();
            out.sample(&full, &[("job", &id), ("segments", &job.segments.join(","))], value);
        }
    }
}
