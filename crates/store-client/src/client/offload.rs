//! The directories of a client: announces each to the master with its records, takes over objects
//! that are to be written there or brought into memory, and reports what became of them.
//!
//! A thread for each directory does this. It waits at the master for objects; after each registration
//! of the client it announces the directory again.

pub(in crate::client) mod directory_calls;
mod promotion;

use std::{sync::Arc, time::Duration};

use mooncake_base::{Backoff, Clock, Error, ErrorCode, ErrorKind, Moment, Result, SystemClock};
use mooncake_disk::{Disk, Name, OwnedName, Write, WriteOutcome};
use mooncake_os::threads;
use mooncake_proto::{columns::Record, v1};
use mooncake_transfer_engine::{Opcode, TransferEntry};

use self::directory_calls::{DirectoryCalls, Report};
use super::{Client, ClientInner};
use crate::{
    disk::lent_memory::PayloadBuffer,
    metrics::disk::OffloadRefusal,
    object::Place,
    protocol::{DirectorySession, DirectoryStep, hand_over_end, leave_out_dropped},
    rpc::response,
    transfer::jobs::Jobs,
};

/// Maximum number of objects that are taken over at once.
const OBJECTS_MAX: u32 = 4096;
/// Maximum bytes of these, unless a single one is larger.
const BYTES_MAX: u64 = 64 << 20;
/// How long the master holds a call for objects.
const WAIT: Duration = Duration::from_secs(1);
/// Time that such a call may take beyond that.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Records that were written reach the device at least this often.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// Pauses after failures.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
/// Pause after objects were handed over of which none was written.
const REFUSED_PAUSE: Duration = Duration::from_millis(200);

/// The thread of one directory.
struct Offload<'a> {
    directory: DirectoryCalls<'a>,
    session: DirectorySession,
    buffer: PayloadBuffer,
    synced_at: Moment,
    /// Whether records were written since.
    is_dirty: bool,
    trimmed_at: Moment,
}

impl Client {
    /// Takes the client's directories out of the pool, at once or after a time in which their records
    /// can be read but none is added. The records stay in the directories, and count again once they
    /// are mounted.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`: the client has no directory. Those of the master, of the first directory that
    /// it was not told of: such ones stay open until it knows, since readers are still sent to them.
    pub fn unmount_disks(&self, grace: Duration) -> Result<()> {
        self.inner.lifetime.check_open()?;
        let disks = &self.inner.disks;
        let open: Vec<_> = disks.owners().iter().filter(|owner| owner.disk().is_ok()).collect();
        if open.is_empty() {
            let text = "the client keeps no directory of records";
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, text));
        }
        let mut outcome = Ok(());
        for owner in open {
            owner.leave_at(SystemClock.now() + grace);
            if grace.is_zero() {
                let calls = DirectoryCalls { client: &self.inner, owner };
                let left = calls.leave(self.inner.rpc.deadline());
                outcome = outcome.and(left);
            }
        }
        outcome
    }
}

/// Opens the directories to the pool: mounts each, and starts its thread.
pub(super) fn start(inner: &Arc<ClientInner>) -> Result<()> {
    for owner in inner.disks.owners() {
        let registrations = inner.session.registrations();
        DirectoryCalls { client: inner, owner }.mount_first()?;
        let (inner, owner) = (Arc::clone(inner), Arc::clone(owner));
        let run = move || {
            let directory = DirectoryCalls { client: &inner, owner: &owner };
            Offload::new(directory, registrations).run();
        };
        threads::start_detached("mc-disk", run).map_err(|source| {
            Error::internal("cannot start the thread of a directory").caused_by(source)
        })?;
    }
    Ok(())
}

/// Tells the master that the directories are gone for now, if it answers in time; their records
/// count again once they are mounted.
pub(super) fn unmount_all(client: &ClientInner, deadline: Moment) {
    for owner in client.disks.owners().iter().filter(|owner| owner.disk().is_ok()) {
        if let Err(error) = (DirectoryCalls { client, owner }).unmount(deadline) {
            tracing::debug!(client = client.lifetime.name(), %error, "could not unmount a directory");
        }
    }
}

