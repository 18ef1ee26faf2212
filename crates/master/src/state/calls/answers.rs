//! Answers to numbered calls: a repeated call gets the answer to its first execution.
//!
//! The answers of a client are kept until the client no longer waits for them, or until the client
//! leaves, within limits for each client and for all clients. Beyond a limit the oldest answers are
//! dropped first; a repetition of a call whose answer was dropped is executed again. The number below
//! which a client gave its calls up is kept without any call, too, so that a late duplicate of such a
//! call is not executed.

use std::collections::{BTreeMap, VecDeque};

use mooncake_base::ClientId;
use rustc_hash::FxHashMap;

use crate::state::ledger::effect::{reader::Reader, writer::Writer};

/// Limits on the answers that are kept.
#[derive(Debug, Clone, Copy)]
struct Limits {
    answers_per_client: usize,
    bytes_per_client: usize,
    answers: usize,
    bytes: usize,
    idle_clients: usize,
}

/// A client waits for a few calls per thread. One answer has at most 16 MiB, the limit of a message.
const LIMITS: Limits = Limits {
    answers_per_client: 4096,
    bytes_per_client: 32 << 20,
    answers: 1 << 20,
    bytes: 256 << 20,
    idle_clients: 1 << 16,
};

/// Forgotten answers that the order of all answers may contain besides the kept ones.
const STALE_MAX: usize = 1024;

/// One item of a numbered call: it creates one task or drain job, whichever master executes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallItem {
    /// Client that numbers its calls.
    pub client: ClientId,
    /// Number of the item, unique among the items of all calls of the client.
    pub number: u64,
}

impl CallItem {
    /// Encodes an item at the end of a record.
    pub(in crate::state) fn write(item: Option<Self>, out: &mut Writer<'_>) {
        if let Some(item) = item {
            out.id(item.client.bits()).int(item.number);
        }
    }

    /// Decodes an item at the end of a record. The records of earlier masters end before it.
    pub(in crate::state) fn read(input: &mut Reader<'_>) -> Option<Option<Self>> {
        if input.is_at_end() {
            return Some(None);
        }
        let client = ClientId::from_bits(input.id()?);
        Some(Some(Self { client, number: input.int()? }))
    }
}

/// What to do with a numbered call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begun<R> {
    /// Execute it, then call [`Answers::finish`] or [`Answers::abort`].
    Execute,
    /// Give the answer to its first execution.
    Repeated(R),
    /// Wait: the first execution has not ended.
    Running,
    /// Refuse it: the client no longer waits for it. This is a late duplicate.
    GivenUp,
}

/// The answers to the numbered calls of all clients.
#[derive(Debug)]
pub struct Answers<R> {
    limits: Limits,
    clients: FxHashMap<ClientId, ClientAnswers<R>>,
    /// Calls in the order of their answers. Some answers were forgotten since.
    order: VecDeque<(ClientId, u64)>,
    /// Clients without calls that gave calls up, in the order in which they lost their last call.
    idle: BTreeMap<u64, ClientId>,
    next_idle: u64,
    answers: usize,
    bytes: usize,
}

/// The calls of one client that run or whose answers are kept.
#[derive(Debug)]
struct ClientAnswers<R> {
    /// Calls with smaller numbers were given up.
    answered_below: u64,
    calls: BTreeMap<u64, Call<R>>,
    answers: usize,
    bytes: usize,
    /// Position among the idle clients.
    idle_since: Option<u64>,
}

#[derive(Debug)]
enum Call<R> {
    Running,
    Answered { answer: R, bytes: usize },
}

impl<R> Default for Answers<R> {
    fn default() -> Self {
        Self::with(LIMITS)
    }
}

impl<R> Answers<R> {
    fn with(limits: Limits) -> Self {
        Self {
            limits,
            clients: FxHashMap::default(),
            order: VecDeque::new(),
            idle: BTreeMap::new(),
            next_idle: 0,
            answers: 0,
            bytes: 0,
        }
    }

    /// Begins a call. The client waits for no call with a number below `answered_below`.
    pub fn begin(&mut self, client: ClientId, number: u64, answered_below: u64) -> Begun<R>
    where
        R: Clone,
    {
        let known = self.clients.entry(client).or_default();
        if answered_below > known.answered_below {
            known.answered_below = answered_below;
            known.calls.retain(|&number, call| match call {
                Call::Answered { bytes, .. } if number < answered_below => {
                    known.answers -= 1;
                    known.bytes -= *bytes;
                    self.answers -= 1;
                    self.bytes -= *bytes;
                    false
                }
                // A running call was given up before its first execution ended.
                Call::Answered { .. } | Call::Running => true,
            });
        }
        let begun = match known.calls.get(&number) {
            Some(Call::Answered { answer, .. }) => Begun::Repeated(answer.clone()),
            Some(Call::Running) => Begun::Running,
            None if number < known.answered_below => Begun::GivenUp,
            None => {
                known.calls.insert(number, Call::Running);
                Begun::Execute
            }
        };
        self.update_idle(client);
        self.trim_order();
        begun
    }

