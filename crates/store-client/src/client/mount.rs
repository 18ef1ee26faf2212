//! Memory that the client lends to the pool, and memory of the user that transfers go to and from.

use std::{sync::mpsc, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, ErrorCode, Moment, Result, SegmentId};
use mooncake_proto::v1::{self, request::Call, response::Call as Answer};
use mooncake_transfer_engine::SharedMemory;

use super::{Client, Shared, call};

/// How long closing waits for memory to be free.
const FREE_PATIENCE: Duration = Duration::from_millis(100);

/// The segments of one client.
#[derive(Debug, Default)]
pub(super) struct Segments(Mutex<Vec<Mounted>>);

/// A segment of ours: what the master was told, and the memory.
#[derive(Debug)]
pub(super) struct Mounted {
    segment: v1::Segment,
    _memory: SharedMemory,
}

impl Client {
    /// Lends more memory to the pool, as one segment or, above the largest size, as several.
    ///
    /// # Errors
    /// The system has no such memory, or the master refuses or cannot be reached. Nothing is
    /// lent then.
    pub fn mount(&self, bytes: u64) -> Result<Vec<SegmentId>> {
        self.shared.mount(bytes)
    }

    /// Takes a segment out of the pool and frees its memory. Objects that lie only there are
    /// gone.
    ///
    /// # Errors
    /// It is no segment of this client, or the master cannot be reached: then it stays mounted.
    pub fn unmount(&self, segment: SegmentId) -> Result<()> {
        self.shared.unmount(segment)
    }

    /// The ids of the segments that this client lends.
    pub fn mounted(&self) -> Vec<SegmentId> {
        if self.shared.check_open().is_err() {
            return Vec::new();
        }
        self.shared.segments.ids()
    }
}

impl Segments {
    /// What the master is told of each.
    pub(super) fn all(&self) -> Vec<v1::Segment> {
        self.0.lock().iter().map(|mounted| mounted.segment.clone()).collect()
    }

    /// Hands all of them out; none is left.
    pub(super) fn take_all(&self) -> Vec<Mounted> {
        self.replace_all(Vec::new())
    }

    fn replace_all(&self, by: Vec<Mounted>) -> Vec<Mounted> {
        std::mem::replace(&mut *self.0.lock(), by)
    }

    fn ids(&self) -> Vec<SegmentId> {
        self.0.lock().iter().filter_map(|m| SegmentId::from_bytes(&m.segment.id)).collect()
    }

    fn take(&self, id: SegmentId) -> Option<Mounted> {
        let mut segments = self.0.lock();
        let at = segments.iter().position(|mounted| mounted.is(id))?;
        Some(segments.swap_remove(at))
    }
}

impl Mounted {
    fn is(&self, id: SegmentId) -> bool {
        SegmentId::from_bytes(&self.segment.id) == Some(id)
    }
}

