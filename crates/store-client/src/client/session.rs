//! Registration with the master and heartbeats: carries out the steps that
//! [`Registration`] decides.

use std::{sync::Arc, time::Duration};

use mooncake_base::sync::{Mutex, TimedMutex, TimedMutexGuard};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock, TenantId};
use mooncake_proto::v1::{self, request::Call, response::Call as Reply};

use super::{
    ClientInner,
    mount::{self, MountedSegment},
};
use crate::protocol::{
    Announcement, HeartbeatAnswer, LogMark, LostSegments, MasterIdentity, Registered, Registration,
    RegistrationStep, Session,
};

/// Time limit of a heartbeat call.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit of settling unconfirmed puts between two heartbeats.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The client's registration at the master, shared by its threads.
#[derive(Debug, Default)]
pub(super) struct SharedSession {
    /// Held while registering or mounting, across the calls (which have deadlines), so that
    /// announcements of segments reach the master in order. Lock order: before `state`.
    announce_lock: TimedMutex<()>,
    state: Mutex<Session>,
}

/// Starts the heartbeat thread, which ends when the client is closed.
pub(super) fn start(inner: &Arc<ClientInner>) -> Result<()> {
    let inner = Arc::clone(inner);
    std::thread::Builder::new()
        .name("mc-heartbeat".to_owned())
        .spawn(move || {
            run_heartbeats(&inner);
            inner.lifetime.record_heartbeat_end();
        })
        .map(drop)
        .map_err(|source| Error::internal("cannot start the heartbeat thread").caused_by(source))
}

