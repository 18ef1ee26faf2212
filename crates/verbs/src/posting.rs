//! Posting: requests that are passed to a device together.

use std::{io, marker::PhantomData, mem, ptr, ptr::NonNull};

use rdma_sys::{ibv_qp, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t, wr_t};

use crate::{LocalRange, Owner, RemoteRange};

/// Requests of one connected queue pair that are passed to the device together.
///
/// The posting borrows the queue pair, so that nothing else is posted to it meanwhile, and the
/// registrations of the ranges, so that a range that is not registered cannot be named. A posting that is
/// dropped posts nothing.
///
/// A second posting of the same queue pair does not compile while one is open:
///
/// ```compile_fail,E0499
/// # use mooncake_verbs::*;
/// fn interleave(queue_pair: &mut ConnectedQueuePair) {
///     let first = queue_pair.post();
///     let second = queue_pair.post();
///     drop((first, second));
/// }
/// ```
///
/// Neither does one without a connection, nor a range whose registration is gone, nor a use after
/// `submit`:
///
/// ```compile_fail,E0599
/// # use mooncake_verbs::*;
/// fn without_peer(queue_pair: &mut QueuePair) {
///     queue_pair.post();
/// }
/// ```
///
/// ```compile_fail,E0505
/// # use mooncake_verbs::*;
/// fn deregister_early(queue_pair: &mut ConnectedQueuePair, region: MemoryRegion, to: RemoteRange) {
///     let mut posting = queue_pair.post();
///     let range = region.range(0, 8).unwrap();
///     posting.push(&Request { id: 1, operation: Operation::Write, local: range, remote: to, is_signaled: true });
///     drop(region);
///     unsafe { posting.submit() }.unwrap();
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use mooncake_verbs::*;
/// fn submit_twice(queue_pair: &mut ConnectedQueuePair) {
///     let posting = queue_pair.post();
///     let _ = unsafe { posting.submit() };
///     let _ = unsafe { posting.submit() };
/// }
/// ```
#[derive(Debug)]
#[must_use = "a posting that is not submitted posts nothing"]
pub struct Posting<'a> {
    requests: &'a mut Requests,
    queue_pair: NonNull<ibv_qp>,
    inline_bytes: u32,
    ranges: PhantomData<LocalRange<'a>>,
}

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Comes back with the completion.
    pub id: u64,
    /// The direction.
    pub operation: Operation,
    /// The range of this process.
    pub local: LocalRange<'a>,
    /// The start of the range of the peer, which is as long.
    pub remote: RemoteRange,
    /// Whether success is reported, too. Failures always are. The success of a request implies that of
    /// all that were posted to the queue pair before it. A queue pair whose requests are never signaled
    /// fills up: have at least one of its limit of requests signaled.
    pub is_signaled: bool,
}

/// Direction of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// From the peer's memory into the local range.
    Read,
    /// From the local range into the peer's memory.
    Write,
}

/// The failure of [`Posting::submit`].
#[derive(Debug, thiserror::Error)]
#[error("posting failed after {posted} requests: {source}")]
pub struct SubmitError {
    /// Number of requests, from the first on, that were posted and will complete.
    pub posted: usize,
    /// Why the next one was refused: `ENOMEM` where the queue is full.
    pub source: io::Error,
}

/// Memory for the requests of a posting, reused by all of a queue pair.
pub(crate) struct Requests {
    entries: Vec<ibv_send_wr>,
    ranges: Vec<ibv_sge>,
}

// SAFETY: the pointers in the entries are set by `submit`, point into the two vectors of the same value or
// are null, and are used during that call only.
unsafe impl Send for Requests {}
// SAFETY: as above; a shared reference gives no access to the pointers.
unsafe impl Sync for Requests {}

impl<'a> Posting<'a> {
    pub(crate) fn new(
        requests: &'a mut Requests,
        queue_pair: NonNull<ibv_qp>,
        inline_bytes: u32,
    ) -> Self {
        requests.entries.clear();
        requests.ranges.clear();
        Self { requests, queue_pair, inline_bytes, ranges: PhantomData }
    }

