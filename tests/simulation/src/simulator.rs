//! The discrete-event simulator: a manual clock, an event queue, and the whole cluster.

mod outcome;

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use mooncake_base::{Moment, SegmentId};
use mooncake_master::LogSync;

use crate::{
    actor::{
        client::{Input, Process},
        repeated_call::ExecutedCalls,
        task::AcceptedTasks,
    },
    audit::{
        allocation_model::AllocationModel, disks::DiskRecords, history::History,
        log_record::LogRecord,
    },
    call::{CallMessage, Place, ReplyMessage},
    directory::{Directory, RecordName},
    host::{Host, waiting_answers::WaitingAnswers},
    memory::Memories,
    plan::Plan,
    random::Random,
};

pub use outcome::{Outcome, Violation};

/// The time at which every run starts.
const START_TIME: Moment = Moment::from_boot(Duration::from_secs(1000));
/// The period of the master's timers.
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// The time without faults before the audit, in which clients reconnect. Longer than `client_ttl`.
const QUIET_PERIOD: Duration = Duration::from_secs(25);

/// The whole simulated cluster and its checkers.
#[derive(Debug)]
pub(crate) struct Simulator {
    pub(crate) plan: Plan,
    pub(crate) random: Random,
    pub(crate) now: Moment,
    pub(crate) host: Host,
    pub(crate) waiting: WaitingAnswers,
    pub(crate) memories: Memories,
    pub(crate) directories: Vec<Directory>,
    pub(crate) records: DiskRecords,
    /// The process whose report is being executed, and the directory that it is about.
    pub(crate) reporting: Option<(u64, SegmentId)>,
    pub(crate) history: History,
    pub(crate) processes: BTreeMap<u64, Process>,
    pub(crate) outcome: Outcome,
    pub(crate) accepted: AcceptedTasks,
    pub(crate) executed: ExecutedCalls,
    /// The number of segments created so far.
    pub(crate) segments: u64,
    pub(crate) model: AllocationModel,
    pub(crate) log_record: LogRecord,
    /// The master handles no call before this time.
    pub(crate) stalled_until: Moment,
    /// The disk of the log takes no write before this time.
    pub(crate) log_hangs_until: Moment,
    pub(crate) is_quiet: bool,
    pub(crate) is_log_damaged: bool,
    events: BTreeMap<(Moment, u64), Event>,
    last_number: u64,
}

#[derive(Debug)]
pub(crate) enum Event {
    /// A worker of a process starts an operation.
    NextOp(u64),
    /// Some process asks for views of this key while its segment is swept.
    View(u64),
    /// A process fetches its tasks from the master.
    FetchTasks(u64),
    Heartbeat(u64),
    /// A process mounts a segment, if some are missing.
    Mount(u64),
    /// The grace of a segment of a process is over.
    EndGrace(u64),
    /// A process settles unconfirmed puts.
    Settle(u64),
    /// A call reaches the master.
    Call(CallMessage),
    /// The master continues the call of this number.
    Slice(u64),
    /// A reply reaches its caller, or (`None`) the caller's timeout expires.
    Reply {
        caller: (u64, u64),
        attempt: u64,
        message: Option<ReplyMessage>,
    },
    /// Words are written into the memory of their holder.
    Write {
        caller: (u64, u64),
        piece: u64,
        place: Place,
        first: u64,
        words: Vec<u64>,
    },
    Read {
        caller: (u64, u64),
        place: Place,
        words: Range<u64>,
    },
    /// A request for a record reaches the owner of its directory.
    Load {
        caller: (u64, u64),
        place: Place,
        name: RecordName,
    },
    /// A process begins to serve its directory.
    ServeDirectory(u64),
    Input {
        caller: (u64, u64),
        input: Input,
    },
    /// The master notices that a connection has closed; `is_dead`: the kernel of its host closed it.
    Disconnected {
        process: u64,
        is_dead: bool,
    },
    Tick,
    /// The master goes on to drop the copies in segments that have left the pool.
    Sweep,
    /// The queue of the log is written.
    WriteLog,
    /// The log is synced, at its interval or because it was requested.
    SyncLog {
        is_periodic: bool,
    },
    /// The log is started anew after a failure.
    RestartLog,
    Snapshot,
    /// Injects faults, once a second.
    Faults,
    KillMaster,
    StartMaster,
    StartProcess,
}

