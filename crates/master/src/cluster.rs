//! A master as one of several: it follows the log of the one that leads, and leads in its turn.
//!
//! The election, and which members have all that was acknowledged (the in-sync set), is the work of
//! `mooncake-election`; the log of `journal`. This module connects the two: [`member_thread`] goes from
//! following to leading and back; [`following`] receives the log of the leader, [`shipping`] sends it,
//! [`supervision`] changes the in-sync set. Reading order: [`member`], [`views`] and [`own_log`] (what a
//! member knows of itself), [`channel`], [`shipping`], [`following`], [`supervision`], [`member_thread`],
//! [`status`].
//!
//! See `docs/decisions/0037-several-masters.md`.

mod backend;
mod channel;
pub(crate) mod counts;
mod following;
mod lease_notes;
mod member;
mod member_thread;
mod own_log;
mod peer_log;
pub(crate) mod promotable;
pub(crate) mod shipping;
#[cfg(test)]
mod simulation;
pub(crate) mod status;
mod supervision;
mod views;

use std::{
    net::SocketAddr,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, SystemTime},
};

use mooncake_base::{Clock, Error, ErrorCode, Result, SystemClock, sync::Mutex};
use mooncake_election::{
    Election, Elector, History, MemberId, Timing, View, kubernetes::LeaderLabel,
};
use tokio::sync::oneshot;

use self::{
    backend::{Backend, Dialing},
    counts::LogCounts,
    member::Membership,
    peer_log::PeerLog,
    status::MemberState,
};
pub(crate) use self::{member_thread::MemberHandle, shipping::LogSource};
use crate::{config::MasterConfig, fatal::FatalError, journal::Directory, journal::LogSync};

/// What all threads of a member share.
#[derive(Debug)]
pub(crate) struct Cluster {
    elector: Elector,
    settings: MemberSettings,
    /// Set when this process cannot go on as a member.
    fatal: FatalError,
    /// Where this master is on its way between following and leading, and how often that has changed.
    state: Mutex<(MemberState, u64)>,
    /// The number of the frame that the log of this member lacks first.
    next_frame: AtomicU64,
    /// A request to hand the leadership over.
    handover: Mutex<Option<Handover>>,
    counts: Arc<LogCounts>,
    /// The log lines about peers that are refused while this master does not lead.
    refused_peers: PeerLog,
    /// Why changes were not confirmed when this master led last; `None` if they were.
    unconfirmed: Arc<Mutex<Option<Error>>>,
    dialing: Dialing,
    /// The label of the pod in Kubernetes.
    label: Option<LeaderLabel>,
}

/// The settings of a member.
#[derive(Debug, Clone)]
pub(crate) struct MemberSettings {
    /// The name of the cluster.
    pub(crate) cluster: String,
    /// The address that a leader writes into the lease service.
    pub(crate) address: String,
    /// The id of the member.
    pub(crate) member: MemberId,
    /// The duration of the leader's lease.
    pub(crate) ttl: Duration,
    /// Number of members, the leader included, that have every change before it is acknowledged.
    pub(crate) copies: usize,
    /// Time without a confirmation after which a member is taken out of the in-sync set.
    pub(crate) timeout: Duration,
    pub(crate) log_sync: LogSync,
    pub(crate) token: Option<mooncake_base::Token>,
}

/// A request to hand the leadership over.
#[derive(Debug)]
struct Handover {
    /// The address of the master that is to lead; `None`: any that can.
    to: Option<String>,
    reply: oneshot::Sender<Result<View>>,
}

