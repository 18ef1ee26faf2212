//! Registration with the master: registering, heartbeats, and registering again after the master
//! has forgotten the client.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::sync::{Mutex, TimedMutex, TimedMutexGuard};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock, TenantId};
use mooncake_proto::v1::{self, request::Call, response::Call as Reply};

use super::{ClientInner, mount};

/// Minimum heartbeat interval; the master's setting cannot go below it.
const INTERVAL_MIN: Duration = Duration::from_millis(10);

/// Maximum delay of the next heartbeat after a failed one.
const RETRY_INTERVAL_MAX: Duration = Duration::from_millis(500);

/// Time limit of a heartbeat call.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit of settling unconfirmed puts between two heartbeats.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The client's registration at the master.
#[derive(Debug, Default)]
pub(super) struct Session {
    /// Held while registering or mounting, across the calls (which have deadlines), so that
    /// announcements of segments reach the master in order. Lock order: before `state`.
    announce_lock: TimedMutex<()>,
    state: Mutex<SessionState>,
    /// Sequence number of the last announcement of segments. The master drops announcements that
    /// arrive late.
    announcements: AtomicU64,
    /// How much of its log the master had on disk, as it said last.
    log_mark: Mutex<Option<v1::LogMark>>,
}

#[derive(Debug, Default, Clone)]
struct SessionState {
    /// Id of the master; each start of a master has a new one.
    master: Bytes,
    /// Id of the journal history that a restarted master continues; empty: none.
    timeline_id: Bytes,
    interval: Duration,
    /// Number that the master gave this registration.
    registration: u64,
    /// Number of registrations so far.
    registrations: u64,
    /// Whether the master's list of this client's segments may be wrong.
    is_uncertain: bool,
}

/// Starts the heartbeat thread, which ends when the client is closed.
pub(super) fn start(inner: &Arc<ClientInner>) -> Result<()> {
    let inner = Arc::clone(inner);
    std::thread::Builder::new()
        .name("mc-heartbeat".to_owned())
        .spawn(move || {
            run_heartbeats(&inner);
            inner.shutdown.state.lock().is_heartbeat_stopped = true;
            inner.shutdown.changed.notify_all();
        })
        .map(drop)
        .map_err(|source| Error::internal("cannot start the heartbeat thread").caused_by(source))
}

fn run_heartbeats(inner: &Arc<ClientInner>) {
    let mut is_reachable = true;
    let mut last_logged = SystemClock.now();
    let mut pause = inner.interval();
    while inner.sleep_or_closed(pause) {
        inner.free_expired();
        inner.log_metrics(&mut last_logged);
        let outcome = inner.heartbeat();
        if matches!(outcome, Ok(true)) {
            inner.wake_worker();
        }
        if outcome.is_ok() {
            inner.settle_some(SystemClock.now() + SETTLE_TIMEOUT);
        }
        pause = match &outcome {
            Ok(_) => inner.interval(),
            Err(_) => inner.interval().min(RETRY_INTERVAL_MAX),
        };
        match outcome {
            Ok(_) if !is_reachable => {
                tracing::info!(client = %inner.name, "the master is reachable again")
            }
            Err(error) if is_reachable && !inner.is_closed() => {
                tracing::warn!(client = %inner.name, %error, "heartbeat failed, retrying");
            }
            _ => {}
        }
        is_reachable = pause == inner.interval();
    }
}

impl ClientInner {
    /// Registers the client.
    pub(super) fn register(&self, deadline: Moment) -> Result<()> {
        let _announcing = self.lock_announcements(deadline)?;
        self.register_now(deadline)
    }

    /// Registers again after a call found the client unknown to the master. Does nothing if another
    /// thread has registered in the meantime.
    pub(super) fn register_again(&self, registrations: u64, deadline: Moment) -> Result<()> {
        let _announcing = self.lock_announcements(deadline)?;
        if self.registrations() != registrations {
            return Ok(());
        }
        self.register_now(deadline)
    }

    /// Returns the number of registrations. Read it before a call that may find the client unknown.
    pub(super) fn registrations(&self) -> u64 {
        self.session.state.lock().registrations
    }

