//! Time and events: what happens next, until nothing does or something is wrong.

use std::{collections::BTreeMap, fmt, ops::Range, time::Duration};

use mooncake_base::Moment;
use mooncake_master::state::Effect;

use crate::{
    call::{Answer, Call, Place, Reply},
    client::{Input, Op, Process, Running},
    get::Get,
    host::Host,
    ledger::Ledger,
    memory::Memories,
    network,
    plan::{Bug, Plan},
    put::Put,
    random::Random,
    task::{self, Carry, Promises},
    truth::Truth,
};

/// When every world begins.
const BIRTH: Moment = Moment::from_boot(Duration::from_secs(1000));
/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_millis(1500);
/// The master looks at the time this often.
const TICK: Duration = Duration::from_millis(100);
/// No byte that was sent arrives later; decision 6 leans on it.
const PIECE_MAX: Duration = Duration::from_millis(1900);
/// How long clients have to come back before the audit: longer than their time to live.
const CALM: Duration = Duration::from_secs(25);
/// What happened in a world that was found right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Puts that were acknowledged.
    pub puts: u64,
    /// Reads that counted.
    pub gets: u64,
    /// Of them, and of those thrown away, those that took longer than their fence.
    pub late_reads: u64,
    /// Removals that were acknowledged.
    pub removals: u64,
    /// Starts of the master after the first.
    pub restarts: u64,
    /// Clients that died.
    pub deaths: u64,
    /// Segments that were lent anew because the master did not know the old.
    pub renewals: u64,
    /// Snapshots that were begun.
    pub snapshots: u64,
    /// Objects that were read in the audit.
    pub audited: u64,
    /// Copies and moves that the master promised.
    pub tasks: u64,
    /// Drains that it promised.
    pub drains: u64,
    /// Tries of tasks that were carried out.
    pub carried: u64,
    /// Tasks that were done in the end.
    pub succeeded: u64,
    /// Segments that were drained.
    pub drained: u64,
    /// Events.
    pub steps: u64,
}

impl Outcome {
    /// Adds what happened in another world.
    pub fn add(&mut self, other: &Self) {
        self.puts += other.puts;
        self.gets += other.gets;
        self.late_reads += other.late_reads;
        self.removals += other.removals;
        self.restarts += other.restarts;
        self.deaths += other.deaths;
        self.renewals += other.renewals;
        self.snapshots += other.snapshots;
        self.audited += other.audited;
        self.tasks += other.tasks;
        self.drains += other.drains;
        self.carried += other.carried;
        self.succeeded += other.succeeded;
        self.drained += other.drained;
        self.steps += other.steps;
    }
}

/// Something that must never be, and where to see it again.
#[derive(Debug, Clone)]
pub struct Violation {
    /// The world.
    pub seed: u64,
    /// After so many events.
    pub step: u64,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, step {}: {}", self.seed, self.step, self.what)
    }
}

/// Everything there is.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) random: Random,
    pub(crate) now: Moment,
    pub(crate) host: Host,
    pub(crate) memories: Memories,
    pub(crate) truth: Truth,
    pub(crate) processes: BTreeMap<u64, Process>,
    pub(crate) outcome: Outcome,
    pub(crate) promises: Promises,
    /// How many segments were ever made.
    pub(crate) segments: u64,
    pub(crate) ledger: Ledger,
    events: BTreeMap<(Moment, u64), Event>,
    numbers: u64,
    /// The master answers nothing before then.
    stalled: Moment,
    is_calm: bool,
}

#[derive(Debug)]
enum Event {
    /// A process does something of its own accord.
    Work(u64),
    /// It looks whether it is to carry out a task.
    Fetch(u64),
    Beat(u64),
    /// A call reaches the master.
    Call {
        me: (u64, u64),
        attempt: u64,
        turn: u64,
        call: Call,
    },
    /// An answer reaches its caller, or the caller stops waiting.
    Return {
        me: (u64, u64),
        attempt: u64,
        answer: Option<Answer>,
    },
    /// Words are written, and read, where they lie.
    Write {
        me: (u64, u64),
        place: Place,
        first: u64,
        words: Vec<u64>,
    },
    Read {
        me: (u64, u64),
        place: Place,
        words: Range<u64>,
    },
    Input {
        me: (u64, u64),
        input: Input,
    },
    /// The master sees that a connection has closed.
    Closed(u64),
    Tick,
    Snapshot,
    /// Once a second: what breaks now?
    Faults,
    Start,
    Join,
}

