//! The rules of membership, without clock and I/O: who is in which group, and how a view changes.
//!
//! A view changes in two steps. *Prepare* stops the members of the new view, and each reports the
//! last operation whose data it has. When all have reported, *commit* tells them the new view and
//! the last operation whose data each of them has: that one and earlier ones are finished as they
//! are, a later one is done again by the members of the new view. A member that is lost meanwhile
//! starts the change again without it.

mod group_members;
#[cfg(test)]
mod model;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use self::group_members::{GroupMembers, SlotState, Wanted};
use crate::message::{Attach, Notice, Request};

/// Most slots of a group.
pub const CAPACITY_MAX: usize = 64;

/// Messages to send, in order: the global rank, and the message.
pub(crate) type Notices = Vec<(u32, Notice)>;

/// The rules of all groups.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, Hash))]
pub(crate) struct Membership {
    processes: Processes,
    groups: BTreeMap<String, GroupMembers>,
}

/// The processes that are known, by global rank.
type Processes = BTreeMap<u32, Process>;

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
struct Process {
    incarnation: u64,
    address: String,
    /// Whether it was heard of lately.
    is_online: bool,
}

impl Membership {
    /// Handles a request of a rank. Only `Register` may come from a rank that is not known.
    pub(crate) fn handle(&mut self, rank: u32, request: Request) -> Notices {
        match request {
            Request::Register { incarnation, address, .. } => {
                let notices = self.lose(rank, true);
                self.processes.insert(rank, Process { incarnation, address, is_online: true });
                notices
            }
            Request::Ping => self.hear(rank),
            Request::Attach(attach) => self.attach(rank, &attach),
            Request::Report { group, attempt, finished } => {
                self.in_group(rank, &group, |group, slot, all| {
                    group.report(slot, attempt, finished, all)
                })
            }
            Request::Suspect { rank: suspect, incarnation } => {
                let is_current =
                    self.processes.get(&suspect).is_some_and(|it| it.incarnation == incarnation);
                if is_current && self.share_a_view(rank, suspect) {
                    self.lose(suspect, false)
                } else {
                    Notices::new()
                }
            }
            Request::Join { group } => {
                self.in_group(rank, &group, |group, slot, all| group.join(slot, all))
            }
            Request::Activate { group, slots, id } => {
                let wanted = Wanted { rank, id, slots, activates: true };
                self.in_group(rank, &group, |group, _, all| group.want(wanted, all))
            }
            Request::Deactivate { group, slots, id } => {
                let wanted = Wanted { rank, id, slots, activates: false };
                self.in_group(rank, &group, |group, _, all| group.want(wanted, all))
            }
            Request::Synchronize { group, id } => self.in_group(rank, &group, |group, _, _| {
                vec![(rank, Notice::Reply { id, answer: group.synchronize() })]
            }),
            Request::Leave { group } => {
                self.in_group(rank, &group, |group, slot, all| group.leave(slot, all))
            }
            Request::Goodbye => {
                let mut notices = self.lose(rank, true);
                notices.push((rank, Notice::Goodbye));
                notices
            }
        }
    }

    /// Returns whether a rank is known, and was heard of lately.
    pub(crate) fn is_online(&self, rank: u32) -> bool {
        self.processes.get(&rank).is_some_and(|process| process.is_online)
    }

    /// Returns whether no change of a view is in progress.
    pub(crate) fn is_settled(&self) -> bool {
        self.groups.values().all(|group| group.change.is_none())
    }

    /// Takes a rank out of the views: its process has ended (`is_gone`), or is silent.
    pub(crate) fn lose(&mut self, rank: u32, is_gone: bool) -> Notices {
        match self.processes.get_mut(&rank) {
            None => return Notices::new(),
            Some(_) if is_gone => drop(self.processes.remove(&rank)),
            Some(process) => process.is_online = false,
        }
        let mut notices = Notices::new();
        for group in self.groups.values_mut() {
            if let Some(slot) = group.slot_of(rank) {
                notices.extend(group.lose(slot, is_gone, &self.processes));
            }
        }
        self.groups.retain(|_, group| !group.slots.is_empty());
        notices
    }

    /// Takes a rank out of the views that was not heard of for too long, once.
    pub(crate) fn silence(&mut self, rank: u32) -> Notices {
        match self.processes.get(&rank) {
            Some(process) if process.is_online => self.lose(rank, false),
            _ => Notices::new(),
        }
    }

    /// A rank is heard of; one that was silent may join again.
    fn hear(&mut self, rank: u32) -> Notices {
        let mut notices = vec![(rank, Notice::Pong)];
        if let Some(process) = self.processes.get_mut(&rank)
            && !process.is_online
        {
            process.is_online = true;
            for group in self.groups.values() {
                if group.slot_of(rank).is_some() {
                    notices.extend(group.peers(&self.processes));
                }
            }
        }
        notices
    }

    fn share_a_view(&self, rank: u32, other: u32) -> bool {
        self.groups.values().any(|group| {
            let is_active = |rank| {
                group
                    .slot_of(rank)
                    .is_some_and(|slot| group.slots[&slot].state == SlotState::Active)
            };
            is_active(rank) && is_active(other)
        })
    }

    fn attach(&mut self, rank: u32, attach: &Attach) -> Notices {
        if attach.capacity > CAPACITY_MAX || attach.slot >= attach.capacity {
            let reason = format!(
                "the group has no such slot: slot={}, capacity={}",
                attach.slot, attach.capacity
            );
            return vec![(rank, Notice::Refused { group: attach.group.clone(), reason })];
        }
        if !attach.is_extension {
            let group = self.groups.entry(attach.group.clone());
            group.or_insert_with(|| GroupMembers::new(attach));
        }
        let refused =
            |reason: String| vec![(rank, Notice::Refused { group: attach.group.clone(), reason })];
        let Some(group) = self.groups.get_mut(&attach.group) else {
            return refused("no member has made the group".to_owned());
        };
        match group.attach(rank, attach, &self.processes) {
            Ok(notices) => notices,
            Err(reason) => refused(reason),
        }
    }

    fn in_group(
        &mut self,
        rank: u32,
        name: &str,
        action: impl FnOnce(&mut GroupMembers, usize, &Processes) -> Notices,
    ) -> Notices {
        let Some(group) = self.groups.get_mut(name) else { return Notices::new() };
        let Some(slot) = group.slot_of(rank) else { return Notices::new() };
        let notices = action(group, slot, &self.processes);
        self.groups.retain(|_, group| !group.slots.is_empty());
        notices
    }
}
