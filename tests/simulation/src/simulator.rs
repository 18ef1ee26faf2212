//! The discrete-event simulator: a manual clock, an event queue, and the faults it injects.

use std::{collections::BTreeMap, fmt, ops::Range, time::Duration};

use mooncake_base::Moment;
use mooncake_master::{LogSync, state::Effect};

use crate::{
    allocation_model::AllocationModel,
    call::{Call, CallMessage, CallRequest, Place, Reply, ReplyMessage},
    client::{Input, Op, Process, Running},
    get::Get,
    history::History,
    host::Host,
    log_record::LogRecord,
    memory::Memories,
    network,
    plan::{Bug, Plan},
    put::Put,
    random::Random,
    repeated_call::{ExecutedCalls, Request},
    task::{self, AcceptedTasks, TaskRunner},
};

/// The time at which every run starts.
const START_TIME: Moment = Moment::from_boot(Duration::from_secs(1000));
/// The time after which a caller stops waiting for a reply.
const CALL_TIMEOUT: Duration = Duration::from_millis(1500);
/// The period of the master's timers.
const TICK: Duration = Duration::from_millis(100);
/// The longest delay of a piece of data. Decision 6 relies on this bound.
const PIECE_DELAY_MAX: Duration = Duration::from_millis(1900);
/// The time without faults before the audit, in which clients reconnect. Longer than `client_ttl`.
const QUIET_PERIOD: Duration = Duration::from_secs(25);
/// Counts of what happened in a run without a violation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Acknowledged puts.
    pub puts: u64,
    /// Reads whose bytes were accepted and checked.
    pub gets: u64,
    /// Reads, accepted or discarded, that outlasted their fence and had to be verified.
    pub late_reads: u64,
    /// Acknowledged removals.
    pub removals: u64,
    /// Repeated calls that got the answer to their first execution.
    pub repetitions: u64,
    /// Restarts of the master.
    pub restarts: u64,
    /// Crashes of the master's machine.
    pub power_losses: u64,
    /// Changes that were lost with the unsynced end of the log.
    pub undone: u64,
    /// Killed clients.
    pub client_deaths: u64,
    /// Segments replaced by new memory because the master did not know them.
    pub renewals: u64,
    /// Started snapshots.
    pub snapshots: u64,
    /// Copies of objects read in the audit.
    pub audited: u64,
    /// Copy and move tasks that the master accepted.
    pub tasks: u64,
    /// Drain jobs that the master accepted.
    pub drains: u64,
    /// Attempts of tasks whose end was acknowledged.
    pub task_attempts: u64,
    /// Tasks that succeeded.
    pub succeeded: u64,
    /// Drain jobs that succeeded.
    pub drained: u64,
    /// Handled events.
    pub steps: u64,
}

impl Outcome {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.puts += other.puts;
        self.gets += other.gets;
        self.late_reads += other.late_reads;
        self.removals += other.removals;
        self.repetitions += other.repetitions;
        self.restarts += other.restarts;
        self.power_losses += other.power_losses;
        self.undone += other.undone;
        self.client_deaths += other.client_deaths;
        self.renewals += other.renewals;
        self.snapshots += other.snapshots;
        self.audited += other.audited;
        self.tasks += other.tasks;
        self.drains += other.drains;
        self.task_attempts += other.task_attempts;
        self.succeeded += other.succeeded;
        self.drained += other.drained;
        self.steps += other.steps;
    }
}

/// A violated invariant, and the seed and step that reproduce it.
#[derive(Debug, Clone)]
pub struct Violation {
    /// The seed of the run.
    pub seed: u64,
    /// The number of events handled before.
    pub step: u64,
    /// The violated invariant.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, step {}: {}", self.seed, self.step, self.message)
    }
}

/// The whole simulated cluster and its checkers.
#[derive(Debug)]
pub(crate) struct Simulator {
    pub(crate) plan: Plan,
    pub(crate) random: Random,
    pub(crate) now: Moment,
    pub(crate) host: Host,
    pub(crate) memories: Memories,
    pub(crate) history: History,
    pub(crate) processes: BTreeMap<u64, Process>,
    pub(crate) outcome: Outcome,
    pub(crate) accepted: AcceptedTasks,
    pub(crate) executed: ExecutedCalls,
    /// The number of segments created so far.
    pub(crate) segments: u64,
    pub(crate) model: AllocationModel,
    pub(crate) log_record: LogRecord,
    events: BTreeMap<(Moment, u64), Event>,
    last_number: u64,
    /// The master handles no call before this time.
    stalled_until: Moment,
    is_quiet: bool,
    /// The master is killed before it syncs what it writes.
    is_dying: bool,
    is_log_damaged: bool,
}

