//! The owner of a directory of records: mounts it, reports its records, takes objects over, and answers
//! readers. The store client's code decides what comes next, and until when memory may be read.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::{ErrorCode, Incarnation, Moment};
use mooncake_master::state::DiskSpec;
use mooncake_store_client::protocol::{
    DirectorySession, DirectoryStep, hand_over_end, leave_out_dropped,
};

use crate::{
    actor::client::{Input, Op, Step},
    actor::repeated_call::{Progress, RepeatedCall},
    call::{Call, HandedOver, LongName, Place, RecordReport, Reply},
    directory::{Directory, RecordName, Written},
    plan::{Bug, WORD_BYTES},
    simulator::{Event, Simulator},
};

/// The most words in a piece.
const PIECE_WORDS: u64 = 16;
/// The most records in one report of all.
const PAGE: u64 = 6;
/// The longest pause before objects are asked for again, while there are operations and afterwards.
const PAUSE_MILLIS_MAX: u64 = 150;
const QUIET_PAUSE: Duration = Duration::from_millis(500);
/// The pause after a failure.
const FAILURE_PAUSE: Duration = Duration::from_millis(100);
/// How long a directory whose earlier owner seems to live is tried to be mounted.
const TAKE_OVER_TIME: Duration = Duration::from_secs(3);
/// Records are synced at least this often.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// The same while there is nothing to write, as long as a call for objects is held.
const IDLE_SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// The open directory of a process.
#[derive(Debug)]
pub(crate) struct OwnDirectory {
    /// The number of the directory.
    pub(crate) number: usize,
    pub(crate) session: DirectorySession,
    /// Records that reads found to be gone, and that the master is not told of yet.
    pub(crate) lost: Vec<RecordName>,
    /// Whether an operation serves it.
    pub(crate) is_served: bool,
    /// Whether it is to be taken out of the pool.
    pub(crate) is_leaving: bool,
    /// Whether the master has taken it once.
    was_mounted: bool,
    /// When it was first tried to be mounted.
    tried_since: Option<Moment>,
    synced_at: Moment,
}

/// The operation that serves a directory as long as its process lives.
#[derive(Debug)]
pub(crate) struct DirectoryOwner {
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Pausing,
    /// Waits for the answer to a mount after so many registrations.
    Mounting(u64, RepeatedCall),
    /// Reports a page of all records; the others follow.
    ReportingAll {
        page: Vec<LongName>,
        later: Vec<LongName>,
        call: RepeatedCall,
    },
    ReportingLost(Vec<RecordName>, RepeatedCall),
    /// Waits for objects, asked for at this time.
    Fetching(Moment, RepeatedCall),
    Reading(Reading),
    /// What is to be reported of the objects that were taken over.
    Written(Box<RecordReport>),
    Reporting(Vec<LongName>, RepeatedCall),
    Leaving(RepeatedCall),
}

/// Objects that were taken over and are being read.
#[derive(Debug)]
struct Reading {
    /// The objects to read; the first one is being read.
    objects: VecDeque<HandedOver>,
    /// What was read of the first one.
    words: Vec<u64>,
    read: Vec<(LongName, Option<Vec<u64>>)>,
    /// Until when bytes count, on the clock of the process.
    until: Moment,
}

impl OwnDirectory {
    pub(crate) fn new(number: usize, now: Moment) -> Self {
        Self {
            number,
            session: DirectorySession::default(),
            lost: Vec::new(),
            is_served: false,
            is_leaving: false,
            was_mounted: false,
            tried_since: None,
            synced_at: now,
        }
    }
}

impl DirectoryOwner {
    pub(crate) fn new() -> Self {
        Self { stage: Stage::Pausing }
    }

