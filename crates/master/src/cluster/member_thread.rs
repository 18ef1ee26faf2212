//! The thread that takes a member from following to leading and back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Clock, Error, ErrorCode, Result, SystemClock};
use mooncake_election::{History, LeaderAddress, MemberId, Obstacle, Role, View};
use mooncake_os::threads::Threads;

use super::{
    Cluster, Handover, LogSource, MemberSettings,
    backend::Backend,
    following::{Followed, Following},
    lease_notes::LeaseTeller,
    member::Membership,
    not_leader, open_directory,
    own_log::{self, NewTerm},
    status::MemberState,
    supervision::{Supervision, can_take_over, others},
};
use crate::{
    config::MasterConfig,
    journal::{Directory, FollowerStatus, Journal, OnLogFailure, RecoveredJournal, StandbyLog},
    server::{QuotaSource, RunningService, Server},
    service::{Leadership, Service},
};

/// Time between two looks of a leader at its standbys.
const TICK: Duration = Duration::from_millis(20);

/// Time between two looks of a follower at its role, in case nothing tells.
const FOLLOWER_TICK: Duration = Duration::from_secs(1);

/// Time in which another master must serve after a hand-over.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time in which the records of resting memory must be at the standbys before a hand-over. Without them,
/// puts wait for longer at the next leader.
const REST_TIMEOUT: Duration = Duration::from_millis(300);

/// Pause before an address is announced again.
const ANNOUNCE_PAUSE: Duration = Duration::from_millis(50);

/// The handle of a member and its thread. Dropping it ends the member: a leader gives its lease back.
#[derive(Debug)]
pub(crate) struct MemberHandle {
    cluster: Arc<Cluster>,
    is_ended: Arc<AtomicBool>,
    threads: Threads,
}

#[derive(Debug)]
struct MemberThread {
    cluster: Arc<Cluster>,
    server: Arc<Server>,
    directory: Arc<Directory>,
    is_ended: Arc<AtomicBool>,
}

/// Why a leader stops leading.
#[derive(Debug)]
enum EndOfTerm {
    /// The lease is lost, or the process ends.
    Lost,
    /// A standby takes over.
    HandedOver(Handover),
}

impl MemberHandle {
    /// Joins the cluster, and follows or leads from now on. Calls are answered by `server` while this
    /// master leads. Must be called within the runtime.
    ///
    /// # Errors
    /// The configuration is invalid, or the state directory cannot be used.
    pub(crate) fn start(
        server: Arc<Server>,
        config: &MasterConfig,
        address: String,
    ) -> Result<Self> {
        let directory = open_directory(config)?;
        Self::start_with(Backend::of(config)?, server, directory, address)
    }

    fn start_with(
        backend: Backend,
        server: Arc<Server>,
        directory: Arc<Directory>,
        address: String,
    ) -> Result<Self> {
        let membership = Membership::open(Arc::clone(&directory))?;
        let cluster = Arc::new(Cluster::join(backend, server.config(), address, &membership)?);
        tracing::info!(
            member = membership.member(),
            address = cluster.settings.address,
            lease_service = cluster.elector.service_address(),
            "this master is a member of a cluster"
        );
        server.set_cluster(Arc::clone(&cluster));
        let is_ended = Arc::new(AtomicBool::new(false));
        let mut work = MemberThread {
            cluster: Arc::clone(&cluster),
            server,
            directory,
            is_ended: Arc::clone(&is_ended),
        };
        let shared = Arc::clone(&cluster);
        let run = move || shared.run_thread(|| work.run(membership));
        let threads = Threads::new(1);
        threads.spawn("mc-cluster", run).map_err(|source| {
            Error::internal("the thread of a member cannot be started").caused_by(source)
        })?;
        Ok(Self { cluster, is_ended, threads })
    }

    /// Returns what the threads of the member share.
    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }
}

impl Drop for MemberHandle {
    fn drop(&mut self) {
        self.threads.stop(|| {
            self.is_ended.store(true, Ordering::Release);
            self.cluster.elector.resign();
        });
        // What shares the election may live longer.
        self.cluster.elector.give_lease_back();
        if let Some(label) = &self.cluster.label {
            label.close();
        }
    }
}

impl MemberThread {
    fn run(&mut self, membership: Membership) -> Result<()> {
        let mut membership = membership;
        while !self.is_ended() {
            let log = self.open_log(&mut membership)?;
            let following = Following::start(Arc::clone(&self.cluster), log, membership)?;
            let elected = self.wait_until_elected()?;
            let Followed { log, membership: members, upkeep } = following.stop()?;
            let led = elected.map(|view| self.lead(view, log, members));
            // A snapshot of the standby may still be on its way to the disk.
            upkeep.join();
            membership = match led {
                Some(membership) => membership?,
                None => return Ok(()),
            };
            self.cluster.elector.restart(membership.history());
        }
        Ok(())
    }

    fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    fn open_log(&self, membership: &mut Membership) -> Result<StandbyLog> {
        self.cluster.set_state(MemberState::Recovering);
        let sync = self.cluster.settings.log_sync;
        let log = own_log::open(Arc::clone(&self.directory), sync, membership)?;
        if !membership.is_complete() {
            self.cluster.elector.set_complete(false);
        }
        self.cluster.next_frame.store(log.place().1, Ordering::Release);
        self.cluster.set_state(MemberState::Standby);
        Ok(log)
    }

    /// Waits until this member leads; `None` at the end of the process.
    fn wait_until_elected(&self) -> Result<Option<View>> {
        let mut last = None;
        loop {
            let is_wanted =
                |role| self.is_ended() || matches!(role, Role::Leader { .. } | Role::Fenced { .. });
            let elector = &self.cluster.elector;
            let role = elector.wait_for_role(is_wanted, SystemClock.now() + FOLLOWER_TICK);
            if let Some(handover) = self.cluster.handover.lock().take() {
                refuse(handover, not_leader(None));
            }
            elector.check_threads()?;
            match role {
                _ if self.is_ended() => return Ok(None),
                Role::Leader { view, .. } => return Ok(Some(view)),
                Role::Fenced { view } => elector.restart(History::UpTo(view)),
                Role::Follower(obstacle) if last != Some(obstacle) => {
                    last = Some(obstacle);
                    self.log_obstacle(obstacle);
                }
                Role::Follower(_) | Role::Candidate => {}
            }
        }
    }

    /// Logs what an operator must know to choose a leader.
    fn log_obstacle(&self, obstacle: Obstacle) {
        if matches!(obstacle, Obstacle::SetLost | Obstacle::ViewTooLow) {
            tracing::error!(
                member = %self.cluster.settings.member,
                next_frame = self.cluster.next_frame.load(Ordering::Acquire),
                "nobody is elected: the lease service has lost what it knew of this cluster; start the \
                 member with the highest next_frame with --force_leader"
            );
        }
    }

    /// Leads until the lease is lost, handed over or given back.
    fn lead(
        &mut self,
        view: View,
        log: StandbyLog,
        mut membership: Membership,
    ) -> Result<Membership> {
        let began = SystemClock.now();
        self.cluster.set_state(MemberState::LeaderWarmup);
        self.cluster.unconfirmed.lock().take();
        // Before anything is answered: the members are those that the election was won with.
        let Ok(required) = self.cluster.elector.required_members() else { return Ok(membership) };
        let term = NewTerm {
            view,
            required: others(&self.cluster.settings.member, &required),
            overruled: self.cluster.elector.overruled(),
            clock: SystemClock::shared(),
        };
        let quotas =
            if membership.views().is_empty() { QuotaSource::File } else { QuotaSource::Log };
        let recovered = own_log::lead(log, &mut membership, term)?;
        self.cluster.elector.set_complete(true);
        let service = self.make_service(view, recovered, quotas)?;
        let source = Arc::new(LogSource::new(
            Arc::clone(&service),
            view,
            membership.views(),
            membership.member().to_owned(),
            self.cluster.settings.token.clone(),
            Arc::clone(&self.cluster.counts),
        ));
        let running = self.server.start_service(Arc::clone(&service), Some(Arc::clone(&source)))?;
        tracing::info!(
            %view, milliseconds = SystemClock.now().since(began).as_millis(), "this master leads"
        );
        let mut leases = LeaseTeller::default();
        let outcome = self.serve(&service, &mut leases);
        if matches!(outcome, Ok(EndOfTerm::HandedOver(_))) {
            self.server.drain(&running);
            leases.tell(&service);
            service.shared().hand_rest_over(REST_TIMEOUT);
        }
        self.end_term(&service, &source, running);
        match outcome? {
            EndOfTerm::Lost => {}
            EndOfTerm::HandedOver(handover) => self.await_successor(view, handover),
        }
        Ok(membership)
    }

    fn make_service(
        &self,
        view: View,
        recovered: RecoveredJournal,
        quotas: QuotaSource,
    ) -> Result<Arc<Service>> {
        let mut recovered = recovered;
        // Without a log there is nothing to ship.
        recovered.journal = recovered.journal.with_failure_policy(OnLogFailure::Stop);
        let (service, restored) = self.server.make_service(recovered, quotas)?;
        tracing::info!(
            segments = restored.segments,
            objects = restored.objects,
            conflicts = restored.conflicts,
            "took the state of the log over"
        );
        let validity = self.cluster.elector.validity();
        let unconfirmed = Arc::clone(&self.cluster.unconfirmed);
        service.shared().set_leadership(Leadership { view, validity, unconfirmed });
        Ok(Arc::new(service))
    }

