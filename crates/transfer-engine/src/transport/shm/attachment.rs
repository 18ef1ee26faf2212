//! The attaching side: what is known of a peer's memory, and who is in the middle of using it.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex, RwLock};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};

use super::{
    link::Link,
    message::{Message, RegionKind},
    probe::Ways,
};
use crate::{choice::Footing, memory::mapping::Mapping, piece::RemoteRange};

/// A connection to an owner, and the regions that it has told us of.
#[derive(Debug)]
pub(super) struct Attachment {
    link: Link,
    /// The peer's process, as this process calls it.
    process: i32,
    ways: Ways,
    regions: RwLock<BTreeMap<u64, Arc<RemoteRegion>>>,
    questions: Mutex<Questions>,
    answered: Condvar,
    is_alive: AtomicBool,
}

#[derive(Debug, Default)]
struct Questions {
    last_id: u64,
    /// What was asked and not yet taken.
    open: HashMap<u64, Option<Answer>>,
}

type Answer = Option<Arc<RemoteRegion>>;

/// A region of the peer.
#[derive(Debug)]
pub(super) struct RemoteRegion {
    pub(super) base: u64,
    length: u64,
    pub(super) way: Way,
    users: AtomicUsize,
    is_withdrawn: AtomicBool,
    is_confirmed: AtomicBool,
}

/// How a region is reached.
#[derive(Debug)]
pub(super) enum Way {
    /// It is mapped here.
    Mapped(Mapping),
    /// The kernel copies between the two processes.
    Process,
    /// Not at all, which is no fault: this way serves no such memory of this peer.
    Unserved,
    /// Not at all, for this reason.
    Failed(Error),
}

/// Leave to touch a region. The owner's withdrawal is confirmed when the last one is gone.
#[derive(Debug)]
pub(super) struct Use<'a> {
    attachment: &'a Attachment,
    region: Arc<RemoteRegion>,
}

impl Attachment {
    pub(super) fn new(link: Link, process: i32, ways: Ways) -> Self {
        Self {
            link,
            process,
            ways,
            regions: RwLock::default(),
            questions: Mutex::default(),
            answered: Condvar::new(),
            is_alive: AtomicBool::new(true),
        }
    }

    pub(super) const fn link(&self) -> &Link {
        &self.link
    }

    pub(super) const fn process(&self) -> i32 {
        self.process
    }

    pub(super) fn is_alive(&self) -> bool {
        self.is_alive.load(Ordering::Acquire)
    }

    /// The peer is gone, or there is no talking to it any more.
    pub(super) fn die(&self) {
        self.is_alive.store(false, Ordering::Release);
        self.link.shut_down();
        // Whoever waits for an answer holds this lock until it waits, so that none is missed.
        drop(self.questions.lock());
        self.answered.notify_all();
    }

