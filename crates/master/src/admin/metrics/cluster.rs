//! The metrics of one of several masters, on leaders and standbys.

use mooncake_base::exposition::Exposition;

use crate::cluster::status::ClusterStatus;

pub(super) fn add(out: &mut Exposition, status: &ClusterStatus) {
    let in_sync = status.standbys.iter().filter(|s| s.is_required && s.is_attached).count() as u64;
    let lag = status.standbys.iter().map(|standby| standby.lag_bytes).max().unwrap_or_default();
    out.gauge("ha_is_leader", "Whether this master leads.", u64::from(status.is_leader));
    out.gauge(
        "ha_standby_state",
        "0 starting, 1 recovering, 2 standby, 3 catching up, 4 elected, 5 serving.",
        status.state_number as u64,
    );
    out.gauge(
        "ha_promotable",
        "Whether this master could lead next, or leads.",
        u64::from(status.is_promotable()),
    );
    out.gauge(
        "ha_view_version",
        "The number of the present leadership.",
        status.view.unwrap_or_default(),
    );
    out.gauge(
        "ha_standbys_in_sync",
        "Standbys that have every change before it is acknowledged.",
        in_sync,
    );
    out.gauge("ha_oplog_standby_lag", "Bytes of changes that the slowest standby lacks.", lag);
    out.counter(
        "ha_state_transitions_total",
        "Changes of the state of this master.",
        status.transitions,
    );
    out.counter(
        "ha_lease_service_errors_total",
        "Calls to the lease service that failed.",
        status.service_errors,
    );
}