    /// Keeps the answer of a call that began. It takes `bytes` bytes.
    pub fn finish(&mut self, client: ClientId, number: u64, answer: R, bytes: usize) {
        // A client that left meanwhile has no calls.
        let Some(known) = self.clients.get_mut(&client) else { return };
        let Some(call @ Call::Running) = known.calls.get_mut(&number) else { return };
        *call = Call::Answered { answer, bytes };
        known.answers += 1;
        known.bytes += bytes;
        self.answers += 1;
        self.bytes += bytes;
        self.order.push_back((client, number));
        while self.is_over_for(client) && self.drop_oldest_of(client) {}
        while self.answers > self.limits.answers || self.bytes > self.limits.bytes {
            let Some((client, number)) = self.order.pop_front() else { break };
            self.drop_answer(client, number);
        }
    }

    /// Forgets a call that began and has no answer worth keeping: it changed nothing.
    pub fn abort(&mut self, client: ClientId, number: u64) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        if matches!(known.calls.get(&number), Some(Call::Running)) {
            known.calls.remove(&number);
        }
        self.update_idle(client);
    }

    /// Returns whether the first execution of a call has not ended.
    pub fn is_running(&self, client: ClientId, number: u64) -> bool {
        let known = self.clients.get(&client);
        known.is_some_and(|known| matches!(known.calls.get(&number), Some(Call::Running)))
    }

    /// Forgets the calls of a client that left or expired.
    pub fn forget(&mut self, client: ClientId) {
        if let Some(known) = self.clients.remove(&client) {
            self.answers -= known.answers;
            self.bytes -= known.bytes;
            known.idle_since.map(|since| self.idle.remove(&since));
        }
        self.trim_order();
    }

    /// Returns the number of kept answers and the bytes that they take.
    pub fn kept(&self) -> (usize, usize) {
        (self.answers, self.bytes)
    }

    fn is_over_for(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|known| {
            known.answers > self.limits.answers_per_client
                || known.bytes > self.limits.bytes_per_client
        })
    }

    fn drop_oldest_of(&mut self, client: ClientId) -> bool {
        let answered = self.clients.get(&client).and_then(|known| {
            let mut calls = known.calls.iter();
            calls.find(|(_, call)| matches!(call, Call::Answered { .. })).map(|(number, _)| *number)
        });
        answered.inspect(|&number| self.drop_answer(client, number)).is_some()
    }

    fn drop_answer(&mut self, client: ClientId, number: u64) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        let Some(&Call::Answered { bytes, .. }) = known.calls.get(&number) else { return };
        known.calls.remove(&number);
        known.answers -= 1;
        known.bytes -= bytes;
        self.answers -= 1;
        self.bytes -= bytes;
        self.update_idle(client);
    }

    /// Updates whether a client is idle: it has no calls, but gave calls up. Removes the client if
    /// there is nothing to remember, and the longest idle client if too many are idle.
    fn update_idle(&mut self, client: ClientId) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        if !known.calls.is_empty() {
            known.idle_since.take().map(|since| self.idle.remove(&since));
        } else if known.answered_below == 0 {
            self.clients.remove(&client);
        } else if known.idle_since.is_none() {
            known.idle_since = Some(self.next_idle);
            self.idle.insert(self.next_idle, client);
            self.next_idle += 1;
        }
        if self.idle.len() > self.limits.idle_clients
            && let Some((_, longest)) = self.idle.pop_first()
        {
            self.clients.remove(&longest);
        }
    }

    /// Removes forgotten answers from the order: those at its front, and all if there are many.
    fn trim_order(&mut self) {
        while self.order.front().is_some_and(|&(client, number)| !self.keeps(client, number)) {
            self.order.pop_front();
        }
        if self.order.len() > 2 * self.answers + STALE_MAX {
            let mut order = std::mem::take(&mut self.order);
            order.retain(|&(client, number)| self.keeps(client, number));
            self.order = order;
        }
    }

    fn keeps(&self, client: ClientId, number: u64) -> bool {
        let known = self.clients.get(&client);
        known.is_some_and(|known| matches!(known.calls.get(&number), Some(Call::Answered { .. })))
    }
}