#[derive(Debug)]
enum Event {
    /// A worker of a process starts an operation.
    NextOp(u64),
    /// A process fetches its tasks from the master.
    FetchTasks(u64),
    Heartbeat(u64),
    /// A process mounts a segment, if some are missing.
    Mount(u64),
    /// A process settles unconfirmed puts.
    Settle(u64),
    /// A call reaches the master.
    Call(CallMessage),
    /// A reply reaches its caller, or (`None`) the caller's timeout expires.
    Reply {
        caller: (u64, u64),
        attempt: u64,
        message: Option<ReplyMessage>,
    },
    /// Words are written into the memory of their segment.
    Write {
        caller: (u64, u64),
        place: Place,
        first: u64,
        words: Vec<u64>,
    },
    Read {
        caller: (u64, u64),
        place: Place,
        words: Range<u64>,
    },
    Input {
        caller: (u64, u64),
        input: Input,
    },
    /// The master notices that a connection has closed.
    Disconnected(u64),
    Tick,
    /// The log is synced at its interval.
    SyncLog,
    Snapshot,
    /// Injects faults, once a second.
    Faults,
    StartMaster,
    StartProcess,
}

/// Runs a plan to its end and audits the result.
///
/// # Errors
/// An invariant was violated.
pub fn run(plan: Plan) -> Result<Outcome, Violation> {
    let seed = plan.seed;
    let mut simulator =
        Simulator::new(plan).map_err(|message| Violation { seed, step: 0, message })?;
    match simulator.run_phases().and_then(|()| simulator.audit()) {
        Ok(()) => Ok(simulator.outcome),
        Err(message) => Err(Violation { seed, step: simulator.outcome.steps, message }),
    }
}

impl Simulator {
    fn new(plan: Plan) -> Result<Self, String> {
        let mut random = Random::new(plan.seed);
        let host = Host::start(&plan, START_TIME, random.next())?;
        let mut simulator = Self {
            random,
            now: START_TIME,
            host,
            memories: Memories::default(),
            history: History::default(),
            processes: BTreeMap::new(),
            outcome: Outcome::default(),
            accepted: AcceptedTasks::default(),
            executed: ExecutedCalls::default(),
            segments: 0,
            model: AllocationModel::default(),
            log_record: LogRecord::default(),
            events: BTreeMap::new(),
            last_number: 0,
            stalled_until: Moment::default(),
            is_quiet: false,
            is_dying: false,
            is_log_damaged: false,
            plan,
        };
        for _ in 0..simulator.plan.clients {
            simulator.after(Duration::ZERO, Event::StartProcess);
        }
        simulator.after(TICK, Event::Tick);
        simulator.after(Duration::from_secs(1), Event::Faults);
        simulator.sync_later();
        Ok(simulator)
    }

    /// Runs operations under faults, then without faults until all clients are connected again.
    fn run_phases(&mut self) -> Result<(), String> {
        self.run_until(START_TIME + self.plan.active)?;
        self.stop_faults();
        self.run_until(self.now + QUIET_PERIOD)
    }

