//! Connects the rules of an election to a lease service: a thread makes the calls, another one watches.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use mooncake_base::{
    Clock, Error, ErrorCode, Moment, Result, SystemClock,
    sync::{Condvar, Mutex},
};
use mooncake_os::threads::Threads;

use crate::{
    in_sync::MemberId,
    rules::{Answer, Election, History, Overruled, Request, Role, Step},
    service::{Hold, LeaseService, Snapshot},
    view::{Leader, Lease, View},
};

/// Duration of one watch. A connection that a firewall has forgotten is noticed after it.
const WATCH_WINDOW: Duration = Duration::from_secs(30);

/// Pause after a watch that failed.
const WATCH_PAUSE: Duration = Duration::from_millis(200);

/// One master's part in the election, carried out by threads that end with it. The lease is given back
/// when it is closed.
#[derive(Debug)]
pub struct Elector {
    shared: Arc<Shared>,
    threads: Threads,
}

/// Until when this master leads, for a check at the moment of each answer.
#[derive(Debug, Default)]
pub struct Validity {
    /// Nanoseconds since boot; 0 while the master does not lead.
    until: AtomicU64,
    view: AtomicU64,
}

/// The name of a thread, and what it does until the elector is closed.
type Task = (&'static str, fn(&Shared));

const TASKS: [Task; 2] = [("mc-lease", Shared::call), ("mc-watch", Shared::watch)];

#[derive(Debug)]
struct Shared {
    service: Arc<dyn LeaseService>,
    election: Mutex<Election>,
    /// The election has changed, or its owner closes it.
    changed: Condvar,
    is_closed: AtomicBool,
    validity: Arc<Validity>,
    /// The values that the service held when it was last asked.
    known: Mutex<Known>,
}

/// What is known of the service.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The values that it held last.
    pub snapshot: Snapshot,
    /// Why the last call failed; `None` if it succeeded.
    pub failure: Option<Error>,
    /// Number of calls that failed.
    pub failures: u64,
}

