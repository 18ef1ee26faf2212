//! The service of the master: admission of calls, their execution in slices between which other calls
//! run, answers that wait for the log, and timers.

use std::{ops::Range, time::Duration};

use mooncake_base::{ClientId, ErrorCode, Moment};
use mooncake_master::state::{Begun, Pending, is_sweeping};

use crate::{
    actor::client::Process,
    audit::allocation_model::Change,
    call::{
        Call, CallMessage, CallNumber, NewPut, Reply, ReplyMessage, Start, key_number, tenant_name,
    },
    fault::network,
    host::{
        calls::{self, Context, SliceEnd},
        running_call::{RunningCall, Work},
    },
    plan::Bug,
    simulator::{Event, Simulator, TICK},
};

/// The most large calls that run at a time.
const LARGE_CALLS: usize = 1;
/// The most large calls that wait.
const QUEUE_MAX: usize = 4;
/// The slices after which a put waits no longer for memory.
const PUT_SLICES_MAX: u64 = 200;

impl Simulator {
    /// Sets the quotas of all tenants, which the log keeps.
    pub(crate) fn set_quotas(&mut self) -> Result<(), String> {
        if self.plan.tenants == 1 {
            return Ok(());
        }
        let quotas: Vec<_> = (0..self.plan.tenants)
            .map(|tenant| (tenant_name(tenant), self.plan.quota_of(tenant)))
            .collect();
        let slice = self.host.run(|state| {
            quotas.iter().try_for_each(|(tenant, bytes)| state.set_quota(tenant, *bytes))
        });
        let Some(slice) = slice else { return Ok(()) };
        let (set, _) = self.appended(slice)?;
        set.map_err(|error| format!("a quota was refused: {error}"))
    }

    /// Handles a call that has reached the master.
    pub(crate) fn serve(&mut self, message: CallMessage) -> Result<(), String> {
        if !self.host.is_running() {
            return Ok(());
        }
        if !self.stalled_until.has_passed(self.now) {
            let stalled_until = self.stalled_until;
            self.at(stalled_until, Event::Call(message));
            return Ok(());
        }
        self.record_sign_of_life(message.caller.0)?;
        let large = self.host.calls.values().filter(|call| call.is_large).count();
        if message.request.call.is_large() && large >= LARGE_CALLS {
            self.outcome.queued += 1;
            if self.host.queue.len() < QUEUE_MAX {
                self.host.queue.push_back(message);
            } else {
                self.refuse(&message, ErrorCode::RPC_FAIL);
            }
            return Ok(());
        }
        if let Some(until) = self.host.recovery_deadline(self.now, &message.request.call) {
            let again = until.min(self.now + Duration::from_millis(20));
            self.at(again, Event::Call(message));
            return Ok(());
        }
        self.serve_once(message)
    }

    /// Records that a client calls: it lives, unless its connection has closed since.
    fn record_sign_of_life(&mut self, process: u64) -> Result<(), String> {
        if !self.processes.contains_key(&process) {
            return Ok(());
        }
        let (now, client) = (self.now, Process::new(process).client);
        let Some(slice) = self.host.run(|state| state.heartbeat(now, client)) else {
            return Ok(());
        };
        self.appended(slice).map(drop)
    }

    fn refuse(&mut self, message: &CallMessage, code: ErrorCode) {
        let (reply, entries) = (Reply::Failed(code), 0..0);
        self.send_reply(message, ReplyMessage { reply, entries, position: 0 });
    }

    /// Executes a call, or gives the answer to its first execution.
    fn serve_once(&mut self, message: CallMessage) -> Result<(), String> {
        let client = Process::new(message.caller.0).client;
        let CallNumber { number, answered_below } = message.request.number;
        if number == 0 {
            return self.execute(message, false);
        }
        match self.host.answers.begin(client, number, answered_below) {
            Begun::Execute => self.execute(message, true),
            Begun::Repeated(answer) => {
                self.outcome.repetitions += 1;
                self.answer(message, answer);
                Ok(())
            }
            // Its client does not wait for a reply.
            Begun::GivenUp => Ok(()),
            Begun::Running => {
                self.after(Duration::from_millis(5), Event::Call(message));
                Ok(())
            }
        }
    }

    /// Executes the first slice of a call.
    fn execute(&mut self, message: CallMessage, is_numbered: bool) -> Result<(), String> {
        let client = Process::new(message.caller.0).client;
        let call = &message.request.call;
        if let Some(slice) =
            self.host.run(|state| calls::release_fences(state, &message.request.released))
        {
            self.appended(slice)?;
        }
        let call = RunningCall {
            client,
            work: Work::of(call, &self.tenant_of_call(call)),
            entries: 0..0,
            position: 0,
            slices: 0,
            is_numbered,
            is_large: call.is_large(),
            message,
        };
        self.run_slice(call)
    }

