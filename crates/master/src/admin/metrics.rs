//! GET /metrics: Prometheus text, with our metric names and upstream's.

mod cluster;
mod log;
mod pool;
mod promotion;
mod quotas;
mod unsupported;
mod upstream;
mod work;

use std::sync::atomic::Ordering;

use axum::{extract::State, response::Response};
use mooncake_base::exposition::{Exposition, Metric};
use mooncake_http::reply;

use super::AdminContext;
use crate::{
    cluster::status::ClusterStatus,
    events::EventCounts,
    service::{Admission, Service, VERSION},
};

pub(super) async fn show(State(admin): AdminContext) -> Response {
    let cluster = admin.cluster_status();
    reply::metrics(text(&admin.service, admin.settings.has_upstream_metrics, cluster.as_ref()))
}

/// Returns the metrics of a master that does not lead.
pub(super) fn of_standby(status: Option<&ClusterStatus>) -> String {
    let mut out = Exposition::default();
    if let Some(status) = status {
        cluster::add(&mut out, status);
    }
    mooncake_os::process::add_metrics(&mut out);
    out.finish()
}

fn text(service: &Service, has_upstream: bool, status: Option<&ClusterStatus>) -> String {
    let mut out = Exposition::default();
    if let Some(status) = status {
        cluster::add(&mut out, status);
    }
    pool::add(&mut out, service);
    promotion::add(&mut out, &service.totals());
    out.row("mooncake_master_", &LOAD, service);
    if let Some(events) = service.events() {
        out.row("mooncake_master_events_", EventCounts::METRICS, &events.counts());
    }
    log::add(&mut out, service);
    work::add(&mut out, service);
    quotas::add(&mut out, service);
    mooncake_os::process::add_metrics(&mut out);
    out.row("mooncake_master_", &REFUSED_PEERS, service);
    out.head("mooncake_master_info", "gauge", "The version of the master.");
    out.sample("mooncake_master_info", &[("version", VERSION)], 1);
    out.row("mooncake_master_", &UPTIME, service);
    if has_upstream {
        upstream::add(&mut out, service);
    }
    out.finish()
}

/// Slow and refused calls.
static LOAD: [Metric<Service>; 4] = [
    Metric::counter("slow_calls_total", "Calls slower than the threshold.", |it| {
        it.slow_log().total()
    }),
    Metric::seconds(
        "slow_call_threshold_seconds",
        "Duration from which on a call counts as slow; 0 turns the slow log off.",
        |it| it.slow_log().threshold().as_secs_f64(),
    ),
    Metric::counter(
        "refused_calls_total",
        "Calls refused because the master was overloaded.",
        |it| it.admission().map_or(0, Admission::refused),
    ),
    Metric::gauge("large_frames_bytes", "Bytes of large request frames in flight.", |it| {
        it.admission().map_or(0, Admission::large_frame_bytes)
    }),
];

static REFUSED_PEERS: [Metric<Service>; 2] = [
    Metric::counter(
        "refused_versions_total",
        "Peers refused because they speak another version of the protocol.",
        |it| it.shared().refused_versions().count(),
    ),
    Metric::counter(
        "refused_tokens_total",
        "Clients refused because they did not prove the token of this master.",
        |it| it.shared().refused_tokens().load(Ordering::Relaxed),
    ),
];

static UPTIME: [Metric<Service>; 1] =
    [Metric::gauge("uptime_seconds", "Seconds since the master started.", |it| {
        it.now().since(it.started()).as_secs()
    })];

#[cfg(test)]
mod tests {
    use mooncake_base::SystemClock;

    use super::*;
    use crate::state::Rules;

    #[test]
    fn every_sample_has_number_and_one_type_line() {
        let service = Service::new(Rules::default(), SystemClock::shared());
        let text = text(&service, true, None);
        let mut types = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let mut words = rest.split_whitespace();
                let name = words.next().unwrap().to_owned();
                if words.next() == Some("histogram") {
                    types.extend(["bucket", "sum", "count"].map(|end| format!("{name}_{end}")));
                }
                types.push(name);
            } else if !line.starts_with('#') {
                let (name, value) = line.rsplit_once(' ').unwrap();
                let name = name.split('{').next().unwrap();
                assert!(types.iter().any(|known| known == name), "{line}");
                value.parse::<f64>().expect(line);
            }
        }
        let count = types.len();
        types.sort();
        types.dedup();
        assert_eq!(types.len(), count);
    }

    #[test]
    fn upstream_names_can_be_switched_off() {
        let service = Service::new(Rules::default(), SystemClock::shared());
        let ours = text(&service, false, None);
        let names: Vec<_> = ours
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split_whitespace().next())
            .collect();
        assert!(names.len() > 40);
        for name in names {
            let is_ours = name.starts_with("mooncake_master_") || name.starts_with("process_");
            assert!(is_ours, "{name}");
        }
        assert!(text(&service, true, None).contains("master_key_count"));
    }
}
