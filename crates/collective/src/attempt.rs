//! One attempt of an operation in one view: its messages, and the wait for all members.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    slice,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use mooncake_base::Error;

use crate::{
    buffers::Buffer,
    call::{Call, differ},
    collectives::{
        ANNOUNCED, DONE, Exchange, Operation, OutgoingPart, Received, Stop, Take, Writes,
        wrong_length,
    },
    contributions::Contributions,
    inbox::{GroupState, messages::Outgoing, part::Part},
    link::{FrameSender, Link, SendProgress},
    message::Member,
    own_rank::OwnRank,
    peer_memory::{LENT_BYTES_MIN, Loan},
    progress::View,
    rank_frame::{Header, Kind, slot_number},
    staging::{STAGED_BYTES_MIN, StagedBuffer, peer_buffers::Contribution},
};

/// Bytes of lent memory that are read at once for a reduction; they fit a cache.
const CHUNK_BYTES: usize = 128 << 10;
/// How long an operation waits before it tells the others what was called here. They may wait for frames
/// that this rank does not send, because it has called something else.
const ANNOUNCED_AFTER: Duration = Duration::from_millis(100);

/// One attempt of an operation.
pub(crate) struct Attempt<'a> {
    rank: &'a OwnRank,
    contributions: &'a Contributions,
    /// Time after which a silent rank has left the view.
    silence_limit: Duration,
    pub(crate) view: View,
    slots: Vec<usize>,
    sequence: u64,
    call: Call,
}

impl<'a> Attempt<'a> {
    pub(crate) fn new(
        rank: &'a OwnRank,
        contributions: &'a Contributions,
        silence_limit: Duration,
        view: View,
        call: Call,
    ) -> Self {
        let slots = view.members.iter().map(|member| member.slot).collect();
        let running = rank.inbox.state.lock().progress.running;
        let sequence = running.map_or(0, |running| running.sequence);
        Self { rank, contributions, silence_limit, view, slots, sequence, call }
    }

    /// Carries out the operation as [`Self::run`], and tells the others what was called here if that takes
    /// long.
    pub(crate) async fn run_announced(
        &self,
        operation: &Operation,
        has_data: &mut Option<Writes>,
    ) -> Result<(), Stop> {
        let begun = Instant::now();
        let mut is_announced = false;
        let mut run = pin!(self.run(operation, has_data));
        poll_fn(|context| {
            let polled = run.as_mut().poll(context);
            if polled.is_pending() && !is_announced && begun.elapsed() >= ANNOUNCED_AFTER {
                is_announced = true;
                self.announce();
            }
            polled
        })
        .await
    }

    /// Tells the others what was called here, if they can be told at once.
    fn announce(&self) {
        for slot in self.others() {
            let link = self.view.member(slot).and_then(|member| self.rank.mesh.open_link(member));
            let Some(link) = link else { continue };
            let header = self.header(Kind::Collective, ANNOUNCED, 0);
            // If the connection has ended, its reader has reported that.
            if link.try_send(&header, &[]).ok() == Some(SendProgress::Begun) {
                self.rank.inbox.push_outgoing(Outgoing::Rest(link));
            }
        }
    }

    /// Carries out the operation, and waits until all members have their data.
    pub(crate) async fn run(
        &self,
        operation: &Operation,
        has_data: &mut Option<Writes>,
    ) -> Result<(), Stop> {
        let agreed = match operation.run(self).await {
            Ok(writes) => {
                // Peers may read from these buffers until the attempt has ended.
                *has_data = Some(writes);
                self.mark_data()?;
                self.agree().await
            }
            Err(stop) => Err(stop),
        };
        if let Err(Stop::Failed(error)) = &agreed {
            let text = error.to_string();
            for slot in self.others() {
                self.send_bytes(slot, DONE, text.as_bytes()).await?;
            }
        }
        agreed?;
        // All members have begun this operation, so that they have written the results of earlier ones.
        self.contributions.reuse_before(self.sequence);
        // A change of the view that has begun decides whether the operation is finished.
        let mut state = self.rank.inbox.state.lock();
        if self.is_interrupted(&state) {
            return Err(Stop::Interrupted);
        }
        state.progress.end();
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().copied().filter(|slot| *slot != self.rank.slot)
    }

    /// Waits until all members have their data. The first member collects this, and tells the others:
    /// 2 (n - 1) messages, where n (n - 1) would tell each member by each other.
    async fn agree(&self) -> Result<(), Stop> {
        let first = self.slots.first().copied().unwrap_or(self.rank.slot);
        let is_collected = self.slots.len() > 2;
        if is_collected && self.rank.slot != first {
            self.send_bytes(first, DONE, &[]).await?;
            return self.await_done(first).await;
        }
        if is_collected {
            self.await_others().await?;
        }
        for slot in self.others() {
            self.send_bytes(slot, DONE, &[]).await?;
        }
        if is_collected { Ok(()) } else { self.await_others().await }
    }