fn run_heartbeats(inner: &Arc<ClientInner>) {
    let mut is_reachable = true;
    let mut last_logged = SystemClock.now();
    let mut pause = inner.session.state.lock().heartbeat_pause(true);
    while inner.lifetime.sleep_or_closed(pause) {
        inner.free_expired();
        inner.log_metrics(&mut last_logged);
        let outcome = inner.heartbeat();
        if matches!(outcome, Ok(true)) {
            inner.wake_worker();
        }
        if outcome.is_ok() {
            inner.settle_some(SystemClock.now() + SETTLE_TIMEOUT);
        }
        let has_succeeded = outcome.is_ok();
        pause = inner.session.state.lock().heartbeat_pause(has_succeeded);
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
        self.session.state.lock().registrations()
    }

    /// Locks the announcement of segments.
    pub(super) fn lock_announcements(&self, deadline: Moment) -> Result<TimedMutexGuard<'_, ()>> {
        self.lifetime.check_open()?;
        self.session.announce_lock.take_within(deadline.left(SystemClock.now())).ok_or_else(|| {
            Error::new(ErrorCode::RPC_TIMEOUT, "another thread is still registering the client")
                .with("master", self.rpc.address())
        })
    }

    /// Unregisters from the master, if the master answers in time.
    pub(super) fn unregister(&self, deadline: Moment) {
        let call = Call::Unregister(v1::UnregisterRequest { caller: self.rpc.caller() });
        let times = (SystemClock.now(), deadline);
        let unregistered = self.rpc.exchange(
            call,
            times,
            |_| {},
            |answer| match answer {
                Reply::Unregister(_) => Some(()),
                _ => None,
            },
        );
        if let Err(error) = unregistered {
            tracing::debug!(client = self.lifetime.name(), %error, "could not unregister from the master");
        }
    }

    fn register_now(&self, deadline: Moment) -> Result<()> {
        let mut replaced = Vec::new();
        let registered = self.run_registration(deadline, &mut replaced);
        mount::free_in_background(replaced);
        self.session.state.lock().complete(registered?);
        Ok(())
    }

    /// Registers the client and announces its segments. Adds the segments that fresh memory has
    /// replaced to `replaced`, also in case of an error.
    fn run_registration(
        &self,
        deadline: Moment,
        replaced: &mut Vec<MountedSegment>,
    ) -> Result<Registration> {
        let refuses_ignored_tenant =
            self.config.refuses_ignored_tenant && self.config.tenant != TenantId::default();
        let mut registration =
            Registration::new(&self.session.state.lock(), refuses_ignored_tenant);
        let mut announced = Vec::new();
        loop {
            match registration.next_step() {
                RegistrationStep::Register => {
                    let answer = self.request_registration(deadline)?;
                    registration.registered(answer, self.segments.count());
                    if registration.is_first_without_tenants() && !refuses_ignored_tenant {
                        self.warn_of_ignored_tenant();
                    }
                }
                RegistrationStep::RefuseIgnoredTenant => {
                    self.unregister(deadline);
                    return Err(self.ignored_tenant_error());
                }
                RegistrationStep::Resume => {
                    announced = self.segments.all();
                    registration.announced(self.announce(
                        &announced,
                        Announcement::Resume,
                        deadline,
                    )?)?;
                }
                RegistrationStep::Replace(lost) => {
                    let lost: Vec<v1::Segment> = match lost {
                        LostSegments::All => self.segments.all(),
                        LostSegments::Some(lost) => {
                            lost.iter().map(|&at| announced[at].clone()).collect()
                        }
                    };
                    replaced.extend(self.replace_segments(&lost)?);
                    registration.replaced(self.segments.count());
                }
                RegistrationStep::AnnounceAll => {
                    announced = self.segments.all();
                    registration.announced(self.announce(
                        &announced,
                        Announcement::All,
                        deadline,
                    )?)?;
                }
                RegistrationStep::Done => return Ok(registration),
            }
        }
    }

    fn request_registration(&self, deadline: Moment) -> Result<Registered> {
        let log_mark = self.session.state.lock().log_mark();
        let call = Call::Register(v1::RegisterRequest {
            caller: self.rpc.caller(),
            name: self.lifetime.name().to_owned(),
            process: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            log_mark: log_mark.map(|LogMark { master, timeline, synced_frame }| v1::LogMark {
                master,
                timeline,
                synced_frame,
            }),
            wants_offload: self.config.wants_offload,
        });
        let response = self.rpc.call_until(call, deadline, |answer| match answer {
            Reply::Register(response) => Some(response),
            _ => None,
        })?;
        Ok(Registered {
            identity: MasterIdentity { master: response.master, timeline: response.timeline_id },
            registration: response.registration,
            heartbeat_interval: Duration::from_millis(response.heartbeat_interval_ms),
            ignores_tenants: response.ignores_tenants,
        })
    }

    /// Records how much of its log a master has on disk.
    pub(super) fn record_log_mark(&self, mark: Option<v1::LogMark>) {
        if let Some(mark) = mark {
            self.session.state.lock().record_log_mark(log_mark(mark));
        }
    }

    fn warn_of_ignored_tenant(&self) {
        let tenant = &self.config.tenant;
        if *tenant != TenantId::default() {
            tracing::warn!(
                %tenant,
                master = %self.rpc.address(),
                "the master ignores tenants: all callers share one namespace of keys; start it \
                 with --enable_multi_tenants to keep them apart"
            );
        }
    }

    fn ignored_tenant_error(&self) -> Error {
        let text = "the master ignores tenants: all callers share one namespace of keys; start it \
                    with --enable_multi_tenants, or name no tenant";
        Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE, text)
            .with("tenant", &self.config.tenant)
            .with("master", self.rpc.address())
    }

    /// Sends a heartbeat, and registers again if the master does not know the client. Returns
    /// whether the master has tasks for the client.
    fn heartbeat(&self) -> Result<bool> {
        let deadline = SystemClock.now() + HEARTBEAT_TIMEOUT.min(self.config.rpc_timeout);
        let (registration, registrations) = {
            let session = self.session.state.lock();
            (session.registration(), session.registrations())
        };
        let caller = self.rpc.caller();
        let call = Call::Heartbeat(v1::HeartbeatRequest { caller, registration });
        let response = self.rpc.call_until(call, deadline, |answer| match answer {
            Reply::Heartbeat(response) => Some(response),
            _ => None,
        })?;
        let answer = HeartbeatAnswer {
            identity: MasterIdentity { master: response.master, timeline: response.timeline_id },
            is_known: response.is_known,
            log_mark: response.log_mark.map(log_mark),
        };
        if !self.session.state.lock().heartbeat_answered(answer) {
            return Ok(response.has_tasks);
        }
        self.register_again(registrations, deadline)?;
        tracing::info!(
            client = self.lifetime.name(),
            "registered again: the master lost the client"
        );
        Ok(false)
    }

    /// Returns the sequence number of the next announcement; the caller holds the announcement
    /// lock.
    pub(super) fn next_announcement_number(&self) -> u64 {
        self.session.state.lock().next_announcement()
    }

    /// Marks the master's list of segments as uncertain, so that the next heartbeat announces all
    /// of them again.
    pub(super) fn mark_segments_uncertain(&self) {
        self.session.state.lock().mark_segments_uncertain();
    }

    /// Logs a metrics summary if that is enabled and due.
    fn log_metrics(&self, last_logged: &mut Moment) {
        let wanted = &self.config.metrics;
        let Some(interval) = wanted.report_interval.filter(|_| wanted.is_enabled) else { return };
        let now = SystemClock.now();
        if (*last_logged + interval).has_passed(now) {
            *last_logged = now;
            let summary = self.summary().trim_end().replace('\n', "; ");
            tracing::info!(target: "mooncake::metric", client = self.lifetime.name(), "{summary}");
        }
    }
}

fn log_mark(mark: v1::LogMark) -> LogMark {
    let v1::LogMark { master, timeline, synced_frame } = mark;
    LogMark { master, timeline, synced_frame }
}
