//! The get operation: locate, then read piece by piece. The store client's code decides which copy is
//! read and whether its bytes count; this file carries the decisions out.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, Moment, Version};
use mooncake_store_client::protocol::{
    GrantedFence, ReadExtent, ReadObjects, ReadReplica, ReadSource, ReadStep, ReplicaRank,
    fence_end, replica_order,
};

use crate::{
    actor::client::{Input, Op, Step},
    actor::repeated_call::{Progress, RepeatedCall},
    audit::history,
    call::{Call, Place, Reply},
    directory::{Loaded, RecordName},
    plan::Bug,
    simulator::Simulator,
};

/// The time limit of the transfers of a get.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// The most words in a piece.
const PIECE_WORDS: u64 = 16;

/// A get in progress.
#[derive(Debug)]
pub(crate) struct Get {
    key: u64,
    /// The reading of the located object; `None` before.
    reading: Option<Reading>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Begin,
    /// Waits for the answer to a locate call that was first sent at this time.
    Locating(Moment, RepeatedCall),
    /// Reads the copy at this place in the answer.
    Reading(usize),
    Verifying(RepeatedCall),
}

#[derive(Debug)]
struct Reading {
    objects: ReadObjects,
    located: Located,
    words: Vec<u64>,
}

/// The answer to a locate call.
#[derive(Debug)]
struct Located {
    asked: Moment,
    version: Version,
    length: u64,
    has_checksum: bool,
    places: Vec<Place>,
    fence_end: Moment,
    granted: Option<GrantedFence>,
}

impl Get {
    /// Creates a get of a random key.
    pub(crate) fn random(simulator: &mut Simulator) -> Self {
        let key = simulator.random.below(simulator.plan.keys);
        Self { key, reading: None, stage: Stage::Begin }
    }

