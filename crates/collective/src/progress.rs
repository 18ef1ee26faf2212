//! How far a member of a group is, without I/O: its view, its open operation, and how a change of the
//! view ends the operation or begins it again.

use crate::message::{Commit, Member};

/// The view of a group.
#[derive(Debug, Default, Clone)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct View {
    pub(crate) attempt: u32,
    pub(crate) generation: u32,
    pub(crate) epoch: u64,
    pub(crate) active: Vec<bool>,
    pub(crate) members: Vec<Member>,
    /// Whether this process is outside of the group and has never been inside.
    pub(crate) is_isolated: bool,
}

impl View {
    pub(crate) fn is_member(&self, slot: usize) -> bool {
        self.members.iter().any(|member| member.slot == slot)
    }

    pub(crate) fn member(&self, slot: usize) -> Option<&Member> {
        self.members.iter().find(|member| member.slot == slot)
    }

    pub(crate) fn size(&self) -> usize {
        self.active.iter().rposition(|&active| active).map_or(0, |highest| highest + 1)
    }
}

/// The operation that is carried out.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Running {
    pub(crate) sequence: u64,
    has_data: bool,
    state: RunningState,
}

/// What changes of the view made of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum RunningState {
    /// It goes on, or is done again in the new view.
    Open,
    /// All members have their data: it is finished as it is.
    Finished,
    /// This member was removed during the operation, whether it has joined again or not.
    Removed,
}

/// How far one member is.
#[derive(Debug, Default, Clone)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Progress {
    pub(crate) slot: usize,
    pub(crate) view: View,
    /// The attempt of a change of the view in progress: no operation makes progress.
    pub(crate) stopped: Option<u32>,
    /// Number of the next operation.
    pub(crate) next: u64,
    pub(crate) running: Option<Running>,
}

impl Progress {
    /// Returns whether this process takes part in operations of the others.
    pub(crate) fn has_joined(&self) -> bool {
        self.view.is_member(self.slot) && !self.view.is_isolated
    }

    /// Begins an operation in the view, or begins it again, and returns its number.
    pub(crate) fn begin(&mut self, is_again: bool) -> u64 {
        let sequence = match self.running {
            Some(running) if is_again => running.sequence,
            _ => {
                self.next += 1;
                self.next - 1
            }
        };
        self.running = Some(Running { sequence, has_data: false, state: RunningState::Open });
        sequence
    }

    /// Notes that this member has the data of the operation.
    pub(crate) fn record_data(&mut self) {
        if let Some(running) = &mut self.running {
            running.has_data = true;
        }
    }

    /// Ends the operation.
    pub(crate) fn end(&mut self) {
        self.running = None;
    }

    /// Returns whether an operation that began in the attempt must wait for a new view.
    pub(crate) fn is_interrupted(&self, attempt: u32) -> bool {
        self.stopped.is_some() || self.view.attempt != attempt
    }

    /// Returns what became of the interrupted operation; `None` before the new view.
    pub(crate) fn state_after(&self, attempt: u32) -> Option<RunningState> {
        let is_over = self.view.attempt != attempt && self.stopped.is_none();
        if is_over { self.running.map(|running| running.state) } else { None }
    }

    /// Returns whether bytes belong to an operation that has ended, or that is done again.
    pub(crate) fn is_over(&self, attempt: u32, sequence: u64) -> bool {
        let running = self.running.filter(|running| running.state == RunningState::Open);
        let open = running.map_or(self.next, |running| running.sequence);
        attempt < self.view.attempt || (attempt == self.view.attempt && sequence < open)
    }

    /// Stops for a change of the view, and returns the last operation whose data this member has.
    pub(crate) fn prepare(&mut self, attempt: u32) -> i64 {
        self.stopped = Some(attempt);
        match self.running {
            Some(Running { sequence, has_data, state: RunningState::Open }) => {
                sequence.cast_signed() - i64::from(!has_data)
            }
            _ => self.next.cast_signed() - 1,
        }
    }

    /// Takes in a new view. Returns whether it concerns this process.
    pub(crate) fn commit(&mut self, commit: &Commit) -> bool {
        let is_member = commit.members.iter().any(|member| member.slot == self.slot);
        if !is_member && self.view.is_isolated {
            // An extension rank that has not joined sees only itself.
            return false;
        }
        let restarts = commit.generation != self.view.generation || !self.has_joined();
        if let Some(running) = &mut self.running {
            let is_common = running.sequence.cast_signed() <= commit.finished;
            running.state = match running.state {
                RunningState::Open if !is_member => RunningState::Removed,
                RunningState::Open if running.has_data && is_common => RunningState::Finished,
                decided => decided,
            };
        }
        if restarts {
            self.next = 0;
            if let Some(running) = &mut self.running
                && running.state == RunningState::Open
            {
                // The open operation is the first one of the new generation.
                *running = Running { sequence: 0, has_data: false, state: RunningState::Open };
                self.next = 1;
            }
        }
        self.view = View {
            attempt: commit.attempt,
            generation: commit.generation,
            epoch: commit.epoch,
            active: commit.active.clone(),
            members: commit.members.clone(),
            is_isolated: false,
        };
        self.stopped = None;
        true
    }
}
