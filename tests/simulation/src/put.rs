//! The put operation: start, write each copy piece by piece, then end or revoke.

use mooncake_base::{Moment, ReplicaId, Version};

use crate::{
    call::{Call, Place, Reply},
    client::{Input, Op, Step},
    history,
    plan::Bug,
    simulator::Simulator,
};

/// The most attempts of a call that times out.
const TRIES: u32 = 3;
/// The most words in a piece.
const PIECE_WORDS: u64 = 16;

/// A put in progress.
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
    /// Waits for the reply to `call`.
    Closing {
        call: Call,
        tries: u32,
    },
}

#[derive(Debug)]
struct Writing {
    version: Version,
    places: Vec<Place>,
    /// The next copy, and the next word in that copy.
    next: (usize, u64),
    failed: Vec<ReplicaId>,
}

impl Put {
    /// Creates a put with a random key, length and options.
    pub(crate) fn random(simulator: &mut Simulator) -> Self {
        let (keys, words) = (simulator.plan.keys, simulator.plan.object_words);
        Self {
            key: simulator.random.below(keys),
            length: simulator.random.between(1, words),
            is_replacing: simulator.random.happens(600),
            replicas: if simulator.random.happens(300) { 2 } else { 1 },
            asked: simulator.now,
            tries: 1,
            stage: Stage::Starting,
        }
    }

    pub(crate) fn step(
        mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Step {
        match (&mut self.stage, input) {
            (Stage::Starting, Input::Begin) => {
                self.asked = simulator.now;
                self.send_start(simulator, caller);
            }
            // A retry keeps the start of the write window: the first attempt may have reserved memory.
            (Stage::Starting, Input::TimedOut) if self.tries < TRIES => {
                self.tries += 1;
                self.send_start(simulator, caller);
            }
            (Stage::Starting, Input::Reply(message)) => match message.reply {
                Reply::Started { version, places } => {
                    let next = (0, 0);
                    let failed = Vec::new();
                    self.stage = Stage::Writing(Writing { version, places, next, failed });
                    self.advance(simulator, caller);
                }
                Reply::Failed(code) => {
                    simulator.handle_refusal(caller.0, code);
                    return Ok(None);
                }
                _ => return Err("unexpected reply to a put".to_owned()),
            },
            (Stage::Writing(writing), Input::Wrote(is_written)) => {
                if !is_written {
                    let place = writing.places[writing.next.0];
                    writing.failed.push(place.replica);
                    writing.next = (writing.next.0 + 1, 0);
                }
                self.advance(simulator, caller);
            }
            (Stage::Closing { call, .. }, Input::Reply(message)) => {
                let is_end = matches!(call, Call::PutEnd { .. });
                if let Reply::Done = message.reply {
                    simulator.history.acknowledge(simulator.now, message.entries);
                    simulator.outcome.puts += u64::from(is_end);
                }
                return Ok(None);
            }
            (Stage::Closing { call, tries }, Input::TimedOut) if *tries < TRIES => {
                *tries += 1;
                let call = call.clone();
                simulator.call(caller, call);
            }
            _ => return Ok(None),
        }
        Ok(Some(Op::Put(self)))
    }

    fn send_start(&self, simulator: &mut Simulator, caller: (u64, u64)) {
        let (key, length, request) = (self.key, self.length, caller.1);
        let (replicas, is_replacing) = (self.replicas, self.is_replacing);
        simulator.call(caller, Call::PutStart { key, length, replicas, is_replacing, request });
    }

    /// Sends the next piece, or ends or revokes the put.
    fn advance(&mut self, simulator: &mut Simulator, caller: (u64, u64)) {
        let Stage::Writing(writing) = &mut self.stage else { return };
        let late = simulator.now > self.asked + simulator.plan.rules.write_window;
        let is_revoking =
            late && !simulator.plan.has(Bug::WritesTooLate) || simulator.random.happens(5);
        if writing.next.1 >= self.length {
            writing.next = (writing.next.0 + 1, 0);
        }
        let version = writing.version;
        if is_revoking {
            self.close(simulator, caller, Call::PutRevoke { version, failed: Vec::new() });
        } else if let Some(place) = writing.places.get(writing.next.0) {
            let first = writing.next.1;
            let words = simulator.random.between(1, PIECE_WORDS).min(self.length - first);
            writing.next.1 += words;
            let content = (first..first + words).map(|index| history::word(version, index));
            simulator.write_piece(caller, *place, first, content.collect());
        } else if writing.failed.len() == writing.places.len() {
            self.close(simulator, caller, Call::PutRevoke { version, failed: Vec::new() });
        } else {
            let failed = std::mem::take(&mut writing.failed);
            self.close(simulator, caller, Call::PutEnd { version, failed });
        }
    }

    fn close(&mut self, simulator: &mut Simulator, caller: (u64, u64), call: Call) {
        self.stage = Stage::Closing { call: call.clone(), tries: 1 };
        simulator.call(caller, call);
    }
}