    /// Executes the next slice of a call.
    pub(crate) fn continue_call(&mut self, number: u64) -> Result<(), String> {
        if !self.stalled_until.has_passed(self.now) {
            let stalled_until = self.stalled_until;
            self.at(stalled_until, Event::Slice(number));
            return Ok(());
        }
        match self.host.calls.remove(&number) {
            Some(call) => self.run_slice(call),
            None => Ok(()),
        }
    }

    fn run_slice(&mut self, mut running: RunningCall) -> Result<(), String> {
        let call = running.message.request.call.clone();
        let tenant = self.tenant_of_call(&call);
        let request = &running.message.request;
        let context = Context {
            client: running.client,
            tenant: &tenant,
            identity: self.host.identity(),
            sequence: request.sequence,
            number: request.number.number,
            is_late: running.slices > PUT_SLICES_MAX,
            bug: self.plan.bug,
        };
        let (now, evicted) = (self.now, self.faded_objects());
        let target = call.mounted_disk().and_then(|disk| self.reader_target(disk));
        let work = &mut running.work;
        // As in the service, neither reads nor heartbeats wait for the log.
        let slice = if call.waits_for_log() {
            self.host.run(|state| context.run(state, now, &call, work))
        } else {
            self.host.read(|state| context.run(state, now, &call, work))
        };
        let Some(slice) = slice else { return Ok(()) };
        if running.slices == 0 || !self.plan.has(Bug::AnswersBatchesEarly) {
            running.position = running.position.max(slice.position);
        }
        running.slices += 1;
        let may_vanish = call.is_about_tasks().then(|| self.faded_objects() - evicted);
        self.reporting = call.reported_disk().map(|disk| (running.message.caller.0, disk));
        let (turn, entries) = self.appended_checked(slice, may_vanish)?;
        self.reporting = None;
        if let SliceEnd::Done(reply) = &turn {
            self.check_disk_reply(running.client, &call, reply, target)?;
        }
        if let SliceEnd::Done(Reply::Viewed(viewed)) = &turn
            && self.plan.has(Bug::PanicsInViews)
        {
            assert!(viewed.gone == 0, "the planted bug looks into a segment that has left");
        }
        if matches!(call, Call::List { .. } | Call::Overview) && self.is_sweeping() {
            self.outcome.lists_in_sweep += 1;
            assert!(!self.plan.has(Bug::PanicsInLists), "the planted bug counts what has left");
        }
        running.entries = if running.entries.is_empty() {
            entries
        } else {
            running.entries.start..entries.end.max(running.entries.end)
        };
        if let SliceEnd::Done(Reply::Starts(starts)) = &turn
            && let Call::PutStart { puts, .. } = &call
        {
            let client = running.message.caller.0;
            for (start, &NewPut { key, length, terms }) in starts.iter().zip(puts) {
                if let Start::Started { version, .. } = start {
                    self.history.record_start(now, client, *version, (key, length), terms);
                }
            }
        }
        if self.random.happens(self.plan.faults.master_crash / 50) {
            self.crash_master();
            return Ok(());
        }
        match turn {
            SliceEnd::Done(reply) => self.end_call(running, reply),
            SliceEnd::Again(pending) => {
                self.postpone(running, pending);
                Ok(())
            }
        }
    }

    /// Returns the clients that a planted bug takes for alive while moves end.
    fn trusted_targets(&self) -> Vec<ClientId> {
        if !self.plan.has(Bug::DropsLastReadableCopy) || self.is_quiet {
            return Vec::new();
        }
        let Some(state) = self.host.state() else { return Vec::new() };
        let views = state.list_segments();
        views.iter().filter(|view| view.is_suspect).map(|view| view.client).collect()
    }

    /// Lets other calls run before the next slice of a call.
    fn postpone(&mut self, running: RunningCall, pending: Option<Pending>) {
        self.outcome.sliced += u64::from(running.slices == 1);
        self.outcome.waits_for_disks += u64::from(matches!(pending, Some(Pending::Disks(_))));
        let pause = match pending {
            None | Some(Pending::Yield) => Duration::from_micros(20 + self.random.below(300)),
            Some(Pending::Busy) => Duration::from_millis(1),
            // Woken by the reports of disks, or after some time.
            Some(Pending::Disks(_)) => Duration::from_micros(500 + self.random.below(20_000)),
            Some(Pending::Sync(_)) => {
                let pause = Duration::from_millis(2);
                self.after(pause, Event::SyncLog { is_periodic: false });
                pause + Duration::from_micros(10)
            }
        };
        let number = self.next_number();
        self.host.calls.insert(number, running);
        self.after(pause, Event::Slice(number));
    }