impl Cluster {
    /// Takes part in the election of the cluster that the configuration names.
    ///
    /// # Errors
    /// The configuration is invalid, or the state directory cannot be read or written.
    fn join(
        backend: Backend,
        config: &MasterConfig,
        address: String,
        membership: &Membership,
    ) -> Result<Self> {
        let (seed, _) = mooncake_base::SegmentId::random().halves();
        let timing = Timing::new(config.cluster.lease_ttl)?;
        let member = MemberId::new(membership.member())?;
        let now = SystemClock.now();
        let mut election = Election::new(timing, member.clone(), membership.history(), seed, now);
        election.set_complete(membership.is_complete(), now);
        if config.cluster.is_forced {
            tracing::warn!(
                "--force_leader: this master leads as soon as no other does; changes that it lacks are lost"
            );
            election.force(View::of_clock(SystemTime::now()), now);
        }
        let elector = Elector::start(backend.lease_service, election)?;
        let settings = MemberSettings {
            cluster: config.cluster_id.clone(),
            address,
            member,
            ttl: config.cluster.lease_ttl,
            copies: config.cluster.copies,
            timeout: config.cluster.in_sync_timeout,
            log_sync: config.log_sync,
            token: config.rpc_token.clone(),
        };
        Ok(Self {
            elector,
            settings,
            fatal: FatalError::default(),
            state: Mutex::new((MemberState::Starting, 0)),
            next_frame: AtomicU64::new(1),
            handover: Mutex::default(),
            counts: Arc::default(),
            refused_peers: PeerLog::default(),
            unconfirmed: Arc::default(),
            dialing: backend.dialing,
            label: backend.label,
        })
    }

    /// Hands the leadership over to the master at an address, or to any that can lead. Returns the view
    /// of the next leader once it serves.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// This master does not lead, none can follow it, or none has in time.
    pub(crate) async fn hand_over(&self, to: Option<String>) -> Result<View> {
        let (reply, answer) = oneshot::channel();
        *self.handover.lock() = Some(Handover { to, reply });
        answer.await.unwrap_or_else(|_| Err(not_leader(None)))
    }

    /// Returns the refusal of a call by this master, which does not lead: who does, or why nobody can be
    /// elected.
    pub(crate) fn refusal(&self) -> Error {
        if let Some(leader) = self.leader_address().filter(|other| *other != self.settings.address)
        {
            return not_leader(Some(&leader));
        }
        let error = not_leader(None);
        match self.elector.known().failure {
            Some(failure) => error
                .with("lease_service", self.elector.service_address())
                .caused_by(self.unconfirmed.lock().clone().unwrap_or(failure)),
            None => error,
        }
    }

    /// Counts and logs that a peer did not prove the token to this master, which does not lead.
    pub(crate) fn record_refused_token(&self, peer: Option<SocketAddr>, error: &Error) {
        self.counts.refused_tokens.increment();
        let Some(peer) = peer else { return };
        if let Some(count) = self.refused_peers.record(SystemClock.now(), peer.ip(), error) {
            tracing::warn!(%peer, %error, count, "refused a peer: it does not show the token of this master");
        }
    }

    /// Waits for the error after which this process cannot go on.
    ///
    /// Cancel-safe.
    pub(crate) async fn ended(&self) -> Error {
        self.fatal.raised().await
    }

    /// Runs the work of a thread without which this process is no member. If it fails or panics, another
    /// member may lead, and this process ends.
    fn run_thread(&self, work: impl FnOnce() -> Result<()>) {
        // What the thread had in its hands is used by nobody afterwards: the process ends.
        let result = panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            Err(Error::internal("a thread of this member of the cluster panicked; see the log"))
        });
        if let Err(error) = result {
            self.elector.resign();
            self.fatal.raise(error);
        }
    }

    fn set_state(&self, state: MemberState) {
        let (present, changes) = &mut *self.state.lock();
        if *present != state {
            tracing::info!(from = present.name(), to = state.name(), "the state of this master");
            (*present, *changes) = (state, *changes + 1);
            if let Some(label) = &self.label {
                label.set(state == MemberState::Serving);
            }
        }
    }
}

/// Opens the state directory of a member.
///
/// # Errors
/// There is none, or another master uses it.
fn open_directory(config: &MasterConfig) -> Result<Arc<Directory>> {
    let Some((path, _)) = config.state_path() else {
        let text = "several masters need a log, so that one can follow another";
        return Err(Error::invalid(text)
            .with("option", "--state_dir")
            .with_remedy("Name a directory of this master by --state_dir."));
    };
    Directory::lock(&path).map(Arc::new)
}

/// The history that the election knows of a member.
fn history_of(views: &[mooncake_proto::standby::ViewStart]) -> History {
    views.last().map_or(History::None, |last| History::UpTo(View(last.view)))
}

/// The refusal of a call by a master that does not lead.
pub(crate) fn not_leader(leader: Option<&str>) -> Error {
    let text = "this master does not lead";
    let error = Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text);
    match leader {
        Some(leader) => error.with("leader", leader),
        None => error.with("leader", "none is known"),
    }
}
