//! The put operation: start, write each copy piece by piece, then end or revoke. The store client's
//! code decides; this file carries the decisions out.

use std::time::Duration;

use mooncake_base::{ErrorCode, Moment, ObjectKey, ReplicaId, Version};
use mooncake_store_client::protocol::{
    ClosePuts, CloseStep, Closing, OwnPuts, Refusal, StartPuts, StartStep, StartVerdict,
    UnconfirmedPut,
};

use crate::{
    actor::client::{Input, Op, Step},
    actor::repeated_call::{Progress, RepeatedCall},
    audit::history,
    call::{Call, Place, PutTerms, Reply, ReplyMessage, key_name},
    plan::Bug,
    simulator::Simulator,
};

/// The most words in a piece.
const PIECE_WORDS: u64 = 16;

/// A put in progress.
#[derive(Debug)]
pub(crate) struct Put {
    key: u64,
    length: u64,
    terms: PutTerms,
    /// When the start was sent, and its request.
    asked: Moment,
    request: u64,
    /// The value that the key has, according to the refusal of the put.
    value: Option<Version>,
    start: StartPuts,
    stage: Stage,
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
    Starting(RepeatedCall),
    Writing(Writing),
    /// Waits for the reply to the end or the revocation.
    Closing {
        version: Version,
        /// Replicas that words of the put may still reach.
        failed: Vec<ReplicaId>,
        is_end: bool,
        call: RepeatedCall,
    },
}

#[derive(Debug)]
struct Writing {
    version: Version,
    places: Vec<Place>,
    /// The next copy, and the next word in that copy.
    next: (usize, u64),
    failed: Vec<ReplicaId>,
    /// Failed replicas whose holders took nothing in time; a piece may still be on its way.
    silent: Vec<ReplicaId>,
    /// Replicas that were silent and are written again.
    late: Vec<ReplicaId>,
    /// The piece whose confirmation is awaited.
    piece: u64,
}

impl Writing {
    fn new(version: Version, places: Vec<Place>) -> Self {
        let (failed, silent, late) = (Vec::new(), Vec::new(), Vec::new());
        Self { version, places, next: (0, 0), failed, silent, late, piece: 0 }
    }

    /// Handles an input. Returns whether the put goes on with the next piece.
    fn step(&mut self, input: Input) -> bool {
        match input {
            Input::Wrote { piece, is_written } if piece == self.piece => {
                if !is_written {
                    self.leave();
                }
                true
            }
            Input::Silent { piece } if piece == self.piece => {
                self.silent.extend(self.places.get(self.next.0).map(|place| place.replica));
                self.leave();
                true
            }
            _ => false,
        }
    }

    /// Leaves the holder that is being written to.
    fn leave(&mut self) {
        self.failed.extend(self.places.get(self.next.0).map(|place| place.replica));
        self.next = (self.next.0 + 1, 0);
    }

    /// Takes the silent holders back if no other is left, as the store client does. Returns whether
    /// there are any.
    fn readmit(&mut self) -> bool {
        if self.silent.is_empty() || self.failed.len() < self.places.len() {
            return false;
        }
        let silent = std::mem::take(&mut self.silent);
        self.failed.retain(|replica| !silent.contains(replica));
        self.late.extend(silent);
        self.next = (0, 0);
        true
    }
}

impl Put {
    /// Creates a put with a random key, length and options.
    pub(crate) fn random(simulator: &mut Simulator) -> Self {
        let (keys, words) = (simulator.plan.keys, simulator.plan.object_words);
        let (key, length) = (simulator.random.below(keys), simulator.random.between(1, words));
        let terms = random_terms(simulator, key);
        Self {
            key,
            length,
            terms,
            asked: simulator.now,
            request: 0,
            value: None,
            start: StartPuts::new(terms.is_replacing, Vec::new()),
            stage: Stage::Begin,
        }
    }

    /// Returns whether the put is writing this version or may have started it.
    pub(crate) fn is_writing(&self, version: Version, request: u64) -> bool {
        match &self.stage {
            Stage::Begin | Stage::Settling { .. } => false,
            Stage::Starting(_) => self.request == request,
            Stage::Writing(writing) => writing.version == version,
            Stage::Closing { version: closing, .. } => *closing == version,
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
            Stage::Writing(writing) => {
                if writing.step(input) {
                    self.advance(simulator, caller);
                }
                true
            }
            Stage::Settling { call, .. } | Stage::Starting(call) | Stage::Closing { call, .. } => {
                match call.step(simulator, caller, input) {
                    Progress::Waiting => true,
                    Progress::Answered(message) => self.answered(simulator, caller, message)?,
                    Progress::GivenUp => self.give_up(simulator, caller)?,
                }
            }
        };
        Ok(goes_on.then_some(Op::Put(self)))
    }

