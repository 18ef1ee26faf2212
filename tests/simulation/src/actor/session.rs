//! The session of a client: heartbeats, registrations, and the segments that it lends. The store
//! client's code decides; this file carries the decisions out.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, SegmentId};
use mooncake_master::state::SegmentSpec;
use mooncake_store_client::protocol::{
    Announcement, LostSegments, MountVerdict, Registration, RegistrationStep, check_all_known,
};

use crate::{
    actor::client::{Input, Op},
    actor::repeated_call::{Progress, RepeatedCall},
    call::{Call, Reply},
    plan::Bug,
    simulator::{Event, Simulator},
};

/// The longest grace of a segment that is unmounted.
const GRACE_MILLIS_MAX: u64 = 5000;

/// A heartbeat, and the registration that follows if the master does not know the client.
#[derive(Debug)]
pub(crate) enum Heartbeat {
    Begin,
    Beating(RepeatedCall),
    Registering(Box<Registering>),
}

/// A registration that waits for the answer to a call.
#[derive(Debug)]
pub(crate) struct Registering {
    registration: Registration,
    /// The segments that were announced last.
    announced: Vec<SegmentSpec>,
    call: RepeatedCall,
}

/// Unmounts a segment, if it begins with that, and mounts another.
#[derive(Debug)]
pub(crate) enum SegmentChange {
    Unmount,
    Mount,
    Unmounting((SegmentId, Duration), RepeatedCall),
    Mounting(SegmentSpec, RepeatedCall),
}

impl Simulator {
    /// Starts a heartbeat, unless it is not due or the last one still runs.
    pub(crate) fn start_heartbeat(&mut self, process: u64) -> Result<(), String> {
        let number = self.next_number();
        let Some(found) = self.processes.get_mut(&process) else { return Ok(()) };
        if found.is_beating || !found.next_heartbeat.has_passed(self.now) {
            return Ok(());
        }
        found.is_beating = true;
        self.start_op((process, number), Op::Heartbeat(Heartbeat::Begin), false)
    }

    /// Starts to replace a segment, unless the segments are being announced.
    pub(crate) fn start_remount(&mut self, process: u64) -> Result<(), String> {
        self.start_segment_change(process, SegmentChange::Unmount)
    }

    /// Starts to mount a segment if some are missing, unless the segments are being announced.
    pub(crate) fn start_mount(&mut self, process: u64) -> Result<(), String> {
        match self.processes.get(&process) {
            Some(found) if found.segments.len() < found.wanted_segments => {
                self.start_segment_change(process, SegmentChange::Mount)
            }
            _ => Ok(()),
        }
    }

    fn start_segment_change(&mut self, process: u64, change: SegmentChange) -> Result<(), String> {
        let number = self.next_number();
        if self.lock_announcements((process, number)) {
            self.start_op((process, number), Op::SegmentChange(change), false)
        } else {
            Ok(())
        }
    }

    /// Lets only this operation make calls about the segments. Returns false if another one does.
    fn lock_announcements(&mut self, (process, number): (u64, u64)) -> bool {
        let Some(found) = self.processes.get_mut(&process) else { return false };
        if found.exclusive.is_some() {
            return false;
        }
        found.exclusive = Some(number);
        true
    }

    /// Lets other operations make calls about the segments.
    pub(crate) fn unlock_announcements(&mut self, (process, number): (u64, u64)) {
        if let Some(found) = self.processes.get_mut(&process)
            && found.exclusive == Some(number)
        {
            found.exclusive = None;
        }
    }

    /// Handles a refused call: if the master does not know the client, schedules a heartbeat.
    pub(crate) fn handle_refusal(&mut self, process: u64, code: ErrorCode) {
        if code == ErrorCode::CLIENT_NOT_FOUND {
            self.heartbeat_at(process, self.now);
        }
    }

    /// Ends a heartbeat, and schedules what follows.
    fn end_heartbeat(&mut self, process: u64, has_succeeded: bool) {
        let Some(found) = self.processes.get_mut(&process) else { return };
        found.is_beating = false;
        let next = self.now + found.session.heartbeat_pause(has_succeeded);
        self.heartbeat_at(process, next);
        if has_succeeded {
            self.settle_soon(process);
            self.mount_soon(process);
            self.serve_directory_soon(process);
        }
    }

    /// Lets a segment go at the end of its grace.
    fn let_leave(&mut self, process: u64, segment: SegmentId, grace: Duration) {
        self.outcome.graces += 1;
        let end = self.now + grace;
        let Some(found) = self.processes.get_mut(&process) else { return };
        let known = found.leaving.entry(segment).or_insert(end);
        *known = end.min(*known);
        self.at(end, Event::EndGrace(process));
    }

