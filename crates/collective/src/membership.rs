//! The rules of membership, without clock and I/O: who is in which group, and how a view changes.
//!
//! A view changes in two steps. *Prepare* stops the members of the new view, and each reports the
//! last operation whose data it has. When all have reported, *commit* tells them the new view and
//! the last operation whose data each of them has: that one and earlier ones are finished as they
//! are, a later one is done again by the members of the new view. A member that is lost meanwhile
//! starts the change again without it.

#[cfg(test)]
mod model;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::message::{Answer, Attach, Commit, Member, Notice, Request, Status};

/// Most slots of a group.
pub const CAPACITY_MAX: usize = 64;

/// Messages to send, in order: the global rank, and the message.
pub(crate) type Notices = Vec<(u32, Notice)>;

/// The rules of all groups.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, Hash))]
pub(crate) struct Membership {
    processes: BTreeMap<u32, Process>,
    groups: BTreeMap<String, GroupMembers>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
struct Process {
    incarnation: u64,
    address: String,
    /// Whether it was heard of lately.
    is_online: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
enum SlotState {
    /// Outside of the view.
    Inactive,
    /// Waits in `join`.
    Awaiting,
    Active,
    /// Active, and lost: it takes no part in operations.
    Lost,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
struct Slot {
    rank: u32,
    state: SlotState,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
struct GroupMembers {
    name: String,
    declared: usize,
    capacity: usize,
    removes_lost: bool,
    slots: BTreeMap<usize, Slot>,
    /// Slots without a process whose last one has ended or has left the group.
    vacated: BTreeSet<usize>,
    is_founded: bool,
    attempt: u32,
    generation: u32,
    epoch: u64,
    /// The active slots of the last view.
    shown: Vec<bool>,
    change: Option<Change>,
    /// Losses that `synchronize` has not reported yet.
    has_unreported_loss: bool,
    /// Changes that were asked for while another one was in progress.
    waiting: Vec<Wanted>,
}

/// A change in progress.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, Hash))]
struct Change {
    activated: BTreeSet<usize>,
    dropped: BTreeSet<usize>,
    failed: BTreeSet<usize>,
    reports: BTreeMap<usize, i64>,
    replies: Vec<(u32, u64)>,
}

/// A change that a rank asked for.
#[derive(Debug, Clone)]
#[cfg_attr(test, derive(Hash))]
struct Wanted {
    rank: u32,
    id: u64,
    slots: Vec<usize>,
    activates: bool,
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

type Processes = BTreeMap<u32, Process>;

impl GroupMembers {
    fn new(attach: &Attach) -> Self {
        Self {
            name: attach.group.clone(),
            declared: attach.declared,
            capacity: attach.capacity,
            removes_lost: attach.removes_lost,
            slots: BTreeMap::new(),
            vacated: BTreeSet::new(),
            is_founded: false,
            attempt: 0,
            generation: 0,
            epoch: 0,
            shown: Vec::new(),
            change: None,
            has_unreported_loss: false,
            waiting: Vec::new(),
        }
    }

    fn slot_of(&self, rank: u32) -> Option<usize> {
        self.slots.iter().find(|(_, slot)| slot.rank == rank).map(|(number, _)| *number)
    }

    fn attach(&mut self, rank: u32, wish: &Attach, all: &Processes) -> Result<Notices, String> {
        if self.capacity != wish.capacity {
            return Err(format!(
                "the members have another max_group_size: members={}, this rank={}",
                self.capacity, wish.capacity
            ));
        }
        if let Some(slot) = self.slots.get(&wish.slot)
            && (slot.rank != rank || matches!(slot.state, SlotState::Active | SlotState::Awaiting))
        {
            return Err(format!("the slot is taken: slot={}, rank={}", wish.slot, slot.rank));
        }
        if !wish.is_extension && self.is_founded {
            return Err("the group runs already: a rank that comes later is an extension \
                        (is_extension)"
                .to_owned());
        }
        self.vacated.remove(&wish.slot);
        self.slots.insert(wish.slot, Slot { rank, state: SlotState::Inactive });
        let mut notices = Notices::new();
        if wish.is_extension {
            notices.push((rank, Notice::Attached { group: self.name.clone() }));
            notices.extend(self.peers(all));
        } else {
            self.slots.insert(wish.slot, Slot { rank, state: SlotState::Active });
            if (0..self.declared).all(|slot| self.slots.contains_key(&slot)) {
                self.is_founded = true;
                notices.extend(self.begin(Change::default(), all));
            } else {
                // A rank whose time is up names those that are not there.
                notices.extend(self.peers(all));
            }
        }
        Ok(notices)
    }

