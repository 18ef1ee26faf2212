//! The seam to a lease service.

use std::{fmt, time::Duration};

use mooncake_base::{Clock, Moment, Result, SystemClock};

use crate::{
    in_sync::InSyncSet,
    view::{Leader, Lease, OwnerToken, View},
};

/// Time limit for connecting to a service.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The values in the service at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// The leader; `None` if there is none, or its lease has ended.
    pub leader: Option<Leader>,
    /// The in-sync set; `None` if it was never written, or was lost.
    pub in_sync: Option<InSyncSet>,
    /// The service's own mark of the moment, from which a watch goes on.
    pub mark: String,
}

/// By which right an attempt may win.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// The service still holds the set of the bid, of which the candidate is a member.
    Member,
    /// The service holds no set; that of the bid is written.
    Founder,
    /// An operator says so. The set of the bid is written, whatever the service holds.
    Forced,
}

/// An attempt to become leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bid {
    /// Identifies the attempt.
    pub owner: OwnerToken,
    /// Its right.
    pub basis: Basis,
    /// The in-sync set if the attempt wins.
    pub set: InSyncSet,
}

/// A change of the in-sync set, for [`LeaseService::change_in_sync`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The lease that must be held.
    pub lease: Lease,
    /// The set that must be in the service.
    pub from: InSyncSet,
    /// The set that replaces it.
    pub to: InSyncSet,
}

/// The outcome of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquisition {
    /// The candidate is the leader of this view.
    Acquired(View),
    /// There is a leader, or the basis does not hold.
    Refused,
}

/// Whether a lease was still held when the service carried out a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The leader's key is that of the lease, and the call was carried out.
    Held,
    /// The key is absent or that of another attempt, or the set is another one. Nothing was changed.
    Lost,
}

/// A service that grants one lease to one of the masters of a cluster. Calls block, up to their
/// deadline. A call that fails may have been carried out.
///
/// Every call may run at the same time as the others; a watch delays none of them.
pub trait LeaseService: fmt::Debug + Send + Sync {
    /// Address of the service for messages, without secrets.
    fn address(&self) -> String;

    /// Returns the values of this moment.
    ///
    /// # Errors
    /// The service cannot be reached, or a value cannot be read.
    fn read(&self, deadline: Moment) -> Result<Snapshot>;

    /// Makes the candidate the leader, without an address yet, if there is none and its basis holds.
    /// One transaction.
    ///
    /// # Errors
    /// The service cannot be reached, or refuses.
    fn acquire(&self, bid: &Bid, deadline: Moment) -> Result<Acquisition>;

    /// Extends a lease by its duration.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire).
    fn renew(&self, lease: &Lease, deadline: Moment) -> Result<Hold>;

    /// Writes the address at which the leader serves.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire).
    fn announce(&self, lease: &Lease, address: &str, deadline: Moment) -> Result<Hold>;

    /// Replaces the set `from` of the change by `to` if its lease is held. One transaction.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire).
    fn change_in_sync(&self, change: &Change, deadline: Moment) -> Result<Hold>;

    /// Writes a set without members unless there is a set, so that no member without a history founds
    /// the cluster again.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire).
    fn mark_lost(&self, lost: &InSyncSet, deadline: Moment) -> Result<()>;

    /// Ends a lease; does nothing if it is not held.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire).
    fn release(&self, lease: &Lease, deadline: Moment) -> Result<()>;

    /// Returns the values as soon as they differ from those that were seen, or at the deadline.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    fn watch(&self, seen: &Snapshot, deadline: Moment) -> Result<Snapshot>;

    /// Ends the calls that run with an error, and refuses later ones.
    fn close(&self);
}

impl Bid {
    /// The lease of the attempt, which won this view.
    pub fn lease(&self, view: View) -> Lease {
        Lease { owner: self.owner, view, view_base: self.set.view_base }
    }

    /// The view of an attempt that won when the service had counted to `term`.
    pub const fn view(&self, term: u64) -> View {
        View(self.set.view_base.saturating_add(term))
    }
}

/// The view of the leader in the service, which counted to `term`.
pub(crate) fn view_of(term: u64, in_sync: Option<&InSyncSet>) -> View {
    View(in_sync.map_or(0, |set| set.view_base).saturating_add(term))
}

/// The deadline of a read after a watch: it needs a little time, although the watch has used up its own.
pub(crate) fn after_watch(deadline: Moment) -> Moment {
    deadline.max(SystemClock.now() + CONNECT_TIMEOUT)
}

impl Snapshot {
    /// Returns whether leader and set are the same.
    pub fn has_values_of(&self, other: &Self) -> bool {
        self.leader == other.leader && self.in_sync == other.in_sync
    }
}