    /// Adds a request. A small write from memory of the host carries its bytes in the request itself; the
    /// driver copies them by the processor, which cannot read memory of devices.
    ///
    /// # Panics
    /// The posting is full.
    pub fn push(&mut self, request: &Request<'a>) {
        assert!(!self.is_full(), "the batch limit of the queue pair");
        let mut flags = 0;
        if request.is_signaled {
            flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        let opcode = match request.operation {
            Operation::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
            Operation::Write => {
                let is_host = request.local.owner() == Owner::Host;
                if is_host && request.local.length() <= self.inline_bytes {
                    flags |= ibv_send_flags::IBV_SEND_INLINE.0;
                }
                ibv_wr_opcode::IBV_WR_RDMA_WRITE
            }
        };
        // SAFETY: integers and pointers only, for which zero is a value.
        let mut entry: ibv_send_wr = unsafe { mem::zeroed() };
        entry.wr_id = request.id;
        entry.opcode = opcode;
        entry.send_flags = flags;
        entry.num_sge = 1;
        entry.wr =
            wr_t { rdma: rdma_t { remote_addr: request.remote.address, rkey: request.remote.key } };
        self.requests.entries.push(entry);
        self.requests.ranges.push(ibv_sge {
            addr: request.local.address(),
            length: request.local.length(),
            lkey: request.local.key(),
        });
    }

    /// Reports the success of the last request that was added, too, whatever it asked for: that of a posting
    /// that ends early.
    pub fn signal_last(&mut self) {
        if let Some(last) = self.requests.entries.last_mut() {
            last.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
    }

    /// Adds a write of no bytes, which tells whether the peer answers. It names no memory on either side,
    /// and its success is reported.
    ///
    /// # Panics
    /// The posting is full.
    pub fn push_probe(&mut self, id: u64) {
        assert!(!self.is_full(), "the batch limit of the queue pair");
        // SAFETY: integers and pointers only, for which zero is a value.
        let mut entry: ibv_send_wr = unsafe { mem::zeroed() };
        entry.wr_id = id;
        entry.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        entry.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        self.requests.entries.push(entry);
        self.requests.ranges.push(ibv_sge { addr: 0, length: 0, lkey: 0 });
    }

    /// Passes the requests to the device with one doorbell. Does nothing if there is none.
    ///
    /// # Errors
    /// The queue pair is full, or the driver refused. The requests up to the one that failed are posted.
    ///
    /// # Safety
    /// Until the completion of a request was polled (or that of a later one of the queue pair that
    /// succeeded), or the queue pair was disconnected or dropped:
    /// the local range stays mapped and registered, nobody writes to the source of a write, and nobody
    /// uses the destination of a read.
    pub unsafe fn submit(self) -> Result<usize, SubmitError> {
        let count = self.requests.entries.len();
        if count == 0 {
            return Ok(0);
        }
        let first = self.requests.link();
        let mut refused: *mut ibv_send_wr = ptr::null_mut();
        // SAFETY: the queue pair lives while it is borrowed; the list is linked and lives past the call;
        // the caller vouches for the memory of the ranges.
        let code =
            unsafe { rdma_sys::ibv_post_send(self.queue_pair.as_ptr(), first, &raw mut refused) };
        if code == 0 {
            return Ok(count);
        }
        let source = match code {
            1.. => io::Error::from_raw_os_error(code),
            _ => io::Error::last_os_error(),
        };
        // A driver that refuses all may leave the pointer alone.
        let bytes = (refused.addr()).saturating_sub(first.addr());
        let posted = if refused.is_null() { 0 } else { bytes / size_of::<ibv_send_wr>() };
        Err(SubmitError { posted: posted.min(count), source })
    }

    /// Returns whether no further request fits.
    pub fn is_full(&self) -> bool {
        self.requests.entries.len() == self.requests.entries.capacity()
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.requests.entries.len()
    }

    /// Returns whether there is no request.
    pub fn is_empty(&self) -> bool {
        self.requests.entries.is_empty()
    }
}

impl Requests {
    pub(crate) fn new(batch: usize) -> Self {
        let mut entries = Vec::new();
        entries.reserve_exact(batch);
        Self { ranges: Vec::with_capacity(entries.capacity()), entries }
    }

    /// Links each entry, of which there is at least one, to its range and to the next entry. Returns the
    /// first.
    fn link(&mut self) -> *mut ibv_send_wr {
        let entries = self.entries.as_mut_ptr();
        let mut range = self.ranges.as_mut_ptr();
        let last = self.entries.len() - 1;
        for (index, entry) in self.entries.iter_mut().enumerate() {
            entry.sg_list = range;
            range = range.wrapping_add(1);
            let next = entries.wrapping_add(index + 1);
            entry.next = if index < last { next } else { ptr::null_mut() };
        }
        entries
    }
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").field("count", &self.entries.len()).finish_non_exhaustive()
    }
}
