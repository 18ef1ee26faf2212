//! A lease service without I/O, for simulations: the transactions of the real services, at a time that
//! is handed in.

use std::time::Duration;

use mooncake_base::Moment;

use crate::{
    in_sync::InSyncSet,
    rules::{Answer, Request},
    service::{Acquisition, Basis, Change, Hold, Snapshot, view_of},
    view::{Leader, LeaderAddress, Lease, OwnerToken},
};

/// A service that holds one lease and one in-sync set.
#[derive(Debug)]
pub struct SimulatedService {
    ttl: Duration,
    key: Option<Key>,
    terms: u64,
    in_sync: Option<InSyncSet>,
}

/// The leader's key.
#[derive(Debug, Clone)]
struct Key {
    owner: OwnerToken,
    term: u64,
    end: Moment,
    address: LeaderAddress,
}

impl SimulatedService {
    /// Creates a service that holds nothing. Its leases last `ttl`.
    pub const fn new(ttl: Duration) -> Self {
        Self { ttl, key: None, terms: 0, in_sync: None }
    }

    /// Carries out a call of an [`Election`](crate::Election).
    pub fn carry_out(&mut self, request: &Request, now: Moment) -> Answer {
        self.expire(now);
        match request {
            Request::Read => Answer::Snapshot(self.snapshot(now)),
            Request::Acquire(bid) => {
                let holds = match bid.basis {
                    Basis::Member => self.in_sync.as_ref() == Some(&bid.set),
                    Basis::Founder => self.in_sync.is_none(),
                    Basis::Forced => true,
                };
                if self.key.is_some() || !holds {
                    return Answer::Acquisition(Acquisition::Refused);
                }
                self.terms += 1;
                self.key = Some(Key {
                    owner: bid.owner,
                    term: self.terms,
                    end: now + self.ttl,
                    address: LeaderAddress::Warming,
                });
                self.in_sync = Some(bid.set.clone());
                Answer::Acquisition(Acquisition::Acquired(bid.view(self.terms)))
            }
            Request::Renew(lease) => {
                let end = now + self.ttl;
                Answer::Hold(self.with_key(lease, |key| key.end = end))
            }
            Request::Release(lease) => {
                if self.with_key(lease, |_| ()) == Hold::Held {
                    self.key = None;
                }
                Answer::Done
            }
            Request::MarkLost(lost) => {
                self.in_sync.get_or_insert_with(|| lost.clone());
                Answer::Done
            }
        }
    }

    /// Writes the address of a leader.
    pub fn announce(&mut self, lease: &Lease, address: &str, now: Moment) -> Hold {
        self.expire(now);
        self.with_key(lease, |key| key.address = LeaderAddress::Serving(address.to_owned()))
    }

    /// Changes the in-sync set.
    pub fn change(&mut self, change: &Change, now: Moment) -> Hold {
        self.expire(now);
        if self.in_sync.as_ref() != Some(&change.from) {
            return Hold::Lost;
        }
        let hold = self.with_key(&change.lease, |_| ());
        if hold == Hold::Held {
            self.in_sync = Some(change.to.clone());
        }
        hold
    }

    /// Returns the values of this moment.
    pub fn snapshot(&mut self, now: Moment) -> Snapshot {
        self.expire(now);
        let leader = self.key.as_ref().map(|key| Leader {
            address: key.address.clone(),
            view: view_of(key.term, self.in_sync.as_ref()),
            owner: Some(key.owner),
        });
        Snapshot { leader, in_sync: self.in_sync.clone(), mark: String::new() }
    }

    /// Returns the in-sync set.
    pub const fn in_sync(&self) -> Option<&InSyncSet> {
        self.in_sync.as_ref()
    }

    /// Replaces the in-sync set, as an operator of the service can.
    pub fn set_in_sync(&mut self, set: InSyncSet) {
        self.in_sync = Some(set);
    }

    /// Loses everything, as a service without a disk does when it restarts.
    pub fn clear(&mut self) {
        *self = Self::new(self.ttl);
    }

    fn expire(&mut self, now: Moment) {
        self.key.take_if(|key| key.end.has_passed(now));
    }

    fn with_key(&mut self, lease: &Lease, change: impl FnOnce(&mut Key)) -> Hold {
        let is_held = |key: &&mut Key| key.owner == lease.owner && key.term == lease.term();
        match self.key.as_mut().filter(is_held) {
            Some(key) => {
                change(key);
                Hold::Held
            }
            None => Hold::Lost,
        }
    }
}