    async fn await_others(&self) -> Result<(), Stop> {
        for slot in self.others() {
            self.await_done(slot).await?;
        }
        Ok(())
    }

    async fn await_done(&self, slot: usize) -> Result<(), Stop> {
        match self.part(slot, DONE).await? {
            Part::Bytes(text) if !text.is_empty() => Err(failed_at(slot, &text)),
            _ => Ok(()),
        }
    }

    /// Checks that all members have called what this one has.
    fn check_calls(&self, state: &GroupState) -> Result<(), Stop> {
        match state.running_call.and_then(|running| running.other) {
            Some(other) => Err(Stop::Failed(differ((self.rank.slot, self.call), other))),
            None => Ok(()),
        }
    }

    /// Checks that no member has said that the operation failed: it sends nothing more for it.
    fn check_failures(&self, state: &GroupState) -> Result<(), Stop> {
        self.check_calls(state)?;
        for slot in self.others() {
            let key = (self.view.attempt, self.sequence, DONE, slot_number(slot));
            if let Some((Part::Bytes(text), _)) = state.parts.get(&key)
                && !text.is_empty()
            {
                return Err(failed_at(slot, text));
            }
        }
        Ok(())
    }

    fn mark_data(&self) -> Result<(), Stop> {
        let mut state = self.rank.inbox.state.lock();
        if self.is_interrupted(&state) {
            return Err(Stop::Interrupted);
        }
        state.progress.record_data();
        Ok(())
    }

    fn is_interrupted(&self, state: &GroupState) -> bool {
        state.closed.is_some() || state.progress.is_interrupted(self.view.attempt)
    }

    async fn send_bytes(&self, slot: usize, step: u32, bytes: &[u8]) -> Result<(), Stop> {
        self.send_as(Kind::Collective, slot, step, bytes).await
    }

    async fn send_as(&self, kind: Kind, slot: usize, step: u32, bytes: &[u8]) -> Result<(), Stop> {
        let member = self.view.member(slot).ok_or(Stop::Interrupted)?;
        let link = match self.rank.mesh.open_link(member) {
            Some(link) => link,
            None => self.await_link(member).await?,
        };
        let header = self.header(kind, step, bytes.len());
        let mut frame = FrameSender::new(&link, &header, bytes);
        let sent = poll_fn(|context| match frame.send_part() {
            Ok(true) => Poll::Ready(Ok(())),
            // If the connection has ended, the view will change: its reader has reported it.
            Err(_) => Poll::Ready(Err(Stop::Interrupted)),
            Ok(false) if self.is_interrupted(&self.rank.inbox.state.lock()) => {
                Poll::Ready(Err(Stop::Interrupted))
            }
            Ok(false) => {
                // Who waits for the operation looks at its time limit before the next part.
                context.waker().wake_by_ref();
                Poll::Pending
            }
        })
        .await;
        drop(frame);
        if sent.is_err() {
            // The rest of a frame that was begun.
            self.rank.inbox.push_outgoing(Outgoing::Rest(link));
        }
        sent
    }

    fn header(&self, kind: Kind, step: u32, length: usize) -> Header {
        Header {
            kind,
            group: self.rank.group_id,
            attempt: self.view.attempt,
            sequence: self.sequence,
            step,
            source: slot_number(self.rank.slot),
            length: length as u64,
            call: self.call,
        }
    }

    /// Waits for the connection to a member.
    async fn await_link(&self, member: &Member) -> Result<Arc<Link>, Stop> {
        let mesh = &self.rank.mesh;
        let find = |state: &mut GroupState| {
            if self.is_interrupted(state) || mesh.is_closing() {
                return Some(Err(Stop::Interrupted));
            }
            // It may have ended before this rank was in a view with the member.
            mesh.connect(slice::from_ref(member));
            mesh.open_link(member).map(Ok)
        };
        self.rank.inbox.find(find).await
    }

    /// Waits for what a member sent.
    async fn part(&self, slot: usize, step: u32) -> Result<Part, Stop> {
        let key = (self.view.attempt, self.sequence, step, slot_number(slot));
        let find = |state: &mut GroupState| {
            if self.is_interrupted(state) {
                return Some(Err(Stop::Interrupted));
            }
            if let Err(stop) = self.check_calls(state) {
                return Some(Err(stop));
            }
            if let Some((part, _)) = state.parts.remove(&key) {
                return Some(Ok(part));
            }
            state.awaited = Some(key);
            self.check_failures(state).err().map(Err)
        };
        self.rank.inbox.find(find).await
    }

