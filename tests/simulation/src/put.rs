//! A put: start, write each copy piece by piece, end; or give it up.

use mooncake_base::{Moment, ReplicaId, Version};

use crate::{
    call::{Call, Place, Reply},
    client::{Input, Op, Step},
    plan::Bug,
    truth,
    world::World,
};

/// How often a call is sent when no answer comes.
const TRIES: u32 = 3;
/// The most words of a piece.
const PIECE_WORDS: u64 = 16;

/// A put on its way.
#[derive(Debug)]
pub(crate) struct Put {
    key: u64,
    length: u64,
    is_replacing: bool,
    replicas: u32,
    asked: Moment,
    tries: u32,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Starting,
    Writing(Writing),
    /// Waiting for the answer to that call.
    Closing {
        call: Call,
        tries: u32,
    },
}

#[derive(Debug)]
struct Writing {
    version: Version,
    places: Vec<Place>,
    /// The copy and the word of it that come next.
    next: (usize, u64),
    failed: Vec<ReplicaId>,
}

impl Put {
    /// A put of some key, as chance has it.
    pub(crate) fn any(world: &mut World) -> Self {
        let (keys, words) = (world.plan.keys, world.plan.object_words);
        Self {
            key: world.random.below(keys),
            length: world.random.between(1, words),
            is_replacing: world.random.happens(600),
            replicas: if world.random.happens(300) { 2 } else { 1 },
            asked: world.now,
            tries: 1,
            stage: Stage::Starting,
        }
    }

    pub(crate) fn step(mut self, world: &mut World, me: (u64, u64), input: Input) -> Step {
        match (&mut self.stage, input) {
            (Stage::Starting, Input::Begin) => {
                self.asked = world.now;
                self.ask(world, me);
            }
            // The window is counted from the first time it was asked for.
            (Stage::Starting, Input::TimedOut) if self.tries < TRIES => {
                self.tries += 1;
                self.ask(world, me);
            }
            (Stage::Starting, Input::Answer(answer)) => match answer.reply {
                Reply::Started { version, places } => {
                    let next = (0, 0);
                    let failed = Vec::new();
                    self.stage = Stage::Writing(Writing { version, places, next, failed });
                    self.go_on(world, me);
                }
                Reply::Failed(code) => {
                    world.refused(me.0, code);
                    return Ok(None);
                }
                _ => return Err("a put was answered with something else".to_owned()),
            },
            (Stage::Writing(writing), Input::Wrote(is_written)) => {
                if !is_written {
                    let place = writing.places[writing.next.0];
                    writing.failed.push(place.replica);
                    writing.next = (writing.next.0 + 1, 0);
                }
                self.go_on(world, me);
            }
            (Stage::Closing { call, .. }, Input::Answer(answer)) => {
                let is_end = matches!(call, Call::PutEnd { .. });
                if let Reply::Done = answer.reply {
                    world.truth.tell(world.now, answer.facts);
                    world.outcome.puts += u64::from(is_end);
                }
                return Ok(None);
            }
            (Stage::Closing { call, tries }, Input::TimedOut) if *tries < TRIES => {
                *tries += 1;
                let call = call.clone();
                world.call(me, call);
            }
            _ => return Ok(None),
        }
        Ok(Some(Op::Put(self)))
    }

    fn ask(&self, world: &mut World, me: (u64, u64)) {
        let (key, length, request) = (self.key, self.length, me.1);
        let (replicas, is_replacing) = (self.replicas, self.is_replacing);
        world.call(me, Call::PutStart { key, length, replicas, is_replacing, request });
    }

    /// Sends the next piece, or closes the put.
    fn go_on(&mut self, world: &mut World, me: (u64, u64)) {
        let Stage::Writing(writing) = &mut self.stage else { return };
        let late = world.now > self.asked + world.plan.rules.write_window;
        let gives_up = late && !world.plan.has(Bug::WritesTooLate) || world.random.happens(5);
        if writing.next.1 >= self.length {
            writing.next = (writing.next.0 + 1, 0);
        }
        let version = writing.version;
        if gives_up {
            self.close(world, me, Call::PutRevoke { version, failed: Vec::new() });
        } else if let Some(place) = writing.places.get(writing.next.0) {
            let first = writing.next.1;
            let words = world.random.between(1, PIECE_WORDS).min(self.length - first);
            writing.next.1 += words;
            let content = (first..first + words).map(|index| truth::word(version, index));
            world.write_piece(me, *place, first, content.collect());
        } else if writing.failed.len() == writing.places.len() {
            self.close(world, me, Call::PutRevoke { version, failed: Vec::new() });
        } else {
            let failed = std::mem::take(&mut writing.failed);
            self.close(world, me, Call::PutEnd { version, failed });
        }
    }

    fn close(&mut self, world: &mut World, me: (u64, u64), call: Call) {
        self.stage = Stage::Closing { call: call.clone(), tries: 1 };
        world.call(me, call);
    }
}
