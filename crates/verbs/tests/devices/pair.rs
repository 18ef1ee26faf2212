//! Two connected queue pairs with memory, for claims about connections.

use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd, FromRawFd},
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_verbs::{
    Access, Completion, CompletionQueue, ConnectedQueuePair, ConnectionSettings, Context, Library,
    MemoryRegion, Operation, Ordering, PeerAddress, ProtectionDomain, QueuePair, QueuePairLimits,
    RemoteRange, Request, Status, SubmitError, rank_gids,
};

/// How long a completion may take. An emulated machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two ends that are connected with each other.
pub(crate) struct Pair {
    pub(crate) left: End,
    pub(crate) right: End,
}

/// A queue pair with a registered buffer.
pub(crate) struct End {
    // Dropped before the memory: requests and registrations end with it.
    state: EndState,
    pub(crate) region: MemoryRegion,
    pub(crate) queue: Arc<CompletionQueue>,
    memory: Box<[u8]>,
}

enum EndState {
    Unconnected(QueuePair),
    Connected(ConnectedQueuePair),
    Taken,
}

/// Opens a device by its index, or the last one where there are fewer.
pub(crate) fn open(library: &Arc<Library>, index: usize) -> Arc<Context> {
    let devices = library.devices().expect("devices are listed");
    let index = index.min(devices.len() - 1);
    devices[index].open().expect("a device of this machine can be opened")
}

impl Pair {
    /// Connects the first device with the second one, or with itself where there is one.
    pub(crate) fn connect(library: &Arc<Library>, bytes: usize) -> Self {
        Self::with_limits(library, bytes, QueuePairLimits::default())
    }

    pub(crate) fn with_limits(
        library: &Arc<Library>,
        bytes: usize,
        limits: QueuePairLimits,
    ) -> Self {
        let left = open(library, 0);
        let queue = CompletionQueue::new(&left, 1024).unwrap();
        Self::join(End::with_queue(&queue, bytes, limits), library, bytes, limits)
    }

    pub(crate) fn with_queue(
        library: &Arc<Library>,
        bytes: usize,
        queue: &Arc<CompletionQueue>,
    ) -> Self {
        let limits = QueuePairLimits::default();
        Self::join(End::with_queue(queue, bytes, limits), library, bytes, limits)
    }

    fn join(mut left: End, library: &Arc<Library>, bytes: usize, limits: QueuePairLimits) -> Self {
        let mut right = End::new(&open(library, 1), bytes, limits);
        left.connect(&right.address());
        right.connect(&left.address());
        Self { left, right }
    }

    /// Moves bytes between the two buffers and waits for it.
    pub(crate) fn transfer(
        &mut self,
        operation: Operation,
        left: usize,
        right: usize,
        length: u32,
    ) {
        let remote = self.right.remote(right);
        self.left.post_at(&[42], operation, (left, length), remote, |_| true).unwrap();
        let completion = self.left.completions(1)[0];
        assert_eq!((completion.request, completion.status), (42, Status::Success));
    }
}

/// Returns registered memory whose bytes no processor reads at its address, as that of a device.
pub(crate) fn device_region(domain: &Arc<ProtectionDomain>, bytes: &[u8]) -> MemoryRegion {
    // SAFETY: the name is a terminated string.
    let file = unsafe { libc::memfd_create(c"device".as_ptr(), 0) };
    // SAFETY: the call has just made the descriptor, which nobody else has.
    let mut file = unsafe { File::from_raw_fd(file) };
    file.write_all(bytes).unwrap();
    let (length, rights) = (bytes.len(), libc::PROT_NONE);
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), length, rights, kind, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    let (address, access) = (base.addr() as u64, Access::RemoteReadWrite);
    // SAFETY: nothing else uses the memory.
    unsafe { MemoryRegion::register_dma_buf(domain, file.as_fd(), 0, length, address, access) }
        .unwrap()
}

