//! Contributions of peers, in their buffers as this process maps them.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use mooncake_base::sync::Mutex;

use super::{HEAD_BYTES, Numbered, StagedPlace, head_of};
use crate::{
    memory::HostRange,
    shared_memory::{SharedMemory, Use},
};

/// Buffers of one peer that this process has mapped.
#[derive(Debug, Default)]
pub(crate) struct PeerBuffers(pub(super) Mutex<Vec<Arc<Numbered>>>);

/// A contribution of a peer, mapped here.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub(super) buffer: Arc<Numbered>,
    pub(super) length: usize,
}

impl PeerBuffers {
    /// Finds a contribution of `length` bytes of a process, whose buffer stays mapped until the peer
    /// has given it up.
    pub(crate) fn find(
        &self,
        process: u32,
        place: StagedPlace,
        length: usize,
    ) -> io::Result<Contribution> {
        let mut mapped = self.0.lock();
        mapped.retain(|it| it.number >= place.oldest);
        let known = mapped.iter().find(|it| it.number == place.buffer).map(Arc::clone);
        let buffer = match known {
            Some(known) => known,
            None => {
                let found = Arc::new(open(process, place)?);
                mapped.push(Arc::clone(&found));
                found
            }
        };
        if length > buffer.memory.length() - HEAD_BYTES {
            return Err(io::Error::other("the peer's buffer is too short"));
        }
        Ok(Contribution { buffer, length })
    }
}

fn open(process: u32, place: StagedPlace) -> io::Result<Numbered> {
    let descriptor = i32::try_from(place.descriptor).map_err(io::Error::other)?;
    let memory = SharedMemory::open(process, descriptor, Use::Read)?;
    if memory.length() < HEAD_BYTES || head_of(&memory).load(Ordering::SeqCst) != place.buffer {
        return Err(io::Error::other("the peer's descriptor is of another file"));
    }
    Ok(Numbered { number: place.buffer, memory, fabric: None })
}

impl Contribution {
    /// Writes the contribution to memory of the caller.
    pub(crate) fn write_to(&self, target: HostRange) {
        target.write_from(self.buffer.start(), self.length);
    }
}
