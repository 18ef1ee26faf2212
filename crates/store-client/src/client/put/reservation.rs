//! Reservations: space for an object at the master, to be written, then published or revoked.

use std::sync::Arc;

use mooncake_base::ObjectKey;
use mooncake_transfer_engine::LocalRange;

use super::{
    open_puts::{OpenPuts, ReservedPut},
    upload::{KeyedUpload, Upload},
};

/// Space reserved for a new object: to be written, then published or revoked.
///
/// If the last clone is dropped without either, the client revokes it with a later call.
#[derive(Debug, Clone)]
pub struct Reservation {
    pub(in crate::client) key: ObjectKey,
    pub(in crate::client) upload: Upload,
    put: Arc<ReservedPut>,
}

/// A write into a reserved object.
#[derive(Debug)]
pub struct Write<'a> {
    /// The object.
    pub reservation: &'a mut Reservation,
    /// Offsets within the object and the bytes to write there.
    pub ranges: Vec<(u64, LocalRange)>,
}

impl Reservation {
    pub(in crate::client) fn new(
        key: &ObjectKey,
        upload: Upload,
        open_puts: &Arc<OpenPuts>,
    ) -> Self {
        let replicas = upload.replicas();
        let put = ReservedPut::new(open_puts, upload.request(), key, upload.version(), replicas);
        Self { key: key.clone(), upload, put: Arc::new(put) }
    }

    /// Records that the put was closed, or is unconfirmed.
    pub(in crate::client) fn close(&self) {
        self.put.close();
    }

    /// Returns the key.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// Returns the upload with its key.
    pub(in crate::client) fn keyed(&self) -> KeyedUpload<'_> {
        ((&self.key).into(), &self.upload)
    }

    /// Returns the length of the object.
    pub fn length(&self) -> u64 {
        self.upload.length()
    }

    /// Merges the failed replicas from a clone that was written through.
    pub(in crate::client) fn merge(&mut self, other: Self) {
        self.upload.merge(other.upload);
    }
}