/// Runs a plan to its end and audits the result.
///
/// # Errors
/// An invariant was violated, or the program panicked.
pub fn run(plan: Plan) -> Result<Outcome, Violation> {
    let seed = plan.seed;
    let mut simulator =
        Simulator::new(plan).map_err(|message| Violation { seed, step: 0, message })?;
    let ran =
        catch_unwind(AssertUnwindSafe(|| simulator.run_phases().and_then(|()| simulator.audit())));
    let step = simulator.outcome.steps;
    match ran {
        Ok(Ok(())) => Ok(simulator.outcome),
        Ok(Err(message)) => Err(Violation { seed, step, message }),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            let message = format!("a panic: {}", text.unwrap_or("without a message"));
            Err(Violation { seed, step, message })
        }
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
            waiting: WaitingAnswers::default(),
            memories: Memories::default(),
            directories: Vec::new(),
            records: DiskRecords::default(),
            reporting: None,
            history: History::default(),
            processes: BTreeMap::new(),
            outcome: Outcome::default(),
            accepted: AcceptedTasks::default(),
            executed: ExecutedCalls::default(),
            segments: 0,
            model: AllocationModel::new(plan.adopts_records()),
            log_record: LogRecord::default(),
            events: BTreeMap::new(),
            last_number: 0,
            stalled_until: Moment::default(),
            log_hangs_until: Moment::default(),
            is_quiet: false,
            is_log_damaged: false,
            plan,
        };
        for _ in 0..simulator.plan.clients {
            simulator.after(Duration::ZERO, Event::StartProcess);
        }
        simulator.after(TICK, Event::Tick);
        simulator.after(Duration::from_secs(1), Event::Faults);
        simulator.sync_at_interval();
        simulator.set_quotas()?;
        Ok(simulator)
    }

    /// Runs operations under faults, then without faults until all clients are connected again.
    fn run_phases(&mut self) -> Result<(), String> {
        self.run_until(START_TIME + self.plan.active)?;
        self.stop_faults();
        self.run_until(self.now + QUIET_PERIOD)
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
            Event::View(key) => self.view_in_sweep(key),
            Event::FetchTasks(process) => self.fetch_tasks(process),
            Event::Settle(process) => self.start_settling(process),
            Event::Heartbeat(process) => self.start_heartbeat(process),
            Event::Mount(process) => self.start_mount(process),
            Event::EndGrace(process) => {
                self.end_graces(process);
                Ok(())
            }
            Event::Call(message) => self.serve(message),
            Event::Slice(number) => self.continue_call(number),
            Event::Reply { caller, attempt, message } => {
                self.receive_reply(caller, attempt, message)
            }
            Event::Write { caller, piece, place, first, words } => {
                self.write_words(caller, piece, (place, first), words);
                Ok(())
            }
            Event::Read { caller, place, words } => {
                self.read_words(caller, &place, words);
                Ok(())
            }
            Event::Load { caller, place, name } => {
                self.answer_load(caller, place, name);
                Ok(())
            }
            Event::ServeDirectory(process) => self.serve_directory(process),
            Event::Input { caller, input } => self.handle_input(caller, input),
            Event::Disconnected { process, is_dead } => self.notice_disconnect(process, is_dead),
            Event::Tick => self.tick(),
            Event::Sweep => self.advance_master(),
            Event::WriteLog => self.write_log(),
            Event::SyncLog { is_periodic } => self.sync_log(is_periodic),
            Event::RestartLog => self.restart_log(),
            Event::Snapshot => self.snapshot(),
            Event::Faults => {
                if !self.is_quiet {
                    self.inject_faults();
                    self.after(Duration::from_secs(1), Event::Faults);
                }
                Ok(())
            }
            Event::KillMaster => {
                if self.host.is_running() && !self.is_quiet {
                    self.crash_master();
                }
                Ok(())
            }
            Event::StartMaster => self.start_master(),
            Event::StartProcess => self.start_process(),
        }
    }

    /// Returns a unique number.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Returns what the clock of a process shows at a moment.
    pub(crate) fn clock_at(&self, process: u64, at: Moment) -> Moment {
        self.processes.get(&process).map_or(at, |found| at + found.clock_ahead)
    }

    /// Returns what the clock of a process shows now.
    pub(crate) fn clock(&self, process: u64) -> Moment {
        self.clock_at(process, self.now)
    }

    /// Syncs the log after its interval, if it has one.
    pub(crate) fn sync_at_interval(&mut self) {
        if let LogSync::Interval(interval) = self.plan.log_sync {
            self.after(interval, Event::SyncLog { is_periodic: true });
        }
    }

    pub(crate) fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    pub(crate) fn at(&mut self, when: Moment, event: Event) {
        let number = self.next_number();
        self.events.insert((when, number), event);
    }
}

/// Prints an event or an effect.
#[expect(clippy::print_stderr, reason = "`--trace` prints to the terminal")]
pub(crate) fn trace(now: Moment, event: &impl fmt::Debug) {
    eprintln!("{:>12.6}s {event:?}", now.since(START_TIME).as_secs_f64());
}
