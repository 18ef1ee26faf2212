//! Memory that the client lends to the pool, and memory of the user that transfers go to and from.

use std::{
    path::{Path, PathBuf},
    sync::mpsc,
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SegmentId, SystemClock};
use mooncake_proto::v1::{self, request::Call, response::Call as Answer};
use mooncake_transfer_engine::{FileMemory, SharedMemory};

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
    memory: Memory,
    /// The end of its grace, if it is on its way out.
    leaves: Option<Moment>,
}

#[derive(Debug)]
enum Memory {
    /// Memory of our own.
    Own(#[allow(dead_code, reason = "held for its drop")] SharedMemory),
    /// A part of a file, and which.
    File(#[allow(dead_code, reason = "held for its drop")] FileMemory, FilePart),
}

/// A part of a file.
#[derive(Debug, Clone)]
struct FilePart {
    path: PathBuf,
    offset: u64,
    location: String,
}

/// What is said of segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Announcement {
    /// They are lent from now on.
    New,
    /// They were lent before; what lies in them is still there.
    Again,
    /// They and no others are lent.
    All,
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

    /// Lends a part of a file to the pool; what is put there goes into the file.
    ///
    /// # Errors
    /// The file cannot be mapped, `offset` is no multiple of the page size, the file has not so many
    /// bytes, or the master refuses or cannot be reached. Nothing is lent then.
    pub fn mount_file(
        &self,
        path: &Path,
        offset: u64,
        bytes: u64,
        location: &str,
    ) -> Result<SegmentId> {
        let part = FilePart { path: path.to_owned(), offset, location: location.to_owned() };
        self.shared.mount_file(part, bytes)
    }

    /// Takes a segment out of the pool and frees its memory: at once, or after a grace in which it
    /// can be read but takes no new objects. Objects that lie only there are gone then.
    ///
    /// # Errors
    /// It is no segment of this client, or the master cannot be reached: then it stays mounted.
    pub fn unmount(&self, segment: SegmentId, grace: Duration) -> Result<()> {
        self.shared.unmount(segment, grace)
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
    fn all(&self) -> Vec<v1::Segment> {
        self.0.lock().iter().map(|mounted| mounted.segment.clone()).collect()
    }

    /// Hands out those of which the grace is over.
    fn take_left(&self, now: Moment) -> Vec<Mounted> {
        let is_over = |mounted: &mut Mounted| mounted.leaves.is_some_and(|end| end.has_passed(now));
        self.0.lock().extract_if(.., is_over).collect()
    }

    fn leave_at(&self, id: SegmentId, end: Moment) {
        let mut segments = self.0.lock();
        if let Some(mounted) = segments.iter_mut().find(|mounted| mounted.is(id)) {
            mounted.leaves = Some(mounted.leaves.map_or(end, |earlier| earlier.min(end)));
        }
    }

    /// Hands all of them out; none is left.
    pub(super) fn take_all(&self) -> Vec<Mounted> {
        self.replace(&|_| true, Vec::new())
    }

    fn replace(&self, is_meant: &impl Fn(&Mounted) -> bool, by: Vec<Mounted>) -> Vec<Mounted> {
        let mut segments = self.0.lock();
        let replaced = segments.extract_if(.., |mounted| is_meant(mounted)).collect();
        segments.extend(by);
        replaced
    }

    /// The length of each of those that stay, and the part of a file that it is.
    fn shapes(&self, is_meant: &impl Fn(&Mounted) -> bool) -> Vec<(u64, Option<FilePart>)> {
        let segments = self.0.lock();
        let staying = segments.iter().filter(|mounted| mounted.leaves.is_none());
        staying
            .filter(|mounted| is_meant(mounted))
            .map(|mounted| match &mounted.memory {
                Memory::Own(_) => (mounted.segment.length, None),
                Memory::File(_, part) => (mounted.segment.length, Some(part.clone())),
            })
            .collect()
    }

    fn ids(&self) -> Vec<SegmentId> {
        self.0.lock().iter().filter_map(|m| SegmentId::from_bytes(&m.segment.id)).collect()
    }

    /// Whether it is one of ours.
    pub(super) fn has(&self, id: SegmentId) -> bool {
        self.0.lock().iter().any(|mounted| mounted.is(id))
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
    /// Announces the memory that an earlier master knew, or this one before it gave us up. Where
    /// nothing is known of it, fresh memory takes its place; hands out what was replaced.
    ///
    /// A master that knows nothing of the memory knows neither the objects in it nor who may still
    /// read and write there by its predecessor's leave. What it gives away next must be memory
    /// that nobody else was ever told of.
    ///
    /// # Errors
    /// The master cannot be reached or refuses, or the system has no such memory; nothing is
    /// changed.
    pub(super) fn resume_segments(&self, deadline: Moment) -> Result<Vec<Mounted>> {
        let segments = self.segments.all();
        let results = self.announce(&segments, Announcement::Again, deadline)?;
        let mut lost = Vec::new();
        for (segment, result) in segments.into_iter().zip(results) {
            match result {
                Err(error) if error.code() == ErrorCode::SEGMENT_NOT_FOUND => lost.push(segment),
                result => result?,
            }
        }
        self.renew_segments(&lost)
    }

    /// Fresh memory in the place of all; hands out what it was. For a master that cannot know
    /// what lies in it.
    pub(super) fn renew_all_segments(&self) -> Result<Vec<Mounted>> {
        self.renew_segments(&self.segments.all())
    }

    /// Tells the master all that we lend; what else it knows of us goes.
    pub(super) fn announce_all(&self, deadline: Moment) -> Result<()> {
        all_known(self.announce(&self.segments.all(), Announcement::All, deadline)?)
    }

    /// Tells the master of segments, and hears what it says of each.
    fn announce(
        &self,
        segments: &[v1::Segment],
        kind: Announcement,
        deadline: Moment,
    ) -> Result<Vec<Result<()>>> {
        // That nothing is lent is worth saying only to a master that may think otherwise.
        let is_news = kind == Announcement::All && self.registrations() > 0;
        if segments.is_empty() && !is_news {
            return Ok(Vec::new());
        }
        let call = Call::Mount(v1::MountRequest {
            caller: Some(self.caller.clone()),
            segments: segments.to_vec(),
            resume: kind == Announcement::Again,
            turn: self.next_announcement(),
            is_all: kind == Announcement::All,
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Answer::Mount(response) => Some(response),
            _ => None,
        })?;
        call::check_count(response.results.len(), segments.len())?;
        Ok(response.results.iter().map(Result::from).collect())
    }

    /// Fresh memory, under new ids, in the place of these, and nothing where they were to go
    /// anyway; hands out what they were.
    fn renew_segments(&self, lost: &[v1::Segment]) -> Result<Vec<Mounted>> {
        let is_lost = |mounted: &Mounted| lost.iter().any(|lost| lost.id == mounted.segment.id);
        let fresh = self.segments.shapes(&is_lost).into_iter().map(|(bytes, part)| match part {
            None => self.allocate(bytes),
            Some(part) => self.map_file(part, bytes),
        });
        Ok(self.segments.replace(&is_lost, fresh.collect::<Result<_>>()?))
    }

    /// Frees the segments of which the grace is over.
    pub(super) fn free_left(&self) {
        free_soon(self.segments.take_left(SystemClock.now()));
    }

    fn mount_file(&self, part: FilePart, bytes: u64) -> Result<SegmentId> {
        self.check_open()?;
        let mounted = self.map_file(part, bytes)?;
        let id = SegmentId::from_bytes(&mounted.segment.id);
        let id = id.ok_or_else(|| Error::internal("a segment was made without an id"))?;
        self.mount_all(vec![mounted]).map(|()| id)
    }

    fn mount(&self, bytes: u64) -> Result<Vec<SegmentId>> {
        self.check_open()?;
        if bytes == 0 {
            return Err(Error::invalid("a segment of no bytes cannot be mounted"));
        }
        let mut mounted = Vec::new();
        let mut left = bytes;
        while left > 0 {
            let length = left.min(self.config.segment_bytes_max.max(1));
            mounted.push(self.allocate(length)?);
            left -= length;
        }
        let id = |mounted: &Mounted| SegmentId::from_bytes(&mounted.segment.id);
        let ids = mounted.iter().filter_map(id).collect();
        self.mount_all(mounted).map(|()| ids)
    }

    fn mount_all(&self, mut mounted: Vec<Mounted>) -> Result<()> {
        let deadline = self.rpc_deadline();
        let segments: Vec<_> = mounted.iter().map(|mounted| mounted.segment.clone()).collect();
        let registrations = self.registrations();
        let mut outcome = self.mount_now(&segments, &mut mounted, deadline);
        if is_unknown(&outcome) {
            self.revive(registrations, deadline)?;
            outcome = self.mount_now(&segments, &mut mounted, deadline);
        }
        if outcome.is_err() {
            // Whether the master knows the memory or not: what it is told next sets it right.
            self.doubt_master();
        }
        outcome
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
        all_known(self.announce(segments, Announcement::New, deadline)?)?;
        let mut all = self.segments.0.lock();
        if self.is_closed() {
            return Err(Error::closed("the client was closed while it mounted memory"));
        }
        all.append(mounted);
        Ok(())
    }

    fn unmount(&self, id: SegmentId, grace: Duration) -> Result<()> {
        let deadline = self.rpc_deadline();
        let _turn = self.turn(deadline)?;
        if !self.segments.ids().contains(&id) {
            let text = "the client has no such segment";
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, text).with("segment", id));
        }
        let call = Call::Unmount(v1::UnmountRequest {
            caller: Some(self.caller.clone()),
            segments: vec![id.to_bytes().to_vec().into()],
            grace_period_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
            turn: self.next_announcement(),
        });
        let response = self.call_until(call, deadline, |answer| match answer {
            Answer::Unmount(response) => Some(response),
            _ => None,
        })?;
        call::check_count(response.results.len(), 1)?;
        match Result::from(&response.results[0]) {
            Err(error) if !is_gone(&error) => Err(error.with("segment", id)),
            Ok(()) if !grace.is_zero() => {
                self.segments.leave_at(id, SystemClock.now() + grace);
                Ok(())
            }
            // The master has forgotten it already: so do we.
            _ => {
                drop(self.segments.take(id));
                Ok(())
            }
        }
    }

    fn allocate(&self, length: u64) -> Result<Mounted> {
        let memory = self.engine.allocate(length)?;
        let segment = self.describe(memory.base(), length);
        Ok(Mounted { segment, memory: Memory::Own(memory), leaves: None })
    }

    fn map_file(&self, part: FilePart, length: u64) -> Result<Mounted> {
        let memory = self.engine.map_file(&part.path, part.offset, length, &part.location)?;
        let segment = self.describe(memory.base(), length);
        Ok(Mounted { segment, memory: Memory::File(memory, part), leaves: None })
    }

    /// A segment of ours, under an id of its own.
    fn describe(&self, base: u64, length: u64) -> v1::Segment {
        v1::Segment {
            id: SegmentId::random().to_bytes().to_vec().into(),
            incarnation: 1,
            name: self.name.clone(),
            endpoint: self.engine.segment_name().to_owned(),
            base,
            length,
            protocol: "tcp".to_owned(),
        }
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

/// A segment that the master knows already is as good as one that it has just come to know.
fn all_known(results: Vec<Result<()>>) -> Result<()> {
    let is_known = |error: &Error| error.code() == ErrorCode::SEGMENT_ALREADY_EXISTS;
    results.into_iter().filter_map(Result::err).find(|error| !is_known(error)).map_or(Ok(()), Err)
}

fn is_gone(error: &Error) -> bool {
    [ErrorCode::SEGMENT_NOT_FOUND, ErrorCode::CLIENT_NOT_FOUND].contains(&error.code())
}

/// Whether the master does not know the client, as after its restart.
pub(super) fn is_unknown<T>(outcome: &Result<T>) -> bool {
    matches!(outcome, Err(error) if error.code() == ErrorCode::CLIENT_NOT_FOUND)
}