/// Runs the world of a plan to its end and audits it.
///
/// # Errors
/// What must not be was.
pub fn run(plan: Plan) -> Result<Outcome, Violation> {
    let seed = plan.seed;
    let mut world = World::new(plan);
    match world.live().and_then(|()| world.audit()) {
        Ok(()) => Ok(world.outcome),
        Err(what) => Err(Violation { seed, step: world.outcome.steps, what }),
    }
}

impl World {
    fn new(plan: Plan) -> Self {
        let mut random = Random::new(plan.seed);
        let host = Host::new(plan.rules.clone(), random.next());
        let mut world = Self {
            random,
            now: BIRTH,
            host,
            memories: Memories::default(),
            truth: Truth::default(),
            processes: BTreeMap::new(),
            outcome: Outcome::default(),
            promises: Promises::default(),
            segments: 0,
            ledger: Ledger::default(),
            events: BTreeMap::new(),
            numbers: 0,
            stalled: Moment::default(),
            is_calm: false,
            plan,
        };
        for _ in 0..world.plan.clients {
            world.after(Duration::ZERO, Event::Join);
        }
        world.after(TICK, Event::Tick);
        world.after(Duration::from_secs(1), Event::Faults);
        world
    }

    /// Breaks and works, then heals and lets everybody come back.
    fn live(&mut self) -> Result<(), String> {
        self.run_until(BIRTH + self.plan.active)?;
        self.calm();
        self.run_until(self.now + CALM)
    }

    /// Nothing breaks any more, and nobody begins anything.
    fn calm(&mut self) {
        self.is_calm = true;
        let faults = &mut self.plan.faults;
        (faults.lost, faults.doubled, faults.slow, faults.master_crash) = (0, 0, 0, 0);
        self.stalled = self.now;
        for process in self.processes.values_mut() {
            (process.stalled, process.cut_off) = (self.now, self.now);
        }
    }

