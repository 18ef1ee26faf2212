//! Copies, moves and drains: requested by any client, run by the clients that hold the sources.

use std::collections::{HashMap, VecDeque};

use mooncake_base::{JobId, Moment, ReplicaId, TaskId};

use crate::{
    actor::client::{Input, Op, Step},
    actor::repeated_call::{Progress, RepeatedCall},
    call::{Call, FetchedTask, Place, Reply},
    plan::Bug,
    simulator::Simulator,
};

/// The most words in a piece.
const PIECE_WORDS: u64 = 16;
/// The most drains at a time. More would leave no segment to put into.
const DRAINS_MAX: usize = 2;

/// Tasks and jobs that the master accepted, and so must bring to an end.
#[derive(Debug, Default)]
pub(crate) struct AcceptedTasks {
    pub(crate) tasks: Vec<TaskId>,
    pub(crate) jobs: Vec<JobId>,
    made_by: MadeBy,
}

/// The task or job that each operation of a process has made.
#[derive(Debug, Default)]
struct MadeBy {
    tasks: HashMap<(u64, u64), TaskId>,
    jobs: HashMap<(u64, u64), JobId>,
}

impl AcceptedTasks {
    /// Records that the client may learn of a task or a job. A repeated request learns it again.
    pub(crate) fn accept(&mut self, reply: &Reply) {
        match reply {
            Reply::Task(id) if !self.tasks.contains(id) => self.tasks.push(*id),
            Reply::Job(id) if !self.jobs.contains(id) => self.jobs.push(*id),
            _ => {}
        }
    }
}

/// Returns a random request for a copy, a move or a drain, or the cancellation of a drain.
pub(crate) fn random_request(simulator: &mut Simulator) -> Option<Call> {
    let key = simulator.random.below(simulator.plan.keys);
    let names: Vec<String> = simulator
        .processes
        .values()
        .flat_map(|process| &process.segments)
        .map(|s| s.name.clone())
        .collect();
    let drains = simulator.host.state().map_or(0, |mut state| state.tasks().running_jobs());
    let target = simulator.random.pick(&names)?.clone();
    let source = simulator.random.pick(&names)?.clone();
    match simulator.random.below(1000) {
        0..500 => Some(Call::Copy { key, target }),
        500..900 => Some(Call::Move { key, source, target }),
        900..970 if drains < DRAINS_MAX => {
            let may_evict = simulator.random.happens(300);
            Some(Call::Drain { segment: source, may_evict })
        }
        970.. => Some(Call::CancelDrain { job: *simulator.random.pick(&simulator.accepted.jobs)? }),
        _ => None,
    }
}

impl Simulator {
    /// Checks that a request did not make a second task or drain job while the master has the first
    /// one, and records what it made.
    ///
    /// # Errors
    /// It did.
    pub(crate) fn check_request(
        &mut self,
        operation: (u64, u64),
        reply: &Reply,
    ) -> Result<(), String> {
        let (made, state) = (&mut self.accepted.made_by, self.host.state());
        let Some(state) = state else { return Ok(()) };
        let twice = match *reply {
            Reply::Task(id) => {
                let earlier = made.tasks.insert(operation, id);
                earlier.is_some_and(|earlier| earlier != id && state.task(earlier).is_ok())
            }
            Reply::Job(id) => {
                let earlier = made.jobs.insert(operation, id);
                earlier.is_some_and(|earlier| earlier != id && state.job(earlier).is_ok())
            }
            _ => false,
        };
        if twice {
            Err(format!("one request was executed twice, at last with {reply:?}"))
        } else {
            Ok(())
        }
    }
}

/// Runs the fetched tasks of a process, one after the other.
#[derive(Debug)]
pub(crate) struct TaskRunner {
    asked: Moment,
    waiting: VecDeque<FetchedTask>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Fetching,
    Copying(Copying),
    /// Waits for the reply.
    Closing(RepeatedCall),
}

#[derive(Debug)]
struct Copying {
    work: FetchedTask,
    words: Vec<u64>,
    /// The next target, and the next word in that target, once the source is read.
    next: (usize, u64),
    failed: Vec<ReplicaId>,
    /// The piece whose confirmation is awaited.
    piece: u64,
}

