//! Answers of the master that wait until the log is written.

use crate::call::{CallMessage, ReplyMessage};

/// The answers that wait, by the log position for which they wait.
#[derive(Debug, Default)]
pub(crate) struct WaitingAnswers(Vec<(CallMessage, ReplyMessage)>);

impl WaitingAnswers {
    pub(crate) fn push(&mut self, call: CallMessage, answer: ReplyMessage) {
        self.0.push((call, answer));
    }

    /// Takes the answers that need not wait any more, in the order of their calls.
    pub(crate) fn take_durable(
        &mut self,
        is_durable: impl Fn(u64) -> bool,
    ) -> Vec<(CallMessage, ReplyMessage)> {
        self.0.extract_if(.., |(_, answer)| is_durable(answer.position)).collect()
    }

    /// Forgets all answers, because the master was killed.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