    /// Frees the segments of a process whose grace is over.
    pub(crate) fn end_graces(&mut self, process: u64) {
        let now = self.now;
        let Some(found) = self.processes.get_mut(&process) else { return };
        if !found.stalled_until.has_passed(now) {
            let stalled_until = found.stalled_until;
            return self.at(stalled_until, Event::EndGrace(process));
        }
        let ended = found.leaving.iter().filter(|(_, end)| end.has_passed(now));
        let over: Vec<SegmentId> = ended.map(|(&segment, _)| segment).collect();
        found.leaving.retain(|_, end| !end.has_passed(now));
        found.segments.retain(|segment| !over.contains(&segment.id));
        if !over.is_empty() {
            self.mark_segments_uncertain(process);
        }
        over.into_iter().for_each(|segment| self.memories.remove(segment));
        self.mount_soon(process);
    }

    /// Replaces lost segments of a process by fresh memory; those that leave are dropped.
    fn replace_segments(&mut self, process: u64, lost: &LostSegments, announced: &[SegmentSpec]) {
        let Some(found) = self.processes.get(&process) else { return };
        let lost: Vec<SegmentId> = match lost {
            LostSegments::All => found.segments.iter().map(|segment| segment.id).collect(),
            LostSegments::Some(lost) => lost.iter().map(|&at| announced[at].id).collect(),
        };
        if self.plan.has(Bug::RemountsUsedMemory) {
            return;
        }
        for id in lost {
            self.memories.remove(id);
            if let Some(found) = self.processes.get_mut(&process)
                && found.leaving.remove(&id).is_some()
            {
                found.segments.retain(|segment| segment.id != id);
                continue;
            }
            let fresh = self.new_segment(process);
            let segments = self.processes.get_mut(&process).map(|found| &mut found.segments);
            let old = segments.into_iter().flatten().find(|segment| segment.id == id);
            if let Some(old) = old {
                *old = fresh;
            }
            self.outcome.renewals += 1;
        }
    }

    /// Records that the master may know other segments than the client. The next registration
    /// announces the complete list.
    fn mark_segments_uncertain(&mut self, process: u64) {
        if let Some(found) = self.processes.get_mut(&process)
            && !self.plan.has(Bug::ForgetsFailedMounts)
        {
            found.session.mark_segments_uncertain();
        }
    }
}

