//! Sends and receives the messages of a group: the calls. Threads write messages, and read those whose
//! memory is lent.

mod writing;

use std::{sync::Arc, time::Duration};

use mooncake_base::{Error, Result};
use mooncake_os::threads::Threads;

use crate::{
    completion::{Completion, Driver},
    frame_wait::FrameWait,
    inbox::{
        GroupState, announce,
        messages::{Outgoing, Receive, Sent, Target},
    },
    link::SendProgress,
    memory::HostRange,
    metrics::Recording,
    operation_kind::OperationKind,
    outcome::Outcome,
    own_rank::OwnRank,
    rank_frame::Kind,
};

/// Most sends, and most receives, that wait for their counterpart.
const MESSAGES_MAX: usize = 1 << 16;
/// Most memory of a receiver that messages of one sender take in a group before a receive asks for
/// them. Later ones are lent, or only announced: their bytes stay at the sender.
const BUFFERED_BYTES_MAX: usize = 8 << 20;
/// What an entry of a message takes beside its bytes.
const ENTRY_BYTES: usize = 256;
/// Messages up to this size are written by the thread that sends them, if they need not wait.
const DIRECT_BYTES_MAX: usize = 4 << 10;
/// How long a thread that writes a message may take to see that it was withdrawn: far above what it takes.
const WITHDRAWN_LIMIT: Duration = Duration::from_secs(1);

/// Sends and receives the messages of a group.
#[derive(Debug)]
pub(crate) struct Messenger {
    rank: Arc<OwnRank>,
    frames: Arc<FrameWait>,
    /// One, and one more for each peer that takes no bytes.
    threads: Threads,
}

impl Messenger {
    pub(crate) fn new(rank: Arc<OwnRank>, frames: Arc<FrameWait>) -> Arc<Self> {
        Arc::new(Self { rank, frames, threads: Threads::unbounded() })
    }

