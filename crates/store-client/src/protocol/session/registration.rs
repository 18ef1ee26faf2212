//! A registration of a client with its master, step by step.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, Result};

use super::{MasterIdentity, Session};

/// The answer to a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// The master that answered.
    pub identity: MasterIdentity,
    /// The number of the registration.
    pub registration: u64,
    /// The interval between heartbeats that the master wants.
    pub heartbeat_interval: Duration,
    /// Whether all tenants share one namespace of keys.
    pub ignores_tenants: bool,
}

/// The next step of a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegistrationStep {
    /// Register. Report with [`Registration::registered`].
    Register,
    /// Unregister, and fail: the master ignores tenants.
    RefuseIgnoredTenant,
    /// Announce all segments as resumed. Report with [`Registration::announced`].
    Resume,
    /// Replace these segments by fresh memory under new ids. Report with
    /// [`Registration::replaced`].
    Replace(LostSegments),
    /// Announce the complete list of segments. Report with [`Registration::announced`].
    AnnounceAll,
    /// The client is registered. Report with [`Session::complete`](super::Session::complete).
    Done,
}

/// Segments that a master does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LostSegments {
    /// All of the client.
    All,
    /// Some of those that were announced last, by their indexes.
    Some(Vec<usize>),
}

/// A registration in progress. It fails if one of its calls fails; the next one starts from the
/// beginning.
#[derive(Debug)]
pub struct Registration {
    /// The master of the last registration.
    last: MasterIdentity,
    is_first: bool,
    /// Whether a master that ignores tenants is refused.
    refuses_ignored_tenant: bool,
    pub(super) answer: Option<Registered>,
    step: RegistrationStep,
}

impl Registration {
    /// Begins a registration.
    pub fn new(session: &Session, refuses_ignored_tenant: bool) -> Self {
        Self {
            last: session.identity.clone(),
            is_first: session.registrations == 0,
            refuses_ignored_tenant,
            answer: None,
            step: RegistrationStep::Register,
        }
    }

    /// Returns the next step.
    pub fn next_step(&self) -> RegistrationStep {
        self.step.clone()
    }

    /// Returns whether the client has not been registered before.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// Returns whether the client registers for the first time, with a master that ignores tenants.
    pub fn is_first_without_tenants(&self) -> bool {
        self.is_first && self.answer.as_ref().is_some_and(|answer| answer.ignores_tenants)
    }

    /// Reports the answer to the registration. The client has this number of segments.
    pub fn registered(&mut self, answer: Registered, segments: usize) {
        // A master that does not know a segment knows neither the objects in it nor the readers and
        // writers that its predecessor admitted there.
        let continues_history =
            !answer.identity.timeline.is_empty() && answer.identity.timeline == self.last.timeline;
        let knows_segments = continues_history || answer.identity.master == self.last.master;
        self.step = match (segments, knows_segments) {
            _ if answer.ignores_tenants && self.refuses_ignored_tenant => {
                RegistrationStep::RefuseIgnoredTenant
            }
            (0, _) => self.step_after_resume(0),
            (_, true) => RegistrationStep::Resume,
            (_, false) => RegistrationStep::Replace(LostSegments::All),
        };
        self.answer = Some(answer);
    }

    /// Reports the master's result for each segment of an announcement.
    ///
    /// # Errors
    /// The master refuses a segment. The registration has failed.
    pub fn announced(&mut self, results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
        if self.step == RegistrationStep::AnnounceAll {
            check_all_known(results)?;
            self.step = RegistrationStep::Done;
            return Ok(());
        }
        let mut lost = Vec::new();
        let mut segments = 0;
        for (at, result) in results.into_iter().enumerate() {
            segments += 1;
            match result {
                Err(error) if error.code() == ErrorCode::SEGMENT_NOT_FOUND => lost.push(at),
                result => result?,
            }
        }
        self.step = if lost.is_empty() {
            self.step_after_resume(segments)
        } else {
            RegistrationStep::Replace(LostSegments::Some(lost))
        };
        Ok(())
    }

    /// Reports that the lost segments were replaced. The client has this number of segments now.
    pub fn replaced(&mut self, segments: usize) {
        self.step = self.step_after_resume(segments);
    }

    /// Returns the step after all segments are resumed or replaced. An empty list matters only to a
    /// master that may still list segments of this client.
    fn step_after_resume(&self, segments: usize) -> RegistrationStep {
        if segments == 0 && self.is_first {
            RegistrationStep::Done
        } else {
            RegistrationStep::AnnounceAll
        }
    }
}

/// Returns the first error of an announcement, ignoring segments that the master already knows.
///
/// # Errors
/// The master refuses a segment.
pub fn check_all_known(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let is_known = |error: &Error| error.code() == ErrorCode::SEGMENT_ALREADY_EXISTS;
    let refused = results.into_iter().filter_map(Result::err).find(|error| !is_known(error));
    refused.map_or(Ok(()), Err)
}