    pub(crate) fn run_until(&mut self, end: Moment) -> Result<(), String> {
        while let Some(entry) = self.events.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((now, _), event) = entry.remove_entry();
            self.now = now;
            self.outcome.steps += 1;
            if self.plan.is_traced {
                trace(now, &event);
            }
            self.happen(event)?;
        }
        self.now = end;
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Work(process) => self.work(process),
            Event::Fetch(process) => self.fetch(process),
            Event::Beat(process) => {
                let Some(stalled) = self.processes.get(&process).map(|found| found.stalled) else {
                    return Ok(());
                };
                let pause = self.plan.rules.client_ttl / 5;
                self.at(stalled.max(self.now + pause), Event::Beat(process));
                if stalled.has_passed(self.now) { self.beat(process) } else { Ok(()) }
            }
            Event::Call { me, attempt, turn, call } => self.serve(me, attempt, turn, call),
            Event::Return { me, attempt, answer } => {
                let Some(process) = self.processes.get(&me.0) else { return Ok(()) };
                if !process.stalled.has_passed(self.now) {
                    self.at(process.stalled, Event::Return { me, attempt, answer });
                    return Ok(());
                }
                let running = process.running.get(&me.1);
                if running.is_none_or(|running| running.attempt != attempt) {
                    return Ok(());
                }
                let input = answer.map_or(Input::TimedOut, Input::Answer);
                self.input(me, input)
            }
            Event::Write { me, place, first, words } => {
                let is_written = (place.offset + first..)
                    .zip(words)
                    .all(|(at, word)| self.memories.write(place.segment, at, word));
                let back = self.piece_delay();
                self.after(back, Event::Input { me, input: Input::Wrote(is_written) });
                Ok(())
            }
            Event::Read { me, place, words } => {
                let read = |index| self.memories.read(place.segment, place.offset + index);
                let words = words.map(read).collect();
                let back = self.piece_delay();
                self.after(back, Event::Input { me, input: Input::Read(words) });
                Ok(())
            }
            Event::Input { me, input } => self.input(me, input),
            Event::Closed(process) => {
                let client = Process::new(process).client;
                if let Some(state) = self.host.state() {
                    state.suspect(self.now, client);
                }
                self.log().map(drop)
            }
            Event::Tick => self.tick(),
            Event::Snapshot => {
                self.host.snapshot(self.now);
                if self.host.is_snapshotting() {
                    let pause = Duration::from_micros(self.random.below(5000));
                    self.after(pause, Event::Snapshot);
                }
                Ok(())
            }
            Event::Faults => {
                if !self.is_calm {
                    self.break_things();
                    self.after(Duration::from_secs(1), Event::Faults);
                }
                Ok(())
            }
            Event::Start => self.start(),
            Event::Join => self.join(),
        }
    }

    // ------------------------------------------------------------ what clients ask of the world

    /// A number that is never used again.
    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Sends a call, and stops waiting for its answer after a while.
    pub(crate) fn call(&mut self, me: (u64, u64), call: Call) {
        let attempt = self.number();
        let Some(process) = self.processes.get_mut(&me.0) else { return };
        if let Some(running) = process.running.get_mut(&me.1) {
            running.attempt = attempt;
        }
        process.turn += u64::from(call.is_announcement());
        let turn = process.turn;
        let is_cut_off = !process.cut_off.has_passed(self.now);
        self.after(PATIENCE, Event::Return { me, attempt, answer: None });
        if !is_cut_off {
            for delay in network::deliveries(&mut self.random, &self.plan.faults) {
                self.after(delay, Event::Call { me, attempt, turn, call: call.clone() });
            }
        }
    }

    /// Sends words on their way to a place, from that word of it on.
    pub(crate) fn write_piece(
        &mut self,
        me: (u64, u64),
        place: Place,
        first: u64,
        words: Vec<u64>,
    ) {
        let there = self.piece_delay();
        self.after(there, Event::Write { me, place, first, words });
    }

    /// Asks for words of a place.
    pub(crate) fn read_piece(&mut self, me: (u64, u64), place: Place, words: Range<u64>) {
        let there = self.piece_delay();
        self.after(there, Event::Read { me, place, words });
    }

    /// The process says hello as soon as it can.
    pub(crate) fn beat_soon(&mut self, process: u64) {
        self.after(Duration::from_millis(1), Event::Beat(process));
    }

    /// The process looks for tasks, which it was told of.
    pub(crate) fn fetch_soon(&mut self, process: u64) {
        self.after(Duration::from_millis(1), Event::Fetch(process));
    }

    /// Begins something.
    pub(crate) fn begin(&mut self, me: (u64, u64), op: Op, is_work: bool) -> Result<(), String> {
        let Some(process) = self.processes.get_mut(&me.0) else { return Ok(()) };
        process.running.insert(me.1, Running { op: Some(op), attempt: 0, is_work });
        self.input(me, Input::Begin)
    }

    fn input(&mut self, me: (u64, u64), input: Input) -> Result<(), String> {
        let Some(process) = self.processes.get_mut(&me.0) else { return Ok(()) };
        if !process.stalled.has_passed(self.now) {
            let stalled = process.stalled;
            self.at(stalled, Event::Input { me, input });
            return Ok(());
        }
        let Some(running) = process.running.get_mut(&me.1) else { return Ok(()) };
        // What comes now is no answer to an earlier call any more.
        running.attempt = 0;
        let Some(op) = running.op.take() else { return Ok(()) };
        let next = self.step(me, op, input)?;
        let Some(process) = self.processes.get_mut(&me.0) else { return Ok(()) };
        match next {
            Some(op) => {
                if let Some(running) = process.running.get_mut(&me.1) {
                    running.op = Some(op);
                }
            }
            None => {
                let was_work = process.running.remove(&me.1).is_some_and(|it| it.is_work);
                if was_work {
                    let pause = Duration::from_micros(self.random.below(60_000));
                    self.after(pause, Event::Work(me.0));
                }
            }
        }
        Ok(())
    }

    // ------------------------------------------------------------ what happens

    fn work(&mut self, process: u64) -> Result<(), String> {
        if self.is_calm || !self.processes.contains_key(&process) {
            return Ok(());
        }
        let key = self.random.below(self.plan.keys);
        let is_forced = self.random.happens(700);
        let wish = if self.random.happens(self.plan.wishes) { task::any_wish(self) } else { None };
        let op = match self.random.below(1000) {
            0.. if let Some(call) = wish => Op::Wish(call),
            0..450 => Op::Put(Put::any(self)),
            450..900 => Op::Get(Get::any(self)),
            900..990 => Op::Remove(Call::Remove { key, is_forced }),
            990..995 => Op::Remove(Call::RemoveAll { is_forced }),
            _ => Op::Get(Get::any(self)),
        };
        let number = self.number();
        self.begin((process, number), op, true)
    }

    fn fetch(&mut self, process: u64) -> Result<(), String> {
        let number = self.number();
        let carry = Carry::new(self);
        self.begin((process, number), Op::Carry(carry), false)
    }

    fn serve(&mut self, me: (u64, u64), attempt: u64, turn: u64, call: Call) -> Result<(), String> {
        if !self.host.is_running() {
            return Ok(());
        }
        if !self.stalled.has_passed(self.now) {
            let stalled = self.stalled;
            self.at(stalled, Event::Call { me, attempt, turn, call });
            return Ok(());
        }
        if let Some(until) = self.host.awaits(self.now, &call) {
            let again = until.min(self.now + Duration::from_millis(20));
            self.at(again, Event::Call { me, attempt, turn, call });
            return Ok(());
        }
        let client = Process::new(me.0).client;
        let evicted = self.evicted();
        let reply = self.host.serve(self.now, client, turn, &call);
        let evicted = call.is_about_tasks().then(|| self.evicted() - evicted);
        if let (Call::PutStart { key, length, .. }, Reply::Started { version, .. }) =
            (&call, &reply)
        {
            self.truth.begin(*version, *key, *length);
        }
        let dies = self.random.happens(self.plan.faults.master_crash / 50);
        if dies && self.random.happens(500) {
            if self.plan.has(Bug::AnswersBeforeTheLog) {
                let effects = self.host.take_effects();
                let facts = self.enter(&effects)?;
                self.answer(me, attempt, Answer { reply, facts });
            }
            self.crash();
            return Ok(());
        }
        let facts = self.log_of(evicted)?;
        if dies {
            self.crash();
        } else {
            self.answer(me, attempt, Answer { reply, facts });
        }
        Ok(())
    }

    fn answer(&mut self, me: (u64, u64), attempt: u64, answer: Answer) {
        match answer.reply {
            Reply::Task(id) => self.promises.tasks.push(id),
            Reply::Job(id) => self.promises.jobs.push(id),
            _ => {}
        }
        for delay in network::deliveries(&mut self.random, &self.plan.faults) {
            let answer = Some(answer.clone());
            self.after(delay, Event::Return { me, attempt, answer });
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        self.after(TICK, Event::Tick);
        let evicted = self.evicted();
        if self.stalled.has_passed(self.now)
            && let Some(state) = self.host.state()
        {
            state.advance(self.now);
        }
        let evicted = self.evicted() - evicted;
        self.log_of(Some(evicted)).map(drop)
    }

    /// Objects that were evicted since the master started.
    fn evicted(&mut self) -> u64 {
        self.host.state().map_or(0, |state| state.totals().counters.evicted_keys)
    }

    /// As [`log`](Self::log), of something by which so many objects may vanish and no others, if it
    /// is known how many.
    fn log_of(&mut self, may_vanish: Option<u64>) -> Result<Range<usize>, String> {
        let before = self.ledger.dropped;
        let facts = self.log()?;
        let vanished = self.ledger.dropped - before;
        match may_vanish {
            Some(evicted) if evicted != vanished => {
                Err(format!("{vanished} objects vanished, {evicted} were evicted"))
            }
            _ => Ok(facts),
        }
    }

    /// What the master has changed goes to the log, and from there into the books.
    pub(crate) fn log(&mut self) -> Result<Range<usize>, String> {
        let effects = self.host.take_effects();
        let facts = self.enter(&effects)?;
        self.host.write(effects);
        Ok(facts)
    }

    fn enter(&mut self, effects: &[u8]) -> Result<Range<usize>, String> {
        let mut changes = Vec::new();
        let mut entered = Ok(());
        let is_traced = self.plan.is_traced;
        let decoded = Effect::decode_all(effects, |effect| {
            if is_traced {
                trace(self.now, &effect);
            }
            if entered.is_ok() {
                entered = self.ledger.enter(effect, &mut changes);
            }
        });
        entered?;
        decoded.map_err(|error| format!("an effect cannot be read: {error:?}"))?;
        Ok(self.truth.enter(changes))
    }

    // ------------------------------------------------------------ what breaks

    fn break_things(&mut self) {
        let faults = self.plan.faults.clone();
        if self.host.is_running() && self.random.happens(faults.master_crash) {
            self.crash();
        }
        if self.random.happens(faults.master_stall) {
            self.stalled = self.now + Duration::from_millis(self.random.below(12_000));
        }
        if self.random.happens(faults.snapshot) && !self.host.is_snapshotting() {
            self.outcome.snapshots += 1;
            self.after(Duration::ZERO, Event::Snapshot);
        }
        let processes: Vec<u64> = self.processes.keys().copied().collect();
        for process in processes {
            if self.random.happens(faults.client_crash) {
                self.die(process);
                continue;
            }
            let time = self.now + Duration::from_millis(self.random.below(10_000));
            let (stalls, is_cut_off) =
                (self.random.happens(faults.client_stall), self.random.happens(faults.partition));
            let remounts = self.random.happens(faults.remount);
            if let Some(found) = self.processes.get_mut(&process) {
                found.stalled = if stalls { time } else { found.stalled };
                found.cut_off = if is_cut_off { time } else { found.cut_off };
            }
            if remounts {
                // Nothing of it can be wrong before it is answered.
                let _ = self.remount(process);
            }
        }
    }

    fn crash(&mut self) {
        self.host.kill();
        if self.random.happens(self.plan.faults.wipe) {
            self.host.wipe();
            let mut changes = Vec::new();
            self.ledger.clear(&mut changes);
            self.truth.enter(changes);
            self.promises = Promises::default();
        }
        let down_max = self.plan.faults.down_max.as_millis() as u64;
        let pause = Duration::from_millis(self.random.below(down_max));
        self.after(pause, Event::Start);
    }

    fn start(&mut self) -> Result<(), String> {
        if self.host.is_running() {
            return Ok(());
        }
        self.outcome.restarts += 1;
        let seed = self.random.next();
        let bug = self.plan.bug;
        let is_believed = |effect: &Effect<'_>| match effect {
            Effect::MaxGranted { .. } => bug != Some(Bug::ForgetsFences),
            Effect::Task { .. } => bug != Some(Bug::ForgetsTasks),
            _ => true,
        };
        self.host.restart(self.now, seed, is_believed)?;
        self.ledger.restart();
        self.log().map(drop)
    }

    fn die(&mut self, process: u64) {
        self.outcome.deaths += 1;
        self.processes.remove(&process);
        self.memories.withdraw_all(process);
        self.after(Duration::from_millis(1), Event::Closed(process));
        let pause = Duration::from_millis(self.random.below(3000));
        self.after(pause, Event::Join);
    }

    fn join(&mut self) -> Result<(), String> {
        let number = self.number();
        let mut process = Process::new(number);
        for _ in 0..self.random.between(1, 2) {
            process.segments.push(self.lend(number));
        }
        self.processes.insert(number, process);
        self.after(Duration::from_millis(1), Event::Beat(number));
        for _ in 0..self.plan.workers {
            self.after(Duration::from_millis(10), Event::Work(number));
        }
        Ok(())
    }

    fn piece_delay(&mut self) -> Duration {
        network::delay(&mut self.random, &self.plan.faults).min(PIECE_MAX)
    }

    fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    fn at(&mut self, when: Moment, event: Event) {
        let number = self.number();
        self.events.insert((when, number), event);
    }
}

#[expect(clippy::print_stderr, reason = "the trace of a world is for whoever looks at it")]
fn trace(now: Moment, event: &impl fmt::Debug) {
    eprintln!("{:>12.6}s {event:?}", now.since(BIRTH).as_secs_f64());
}