impl Elector {
    /// Starts the threads.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(service: Arc<dyn LeaseService>, election: Election) -> Result<Self> {
        let shared = Arc::new(Shared {
            service,
            election: Mutex::new(election),
            changed: Condvar::new(),
            is_closed: AtomicBool::new(false),
            validity: Arc::default(),
            known: Mutex::default(),
        });
        let elector = Self { shared, threads: Threads::unbounded() };
        for (name, task) in TASKS {
            let shared = Arc::clone(&elector.shared);
            elector.threads.spawn(name, move || task(&shared)).map_err(|source| {
                Error::internal("a thread of the election cannot be started").caused_by(source)
            })?;
        }
        Ok(elector)
    }

    /// Checks that the threads run. Without them a lease is not renewed, and none is won.
    ///
    /// # Errors
    /// A thread panicked.
    pub fn check_threads(&self) -> Result<()> {
        if self.threads.count() < TASKS.len() {
            return Err(Error::internal("a thread of the election panicked; see the log"));
        }
        Ok(())
    }

    /// The role at this moment.
    pub fn role(&self) -> Role {
        self.shared.election.lock().role(SystemClock.now())
    }

    /// What the service held when it was last asked.
    pub fn known(&self) -> Known {
        self.shared.known.lock().clone()
    }

    /// The leader that the service named when it was last asked.
    pub fn leader(&self) -> Option<Leader> {
        self.shared.known.lock().snapshot.leader.clone()
    }

    /// The highest view that the log or the service told.
    pub fn view_max(&self) -> View {
        self.shared.election.lock().view_max()
    }

    /// Address of the service for messages.
    pub fn service_address(&self) -> String {
        self.shared.service.address()
    }

    /// The check at the moment of each answer.
    pub fn validity(&self) -> Arc<Validity> {
        Arc::clone(&self.shared.validity)
    }

    /// Waits until the role is as wanted. Returns the role then, or at the deadline.
    pub fn wait_for_role(&self, is_wanted: impl Fn(Role) -> bool, deadline: Moment) -> Role {
        let mut election = self.shared.election.lock();
        loop {
            let now = SystemClock.now();
            let role = election.role(now);
            if is_wanted(role) || deadline.has_passed(now) {
                return role;
            }
            // A leadership ends by time alone, without a notification.
            let end = match role {
                Role::Leader { valid_until, .. } => valid_until.min(deadline),
                _ => deadline,
            };
            self.shared.changed.wait_for(&mut election, end.left(now));
        }
    }

    /// Writes the address at which this leader serves.
    ///
    /// # Errors
    /// This master does not lead, or the service cannot be reached.
    pub fn announce(&self, address: &str, deadline: Moment) -> Result<()> {
        let lease = self.lease()?;
        match self.shared.service.announce(&lease, address, deadline)? {
            Hold::Held => Ok(()),
            Hold::Lost => Err(not_leader()),
        }
    }

    /// Changes the members of the in-sync set.
    ///
    /// # Errors
    /// This master does not lead, or it is not known whether the set has changed; then
    /// [`required_members`](Self::required_members) has the members of both sets.
    pub fn change_in_sync(&self, members: BTreeSet<MemberId>, deadline: Moment) -> Result<()> {
        let change = self.shared.election.lock().begin_change(members, SystemClock.now())?;
        let service = &self.shared.service;
        let outcome = service.change_in_sync(&change, deadline);
        if matches!(outcome, Ok(Hold::Held)) {
            self.shared.election.lock().end_change(&change);
            return Ok(());
        }
        // The call may have been carried out although it failed, or by an earlier attempt.
        let snapshot = service.read(deadline)?;
        self.shared.record(&snapshot);
        self.shared.update(|election, now| election.observe(&snapshot, now));
        if snapshot.in_sync.as_ref() == Some(&change.to) {
            return Ok(());
        }
        outcome.and_then(|_| Err(not_leader()))
    }

    /// The members that must have a change of data before it is acknowledged.
    ///
    /// # Errors
    /// This master does not lead.
    pub fn required_members(&self) -> Result<BTreeSet<MemberId>> {
        let election = self.shared.election.lock();
        election.required_members(SystemClock.now()).ok_or_else(not_leader)
    }

    /// The members of the in-sync set, as far as they are known: a leader knows what it has changed itself
    /// before a watch tells. None if there is no set.
    pub fn in_sync_members(&self) -> BTreeSet<MemberId> {
        if let Some(members) = self.shared.election.lock().in_sync_members(SystemClock.now()) {
            return members.clone();
        }
        let known = self.shared.known.lock();
        known.snapshot.in_sync.as_ref().map(|set| set.members.clone()).unwrap_or_default()
    }

    /// Ends the leadership at once, and lets another member follow.
    pub fn resign(&self) {
        self.shared.update(|election, _| election.resign());
    }

    /// Ends the leadership, and waits until the lease is given back: the process is about to end.
    pub fn give_lease_back(&self) {
        let mut lease = None;
        self.shared.update(|election, now| {
            lease = election.lease_at_end(now);
            election.resign();
        });
        if let Some(lease) = lease {
            let deadline = SystemClock.now() + Duration::from_secs(1);
            if let Err(error) = self.shared.service.release(&lease, deadline) {
                tracing::warn!(%error, "the lease of the leader was not given back; it ends by itself");
            }
        }
    }

    /// Lets a fenced master take part again.
    pub fn restart(&self, history: History) {
        self.shared.update(|election, now| election.restart(history, now));
    }

    /// Says whether the log has all that this member has confirmed; see [`Election::set_complete`].
    pub fn set_complete(&self, is_complete: bool) {
        self.shared.update(|election, now| election.set_complete(is_complete, now));
    }

    /// Makes this master leader although the in-sync set does not name it; see [`Election::force`].
    pub fn force(&self) {
        let floor = View::of_clock(SystemTime::now());
        self.shared.update(|election, now| election.force(floor, now));
    }

    /// Returns what the present leadership disregards by an operator's word.
    pub fn overruled(&self) -> Overruled {
        self.shared.election.lock().overruled()
    }

    fn lease(&self) -> Result<Lease> {
        self.shared.election.lock().lease(SystemClock.now()).ok_or_else(not_leader)
    }
}

impl Drop for Elector {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Release);
        self.give_lease_back();
        self.shared.service.close();
        self.threads.join();
    }
}