    /// Leave to touch the range; asks the owner if the region is not known yet.
    pub(super) fn enter(&self, range: RemoteRange, deadline: Moment) -> Result<Use<'_>> {
        if let Some(found) = self.enter_known(range) {
            return Ok(found);
        }
        // What is found may be withdrawn at once, and registered again.
        for _ in 0..2 {
            let Some(region) = self.ask(range, deadline)? else { break };
            if let Some(found) = self.enter_region(region) {
                return Ok(found);
            }
        }
        let text = "the address is not in a registered range of its owner";
        Err(Error::new(ErrorCode::TRANSFER_FAIL, text)
            .with("address", format_args!("{:#x}", range.address))
            .with("length", range.length))
    }

    fn enter_known(&self, range: RemoteRange) -> Option<Use<'_>> {
        let regions = self.regions.read();
        let (_, region) = regions.range(..=range.address).next_back()?;
        let region = region.holds(range).then(|| Arc::clone(region))?;
        drop(regions);
        self.enter_region(region)
    }

    /// What the memory of a range is, if its region is known already.
    pub(super) fn footing(&self, range: RemoteRange) -> Option<Footing> {
        let regions = self.regions.read();
        let (_, region) = regions.range(..=range.address).next_back()?;
        match region.way {
            _ if !region.holds(range) => None,
            Way::Mapped(_) => Some(Footing::Mapped),
            Way::Process => Some(Footing::Process),
            Way::Unserved | Way::Failed(_) => None,
        }
    }

    fn enter_region(&self, region: Arc<RemoteRegion>) -> Option<Use<'_>> {
        // Either the one who withdraws sees this user, or this user sees the withdrawal.
        region.users.fetch_add(1, Ordering::SeqCst);
        let found = Use { attachment: self, region };
        (!found.region.is_withdrawn.load(Ordering::SeqCst)).then_some(found)
    }

    /// Has the owner look the range up.
    fn ask(&self, range: RemoteRange, deadline: Moment) -> Result<Answer> {
        let mut questions = self.questions.lock();
        questions.last_id += 1;
        let id = questions.last_id;
        questions.open.insert(id, None);
        let question = Message::Ask { id, address: range.address, length: range.length };
        if let Err(error) = self.link.send(question, None) {
            questions.open.remove(&id);
            return Err(peer_gone().caused_by(error));
        }
        loop {
            if questions.open.get(&id).is_some_and(Option::is_some) {
                return Ok(questions.open.remove(&id).flatten().flatten());
            }
            let left = deadline.left(SystemClock.now());
            if !self.is_alive() || left.is_zero() {
                questions.open.remove(&id);
                return Err(if left.is_zero() { too_late() } else { peer_gone() });
            }
            // Bounded, so that a deadline at the end of time does not overflow the clock.
            self.answered.wait_for(&mut questions, left.min(Duration::from_secs(1)));
        }
    }

    /// What the thread that reads the connection brings. False if it makes no sense.
    pub(super) fn receive(&self, message: Message, file: Option<OwnedFd>) -> bool {
        match message {
            Message::Found { id, base, length, kind } => {
                let way = self.way(length, kind, file);
                let region = Arc::new(RemoteRegion::new(base, length, way));
                let known = Arc::clone(&region);
                // An older one of that place was withdrawn, or is the same.
                let mut regions = self.regions.write();
                let region = match regions.get(&base) {
                    Some(old) if old.length == length && old.is_open() => Arc::clone(old),
                    _ => {
                        regions.insert(base, known);
                        region
                    }
                };
                drop(regions);
                self.answer(id, Some(region));
            }
            Message::Missing { id } => self.answer(id, None),
            Message::Withdraw { base } => self.withdraw(base),
            _ => return false,
        }
        true
    }

    fn way(&self, length: u64, kind: RegionKind, file: Option<OwnedFd>) -> Way {
        match (kind, file) {
            (RegionKind::Device, _) => Way::Unserved,
            (RegionKind::Shared | RegionKind::Huge, Some(file)) if self.ways.is_shared => {
                match Mapping::attach(file, length, kind == RegionKind::Huge) {
                    Ok(mapping) => Way::Mapped(mapping),
                    Err(error) => Way::Failed(error),
                }
            }
            _ if self.ways.is_process => Way::Process,
            _ => Way::Unserved,
        }
    }

    fn answer(&self, id: u64, answer: Answer) {
        if let Some(open) = self.questions.lock().open.get_mut(&id) {
            *open = Some(answer);
        }
        self.answered.notify_all();
    }

    fn withdraw(&self, base: u64) {
        let Some(region) = self.regions.write().remove(&base) else {
            self.confirm(base);
            return;
        };
        region.is_withdrawn.store(true, Ordering::SeqCst);
        self.confirm_if_idle(&region);
    }

    fn confirm_if_idle(&self, region: &RemoteRegion) {
        let is_idle = region.users.load(Ordering::SeqCst) == 0;
        if is_idle && !region.is_confirmed.swap(true, Ordering::SeqCst) {
            self.confirm(region.base);
        }
    }

    fn confirm(&self, base: u64) {
        if self.link.send(Message::Confirm { base }, None).is_err() {
            // The owner takes a closed connection for a confirmation.
            self.die();
        }
    }
}

impl RemoteRegion {
    const fn new(base: u64, length: u64, way: Way) -> Self {
        Self {
            base,
            length,
            way,
            users: AtomicUsize::new(0),
            is_withdrawn: AtomicBool::new(false),
            is_confirmed: AtomicBool::new(false),
        }
    }

    pub(super) fn holds(&self, range: RemoteRange) -> bool {
        let Some(offset) = range.address.checked_sub(self.base) else { return false };
        range.length <= self.length && offset <= self.length - range.length
    }

    fn is_open(&self) -> bool {
        !self.is_withdrawn.load(Ordering::SeqCst)
    }
}

impl Use<'_> {
    pub(super) fn region(&self) -> &RemoteRegion {
        &self.region
    }

    /// CliCommand between the steps of a copy.
    pub(super) fn may_go_on(&self, deadline: Moment) -> Result<()> {
        if !self.region.is_open() {
            let text = "the owner withdrew the range during the transfer";
            return Err(Error::new(ErrorCode::TRANSFER_FAIL, text)
                .with("address", format_args!("{:#x}", self.region.base)));
        }
        if !self.attachment.is_alive() {
            return Err(peer_gone());
        }
        if deadline.has_passed(SystemClock.now()) {
            return Err(too_late());
        }
        Ok(())
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.region.users.fetch_sub(1, Ordering::SeqCst);
        if !self.region.is_open() {
            self.attachment.confirm_if_idle(&self.region);
        }
    }
}

pub(super) fn peer_gone() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "the process that holds the memory is gone")
}

pub(super) fn too_late() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "the deadline passed before the bytes were moved")
}
