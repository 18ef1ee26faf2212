//! The attaching side of a connection: the known regions of a peer and the transfers that are
//! using them.

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
use mooncake_os::call_limit;

use crate::{
    memory::mapping::Mapping,
    transfer_entry::RemoteRange,
    transport::{
        RemoteMemory,
        shm::{
            link::Link,
            message::{RegionKind, ShmMessage},
            probe::ProvenAccess,
        },
    },
};

/// A connection to an owner and the regions that the owner announced.
#[derive(Debug)]
pub(in crate::transport::shm) struct Attachment {
    link: Link,
    /// The peer's process id, as this process sees it.
    process: i32,
    proven: ProvenAccess,
    regions: RwLock<BTreeMap<u64, Arc<RemoteRegion>>>,
    /// Regions that were withdrawn while transfers used them.
    leaving: Mutex<Vec<Arc<RemoteRegion>>>,
    queries: Mutex<PendingQueries>,
    query_done: Condvar,
    is_alive: AtomicBool,
}

#[derive(Debug, Default)]
struct PendingQueries {
    last_id: u64,
    /// The queries by id, each with its result once that has arrived.
    open: HashMap<u64, Option<QueryResult>>,
}

/// The region that contains the queried range, if any.
type QueryResult = Option<Arc<RemoteRegion>>;

/// A region of the peer.
#[derive(Debug)]
pub(super) struct RemoteRegion {
    pub(super) base: u64,
    length: u64,
    pub(super) access: AccessMode,
    users: AtomicUsize,
    is_withdrawn: AtomicBool,
    is_confirmed: AtomicBool,
}

/// The way in which a region is accessed.
#[derive(Debug)]
pub(super) enum AccessMode {
    /// The region is mapped into this process.
    Mapped(Mapping),
    /// The kernel copies between the two processes.
    Process,
    /// This transport cannot reach such memory of this peer; another path must.
    Unsupported,
    /// The region could not be mapped, for this reason.
    Failed(Error),
}

/// An RAII guard that permits access to a region. The owner's withdrawal is confirmed when the last
/// guard is dropped.
#[derive(Debug)]
pub(super) struct RegionGuard<'a> {
    attachment: &'a Attachment,
    region: Arc<RemoteRegion>,
}

impl Attachment {
    pub(super) fn new(link: Link, process: i32, proven: ProvenAccess) -> Self {
        Self {
            link,
            process,
            proven,
            regions: RwLock::default(),
            leaving: Mutex::default(),
            queries: Mutex::default(),
            query_done: Condvar::new(),
            is_alive: AtomicBool::new(true),
        }
    }

    pub(in crate::transport::shm) const fn link(&self) -> &Link {
        &self.link
    }

    pub(super) const fn process(&self) -> i32 {
        self.process
    }

    pub(super) fn is_alive(&self) -> bool {
        self.is_alive.load(Ordering::SeqCst)
    }

    /// Marks the attachment dead and wakes all waiting queries: the peer is gone or unreachable, or
    /// this side has no use for it. The connection is closed once no transfer uses it: to the owner
    /// its end means that the memory is not accessed any more.
    pub(in crate::transport::shm) fn close(&self) {
        self.is_alive.store(false, Ordering::SeqCst);
        self.shut_down_if_idle();
        // A querying thread holds this lock until it waits, so no thread misses the notification.
        drop(self.queries.lock());
        self.query_done.notify_all();
    }

    fn shut_down_if_idle(&self) {
        let is_idle = |region: &Arc<RemoteRegion>| region.users.load(Ordering::SeqCst) == 0;
        if self.regions.read().values().all(is_idle) && self.leaving.lock().iter().all(is_idle) {
            self.link.shut_down();
        }
    }