    /// Ends all faults and starts no new operations.
    fn stop_faults(&mut self) {
        self.is_quiet = true;
        let faults = &mut self.plan.faults;
        (faults.lost, faults.duplicated, faults.slow, faults.master_crash) = (0, 0, 0, 0);
        faults.cut = 0;
        self.stalled_until = self.now;
        for process in self.processes.values_mut() {
            (process.stalled_until, process.partitioned_until) = (self.now, self.now);
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
            self.handle(event)?;
        }
        self.now = end;
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::NextOp(process) => self.start_next_op(process),
            Event::FetchTasks(process) => self.fetch_tasks(process),
            Event::Settle(process) => self.start_settling(process),
            Event::Heartbeat(process) => self.start_heartbeat(process),
            Event::Mount(process) => self.start_mount(process),
            Event::Call(message) => self.serve(message),
            Event::Reply { caller, attempt, message } => {
                self.receive_reply(caller, attempt, message)
            }
            Event::Write { caller, place, first, words } => {
                let is_written = (place.offset + first..)
                    .zip(words)
                    .all(|(at, word)| self.memories.write(place.segment, at, word));
                let back = self.piece_delay();
                self.after(back, Event::Input { caller, input: Input::Wrote(is_written) });
                Ok(())
            }
            Event::Read { caller, place, words } => {
                let read = |index| self.memories.read(place.segment, place.offset + index);
                let words = words.map(read).collect();
                let back = self.piece_delay();
                self.after(back, Event::Input { caller, input: Input::Read(words) });
                Ok(())
            }
            Event::Input { caller, input } => self.handle_input(caller, input),
            Event::Disconnected(process) => {
                let client = Process::new(process).client;
                if let Some(state) = self.host.state() {
                    state.suspect(self.now, client);
                }
                self.flush_log().map(drop)
            }
            Event::Tick => self.tick(),
            Event::SyncLog => {
                self.host.sync_log();
                self.sync_later();
                Ok(())
            }
            Event::Snapshot => self.snapshot(),
            Event::Faults => {
                if !self.is_quiet {
                    self.inject_faults();
                    self.after(Duration::from_secs(1), Event::Faults);
                }
                Ok(())
            }
            Event::StartMaster => self.start_master(),
            Event::StartProcess => self.start_process(),
        }
    }

    fn snapshot(&mut self) -> Result<(), String> {
        self.host.snapshot(self.now)?;
        if self.host.is_snapshotting() {
            let pause = Duration::from_micros(self.random.below(5000));
            self.after(pause, Event::Snapshot);
        }
        Ok(())
    }

    /// Hands a reply to the operation that waits for it. A stalled process receives it later.
    fn receive_reply(
        &mut self,
        caller: (u64, u64),
        attempt: u64,
        message: Option<ReplyMessage>,
    ) -> Result<(), String> {
        let Some(process) = self.processes.get(&caller.0) else { return Ok(()) };
        if !process.stalled_until.has_passed(self.now) {
            self.at(process.stalled_until, Event::Reply { caller, attempt, message });
            return Ok(());
        }
        let running = process.running.get(&caller.1);
        if running.is_none_or(|running| running.attempt != attempt) {
            return Ok(());
        }
        let input = message.map_or(Input::TimedOut, Input::Reply);
        self.handle_input(caller, input)
    }

    // ------------------------------------------------------------ services for clients

    /// Returns a unique number.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Sends a call once, with a timeout.
    pub(crate) fn call(&mut self, caller: (u64, u64), call: Call) {
        let request = self.request(caller.0, call);
        self.send_request(caller, request);
    }

    /// Sends a request with a timeout.
    pub(crate) fn send_request(&mut self, caller: (u64, u64), request: CallRequest) {
        let attempt = self.next_number();
        let Some(process) = self.processes.get_mut(&caller.0) else { return };
        if let Some(running) = process.running.get_mut(&caller.1) {
            running.attempt = attempt;
        }
        let is_partitioned = !process.partitioned_until.has_passed(self.now);
        self.after(CALL_TIMEOUT, Event::Reply { caller, attempt, message: None });
        if !is_partitioned {
            for delay in network::deliveries(&mut self.random, &self.plan.faults) {
                let request = request.clone();
                self.after(delay, Event::Call(CallMessage { caller, attempt, request }));
            }
        }
    }

    /// Sends words to a replica, to be written from the word `first` on.
    pub(crate) fn write_piece(
        &mut self,
        caller: (u64, u64),
        place: Place,
        first: u64,
        words: Vec<u64>,
    ) {
        let there = self.piece_delay();
        self.after(there, Event::Write { caller, place, first, words });
    }

    /// Requests words of a replica.
    pub(crate) fn read_piece(&mut self, caller: (u64, u64), place: Place, words: Range<u64>) {
        let there = self.piece_delay();
        self.after(there, Event::Read { caller, place, words });
    }

    /// Schedules the next heartbeat of a process.
    pub(crate) fn heartbeat_at(&mut self, process: u64, when: Moment) {
        if let Some(found) = self.processes.get_mut(&process) {
            found.next_heartbeat = when;
            self.at(when, Event::Heartbeat(process));
        }
    }

    /// Schedules the mount of a segment, if some are missing.
    pub(crate) fn mount_soon(&mut self, process: u64) {
        self.after(Duration::from_millis(1), Event::Mount(process));
    }

    /// Schedules an input of an operation.
    pub(crate) fn input_after(&mut self, pause: Duration, caller: (u64, u64), input: Input) {
        self.after(pause, Event::Input { caller, input });
    }

    /// Schedules a fetch of tasks.
    pub(crate) fn fetch_soon(&mut self, process: u64) {
        self.after(Duration::from_millis(1), Event::FetchTasks(process));
    }

    /// Schedules the settlement of unconfirmed puts, if there are any.
    pub(crate) fn settle_soon(&mut self, process: u64) {
        let found = self.processes.get(&process);
        if found.is_some_and(|found| found.own_puts.unconfirmed_count() > 0) {
            self.after(Duration::from_millis(1), Event::Settle(process));
        }
    }

    /// Starts an operation of a process.
    pub(crate) fn start_op(
        &mut self,
        caller: (u64, u64),
        op: Op,
        is_work: bool,
    ) -> Result<(), String> {
        let Some(process) = self.processes.get_mut(&caller.0) else { return Ok(()) };
        process.running.insert(caller.1, Running { op: Some(op), attempt: 0, is_work });
        self.handle_input(caller, Input::Begin)
    }

    fn handle_input(&mut self, caller: (u64, u64), input: Input) -> Result<(), String> {
        let Some(process) = self.processes.get_mut(&caller.0) else { return Ok(()) };
        if !process.stalled_until.has_passed(self.now) {
            let stalled_until = process.stalled_until;
            self.at(stalled_until, Event::Input { caller, input });
            return Ok(());
        }
        let Some(running) = process.running.get_mut(&caller.1) else { return Ok(()) };
        // Later replies to the previous call are ignored.
        running.attempt = 0;
        let Some(op) = running.op.take() else { return Ok(()) };
        let next = self.step_op(caller, op, input)?;
        let Some(process) = self.processes.get_mut(&caller.0) else { return Ok(()) };
        match next {
            Some(op) => {
                if let Some(running) = process.running.get_mut(&caller.1) {
                    running.op = Some(op);
                }
            }
            None => {
                let was_work = process.running.remove(&caller.1).is_some_and(|it| it.is_work);
                if was_work {
                    let pause = Duration::from_micros(self.random.below(60_000));
                    self.after(pause, Event::NextOp(caller.0));
                }
            }
        }
        Ok(())
    }

    // ------------------------------------------------------------ event handlers

    fn start_next_op(&mut self, process: u64) -> Result<(), String> {
        if self.is_quiet || !self.processes.contains_key(&process) {
            return Ok(());
        }
        let key = self.random.below(self.plan.keys);
        let is_forced = self.random.happens(700);
        let request = if self.random.happens(self.plan.task_requests) {
            task::random_request(self)
        } else {
            None
        };
        let op = match (request, self.random.below(1000)) {
            (Some(call), _) => Op::Request(Request::new(call)),
            (None, 0..450) => Op::Put(Put::random(self)),
            (None, 450..900) => Op::Get(Box::new(Get::random(self))),
            (None, 900..990) => Op::Request(Request::new(Call::Remove { key, is_forced })),
            (None, 990..995) => Op::Request(Request::new(Call::RemoveAll { is_forced })),
            (None, _) => Op::Get(Box::new(Get::random(self))),
        };
        let number = self.next_number();
        self.start_op((process, number), op, true)
    }

    fn fetch_tasks(&mut self, process: u64) -> Result<(), String> {
        let number = self.next_number();
        let runner = TaskRunner::new(self);
        self.start_op((process, number), Op::RunTasks(runner), false)
    }

    fn serve(&mut self, message: CallMessage) -> Result<(), String> {
        if !self.host.is_running() {
            return Ok(());
        }
        if !self.stalled_until.has_passed(self.now) {
            let stalled_until = self.stalled_until;
            self.at(stalled_until, Event::Call(message));
            return Ok(());
        }
        if let Some(until) = self.host.recovery_deadline(self.now, &message.request.call) {
            let again = until.min(self.now + Duration::from_millis(20));
            self.at(again, Event::Call(message));
            return Ok(());
        }
        self.serve_once(&message)
    }

    /// Executes a call and replies. Returns the reply unless the master has crashed.
    pub(crate) fn execute(
        &mut self,
        message: &CallMessage,
    ) -> Result<Option<ReplyMessage>, String> {
        let CallMessage { caller, attempt, ref request } = *message;
        let CallRequest { ref call, number, sequence, ref released } = *request;
        let client = Process::new(caller.0).client;
        self.host.release_fences(released);
        let evicted = self.evicted_objects();
        let reply = self.host.serve(self.now, client, (sequence, number.number), call);
        self.check_request(caller, &reply)?;
        let evicted = call.is_about_tasks().then(|| self.evicted_objects() - evicted);
        let dies = self.random.happens(self.plan.faults.master_crash / 50);
        let dies_before_log = dies && self.random.happens(500);
        // Nobody learns of a version that is not in the log; the next master may give it to another
        // put.
        if let (Call::PutStart { key, length, .. }, Reply::Started { version, .. }) = (call, &reply)
            && (!dies_before_log || self.plan.has(Bug::RepliesBeforeLog))
        {
            self.history.record_start(self.now, caller.0, *version, (*key, *length));
        }
        if dies_before_log {
            if self.plan.has(Bug::RepliesBeforeLog) {
                let effects = self.host.take_effects();
                let entries = self.record_effects(&effects)?;
                self.send_reply(caller, attempt, ReplyMessage { reply, entries });
            }
            self.crash_master();
            return Ok(None);
        }
        // It may die between writing and syncing.
        self.is_dying = dies && self.random.happens(500);
        let entries = self.log_checked(evicted)?;
        if call.is_removal() {
            self.executed.check_removal(&self.history, (client, caller.1), entries.clone())?;
        }
        self.is_dying = false;
        if dies {
            self.crash_master();
            return Ok(None);
        }
        let answer = ReplyMessage { reply, entries };
        self.send_reply(caller, attempt, answer.clone());
        Ok(Some(answer))
    }

    pub(crate) fn send_reply(&mut self, caller: (u64, u64), attempt: u64, message: ReplyMessage) {
        self.accepted.accept(&message.reply);
        if self.random.happens(self.plan.faults.cut) {
            // The caller sees the connection break.
            let delay = network::delay(&mut self.random, &self.plan.faults);
            self.after(delay, Event::Reply { caller, attempt, message: None });
            return;
        }
        for delay in network::deliveries(&mut self.random, &self.plan.faults) {
            let message = Some(message.clone());
            self.after(delay, Event::Reply { caller, attempt, message });
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        self.after(TICK, Event::Tick);
        let evicted = self.evicted_objects();
        if self.stalled_until.has_passed(self.now)
            && let Some(state) = self.host.state()
        {
            state.advance(self.now);
        }
        self.forget_expired();
        let evicted = self.evicted_objects() - evicted;
        self.log_checked(Some(evicted)).map(drop)
    }

    /// Returns the number of objects evicted since the master started.
    fn evicted_objects(&mut self) -> u64 {
        self.host.state().map_or(0, |state| state.totals().counters.evicted_keys)
    }

    /// Calls [`flush_log`](Self::flush_log) and checks that the number of objects that vanished is
    /// `may_vanish`, if that number is known.
    fn log_checked(&mut self, may_vanish: Option<u64>) -> Result<Range<usize>, String> {
        let before = self.model.dropped;
        let entries = self.flush_log()?;
        let vanished = self.model.dropped - before;
        match may_vanish {
            Some(evicted) if evicted != vanished => {
                Err(format!("{vanished} objects vanished but {evicted} were evicted"))
            }
            _ => Ok(entries),
        }
    }

    /// Appends the master's changes to the log and to the checkers.
    pub(crate) fn flush_log(&mut self) -> Result<Range<usize>, String> {
        let effects = self.host.take_effects();
        let entries = self.record_effects(&effects)?;
        let next_frame = self.host.append_log(&effects, self.is_dying);
        if !effects.is_empty() {
            self.log_record.append(effects, next_frame, self.history.len());
        }
        Ok(entries)
    }

    fn record_effects(&mut self, effects: &[u8]) -> Result<Range<usize>, String> {
        let mut changes = Vec::new();
        let mut applied = Ok(());
        let is_traced = self.plan.is_traced;
        let decoded = Effect::decode_all(effects, |effect| {
            if is_traced {
                trace(self.now, &effect);
            }
            if applied.is_ok() {
                applied = self.model.apply(effect, &mut changes);
            }
        });
        applied?;
        decoded.map_err(|error| format!("cannot decode an effect: {error:?}"))?;
        let entries = self.history.append(changes);
        self.history.check_late_ends(entries.clone())?;
        Ok(entries)
    }

    // ------------------------------------------------------------ fault injection

    fn inject_faults(&mut self) {
        let faults = self.plan.faults.clone();
        if self.host.is_running() && self.random.happens(faults.master_crash) {
            self.crash_master();
        }
        if self.random.happens(faults.master_stall) {
            self.stalled_until = self.now + Duration::from_millis(self.random.below(12_000));
        }
        if self.random.happens(faults.snapshot) && !self.host.is_snapshotting() {
            self.outcome.snapshots += 1;
            self.after(Duration::ZERO, Event::Snapshot);
        }
        let processes: Vec<u64> = self.processes.keys().copied().collect();
        for process in processes {
            if self.random.happens(faults.client_crash) {
                self.kill_process(process);
                continue;
            }
            let time = self.now + Duration::from_millis(self.random.below(10_000));
            let (stalls, is_partitioned) =
                (self.random.happens(faults.client_stall), self.random.happens(faults.partition));
            let remounts = self.random.happens(faults.remount);
            if let Some(found) = self.processes.get_mut(&process) {
                found.stalled_until = if stalls { time } else { found.stalled_until };
                found.partitioned_until =
                    if is_partitioned { time } else { found.partitioned_until };
            }
            if remounts {
                // The operation only sends a call here, which cannot violate an invariant.
                let _ = self.start_remount(process);
            }
        }
    }

    fn crash_master(&mut self) {
        self.host.kill();
        if self.random.happens(self.plan.faults.wipe) {
            self.host.lose_log();
            self.forget_log();
        } else if self.random.happens(self.plan.faults.power_loss) {
            self.lose_power();
        }
        let down_max = self.plan.faults.down_max.as_millis() as u64;
        let pause = Duration::from_millis(self.random.below(down_max));
        self.after(pause, Event::StartMaster);
    }

    /// Crashes the machine of the master. Clients are on other hosts and go on.
    fn lose_power(&mut self) {
        self.outcome.power_losses += 1;
        self.is_log_damaged =
            self.random.happens(self.plan.faults.damage) && self.host.damage_older_log();
        self.host.lose_power(&mut self.random);
        self.log_record.lose_power(self.now);
        if self.plan.log_sync == LogSync::Never {
            self.forget_log();
        }
    }

    /// Takes all values for lost, with the log.
    fn forget_log(&mut self) {
        let mut changes = Vec::new();
        self.model.clear(&mut changes);
        self.history.append(changes);
        self.log_record.clear();
        self.accepted = AcceptedTasks::default();
    }

    fn sync_later(&mut self) {
        if let LogSync::Interval(interval) = self.plan.log_sync {
            self.after(interval, Event::SyncLog);
        }
    }

    fn start_master(&mut self) -> Result<(), String> {
        if self.host.is_running() {
            return Ok(());
        }
        self.outcome.restarts += 1;
        let seed = self.random.next();
        let bug = self.plan.bug;
        let is_kept = |effect: &Effect<'_>| match effect {
            Effect::MaxGranted { .. } => bug != Some(Bug::ForgetsFences),
            Effect::Task { .. } => bug != Some(Bug::ForgetsTasks),
            _ => true,
        };
        let mut started = self.host.restart(self.now, seed, is_kept);
        if started.is_err() && std::mem::take(&mut self.is_log_damaged) {
            // The master refuses a damaged log, and the operator removes it.
            self.host.lose_log();
            self.forget_log();
            started = self.host.restart(self.now, seed, is_kept);
        }
        self.is_log_damaged = false;
        self.executed.restart();
        self.check_recovered(started?)?;
        self.flush_log().map(drop)
    }

    fn kill_process(&mut self, process: u64) {
        self.outcome.client_deaths += 1;
        self.processes.remove(&process);
        self.memories.remove_all(process);
        self.after(Duration::from_millis(1), Event::Disconnected(process));
        let pause = Duration::from_millis(self.random.below(3000));
        self.after(pause, Event::StartProcess);
    }

    fn start_process(&mut self) -> Result<(), String> {
        let number = self.next_number();
        let mut process = Process::new(number);
        process.wanted_segments = self.random.between(1, 2) as usize;
        self.processes.insert(number, process);
        self.heartbeat_at(number, self.now);
        for _ in 0..self.plan.workers {
            self.after(Duration::from_millis(10), Event::NextOp(number));
        }
        Ok(())
    }

    fn piece_delay(&mut self) -> Duration {
        network::delay(&mut self.random, &self.plan.faults).min(PIECE_DELAY_MAX)
    }

    fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    fn at(&mut self, when: Moment, event: Event) {
        let number = self.next_number();
        self.events.insert((when, number), event);
    }
}

#[expect(clippy::print_stderr, reason = "`--trace` prints to the terminal")]
fn trace(now: Moment, event: &impl fmt::Debug) {
    eprintln!("{:>12.6}s {event:?}", now.since(START_TIME).as_secs_f64());
}
