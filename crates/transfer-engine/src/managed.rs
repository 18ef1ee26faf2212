//! Buffers that the engine lends to its own process: small ones cut from large slabs, so that each
//! costs no system call and all are in reach of peers.
//!
//! Slabs are the engine's shared memory, so peers of this host map them. They take room only as
//! they are written, and are made when the first buffer needs them.

mod arena;

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result};

use self::arena::{Arena, BLOCK_BYTES_MAX, Freed};
use crate::{Engine, SharedMemory};

/// The managed buffers of an engine. Dropping it takes them all back.
#[derive(Debug)]
pub struct ManagedBuffers {
    engine: Engine,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    arena: Arena,
    slabs: Vec<SharedMemory>,
}

impl ManagedBuffers {
    /// None yet.
    pub fn new(engine: Engine) -> Self {
        Self { engine, state: Mutex::default() }
    }

    /// A buffer of at least that many bytes; its first address. No length gives the smallest one.
    ///
    /// Lengths are rounded up to 8 KiB times a power of two; above 256 MiB, to whole pages.
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

    /// Takes a buffer back. `length` is the one it was allocated with.
    ///
    /// # Errors
    /// No buffer of such a length begins there, or it was taken back before. Nothing changes then.
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
        // Outside of the lock: peers are asked to leave it.
        drop(slab);
        Ok(())
    }
}