    /// Locks the announcement of segments.
    pub(super) fn lock_announcements(&self, deadline: Moment) -> Result<TimedMutexGuard<'_, ()>> {
        self.check_open()?;
        self.session.announce_lock.take_within(deadline.left(SystemClock.now())).ok_or_else(|| {
            Error::new(ErrorCode::RPC_TIMEOUT, "another thread is still registering the client")
                .with("master", self.link.address())
        })
    }

    /// Unregisters from the master, if the master answers in time.
    pub(super) fn unregister(&self, deadline: Moment) {
        let call = Call::Unregister(v1::UnregisterRequest { caller: Some(self.caller.clone()) });
        let last_logged = self.call_even_if_closed(call, deadline, |answer| match answer {
            Reply::Unregister(_) => Some(()),
            _ => None,
        });
        if let Err(error) = last_logged {
            tracing::debug!(client = %self.name, %error, "could not unregister from the master");
        }
    }

    fn register_now(&self, deadline: Moment) -> Result<()> {
        let call = Call::Register(v1::RegisterRequest {
            caller: Some(self.caller.clone()),
            name: self.name.clone(),
            process: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            log_mark: *self.session.log_mark.lock(),
            wants_offload: self.config.wants_offload,
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Reply::Register(response) => Some(response),
            _ => None,
        })?;
        self.check_tenant(&response, deadline)?;
        let interval = Duration::from_millis(response.heartbeat_interval_ms).max(INTERVAL_MIN);
        let replaced = match self.knows_segments(&response) {
            true => self.resume_segments(deadline)?,
            false => self.replace_all_segments()?,
        };
        let announced = self.announce_all(deadline);
        mount::free_in_background(replaced);
        announced?;
        let mut state = self.session.state.lock();
        let registrations = state.registrations + 1;
        let v1::RegisterResponse { master, timeline_id, registration, .. } = response;
        *state = SessionState {
            master,
            timeline_id,
            interval,
            registration,
            registrations,
            is_uncertain: false,
        };
        Ok(())
    }

    /// Records how much of its log a master has on disk. A mark of another master replaces the last
    /// one, which was reported when the client registered with that master.
    pub(super) fn record_log_mark(&self, mark: Option<v1::LogMark>) {
        let Some(mark) = mark else { return };
        let mut last = self.session.log_mark.lock();
        let of = |mark: &v1::LogMark| (mark.master, mark.timeline);
        let is_older =
            |last: &v1::LogMark| of(last) == of(&mark) && last.synced_frame > mark.synced_frame;
        if !last.as_ref().is_some_and(is_older) {
            *last = Some(mark);
        }
    }

    /// Checks that a master keeps the keys of this client's tenant apart from those of others, or
    /// warns at the first registration that it does not, as the settings say.
    ///
    /// # Errors
    /// The master ignores tenants. The client is not registered any more.
    fn check_tenant(&self, response: &v1::RegisterResponse, deadline: Moment) -> Result<()> {
        let tenant = &self.config.tenant;
        if !response.ignores_tenants || *tenant == TenantId::default() {
            return Ok(());
        }
        let master = self.link.address();
        if self.config.refuses_ignored_tenant {
            self.unregister(deadline);
            let text = "the master ignores tenants: all callers share one namespace of keys; start \
                        it with --enable_multi_tenants, or name no tenant";
            return Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE, text)
                .with("tenant", tenant)
                .with("master", master));
        }
        if self.registrations() == 0 {
            tracing::warn!(
                %tenant,
                %master,
                "the master ignores tenants: all callers share one namespace of keys; start it \
                 with --enable_multi_tenants to keep them apart"
            );
        }
        Ok(())
    }

    /// Sends a heartbeat. Returns whether the master has tasks for the client.
    fn heartbeat(&self) -> Result<bool> {
        let deadline = SystemClock.now() + HEARTBEAT_TIMEOUT.min(self.config.rpc_timeout);
        let state = self.session.state.lock().clone();
        let call = Call::Heartbeat(v1::HeartbeatRequest {
            caller: Some(self.caller.clone()),
            registration: state.registration,
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Reply::Heartbeat(response) => Some(response),
            _ => None,
        })?;
        if response.is_known && response.master == state.master && !state.is_uncertain {
            self.record_log_mark(response.log_mark);
            if response.timeline_id != state.timeline_id {
                self.session.state.lock().timeline_id = response.timeline_id;
            }
            return Ok(response.has_tasks);
        }
        self.register_again(state.registrations, deadline)?;
        tracing::info!(client = %self.name, "registered again: the master lost the client");
        Ok(false)
    }

    /// Returns whether the response comes from the master of the last registration, or from one
    /// that continues its history.
    fn knows_segments(&self, response: &v1::RegisterResponse) -> bool {
        let state = self.session.state.lock();
        let continues_history =
            !response.timeline_id.is_empty() && state.timeline_id == response.timeline_id;
        continues_history || state.master == response.master
    }

    /// Returns the sequence number of the next announcement; the caller holds the announcement
    /// lock.
    pub(super) fn next_announcement_number(&self) -> u64 {
        self.session.announcements.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Marks the master's list of segments as uncertain, so that the next heartbeat announces all
    /// of them again.
    pub(super) fn mark_segments_uncertain(&self) {
        self.session.state.lock().is_uncertain = true;
    }

    /// Logs a metrics summary if that is enabled and due.
    fn log_metrics(&self, last_logged: &mut Moment) {
        let wanted = &self.config.metrics;
        let Some(interval) = wanted.report_interval.filter(|_| wanted.is_enabled) else { return };
        let now = SystemClock.now();
        if (*last_logged + interval).has_passed(now) {
            *last_logged = now;
            let summary = self.summary().trim_end().replace('\n', "; ");
            tracing::info!(target: "mooncake::metric", client = %self.name, "{summary}");
        }
    }

    fn interval(&self) -> Duration {
        self.session.state.lock().interval
    }
}
