//! Queue pairs, registrations and completions of the simulated fabric: the rules, without the types of the
//! library.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use rdma_sys::{ibv_qp_state as state, ibv_wc_status as status};

use super::exported::ExportedBytes;
use crate::{Gid, Operation};

/// Queue pairs, completion queues and registrations of all devices.
#[derive(Debug, Default)]
pub(super) struct Queues {
    queue_pairs: HashMap<u32, FakeQueuePair>,
    completions: HashMap<u32, CompletionState>,
    regions: HashMap<u32, RegionState>,
    /// The last number that was given out; all kinds share it.
    last_number: u32,
    /// A queue pair gets the lowest number that no other one has.
    pub(super) reuses_numbers: bool,
}

/// The lowest number of a queue pair where numbers are used again.
const FIRST_REUSED: u32 = 17;

/// What requests need to know about devices and the network.
pub(super) trait Network {
    /// Returns whether a queue pair sends and receives: its link is up, and the port has its address.
    fn carries(&self, queue_pair: &FakeQueuePair) -> bool;

    /// Returns the identifier of the port of a device.
    fn lid(&self, device: usize) -> u16;
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct FakeQueuePair {
    pub(super) device: usize,
    /// Address that it sends from, and its entry in the table of the port.
    pub(super) gid: Gid,
    pub(super) gid_index: u8,
    pub(super) completions: u32,
    pub(super) capacity: u32,
    pub(super) state: state::Type,
    pub(super) peer: Option<PeerState>,
    /// Sequence numbers of the next request to the peer, and of the next one from it.
    pub(super) sent: u64,
    pub(super) received: u64,
    /// Reads of the peer that are served at a time, and own reads in flight.
    pub(super) incoming_reads: u8,
    pub(super) outgoing_reads: u8,
    /// How long a request is tried.
    pub(super) patience: Duration,
    requests: VecDeque<Posted>,
    /// Requests since the last one whose success is reported.
    silent: u32,
    /// Requests whose completion was not polled.
    occupied: u32,
}

/// The other end of a connection, as it was given.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerState {
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) number: u32,
}

/// A request that is posted and not completed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    pub(super) id: u64,
    pub(super) operation: Operation,
    pub(super) is_signaled: bool,
    pub(super) local: Span,
    pub(super) remote: Span,
    /// When it completes if the peer is reached.
    pub(super) due: Duration,
    /// Whether the bytes are in the request, so that the local range is not looked at again.
    pub(super) inline: Option<[u8; INLINE_BYTES_MAX]>,
}

/// The largest number of bytes that a simulated request carries in itself.
pub(super) const INLINE_BYTES_MAX: usize = 64;

/// A range of the process with the key that grants access.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) length: u32,
    pub(super) key: u32,
}

/// A completion queue.
#[derive(Debug, Default)]
struct CompletionState {
    device: usize,
    /// It has overrun: nothing is reported any more.
    is_dead: bool,
    entries: VecDeque<Entry>,
    is_armed: bool,
    /// Set when an armed queue got an entry, until the channel is told.
    has_event: bool,
}

/// A completion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) id: u64,
    pub(super) status: status::Type,
    pub(super) queue_pair: u32,
    /// Requests whose places in the queue become free when it is polled.
    covers: u32,
}

/// A registration.
#[derive(Debug, Clone)]
pub(super) struct RegionState {
    pub(super) device: usize,
    /// The first address, as requests name it.
    pub(super) address: u64,
    pub(super) bytes: RegionBytes,
    pub(super) length: u64,
    pub(super) is_writable: bool,
    pub(super) is_remote_readable: bool,
    pub(super) is_remote_writable: bool,
}

/// Where the bytes of a registration are.
#[derive(Debug, Clone)]
pub(super) enum RegionBytes {
    /// At this address of the process.
    Mapped(u64),
    Exported(Arc<ExportedBytes>),
}

impl RegionBytes {
    fn address(&self) -> u64 {
        match self {
            Self::Mapped(address) => *address,
            Self::Exported(bytes) => bytes.address(),
        }
    }
}

/// What becomes of the first request of a queue pair.
enum Outcome {
    Waits,
    Completes(status::Type),
}

impl Queues {
    pub(super) fn add_completions(&mut self, device: usize) -> u32 {
        let number = self.next_number();
        self.completions.insert(number, CompletionState { device, ..CompletionState::default() });
        number
    }

    /// Ends the reports of the completion queues of a device.
    pub(super) fn fail_completions(&mut self, device: usize) {
        let of_device = self.completions.values_mut().filter(|queue| queue.device == device);
        for queue in of_device {
            queue.is_dead = true;
            queue.entries.clear();
        }
    }

    pub(super) fn has_regions(&self) -> bool {
        !self.regions.is_empty()
    }

    pub(super) fn remove_completions(&mut self, number: u32) {
        self.completions.remove(&number);
    }