impl Shared {
    /// Tells the master of segments; one that it knows already is as good.
    pub(super) fn announce(&self, segments: &[v1::Segment], deadline: Moment) -> Result<()> {
        if segments.is_empty() {
            return Ok(());
        }
        let call = Call::Mount(v1::MountRequest {
            caller: Some(self.caller.clone()),
            segments: segments.to_vec(),
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Answer::Mount(response) => Some(response),
            _ => None,
        })?;
        call::check_count(response.results.len(), segments.len())?;
        for result in &response.results {
            match Result::from(result) {
                Err(error) if error.code() != ErrorCode::SEGMENT_ALREADY_EXISTS => {
                    return Err(error);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Fresh memory, under new ids, in the place of every segment; hands out what they were.
    ///
    /// For a master that forgot us: it knows neither the objects in the old memory nor who may
    /// still read and write there by its predecessor's leave. What it gives away next must be
    /// memory that nobody else was ever told of.
    ///
    /// # Errors
    /// The system has no such memory; nothing is changed.
    pub(super) fn renew_segments(&self) -> Result<Vec<Mounted>> {
        let lengths: Vec<u64> = self.segments.all().iter().map(|segment| segment.length).collect();
        let fresh: Result<Vec<_>> = lengths.into_iter().map(|bytes| self.allocate(bytes)).collect();
        Ok(self.segments.replace_all(fresh?))
    }

    fn mount(&self, bytes: u64) -> Result<Vec<SegmentId>> {
        self.check_open()?;
        if bytes == 0 {
            return Err(Error::invalid("a segment of no bytes cannot be mounted"));
        }
        let deadline = self.rpc_deadline();
        let mut mounted = Vec::new();
        let mut left = bytes;
        while left > 0 {
            let length = left.min(self.config.segment_bytes_max.max(1));
            mounted.push(self.allocate(length)?);
            left -= length;
        }
        let segments: Vec<_> = mounted.iter().map(|mounted| mounted.segment.clone()).collect();
        let ids: Vec<_> = segments.iter().filter_map(|s| SegmentId::from_bytes(&s.id)).collect();
        let registrations = self.registrations();
        let mut outcome = self.mount_now(&segments, &mut mounted, deadline);
        if is_unknown(&outcome) {
            self.revive(registrations, deadline)?;
            outcome = self.mount_now(&segments, &mut mounted, deadline);
        }
        outcome.map(|()| ids)
    }

    /// Announces the segments and on success keeps them, in one turn: a registration at the same
    /// time announces them too or comes before.
    fn mount_now(
        &self,
        segments: &[v1::Segment],
        mounted: &mut Vec<Mounted>,
        deadline: Moment,
    ) -> Result<()> {
        let _turn = self.turn(deadline)?;
        self.announce(segments, deadline)?;
        let mut all = self.segments.0.lock();
        if self.is_closed() {
            return Err(Error::closed("the client was closed while it mounted memory"));
        }
        all.append(mounted);
        Ok(())
    }

    fn unmount(&self, id: SegmentId) -> Result<()> {
        let deadline = self.rpc_deadline();
        let _turn = self.turn(deadline)?;
        if !self.segments.ids().contains(&id) {
            let text = "the client has no such segment";
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, text).with("segment", id));
        }
        let call = Call::Unmount(v1::UnmountRequest {
            caller: Some(self.caller.clone()),
            segments: vec![id.to_bytes().to_vec().into()],
            grace_period_ms: 0,
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Answer::Unmount(response) => Some(response),
            _ => None,
        })?;
        call::check_count(response.results.len(), 1)?;
        match Result::from(&response.results[0]) {
            Err(error) if !is_gone(&error) => Err(error.with("segment", id)),
            // The master has forgotten it already: so do we.
            _ => {
                drop(self.segments.take(id));
                Ok(())
            }
        }
    }

    fn allocate(&self, length: u64) -> Result<Mounted> {
        let memory = self.engine.allocate(length)?;
        let segment = v1::Segment {
            id: SegmentId::random().to_bytes().to_vec().into(),
            incarnation: 1,
            name: self.name.clone(),
            endpoint: self.engine.segment_name().to_owned(),
            base: memory.base(),
            length,
            protocol: "tcp".to_owned(),
        };
        Ok(Mounted { segment, _memory: memory })
    }
}

/// Gives memory back to the system, waiting only for a moment: a peer that hangs may have to be
/// waited for until it is taken for gone, and nobody who closes a client wants to.
pub(super) fn free_soon(segments: Vec<Mounted>) {
    if segments.is_empty() {
        return;
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let free = move || {
        drop(segments);
        // Nobody listens any more if it took long.
        let _ = sender.send(());
    };
    match std::thread::Builder::new().name("mc-unmap".to_owned()).spawn(free) {
        Ok(_) => drop(receiver.recv_timeout(FREE_PATIENCE)),
        // Without a thread the closure, and with it the memory, has been dropped here.
        Err(error) => tracing::debug!(%error, "no thread to free memory with"),
    }
}

fn is_gone(error: &Error) -> bool {
    [ErrorCode::SEGMENT_NOT_FOUND, ErrorCode::CLIENT_NOT_FOUND].contains(&error.code())
}

/// Whether the master does not know the client, as after its restart.
pub(super) fn is_unknown<T>(outcome: &Result<T>) -> bool {
    matches!(outcome, Err(error) if error.code() == ErrorCode::CLIENT_NOT_FOUND)
}
