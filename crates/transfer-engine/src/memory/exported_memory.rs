//! The memory that one engine exports to its peers: registered ranges and shared memory.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use mooncake_base::sync::RwLock;
use mooncake_base::{EngineId, SegmentId};

use crate::memory::region::Regions;

/// The exported memory of an engine of this process.
#[derive(Debug)]
pub(crate) struct ExportedMemory {
    pub(crate) id: EngineId,
    pub(crate) regions: Arc<Regions>,
    /// The ids of the store's segments in this memory begin with the engine's mark.
    marks_segments: AtomicBool,
    is_closed: AtomicBool,
}

/// The open engines of this process.
static LIVE: RwLock<Option<HashMap<EngineId, Weak<ExportedMemory>>>> = RwLock::new(None);

impl ExportedMemory {
    /// Creates the exported memory of a new engine and adds it to the list of this process.
    pub(crate) fn register(id: EngineId) -> Arc<Self> {
        let exported = Arc::new(Self {
            id,
            regions: Arc::default(),
            marks_segments: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        });
        LIVE.write().get_or_insert_default().insert(id, Arc::downgrade(&exported));
        exported
    }

    /// Removes the engine from the list; afterwards no path to it is alive.
    pub(crate) fn unregister(&self) {
        self.is_closed.store(true, Ordering::Release);
        if let Some(live) = LIVE.write().as_mut() {
            live.remove(&self.id);
        }
    }

    /// Creates the id of a segment in this memory. From now on peers are told that such ids carry the
    /// mark of the engine.
    pub(crate) fn new_segment_id(&self) -> SegmentId {
        self.marks_segments.store(true, Ordering::Relaxed);
        SegmentId::of_engine(self.id)
    }

    pub(crate) fn marks_segments(&self) -> bool {
        self.marks_segments.load(Ordering::Relaxed)
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.is_closed.load(Ordering::Acquire)
    }

    /// Finds the exported memory of an engine of this process.
    pub(crate) fn find(id: EngineId) -> Option<Arc<Self>> {
        LIVE.read().as_ref()?.get(&id)?.upgrade()
    }
}

impl Drop for ExportedMemory {
    fn drop(&mut self) {
        self.unregister();
    }
}