    pub(crate) fn step(
        mut self: Box<Self>,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Step {
        let goes_on = match (&mut self.stage, input) {
            (Stage::Begin, _) => self.locate(simulator, caller),
            (Stage::Reading(place), Input::Read(words)) => {
                let place = *place;
                self.piece_read(simulator, caller, place, words)?
            }
            (Stage::Reading(_), Input::Loaded(loaded)) => self.loaded(simulator, caller, loaded)?,
            (Stage::Locating(asked, call), input) => {
                let asked = *asked;
                match call.step(simulator, caller, input) {
                    Progress::Waiting => true,
                    Progress::Answered(message) => {
                        self.located(simulator, caller, (asked, message.reply))?
                    }
                    Progress::GivenUp => {
                        let reply = Reply::Failed(ErrorCode::RPC_TIMEOUT);
                        self.located(simulator, caller, (asked, reply))?
                    }
                }
            }
            (Stage::Verifying(call), input) => {
                let exists = match call.step(simulator, caller, input) {
                    Progress::Waiting => return Ok(Some(Op::Get(self))),
                    Progress::Answered(message) => match message.reply {
                        Reply::IsCurrent(is_current) => Ok(is_current),
                        _ => Err(failed(ErrorCode::RPC_FAIL)),
                    },
                    Progress::GivenUp => Err(failed(ErrorCode::RPC_TIMEOUT)),
                };
                if let Some(reading) = &mut self.reading {
                    reading.objects.verified(0, exists);
                }
                self.go_on(simulator, caller)?
            }
            (Stage::Reading(_), Input::Silent { .. }) => true,
            (Stage::Reading(_), _) => return Err("a read has another input".to_owned()),
        };
        Ok(goes_on.then_some(Op::Get(self)))
    }

    fn locate(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> bool {
        let call = RepeatedCall::send(simulator, caller, Call::Locate { key: self.key });
        self.stage = Stage::Locating(simulator.now, call);
        true
    }

    /// Handles the answer to a locate call, the first or a later one. Returns whether the get goes
    /// on.
    fn located(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        (asked, reply): (Moment, Reply),
    ) -> Result<bool, String> {
        let mut located = match (reply, &mut self.reading) {
            (Reply::Located { version, length, checksum, places, fence, granted }, _) => {
                let asked_for_fence = if simulator.plan.has(Bug::CountsFencesFromAnswer) {
                    simulator.now
                } else {
                    asked
                };
                let asked_for_fence = simulator.clock_at(caller.0, asked_for_fence);
                let fence_end = fence_end(asked_for_fence, fence);
                if checksum.is_some_and(|sum| sum != history::checksum(version)) {
                    return Err(format!("version {version} has a wrong checksum"));
                }
                let has_checksum = checksum.is_some();
                Located { asked, version, length, has_checksum, places, fence_end, granted }
            }
            (Reply::Failed(code), Some(reading)) => {
                reading.objects.relocated(0, Err(failed(code)));
                return self.go_on(simulator, caller);
            }
            (Reply::Failed(code), None) => {
                simulator.handle_refusal(caller.0, code);
                return Ok(false);
            }
            _ => return Err("unexpected reply to a get".to_owned()),
        };
        if simulator.plan.has(Bug::ReleasesFencesEarly) {
            simulator.release_fence(caller.0, &mut located);
        }
        let source = located.source(simulator);
        match &mut self.reading {
            None => {
                let mut objects = ReadObjects::new(simulator.clock(caller.0) + TIME_LIMIT);
                objects.push(source, ReadExtent::Whole);
                self.reading = Some(Reading { objects, located, words: Vec::new() });
            }
            Some(reading) => {
                if reading.objects.relocated(0, Ok(source)) {
                    std::mem::swap(&mut reading.located, &mut located);
                }
                simulator.release_fence(caller.0, &mut located);
            }
        }
        self.go_on(simulator, caller)
    }

    /// Takes the next step. Returns whether the get goes on.
    fn go_on(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        loop {
            let Some(reading) = &mut self.reading else { return Ok(false) };
            match reading.objects.next_step(simulator.clock(caller.0)) {
                ReadStep::Transfer { reads, .. } => {
                    let (_, place) = reads[0];
                    reading.words.clear();
                    let copy = reading.located.places[place];
                    if copy.is_on_disk {
                        let (key, version) = (self.key, reading.located.version);
                        let tenant = simulator.host.tenant_of(key);
                        simulator.load_record(caller, copy, RecordName { tenant, key, version });
                    } else {
                        reading.advance(simulator, caller, place);
                    }
                    self.stage = Stage::Reading(place);
                    return Ok(true);
                }
                ReadStep::Verify(_) if simulator.plan.has(Bug::TrustsLateReads) => {
                    reading.objects.verified(0, Ok(true));
                }
                ReadStep::Verify(late) => {
                    simulator.outcome.late_reads += 1;
                    let (key, version) = (self.key, reading.located.version);
                    let (_, replica) = late[0];
                    let call = Call::Verify { key, version, replica };
                    self.stage = Stage::Verifying(RepeatedCall::send(simulator, caller, call));
                    return Ok(true);
                }
                ReadStep::CompareChecksums(_) => {
                    let version = reading.located.version;
                    let is_equal = (0..)
                        .zip(&reading.words)
                        .all(|(index, &word)| word == history::word(version, index));
                    let now = simulator.clock(caller.0);
                    if !is_equal && !reading.located.fence_end.has_passed(now) {
                        return Err(format!("version {version} was read wrong inside its fence"));
                    }
                    let mismatch = || Err(failed(ErrorCode::CHECKSUM_MISMATCH));
                    reading.objects.compared(0, if is_equal { Ok(()) } else { mismatch() });
                }
                ReadStep::Locate(_) => return Ok(self.locate(simulator, caller)),
                ReadStep::Done => {
                    self.finish(simulator, caller)?;
                    return Ok(false);
                }
            }
        }
    }

    fn piece_read(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        place: usize,
        words: Option<Vec<u64>>,
    ) -> Result<bool, String> {
        let Some(reading) = &mut self.reading else { return Ok(false) };
        let outcome = match words {
            Some(words) => {
                reading.words.extend(words);
                if (reading.words.len() as u64) < reading.located.length {
                    reading.advance(simulator, caller, place);
                    return Ok(true);
                }
                Ok(())
            }
            None => Err(failed(ErrorCode::TRANSFER_FAIL)),
        };
        reading.objects.transferred(0, outcome, simulator.clock(caller.0));
        self.go_on(simulator, caller)
    }

    /// Handles the outcome of the read of a record.
    fn loaded(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        loaded: Option<Loaded>,
    ) -> Result<bool, String> {
        let Some(reading) = &mut self.reading else { return Ok(false) };
        let outcome = match loaded {
            Some(Loaded::Good(words)) if words.len() as u64 == reading.located.length => {
                reading.words = words;
                Ok(())
            }
            Some(Loaded::Missing | Loaded::Damaged) => {
                simulator.outcome.disk_misses += 1;
                Err(failed(ErrorCode::OBJECT_NOT_FOUND))
            }
            Some(Loaded::Good(_)) | None => Err(failed(ErrorCode::TRANSFER_FAIL)),
        };
        simulator.outcome.disk_gets += u64::from(outcome.is_ok());
        reading.objects.transferred(0, outcome, simulator.clock(caller.0));
        self.go_on(simulator, caller)
    }

    /// Ends the get: checks the words if they count.
    fn finish(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<(), String> {
        let Some(Reading { objects, mut located, words }) = self.reading.take() else {
            return Ok(());
        };
        simulator.release_fence(caller.0, &mut located);
        if objects.into_outcomes().all(|outcome| outcome.is_ok()) {
            simulator.outcome.gets += 1;
            simulator.history.check_read(located.asked, self.key, located.version, &words)?;
        }
        Ok(())
    }
}

impl Located {
    fn source(&self, simulator: &mut Simulator) -> ReadSource {
        let ranks = self.places.iter().map(|place| ReplicaRank {
            is_suspected: false,
            is_on_disk: place.is_on_disk,
            is_elsewhere: true,
            expected: Duration::ZERO,
        });
        let turn = simulator.random.below(self.places.len() as u64);
        let replica = |place: usize| {
            let Place { segment, replica, is_on_disk, .. } = self.places[place];
            ReadReplica { place, replica, segment, is_on_disk }
        };
        ReadSource {
            version: self.version,
            length: self.length,
            fence_end: self.fence_end,
            replicas: replica_order(ranks, turn as usize).into_iter().map(replica).collect(),
            has_checksum: self.has_checksum,
        }
    }
}

impl Reading {
    fn advance(&self, simulator: &mut Simulator, caller: (u64, u64), place: usize) {
        let first = self.words.len() as u64;
        let words = simulator.random.between(1, PIECE_WORDS).min(self.located.length - first);
        simulator.read_piece(caller, self.located.places[place], first..first + words);
    }
}

impl Simulator {
    /// Queues the fence of an object for release. Its memory is not read any more.
    fn release_fence(&mut self, process: u64, located: &mut Located) {
        if let Some(granted) = located.granted.take()
            && let Some(process) = self.processes.get_mut(&process)
        {
            process.fence_releases.extend(located.fence_end, &[granted]);
        }
    }
}

fn failed(code: ErrorCode) -> Error {
    Error::new(code, "a step of a get failed")
}
