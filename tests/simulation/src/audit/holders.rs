//! Which processes hold the copies of an object, and which of them are alive: no copy is dropped in
//! favour of one that cannot be read, and no live client loses its memory.

use std::time::Duration;

use mooncake_base::SegmentId;

use crate::{host::calls::is_staying, simulator::Simulator};

/// The time that a client has beyond its time to live, before the loss of its memory is a violation.
const MARGIN: Duration = Duration::from_secs(1);

/// A copy that the master dropped: the key and the segment.
pub(crate) type DroppedCopy = (Vec<u8>, SegmentId);

impl Simulator {
    /// Checks that each dropped copy was not the last one that could be read, as far as the master can
    /// know.
    ///
    /// # Errors
    /// One of them was.
    pub(crate) fn check_dropped(&self, dropped: &[DroppedCopy]) -> Result<(), String> {
        if dropped.is_empty() {
            return Ok(());
        }
        let Some(state) = self.host.state() else { return Ok(()) };
        let segments = state.list_segments();
        let is_readable = |id: SegmentId| {
            segments
                .iter()
                .any(|view| view.spec.id == id && !view.is_suspect && is_staying(view.status))
        };
        for (key, segment) in dropped {
            let left = self.model.holders(key);
            let was_alive = self.memories.exists(*segment) && is_readable(*segment);
            let has_record = self.model.disk_of(key).is_some();
            if was_alive
                && !has_record
                && !left.is_empty()
                && !left.iter().any(|&id| is_readable(id))
            {
                return Err(format!(
                    "the last readable copy of {} was dropped, in {segment}; left are copies in \
                     {left:?}, whose processes are gone",
                    String::from_utf8_lossy(key)
                ));
            }
        }
        Ok(())
    }

    /// Checks that a segment that left the pool was given up by its owner, or that the master could
    /// not hear of its owner for as long as a client may be silent.
    ///
    /// # Errors
    /// The owner lives, lends the segment, and no fault kept its heartbeats away.
    pub(crate) fn check_lost_segment(&self, id: SegmentId) -> Result<(), String> {
        let owner = self.processes.iter().find(|(_, process)| {
            process.segments.iter().any(|segment| segment.id == id)
                && !process.unmounting.contains(&id)
        });
        let Some((number, process)) = owner else { return Ok(()) };
        let silent = self.plan.rules.client_ttl + MARGIN;
        if (process.impaired_until + silent).has_passed(self.now) && process.is_registered {
            return Err(format!(
                "the master dropped segment {id} of process {number}, which lives, and whose \
                 heartbeats no fault kept away since {:?}",
                process.impaired_until
            ));
        }
        Ok(())
    }
}