    /// Begins a change, or begins it again.
    fn begin(&mut self, mut change: Change, all: &Processes) -> Notices {
        self.attempt += 1;
        change.reports.clear();
        self.change = Some(change);
        let members = self.next_members(all);
        let prepare = |member: &Member| {
            let notice = Notice::Prepare {
                group: self.name.clone(),
                attempt: self.attempt,
                members: members.clone(),
            };
            (member.rank, notice)
        };
        let mut notices: Notices = members.iter().map(prepare).collect();
        if members.is_empty() {
            notices.extend(self.commit(all));
        }
        notices
    }

    /// The members after the change.
    fn next_members(&self, all: &Processes) -> Vec<Member> {
        let activated = self.change.as_ref().map(|change| &change.activated);
        let is_member = |slot: usize, state: SlotState| {
            state == SlotState::Active || activated.is_some_and(|slots| slots.contains(&slot))
        };
        let slots = self.slots.iter().filter(|(number, slot)| is_member(**number, slot.state));
        slots
            .filter_map(|(&number, slot)| {
                let process = all.get(&slot.rank)?;
                Some(Member {
                    slot: number,
                    rank: slot.rank,
                    incarnation: process.incarnation,
                    address: process.address.clone(),
                })
            })
            .collect()
    }

    fn report(&mut self, slot: usize, attempt: u32, finished: i64, all: &Processes) -> Notices {
        if attempt != self.attempt {
            return Notices::new();
        }
        let members = self.next_members(all);
        let Some(change) = self.change.as_mut() else { return Notices::new() };
        change.reports.insert(slot, finished);
        if members.iter().all(|member| change.reports.contains_key(&member.slot)) {
            self.commit(all)
        } else {
            Notices::new()
        }
    }

    /// Ends the change: all members have stopped.
    fn commit(&mut self, all: &Processes) -> Notices {
        let members = self.next_members(all);
        let Some(change) = self.change.take() else { return Notices::new() };
        let old = change.reports.iter().filter(|(slot, _)| !change.activated.contains(slot));
        let finished = old.map(|(_, finished)| *finished).min().unwrap_or(-1);
        for slot in &change.activated {
            if let Some(slot) = self.slots.get_mut(slot) {
                slot.state = SlotState::Active;
            }
        }
        if !change.activated.is_empty() {
            self.generation += 1;
        }
        if self.removes_lost {
            for slot in self.slots.values_mut().filter(|slot| slot.state == SlotState::Lost) {
                slot.state = SlotState::Inactive;
            }
        }
        let active = self.active();
        if active != self.shown {
            self.epoch += 1;
            self.shown.clone_from(&active);
        }
        let commit = Commit {
            group: self.name.clone(),
            attempt: self.attempt,
            generation: self.generation,
            epoch: self.epoch,
            active,
            members,
            failed: change.failed.into_iter().collect(),
            finished,
        };
        let everyone = self.slots.values().map(|slot| slot.rank);
        let mut notices: Notices =
            everyone.map(|rank| (rank, Notice::Commit(commit.clone()))).collect();
        notices.extend(self.peers(all));
        for (rank, id) in change.replies {
            let mut answer = Answer::new(Status::Applied, self.epoch);
            if !change.dropped.is_empty() {
                answer.status = Status::AppliedWithDropped;
                answer.dropped = change.dropped.iter().copied().collect();
            }
            notices.push((rank, Notice::Reply { id, answer }));
        }
        for wanted in std::mem::take(&mut self.waiting) {
            notices.extend(self.want(wanted, all));
        }
        notices
    }

    fn join(&mut self, slot: usize, all: &Processes) -> Notices {
        if let Some(slot) = self.slots.get_mut(&slot)
            && matches!(slot.state, SlotState::Inactive)
        {
            slot.state = SlotState::Awaiting;
        }
        self.peers(all)
    }

    /// Begins a change that a rank asked for, or answers why not.
    fn want(&mut self, wanted: Wanted, all: &Processes) -> Notices {
        if self.change.is_some() {
            self.waiting.push(wanted);
            return Notices::new();
        }
        let mut change = Change { replies: vec![(wanted.rank, wanted.id)], ..Change::default() };
        let answer = |answer| vec![(wanted.rank, Notice::Reply { id: wanted.id, answer })];
        let rejected = |reason: String| Answer::rejected(self.epoch, reason);
        if self.slot_of(wanted.rank).is_none_or(|slot| self.slots[&slot].state != SlotState::Active)
        {
            return answer(rejected("this rank is not active in the group".to_owned()));
        }
        for &number in &wanted.slots {
            let state = self.slots.get(&number).map(|slot| slot.state);
            match state {
                Some(SlotState::Awaiting) if wanted.activates && self.is_online(number, all) => {
                    change.activated.insert(number);
                }
                Some(SlotState::Active) if wanted.activates => {}
                _ if wanted.activates => {
                    let text = format!("the rank does not wait in join_group: rank={number}");
                    return if self.may_become_ready(number, all) {
                        answer(Answer { status: Status::NotReady, ..rejected(text) })
                    } else {
                        answer(rejected(format!("{text}; its process has ended")))
                    };
                }
                Some(SlotState::Active | SlotState::Lost | SlotState::Awaiting) => {
                    change.dropped.insert(number);
                }
                _ => {}
            }
        }
        let removed = std::mem::take(&mut change.dropped);
        if change.activated.is_empty() && removed.is_empty() {
            return answer(Answer::new(Status::Applied, self.epoch));
        }
        for number in removed {
            if let Some(slot) = self.slots.get_mut(&number) {
                slot.state = SlotState::Inactive;
            }
        }
        self.begin(change, all)
    }

