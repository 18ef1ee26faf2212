//! Managed buffers: small buffers for the engine's own process, cut from large slabs, so that a
//! buffer costs no system call and all buffers are accessible to peers.
//!
//! Slabs are shared memory of the engine, so peers of this host map them. A slab is created when
//! the first buffer needs it, and its pages are allocated as they are written.

mod arena;

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result};

use self::arena::{Arena, BLOCK_BYTES_MAX, Freed};
use crate::{Engine, SharedMemory};

/// The managed buffers of an engine. Dropping it frees them all.
#[derive(Debug)]
pub struct ManagedBuffers {
    engine: Engine,
    state: Mutex<ArenaAndSlabs>,
}

#[derive(Debug, Default)]
struct ArenaAndSlabs {
    arena: Arena,
    slabs: Vec<SharedMemory>,
}

impl ManagedBuffers {
    /// Creates an empty set of buffers.
    pub fn new(engine: Engine) -> Self {
        Self { engine, state: Mutex::default() }
    }

    /// Allocates a buffer of at least `length` bytes and returns its first address. Length 0 gives
    /// the smallest buffer.
    ///
    /// Lengths are rounded up to 8 KiB times a power of two, and above 256 MiB to whole pages.
    ///
    /// # Errors
    /// The system has no more memory, or the engine is closed.
    pub fn allocate(&self, length: u64) -> Result<u64> {
        self.engine.check_usable()?;
        let mut state = self.state.lock();
        if length > BLOCK_BYTES_MAX {
            let memory = self.engine.allocate(length)?;
            let base = memory.base();
            state.arena.add_dedicated(base, memory.length())?;
            state.slabs.push(memory);
            return Ok(base);
        }
        if let Some(address) = state.arena.allocate(length) {
            return Ok(address);
        }
        let slab = self.engine.allocate(BLOCK_BYTES_MAX)?;
        state.arena.add_slab(slab.base())?;
        state.slabs.push(slab);
        state
            .arena
            .allocate(length)
            .ok_or_else(|| Error::internal("a new slab has no room").with("length", length))
    }

    /// Frees a buffer. `length` is the one it was allocated with.
    ///
    /// # Errors
    /// No buffer of that length begins there, or it was freed before. Nothing changes then.
    pub fn free(&self, address: u64, length: u64) -> Result<()> {
        self.engine.check_usable()?;
        let mut state = self.state.lock();
        let gone = match state.arena.free(address, length)? {
            Freed::Retained => return Ok(()),
            Freed::Released(base) => base,
        };
        let slab = state.slabs.iter().position(|slab| slab.base() == gone);
        let slab = slab.map(|at| state.slabs.swap_remove(at));
        drop(state);
        // Outside of the lock, since dropping a slab waits for peers to release it.
        drop(slab);
        Ok(())
    }
}