    /// Handles the reply to a call. Returns whether the put goes on.
    fn answered(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        message: ReplyMessage,
    ) -> Result<bool, String> {
        match self.stage {
            Stage::Settling { .. } => self.settled(simulator, caller, true),
            Stage::Starting(_) => self.started(simulator, caller, message),
            Stage::Closing { version, is_end, .. } => {
                if let Reply::Done = message.reply {
                    simulator.history.acknowledge(simulator.now, message.entries);
                    if is_end {
                        simulator.history.acknowledge_put(simulator.now, self.key, version);
                        simulator.outcome.puts += 1;
                    }
                }
                self.release(simulator, caller);
                Ok(false)
            }
            Stage::Begin | Stage::Writing(_) => Err("a reply to no call".to_owned()),
        }
    }

    /// Begins with the unconfirmed puts of the key.
    fn begin(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        let name = key_name(self.key);
        let unconfirmed = match simulator.plan.has(Bug::EndsLatePuts) {
            true => Vec::new(),
            false => own_puts(simulator, caller)
                .map_or(&[][..], |own| own.unconfirmed_of(&name))
                .iter()
                .map(|put| (0, put.clone()))
                .collect(),
        };
        self.start = StartPuts::new(self.terms.is_replacing, unconfirmed);
        self.go_on(simulator, caller)
    }

    /// Takes the next step of the start. Returns whether the put goes on.
    fn go_on(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        self.stage = match self.start.next_step() {
            StartStep::Settle(puts) => {
                let first = puts.first().ok_or("there is nothing to settle")?;
                let call = simulator.send_settling(caller, first);
                Stage::Settling { puts, settled: Vec::new(), call }
            }
            StartStep::Send(_) => {
                (self.asked, self.request) = (simulator.now, simulator.next_number());
                if let Some(own) = own_puts(simulator, caller) {
                    own.begin_start(self.request);
                }
                let (key, length, request) = (self.key, self.length, self.request);
                let call = Call::PutStart { key, length, terms: self.terms, request };
                Stage::Starting(RepeatedCall::send(simulator, caller, call))
            }
            StartStep::Done => return Ok(false),
        };
        Ok(true)
    }

    /// Records the outcome of a settlement, and goes on with the next one or with the start.
    fn settled(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        is_settled: bool,
    ) -> Result<bool, String> {
        let Stage::Settling { puts, settled, call } = &mut self.stage else { return Ok(false) };
        if is_settled {
            simulator.confirm(caller.0, &puts[settled.len()]);
        }
        settled.push(is_settled);
        if let Some(next) = puts.get(settled.len()) {
            *call = simulator.send_settling(caller, next);
            return Ok(true);
        }
        self.start.settled(1, settled);
        self.go_on(simulator, caller)
    }

    fn started(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        message: ReplyMessage,
    ) -> Result<bool, String> {
        let own = match message.reply {
            Reply::Started { version, places } => {
                if let Some(own) = own_puts(simulator, caller) {
                    own.end_start(self.request, [version.0].into_iter().collect());
                }
                simulator.history.learn_start(version);
                self.stage = Stage::Writing(Writing::new(version, places));
                self.advance(simulator, caller);
                return Ok(true);
            }
            Reply::Existed { own, value } => {
                self.value = value;
                own
            }
            Reply::Failed(code) => {
                self.release(simulator, caller);
                simulator.handle_refusal(caller.0, code);
                return Ok(false);
            }
            _ => return Err("unexpected reply to a put".to_owned()),
        };
        self.release(simulator, caller);
        self.refused(simulator, caller, own)
    }

    /// Handles a refusal because a value or a put exists.
    fn refused(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        own: Option<(Version, u64)>,
    ) -> Result<bool, String> {
        let name = key_name(self.key);
        let is_blind = simulator.plan.has(Bug::ForgetsUnconfirmedPuts);
        let puts = own_puts(simulator, caller);
        let is_live = |&(version, request): &(Version, u64)| {
            puts.as_ref().is_some_and(|puts| puts.is_live(&name, request, version))
        };
        let orphan = own.filter(|own| !is_blind && !is_live(own)).map(|(version, _)| version);
        let refusal = Refusal { code: ErrorCode::OBJECT_ALREADY_EXISTS, orphan };
        let verdict = self.start.refused(0, || ObjectKey::new(&name[..]), &refusal);
        match verdict.map_err(|error| error.to_string())? {
            StartVerdict::Again => self.go_on(simulator, caller),
            StartVerdict::Fail => Ok(false),
            StartVerdict::Existed => match own {
                Some((version, request)) if !simulator.is_writing(caller.0, version, request) => {
                    Err(format!(
                        "a put of key {} existed only as version {version}, which its own client \
                         has given up",
                        self.key
                    ))
                }
                _ => {
                    // The client reports success: the value must not be lost.
                    if let Some(value) = self.value {
                        simulator.outcome.existed += 1;
                        simulator.history.acknowledge_put(simulator.now, self.key, value);
                    }
                    Ok(false)
                }
            },
        }
    }