    fn synchronize(&mut self) -> Answer {
        let status = if std::mem::take(&mut self.has_unreported_loss) {
            Status::Applied
        } else {
            Status::NothingPending
        };
        Answer::new(status, self.epoch)
    }

    /// Takes a slot out because its rank has destroyed the group.
    fn leave(&mut self, slot: usize, all: &Processes) -> Notices {
        // A lost slot is in the view too, where lost ranks stay.
        let was_active = self.active().get(slot).is_some_and(|active| *active);
        self.slots.remove(&slot);
        self.vacated.insert(slot);
        self.after_loss(slot, was_active, false, all)
    }

    /// Takes a slot out because its process has ended or is silent.
    fn lose(&mut self, slot: usize, is_gone: bool, all: &Processes) -> Notices {
        let Some(entry) = self.slots.get_mut(&slot) else { return Notices::new() };
        let was_active = entry.state == SlotState::Active;
        entry.state = match entry.state {
            SlotState::Active | SlotState::Lost => SlotState::Lost,
            SlotState::Inactive | SlotState::Awaiting => SlotState::Inactive,
        };
        if is_gone && entry.state == SlotState::Inactive {
            self.slots.remove(&slot);
            self.vacated.insert(slot);
        }
        self.after_loss(slot, was_active, true, all)
    }

    fn after_loss(
        &mut self,
        slot: usize,
        was_active: bool,
        is_failure: bool,
        all: &Processes,
    ) -> Notices {
        if !self.is_founded {
            let absent = (0..self.declared)
                .filter(|number| number != &slot && !self.slots.contains_key(number));
            let absent: Vec<_> = absent.collect();
            let reason = if absent.is_empty() {
                format!("a rank has left while the group was made: rank={slot}")
            } else {
                format!(
                    "a rank has left while the group was made: rank={slot}, absent_ranks={absent:?}"
                )
            };
            let everyone = self.slots.values().map(|slot| slot.rank);
            let refused =
                |rank| (rank, Notice::Refused { group: self.name.clone(), reason: reason.clone() });
            let notices = everyone.map(refused).collect();
            self.slots.clear();
            return notices;
        }
        let mut change = self.change.take();
        let was_to_be = change.as_mut().is_some_and(|change| change.activated.remove(&slot));
        if !was_active && !was_to_be {
            self.change = change;
            return self.peers(all);
        }
        let mut change = change.unwrap_or_default();
        if was_to_be {
            change.dropped.insert(slot);
        }
        if was_active && is_failure {
            change.failed.insert(slot);
            self.has_unreported_loss = true;
        }
        self.begin(change, all)
    }

    fn active(&self) -> Vec<bool> {
        let is_active = |slot: &Slot| matches!(slot.state, SlotState::Active | SlotState::Lost);
        (0..self.capacity).map(|number| self.slots.get(&number).is_some_and(is_active)).collect()
    }

    fn is_online(&self, slot: usize, all: &Processes) -> bool {
        let rank = self.slots.get(&slot).map(|slot| slot.rank);
        rank.and_then(|rank| all.get(&rank)).is_some_and(|process| process.is_online)
    }

    /// Returns whether a slot whose rank does not wait in `join` may soon have one that does.
    fn may_become_ready(&self, slot: usize, all: &Processes) -> bool {
        match self.slots.get(&slot) {
            Some(entry) => all.contains_key(&entry.rank),
            None => !self.vacated.contains(&slot),
        }
    }

    /// Tells everyone which ranks are reachable and active, or wait.
    fn peers(&self, all: &Processes) -> Notices {
        let is_ready = |number: usize| {
            self.is_online(number, all)
                && matches!(self.slots[&number].state, SlotState::Active | SlotState::Awaiting)
        };
        let states: Vec<bool> = (0..self.capacity).map(is_ready).collect();
        let notice = || Notice::Peers { group: self.name.clone(), states: states.clone() };
        self.slots.values().map(|slot| (slot.rank, notice())).collect()
    }
}
