//! The rules of one group: its slots, and how its view changes.

use std::collections::{BTreeMap, BTreeSet};

use super::{Notices, Processes};
use crate::message::{Answer, Attach, Commit, Member, Notice, Status};

/// A group: its slots, its view, and the change of the view that is in progress.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
pub(super) struct GroupMembers {
    name: String,
    declared: usize,
    capacity: usize,
    removes_lost: bool,
    pub(super) slots: BTreeMap<usize, Slot>,
    /// Slots without a process whose last one has ended or has left the group.
    vacated: BTreeSet<usize>,
    pub(super) is_founded: bool,
    attempt: u32,
    generation: u32,
    pub(super) epoch: u64,
    /// The active slots of the last view.
    pub(super) shown: Vec<bool>,
    pub(super) change: Option<Change>,
    /// Losses that `synchronize` has not reported yet.
    has_unreported_loss: bool,
    /// Changes that were asked for while another one was in progress.
    waiting: Vec<Wanted>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(super) enum SlotState {
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
pub(super) struct Slot {
    pub(super) rank: u32,
    pub(super) state: SlotState,
}

/// A change in progress.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, Hash))]
pub(super) struct Change {
    activated: BTreeSet<usize>,
    dropped: BTreeSet<usize>,
    failed: BTreeSet<usize>,
    reports: BTreeMap<usize, i64>,
    replies: Vec<(u32, u64)>,
}

/// A change that a rank asked for.
#[derive(Debug, Clone)]
#[cfg_attr(test, derive(Hash))]
pub(super) struct Wanted {
    pub(super) rank: u32,
    pub(super) id: u64,
    pub(super) slots: Vec<usize>,
    pub(super) activates: bool,
}

impl GroupMembers {
    pub(super) fn new(attach: &Attach) -> Self {
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

    pub(super) fn slot_of(&self, rank: u32) -> Option<usize> {
        self.slots.iter().find(|(_, slot)| slot.rank == rank).map(|(number, _)| *number)
    }

    pub(super) fn attach(
        &mut self,
        rank: u32,
        wish: &Attach,
        all: &Processes,
    ) -> Result<Notices, String> {
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

    pub(super) fn report(
        &mut self,
        slot: usize,
        attempt: u32,
        finished: i64,
        all: &Processes,
    ) -> Notices {
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

    pub(super) fn join(&mut self, slot: usize, all: &Processes) -> Notices {
        if let Some(slot) = self.slots.get_mut(&slot)
            && matches!(slot.state, SlotState::Inactive)
        {
            slot.state = SlotState::Awaiting;
        }
        self.peers(all)
    }

    /// Begins a change that a rank asked for, or answers why not.
    pub(super) fn want(&mut self, wanted: Wanted, all: &Processes) -> Notices {
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

    pub(super) fn synchronize(&mut self) -> Answer {
        let status = if std::mem::take(&mut self.has_unreported_loss) {
            Status::Applied
        } else {
            Status::NothingPending
        };
        Answer::new(status, self.epoch)
    }

    /// Takes a slot out because its rank has destroyed the group.
    pub(super) fn leave(&mut self, slot: usize, all: &Processes) -> Notices {
        // A lost slot is in the view too, where lost ranks stay.
        let was_active = self.active().get(slot).is_some_and(|active| *active);
        self.slots.remove(&slot);
        self.vacated.insert(slot);
        self.after_loss(slot, was_active, false, all)
    }

    /// Takes a slot out because its process has ended or is silent.
    pub(super) fn lose(&mut self, slot: usize, is_gone: bool, all: &Processes) -> Notices {
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

    pub(super) fn active(&self) -> Vec<bool> {
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
    pub(super) fn peers(&self, all: &Processes) -> Notices {
        let is_ready = |number: usize| {
            self.is_online(number, all)
                && matches!(self.slots[&number].state, SlotState::Active | SlotState::Awaiting)
        };
        let states: Vec<bool> = (0..self.capacity).map(is_ready).collect();
        let notice = || Notice::Peers { group: self.name.clone(), states: states.clone() };
        self.slots.values().map(|slot| (slot.rank, notice())).collect()
    }
}
