//! Metrics of copies, moves and drains: how many there are by state, and how far drains are.

use mooncake_http::Exposition;

use crate::service::Service;

/// Adds them.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let work = service.work(0);
    let c = service.totals().counters;
    let running: Vec<_> = work.jobs.iter().filter(|job| !job.status.is_over()).collect();
    let name = "mooncake_master_tasks";
    out.head(name, "gauge", "Copies and moves that wait and that run.");
    out.sample(name, &[("state", "pending")], work.pending);
    out.sample(name, &[("state", "processing")], work.processing);
    let name = "mooncake_master_tasks_ended_total";
    out.head(name, "counter", "Copies and moves that are over.");
    out.sample(name, &[("outcome", "success")], c.tasks_done);
    out.sample(name, &[("outcome", "failed")], c.tasks_failed);
    out.gauge("mooncake_master_drain_jobs", "Drains that run.", running.len());
    let name = "mooncake_master_drain_jobs_ended_total";
    out.head(name, "counter", "Drains that are over.");
    for (outcome, count) in [
        ("succeeded", c.drains_done),
        ("failed", c.drains_failed),
        ("canceled", c.drains_cancelled),
    ] {
        out.sample(name, &[("outcome", outcome)], count);
    }
    for (name, help) in [
        ("moved_objects", "Objects that a running drain has moved out of its segments."),
        ("moved_bytes", "Bytes that a running drain has moved."),
        ("active_objects", "Objects that a running drain is moving."),
        ("failed_objects", "Objects that a running drain could not move."),
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