    /// Waits for what a member sent, which has `length` bytes.
    async fn part_of(&self, slot: usize, step: u32, length: usize) -> Result<Part, Stop> {
        let part = self.part(slot, step).await?;
        let found = part.length();
        if found == length as u64 { Ok(part) } else { Err(wrong_length(slot, found, length)) }
    }

    /// Reads memory that a member lends.
    async fn read_lent(
        &self,
        slot: usize,
        process: u32,
        loan: &Loan,
        target: &mut [u8],
    ) -> Result<(), Stop> {
        if let Err(error) = loan.read(process, 0, target) {
            return Err(self.explain(slot, process, loan, &error).await);
        }
        self.check_loan(process, loan).await
    }

    /// Makes bytes ready for peers: lends them to those of this host, with a copy that they may map if
    /// `has_copy`, and copies them for those of other hosts that read memory here.
    fn offer<'b>(&self, bytes: &'b [u8], has_copy: bool) -> OutgoingPart<'b> {
        let mesh = &self.rank.mesh;
        let mut loan = (bytes.len() >= LENT_BYTES_MIN).then(|| self.contributions.lend(bytes));
        let mut others = self.view.members.iter().filter(|member| member.slot != self.rank.slot);
        let is_staged = bytes.len() >= STAGED_BYTES_MIN
            && others.any(|member| has_copy && mesh.may_lend(member) || mesh.may_fetch(member));
        let staged = is_staged
            .then(|| self.contributions.stage(self.view.attempt, self.sequence, bytes))
            .flatten();
        if let (Some(loan), Some((place, _)), true) = (&mut loan, staged, has_copy) {
            loan.copy = place;
        }
        OutgoingPart { bytes, loan, remote: staged.and_then(|(_, address)| address) }
    }

    /// Reads memory of a member on another host.
    fn fetch(&self, slot: usize, address: u64, length: usize) -> Result<StagedBuffer, Stop> {
        let mesh = &self.rank.mesh;
        let link = self.view.member(slot).and_then(|member| mesh.open_link(member));
        let segment = link.as_ref().and_then(|link| link.segment.as_deref());
        let (Some(fabric), Some(segment)) = (mesh.staging_memory().fabric(), segment) else {
            return Err(Stop::Interrupted);
        };
        let limit = self.silence_limit;
        let buffer = mesh.staging_memory().buffer(length).map_err(Stop::Failed)?;
        match fabric.read(segment, address, buffer.range(), limit) {
            Ok(()) => {
                self.rank.metrics.add_fetched(length);
                Ok(buffer)
            }
            // If its host has gone, the view changes when it was silent for long enough.
            Err(_) if self.await_interruption(limit) => Err(Stop::Interrupted),
            Err(error) => {
                let text = "the memory of a rank on another host cannot be read";
                Err(Stop::Failed(Error::invalid(text).with("rank", slot).caused_by(error)))
            }
        }
    }

    /// Waits at most `limit` for a change of the view, and returns whether there is one.
    fn await_interruption(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut state = self.rank.inbox.state.lock();
        while !self.is_interrupted(&state) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.rank.inbox.changed.wait_for(&mut state, left);
        }
        true
    }

    /// Maps the copy of lent memory, if there is one.
    fn find_staged(&self, slot: usize, process: u32, loan: &Loan) -> Option<Contribution> {
        let (copy, length) = (loan.copy?, usize::try_from(loan.length).ok()?);
        let link = self.rank.mesh.open_link(self.view.member(slot)?)?;
        let found = link.staged.find(process, copy, length);
        found.inspect_err(|error| tracing::debug!(slot, %error, "a copy is not mapped")).ok()
    }

    /// Checks that the memory was lent until now.
    async fn check_loan(&self, process: u32, loan: &Loan) -> Result<(), Stop> {
        match loan.is_current(process) {
            Ok(true) => Ok(()),
            // Its process has ended, or has left the operation: the view changes, or it says why.
            Ok(false) | Err(_) => Err(self.explain_end().await),
        }
    }

    /// Explains why lent memory cannot be read.
    async fn explain(
        &self,
        slot: usize,
        process: u32,
        loan: &Loan,
        error: &std::io::Error,
    ) -> Stop {
        if loan.is_current(process).unwrap_or(false) {
            let text = error.to_string();
            let error = Error::invalid("the memory of another rank cannot be read");
            return Stop::Failed(error.with("rank", slot).with("reason", text));
        }
        self.explain_end().await
    }

    /// Waits for the reason why a member has left the operation. Without our data it leaves only
    /// because the operation failed, by a change of the view, or because it is dead, which changes the
    /// view too.
    async fn explain_end(&self) -> Stop {
        let find = |state: &mut GroupState| {
            let is_interrupted = self.is_interrupted(state);
            is_interrupted.then_some(Stop::Interrupted).or_else(|| self.check_failures(state).err())
        };
        self.rank.inbox.find(find).await
    }
}