    /// Announces this master, and keeps the in-sync set right while it leads.
    fn serve(&self, service: &Service, leases: &mut LeaseTeller) -> Result<EndOfTerm> {
        let cluster = &*self.cluster;
        let journal = service.shared().journal().ok_or_else(|| Error::internal("no log"))?;
        let MemberSettings { member, copies, timeout, .. } = &cluster.settings;
        let mut supervision = Supervision::new(member.clone(), *copies, *timeout);
        let mut is_announced = false;
        while !self.is_ended() {
            if let Some(error) = service.shared().fatal().get().cloned() {
                return Err(error);
            }
            cluster.elector.check_threads()?;
            cluster.next_frame.store(journal.end_frame(), Ordering::Release);
            leases.step(service, SystemClock.now());
            if supervision.step(cluster, journal).is_err() {
                return Ok(EndOfTerm::Lost);
            }
            if !is_announced {
                is_announced = self.announce();
            }
            if let Some(handover) = cluster.handover.lock().take() {
                match self.prepare_handover(journal, &handover) {
                    Ok(()) => return Ok(EndOfTerm::HandedOver(handover)),
                    Err(error) => refuse(handover, error),
                }
            }
            let is_over = |role| self.is_ended() || !matches!(role, Role::Leader { .. });
            let pause = if is_announced { TICK } else { ANNOUNCE_PAUSE };
            let role = cluster.elector.wait_for_role(is_over, SystemClock.now() + pause);
            if !matches!(role, Role::Leader { .. }) {
                tracing::warn!("this master has lost the lead");
                return Ok(EndOfTerm::Lost);
            }
        }
        Ok(EndOfTerm::Lost)
    }

    /// Writes the address into the lease service. Returns whether it is there.
    fn announce(&self) -> bool {
        let settings = &self.cluster.settings;
        let deadline = SystemClock.now() + settings.ttl / 3;
        match self.cluster.elector.announce(&settings.address, deadline) {
            Ok(()) => {
                self.cluster.set_state(MemberState::Serving);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the address of this master was not announced");
                false
            }
        }
    }

    /// Leaves a standby as the only one that can follow: this master takes no part in the election until
    /// another leads, or a while has passed.
    fn prepare_handover(&self, journal: &Journal, handover: &Handover) -> Result<()> {
        let cluster = &*self.cluster;
        let standbys = journal.followers().status();
        let set = cluster.elector.required_members()?;
        let can_lead = |standby: &&FollowerStatus| can_take_over(standby, &set);
        let is_meant = |address: &str| handover.to.as_deref().is_none_or(|to| to == address);
        let next = standbys.iter().filter(can_lead).find(|standby| is_meant(&standby.address));
        let Some(next) = next else {
            let known: Vec<_> = standbys.iter().filter(can_lead).map(|s| &s.address[..]).collect();
            let text = "no standby in sync can take over";
            return Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text)
                .with("asked_for", handover.to.as_deref().unwrap_or("any"))
                .with("in_sync", known.join(", ")));
        };
        tracing::info!(to = next.address, "handing the lead over");
        let members = [cluster.settings.member.clone(), MemberId::new(&next.member)?].into();
        if set == members {
            return Ok(());
        }
        cluster.elector.change_in_sync(members, SystemClock.now() + cluster.settings.ttl / 3)
    }

    fn end_term(&self, service: &Service, source: &LogSource, running: RunningService) {
        // From here on nothing is answered any more.
        service.shared().end(self.cluster.refusal());
        source.close();
        self.server.stop_service(running);
        // Calls that still hold the service write nothing any more.
        if let Some(journal) = service.shared().journal() {
            journal.retire();
        }
        self.cluster.elector.resign();
        self.cluster.set_state(MemberState::Standby);
    }

    /// Answers a hand-over once the next leader serves.
    fn await_successor(&self, view: View, handover: Handover) {
        let elector = &self.cluster.elector;
        let serving = || {
            let leader = elector.leader()?;
            let is_serving = matches!(leader.address, LeaderAddress::Serving(_));
            (is_serving && leader.view > view).then_some(leader.view)
        };
        let deadline = SystemClock.now() + HANDOVER_TIMEOUT;
        let is_wanted = |_| self.is_ended() || serving().is_some();
        elector.wait_for_role(is_wanted, deadline);
        let answer = serving().ok_or_else(|| {
            let text = "the lead was given up, and no other master serves yet";
            Error::new(ErrorCode::RPC_TIMEOUT, text)
        });
        // The caller may have gone.
        let _ = handover.reply.send(answer);
    }
}

fn refuse(handover: Handover, error: Error) {
    // The caller may have gone.
    let _ = handover.reply.send(Err(error));
}

#[cfg(test)]
mod tests;