impl<R> Default for ClientAnswers<R> {
    fn default() -> Self {
        let calls = BTreeMap::new();
        Self { answered_below: 0, calls, answers: 0, bytes: 0, idle_since: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId::from_bits(1);
    const B: ClientId = ClientId::from_bits(2);

    fn answer(answers: &mut Answers<u64>, client: ClientId, number: u64) {
        assert_eq!(answers.begin(client, number, 0), Begun::Execute, "{number}");
        answers.finish(client, number, number * 10, 8);
    }

    fn limited(answers_per_client: usize, answers: usize) -> Answers<u64> {
        Answers::with(Limits { answers_per_client, answers, ..LIMITS })
    }

    #[test]
    fn repetition_gets_answer_of_first_execution() {
        let mut answers = Answers::default();
        assert_eq!(answers.begin(A, 1, 0), Begun::Execute);
        assert_eq!(answers.begin(A, 1, 0), Begun::Running);
        assert!(answers.is_running(A, 1));
        answers.finish(A, 1, 7, 8);
        assert_eq!(answers.begin(A, 1, 1), Begun::Repeated(7));
        assert!(!answers.is_running(A, 1));
        assert_eq!(answers.begin(B, 1, 0), Begun::Execute, "another client has other numbers");
        answers.abort(B, 1);
        assert_eq!(answers.begin(B, 1, 0), Begun::Execute, "an aborted call is executed again");
    }

    #[test]
    fn given_up_call_is_forgotten_and_not_executed() {
        let mut answers = Answers::default();
        answer(&mut answers, A, 1);
        answer(&mut answers, A, 3);
        assert_eq!(answers.begin(A, 2, 0), Begun::Execute, "numbers may arrive in any order");
        assert_eq!(answers.begin(A, 4, 3), Begun::Execute);
        assert_eq!(answers.kept(), (1, 8));
        assert_eq!(answers.begin(A, 1, 0), Begun::GivenUp);
        assert_eq!(answers.begin(A, 2, 0), Begun::Running, "its first execution has not ended");
        answers.finish(A, 2, 20, 8);
        assert_eq!(answers.begin(A, 3, 3), Begun::Repeated(30));
    }

    #[test]
    fn given_up_call_stays_refused_without_other_calls() {
        let mut answers = Answers::default();
        answer(&mut answers, A, 1);
        assert_eq!(answers.begin(A, 2, 2), Begun::Execute);
        answers.abort(A, 2);
        assert_eq!(answers.begin(A, 1, 0), Begun::GivenUp, "its answer was forgotten");
        assert_eq!(answers.begin(A, 3, 0), Begun::Execute);
        answers.finish(A, 3, 30, LIMITS.bytes + 1);
        assert_eq!(answers.kept(), (0, 0));
        assert_eq!(answers.begin(A, 1, 0), Begun::GivenUp, "no answer is kept");
        answers.forget(A);
        assert_eq!(answers.begin(A, 1, 0), Begun::Execute, "another client has that id");
    }

    #[test]
    fn longest_idle_client_is_forgotten_beyond_the_limit() {
        let mut answers: Answers<u64> = Answers::with(Limits { idle_clients: 2, ..LIMITS });
        let clients = [1, 2, 3].map(ClientId::from_bits);
        for client in clients {
            assert_eq!(answers.begin(client, 5, 5), Begun::Execute);
            answers.abort(client, 5);
        }
        assert_eq!(answers.begin(clients[1], 4, 0), Begun::GivenUp);
        assert_eq!(answers.begin(clients[0], 4, 0), Begun::Execute, "forgotten");
        assert_eq!((answers.clients.len(), answers.idle.len()), (3, 2));
        assert_eq!(answers.begin(clients[2], 5, 0), Begun::Execute, "no longer idle");
        assert_eq!(answers.idle.len(), 1);
    }

    #[test]
    fn limits_drop_oldest_answers_first() {
        let mut answers = limited(2, 3);
        for number in 1..=3 {
            answer(&mut answers, A, number);
        }
        assert_eq!(answers.begin(A, 3, 0), Begun::Repeated(30));
        assert_eq!(answers.kept(), (2, 16), "two for each client");
        answer(&mut answers, B, 1);
        answer(&mut answers, B, 2);
        assert_eq!(answers.kept(), (3, 24), "three in all");
        assert_eq!(answers.begin(A, 3, 0), Begun::Repeated(30));
        assert_eq!(answers.begin(A, 2, 0), Begun::Execute, "the oldest of all");
        let mut answers = Answers::with(Limits { bytes: 20, ..LIMITS });
        (1..=3).for_each(|number| answer(&mut answers, A, number));
        assert_eq!(answers.kept(), (2, 16), "by bytes");
        answers.begin(A, 9, 0);
        answers.finish(A, 9, 9, 21);
        assert_eq!(answers.kept(), (0, 0), "an answer above the limit is not kept");
    }

    #[test]
    fn client_that_left_is_forgotten() {
        let mut answers = Answers::default();
        answer(&mut answers, A, 1);
        assert_eq!(answers.begin(A, 2, 0), Begun::Execute);
        answers.forget(A);
        answers.finish(A, 2, 20, 8);
        assert_eq!(answers.kept(), (0, 0));
        assert!(answers.clients.is_empty() && answers.order.is_empty() && answers.idle.is_empty());
    }

    #[test]
    fn order_stays_as_short_as_the_kept_answers() {
        let mut answers = Answers::default();
        answer(&mut answers, B, 1);
        for number in 1..10_000 {
            assert_eq!(answers.begin(A, number, number), Begun::Execute);
            answers.finish(A, number, number, 8);
        }
        assert_eq!(answers.kept(), (2, 16));
        assert!(answers.order.len() <= 2 * 2 + STALE_MAX + 1, "{}", answers.order.len());
    }
}