    /// Asks for one event when the next entry arrives.
    pub(super) fn arm(&mut self, completions: u32) {
        if let Some(queue) = self.completions.get_mut(&completions) {
            queue.is_armed = true;
        }
    }

    /// Returns the queues whose channels are to be told, once each.
    pub(super) fn take_events(&mut self) -> Vec<u32> {
        let mut numbers = Vec::new();
        for (number, queue) in &mut self.completions {
            if std::mem::take(&mut queue.has_event) {
                numbers.push(*number);
            }
        }
        numbers
    }

    pub(super) fn poll(&mut self, completions: u32) -> Option<Entry> {
        let entry = self.completions.get_mut(&completions)?.entries.pop_front()?;
        if let Some(queue_pair) = self.queue_pairs.get_mut(&entry.queue_pair) {
            queue_pair.occupied -= entry.covers;
        }
        Some(entry)
    }

    pub(super) fn add_region(&mut self, region: RegionState) -> u32 {
        let key = self.next_number();
        self.regions.insert(key, region);
        key
    }

    pub(super) fn remove_region(&mut self, key: u32) {
        self.regions.remove(&key);
    }

    pub(super) fn add_queue_pair(&mut self, queue_pair: FakeQueuePair) -> u32 {
        let number = if self.reuses_numbers {
            let is_free = |number: &u32| !self.queue_pairs.contains_key(number);
            (FIRST_REUSED..).find(is_free).expect("few queue pairs")
        } else {
            self.next_number()
        };
        self.queue_pairs.insert(number, queue_pair);
        number
    }

    pub(super) fn remove_queue_pair(&mut self, number: u32) {
        self.queue_pairs.remove(&number);
    }

    pub(super) fn queue_pair(&mut self, number: u32) -> Option<&mut FakeQueuePair> {
        self.queue_pairs.get_mut(&number)
    }

    /// Adds a request.
    ///
    /// # Errors
    /// The number for `errno`: the queue pair is not connected, or is full.
    pub(super) fn post(&mut self, number: u32, request: Posted) -> Result<(), i32> {
        let queue_pair = self.queue_pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        if queue_pair.occupied == queue_pair.capacity {
            return Err(libc::ENOMEM);
        }
        if !matches!(queue_pair.state, state::IBV_QPS_RTS | state::IBV_QPS_ERR) {
            return Err(libc::EINVAL);
        }
        queue_pair.occupied += 1;
        queue_pair.requests.push_back(request);
        Ok(())
    }

    /// Takes the queue pair to another state; one that failed is flushed by [`Self::progress`].
    pub(super) fn set_state(&mut self, number: u32, state: state::Type) {
        let Some(queue_pair) = self.queue_pairs.get_mut(&number) else { return };
        queue_pair.state = state;
        if state == state::IBV_QPS_RESET {
            queue_pair.requests.clear();
            (queue_pair.silent, queue_pair.occupied, queue_pair.peer) = (0, 0, None);
            let completions = queue_pair.completions;
            if let Some(queue) = self.completions.get_mut(&completions) {
                queue.entries.retain(|entry| entry.queue_pair != number);
            }
        }
    }

    pub(super) fn fail_device(&mut self, device: usize) {
        for queue_pair in self.queue_pairs.values_mut() {
            if queue_pair.device == device && queue_pair.state != state::IBV_QPS_RESET {
                queue_pair.state = state::IBV_QPS_ERR;
            }
        }
    }

    pub(super) fn requests_in_flight(&self) -> usize {
        self.queue_pairs.values().map(|queue_pair| queue_pair.requests.len()).sum()
    }