    /// Ends a call whose slices have run.
    fn end_call(&mut self, running: RunningCall, reply: Reply) -> Result<(), String> {
        let RunningCall { message, client, entries, position, .. } = running;
        let call = &message.request.call;
        self.check_request(message.caller, &reply)?;
        if call.is_removal() {
            let operation = (client, message.caller.1);
            self.executed.check_removal(&self.history, operation, entries.clone())?;
        }
        let position = if self.is_answered_early(call, &reply, &entries) { 0 } else { position };
        let answer = ReplyMessage { reply, entries, position };
        if running.is_numbered {
            let number = message.request.number.number;
            if call.is_answered_by(&answer.reply) {
                let bytes = size_of::<ReplyMessage>();
                self.host.answers.finish(client, number, answer.clone(), bytes);
            } else {
                self.host.answers.abort(client, number);
            }
        }
        self.answer(message, answer);
        if running.is_large
            && let Some(next) = self.host.queue.pop_front()
        {
            self.after(Duration::from_micros(10), Event::Call(next));
        }
        Ok(())
    }

    /// Returns whether a planted bug answers before the log has what the answer rests on.
    fn is_answered_early(&self, call: &Call, reply: &Reply, entries: &Range<usize>) -> bool {
        match (self.plan.bug, call, reply) {
            (Some(Bug::RepliesBeforeLog), ..) => true,
            (Some(Bug::AnswersRepeatedStartEarly), _, Reply::Starts(starts)) => {
                let is_repeated = |start: &Start| match start {
                    Start::Started { version, .. } => self.history.starts_of(*version) > 1,
                    _ => false,
                };
                starts.iter().any(is_repeated)
            }
            (Some(Bug::AnswersRepeatedEndEarly), Call::PutEnd { .. }, Reply::Closed(_)) => {
                entries.is_empty()
            }
            (Some(Bug::ReportsExistingEarly), _, Reply::Starts(starts)) => {
                starts.iter().any(|start| matches!(start, Start::Existed { .. }))
            }
            _ => false,
        }
    }

    /// Answers a call when the log has everything on which the answer rests.
    fn answer(&mut self, call: CallMessage, answer: ReplyMessage) {
        let is_durable =
            self.host.journal().is_none_or(|journal| journal.is_durable(answer.position));
        if is_durable {
            self.send_reply(&call, answer);
        } else {
            self.waiting.push(call, answer);
        }
    }

    /// Sends a reply over the network.
    pub(crate) fn send_reply(&mut self, call: &CallMessage, message: ReplyMessage) {
        let (caller, attempt) = (call.caller, call.attempt);
        self.accepted.accept(&message.reply);
        let is_about_session = call.request.call.is_about_session();
        if self.random.happens(self.plan.faults.cut) {
            // The caller sees the connection break.
            let delay = network::delay(&mut self.random, &self.plan.faults);
            if is_about_session {
                self.impair(caller.0, self.now + self.plan.call_timeout);
            }
            self.after(delay, Event::Reply { caller, attempt, message: None });
            return;
        }
        let delays = network::deliveries(&mut self.random, &self.plan.faults);
        if is_about_session {
            self.impair_by(caller.0, &delays);
        }
        for delay in delays {
            let message = Some(message.clone());
            self.after(delay, Event::Reply { caller, attempt, message });
        }
    }

    /// Returns whether the master still has to drop copies in segments that have left the pool.
    fn is_sweeping(&self) -> bool {
        self.host.state().is_some_and(|state| is_sweeping(&state))
    }

    /// Fires the timers of the master at their period.
    pub(crate) fn tick(&mut self) -> Result<(), String> {
        self.after(TICK, Event::Tick);
        self.advance_master()
    }

