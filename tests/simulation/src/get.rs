//! A get: locate, read one copy piece by piece, and ask again if it took too long.

use std::time::Duration;

use mooncake_base::{Moment, Version};

use crate::{
    call::{Call, Place, Reply},
    client::{Input, Op, Step},
    plan::Bug,
    world::World,
};

/// A reader stops to believe its fence so much before its end.
const MARGIN: Duration = Duration::from_millis(1);
/// The most words of a piece.
const PIECE_WORDS: u64 = 16;

/// A get on its way.
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
    until: Moment,
}

impl Get {
    /// A get of some key, as chance has it.
    pub(crate) fn any(world: &mut World) -> Self {
        let keys = world.plan.keys;
        Self { key: world.random.below(keys), asked: world.now, stage: Stage::Locating }
    }

    pub(crate) fn step(mut self, world: &mut World, me: (u64, u64), input: Input) -> Step {
        let stage = std::mem::replace(&mut self.stage, Stage::Locating);
        match (stage, input) {
            (Stage::Locating, Input::Begin) => {
                self.asked = world.now;
                world.call(me, Call::Locate { key: self.key });
            }
            (Stage::Locating, Input::Answer(answer)) => match answer.reply {
                Reply::Located { version, length, mut places, fence } => {
                    let pick = world.random.below(places.len() as u64) as usize;
                    let place = places.swap_remove(pick);
                    let until = self.asked + fence.saturating_sub(MARGIN);
                    let words = Vec::new();
                    let reading = Reading { version, length, places, place, words, until };
                    reading.go_on(world, me);
                    self.stage = Stage::Reading(reading);
                }
                Reply::Failed(code) => {
                    world.refused(me.0, code);
                    return Ok(None);
                }
                _ => return Err("a get was answered with something else".to_owned()),
            },
            (Stage::Reading(mut reading), Input::Read(Some(words))) => {
                reading.words.extend(words);
                if (reading.words.len() as u64) < reading.length {
                    reading.go_on(world, me);
                    self.stage = Stage::Reading(reading);
                } else if world.now < reading.until || world.plan.has(Bug::BelievesLateReads) {
                    return self.believe(world, &reading);
                } else {
                    let (key, version, replica) =
                        (self.key, reading.version, reading.place.replica);
                    world.call(me, Call::Verify { key, version, replica });
                    self.stage = Stage::Verifying(reading);
                }
            }
            (Stage::Reading(mut reading), Input::Read(None)) => {
                let Some(place) = reading.places.pop() else { return Ok(None) };
                reading.place = place;
                reading.words.clear();
                reading.go_on(world, me);
                self.stage = Stage::Reading(reading);
            }
            (Stage::Verifying(reading), Input::Answer(answer)) => {
                world.outcome.late_reads += 1;
                return match answer.reply {
                    Reply::StillStands(true) => self.believe(world, &reading),
                    _ => Ok(None),
                };
            }
            _ => return Ok(None),
        }
        Ok(Some(Op::Get(self)))
    }

    fn believe(&self, world: &mut World, reading: &Reading) -> Step {
        world.outcome.gets += 1;
        world.truth.judge(self.asked, self.key, reading.version, &reading.words)?;
        Ok(None)
    }
}

impl Reading {
    fn go_on(&self, world: &mut World, me: (u64, u64)) {
        let first = self.words.len() as u64;
        let words = world.random.between(1, PIECE_WORDS).min(self.length - first);
        world.read_piece(me, self.place, first..first + words);
    }
}
