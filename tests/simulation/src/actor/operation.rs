//! Operations of a process: their choice, their steps, and the inputs that they wait for.

use std::time::Duration;

use crate::{
    actor::{
        client::{Input, Op, Process, Running, Step},
        get::Get,
        put::Put,
        repeated_call::Request,
        task::{self, TaskRunner},
    },
    call::{Call, ReplyMessage},
    simulator::{Event, Simulator},
};

/// The objects that are described while a segment is swept.
const SWEEP_VIEWS: usize = 4;

impl Simulator {
    /// Starts the next operation of a worker.
    pub(crate) fn start_next_op(&mut self, process: u64) -> Result<(), String> {
        if self.is_quiet || !self.processes.contains_key(&process) {
            return Ok(());
        }
        let key = self.random.below(self.plan.keys);
        let tenant = self.random.below(self.plan.tenants);
        let is_forced = self.random.happens(700);
        let request = if self.random.happens(self.plan.task_requests) {
            task::random_request(self)
        } else if self.random.happens(self.plan.views) {
            Some(match self.random.below(10) {
                0 => Call::List { tenant },
                1 => Call::Overview,
                _ => Call::View { key },
            })
        } else {
            None
        };
        let op = match (request, self.random.below(1000)) {
            (Some(call), _) => Op::Request(Request::new(call)),
            (None, share) if share < self.plan.puts => Op::Put(Put::random(self)),
            (None, 900..980) if self.plan.puts > 100 => {
                Op::Request(Request::new(Call::Remove { key, is_forced }))
            }
            (None, 980..986) => Op::Request(Request::new(Call::RemovePrefix { key, is_forced })),
            (None, 990..993) => Op::Request(Request::new(Call::RemoveAll { tenant, is_forced })),
            (None, _) => Op::Get(Box::new(Get::random(self))),
        };
        let number = self.next_number();
        self.start_op((process, number), op, true)
    }

    /// Has objects described, now and then, whose segment has just left the pool.
    pub(crate) fn view_soon(&mut self, keys: &[u64]) {
        if self.is_quiet || !self.random.happens(self.plan.sweep_views) {
            return;
        }
        for _ in 0..SWEEP_VIEWS {
            if let Some(&key) = self.random.pick(keys) {
                let pause = Duration::from_micros(self.random.below(3000));
                self.after(pause, Event::View(key));
            }
        }
    }

    /// Makes calls about an object, and a list or a page of operators.
    pub(crate) fn view_in_sweep(&mut self, key: u64) -> Result<(), String> {
        let processes: Vec<u64> = self.processes.keys().copied().collect();
        let tenant = self.random.below(self.plan.tenants);
        let page = if self.random.happens(500) { Call::Overview } else { Call::List { tenant } };
        for call in [Call::View { key }, page] {
            let Some(&process) = self.random.pick(&processes) else { return Ok(()) };
            let number = self.next_number();
            self.start_op((process, number), Op::Request(Request::new(call)), false)?;
        }
        Ok(())
    }

    /// Starts to fetch and run the tasks of a process.
    pub(crate) fn fetch_tasks(&mut self, process: u64) -> Result<(), String> {
        let number = self.next_number();
        let runner = TaskRunner::new(self);
        self.start_op((process, number), Op::RunTasks(runner), false)
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

    /// Hands a reply to the operation that waits for it. A stalled process receives it later.
    pub(crate) fn receive_reply(
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
        let is_awaited = running.is_some_and(|running| running.attempt == attempt);
        self.release_connection(caller.0, attempt);
        if !is_awaited {
            return Ok(());
        }
        let input = message.map_or(Input::TimedOut, Input::Reply);
        self.handle_input(caller, input)
    }

    /// Hands an input to an operation. A stalled process gets it later.
    pub(crate) fn handle_input(&mut self, caller: (u64, u64), input: Input) -> Result<(), String> {
        let Some(process) = self.processes.get_mut(&caller.0) else { return Ok(()) };
        if !process.stalled_until.has_passed(self.now) {
            let stalled_until = process.stalled_until;
            self.at(stalled_until, Event::Input { caller, input });
            return Ok(());
        }
        let Some(running) = process.running.get_mut(&caller.1) else { return Ok(()) };
        if matches!(input, Input::Reply(_) | Input::TimedOut) {
            // Later replies to the previous call are ignored.
            running.attempt = 0;
        }
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
                    let pause = Duration::from_micros(self.random.below(self.plan.pause_micros));
                    self.after(pause, Event::NextOp(caller.0));
                }
            }
        }
        Ok(())
    }

    /// Runs one step of an operation.
    fn step_op(&mut self, caller: (u64, u64), op: Op, input: Input) -> Step {
        match op {
            Op::Put(put) => put.step(self, caller, input),
            Op::Settle(settle) => Ok(settle.step(self, caller, input).map(Op::Settle)),
            Op::Get(get) => get.step(self, caller, input),
            Op::Request(request) => Ok(request.step(self, caller, input)?.map(Op::Request)),
            Op::RunTasks(runner) => runner.step(self, caller, input),
            Op::Directory(owner) => owner.step(self, caller, input),
            Op::Heartbeat(heartbeat) => {
                let next = heartbeat.step(self, caller, input);
                if next.is_none() {
                    self.unlock_announcements(caller);
                }
                Ok(next.map(Op::Heartbeat))
            }
            Op::SegmentChange(change) => {
                let next = change.step(self, caller, input);
                if next.is_none() {
                    self.unlock_announcements(caller);
                }
                Ok(next.map(Op::SegmentChange))
            }
        }
    }

    /// Sends a call once, with a timeout.
    pub(crate) fn call(&mut self, caller: (u64, u64), call: Call) {
        let request = self.request(caller.0, call);
        self.send_request(caller, request);
    }

    /// Schedules an input of an operation.
    pub(crate) fn input_after(&mut self, pause: Duration, caller: (u64, u64), input: Input) {
        self.after(pause, Event::Input { caller, input });
    }

    /// Schedules the next heartbeat of a process.
    pub(crate) fn heartbeat_at(&mut self, process: u64, when: mooncake_base::Moment) {
        if let Some(found) = self.processes.get_mut(&process) {
            found.next_heartbeat = when;
            self.at(when, Event::Heartbeat(process));
        }
    }

    /// Schedules the mount of a segment, if some are missing.
    pub(crate) fn mount_soon(&mut self, process: u64) {
        self.after(Duration::from_millis(1), Event::Mount(process));
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

    /// Schedules that the directory of a process is served, if that is not done.
    pub(crate) fn serve_directory_soon(&mut self, process: u64) {
        let found = self.processes.get(&process).and_then(|found| found.directory.as_ref());
        if found.is_some_and(|own| !own.is_served) {
            self.after(Duration::from_millis(1), Event::ServeDirectory(process));
        }
    }

    /// Starts a process with its workers.
    pub(crate) fn start_process(&mut self) -> Result<(), String> {
        let number = self.next_number();
        let mut process = Process::new(number);
        process.connections = super::connections::Connections::new(self.plan.connections);
        process.wanted_segments = self.random.between(1, 2) as usize;
        process.clock_ahead = Duration::from_millis(self.random.below(self.plan.clock_skew_ms));
        process.impaired_until = self.now;
        process.directory = self.open_directory(number);
        self.processes.insert(number, process);
        self.heartbeat_at(number, self.now);
        for _ in 0..self.plan.workers {
            self.after(Duration::from_millis(10), Event::NextOp(number));
        }
        Ok(())
    }
}
