//! Memory that the client lends to the pool, and registered memory of the caller.

use std::{path::Path, time::Duration};

use mooncake_base::{Result, SegmentId};

use super::Client;

impl Client {
    /// Lends more memory to the pool, as one segment, or as several if it exceeds the largest
    /// segment size.
    ///
    /// # Errors
    /// The memory cannot be allocated, or the master refuses or cannot be reached. Nothing is
    /// mounted then.
    pub fn mount(&self, bytes: u64) -> Result<Vec<SegmentId>> {
        self.inner.session.mount(bytes)
    }

    /// Lends a part of a file to the pool; objects put there are written to the file.
    ///
    /// # Errors
    /// The file cannot be mapped, `offset` is not a multiple of the page size, the file is too
    /// short, or the master refuses or cannot be reached. Nothing is mounted then.
    pub fn mount_file(
        &self,
        path: &Path,
        offset: u64,
        bytes: u64,
        location: &str,
    ) -> Result<SegmentId> {
        self.inner.session.mount_file(path, offset, bytes, location)
    }

    /// Unmounts a segment and frees its memory, at once or after a grace period in which the
    /// segment can be read but accepts no new objects. Objects without a replica elsewhere are
    /// lost.
    ///
    /// # Errors
    /// The segment does not belong to this client, or the master cannot be reached; then it stays
    /// mounted, but one with a grace may leave at its end: the master may have got the call.
    pub fn unmount(&self, segment: SegmentId, grace: Duration) -> Result<()> {
        self.inner.session.unmount(segment, grace)
    }

    /// Returns the ids of the client's mounted segments.
    pub fn mounted(&self) -> Vec<SegmentId> {
        if self.inner.lifetime.check_open().is_err() {
            return Vec::new();
        }
        self.inner.session.segments().ids()
    }

    /// Registers memory of the caller with the engine, for transfers into it. Touches no page.
    ///
    /// # Errors
    /// The range is empty or overlaps a registered range.
    pub fn register_memory(&self, address: u64, length: u64) -> Result<()> {
        self.inner.lifetime.check_open()?;
        self.inner.engine.regions().register(address, length, "*")
    }

    /// Unregisters the range that begins at `address`.
    ///
    /// # Errors
    /// No registered range begins there, or a peer still uses it.
    pub fn unregister_memory(&self, address: u64) -> Result<()> {
        self.inner.lifetime.check_open()?;
        self.inner.engine.regions().unregister(address)
    }
}
