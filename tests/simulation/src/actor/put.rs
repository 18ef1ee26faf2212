//! The put operation, of one object or of several: start, write each copy piece by piece, then end or
//! revoke. The store client's code decides; this file carries the decisions out.

mod choice;
mod writing;

use std::time::Duration;

use mooncake_base::{ErrorCode, Moment, ObjectKey, Version};
use mooncake_store_client::protocol::{
    ClosePuts, CloseStep, Closing, OwnPuts, Refusal, StartPuts, StartStep, StartVerdict,
    UnconfirmedPut,
};

use self::writing::Writing;
use crate::{
    actor::client::{Input, Op, Step},
    actor::repeated_call::{Progress, RepeatedCall},
    audit::history,
    call::{
        Call, NewPut, Reply, ReplyMessage, Start, WrittenPut, call_request, item_request, key_name,
    },
    plan::Bug,
    simulator::Simulator,
};

/// The most words in a piece.
const PIECE_WORDS: u64 = 16;

/// Puts in progress.
#[derive(Debug)]
pub(crate) struct Put {
    items: Vec<Item>,
    /// The writer pauses between two pieces.
    is_slow: bool,
    /// When the last start was sent, and its request.
    asked: Moment,
    request: u64,
    /// When new write windows were asked for last.
    renewal_asked: Moment,
    start: StartPuts,
    close: ClosePuts,
    stage: Stage,
}

/// One put of the operation.
#[derive(Debug)]
struct Item {
    new: NewPut,
    /// The value that the key has, according to the refusal of the put.
    value: Option<Version>,
    /// `None` before the start, and if the put was refused.
    writing: Option<Writing>,
}

#[derive(Debug)]
enum Stage {
    Begin,
    /// Revokes puts that stand in the way.
    Settling {
        puts: Vec<UnconfirmedPut>,
        settled: Vec<bool>,
        call: RepeatedCall,
    },
    /// Waits for the start of these items.
    Starting(Vec<usize>, RepeatedCall),
    /// Writes this item, or pauses before the next piece.
    Writing(usize),
    /// Waits for new write windows of these items, asked for at this time.
    Renewing(Vec<usize>, Moment, RepeatedCall),
    /// Waits for the reply to the end or the revocation of these items.
    Closing {
        items: Vec<usize>,
        is_end: bool,
        call: RepeatedCall,
    },
}

impl Put {
    /// Creates an operation of one or more puts with random keys, lengths and options.
    pub(crate) fn random(simulator: &mut Simulator) -> Self {
        let puts = choice::random_puts(simulator);
        let is_replacing = puts.iter().any(|new| new.terms.is_replacing);
        let item = |new| Item { new, value: None, writing: None };
        Self {
            items: puts.into_iter().map(item).collect(),
            is_slow: simulator.random.happens(simulator.plan.slow_puts),
            asked: simulator.now,
            request: 0,
            renewal_asked: simulator.now,
            start: StartPuts::new(is_replacing, Vec::new()),
            close: ClosePuts::default(),
            stage: Stage::Begin,
        }
    }

    /// Returns whether the operation is writing this version or may have started it. The request is
    /// that of the one put.
    pub(crate) fn is_writing(&self, version: Version, request: u64) -> bool {
        let is_starting =
            |items: &[usize]| items.iter().any(|&item| item_request(self.request, item) == request);
        let is_written =
            |item: &Item| item.writing.as_ref().is_some_and(|writing| writing.version == version);
        match &self.stage {
            Stage::Starting(items, _) if is_starting(items) => true,
            _ => self.items.iter().any(is_written),
        }
    }

