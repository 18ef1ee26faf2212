//! Copies, moves and drains: asked for by anybody, fetched and carried out by the holders of copies.

use std::collections::VecDeque;

use mooncake_base::{JobId, Moment, ReplicaId, TaskId};

use crate::{
    call::{Call, Place, Reply, Work},
    client::{Input, Op, Step},
    plan::Bug,
    world::World,
};

/// How often a word for what came of a task is sent when no answer comes.
const TRIES: u32 = 3;
/// The most words of a piece.
const PIECE_WORDS: u64 = 16;
/// Drains at a time; more would leave no segment to put anything into.
const DRAINS_MAX: usize = 2;

/// What the master has promised to bring to an end.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    pub(crate) tasks: Vec<TaskId>,
    pub(crate) jobs: Vec<JobId>,
}

/// A wish for a copy, a move or a drain, or the end of one.
pub(crate) fn any_wish(world: &mut World) -> Option<Call> {
    let key = world.random.below(world.plan.keys);
    let names: Vec<String> = world
        .processes
        .values()
        .flat_map(|process| &process.segments)
        .map(|s| s.name.clone())
        .collect();
    let drains = world.host.state().map_or(0, |state| state.running_jobs());
    let target = world.random.pick(&names)?.clone();
    let source = world.random.pick(&names)?.clone();
    match world.random.below(1000) {
        0..500 => Some(Call::Copy { key, target }),
        500..900 => Some(Call::Move { key, source, target }),
        900..970 if drains < DRAINS_MAX => Some(Call::Drain { segment: source }),
        970.. => Some(Call::CancelDrain { job: *world.random.pick(&world.promises.jobs)? }),
        _ => None,
    }
}

impl World {
    pub(crate) fn step_wish(&mut self, me: (u64, u64), call: Call, input: Input) -> Option<Op> {
        match input {
            Input::Begin => {
                self.call(me, call.clone());
                return Some(Op::Wish(call));
            }
            Input::Answer(answer) => match answer.reply {
                Reply::Task(_) => self.outcome.tasks += 1,
                Reply::Job(_) => self.outcome.drains += 1,
                Reply::Failed(code) => self.refused(me.0, code),
                _ => {}
            },
            _ => {}
        }
        None
    }
}

/// What a process is to carry out, one after the other.
#[derive(Debug)]
pub(crate) struct Carry {
    asked: Moment,
    waiting: VecDeque<Work>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Fetching,
    Copying(Copying),
    /// Waiting for the answer to that call.
    Closing {
        call: Call,
        tries: u32,
    },
}

#[derive(Debug)]
struct Copying {
    work: Work,
    words: Vec<u64>,
    /// The target and the word of it that come next, once all was read.
    next: (usize, u64),
    failed: Vec<ReplicaId>,
}

impl Carry {
    pub(crate) fn new(world: &World) -> Self {
        Self { asked: world.now, waiting: VecDeque::new(), stage: Stage::Fetching }
    }

    pub(crate) fn step(mut self, world: &mut World, me: (u64, u64), input: Input) -> Step {
        match (&mut self.stage, input) {
            (Stage::Fetching, Input::Begin) => {
                self.asked = world.now;
                world.call(me, Call::Fetch);
            }
            (Stage::Fetching, Input::Answer(answer)) => {
                let Reply::Work(work) = answer.reply else { return Ok(None) };
                self.waiting = work.into();
                return Ok(self.next(world, me));
            }
            (Stage::Copying(copying), Input::Read(words)) => {
                match words {
                    Some(words) => copying.words.extend(words),
                    None => copying.give_up(),
                }
                self.go_on(world, me);
            }
            (Stage::Copying(copying), Input::Wrote(is_written)) => {
                if !is_written {
                    let place = copying.work.targets[copying.next.0];
                    copying.failed.push(place.replica);
                    copying.next = (copying.next.0 + 1, 0);
                }
                self.go_on(world, me);
            }
            (Stage::Closing { .. }, Input::Answer(answer)) => {
                world.outcome.carried += u64::from(matches!(answer.reply, Reply::Done));
                return Ok(self.next(world, me));
            }
            (Stage::Closing { call, tries }, Input::TimedOut) if *tries < TRIES => {
                *tries += 1;
                let call = call.clone();
                world.call(me, call);
            }
            (Stage::Closing { .. }, Input::TimedOut) => return Ok(self.next(world, me)),
            _ => return Ok(None),
        }
        Ok(Some(Op::Carry(self)))
    }

    /// Begins the next task, if there is one.
    fn next(mut self, world: &mut World, me: (u64, u64)) -> Option<Op> {
        let work = self.waiting.pop_front()?;
        self.stage =
            Stage::Copying(Copying { work, words: Vec::new(), next: (0, 0), failed: Vec::new() });
        self.go_on(world, me);
        Some(Op::Carry(self))
    }

    /// Reads or writes the next piece, or says how it went.
    fn go_on(&mut self, world: &mut World, me: (u64, u64)) {
        let Stage::Copying(copying) = &mut self.stage else { return };
        let late = world.now > self.asked + world.plan.rules.write_window;
        if late && !world.plan.has(Bug::CopiesTooLate) || world.random.happens(5) {
            copying.give_up();
        }
        let work_length = copying.work.length;
        if copying.next.1 >= work_length {
            copying.next = (copying.next.0 + 1, 0);
        }
        let piece = world.random.between(1, PIECE_WORDS);
        let read = copying.words.len() as u64;
        let Some(&target) = copying.work.targets.get(copying.next.0) else {
            let (id, attempt) = (copying.work.id, copying.work.attempt);
            let call = Call::EndTask { id, attempt, failed: std::mem::take(&mut copying.failed) };
            world.call(me, call.clone());
            self.stage = Stage::Closing { call, tries: 1 };
            return;
        };
        if read < work_length {
            let source: Place = copying.work.source;
            world.read_piece(me, source, read..(read + piece).min(work_length));
        } else {
            let first = copying.next.1;
            let end = (first + piece).min(work_length);
            copying.next.1 = end;
            let words = copying.words[first as usize..end as usize].to_vec();
            world.write_piece(me, target, first, words);
        }
    }
}

impl Copying {
    /// Nothing more is written, and what was not written whole has failed.
    fn give_up(&mut self) {
        let rest = self.work.targets.iter().skip(self.next.0);
        self.failed.extend(rest.map(|place| place.replica));
        self.next = (self.work.targets.len(), 0);
    }
}
