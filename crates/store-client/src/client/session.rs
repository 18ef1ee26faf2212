//! Being known to the master: registering, heartbeats, and coming back after it forgot us.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::sync::{Mutex, TimedMutex, TimedMutexGuard};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_proto::v1::{self, request::Call, response::Call as Reply};

use super::{ClientInner, mount};

/// The shortest time between two heartbeats, whatever the master says.
const INTERVAL_MIN: Duration = Duration::from_millis(10);

/// How long after a failed heartbeat the next one is tried, at the most.
const RETRY_INTERVAL_MAX: Duration = Duration::from_millis(500);

/// How long the master may take to answer a heartbeat.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// What we agreed on with the master.
#[derive(Debug, Default)]
pub(super) struct Session {
    /// Held by the one who registers or mounts, across its calls (which have deadlines), so that
    /// no two announce segments in a different order. Taken before `state`.
    announce_lock: TimedMutex<()>,
    state: Mutex<SessionState>,
    /// How often segments were announced: late messages are told by it.
    announcements: AtomicU64,
}

#[derive(Debug, Default, Clone)]
struct SessionState {
    /// Which master it was: changes whenever one starts anew.
    master: Bytes,
    /// The history that a restart of it goes on with; empty: none.
    timeline_id: Bytes,
    interval: Duration,
    /// Which time it came to know of us.
    registration: u64,
    /// How often we have registered.
    registrations: u64,
    /// What the master knows of our memory is uncertain.
    is_uncertain: bool,
}

/// Starts the heartbeat thread. It ends with the client.
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
        .map_err(|source| Error::internal("no thread for the heartbeat").caused_by(source))
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
        pause = match &outcome {
            Ok(_) => inner.interval(),
            Err(_) => inner.interval().min(RETRY_INTERVAL_MAX),
        };
        match outcome {
            Ok(_) if !is_reachable => tracing::info!(client = %inner.name, "the master is back"),
            Err(error) if is_reachable && !inner.is_closed() => {
                tracing::warn!(client = %inner.name, %error, "heartbeat failed; trying again");
            }
            _ => {}
        }
        is_reachable = pause == inner.interval();
    }
}

impl ClientInner {
    /// Introduces the client.
    pub(super) fn register(&self, deadline: Moment) -> Result<()> {
        let _announcing = self.lock_announcements(deadline)?;
        self.register_now(deadline)
    }

    /// Registers again because the master did not know the client in a call made before; does
    /// nothing if somebody else was faster.
    pub(super) fn register_again(&self, registrations: u64, deadline: Moment) -> Result<()> {
        let _announcing = self.lock_announcements(deadline)?;
        if self.registrations() != registrations {
            return Ok(());
        }
        self.register_now(deadline)
    }

    /// How often the client has registered: to be asked before a call that may find it unknown.
    pub(super) fn registrations(&self) -> u64 {
        self.session.state.lock().registrations
    }

    /// The right to announce segments.
    pub(super) fn lock_announcements(&self, deadline: Moment) -> Result<TimedMutexGuard<'_, ()>> {
        self.check_open()?;
        self.session.announce_lock.take_within(deadline.left(SystemClock.now())).ok_or_else(|| {
            Error::new(ErrorCode::RPC_TIMEOUT, "another thread is still registering the client")
                .with("master", self.link.address())
        })
    }

    /// Takes leave of the master, if it listens.
    pub(super) fn unregister(&self, deadline: Moment) {
        let call = Call::Unregister(v1::UnregisterRequest { caller: Some(self.caller.clone()) });
        let last_logged = self.call_even_if_closed(call, deadline, |answer| match answer {
            Reply::Unregister(_) => Some(()),
            _ => None,
        });
        if let Err(error) = last_logged {
            tracing::debug!(client = %self.name, %error, "left without the master knowing");
        }
    }

    fn register_now(&self, deadline: Moment) -> Result<()> {
        let call = Call::Register(v1::RegisterRequest {
            caller: Some(self.caller.clone()),
            name: self.name.clone(),
            process: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Reply::Register(response) => Some(response),
            _ => None,
        })?;
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

    /// Lets the master hear of us; says whether tasks wait.
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
            if response.timeline_id != state.timeline_id {
                self.session.state.lock().timeline_id = response.timeline_id;
            }
            return Ok(response.has_tasks);
        }
        self.register_again(state.registrations, deadline)?;
        tracing::info!(client = %self.name, "registered again with a master that did not know us");
        Ok(false)
    }

    /// Whether it is the master that we last agreed with, or one that goes on with its history.
    fn knows_segments(&self, response: &v1::RegisterResponse) -> bool {
        let state = self.session.state.lock();
        let continues_history =
            !response.timeline_id.is_empty() && state.timeline_id == response.timeline_id;
        continues_history || state.master == response.master
    }

    /// The number of the next announcement of segments, made while one has the turn.
    pub(super) fn next_announcement_number(&self) -> u64 {
        self.session.announcements.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What the master knows of our memory is uncertain: the next heartbeat tells it all anew.
    pub(super) fn mark_segments_uncertain(&self) {
        self.session.state.lock().is_uncertain = true;
    }

    /// Logs what was done, if that is wanted and it is time.
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