fn failed_at(slot: usize, text: &[u8]) -> Stop {
    let error = Error::invalid("the operation failed at another rank");
    let text = String::from_utf8_lossy(text).into_owned();
    Stop::FailedElsewhere(error.with("rank", slot).with("error", text))
}

impl Exchange for Attempt<'_> {
    fn slots(&self) -> &[usize] {
        &self.slots
    }

    fn own(&self) -> usize {
        self.rank.slot
    }

    fn buffer(&self, length: usize) -> Buffer {
        self.rank.mesh.buffers().take(length)
    }

    fn lend<'b>(&self, bytes: &'b [u8]) -> OutgoingPart<'b> {
        self.offer(bytes, false)
    }

    fn stage<'b>(&self, bytes: &'b [u8]) -> OutgoingPart<'b> {
        self.offer(bytes, true)
    }

    async fn send(&self, slot: usize, step: u32, outgoing: OutgoingPart<'_>) -> Result<(), Stop> {
        let member = self.view.member(slot).ok_or(Stop::Interrupted)?;
        let mesh = &self.rank.mesh;
        if let Some(loan) = outgoing.loan
            && mesh.may_lend(member)
        {
            self.send_as(Kind::CollectiveLoan, slot, step, &loan.encode()).await?;
        } else if let Some(address) = outgoing.remote
            && mesh.may_fetch(member)
        {
            let words = [address, outgoing.bytes.len() as u64].map(u64::to_le_bytes);
            self.send_as(Kind::CollectiveFetch, slot, step, words.as_flattened()).await?;
        } else {
            self.send_bytes(slot, step, outgoing.bytes).await?;
        }
        self.rank.metrics.add_sent(outgoing.bytes.len());
        Ok(())
    }

    async fn receive(&self, slot: usize, step: u32, length: usize) -> Result<Received, Stop> {
        match self.part_of(slot, step, length).await? {
            Part::Offered(_) => Err(Stop::Interrupted),
            Part::Bytes(bytes) => Ok(Received::Buffer(bytes.into())),
            Part::Lent { process, loan } => {
                if let Some(contribution) = self.find_staged(slot, process, &loan) {
                    return Ok(Received::Mapped(contribution));
                }
                let mut bytes = self.buffer(length);
                self.read_lent(slot, process, &loan, &mut bytes).await?;
                Ok(Received::Buffer(bytes))
            }
            Part::Remote { address, .. } => {
                Ok(Received::Fetched(self.fetch(slot, address, length)?))
            }
        }
    }

    async fn receive_into(&self, slot: usize, step: u32, target: &mut [u8]) -> Result<(), Stop> {
        match self.part_of(slot, step, target.len()).await? {
            Part::Offered(_) => Err(Stop::Interrupted),
            Part::Bytes(bytes) => {
                target.copy_from_slice(&bytes);
                Ok(())
            }
            Part::Lent { process, loan } => self.read_lent(slot, process, &loan, target).await,
            Part::Remote { address, .. } => {
                let fetched = self.fetch(slot, address, target.len())?;
                fetched.end(|bytes| target.copy_from_slice(bytes));
                Ok(())
            }
        }
    }

    async fn receive_with(
        &self,
        slot: usize,
        step: u32,
        length: usize,
        take: Take<'_>,
    ) -> Result<(), Stop> {
        match self.part_of(slot, step, length).await? {
            Part::Offered(_) => Err(Stop::Interrupted),
            Part::Bytes(bytes) => take(0, &bytes),
            Part::Remote { address, .. } => {
                self.fetch(slot, address, length)?.end(|bytes| take(0, bytes))
            }
            Part::Lent { process, loan } => {
                let mut chunk = self.buffer(CHUNK_BYTES);
                for at in (0..length).step_by(CHUNK_BYTES) {
                    let bytes = &mut chunk[..CHUNK_BYTES.min(length - at)];
                    if let Err(error) = loan.read(process, at, bytes) {
                        return Err(self.explain(slot, process, &loan, &error).await);
                    }
                    take(at, bytes)?;
                }
                self.check_loan(process, &loan).await
            }
        }
    }
}