impl Heartbeat {
    pub(crate) fn step(
        self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Option<Self> {
        let next = match self {
            Self::Begin => Self::begin(simulator, caller),
            Self::Beating(mut call) => match call.step(simulator, caller, input) {
                Progress::Waiting => return Some(Self::Beating(call)),
                Progress::Answered(message) => Self::answered(simulator, caller, message.reply),
                Progress::GivenUp => Err(()),
            },
            Self::Registering(mut running) => match running.call.step(simulator, caller, input) {
                Progress::Waiting => return Some(Self::Registering(running)),
                Progress::Answered(message) => {
                    let segments = simulator.processes.get(&caller.0)?.segments.len();
                    let Registering { mut registration, announced, .. } = *running;
                    report(&mut registration, message.reply, segments)
                        .and_then(|()| Self::register(simulator, caller, (registration, announced)))
                }
                Progress::GivenUp => Err(()),
            },
        };
        if !matches!(next, Ok(Some(_))) {
            simulator.end_heartbeat(caller.0, next.is_ok());
        }
        next.unwrap_or_default()
    }

    /// Sends a heartbeat, or registers for the first time.
    fn begin(simulator: &mut Simulator, caller: (u64, u64)) -> Result<Option<Self>, ()> {
        let process = simulator.processes.get(&caller.0).ok_or(())?;
        if process.session.registrations() == 0 {
            return Self::begin_registration(simulator, caller);
        }
        let call = Call::Heartbeat(process.session.registration());
        Ok(Some(Self::Beating(RepeatedCall::send(simulator, caller, call))))
    }

    fn answered(
        simulator: &mut Simulator,
        caller: (u64, u64),
        reply: Reply,
    ) -> Result<Option<Self>, ()> {
        let Reply::Heartbeat { answer, has_tasks } = reply else { return Err(()) };
        let process = simulator.processes.get_mut(&caller.0).ok_or(())?;
        if process.session.heartbeat_answered(answer) {
            return Self::begin_registration(simulator, caller);
        }
        if has_tasks {
            simulator.fetch_soon(caller.0);
        }
        Ok(None)
    }

    fn begin_registration(
        simulator: &mut Simulator,
        caller: (u64, u64),
    ) -> Result<Option<Self>, ()> {
        if !simulator.lock_announcements(caller) {
            return Err(());
        }
        let process = simulator.processes.get(&caller.0).ok_or(())?;
        let registration = Registration::new(&process.session, false);
        Self::register(simulator, caller, (registration, Vec::new()))
    }

    /// Takes the next steps of a registration, up to the next call. `None`: the client is
    /// registered.
    fn register(
        simulator: &mut Simulator,
        caller: (u64, u64),
        (mut registration, mut announced): (Registration, Vec<SegmentSpec>),
    ) -> Result<Option<Self>, ()> {
        loop {
            let process = simulator.processes.get_mut(&caller.0).ok_or(())?;
            let is_silent =
                simulator.plan.has(Bug::ForgetsToReannounce) && process.session.registrations() > 0;
            let segments = process.segments.clone();
            let kind = match registration.next_step() {
                RegistrationStep::Register => {
                    let call = RepeatedCall::send(simulator, caller, Call::Register);
                    return Ok(Some(Self::registering(registration, announced, call)));
                }
                RegistrationStep::RefuseIgnoredTenant => return Err(()),
                RegistrationStep::Resume | RegistrationStep::AnnounceAll if is_silent => {
                    registration.announced(segments.iter().map(|_| Ok(()))).map_err(drop)?;
                    continue;
                }
                RegistrationStep::Resume => Announcement::Resume,
                RegistrationStep::AnnounceAll => Announcement::All,
                RegistrationStep::Replace(lost) => {
                    simulator.replace_segments(caller.0, &lost, &announced);
                    registration.replaced(segments.len());
                    continue;
                }
                RegistrationStep::Done => {
                    process.session.complete(registration);
                    process.is_registered = true;
                    return Ok(None);
                }
            };
            announced.clone_from(&segments);
            let call = RepeatedCall::send(simulator, caller, Call::Announce { segments, kind });
            return Ok(Some(Self::registering(registration, announced, call)));
        }
    }

    fn registering(
        registration: Registration,
        announced: Vec<SegmentSpec>,
        call: RepeatedCall,
    ) -> Self {
        Self::Registering(Box::new(Registering { registration, announced, call }))
    }
}

/// Reports a reply to the registration that waits for it. Fails if the registration has failed.
fn report(registration: &mut Registration, reply: Reply, segments: usize) -> Result<(), ()> {
    match reply {
        Reply::Registered(answer) => {
            registration.registered(answer, segments);
            Ok(())
        }
        Reply::Announced(results) => {
            let results = results.into_iter().map(|result| result.map_err(refused));
            registration.announced(results).map_err(drop)
        }
        _ => Err(()),
    }
}

impl SegmentChange {
    pub(crate) fn step(
        self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Option<Self> {
        match self {
            Self::Unmount => {
                let grace = if simulator.random.happens(300) {
                    Duration::from_millis(simulator.random.below(GRACE_MILLIS_MAX))
                } else {
                    Duration::ZERO
                };
                let process = simulator.processes.get_mut(&caller.0)?;
                let segment = process.segments.first()?.id;
                process.unmounting.insert(segment);
                let call = Call::Unmount { segment, grace };
                let call = RepeatedCall::send(simulator, caller, call);
                Some(Self::Unmounting((segment, grace), call))
            }
            Self::Mount => Some(Self::mount(simulator, caller)),
            Self::Unmounting((id, grace), mut call) => match call.step(simulator, caller, input) {
                Progress::Waiting => Some(Self::Unmounting((id, grace), call)),
                Progress::Answered(message) => match message.reply {
                    Reply::Done if !grace.is_zero() => {
                        simulator.let_leave(caller.0, id, grace);
                        None
                    }
                    Reply::Done | Reply::Failed(ErrorCode::SEGMENT_NOT_FOUND) => {
                        let process = simulator.processes.get_mut(&caller.0)?;
                        process.segments.retain(|segment| segment.id != id);
                        simulator.memories.remove(id);
                        Some(Self::mount(simulator, caller))
                    }
                    _ => None,
                },
                Progress::GivenUp => {
                    simulator.mark_segments_uncertain(caller.0);
                    if !grace.is_zero() {
                        simulator.let_leave(caller.0, id, grace);
                    }
                    None
                }
            },
            Self::Mounting(segment, mut call) => {
                let outcome = match call.step(simulator, caller, input) {
                    Progress::Waiting => return Some(Self::Mounting(segment, call)),
                    Progress::Answered(message) => match message.reply {
                        Reply::Announced(results) => check_all_known(
                            results.into_iter().map(|result| result.map_err(refused)),
                        ),
                        Reply::Failed(code) => Err(refused(code)),
                        _ => Err(refused(ErrorCode::RPC_FAIL)),
                    },
                    Progress::GivenUp => Err(refused(ErrorCode::RPC_TIMEOUT)),
                };
                simulator.mounted(caller.0, segment, &outcome);
                None
            }
        }
    }

    fn mount(simulator: &mut Simulator, caller: (u64, u64)) -> Self {
        let segment = simulator.new_segment(caller.0);
        let (segments, kind) = (vec![segment.clone()], Announcement::Mount);
        let call = RepeatedCall::send(simulator, caller, Call::Announce { segments, kind });
        Self::Mounting(segment, call)
    }
}

impl Simulator {
    /// Handles the outcome of a mount.
    fn mounted(&mut self, process: u64, segment: SegmentSpec, outcome: &Result<(), Error>) {
        let verdict = MountVerdict::of(outcome, false);
        match self.processes.get_mut(&process) {
            Some(found) if verdict == MountVerdict::Mounted => found.segments.push(segment),
            _ => self.memories.remove(segment.id),
        }
        match verdict {
            MountVerdict::Mounted => {}
            // A segment is mounted after the registration.
            MountVerdict::RegisterAgain => self.heartbeat_at(process, self.now),
            MountVerdict::Uncertain => self.mark_segments_uncertain(process),
        }
    }
}

fn refused(code: ErrorCode) -> Error {
    Error::new(code, "the master refused")
}
