//! The pins that connections hold, so that the users of a region can be found and ended.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use mooncake_base::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::memory::region::{Pin, Region};

/// The pins of all connections of one listener.
#[derive(Debug, Default)]
pub(super) struct PinTable {
    /// Lock order: before the pins of a connection.
    connections: Mutex<HashMap<u64, Arc<Holder>>>,
    last_id: AtomicU64,
}

/// A connection that may hold pins.
#[derive(Debug)]
struct Holder {
    pins: Mutex<Vec<Pin>>,
    /// Ends the connection.
    cut: CancellationToken,
}

/// The pins of the current request of one connection. Dropping it drops the pins.
#[derive(Debug)]
pub(super) struct HeldPins {
    table: Arc<PinTable>,
    id: u64,
    holder: Arc<Holder>,
}

impl PinTable {
    /// Adds a connection, which `cut` ends.
    pub(super) fn add(self: &Arc<Self>, cut: CancellationToken) -> HeldPins {
        let id = self.last_id.fetch_add(1, Ordering::Relaxed);
        let holder = Arc::new(Holder { pins: Mutex::default(), cut });
        self.connections.lock().insert(id, Arc::clone(&holder));
        HeldPins { table: Arc::clone(self), id, holder }
    }

    /// Ends every connection that holds a pin of the region.
    pub(super) fn cut_users(&self, region: &Arc<Region>) {
        let is_user = |pin: &Pin| Arc::ptr_eq(pin.region(), region);
        for (id, holder) in &*self.connections.lock() {
            if !holder.cut.is_cancelled() && holder.pins.lock().iter().any(is_user) {
                tracing::warn!(
                    connection = id,
                    address = format_args!("{:#x}", region.base),
                    "closed a connection that kept using a range that is being unregistered"
                );
                holder.cut.cancel();
            }
        }
    }
}

impl HeldPins {
    pub(super) fn push(&self, pin: Pin) {
        self.holder.pins.lock().push(pin);
    }

    pub(super) fn clear(&self) {
        self.holder.pins.lock().clear();
    }
}

impl Drop for HeldPins {
    fn drop(&mut self) {
        self.table.connections.lock().remove(&self.id);
        // The table may still be iterated, with another reference to the holder.
        self.clear();
    }
}