    /// Acquires access to the range; queries the owner if the region is not known yet.
    pub(super) fn acquire(&self, range: RemoteRange, deadline: Moment) -> Result<RegionGuard<'_>> {
        if let Some(found) = self.acquire_known(range) {
            return Ok(found);
        }
        // The region may be withdrawn and registered again right after the query.
        for _ in 0..2 {
            let Some(region) = self.query_owner(range, deadline)? else { break };
            if let Some(found) = self.acquire_region(region) {
                return Ok(found);
            }
        }
        let text = "the address is not in a registered range of its owner";
        Err(Error::new(ErrorCode::TRANSFER_FAIL, text)
            .with("address", format_args!("{:#x}", range.address))
            .with("length", range.length))
    }

    fn acquire_known(&self, range: RemoteRange) -> Option<RegionGuard<'_>> {
        let regions = self.regions.read();
        let (_, region) = regions.range(..=range.address).next_back()?;
        let region = region.holds(range).then(|| Arc::clone(region))?;
        drop(regions);
        self.acquire_region(region)
    }

    /// Returns the kind of memory of a range, if its region is already known.
    pub(super) fn remote_memory(&self, range: RemoteRange) -> Option<RemoteMemory> {
        let regions = self.regions.read();
        let (_, region) = regions.range(..=range.address).next_back()?;
        match region.access {
            _ if !region.holds(range) => None,
            AccessMode::Mapped(_) => Some(RemoteMemory::Mapped),
            AccessMode::Process => Some(RemoteMemory::Process),
            AccessMode::Unsupported | AccessMode::Failed(_) => None,
        }
    }

    fn acquire_region(&self, region: Arc<RemoteRegion>) -> Option<RegionGuard<'_>> {
        // Either the withdrawing or closing thread sees this user, or this user sees the withdrawal
        // or the end of the connection.
        region.users.fetch_add(1, Ordering::SeqCst);
        let found = RegionGuard { attachment: self, region };
        (found.region.is_open() && self.is_alive()).then_some(found)
    }

    /// Asks the owner for the region that contains the range and waits for the answer.
    fn query_owner(&self, range: RemoteRange, deadline: Moment) -> Result<QueryResult> {
        let mut queries = self.queries.lock();
        queries.last_id += 1;
        let id = queries.last_id;
        queries.open.insert(id, None);
        let query = ShmMessage::Query { id, address: range.address, length: range.length };
        if let Err(error) = self.link.send(query, None) {
            queries.open.remove(&id);
            return Err(peer_gone().caused_by(error));
        }
        loop {
            if queries.open.get(&id).is_some_and(Option::is_some) {
                return Ok(queries.open.remove(&id).flatten().flatten());
            }
            let left = call_limit::next_wait(deadline);
            if !self.is_alive() || left.is_zero() {
                queries.open.remove(&id);
                return Err(if left.is_zero() { deadline_passed() } else { peer_gone() });
            }
            // Bounded, so that a deadline in the far future does not overflow the clock.
            self.query_done.wait_for(&mut queries, left.min(Duration::from_secs(1)));
        }
    }

    /// Handles a message that the server thread received. Returns false if it is unexpected.
    pub(in crate::transport::shm) fn handle_message(
        &self,
        message: ShmMessage,
        file: Option<OwnedFd>,
    ) -> bool {
        match message {
            ShmMessage::Found { id, base, length, kind } => {
                let access = self.access_mode(length, kind, file);
                let region = Arc::new(RemoteRegion::new(base, length, access));
                let known = Arc::clone(&region);
                // An older region at this base was withdrawn or is the same region.
                let mut regions = self.regions.write();
                let region = match regions.get(&base) {
                    Some(old) if old.length == length && old.is_open() => Arc::clone(old),
                    _ => {
                        regions.insert(base, known);
                        region
                    }
                };
                drop(regions);
                self.complete_query(id, Some(region));
            }
            ShmMessage::Missing { id } => self.complete_query(id, None),
            ShmMessage::Withdraw { base } => self.withdraw(base),
            _ => return false,
        }
        true
    }

    fn access_mode(&self, length: u64, kind: RegionKind, file: Option<OwnedFd>) -> AccessMode {
        match (kind, file) {
            (RegionKind::Device, _) => AccessMode::Unsupported,
            (RegionKind::Shared | RegionKind::Huge, Some(file)) if self.proven.is_shared => {
                match Mapping::attach(file, length, kind == RegionKind::Huge) {
                    Ok(mapping) => AccessMode::Mapped(mapping),
                    Err(error) => AccessMode::Failed(error),
                }
            }
            _ if self.proven.is_process => AccessMode::Process,
            _ => AccessMode::Unsupported,
        }
    }

    fn complete_query(&self, id: u64, result: QueryResult) {
        if let Some(open) = self.queries.lock().open.get_mut(&id) {
            *open = Some(result);
        }
        self.query_done.notify_all();
    }

    fn withdraw(&self, base: u64) {
        let Some(region) = self.regions.write().remove(&base) else {
            self.send_confirm(base);
            return;
        };
        region.is_withdrawn.store(true, Ordering::SeqCst);
        let mut leaving = self.leaving.lock();
        leaving.retain(|region| region.users.load(Ordering::SeqCst) > 0);
        leaving.push(Arc::clone(&region));
        drop(leaving);
        self.confirm_if_idle(&region);
    }

    fn confirm_if_idle(&self, region: &RemoteRegion) {
        let is_idle = region.users.load(Ordering::SeqCst) == 0;
        if is_idle && !region.is_confirmed.swap(true, Ordering::SeqCst) {
            self.send_confirm(region.base);
        }
    }

    fn send_confirm(&self, base: u64) {
        if self.link.send(ShmMessage::Confirm { base }, None).is_err() {
            // The owner treats a closed connection as a confirmation.
            self.close();
        }
    }
}

impl RemoteRegion {
    const fn new(base: u64, length: u64, access: AccessMode) -> Self {
        Self {
            base,
            length,
            access,
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

impl RegionGuard<'_> {
    pub(super) fn region(&self) -> &RemoteRegion {
        &self.region
    }

    /// Checks between the steps of a copy whether it may continue.
    pub(super) fn check(&self, deadline: Moment) -> Result<()> {
        if !self.region.is_open() {
            let text = "the owner withdrew the range during the transfer";
            return Err(Error::new(ErrorCode::TRANSFER_FAIL, text)
                .with("address", format_args!("{:#x}", self.region.base)));
        }
        if !self.attachment.is_alive() {
            return Err(peer_gone());
        }
        if deadline.has_passed(SystemClock.now()) {
            return Err(deadline_passed());
        }
        Ok(())
    }
}

impl Drop for RegionGuard<'_> {
    fn drop(&mut self) {
        self.region.users.fetch_sub(1, Ordering::SeqCst);
        if !self.region.is_open() {
            self.attachment.confirm_if_idle(&self.region);
        }
        if !self.attachment.is_alive() {
            self.attachment.shut_down_if_idle();
        }
    }
}

pub(super) fn peer_gone() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "the process that owns the memory is gone")
}

pub(super) fn deadline_passed() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "the deadline passed before the bytes were moved")
}