impl End {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize, limits: QueuePairLimits) -> Self {
        let queue = CompletionQueue::new(context, 1024).unwrap();
        Self::with_queue(&queue, bytes, limits)
    }

    fn with_queue(queue: &Arc<CompletionQueue>, bytes: usize, limits: QueuePairLimits) -> Self {
        let domain = ProtectionDomain::new(queue.context()).unwrap();
        let mut memory = vec![0; bytes].into_boxed_slice();
        let base = NonNull::new(memory.as_mut_ptr()).unwrap();
        let access = Access::RemoteReadWrite;
        // SAFETY: the memory is dropped after the region, and is only touched while no request is in
        // flight.
        let region =
            unsafe { MemoryRegion::register(&domain, base, bytes, access, Ordering::Relaxed) };
        let queue_pair = QueuePair::new(&domain, queue, limits).unwrap();
        let state = EndState::Unconnected(queue_pair);
        Self { state, region: region.unwrap(), queue: Arc::clone(queue), memory }
    }

    /// The settings that reach the other devices of this machine.
    pub(crate) fn settings(&self) -> ConnectionSettings {
        let context = self.queue.context();
        let best = rank_gids(context.gids(1).unwrap()).remove(0);
        let mtu = context.port(1).unwrap().mtu;
        ConnectionSettings { gid_index: best.index, mtu, ..ConnectionSettings::default() }
    }

    pub(crate) fn address(&self) -> PeerAddress {
        let context = self.queue.context();
        let gid = context.gid(1, self.settings().gid_index.into()).unwrap();
        let queue_pair = match &self.state {
            EndState::Unconnected(queue_pair) => queue_pair.number(),
            EndState::Connected(queue_pair) => queue_pair.number(),
            EndState::Taken => panic!("the queue pair was taken"),
        };
        PeerAddress { gid, lid: context.port(1).unwrap().lid, queue_pair }
    }

    pub(crate) fn connect(&mut self, peer: &PeerAddress) {
        let settings = self.settings();
        let connected = self.take_unconnected().connect(peer, &settings).unwrap();
        self.state = EndState::Connected(connected);
    }

    pub(crate) fn disconnect(&mut self) {
        let EndState::Connected(connected) = std::mem::replace(&mut self.state, EndState::Taken)
        else {
            panic!("connected");
        };
        self.state = EndState::Unconnected(connected.disconnect().unwrap());
    }

    pub(crate) fn take_unconnected(&mut self) -> QueuePair {
        match std::mem::replace(&mut self.state, EndState::Taken) {
            EndState::Unconnected(queue_pair) => queue_pair,
            _ => panic!("not connected"),
        }
    }

    pub(crate) fn set_unconnected(&mut self, queue_pair: QueuePair) {
        self.state = EndState::Unconnected(queue_pair);
    }

    pub(crate) fn queue_pair(&self) -> &ConnectedQueuePair {
        match &self.state {
            EndState::Connected(connected) => connected,
            _ => panic!("connected"),
        }
    }

    /// A range of the buffer, for the peer.
    pub(crate) fn remote(&self, offset: usize) -> RemoteRange {
        let address = self.region.address() + offset as u64;
        RemoteRange { address, key: self.region.remote_key() }
    }

    /// Posts one request per id for neighbouring parts of both buffers.
    pub(crate) fn post(
        &mut self,
        ids: &[u64],
        operation: Operation,
        length: u32,
        remote: RemoteRange,
        is_signaled: impl Fn(u64) -> bool,
    ) -> Result<usize, SubmitError> {
        self.post_at(ids, operation, (0, length), remote, is_signaled)
    }

    fn post_at(
        &mut self,
        ids: &[u64],
        operation: Operation,
        (start, length): (usize, u32),
        remote: RemoteRange,
        is_signaled: impl Fn(u64) -> bool,
    ) -> Result<usize, SubmitError> {
        let EndState::Connected(connected) = &mut self.state else { panic!("connected") };
        let mut posting = connected.post();
        for (index, id) in ids.iter().enumerate() {
            let offset = index * length as usize;
            posting.push(&Request {
                id: *id,
                operation,
                local: self.region.range(start + offset, length).unwrap(),
                remote: RemoteRange { address: remote.address + offset as u64, ..remote },
                is_signaled: is_signaled(*id),
            });
        }
        // SAFETY: the memory lives until the queue pair is gone, and callers wait for the completions
        // before they touch it.
        unsafe { posting.submit() }
    }

    /// Posts a write of a whole region, which may be that of a device.
    pub(crate) fn post_region(&mut self, id: u64, region: &MemoryRegion, remote: RemoteRange) {
        let EndState::Connected(connected) = &mut self.state else { panic!("connected") };
        let mut posting = connected.post();
        let local = region.range(0, u32::try_from(region.length()).unwrap()).unwrap();
        let operation = Operation::Write;
        posting.push(&Request { id, operation, local, remote, is_signaled: false });
        posting.signal_last();
        // SAFETY: callers wait for the completion before they drop the region.
        unsafe { posting.submit() }.unwrap();
    }

    /// Asks the peer whether it is there.
    pub(crate) fn post_probe(&mut self, id: u64) {
        let EndState::Connected(connected) = &mut self.state else { panic!("connected") };
        let mut posting = connected.post();
        posting.push_probe(id);
        // SAFETY: the request names no memory.
        unsafe { posting.submit() }.unwrap();
    }

    pub(crate) fn limits(&self) -> QueuePairLimits {
        self.queue_pair().limits()
    }

    /// Waits for completions.
    pub(crate) fn completions(&self, count: usize) -> Vec<Completion> {
        let mut found = Vec::new();
        let started = Instant::now();
        while found.len() < count {
            self.queue.poll(|completion| found.push(completion)).unwrap();
            assert!(started.elapsed() < PATIENCE, "{} of {count} completions", found.len());
        }
        found
    }

    pub(crate) fn fill(&mut self, byte: impl Fn(usize) -> u8) {
        for (index, place) in self.memory.iter_mut().enumerate() {
            *place = byte(index);
        }
    }

    /// Checks a part of the buffer; `expected` is given indices from its start.
    pub(crate) fn check(&self, offset: usize, length: usize, expected: impl Fn(usize) -> u8) {
        let part = &self.memory[offset..offset + length];
        let wrong = (0..length).find(|index| part[*index] != expected(*index));
        assert_eq!(wrong, None, "the first wrong byte");
    }
}