impl<'a> Offload<'a> {
    fn new(directory: DirectoryCalls<'a>, registrations: u64) -> Self {
        let mut session = DirectorySession::default();
        session.mounted(registrations);
        Self {
            directory,
            session,
            buffer: PayloadBuffer::default(),
            synced_at: SystemClock.now(),
            is_dirty: false,
            trimmed_at: SystemClock.now(),
        }
    }

    /// Runs until the client or the directory is closed.
    fn run(&mut self) {
        let mut failures = 0;
        while !self.directory.client.lifetime.is_closed() {
            let leaves_at = self.directory.owner.leaves_at();
            let outcome = match leaves_at.map(|time| time.left(SystemClock.now())) {
                Some(left) if !self.directory.client.lifetime.sleep_or_closed(left) => return,
                Some(_) => self.directory.leave(self.directory.client.rpc.deadline()),
                None => self.run_once(),
            };
            match outcome {
                Ok(()) if leaves_at.is_some() => return,
                Ok(()) => failures = 0,
                Err(error) if error.kind() == ErrorKind::Closed => return,
                Err(error) => {
                    let path = self.directory.owner.path().display();
                    // While the directory leaves, the master refuses calls about it.
                    let is_leaving = self.directory.owner.leaves_at().is_some()
                        || self.directory.client.lifetime.is_closed();
                    if failures == 0 && !is_leaving {
                        tracing::warn!(%path, %error, "a directory takes over no objects, retrying");
                    }
                    if !self.directory.client.lifetime.sleep_or_closed(PAUSES.pause(failures)) {
                        return;
                    }
                    failures += 1;
                }
            }
        }
    }

    /// Announces the directory if that is due, and takes over some objects.
    fn run_once(&mut self) -> Result<()> {
        let outcome = self.take_steps();
        if let Err(error) = &outcome {
            self.session.failed(error.code());
        }
        outcome
    }

    fn take_steps(&mut self) -> Result<()> {
        loop {
            let registrations = self.directory.client.session.registrations();
            match self.session.next_step(registrations) {
                DirectoryStep::Mount => {
                    self.directory.mount()?;
                    self.session.mounted(registrations);
                }
                DirectoryStep::ReportAll => {
                    self.directory.report_all()?;
                    self.session.reported();
                }
                DirectoryStep::TakeOver => {
                    self.directory.report_lost(self.directory.client.rpc.deadline())?;
                    self.trim()?;
                    if self.directory.owner.disk()?.take_unnamed() == 0 {
                        return self.take_over();
                    }
                    // Records went whose names are not known: the master learns them by a list of
                    // all that are left.
                    self.session.report_failed();
                }
            }
        }
    }