    /// Fires the timers of the master. Other calls run before the next slice of a sweep.
    pub(crate) fn advance_master(&mut self) -> Result<(), String> {
        if !self.stalled_until.has_passed(self.now) {
            return Ok(());
        }
        let (now, evicted) = (self.now, self.faded_objects());
        if let Some(since) = self.log_record.waiting_since()
            && (since + self.plan.rules.client_ttl / 2).has_passed(now)
        {
            // As in the service, the time of clients stands still while the log answers nobody.
            self.host.record_stall(since);
            return Ok(());
        }
        let trusted = self.trusted_targets();
        let Some(slice) = self.host.run(|state| {
            trusted.iter().for_each(|&client| {
                state.heartbeat(now, client);
            });
            state.advance(now);
            trusted.iter().for_each(|&client| state.suspect(now, client));
            state.take_expired()
        }) else {
            return Ok(());
        };
        let faded = self.faded_objects() - evicted;
        self.outcome.faded += faded;
        let (expired, _) = self.appended_checked(slice, Some(faded))?;
        for client in expired {
            self.outcome.expired += 1;
            self.host.answers.forget(client.id);
            self.records.forget_client(client.id);
            self.executed.forget(client.id);
        }
        if self.is_sweeping() {
            let pause = Duration::from_micros(20 + self.random.below(3000));
            self.after(pause, Event::Sweep);
        }
        Ok(())
    }

    /// Handles that the master sees a connection end: the client is suspect until it calls again.
    pub(crate) fn notice_disconnect(&mut self, process: u64, is_dead: bool) -> Result<(), String> {
        if !self.stalled_until.has_passed(self.now) {
            let stalled_until = self.stalled_until;
            self.at(stalled_until, Event::Disconnected { process, is_dead });
            return Ok(());
        }
        let (now, client) = (self.now, Process::new(process).client);
        let Some(slice) = self.host.run(|state| {
            state.suspect(now, client);
            if is_dead {
                state.record_disconnect(client);
            }
        }) else {
            return Ok(());
        };
        self.appended(slice).map(drop)
    }

    /// Returns the number of objects that were evicted or have expired since the master started.
    fn faded_objects(&self) -> u64 {
        self.host.state().map_or(0, |state| {
            let counters = state.totals().counters;
            counters.evicted_keys + counters.objects_expired
        })
    }

    /// Records a slice, and checks that the number of objects that vanished is `may_vanish`, if that
    /// number is known.
    fn appended_checked<R>(
        &mut self,
        slice: mooncake_master::Slice<R>,
        may_vanish: Option<u64>,
    ) -> Result<(R, Range<usize>), String> {
        let before = self.model.dropped;
        let appended = self.appended(slice)?;
        let released = self.released_ahead(appended.1.clone());
        let vanished = (self.model.dropped - before).saturating_sub(released);
        match may_vanish {
            // An object that has lost its segment may also expire.
            Some(may_vanish) if vanished > may_vanish => Err(format!(
                "{vanished} objects vanished but {may_vanish} were evicted or have expired"
            )),
            _ => Ok(appended),
        }
    }

    /// Returns how many of the objects that these entries of the history drop are still readable: the
    /// record of their release was written ahead of need.
    fn released_ahead(&self, entries: Range<usize>) -> u64 {
        let Some(state) = self.host.state() else { return 0 };
        let is_readable = |(key, change): &(&[u8], Change)| {
            let Change::Gone(version) = *change else { return false };
            let tenant = self.host.tenant_of(key_number(key));
            let view = state.view_object(self.now, &tenant, key);
            view.is_ok_and(|view| view.version.is_some_and(|found| found.0 == version))
        };
        self.history.changes(entries).filter(is_readable).count() as u64
    }

    pub(crate) fn tenant_of_call(&self, call: &Call) -> mooncake_base::TenantId {
        match (call, call.key()) {
            (_, Some(key)) => self.host.tenant_of(key),
            (Call::RemoveAll { tenant, .. } | Call::List { tenant }, _) => tenant_name(*tenant),
            (Call::Copy { key, .. } | Call::Move { key, .. } | Call::Verify { key, .. }, _) => {
                self.host.tenant_of(*key)
            }
            _ => {
                let written = call.written_puts().iter().map(|put| put.key);
                let key = call.started_keys().chain(written).next();
                key.map_or_else(|| tenant_name(0), |key| self.host.tenant_of(key))
            }
        }
    }

    /// Records that a fault delays the heartbeats of a process up to a moment.
    pub(crate) fn impair(&mut self, process: u64, until: Moment) {
        if let Some(found) = self.processes.get_mut(&process) {
            found.impaired_until = found.impaired_until.max(until);
        }
    }

    /// Records what the deliveries of a message about the session of a process delay.
    pub(crate) fn impair_by(&mut self, process: u64, delays: &[Duration]) {
        match delays.iter().max() {
            None => self.impair(process, self.now + self.plan.call_timeout),
            Some(&longest) if longest > Duration::from_millis(20) => {
                self.impair(process, self.now + self.plan.call_timeout.max(longest));
            }
            Some(_) => {}
        }
    }
}