impl Shared {
    /// Makes the calls of the election, one at a time.
    fn call(&self) {
        let mut election = self.election.lock();
        while !self.is_closed.load(Ordering::Acquire) {
            let now = SystemClock.now();
            let step = election.poll(now);
            self.publish(&election, now);
            match step {
                Step::WaitUntil(at) => {
                    self.changed.wait_for(&mut election, at.left(now));
                }
                Step::Call(call) => {
                    drop(election);
                    let answer = self.ask(&call.request, call.deadline);
                    election = self.election.lock();
                    if !self.is_closed.load(Ordering::Acquire) {
                        election.answer(call.number, answer, SystemClock.now());
                        self.publish(&election, SystemClock.now());
                        self.changed.notify_all();
                    }
                }
            }
        }
    }

    fn ask(&self, request: &Request, deadline: Moment) -> Answer {
        let service = &self.service;
        let answer = match request {
            Request::Read => service.read(deadline).map(|snapshot| {
                self.record(&snapshot);
                Answer::Snapshot(snapshot)
            }),
            Request::Acquire(bid) => service.acquire(bid, deadline).map(Answer::Acquisition),
            Request::Renew(lease) => service.renew(lease, deadline).map(Answer::Hold),
            Request::Release(lease) => service.release(lease, deadline).map(|()| Answer::Done),
            Request::MarkLost(lost) => service.mark_lost(lost, deadline).map(|()| Answer::Done),
        };
        match answer {
            Ok(answer) => {
                self.known.lock().failure = None;
                answer
            }
            Err(error) => {
                if !self.is_closed.load(Ordering::Acquire) {
                    tracing::warn!(%error, "the lease service does not answer");
                }
                let known = &mut *self.known.lock();
                (known.failure, known.failures) = (Some(error), known.failures + 1);
                Answer::Failed
            }
        }
    }

    fn record(&self, snapshot: &Snapshot) {
        self.known.lock().snapshot = snapshot.clone();
    }

    /// Hands changes of the values in the service to the election.
    fn watch(&self) {
        let mut seen = Snapshot::default();
        while !self.is_closed.load(Ordering::Acquire) {
            match self.service.watch(&seen, SystemClock.now() + WATCH_WINDOW) {
                Ok(snapshot) => {
                    if !snapshot.has_values_of(&seen) {
                        self.record(&snapshot);
                        self.update(|election, now| election.observe(&snapshot, now));
                    }
                    seen = snapshot;
                }
                Err(error) => {
                    tracing::debug!(%error, "the watch of the leader's key broke");
                    let mut election = self.election.lock();
                    if !self.is_closed.load(Ordering::Acquire) {
                        self.changed.wait_for(&mut election, WATCH_PAUSE);
                    }
                }
            }
        }
    }

    fn update(&self, change: impl FnOnce(&mut Election, Moment)) {
        let mut election = self.election.lock();
        let now = SystemClock.now();
        change(&mut election, now);
        self.publish(&election, now);
        self.changed.notify_all();
    }

    fn publish(&self, election: &Election, now: Moment) {
        match election.role(now) {
            Role::Leader { view, valid_until } => self.validity.set(view, valid_until),
            _ => self.validity.end(),
        }
    }
}

impl Validity {
    /// Returns whether this master leads in a view.
    pub fn is_valid(&self, view: View, now: Moment) -> bool {
        // The time is read first: if it is that of a later view, the view is seen, too.
        let until = self.until.load(Ordering::Acquire);
        let nanos = u64::try_from(now.since_boot().as_nanos()).unwrap_or(u64::MAX);
        nanos < until && self.view.load(Ordering::Acquire) == view.0
    }

    fn set(&self, view: View, until: Moment) {
        if self.view.load(Ordering::Relaxed) != view.0 {
            self.end();
            self.view.store(view.0, Ordering::Release);
        }
        let nanos = u64::try_from(until.since_boot().as_nanos()).unwrap_or(u64::MAX);
        self.until.store(nanos, Ordering::Release);
    }

    fn end(&self) {
        self.until.store(0, Ordering::Release);
    }
}

fn not_leader() -> Error {
    Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, "this master does not lead")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validity_is_that_of_one_view_until_its_end() {
        let at = |seconds| Moment::from_boot(Duration::from_secs(seconds));
        let validity = Validity::default();
        assert!(!validity.is_valid(View(0), at(0)));
        validity.set(View(3), at(10));
        assert!(validity.is_valid(View(3), at(9)));
        assert!(!validity.is_valid(View(2), at(9)));
        assert!(!validity.is_valid(View(3), at(10)));
        validity.set(View(4), at(20));
        assert!(!validity.is_valid(View(3), at(9)));
        validity.end();
        assert!(!validity.is_valid(View(4), at(9)));
    }
}