    /// Waits for objects, writes them, and reports what became of them.
    fn take_over(&mut self) -> Result<()> {
        let sent = SystemClock.now();
        let request = v1::FetchOffloadsRequest {
            caller: self.directory.client.rpc.caller(),
            disk: self.directory.owner.id().to_bytes().to_vec().into(),
            limit: OBJECTS_MAX,
            bytes: BYTES_MAX,
            wait_ms: WAIT.as_millis() as u64,
            promotion_bytes: BYTES_MAX,
        };
        let answer =
            self.directory.client.rpc.call_at(request, sent, sent + WAIT + ANSWER_TIMEOUT)?;
        // Somebody may wait for these; objects to be written lie in memory meanwhile.
        let has_promotions = self.promote(&answer, sent).unwrap_or_else(|error| {
            let path = self.directory.owner.path().display();
            tracing::warn!(%path, %error, "objects were not brought into memory");
            false
        });
        let until = hand_over_end(sent, Duration::from_millis(answer.window_ms));
        let records = match &answer.records {
            Some(records) => records.read()?.collect(),
            None => Vec::new(),
        };
        if records.is_empty() {
            if has_promotions {
                return Ok(());
            }
            self.buffer.shrink(true);
            return self.sync();
        }
        let segments = response::read_segments(answer.segments)?;
        let places = response::require_columns(answer.places.as_ref())?;
        let mut places = places.read(records.len()).map_err(response::column_mismatch)?;
        let sources: Vec<Option<Place>> = records
            .iter()
            .map(|record| {
                let messages = places.take().to_messages(record.length);
                let places = response::read_places(messages, &segments, record.length)?;
                Ok(self.nearest(places))
            })
            .collect::<Result<_>>()?;
        let disk = self.directory.owner.disk()?;
        let outcomes = self.read_payloads(&disk, &records, &sources, until);
        let (mut added, mut refused, mut too_long) = (Vec::new(), Vec::new(), Vec::new());
        let mut dropped = self.write_payloads(&disk, &records, outcomes, |at, refusal| {
            let Record { tenant, key, version, length } = records[at];
            let name = Name { tenant, key, version }.to_owned();
            match refusal {
                None => added.push((name, length)),
                Some(OffloadRefusal::TooLong) => too_long.push(name),
                Some(_) => refused.push((name, length)),
            }
        });
        leave_out_dropped(&mut added, &dropped);
        // To try again would be in vain, and says nothing of how well the disk writes.
        dropped.append(&mut too_long);
        self.buffer.shrink(false);
        let report =
            Report { added: &added, refused: &refused, dropped: &dropped, ..Report::default() };
        if let Err(error) =
            self.directory.report(&disk, &report, self.directory.client.rpc.deadline())
        {
            self.session.report_failed();
            return Err(error);
        }
        if added.is_empty() {
            // The master may offer the same objects again at once.
            self.directory.client.lifetime.sleep_or_closed(REFUSED_PAUSE);
        }
        if (self.synced_at + SYNC_INTERVAL).has_passed(SystemClock.now()) {
            return self.sync();
        }
        Ok(())
    }

    /// Returns the place in memory that is read: one of this process if there is one.
    fn nearest(&self, places: impl IntoIterator<Item = Place>) -> Option<Place> {
        let own = self.directory.client.engine.segment_name();
        let mut in_memory = places.into_iter().filter(|place| !place.segment.is_disk);
        let first = in_memory.next()?;
        if first.segment.endpoint == own {
            Some(first)
        } else {
            Some(in_memory.find(|place| place.segment.endpoint == own).unwrap_or(first))
        }
    }

