//! The thread that sends heartbeats, and does what is due from time to time.

use std::{sync::Arc, time::Duration};

use mooncake_base::{Clock, Error, Moment, Result, SystemClock};
use mooncake_os::threads;

use super::ClientInner;

/// Time limit of settling unconfirmed puts between two heartbeats.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts the heartbeat thread, which ends when the client is closed.
pub(super) fn start(inner: &Arc<ClientInner>) -> Result<()> {
    let inner = Arc::clone(inner);
    let run = move || {
        run_heartbeats(&inner);
        inner.lifetime.record_heartbeat_end();
    };
    threads::start_detached("mc-heartbeat", run)
        .map_err(|source| Error::internal("cannot start the heartbeat thread").caused_by(source))
}

fn run_heartbeats(inner: &Arc<ClientInner>) {
    let mut is_reachable = true;
    let mut last_logged = SystemClock.now();
    let mut pause = inner.session.heartbeat_pause(true);
    while inner.lifetime.wait_for_heartbeat(pause) {
        inner.session.free_expired();
        inner.log_metrics(&mut last_logged);
        let outcome = inner.session.heartbeat();
        if matches!(outcome, Ok(true)) {
            inner.wake_worker();
        }
        if outcome.is_ok() {
            inner.settle_some(SystemClock.now() + SETTLE_TIMEOUT);
        }
        let has_succeeded = outcome.is_ok();
        pause = inner.session.heartbeat_pause(has_succeeded);
        match outcome {
            Ok(_) if !is_reachable => {
                tracing::info!(client = inner.lifetime.name(), "the master is reachable again")
            }
            Err(error) if is_reachable && !inner.lifetime.is_closed() => {
                tracing::warn!(client = inner.lifetime.name(), %error, "heartbeat failed, retrying");
            }
            _ => {}
        }
        is_reachable = has_succeeded;
    }
}

impl ClientInner {
    /// Logs a metrics summary if that is enabled and due.
    fn log_metrics(&self, last_logged: &mut Moment) {
        let wanted = &self.config.metrics;
        if !wanted.is_enabled {
            return;
        }
        let Some(interval) = wanted.report_interval else { return };
        let now = SystemClock.now();
        if (*last_logged + interval).has_passed(now) {
            *last_logged = now;
            let summary = self.summary().trim_end().replace('\n', "; ");
            tracing::info!(target: "mooncake::metric", client = self.lifetime.name(), "{summary}");
        }
    }
}
