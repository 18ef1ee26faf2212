//! The client's session with the master: registration, heartbeats, and the segments that it lends.
//! Carries out the steps that [`Registration`] decides.

pub(crate) mod mount;
pub(crate) mod segments;

use std::{sync::Arc, time::Duration};

use mooncake_base::sync::{Mutex, TimedMutex, TimedMutexGuard};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock, TenantId};
use mooncake_proto::v1;
use mooncake_transfer_engine::Engine;

use self::segments::{MountedSegment, Segments};
use crate::{
    config::ClientConfig,
    lifetime::Lifetime,
    protocol::{
        Announcement, HeartbeatAnswer, LogMark, LostSegments, MasterIdentity, Registered,
        Registration, RegistrationStep, Session,
    },
    rpc::MasterRpc,
};

/// Time limit of a heartbeat call.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// The session of one client, shared by its threads.
pub(crate) struct ClientSession {
    config: Arc<ClientConfig>,
    engine: Engine,
    rpc: Arc<MasterRpc>,
    lifetime: Arc<Lifetime>,
    segments: Segments,
    /// Held while registering or mounting, across the calls (which have deadlines), so that
    /// announcements of segments reach the master in order. Lock order: before `state`.
    announce_lock: TimedMutex<()>,
    state: Mutex<Session>,
}

impl ClientSession {
    pub(crate) fn new(
        config: &Arc<ClientConfig>,
        engine: Engine,
        rpc: &Arc<MasterRpc>,
        lifetime: &Arc<Lifetime>,
    ) -> Self {
        Self {
            config: Arc::clone(config),
            engine,
            rpc: Arc::clone(rpc),
            lifetime: Arc::clone(lifetime),
            segments: Segments::default(),
            announce_lock: TimedMutex::default(),
            state: Mutex::default(),
        }
    }

    /// Returns the mounted segments.
    pub(crate) fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Returns the time until the next heartbeat, after one that succeeded or failed.
    pub(crate) fn heartbeat_pause(&self, has_succeeded: bool) -> Duration {
        self.state.lock().heartbeat_pause(has_succeeded)
    }

    /// Registers the client.
    pub(crate) fn register(&self, deadline: Moment) -> Result<()> {
        let _announcing = self.lock_announcements(deadline)?;
        self.register_now(deadline)
    }

    /// Registers again after a call found the client unknown to the master. Does nothing if another
    /// thread has registered in the meantime.
    pub(crate) fn register_again(&self, registrations: u64, deadline: Moment) -> Result<()> {
        let _announcing = self.lock_announcements(deadline)?;
        if self.registrations() != registrations {
            return Ok(());
        }
        self.register_now(deadline)
    }

    /// Returns the number of registrations. Read it before a call that may find the client unknown.
    pub(crate) fn registrations(&self) -> u64 {
        self.state.lock().registrations()
    }

    /// Returns the tenant that the master keeps the objects of this client under.
    pub(crate) fn tenant(&self) -> TenantId {
        if self.state.lock().ignores_tenants() {
            TenantId::default()
        } else {
            self.config.tenant.clone()
        }
    }

    /// Locks the announcement of segments.
    pub(crate) fn lock_announcements(&self, deadline: Moment) -> Result<TimedMutexGuard<'_, ()>> {
        self.lifetime.check_open()?;
        self.announce_lock.take_within(deadline.left(SystemClock.now())).ok_or_else(|| {
            Error::new(ErrorCode::RPC_TIMEOUT, "another thread is still registering the client")
                .with("master", self.rpc.address())
        })
    }

    /// Unregisters from the master, if the master answers in time.
    pub(crate) fn unregister(&self, deadline: Moment) {
        let request = v1::UnregisterRequest { caller: self.rpc.caller() };
        let unregistered = self.rpc.exchange(request, SystemClock.now(), deadline, |_| {});
        if let Err(error) = unregistered {
            tracing::debug!(client = self.lifetime.name(), %error, "could not unregister from the master");
        }
    }

    fn register_now(&self, deadline: Moment) -> Result<()> {
        let mut replaced = Vec::new();
        let registered = self.run_registration(deadline, &mut replaced);
        mount::free_in_background(replaced);
        self.state.lock().complete(registered?);
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
        let mut registration = Registration::new(&self.state.lock(), refuses_ignored_tenant);
        let mut announced = Vec::new();
        let mut lost_segments = 0;
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
                    lost_segments += lost.len();
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
                RegistrationStep::Done => {
                    if lost_segments > 0 && !registration.is_first() {
                        self.warn_of_lost_objects(lost_segments);
                    }
                    return Ok(registration);
                }
            }
        }
    }

    fn warn_of_lost_objects(&self, segments: usize) {
        tracing::warn!(
            client = self.lifetime.name(),
            master = %self.rpc.address(),
            segments,
            "the master did not know this memory: it has another log, or dropped the client; the \
             objects in it are gone, and it is mounted anew"
        );
    }

    fn request_registration(&self, deadline: Moment) -> Result<Registered> {
        let log_mark = self.state.lock().log_mark();
        let request = v1::RegisterRequest {
            caller: self.rpc.caller(),
            name: self.lifetime.name().to_owned(),
            process: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            log_mark: log_mark.map(|LogMark { master, timeline, synced_frame }| v1::LogMark {
                master,
                timeline,
                synced_frame,
            }),
            wants_offload: !self.config.disks.is_empty(),
        };
        let response = self.rpc.call_until(request, deadline)?;
        Ok(Registered {
            identity: MasterIdentity { master: response.master, timeline: response.timeline_id },
            registration: response.registration,
            heartbeat_interval: Duration::from_millis(response.heartbeat_interval_ms),
            ignores_tenants: response.ignores_tenants,
        })
    }

    /// Records how much of its log a master has on disk.
    pub(crate) fn record_log_mark(&self, mark: Option<v1::LogMark>) {
        if let Some(mark) = mark {
            self.state.lock().record_log_mark(log_mark(mark));
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
    pub(crate) fn heartbeat(&self) -> Result<bool> {
        let deadline = SystemClock.now() + HEARTBEAT_TIMEOUT.min(self.config.rpc_timeout);
        let (registration, registrations) = {
            let session = self.state.lock();
            (session.registration(), session.registrations())
        };
        let caller = self.rpc.caller();
        let request = v1::HeartbeatRequest { caller, registration };
        let response = self.rpc.call_until(request, deadline)?;
        let answer = HeartbeatAnswer {
            identity: MasterIdentity { master: response.master, timeline: response.timeline_id },
            is_known: response.is_known,
            log_mark: response.log_mark.map(log_mark),
        };
        if !self.state.lock().heartbeat_answered(answer) {
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
    pub(crate) fn next_announcement_number(&self) -> u64 {
        self.state.lock().next_announcement()
    }

    /// Marks the master's list of segments as uncertain, so that the next heartbeat announces all
    /// of them again.
    pub(crate) fn mark_segments_uncertain(&self) {
        self.state.lock().mark_segments_uncertain();
    }
}

fn log_mark(mark: v1::LogMark) -> LogMark {
    let v1::LogMark { master, timeline, synced_frame } = mark;
    LogMark { master, timeline, synced_frame }
}
