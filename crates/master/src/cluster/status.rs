//! What operators see of a member.

use std::sync::atomic::Ordering;

use mooncake_base::{Clock, SystemClock};
use mooncake_election::{Leader, LeaderAddress, Obstacle, Role};
use serde_json::{Value, json};

use super::{Cluster, counts::LogTotals};
use crate::journal::{FollowerStatus, Journal};

/// Where a member is on its way between following and leading, by upstream's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemberState {
    /// The process has just started.
    Starting,
    /// It reads its own log.
    Recovering,
    /// It has all that the leader has, or waits for a leader.
    Standby,
    /// It receives what it lacks.
    CatchingUp,
    /// It was elected and does not serve yet.
    LeaderWarmup,
    /// It leads.
    Serving,
}

impl MemberState {
    /// All states, in the order of their numbers in metrics.
    const ALL: [Self; 6] = [
        Self::Starting,
        Self::Recovering,
        Self::Standby,
        Self::CatchingUp,
        Self::LeaderWarmup,
        Self::Serving,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Recovering => "recovering",
            Self::Standby => "standby",
            Self::CatchingUp => "catching_up",
            Self::LeaderWarmup => "leader_warmup",
            Self::Serving => "serving",
        }
    }

    /// The number in metrics.
    pub(crate) fn number(self) -> usize {
        Self::ALL.iter().position(|state| *state == self).unwrap_or_default()
    }
}

/// What is known of a member and of its cluster at one moment.
#[derive(Debug, Clone)]
pub(crate) struct ClusterStatus {
    pub(crate) state: &'static str,
    pub(crate) state_number: usize,
    pub(crate) is_leader: bool,
    pub(crate) cluster: String,
    pub(crate) backend: String,
    pub(crate) member: String,
    pub(crate) address: String,
    pub(crate) leader: Option<String>,
    pub(crate) view: Option<u64>,
    /// Why this member could not lead next; empty if it could.
    pub(crate) obstacles: Vec<String>,
    pub(crate) in_sync: Vec<String>,
    /// The number of the frame that the log of this member lacks first.
    pub(crate) next_frame: u64,
    pub(crate) standbys: Vec<FollowerStatus>,
    /// Milliseconds for which the lease is certain; `None` unless this master leads.
    pub(crate) lease_ms: Option<u64>,
    pub(crate) service_error: Option<String>,
    pub(crate) service_errors: u64,
    /// How often the state has changed.
    pub(crate) transitions: u64,
    pub(crate) totals: LogTotals,
}

impl Cluster {
    /// Returns the address of the master that serves, as far as it is known.
    pub(crate) fn leader_address(&self) -> Option<String> {
        let (role, leader) = (self.elector.role(), self.elector.leader()?);
        let leader = Some(leader).filter(|leader| self.is_present(leader, role))?;
        serving_address(&leader).map(str::to_owned)
    }

    /// Returns whether a leader that the service named last may lead still. This master knows better than
    /// the service whether it is the one.
    fn is_present(&self, leader: &Leader, role: Role) -> bool {
        let is_own = serving_address(leader) == Some(self.settings.address.as_str());
        !is_own || matches!(role, Role::Leader { .. })
    }

    /// Returns what is known. The log is that of a leader.
    pub(crate) fn status(&self, journal: Option<&Journal>) -> ClusterStatus {
        let (role, known, settings) = (self.elector.role(), self.elector.known(), &self.settings);
        let (state, transitions) = *self.state.lock();
        let is_leader = state == MemberState::Serving && matches!(role, Role::Leader { .. });
        let leader = known.snapshot.leader.as_ref().filter(|leader| self.is_present(leader, role));
        let in_sync: Vec<_> =
            self.elector.in_sync_members().iter().map(ToString::to_string).collect();
        let lease_ms = match role {
            Role::Leader { valid_until, .. } => {
                u64::try_from(valid_until.left(SystemClock.now()).as_millis()).ok()
            }
            _ => None,
        };
        let member = settings.member.to_string();
        let is_named = in_sync.contains(&member);
        ClusterStatus {
            state: match role {
                Role::Candidate => "candidate",
                _ => state.name(),
            },
            state_number: state.number(),
            is_leader,
            cluster: settings.cluster.clone(),
            backend: self.elector.service_address(),
            address: settings.address.clone(),
            // The service may not have told a leader yet that it leads.
            leader: if is_leader {
                Some(settings.address.clone())
            } else {
                leader.and_then(serving_address).map(str::to_owned)
            },
            view: match role {
                Role::Leader { view, .. } => Some(view.0),
                _ => leader.map(|leader| leader.view.0),
            },
            next_frame: self.next_frame.load(Ordering::Acquire),
            obstacles: obstacles(role, state, is_named),
            in_sync,
            member,
            standbys: journal.map(|log| log.followers().status()).unwrap_or_default(),
            lease_ms,
            service_error: known.failure.map(|error| error.to_string()),
            service_errors: known.failures,
            transitions,
            totals: self.counts.snapshot(),
        }
    }
}

