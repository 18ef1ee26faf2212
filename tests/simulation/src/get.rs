//! The get operation: locate, read one copy piece by piece, and verify if the fence expired.

use std::time::Duration;

use mooncake_base::{Moment, Version};

use crate::{
    call::{Call, Place, Reply},
    client::{Input, Op, Step},
    plan::Bug,
    simulator::Simulator,
};

/// A reader treats its fence as expired this long before the end of the fence.
const MARGIN: Duration = Duration::from_millis(1);
/// The most words in a piece.
const PIECE_WORDS: u64 = 16;

/// A get in progress.
#[derive(Debug)]
pub(crate) struct Get {
    key: u64,
    asked: Moment,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Locating,
    Reading(Reading),
    Verifying(Reading),
}

#[derive(Debug)]
struct Reading {
    version: Version,
    length: u64,
    places: Vec<Place>,
    place: Place,
    words: Vec<u64>,
    fence_end: Moment,
}

impl Get {
    /// Creates a get of a random key.
    pub(crate) fn random(simulator: &mut Simulator) -> Self {
        let keys = simulator.plan.keys;
        Self { key: simulator.random.below(keys), asked: simulator.now, stage: Stage::Locating }
    }

    pub(crate) fn step(
        mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Step {
        let stage = std::mem::replace(&mut self.stage, Stage::Locating);
        match (stage, input) {
            (Stage::Locating, Input::Begin) => {
                self.asked = simulator.now;
                simulator.call(caller, Call::Locate { key: self.key });
            }
            (Stage::Locating, Input::Reply(message)) => match message.reply {
                Reply::Located { version, length, mut places, fence } => {
                    let pick = simulator.random.below(places.len() as u64) as usize;
                    let place = places.swap_remove(pick);
                    let fence_end = self.asked + fence.saturating_sub(MARGIN);
                    let words = Vec::new();
                    let reading = Reading { version, length, places, place, words, fence_end };
                    reading.advance(simulator, caller);
                    self.stage = Stage::Reading(reading);
                }
                Reply::Failed(code) => {
                    simulator.handle_refusal(caller.0, code);
                    return Ok(None);
                }
                _ => return Err("unexpected reply to a get".to_owned()),
            },
            (Stage::Reading(mut reading), Input::Read(Some(words))) => {
                reading.words.extend(words);
                if (reading.words.len() as u64) < reading.length {
                    reading.advance(simulator, caller);
                    self.stage = Stage::Reading(reading);
                } else if simulator.now < reading.fence_end
                    || simulator.plan.has(Bug::TrustsLateReads)
                {
                    return self.accept(simulator, &reading);
                } else {
                    let (key, version, replica) =
                        (self.key, reading.version, reading.place.replica);
                    simulator.call(caller, Call::Verify { key, version, replica });
                    self.stage = Stage::Verifying(reading);
                }
            }
            (Stage::Reading(mut reading), Input::Read(None)) => {
                let Some(place) = reading.places.pop() else { return Ok(None) };
                reading.place = place;
                reading.words.clear();
                reading.advance(simulator, caller);
                self.stage = Stage::Reading(reading);
            }
            (Stage::Verifying(reading), Input::Reply(message)) => {
                simulator.outcome.late_reads += 1;
                return match message.reply {
                    Reply::IsCurrent(true) => self.accept(simulator, &reading),
                    _ => Ok(None),
                };
            }
            _ => return Ok(None),
        }
        Ok(Some(Op::Get(self)))
    }

    fn accept(&self, simulator: &mut Simulator, reading: &Reading) -> Step {
        simulator.outcome.gets += 1;
        simulator.history.check_read(self.asked, self.key, reading.version, &reading.words)?;
        Ok(None)
    }
}

impl Reading {
    fn advance(&self, simulator: &mut Simulator, caller: (u64, u64)) {
        let first = self.words.len() as u64;
        let words = simulator.random.between(1, PIECE_WORDS).min(self.length - first);
        simulator.read_piece(caller, self.place, first..first + words);
    }
}