    /// Handles a call that got no reply. Returns whether the put goes on.
    fn give_up(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> Result<bool, String> {
        match &self.stage {
            Stage::Settling { .. } => return self.settled(simulator, caller, false),
            Stage::Closing { version, failed, is_end, .. } => {
                let (version, failed, is_end) = (*version, failed.clone(), *is_end);
                simulator.history.record_given_up(simulator.now, caller.0, version);
                let key = ObjectKey::new(key_name(self.key)).map_err(|error| error.to_string())?;
                let failed_replicas = failed.into_iter().collect();
                let put = UnconfirmedPut { key, version, failed_replicas };
                let is_forgotten = simulator.plan.has(Bug::ForgetsUnconfirmedPuts)
                    || simulator.plan.has(Bug::EndsLatePuts) && !is_end;
                if let Some(own) = own_puts(simulator, caller)
                    && !is_forgotten
                {
                    own.add_unconfirmed(put);
                }
            }
            _ => {}
        }
        self.release(simulator, caller);
        Ok(false)
    }

    fn release(&self, simulator: &mut Simulator, caller: (u64, u64)) {
        if let Some(own) = own_puts(simulator, caller) {
            own.release_all(self.request);
        }
    }

    /// Sends the next piece, or ends or revokes the put.
    fn advance(&mut self, simulator: &mut Simulator, caller: (u64, u64)) {
        let Stage::Writing(writing) = &mut self.stage else { return };
        if writing.readmit() {
            simulator.outcome.readmissions += 1;
        }
        let has_replica = writing.failed.len() < writing.places.len();
        let window_end = self.asked + simulator.plan.rules.write_window;
        let window_end = simulator.clock_at(caller.0, window_end);
        let now = simulator.clock(caller.0);
        let mut closing = Closing::of(has_replica, window_end, now);
        if closing == Closing::TooLate && simulator.plan.has(Bug::WritesTooLate) {
            closing = Closing::End;
        }
        if simulator.random.happens(5) {
            closing = Closing::NoReplica;
        }
        let is_failed = |place: &Place| writing.failed.contains(&place.replica);
        if writing.next.1 >= self.length {
            writing.next = (writing.next.0 + 1, 0);
        }
        while writing.places.get(writing.next.0).is_some_and(is_failed) {
            writing.next.0 += 1;
        }
        let version = writing.version;
        if let (Closing::End, Some(place)) = (closing, writing.places.get(writing.next.0)) {
            let first = writing.next.1;
            let words = simulator.random.between(1, PIECE_WORDS).min(self.length - first);
            writing.next.1 += words;
            let content = (first..first + words).map(|index| history::word(version, index));
            writing.piece = simulator.write_piece(caller, *place, first, content.collect());
            return;
        }
        let failed = std::mem::take(&mut writing.failed);
        let mut late = std::mem::take(&mut writing.late);
        if simulator.plan.has(Bug::ForgetsLatePieces) {
            late.clear();
        }
        let mut close = ClosePuts::default();
        close.push(0, closing);
        let is_end = matches!(close.next_step(), CloseStep::End(_));
        // Words may still arrive at both, if the put is revoked now or given up later.
        let unsettled = failed.iter().chain(&late).copied().collect();
        let call = match is_end {
            true => {
                let checksum = self.terms.has_checksum.then(|| history::checksum(version));
                Call::PutEnd { version, failed, late, checksum, key: None }
            }
            false => Call::PutRevoke { version, failed: Vec::clone(&unsettled) },
        };
        let call = RepeatedCall::send_about(simulator, caller, call, key_name(self.key));
        self.stage = Stage::Closing { version, failed: unsettled, is_end, call };
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

/// Returns random options of a put.
fn random_terms(simulator: &mut Simulator, key: u64) -> PutTerms {
    let plan = &simulator.plan;
    let (optional, groups) = (plan.optional, plan.groups);
    let random = &mut simulator.random;
    let is_replacing = random.happens(600);
    let replicas = if random.happens(300) { 2 } else { 1 };
    let ttl = random.happens(optional).then(|| Duration::from_millis(200 + random.below(8000)));
    let (has_tag, has_checksum) = (random.happens(optional), random.happens(optional * 2));
    let is_soft_pinned = random.happens(optional / 2);
    let group = (groups > 0 && random.happens(300)).then(|| key % groups);
    let is_conditional = is_replacing && random.happens(optional);
    let current = simulator.history.current_version(key);
    let if_version = current.filter(|_| is_conditional);
    PutTerms {
        replicas,
        is_replacing,
        if_version,
        ttl,
        group,
        has_tag,
        has_checksum,
        is_soft_pinned,
    }
}

fn own_puts(simulator: &mut Simulator, caller: (u64, u64)) -> Option<&mut OwnPuts> {
    simulator.processes.get_mut(&caller.0).map(|process| &mut process.own_puts)
}
