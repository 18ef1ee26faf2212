//! The path to one process of the same host.

use std::sync::{Arc, Weak};

use mooncake_base::{Clock, Moment, Result, SystemClock};
use mooncake_os::fork;

use super::{
    attachment::{self, AccessMode, Attachment},
    handshake::{AttachedOwner, attach},
    kernel_copy::copy_by_kernel,
};
use crate::{
    discovery::descriptor::SegmentDescriptor,
    transfer_entry::{Opcode, RemoteRange, TransferEntry},
    transport::{
        Path, RemoteMemory, TimeLimits, TransportKind,
        shm::server::{ServerShared, ShmServer},
    },
};

/// The path to one process of the same host.
#[derive(Debug)]
pub(in crate::transport::shm) struct ShmPath {
    attachment: Arc<Attachment>,
    id: u64,
    server: Weak<ServerShared>,
    generation: u64,
    /// The speed of the kernel's copy from the peer's memory in bytes per second, measured when the
    /// path was created.
    probed: Option<u64>,
}

impl ShmPath {
    /// Attaches to the owner; `server` serves the attachment from then on.
    pub(in crate::transport::shm) fn connect(
        descriptor: &SegmentDescriptor,
        server: &ShmServer,
        deadline: Moment,
    ) -> Result<Self> {
        let AttachedOwner { attachment, probed } = attach(descriptor, server, deadline)?;
        let attachment = Arc::new(attachment);
        let id = server.shared().attach(&attachment)?;
        let server = Arc::downgrade(server.shared());
        Ok(Self { attachment, id, server, generation: fork::generation(), probed })
    }
}

impl Path for ShmPath {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn reaches(&self, range: RemoteRange) -> bool {
        let soon = SystemClock.now() + std::time::Duration::from_secs(1);
        let guard = self.attachment.acquire(range, soon);
        guard.is_ok_and(|guard| {
            !matches!(guard.region().access, AccessMode::Unsupported | AccessMode::Failed(_))
        })
    }

    fn transfer(&self, opcode: Opcode, entries: &mut [TransferEntry], limits: TimeLimits) {
        let deadline = limits.deadline;
        if self.attachment.link().is_closed() {
            self.attachment.close();
        }
        let mut rest = entries;
        while let Some(entry) = rest.first_mut() {
            if entry.outcome.is_some() {
                rest = &mut rest[1..];
                continue;
            }
            if !self.is_alive() {
                entry.outcome = Some(Err(attachment::peer_gone()));
                continue;
            }
            let guard = match self.attachment.acquire(entry.remote_range(), limits.give_up_at()) {
                Ok(guard) => guard,
                Err(error) => {
                    entry.outcome = Some(Err(error));
                    continue;
                }
            };
            let region = guard.region();
            // All following entries in the same region are moved in one run.
            let count = rest
                .iter()
                .take_while(|entry| entry.outcome.is_some() || region.holds(entry.remote_range()))
                .count();
            let (run, behind) = rest.split_at_mut(count);
            let gate = || guard.check(deadline);
            match &region.access {
                AccessMode::Mapped(mapping) => mapping.transfer(opcode, run, region.base, &gate),
                AccessMode::Process => {
                    copy_by_kernel(opcode, run, self.attachment.process(), &gate)
                }
                // The entries stay open for another path.
                AccessMode::Unsupported => {}
                AccessMode::Failed(error) => {
                    for entry in run.iter_mut().filter(|entry| entry.outcome.is_none()) {
                        entry.outcome = Some(Err(error.clone()));
                    }
                }
            }
            rest = behind;
        }
    }

    fn is_alive(&self) -> bool {
        self.attachment.is_alive()
    }

    fn remote_memory(&self, range: RemoteRange) -> Option<RemoteMemory> {
        self.attachment.remote_memory(range)
    }

    fn probed_bytes_per_second(&self) -> Option<u64> {
        self.probed
    }

    fn close(&self) {
        if fork::is_forked_since(self.generation) {
            return;
        }
        match self.server.upgrade() {
            Some(server) => server.detach(self.id),
            None => self.attachment.close(),
        }
    }
}

impl Drop for ShmPath {
    fn drop(&mut self) {
        self.close();
    }
}
