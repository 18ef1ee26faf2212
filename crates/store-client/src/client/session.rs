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
use mooncake_proto::v1::{self, request::Call, response::Call as Answer};

use super::{Shared, mount};

/// The shortest time between two heartbeats, whatever the master says.
const INTERVAL_MIN: Duration = Duration::from_millis(10);

/// How long after a failed heartbeat the next one is tried, at the most.
const RETRY: Duration = Duration::from_millis(500);

/// How long the master may take to answer a heartbeat.
const PATIENCE: Duration = Duration::from_secs(5);

/// What we agreed on with the master.
#[derive(Debug, Default)]
pub(super) struct Session {
    /// Held by the one who registers or mounts, across its calls (which have deadlines), so that
    /// no two announce segments in a different order. Taken before `terms`.
    turn: TimedMutex<()>,
    terms: Mutex<Terms>,
    /// How often segments were announced: late messages are told by it.
    announcements: AtomicU64,
}

#[derive(Debug, Default, Clone)]
struct Terms {
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
    is_doubted: bool,
}

/// Starts the heartbeat thread. It ends with the client.
pub(super) fn start(shared: &Arc<Shared>) -> Result<()> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new()
        .name("mc-heartbeat".to_owned())
        .spawn(move || {
            beat(&shared);
            shared.life.state.lock().is_heart_stopped = true;
            shared.life.changed.notify_all();
        })
        .map(drop)
        .map_err(|source| Error::internal("no thread for the heartbeat").caused_by(source))
}

fn beat(shared: &Arc<Shared>) {
    let mut is_reachable = true;
    let mut told = SystemClock.now();
    let mut pause = shared.interval();
    while shared.rest(pause) {
        shared.free_left();
        shared.tell_metrics(&mut told);
        let outcome = shared.heartbeat();
        if matches!(outcome, Ok(true)) {
            shared.wake_worker();
        }
        pause = match &outcome {
            Ok(_) => shared.interval(),
            Err(_) => shared.interval().min(RETRY),
        };
        match outcome {
            Ok(_) if !is_reachable => tracing::info!(client = %shared.name, "the master is back"),
            Err(error) if is_reachable && !shared.is_closed() => {
                tracing::warn!(client = %shared.name, %error, "heartbeat failed; trying again");
            }
            _ => {}
        }
        is_reachable = pause == shared.interval();
    }
}

impl Shared {
    /// Introduces the client.
    pub(super) fn register(&self, deadline: Moment) -> Result<()> {
        let _turn = self.turn(deadline)?;
        self.register_now(deadline)
    }

    /// Registers again because the master did not know the client in a call made before; does
    /// nothing if somebody else was faster.
    pub(super) fn revive(&self, registrations: u64, deadline: Moment) -> Result<()> {
        let _turn = self.turn(deadline)?;
        if self.registrations() != registrations {
            return Ok(());
        }
        self.register_now(deadline)
    }

    /// How often the client has registered: to be asked before a call that may find it unknown.
    pub(super) fn registrations(&self) -> u64 {
        self.session.terms.lock().registrations
    }

    /// The right to announce segments.
    pub(super) fn turn(&self, deadline: Moment) -> Result<TimedMutexGuard<'_, ()>> {
        self.check_open()?;
        self.session.turn.take_within(deadline.left(SystemClock.now())).ok_or_else(|| {
            Error::new(ErrorCode::RPC_TIMEOUT, "another thread is still registering the client")
                .with("master", self.link.address())
        })
    }

    /// Takes leave of the master, if it listens.
    pub(super) fn farewell(&self, deadline: Moment) {
        let call = Call::Unregister(v1::UnregisterRequest { caller: Some(self.caller.clone()) });
        let told = self.call_anyhow(call, deadline, |answer| match answer {
            Answer::Unregister(_) => Some(()),
            _ => None,
        });
        if let Err(error) = told {
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
            Answer::Register(response) => Some(response),
            _ => None,
        })?;
        let interval = Duration::from_millis(response.heartbeat_interval_ms).max(INTERVAL_MIN);
        let replaced = match self.knows_our_memory(&response) {
            true => self.resume_segments(deadline)?,
            false => self.renew_all_segments()?,
        };
        let announced = self.announce_all(deadline);
        mount::free_soon(replaced);
        announced?;
        let mut terms = self.session.terms.lock();
        let registrations = terms.registrations + 1;
        let v1::RegisterResponse { master, timeline_id, registration, .. } = response;
        *terms =
            Terms { master, timeline_id, interval, registration, registrations, is_doubted: false };
        Ok(())
    }

    /// Lets the master hear of us; says whether tasks wait.
    fn heartbeat(&self) -> Result<bool> {
        let deadline = SystemClock.now() + PATIENCE.min(self.config.rpc_timeout);
        let terms = self.session.terms.lock().clone();
        let call = Call::Heartbeat(v1::HeartbeatRequest {
            caller: Some(self.caller.clone()),
            registration: terms.registration,
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Answer::Heartbeat(response) => Some(response),
            _ => None,
        })?;
        if response.is_known && response.master == terms.master && !terms.is_doubted {
            if response.timeline_id != terms.timeline_id {
                self.session.terms.lock().timeline_id = response.timeline_id;
            }
            return Ok(response.has_tasks);
        }
        self.revive(terms.registrations, deadline)?;
        tracing::info!(client = %self.name, "registered again with a master that did not know us");
        Ok(false)
    }

    /// Whether it is the master that we last agreed with, or one that goes on with its history.
    fn knows_our_memory(&self, response: &v1::RegisterResponse) -> bool {
        let terms = self.session.terms.lock();
        let is_heir = !response.timeline_id.is_empty() && terms.timeline_id == response.timeline_id;
        is_heir || terms.master == response.master
    }

    /// The number of the next announcement of segments, made while one has the turn.
    pub(super) fn next_announcement(&self) -> u64 {
        self.session.announcements.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What the master knows of our memory is uncertain: the next heartbeat tells it all anew.
    pub(super) fn doubt_master(&self) {
        self.session.terms.lock().is_doubted = true;
    }

    /// Logs what was done, if that is wanted and it is time.
    fn tell_metrics(&self, told: &mut Moment) {
        let wanted = &self.config.metrics;
        let Some(interval) = wanted.report_interval.filter(|_| wanted.is_told) else { return };
        let now = SystemClock.now();
        if (*told + interval).has_passed(now) {
            *told = now;
            let summary = self.summary().trim_end().replace('\n', "; ");
            tracing::info!(target: "mooncake::metric", client = %self.name, "{summary}");
        }
    }

    fn interval(&self) -> Duration {
        self.session.terms.lock().interval
    }
}