    pub(crate) fn step(
        mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Step {
        let goes_on = match &mut self.stage {
            Stage::Begin => self.begin(simulator, caller)?,
            Stage::Writing(item) => {
                let writing = self.items[*item].writing.as_mut();
                let writing = writing.ok_or("a put is written that was not started")?;
                let is_resumed = writing.piece == 0 && matches!(input, Input::Again);
                let is_written = writing.step(&input);
                if is_written && self.is_slow {
                    self.pause(simulator, caller)
                } else if is_written || is_resumed {
                    self.advance(simulator, caller)?
                } else {
                    true
                }
            }
            Stage::Settling { call, .. }
            | Stage::Starting(_, call)
            | Stage::Renewing(_, _, call)
            | Stage::Closing { call, .. } => match call.step(simulator, caller, input) {
                Progress::Waiting => true,
                Progress::Answered(message) => self.answered(simulator, caller, message)?,
                Progress::GivenUp => self.give_up(simulator, caller)?,
            },
        };
        if !goes_on {
            self.release_all(simulator, caller);
        }
        Ok(goes_on.then_some(Op::Put(self)))
    }

    /// Handles the reply to a call. Returns whether the operation goes on.
    fn answered(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        message: ReplyMessage,
    ) -> Result<bool, String> {
        match std::mem::replace(&mut self.stage, Stage::Begin) {
            Stage::Settling { puts, settled, .. } => {
                self.settled(simulator, caller, (puts, settled), true)
            }
            Stage::Starting(items, _) => self.started(simulator, caller, &items, message.reply),
            Stage::Renewing(items, asked, _) => {
                let goes_on = simulator.plan.has(Bug::GoesOnUnrenewed);
                if let Reply::Closed(results) = message.reply {
                    simulator.outcome.window_renewals += 1;
                    for (item, result) in items.into_iter().zip(results) {
                        // Without a new window the old one ends as before.
                        match result {
                            Ok(()) => self.set_window(item, asked),
                            Err(_) if goes_on => self.set_window(item, simulator.now),
                            Err(_) => {}
                        }
                    }
                }
                self.advance(simulator, caller)
            }
            Stage::Closing { items, is_end, .. } => {
                if let Reply::Closed(results) = message.reply {
                    simulator.history.acknowledge(simulator.now, message.entries);
                    for (item, result) in items.into_iter().zip(results) {
                        if is_end && result.is_ok() {
                            let (key, version) = self.written(item)?;
                            simulator.history.acknowledge_put(simulator.now, key, version);
                            simulator.outcome.puts += 1;
                        }
                        self.close_item(simulator, caller, item);
                    }
                }
                self.close_next(simulator, caller)
            }
            Stage::Begin | Stage::Writing(_) => Err("a reply to no call".to_owned()),
        }
    }

    /// Begins with the unconfirmed puts of the keys.
    fn begin(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        let mut unconfirmed = Vec::new();
        if !simulator.plan.has(Bug::EndsLatePuts)
            && let Some(own) = own_puts(simulator, caller)
        {
            for (number, item) in self.items.iter().enumerate() {
                let puts = own.unconfirmed_of(&key_name(item.new.key));
                unconfirmed.extend(puts.iter().map(|put| (number, put.clone())));
            }
        }
        let is_replacing = self.items.iter().any(|item| item.new.terms.is_replacing);
        self.start = StartPuts::new(is_replacing, unconfirmed);
        self.go_on(simulator, caller)
    }

    /// Takes the next step of the start. Returns whether the operation goes on.
    fn go_on(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        self.stage = match self.start.next_step() {
            StartStep::Settle(puts) => {
                let first = puts.first().ok_or("there is nothing to settle")?;
                let call = simulator.send_settling(caller, first);
                Stage::Settling { puts, settled: Vec::new(), call }
            }
            StartStep::Send(items) => {
                let items = items.unwrap_or_else(|| (0..self.items.len()).collect());
                (self.asked, self.request) = (simulator.now, simulator.next_number());
                if let Some(own) = own_puts(simulator, caller) {
                    own.begin_start(self.request);
                }
                simulator.outcome.batches += u64::from(items.len() > 1);
                let puts = items.iter().map(|&item| self.items[item].new).collect();
                let call = Call::PutStart { puts, request: self.request };
                Stage::Starting(items, RepeatedCall::send(simulator, caller, call))
            }
            StartStep::Done => return self.advance(simulator, caller),
        };
        Ok(true)
    }

    /// Records the outcome of a settlement, and goes on with the next one or with the start.
    fn settled(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        (puts, mut settled): (Vec<UnconfirmedPut>, Vec<bool>),
        is_settled: bool,
    ) -> Result<bool, String> {
        if is_settled {
            simulator.confirm(caller.0, &puts[settled.len()]);
        }
        settled.push(is_settled);
        if let Some(next) = puts.get(settled.len()) {
            let call = simulator.send_settling(caller, next);
            self.stage = Stage::Settling { puts, settled, call };
            return Ok(true);
        }
        self.start.settled(self.items.len(), &settled);
        self.go_on(simulator, caller)
    }

    /// Handles the results of a start. Goes on with refused items that are started again, then with
    /// the started ones.
    fn started(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        items: &[usize],
        reply: Reply,
    ) -> Result<bool, String> {
        let starts = match reply {
            Reply::Starts(starts) => starts,
            Reply::Failed(code) => {
                simulator.handle_refusal(caller.0, code);
                Vec::new()
            }
            _ => return Err("unexpected reply to a put".to_owned()),
        };
        let version = |start: &Start| match start {
            Start::Started { version, .. } => Some(version.0),
            _ => None,
        };
        if let Some(own) = own_puts(simulator, caller) {
            own.end_start(self.request, starts.iter().filter_map(version).collect());
        }
        for (&item, start) in items.iter().zip(starts) {
            match start {
                Start::Started { version, places } => {
                    simulator.history.learn_start(version);
                    let writing = Writing::new(version, self.request, self.asked, places);
                    self.items[item].writing = Some(writing);
                }
                Start::Existed { own, value } => {
                    self.items[item].value = value;
                    self.refused(simulator, caller, item, own)?;
                }
                Start::Failed(code) => simulator.handle_refusal(caller.0, code),
            }
        }
        self.go_on(simulator, caller)
    }

    /// Handles a refusal because a value or a put exists.
    fn refused(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        item: usize,
        own: Option<(Version, u64)>,
    ) -> Result<(), String> {
        let Item { new: NewPut { key, .. }, value, .. } = self.items[item];
        let name = key_name(key);
        let is_blind = simulator.plan.has(Bug::ForgetsUnconfirmedPuts);
        let puts = own_puts(simulator, caller);
        let is_live = |&(version, request): &(Version, u64)| {
            puts.as_ref().is_some_and(|puts| puts.is_live(&name, call_request(request), version))
        };
        let orphan = own.filter(|own| !is_blind && !is_live(own)).map(|(version, _)| version);
        let refusal = Refusal { code: ErrorCode::OBJECT_ALREADY_EXISTS, orphan };
        let verdict = self.start.refused(item, || ObjectKey::new(&name[..]), &refusal);
        if verdict.map_err(|error| error.to_string())? != StartVerdict::Existed {
            return Ok(());
        }
        match own {
            Some((version, request)) if !simulator.is_writing(caller.0, version, request) => {
                Err(format!(
                    "a put of key {key} existed only as version {version}, which its own client has \
                     given up"
                ))
            }
            _ => {
                // The client reports success: the value must not be lost.
                if let Some(value) = value {
                    simulator.outcome.existed += 1;
                    simulator.history.acknowledge_put(simulator.now, key, value);
                }
                Ok(())
            }
        }
    }

    /// Handles a call that got no reply. Returns whether the operation goes on.
    fn give_up(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        match std::mem::replace(&mut self.stage, Stage::Begin) {
            Stage::Settling { puts, settled, .. } => {
                self.settled(simulator, caller, (puts, settled), false)
            }
            Stage::Starting(..) => {
                if let Some(own) = own_puts(simulator, caller) {
                    own.release_all(self.request);
                }
                self.go_on(simulator, caller)
            }
            Stage::Renewing(items, ..) => {
                if simulator.plan.has(Bug::GoesOnUnrenewed) {
                    items.into_iter().for_each(|item| self.set_window(item, simulator.now));
                }
                self.advance(simulator, caller)
            }
            Stage::Closing { items, is_end, .. } => {
                for item in items {
                    self.record_unconfirmed(simulator, caller, item, is_end)?;
                    self.close_item(simulator, caller, item);
                }
                self.close_next(simulator, caller)
            }
            Stage::Begin | Stage::Writing(_) => Err("no call was given up".to_owned()),
        }
    }

    /// Records that the master may still hold a put that the operation gives up.
    fn record_unconfirmed(
        &self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        item: usize,
        is_end: bool,
    ) -> Result<(), String> {
        let (key, version) = self.written(item)?;
        simulator.history.record_given_up(simulator.now, caller.0, version);
        let key = ObjectKey::new(key_name(key)).map_err(|error| error.to_string())?;
        let unsettled = self.items[item].writing.as_ref().map(Writing::unsettled);
        let failed_replicas = unsettled.into_iter().flatten().collect();
        let put = UnconfirmedPut { key, version, failed_replicas };
        let is_forgotten = simulator.plan.has(Bug::ForgetsUnconfirmedPuts)
            || simulator.plan.has(Bug::EndsLatePuts) && !is_end;
        if let Some(own) = own_puts(simulator, caller)
            && !is_forgotten
        {
            own.add_unconfirmed(put);
        }
        Ok(())
    }

    /// Pauses before the next piece, as a writer does whose bytes move slowly.
    fn pause(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> bool {
        if let Stage::Writing(item) = self.stage
            && let Some(writing) = &mut self.items[item].writing
        {
            writing.piece = 0;
        }
        let longest = simulator.plan.rules.write_window.as_micros() as u64 / 3;
        let longest = if simulator.is_quiet { 0 } else { longest };
        let pause = Duration::from_micros(simulator.random.below(longest.max(1)));
        simulator.input_after(pause, caller, Input::Again);
        true
    }

    /// Asks for new write windows, sends the next piece, or closes the puts. Returns whether the
    /// operation goes on.
    fn advance(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        if self.renew(simulator, caller) {
            return Ok(true);
        }
        for item in 0..self.items.len() {
            let Item { new: NewPut { length, .. }, writing: Some(writing), .. } =
                &mut self.items[item]
            else {
                continue;
            };
            if writing.closing.is_some() {
                continue;
            }
            if writing.readmit() {
                simulator.outcome.readmissions += 1;
            }
            let mut closing = closing_now(simulator, caller.0, writing);
            if simulator.random.happens(5) {
                closing = Closing::NoReplica;
            }
            let place = writing.next_place(*length);
            let (Closing::End, Some(place)) = (closing, place) else {
                (writing.closing, writing.piece) = (Some(closing), 0);
                continue;
            };
            let (version, first) = (writing.version, writing.next.1);
            let words = simulator.random.between(1, PIECE_WORDS).min(*length - first);
            writing.next.1 += words;
            let content = (first..first + words).map(|index| history::word(version, index));
            writing.piece = simulator.write_piece(caller, place, first, content.collect());
            self.stage = Stage::Writing(item);
            return Ok(true);
        }
        for (number, item) in self.items.iter().enumerate() {
            let Some(writing) = &item.writing else { continue };
            // The first puts of a batch wait for the others.
            let closing = match writing.closing {
                Some(Closing::End) | None => closing_now(simulator, caller.0, writing),
                Some(closing) => closing,
            };
            self.close.push(number, closing);
        }
        self.close_next(simulator, caller)
    }

    /// Asks for new write windows if half of one is over. Returns whether it does.
    fn renew(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> bool {
        let (now, window) = (simulator.now, simulator.plan.rules.write_window);
        // After a refusal the writer asks again a little later, as long as its window lasts.
        if !(self.renewal_asked + window / 8).has_passed(now) {
            return false;
        }
        let (mut due, mut puts) = (Vec::new(), Vec::new());
        for (number, item) in self.items.iter_mut().enumerate() {
            let Some(writing) = &mut item.writing else { continue };
            if writing.is_to_be_renewed(now, window) {
                writing.piece = 0;
                due.push(number);
                puts.push(WrittenPut::of(item.new.key, writing.version));
            }
        }
        if due.is_empty() {
            return false;
        }
        self.renewal_asked = now;
        let call = RepeatedCall::send(simulator, caller, Call::PutRenew { puts });
        self.stage = Stage::Renewing(due, now, call);
        true
    }

    fn set_window(&mut self, item: usize, began: Moment) {
        if let Some(writing) = &mut self.items[item].writing {
            writing.window_began = began;
        }
    }

    /// Takes the next step of closing the puts. Returns whether the operation goes on.
    fn close_next(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
    ) -> Result<bool, String> {
        let (items, is_end) = match self.close.next_step() {
            CloseStep::End(items) => (items, true),
            CloseStep::Revoke(items) => (items, false),
            CloseStep::Done => return Ok(false),
        };
        let mut puts = Vec::new();
        for &item in &items {
            let Item { new, writing: Some(writing), .. } = &mut self.items[item] else {
                return Err("a put is closed that was not started".to_owned());
            };
            if simulator.plan.has(Bug::ForgetsLatePieces) {
                writing.late.clear();
            }
            let checksum = new.terms.has_checksum.then(|| history::checksum(writing.version));
            puts.push(if is_end {
                writing.ended(new.key, checksum)
            } else {
                writing.revoked(new.key)
            });
        }
        let call =
            if is_end { Call::PutEnd { puts, has_keys: false } } else { Call::PutRevoke { puts } };
        let call = RepeatedCall::send(simulator, caller, call);
        self.stage = Stage::Closing { items, is_end, call };
        Ok(true)
    }

    /// Returns the key and the version of a started item.
    fn written(&self, item: usize) -> Result<(u64, Version), String> {
        let Item { new, writing, .. } = &self.items[item];
        let writing = writing.as_ref().ok_or("the put was not started")?;
        Ok((new.key, writing.version))
    }

    /// Records that an item is not written any more.
    fn close_item(&mut self, simulator: &mut Simulator, caller: (u64, u64), item: usize) {
        if let Some(writing) = self.items[item].writing.take()
            && let Some(own) = own_puts(simulator, caller)
        {
            own.release(writing.request, writing.version);
        }
    }

    fn release_all(&mut self, simulator: &mut Simulator, caller: (u64, u64)) {
        for item in 0..self.items.len() {
            self.close_item(simulator, caller, item);
        }
        if let Some(own) = own_puts(simulator, caller) {
            own.release_all(self.request);
        }
    }
}

impl Simulator {
    /// Returns whether an operation of the process is writing the version.
    fn is_writing(&self, process: u64, version: Version, request: u64) -> bool {
        let running = self.processes.get(&process).map(|process| process.running.values());
        running.into_iter().flatten().any(
            |running| matches!(&running.op, Some(Op::Put(put)) if put.is_writing(version, request)),
        )
    }
}

/// Returns how a put is closed now.
fn closing_now(simulator: &Simulator, process: u64, writing: &Writing) -> Closing {
    let window_end = writing.window_began + simulator.plan.rules.write_window;
    let window_end = simulator.clock_at(process, window_end);
    match Closing::of(writing.has_replica(), window_end, simulator.clock(process)) {
        Closing::TooLate if simulator.plan.has(Bug::WritesTooLate) => Closing::End,
        closing => closing,
    }
}

fn own_puts(simulator: &mut Simulator, caller: (u64, u64)) -> Option<&mut OwnPuts> {
    simulator.processes.get_mut(&caller.0).map(|process| &mut process.own_puts)
}