    /// Reads the payload of objects into the buffer, one behind the other. Returns where each lies, or
    /// why it could not be read.
    fn read_payloads(
        &mut self,
        disk: &Disk,
        records: &[Record<'_>],
        sources: &[Option<Place>],
        until: Moment,
    ) -> Vec<std::result::Result<(usize, usize), OffloadRefusal>> {
        let mut jobs = Jobs::with_capacity(records.len());
        let mut outcomes = Vec::with_capacity(records.len());
        let mut end = 0;
        for (record, source) in records.iter().zip(sources) {
            let length_max = disk.payload_bytes_max(record.tenant.len(), record.key.len());
            outcomes.push(match source {
                _ if record.length > length_max => Err(OffloadRefusal::TooLong),
                None => Err(OffloadRefusal::Unreadable),
                Some(_) => {
                    let begin = end;
                    end += record.length as usize;
                    Ok((begin, record.length as usize))
                }
            });
        }
        let client = self.directory.client;
        self.buffer.fill(end, |memory| {
            for (outcome, source) in outcomes.iter().zip(sources) {
                if let (Ok((begin, length)), Some(source)) = (outcome, source) {
                    let entry = TransferEntry::new(memory.part(*begin, *length), source.address());
                    jobs.push(&source.segment, [entry], false);
                }
            }
            client.transfers.run(Opcode::Read, &mut jobs, until);
        });
        let is_late = until.has_passed(SystemClock.now());
        let mut read = jobs.finish();
        for outcome in outcomes.iter_mut().filter(|outcome| outcome.is_ok()) {
            match read.next() {
                Some(Ok(())) if !is_late => {}
                Some(Ok(())) => *outcome = Err(OffloadRefusal::Late),
                Some(Err(_)) | None => *outcome = Err(OffloadRefusal::Unreadable),
            }
        }
        outcomes
    }

    /// Writes payloads. Tells for each object why it was not written, if it was not, and returns the
    /// records that were dropped for others.
    fn write_payloads(
        &mut self,
        disk: &Disk,
        records: &[Record<'_>],
        outcomes: Vec<std::result::Result<(usize, usize), OffloadRefusal>>,
        mut tell: impl FnMut(usize, Option<OffloadRefusal>),
    ) -> Vec<OwnedName> {
        let begin = SystemClock.now();
        let bytes = self.buffer.bytes();
        let mut numbers = Vec::with_capacity(records.len());
        let mut writes = Vec::with_capacity(records.len());
        for (at, (outcome, record)) in outcomes.into_iter().zip(records).enumerate() {
            match outcome {
                Ok((begin, length)) => {
                    let Record { tenant, key, version, .. } = *record;
                    let name = Name { tenant, key, version };
                    numbers.push(at);
                    writes.push(Write { name, payload: &bytes[begin..begin + length] });
                }
                Err(reason) => {
                    self.directory.client.metrics.disk.count_refused(reason);
                    tell(at, Some(reason));
                }
            }
        }
        let report = disk.write(&writes);
        let (mut written, mut written_bytes) = (0, 0);
        for ((at, write), outcome) in numbers.into_iter().zip(&writes).zip(report.outcomes) {
            let reason = match outcome {
                WriteOutcome::Written(_) => {
                    written += 1;
                    written_bytes += write.payload.len() as u64;
                    tell(at, None);
                    continue;
                }
                WriteOutcome::Superseded => OffloadRefusal::Superseded,
                WriteOutcome::TooLong => OffloadRefusal::TooLong,
                WriteOutcome::Full => OffloadRefusal::Full,
                WriteOutcome::Failed(why) => {
                    tracing::debug!(why, "a record cannot be written");
                    OffloadRefusal::Failed
                }
            };
            self.directory.client.metrics.disk.count_refused(reason);
            tell(at, Some(reason));
        }
        let took = SystemClock.now().since(begin);
        let disk = &self.directory.client.metrics.disk;
        disk.written.count(written, written_bytes, took);
        disk.evicted.add_nonzero(report.evicted.len() as u64);
        self.is_dirty |= written > 0;
        report.evicted
    }

    /// Gives files back if other data fills the file system, and reports what was dropped.
    fn trim(&mut self) -> Result<()> {
        let now = SystemClock.now();
        if !(self.trimmed_at + SYNC_INTERVAL).has_passed(now) {
            return Ok(());
        }
        self.trimmed_at = now;
        let owner = self.directory.owner;
        match owner.trim() {
            Ok(dropped) => {
                self.directory.client.metrics.disk.evicted.add_nonzero(dropped.len() as u64);
                // A report that fails is repeated with the records that reads find to be gone.
                owner.put_back_lost(dropped);
                self.directory.report_lost(self.directory.client.rpc.deadline())
            }
            Err(error) if error.kind() == ErrorKind::Closed => Err(error),
            Err(error) => {
                let path = owner.path().display();
                tracing::warn!(%path, %error, "a directory cannot give files back");
                Ok(())
            }
        }
    }

    /// Brings what was written to the device.
    fn sync(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_dirty) {
            return Ok(());
        }
        let synced = self.directory.owner.disk()?.sync();
        self.synced_at = SystemClock.now();
        if let Err(error) = synced {
            let path = self.directory.owner.path().display();
            tracing::warn!(%path, %error, "records on disk may be lost with the power");
        }
        Ok(())
    }
}
