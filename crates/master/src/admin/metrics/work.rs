//! Metrics of copies, moves and drains: their number by state, and the progress of drains.

use mooncake_base::exposition::{Exposition, Metric};

use crate::{
    service::{Service, WorkSummary},
    state::{Counters, JobView},
};

const PREFIX: &str = "mooncake_master_";

static TASKS: [Metric<WorkSummary>; 2] = [
    Metric::gauge("tasks", "Pending and running copies and moves.", |it: &WorkSummary| {
        it.pending as u64
    })
    .labelled("state", "pending"),
    Metric::gauge("tasks", "Running copies and moves.", |it: &WorkSummary| it.processing as u64)
        .labelled("state", "processing"),
];

static DRAIN: [Metric<JobView>; 4] = [
    Metric::gauge("moved_objects", "Objects moved by a running drain job.", |it| it.succeeded),
    Metric::gauge("moved_bytes", "Bytes moved by a running drain job.", |it| it.moved_bytes),
    Metric::gauge("active_objects", "Objects being moved by a running drain job.", |it| {
        it.active.into()
    }),
    Metric::gauge("failed_objects", "Objects that a running drain job failed to move.", |it| {
        it.failed
    }),
];

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let work = service.work(0);
    let counters = service.totals().counters;
    let running: Vec<_> = work.jobs.iter().filter(|job| !job.status.is_over()).collect();
    out.row(PREFIX, &TASKS, &work);
    out.row(PREFIX, Counters::TASKS, &counters);
    out.gauge("mooncake_master_drain_jobs", "Running drain jobs.", running.len());
    out.row(PREFIX, Counters::DRAINS, &counters);
    let texts: Vec<_> =
        running.iter().map(|job| (job.id.to_string(), job.segments.join(","))).collect();
    let rows = texts.iter().zip(running);
    let rows =
        rows.map(|((id, segments), job)| (vec![("job", &**id), ("segments", segments)], job));
    out.rows("mooncake_master_drain_", &DRAIN, &rows.collect::<Vec<_>>());
}