impl TaskRunner {
    pub(crate) fn new(simulator: &Simulator) -> Self {
        Self { asked: simulator.now, waiting: VecDeque::new(), stage: Stage::Fetching }
    }

    pub(crate) fn step(
        mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Step {
        match (&mut self.stage, input) {
            (Stage::Closing(call), input) => match call.step(simulator, caller, input) {
                Progress::Waiting => {}
                Progress::Answered(message) => {
                    let is_done = matches!(message.reply, Reply::Done);
                    simulator.outcome.task_attempts += u64::from(is_done);
                    return Ok(self.start_next(simulator, caller));
                }
                Progress::GivenUp => return Ok(self.start_next(simulator, caller)),
            },
            (Stage::Fetching, Input::Begin) => {
                self.asked = simulator.now;
                simulator.call(caller, Call::FetchTasks);
            }
            (Stage::Fetching, Input::Reply(message)) => {
                let Reply::FetchedTask(work) = message.reply else { return Ok(None) };
                self.waiting = work.into();
                return Ok(self.start_next(simulator, caller));
            }
            (Stage::Copying(copying), Input::Read(words)) => {
                match words {
                    Some(words) => copying.words.extend(words),
                    None => copying.fail_remaining(),
                }
                self.advance(simulator, caller);
            }
            (Stage::Copying(copying), Input::Wrote { piece, is_written }) => {
                if piece != copying.piece {
                    return Ok(Some(Op::RunTasks(self)));
                }
                if !is_written {
                    let place = copying.work.targets[copying.next.0];
                    copying.failed.push(place.replica);
                    copying.next = (copying.next.0 + 1, 0);
                }
                self.advance(simulator, caller);
            }
            (_, Input::Silent { .. }) => {}
            _ => return Ok(None),
        }
        Ok(Some(Op::RunTasks(self)))
    }

    /// Starts the next task, if any.
    fn start_next(mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Option<Op> {
        let work = self.waiting.pop_front()?;
        self.stage = Stage::Copying(Copying {
            work,
            words: Vec::new(),
            next: (0, 0),
            failed: Vec::new(),
            piece: 0,
        });
        self.advance(simulator, caller);
        Some(Op::RunTasks(self))
    }

    /// Reads or writes the next piece, or reports the end of the task.
    fn advance(&mut self, simulator: &mut Simulator, caller: (u64, u64)) {
        let Stage::Copying(copying) = &mut self.stage else { return };
        let late = simulator.now > self.asked + simulator.plan.rules.write_window;
        if late && !simulator.plan.has(Bug::CopiesTooLate) || simulator.random.happens(5) {
            copying.fail_remaining();
        }
        let work_length = copying.work.length;
        if copying.next.1 >= work_length {
            copying.next = (copying.next.0 + 1, 0);
        }
        let piece = simulator.random.between(1, PIECE_WORDS);
        let read = copying.words.len() as u64;
        let Some(&target) = copying.work.targets.get(copying.next.0) else {
            let (id, attempt) = (copying.work.id, copying.work.attempt);
            let targets = copying.work.targets.iter().map(|place| place.endpoint);
            let targets: Vec<u64> = targets.collect();
            let call = Call::EndTask { id, attempt, failed: std::mem::take(&mut copying.failed) };
            self.stage = Stage::Closing(RepeatedCall::send(simulator, caller, call));
            simulator.kill_target(&targets, caller.0);
            return;
        };
        if read < work_length {
            let source: Place = copying.work.source;
            simulator.read_piece(caller, source, read..(read + piece).min(work_length));
        } else {
            let first = copying.next.1;
            let end = (first + piece).min(work_length);
            copying.next.1 = end;
            let words = copying.words[first as usize..end as usize].to_vec();
            copying.piece = simulator.write_piece(caller, target, first, words);
        }
    }
}

impl Copying {
    /// Stops writing. Targets that are not complete count as failed.
    fn fail_remaining(&mut self) {
        let rest = self.work.targets.iter().skip(self.next.0);
        self.failed.extend(rest.map(|place| place.replica));
        self.next = (self.work.targets.len(), 0);
    }
}