    /// Sends a message; done when the receiver has taken it.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub(crate) fn send(&self, range: HostRange, to: usize, tag: u32) -> Result<Completion> {
        self.rank.check_member()?;
        let completion = self.completion_of(OperationKind::Send, range);
        let mut state = self.rank.inbox.state.lock();
        if to == self.rank.slot || state.progress.view.is_isolated {
            return Err(
                Error::invalid("a message needs another rank of the group").with("rank", to)
            );
        }
        if !state.progress.view.is_member(to) {
            completion.complete(Outcome { failed_slots: vec![to], ..Outcome::default() });
            return Ok(completion);
        }
        check_count(state.messages.sent.len())?;
        state.messages.next_id += 1;
        let id = state.messages.next_id;
        let loan_token = Box::default();
        let sent = Sent { to, completion: completion.clone(), range, buffered: 0, loan_token };
        state.messages.sent.insert(id, sent);
        let messages = &mut state.messages;
        let is_direct = range.length() <= DIRECT_BYTES_MAX
            && messages.outgoing.is_empty()
            && messages.begin_writing(Target::Slot(to), None);
        if !is_direct {
            messages.outgoing.push_back(Outgoing::Message { to, tag, id, range });
            drop(state);
            self.rank.inbox.outgoing.notify_all();
            return Ok(completion);
        }
        drop(state);
        self.send_small(to, tag, id, range);
        Ok(completion)
    }

    /// Receives a message of a slot, or of any.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub(crate) fn receive(
        &self,
        range: HostRange,
        from: Option<usize>,
        tag: u32,
    ) -> Result<Completion> {
        self.rank.check_member()?;
        let completion = self.completion_of(OperationKind::Receive, range);
        let mut ended = Vec::new();
        let mut state = self.rank.inbox.state.lock();
        if from == Some(self.rank.slot) || state.progress.view.is_isolated {
            return Err(Error::invalid("a message needs another rank of the group"));
        }
        if let Some(from) = from
            && !state.progress.view.is_member(from)
        {
            completion.complete(Outcome { failed_slots: vec![from], ..Outcome::default() });
            return Ok(completion);
        }
        check_count(state.messages.receives.len() + state.messages.requested.len())?;
        state.messages.next_id += 1;
        let (number, source) = (state.messages.next_id, from);
        let receive = Receive { number, source, tag, range, completion: completion.clone() };
        let taken = state.messages.add_receive(receive, &mut ended);
        let taken = taken.map(|(to, id)| {
            let member = state.progress.view.member(to);
            (to, id, member.and_then(|member| self.rank.mesh.open_link(member)))
        });
        let has_outgoing = !state.messages.outgoing.is_empty();
        drop(state);
        if let Some((to, id, link)) = taken {
            let answer = self.rank.message_header(Kind::Taken, id, 0, 0);
            self.rank.inbox.acknowledge(to, &answer, link.as_ref());
        }
        if has_outgoing {
            self.rank.inbox.outgoing.notify_all();
        }
        announce(ended);
        Ok(completion)
    }

    /// Gives up a receive unless bytes are written into its memory, and returns whether it was given up: its
    /// memory is free then, and its message is left to another receive.
    pub(crate) fn cancel_receive(&self, completion: &Completion) -> bool {
        let cancelled = self.rank.inbox.state.lock().messages.cancel_receive(completion);
        let is_cancelled = cancelled.is_some();
        if let Some(receive) = cancelled {
            let error = Some(Error::invalid("the receive was cancelled"));
            receive.completion.complete(Outcome { error, ..Outcome::default() });
        }
        is_cancelled
    }

    /// Withdraws a message unless its receiver has taken it, and returns whether it was withdrawn: its memory
    /// is free then. A receiver that takes it at this moment may have got it nevertheless.
    pub(crate) fn cancel_send(&self, completion: &Completion) -> bool {
        let mut ended = Vec::new();
        let mut state = self.rank.inbox.state.lock();
        let withdrawn = state.messages.cancel_send(completion, &mut ended);
        let Some((to, id, is_known)) = withdrawn else { return false };
        let is_direct = is_known && state.messages.begin_writing_now(Target::Slot(to));
        drop(state);
        if is_direct {
            // Before anything that this rank sends next.
            self.try_withdraw(to, id);
        } else if is_known {
            self.rank.inbox.push_outgoing(Outgoing::Withdrawn { to, id });
        }
        announce(ended);
        completion.wait(WITHDRAWN_LIMIT)
    }

    /// Tells a receiver that a message was withdrawn: at once, or by the thread for messages if that would
    /// block.
    fn try_withdraw(&self, to: usize, id: u64) {
        let state = self.rank.inbox.state.lock();
        let member = state.progress.view.member(to);
        let link = member.and_then(|member| self.rank.mesh.open_link(member));
        drop(state);
        let header = self.rank.message_header(Kind::Withdrawn, id, 0, 0);
        let later = match link.map(|link| (link.try_send(&header, &[]), link)) {
            Some((Ok(SendProgress::Whole), _)) => None,
            Some((Ok(SendProgress::Begun), link)) => Some(Outgoing::Rest(link)),
            Some((Ok(SendProgress::Nothing) | Err(_), _)) | None => {
                Some(Outgoing::Withdrawn { to, id })
            }
        };
        let messages = &mut self.rank.inbox.state.lock().messages;
        messages.end_writing(Target::Slot(to), &mut Vec::new());
        messages.outgoing.extend(later);
        self.rank.inbox.outgoing.notify_all();
    }

    /// Returns a completion that counts a message when it ends.
    fn completion_of(&self, kind: OperationKind, range: HostRange) -> Completion {
        let recording = Recording::begin(&self.rank.metrics, kind, range.length());
        let frames: Arc<dyn Driver> = Arc::<FrameWait>::clone(&self.frames);
        Completion::driven_by(Arc::downgrade(&frames), Some(recording))
    }

    /// Sends a small message at once, without the thread for messages, if nothing else must be sent
    /// before it and the socket has room. Otherwise the thread for messages sends it.
    fn send_small(&self, to: usize, tag: u32, id: u64, range: HostRange) {
        let is_sent = self.try_send_small(to, tag, id, range);
        let messages = &mut self.rank.inbox.state.lock().messages;
        messages.end_writing(Target::Slot(to), &mut Vec::new());
        // If the view has changed meanwhile, the message has ended.
        if let (false, Some(sent)) = (is_sent, messages.sent.get_mut(&id)) {
            if let Some(taken) = messages.buffered.get_mut(&to) {
                *taken -= std::mem::take(&mut sent.buffered);
            }
            messages.outgoing.push_front(Outgoing::Message { to, tag, id, range });
        }
        if !messages.outgoing.is_empty() {
            self.rank.inbox.outgoing.notify_all();
        }
    }

    /// Returns whether the message was sent, or begun.
    fn try_send_small(&self, to: usize, tag: u32, id: u64, range: HostRange) -> bool {
        let bytes = range.length() + ENTRY_BYTES;
        let mut state = self.rank.inbox.state.lock();
        let GroupState { progress, messages, .. } = &mut *state;
        let link = progress.view.member(to).and_then(|member| self.rank.mesh.open_link(member));
        let (Some(link), Some(sent)) = (link, messages.sent.get_mut(&id)) else { return false };
        let taken = messages.buffered.entry(to).or_default();
        if *taken + bytes > BUFFERED_BYTES_MAX {
            return false;
        }
        *taken += bytes;
        sent.buffered = bytes;
        drop(state);
        let header = self.rank.message_header(Kind::Message, id, tag, range.length());
        let progress = link.try_send(&header, range.bytes()).unwrap_or(SendProgress::Nothing);
        if progress == SendProgress::Begun {
            self.rank.inbox.state.lock().messages.outgoing.push_front(Outgoing::Rest(link));
        }
        if progress != SendProgress::Nothing {
            self.rank.metrics.add_sent(range.length());
        }
        progress != SendProgress::Nothing
    }
}

fn check_count(messages: usize) -> Result<()> {
    if messages < MESSAGES_MAX {
        return Ok(());
    }
    let error = Error::invalid("too many messages wait: wait for some of them");
    Err(error.with("messages_max", MESSAGES_MAX))
}