    pub(crate) fn step(
        mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Step {
        let goes_on = match (&mut self.stage, input) {
            (Stage::Pausing, Input::Begin | Input::Again) => self.next(simulator, caller),
            (Stage::Written(report), _) => {
                let report = report.clone();
                self.report(simulator, caller, report)
            }
            (Stage::Reading(reading), Input::Again) => {
                if !reading.until.has_passed(simulator.clock(caller.0)) {
                    return Ok(Some(Op::Directory(self)));
                }
                // A piece that is read later than this must not be taken for one of another object.
                let report = self.write(simulator, caller)?;
                let next = Self { stage: Stage::Written(Box::new(report)) };
                let number = simulator.next_number();
                simulator.start_op((caller.0, number), Op::Directory(next), false)?;
                return Ok(None);
            }
            (Stage::Reading(reading), Input::Read(words)) => {
                match words {
                    Some(words) => reading.words.extend(words),
                    None => reading.end_object(None),
                }
                self.read_next(simulator, caller)?
            }
            (Stage::Pausing | Stage::Reading(_), _) => true,
            (
                Stage::Mounting(_, call)
                | Stage::ReportingAll { call, .. }
                | Stage::ReportingLost(_, call)
                | Stage::Fetching(_, call)
                | Stage::Reporting(_, call)
                | Stage::Leaving(call),
                input,
            ) => {
                let reply = match call.step(simulator, caller, input) {
                    Progress::Waiting => return Ok(Some(Op::Directory(self))),
                    Progress::Answered(message) => message.reply,
                    Progress::GivenUp => Reply::Failed(ErrorCode::RPC_TIMEOUT),
                };
                self.answered(simulator, caller, reply)?
            }
        };
        Ok(goes_on.then_some(Op::Directory(self)))
    }

    /// Takes the next step. Returns whether the operation goes on.
    fn next(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> bool {
        let Some(process) = simulator.processes.get_mut(&caller.0) else { return false };
        let registrations = process.session.registrations();
        let Some(own) = &mut process.directory else { return false };
        if registrations == 0 {
            return self.pause(simulator, caller, FAILURE_PAUSE);
        }
        let (session, is_leaving) = (own.session, own.is_leaving);
        let directory = &simulator.directories[own.number];
        let disk = directory.id;
        if is_leaving {
            let call = Call::UnmountDisk { disk, is_forgotten: false };
            self.stage = Stage::Leaving(RepeatedCall::send(simulator, caller, call));
            return true;
        }
        match session.next_step(registrations) {
            DirectoryStep::Mount => {
                own.tried_since.get_or_insert(simulator.now);
                let spec = Box::new(spec_of(caller.0, directory));
                let call = Call::MountDisk { spec, used: directory.used() * WORD_BYTES };
                let call = RepeatedCall::send(simulator, caller, call);
                self.stage = Stage::Mounting(registrations, call);
            }
            DirectoryStep::ReportAll => {
                let records = directory.records();
                self.report_page(simulator, caller, records);
            }
            DirectoryStep::TakeOver if !own.lost.is_empty() => {
                let lost = std::mem::take(&mut own.lost);
                let dropped = lost.iter().map(|name| (name.clone(), 0)).collect();
                let used = directory.used();
                let report = RecordReport { dropped, used, ..RecordReport::of(disk) };
                let call = Call::ReportRecords(Box::new(report));
                self.stage =
                    Stage::ReportingLost(lost, RepeatedCall::send(simulator, caller, call));
            }
            DirectoryStep::TakeOver => {
                let limit = simulator.random.between(1, 4) as usize;
                let call = Call::FetchOffloads { disk, limit };
                let asked = simulator.now;
                self.stage = Stage::Fetching(asked, RepeatedCall::send(simulator, caller, call));
            }
        }
        true
    }

    fn pause(&mut self, simulator: &mut Simulator, caller: (u64, u64), pause: Duration) -> bool {
        self.stage = Stage::Pausing;
        simulator.input_after(pause, caller, Input::Again);
        true
    }

    /// Reports the first records of these, and the others later.
    fn report_page(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        mut later: Vec<LongName>,
    ) {
        let Some(directory) = simulator.own_directory(caller.0) else { return };
        let (disk, used) = (directory.id, directory.used());
        let count = simulator.random.between(1, PAGE).min(later.len() as u64);
        let page: Vec<LongName> = later.drain(..count as usize).collect();
        let (added, is_complete) = (page.clone(), later.is_empty());
        let report = RecordReport { added, used, is_complete, ..RecordReport::of(disk) };
        let call = Call::ReportRecords(Box::new(report));
        let call = RepeatedCall::send(simulator, caller, call);
        self.stage = Stage::ReportingAll { page, later, call };
    }

    /// Handles the answer to a call. Returns whether the operation goes on.
    fn answered(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        reply: Reply,
    ) -> Result<bool, String> {
        let stage = std::mem::replace(&mut self.stage, Stage::Pausing);
        if let Stage::Leaving(_) = stage {
            // A client that ends leaves, too; the master learns that another way if need be.
            let ends = !matches!(reply, Reply::Done) || simulator.random.happens(500);
            simulator.outcome.disks_left += 1;
            simulator.close_directory(caller.0, ends);
            return Ok(false);
        }
        let failure = if let Reply::Failed(code) = reply { Some(code) } else { None };
        let Some(process) = simulator.processes.get_mut(&caller.0) else { return Ok(false) };
        let Some(own) = &mut process.directory else { return Ok(false) };
        if let Some(code) = failure {
            own.session.failed(code);
            match stage {
                Stage::ReportingLost(lost, _) => own.lost.extend(lost),
                Stage::Reporting(..) => own.session.report_failed(),
                Stage::Mounting(..) if code == ErrorCode::SEGMENT_ALREADY_EXISTS => {
                    simulator.outcome.mounts_refused += 1;
                    let since = own.tried_since.unwrap_or_default() + TAKE_OVER_TIME;
                    if !own.was_mounted && since.has_passed(simulator.now) {
                        // Its setup fails.
                        simulator.close_directory(caller.0, !simulator.is_quiet);
                        return Ok(false);
                    }
                }
                _ => {}
            }
            simulator.handle_refusal(caller.0, code);
            return Ok(self.pause(simulator, caller, FAILURE_PAUSE));
        }
        match (stage, reply) {
            (Stage::Mounting(registrations, _), Reply::Done) => {
                own.session.mounted(registrations);
                own.was_mounted = true;
                simulator.outcome.disk_mounts += 1;
                Ok(self.next(simulator, caller))
            }
            (Stage::ReportingAll { page, later, .. }, Reply::Reported(stale)) => {
                if later.is_empty() {
                    own.session.reported();
                }
                simulator.remove_stale(caller.0, &page, &stale);
                if later.is_empty() {
                    return Ok(self.next(simulator, caller));
                }
                self.report_page(simulator, caller, later);
                Ok(true)
            }
            (Stage::ReportingLost(..), Reply::Reported(_)) => Ok(self.next(simulator, caller)),
            (Stage::Fetching(asked, _), Reply::Offloads { objects, window }) => {
                self.taken_over(simulator, caller, asked, (objects, window))
            }
            (Stage::Reporting(added, _), Reply::Reported(stale)) => {
                simulator.outcome.offloaded += (added.len() - stale.len()) as u64;
                simulator.remove_stale(caller.0, &added, &stale);
                simulator.sync_directory(caller.0, SYNC_INTERVAL);
                Ok(self.pause(simulator, caller, Duration::ZERO))
            }
            (stage, reply) => Err(format!("{reply:?} is no answer to {stage:?}")),
        }
    }

    /// Handles objects that were taken over.
    fn taken_over(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        asked: Moment,
        (objects, window): (Vec<HandedOver>, Duration),
    ) -> Result<bool, String> {
        if objects.is_empty() {
            simulator.sync_directory(caller.0, IDLE_SYNC_INTERVAL);
            let pause = if simulator.is_quiet {
                QUIET_PAUSE
            } else {
                Duration::from_millis(simulator.random.below(PAUSE_MILLIS_MAX))
            };
            return Ok(self.pause(simulator, caller, pause));
        }
        simulator.outcome.handed_over += objects.len() as u64;
        let until = hand_over_end(simulator.clock_at(caller.0, asked), window);
        let left = until.left(simulator.clock(caller.0));
        self.stage = Stage::Reading(Reading {
            objects: objects.into(),
            words: Vec::new(),
            read: Vec::new(),
            until,
        });
        if !simulator.plan.has(Bug::IgnoresHandOverFences) {
            simulator.input_after(left, caller, Input::Again);
        }
        self.read_next(simulator, caller)
    }

    /// Reads the next piece, or writes what was read.
    fn read_next(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        let Stage::Reading(reading) = &mut self.stage else { return Ok(true) };
        while let Some(object) = reading.objects.front() {
            let (length, first) = (object.record.1, reading.words.len() as u64);
            if first == length {
                let words = std::mem::take(&mut reading.words);
                reading.end_object(Some(words));
                continue;
            }
            let Some(place) = nearest(caller.0, &object.places) else {
                reading.end_object(None);
                continue;
            };
            let words = simulator.random.between(1, PIECE_WORDS).min(length - first);
            simulator.read_piece(caller, place, first..first + words);
            return Ok(true);
        }
        let report = self.write(simulator, caller)?;
        Ok(self.report(simulator, caller, Box::new(report)))
    }

    /// Writes the objects that were read in time. Returns what is to be reported.
    fn write(&self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<RecordReport, String> {
        let Stage::Reading(reading) = &self.stage else {
            return Err("what was not read is written".to_owned());
        };
        let unread = reading.objects.iter().map(|object| (object.record.clone(), None));
        let read: Vec<_> = reading.read.iter().cloned().chain(unread).collect();
        let is_late = reading.until.has_passed(simulator.clock(caller.0))
            && !simulator.plan.has(Bug::IgnoresHandOverFences);
        simulator.write_records(caller.0, read, is_late)
    }

    /// Reports what became of the objects that were taken over.
    fn report(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        report: Box<RecordReport>,
    ) -> bool {
        let added = report.added.clone();
        let call = RepeatedCall::send(simulator, caller, Call::ReportRecords(report));
        self.stage = Stage::Reporting(added, call);
        true
    }
}

impl Reading {
    /// Ends the reading of the first object.
    fn end_object(&mut self, words: Option<Vec<u64>>) {
        self.words.clear();
        self.read.extend(self.objects.pop_front().map(|object| (object.record, words)));
    }
}

impl Simulator {
    /// Starts to serve the directory of a process, if it has one that is not served.
    pub(crate) fn serve_directory(&mut self, process: u64) -> Result<(), String> {
        let number = self.next_number();
        let found = self.processes.get_mut(&process).and_then(|found| found.directory.as_mut());
        match found.filter(|own| !own.is_served) {
            Some(own) => {
                own.is_served = true;
                self.start_op((process, number), Op::Directory(DirectoryOwner::new()), false)
            }
            None => Ok(()),
        }
    }

    /// Returns the directory that a process has open.
    pub(crate) fn own_directory(&mut self, process: u64) -> Option<&mut Directory> {
        let own = self.processes.get(&process)?.directory.as_ref()?;
        self.directories.get_mut(own.number)
    }

    /// Writes objects that were taken over, unless they were read too late. Returns what is to be
    /// reported.
    fn write_records(
        &mut self,
        process: u64,
        read: Vec<(LongName, Option<Vec<u64>>)>,
        is_late: bool,
    ) -> Result<RecordReport, String> {
        let own = self.processes.get(&process).and_then(|found| found.directory.as_ref());
        let own = own.ok_or("a process writes to a directory that it has closed")?;
        let directory = &mut self.directories[own.number];
        let mut report = RecordReport::of(directory.id);
        let mut evicted = Vec::new();
        let reports_unwritten = self.plan.has(Bug::ReportsUnwritten);
        for ((name, length), words) in read {
            let words = if is_late { None } else { words };
            let Some(words) = words else {
                self.outcome.late_hand_overs += u64::from(is_late);
                let outcome =
                    if reports_unwritten { &mut report.added } else { &mut report.refused };
                outcome.push((name, length));
                continue;
            };
            self.history.check_words(&name, &words)?;
            match directory.write(self.now, name.clone(), words, &mut evicted) {
                Written::Good => {
                    self.records.record_written(directory.id, &name);
                    report.added.push((name, length));
                }
                Written::Full | Written::TooLong | Written::Superseded => {
                    self.outcome.records_refused += 1;
                    report.refused.push((name, length));
                }
            }
        }
        if directory.used() > directory.capacity + directory.extent_words {
            return Err(format!(
                "a directory of {} words has {}",
                directory.capacity,
                directory.used()
            ));
        }
        self.outcome.records_evicted += evicted.len() as u64;
        leave_out_dropped(&mut report.added, &evicted);
        report.dropped = evicted.into_iter().map(|name| (name, 0)).collect();
        report.used = directory.used();
        Ok(report)
    }

    /// Removes those records that nobody will ask for.
    fn remove_stale(&mut self, process: u64, added: &[LongName], stale: &[usize]) {
        let Some(directory) = self.own_directory(process) else { return };
        for (name, _) in stale.iter().filter_map(|&at| added.get(at)) {
            directory.remove(name);
        }
        self.outcome.stale_records += stale.len() as u64;
    }

    /// Brings the records of a process to the device if the last time was so long ago.
    fn sync_directory(&mut self, process: u64, interval: Duration) {
        let now = self.now;
        let Some(found) = self.processes.get_mut(&process) else { return };
        if let Some(own) = &mut found.directory
            && (own.synced_at + interval).has_passed(now)
        {
            own.synced_at = now;
            self.directories[own.number].sync();
        }
    }

    /// Closes the directory of a process, which ends perhaps.
    fn close_directory(&mut self, process: u64, ends: bool) {
        let Some(directory) = self.own_directory(process) else { return };
        directory.sync();
        directory.open_by = None;
        if let Some(found) = self.processes.get_mut(&process) {
            found.directory = None;
        }
        if ends {
            self.kill_process(process);
        }
    }

    /// Asks the owner of a directory for a record.
    pub(crate) fn load_record(&mut self, caller: (u64, u64), place: Place, name: RecordName) {
        let there = self.piece_delay();
        self.after(there, Event::Load { caller, place, name });
    }

    /// Loads a record for a reader whose request has reached the owner. A stopped owner answers later.
    pub(crate) fn answer_load(&mut self, caller: (u64, u64), place: Place, name: RecordName) {
        let trusts_all = self.plan.has(Bug::TrustsUnsyncedRecords);
        let (now, owner) = (self.now, place.endpoint);
        let mut loaded = None;
        if let Some(process) = self.processes.get_mut(&owner) {
            if !process.stalled_until.has_passed(now) {
                let stalled_until = process.stalled_until;
                return self.at(stalled_until, Event::Load { caller, place, name });
            }
            if let Some(own) = &mut process.directory
                && self.directories[own.number].id == place.segment
            {
                let outcome = self.directories[own.number].read(&name, trusts_all);
                if !matches!(outcome, crate::directory::Loaded::Good(_)) {
                    own.lost.push(name);
                }
                loaded = Some(outcome);
            }
        }
        let back = self.piece_delay();
        self.after(back, Event::Input { caller, input: Input::Loaded(loaded) });
    }
}

fn spec_of(process: u64, directory: &Directory) -> DiskSpec {
    DiskSpec {
        id: directory.id,
        incarnation: Incarnation(directory.incarnation),
        name: format!("host-{process}:1"),
        address: format!("host-{process}:2"),
        capacity: directory.capacity * WORD_BYTES,
    }
}

/// Returns the place in memory that is read: one of this process if there is one.
fn nearest(process: u64, places: &[Place]) -> Option<Place> {
    let own = places.iter().find(|place| place.endpoint == process);
    own.or_else(|| places.first()).copied()
}