impl ClusterStatus {
    /// Returns whether the member could lead next, or leads.
    pub(crate) fn is_promotable(&self) -> bool {
        self.obstacles.is_empty()
    }

    /// Returns whether a standby is in the set, and can be elected. Changes wait also for one that is about to
    /// join, and may lack earlier ones.
    fn is_in_sync(&self, standby: &FollowerStatus) -> bool {
        self.in_sync.contains(&standby.member)
    }

    /// The number of connected standbys that could be elected.
    pub(crate) fn standbys_in_sync(&self) -> usize {
        let is_ready = |standby: &&FollowerStatus| standby.is_attached && self.is_in_sync(standby);
        self.standbys.iter().filter(is_ready).count()
    }

    /// The content of `/api/v1/ha`.
    pub(crate) fn to_json(&self) -> Value {
        let now = SystemClock.now();
        let standby = |follower: &FollowerStatus| {
            json!({
                "member": follower.member,
                "address": follower.address,
                "is_attached": follower.is_attached,
                "is_in_sync": self.is_in_sync(follower),
                "lag_bytes": follower.lag_bytes,
                "next_frame": follower.next_frame,
                "silent_ms": now.since(follower.heard).as_millis() as u64,
            })
        };
        json!({
            "enabled": true,
            "role": self.role(),
            "state": self.state,
            "cluster_id": self.cluster,
            "backend": self.backend,
            "member": self.member,
            "address": self.address,
            "leader_address": self.leader,
            "view_version": self.view,
            "promotable": self.is_promotable(),
            "reasons": self.obstacles,
            "in_sync": self.in_sync,
            "next_frame": self.next_frame,
            "standbys": self.standbys.iter().map(standby).collect::<Vec<_>>(),
            "lease_ms": self.lease_ms,
            "service_error": self.service_error,
        })
    }

    /// The number of the frame that a required member lacks first. The leader's own, if it has none.
    pub(crate) fn confirmed_frame(&self) -> u64 {
        let required = self.standbys.iter().filter(|standby| standby.is_required);
        required.map(|standby| standby.next_frame).fold(self.next_frame, u64::min)
    }

    /// Upstream's word for the role.
    pub(crate) const fn role(&self) -> &'static str {
        if self.is_leader { "leader" } else { "standby" }
    }

    /// Adds what every master of a cluster says of its health to upstream's fields.
    pub(crate) fn add_health(&self, health: &mut Value) {
        health["role"] = self.role().into();
        health["ha_state"] = self.state.into();
        health["service_ready"] = self.is_leader.into();
        health["leader_address"] = self.leader.clone().into();
        health["view_version"] = self.view.into();
        health["promotable"] = self.is_promotable().into();
        health["reasons"] = self.obstacles.clone().into();
    }

    /// The content of `/leader`.
    pub(crate) fn leader_json(&self) -> Value {
        json!({
            "present": self.leader.is_some(),
            "leader_address": self.leader,
            "view_version": self.view,
        })
    }
}

fn serving_address(leader: &Leader) -> Option<&str> {
    match &leader.address {
        LeaderAddress::Serving(address) => Some(address),
        LeaderAddress::Warming => None,
    }
}

fn obstacles(role: Role, state: MemberState, is_named: bool) -> Vec<String> {
    if matches!(role, Role::Leader { .. }) {
        return Vec::new();
    }
    let mut reasons = Vec::new();
    if !is_named {
        reasons.push("the in-sync set does not name this master".to_owned());
    }
    if state != MemberState::Standby {
        reasons.push(format!("it is {}", state.name().replace('_', " ")));
    }
    let obstacle = match role {
        Role::Follower(Obstacle::Unknown) => "the lease service did not answer yet",
        Role::Follower(Obstacle::MayLackChanges) => {
            "its log may lack changes that other members have"
        }
        Role::Follower(Obstacle::SetLost) => {
            "the lease service has lost the in-sync set; --force_leader on the right member ends this"
        }
        Role::Follower(Obstacle::ViewTooLow) => {
            "the lease service counts views from a lower number than the log; --force_leader ends this"
        }
        Role::Fenced { .. } => "it has just lost the lead",
        _ => return reasons,
    };
    reasons.push(obstacle.to_owned());
    reasons
}