    /// Completes the requests that are due, those of each queue pair in order.
    pub(super) fn progress(&mut self, now: Duration, network: &impl Network) {
        let mut numbers: Vec<u32> = self.queue_pairs.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            while let Outcome::Completes(status) = self.first_outcome(number, now, network) {
                self.complete_first(number, status);
            }
        }
    }

    fn first_outcome(&mut self, number: u32, now: Duration, network: &impl Network) -> Outcome {
        let queue_pair = &self.queue_pairs[&number];
        let Some(first) = queue_pair.requests.front() else { return Outcome::Waits };
        if queue_pair.state == state::IBV_QPS_ERR {
            return Outcome::Completes(status::IBV_WC_WR_FLUSH_ERR);
        }
        if first.due > now {
            return Outcome::Waits;
        }
        let peer = queue_pair.peer.and_then(|peer| {
            let found = self.queue_pairs.get(&peer.number)?;
            let is_ready = matches!(found.state, state::IBV_QPS_RTR | state::IBV_QPS_RTS);
            let back = found.peer?;
            let is_mutual =
                found.gid == peer.gid && (back.gid, back.number) == (queue_pair.gid, number);
            let is_reached = network.carries(found) && network.lid(found.device) == peer.lid;
            (is_ready && is_mutual && is_reached).then_some((peer.number, found))
        });
        match peer {
            // A request that the peer does not expect yet is not answered.
            Some((peer, found))
                if network.carries(queue_pair) && queue_pair.sent <= found.received =>
            {
                let is_read = first.operation == Operation::Read;
                let is_duplicate = queue_pair.sent < found.received;
                let status = if is_read && queue_pair.outgoing_reads > found.incoming_reads {
                    status::IBV_WC_REM_INV_REQ_ERR
                } else if is_duplicate && !is_read {
                    // The peer takes it for a request that it has carried out, and acknowledges it.
                    status::IBV_WC_SUCCESS
                } else {
                    self.copy(first, queue_pair.device, found.device)
                };
                if status == status::IBV_WC_SUCCESS {
                    self.count_request(number, peer, is_duplicate);
                }
                Outcome::Completes(status)
            }
            _ if now >= first.due + queue_pair.patience => {
                Outcome::Completes(status::IBV_WC_RETRY_EXC_ERR)
            }
            _ => Outcome::Waits,
        }
    }

    /// Counts a request at both ends.
    fn count_request(&mut self, number: u32, peer: u32, is_duplicate: bool) {
        if let Some(queue_pair) = self.queue_pairs.get_mut(&number) {
            queue_pair.sent += 1;
        }
        if let Some(found) = self.queue_pairs.get_mut(&peer) {
            found.received += u64::from(!is_duplicate);
        }
    }

    /// Checks a request and copies its bytes. A request without bytes names no memory.
    fn copy(&self, request: &Posted, device: usize, peer: usize) -> status::Type {
        if request.local.length == 0 {
            return status::IBV_WC_SUCCESS;
        }
        let is_read = request.operation == Operation::Read;
        let is_local = |region: &RegionState| !is_read || region.is_writable;
        let local = self.find(&request.local, device, is_local);
        if request.inline.is_none() && local.is_none() {
            return status::IBV_WC_LOC_PROT_ERR;
        }
        let is_remote = |region: &RegionState| {
            if is_read { region.is_remote_readable } else { region.is_remote_writable }
        };
        let Some(remote) = self.find(&request.remote, peer, is_remote) else {
            return status::IBV_WC_REM_ACCESS_ERR;
        };
        let length = request.local.length as usize;
        let pointer = |address| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let (local, remote) = (pointer(local.unwrap_or_default()), pointer(remote));
        let (from, to) = if is_read {
            (remote.cast_const(), local)
        } else {
            match &request.inline {
                Some(bytes) => (bytes.as_ptr(), remote),
                None => (local.cast_const(), remote),
            }
        };
        // SAFETY: both ranges are inside of registrations, whose owners promise that they are mapped and
        // tolerate this access; a registration cannot end meanwhile, since the fabric is locked. An inline
        // request has at most as many bytes as its array.
        unsafe { std::ptr::copy(from, to, length) };
        status::IBV_WC_SUCCESS
    }

    /// Returns where the bytes of a span are, if a registration permits the access.
    fn find(
        &self,
        span: &Span,
        device: usize,
        is_fit: impl Fn(&RegionState) -> bool,
    ) -> Option<u64> {
        let region = self.regions.get(&span.key)?;
        let offset = span.address.checked_sub(region.address)?;
        let end = offset.checked_add(span.length.into())?;
        let is_allowed = region.device == device && is_fit(region) && end <= region.length;
        is_allowed.then(|| region.bytes.address() + offset)
    }

    fn complete_first(&mut self, number: u32, status: status::Type) {
        let Some(queue_pair) = self.queue_pairs.get_mut(&number) else { return };
        let Some(request) = queue_pair.requests.pop_front() else { return };
        queue_pair.silent += 1;
        let is_failed = status != status::IBV_WC_SUCCESS;
        if is_failed {
            queue_pair.state = state::IBV_QPS_ERR;
        }
        if !(is_failed || request.is_signaled) {
            return;
        }
        let covers = std::mem::take(&mut queue_pair.silent);
        let entry = Entry { id: request.id, status, queue_pair: number, covers };
        let queue = self.completions.get_mut(&queue_pair.completions);
        if let Some(queue) = queue.filter(|queue| !queue.is_dead) {
            queue.entries.push_back(entry);
            queue.has_event |= std::mem::take(&mut queue.is_armed);
        }
    }

    fn next_number(&mut self) -> u32 {
        self.last_number += 1;
        self.last_number
    }
}

impl FakeQueuePair {
    pub(super) fn new(device: usize, completions: u32, capacity: u32) -> Self {
        Self {
            device,
            gid: Gid([0; 16]),
            gid_index: 0,
            completions,
            capacity,
            state: state::IBV_QPS_RESET,
            peer: None,
            sent: 0,
            received: 0,
            incoming_reads: 0,
            outgoing_reads: 0,
            patience: Duration::ZERO,
            requests: VecDeque::new(),
            silent: 0,
            occupied: 0,
        }
    }
}
