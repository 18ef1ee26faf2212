//! The standby's side: receives the log of the leader, writes it to the own log and confirms it.

use std::{
    mem,
    net::{IpAddr, SocketAddr},
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, SyncSender},
    },
    thread,
    time::Duration,
};

use mooncake_base::{
    Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock,
    sync::{Condvar, Mutex, MutexGuard},
};
use mooncake_election::{LeaderAddress, Role, View};
use mooncake_os::threads::{self, Threads};
use mooncake_proto::standby::{
    Attach, Attached, Confirm, Frames, FromLeader, FromStandby, Leases, Start, ViewStart,
};

use super::{
    Cluster,
    channel::{Channel, Closer, KEEPALIVE},
    lease_notes,
    member::Membership,
    status::MemberState,
};
use crate::{
    config::RPC_PORT,
    journal::{Accepted, LogSync, StandbyLog, level::RecordLevel},
    service::VERSION,
};

/// Pause before a connection that failed is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Time between two looks at whether the log is to be synced or compacted, if it is never synced at an
/// interval.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);

/// A standby while it follows.
#[derive(Debug)]
pub(super) struct Following {
    shared: Arc<Shared>,
    /// The thread that follows.
    follower: Threads,
    /// The thread of the files.
    upkeep: Threads,
}

/// What a standby has when it ends.
#[derive(Debug)]
pub(super) struct Followed {
    pub(super) log: StandbyLog,
    pub(super) membership: Membership,
    /// The thread of the files. It may still sync a file or end a snapshot, for as long as the disk takes:
    /// nobody waits for it before the directory is opened again.
    pub(super) upkeep: Threads,
}

/// The log and what goes with it. Only the thread that receives changes the log.
#[derive(Debug)]
struct Shared {
    cluster: Arc<Cluster>,
    /// `None` once following has ended.
    log: Mutex<Option<StandbyLog>>,
    /// Held while files are replaced: by a snapshot of the leader, or by an own one.
    files: Mutex<()>,
    membership: Mutex<Membership>,
    progress: Mutex<Progress>,
    /// The progress has changed, or the end has come.
    changed: Condvar,
    is_ended: AtomicBool,
}

/// The log, locked by a thread that is there for as long as the log is.
#[derive(Debug)]
struct LogGuard<'a>(MutexGuard<'a, Option<StandbyLog>>);

impl Deref for LogGuard<'_> {
    type Target = StandbyLog;

    fn deref(&self) -> &StandbyLog {
        self.0.as_ref().expect("the log is taken when following has ended")
    }
}

impl DerefMut for LogGuard<'_> {
    fn deref_mut(&mut self) -> &mut StandbyLog {
        self.0.as_mut().expect("the log is taken when following has ended")
    }
}

/// How far the standby is.
#[derive(Debug, Default)]
struct Progress {
    /// What the thread that follows waits for.
    interrupt: Option<Interrupt>,
}

/// Ends a wait of the thread that follows.
#[derive(Debug)]
enum Interrupt {
    /// For the addresses of a name. Takes them, or the end.
    Lookup(SyncSender<Result<Vec<SocketAddr>>>),
    /// For the leader.
    Connection(Closer),
}

impl Interrupt {
    fn end(&self) {
        match self {
            // If the addresses are there already, nothing waits for them.
            Self::Lookup(sender) => drop(sender.try_send(Err(ended()))),
            Self::Connection(connection) => connection.close(),
        }
    }
}

impl Following {
    /// Starts the threads.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn start(
        cluster: Arc<Cluster>,
        log: StandbyLog,
        membership: Membership,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            cluster,
            log: Mutex::new(Some(log)),
            files: Mutex::default(),
            membership: Mutex::new(membership),
            progress: Mutex::default(),
            changed: Condvar::new(),
            is_ended: AtomicBool::new(false),
        });
        let following = Self { shared, follower: Threads::new(1), upkeep: Threads::new(1) };
        following.spawn(&following.follower, "mc-follow", Shared::run)?;
        following.spawn(&following.upkeep, "mc-standby-sync", Shared::maintain)?;
        Ok(following)
    }

    fn spawn(&self, threads: &Threads, name: &str, run: fn(&Shared)) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let run = move || {
            shared.cluster.run_thread(|| {
                run(&shared);
                Ok(())
            });
        };
        threads.spawn(name, run).map_err(|source| {
            Error::internal("a thread of the standby cannot be started").caused_by(source)
        })
    }

    /// Ends following, and returns what was followed with. Does not wait for the files.
    ///
    /// # Errors
    /// A thread panicked with the log in its hands.
    pub(super) fn stop(mut self) -> Result<Followed> {
        self.end();
        let shared = &self.shared;
        if let Some(error) = shared.cluster.fatal.get() {
            return Err(error.clone());
        }
        let log = shared.log.lock().take().expect("only this takes the log");
        let membership = shared.membership.lock().clone();
        Ok(Followed { log, membership, upkeep: mem::replace(&mut self.upkeep, Threads::new(0)) })
    }

    fn end(&self) {
        self.follower.stop(|| {
            self.shared.is_ended.store(true, Ordering::Release);
            self.shared.log().cancel_compaction();
            {
                let progress = self.shared.progress.lock();
                if let Some(interrupt) = &progress.interrupt {
                    interrupt.end();
                }
            }
            self.shared.changed.notify_all();
        });
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.end();
        self.upkeep.join();
    }
}

impl Shared {
    fn log(&self) -> LogGuard<'_> {
        LogGuard(self.log.lock())
    }

    fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    /// Follows whichever master leads, until the end.
    fn run(&self) {
        let mut last = String::new();
        while !self.is_ended() {
            let mended = self.log().mend();
            let followed = match mended {
                Ok(()) => self.leader().map(|leader| self.follow(&leader)),
                Err(error) => Some(Err(error)),
            };
            self.cluster.set_state(MemberState::Standby);
            match followed {
                None => {}
                Some(Ok(())) => last.clear(),
                Some(Err(error)) if self.is_ended() => drop(error),
                Some(Err(error)) => {
                    let text = error.to_string();
                    if text != last {
                        tracing::warn!(%error, "the log of the leader cannot be followed");
                    }
                    last = text;
                }
            }
            let mut progress = self.progress.lock();
            progress.interrupt = None;
            if !self.is_ended() {
                self.changed.wait_for(&mut progress, RETRY_PAUSE);
            }
        }
    }

    /// Returns the address of another master that leads.
    fn leader(&self) -> Option<Endpoint> {
        match self.cluster.elector.leader()?.address {
            LeaderAddress::Serving(address) if address != self.cluster.settings.address => {
                address.parse().ok()
            }
            _ => None,
        }
    }

    /// Lets the end of following interrupt what the thread that follows waits for next.
    ///
    /// # Errors
    /// The end has come.
    fn set_interrupt(&self, interrupt: Interrupt) -> Result<()> {
        let mut progress = self.progress.lock();
        if self.is_ended() {
            return Err(ended());
        }
        progress.interrupt = Some(interrupt);
        Ok(())
    }

    /// Returns the addresses of a leader. A name is resolved on a thread that may be left behind: the
    /// system's resolver cannot be interrupted.
    fn resolve(&self, leader: &Endpoint, deadline: Moment) -> Result<Vec<SocketAddr>> {
        let leader = leader.clone().or_port(RPC_PORT);
        let resolve_name = self.cluster.dialing.resolve;
        if leader.host.parse::<IpAddr>().is_ok() {
            return resolve_name(&leader, deadline);
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        self.set_interrupt(Interrupt::Lookup(sender.clone()))?;
        // Nobody waits any more if the end has come, or the deadline.
        let resolve = move || drop(sender.try_send(resolve_name(&leader, deadline)));
        threads::start_detached("mc-resolve", resolve).map_err(|source| {
            Error::internal("the thread that resolves a name cannot be started").caused_by(source)
        })?;
        receiver.recv_timeout(deadline.left(SystemClock.now())).unwrap_or_else(|_| {
            Err(Error::new(
                ErrorCode::RPC_TIMEOUT,
                "the name of the leader was not resolved in time",
            ))
        })
    }

    fn follow(&self, leader: &Endpoint) -> Result<()> {
        let token = self.cluster.settings.token.as_ref();
        let deadline = SystemClock.now() + self.cluster.dialing.timeout;
        let addresses = self.resolve(leader, deadline)?;
        let keep = |closer| self.set_interrupt(Interrupt::Connection(closer));
        let mut channel = Channel::connect(&addresses, token, deadline, keep)?;
        let ended = self.follow_over(&mut channel);
        if ended.is_err() && !self.is_ended() {
            self.cluster.counts.disconnections.increment();
        }
        if channel.is_damaged() {
            self.cluster.counts.refused.increment();
        }
        ended
    }

    fn follow_over(&self, channel: &mut Channel) -> Result<()> {
        self.set_interrupt(Interrupt::Connection(channel.closer()?))?;
        let attached = self.attach(channel)?;
        self.cluster.unconfirmed.lock().take();
        self.log().forget_leases();
        self.begin(channel, &attached)?;
        let mut is_behind = true;
        loop {
            let mut frames = match channel.receive::<FromLeader>()? {
                FromLeader { frames: Some(frames), .. } => frames,
                FromLeader { refusal: Some(refusal), .. } => return Err((&refusal).into()),
                _ => return Err(malformed()),
            };
            let (position, leases) = (frames.position, frames.leases.take());
            let (next_frame, accepted) = self.receive(&frames, leases)?;
            if is_behind && next_frame >= attached.end_frame {
                is_behind = false;
                self.record_completion()?;
            }
            let confirmed = confirm(channel, Confirm { position, next_frame });
            // The leader need not wait for it.
            self.log().apply(accepted);
            confirmed?;
        }
    }

    fn attach(&self, channel: &mut Channel) -> Result<Attached> {
        let (timeline_id, next_frame) = self.log().place();
        let settings = &self.cluster.settings;
        let attach = Attach {
            member: settings.member.to_string(),
            address: settings.address.clone(),
            version: VERSION.to_owned(),
            timeline_id: timeline_id.to_vec(),
            next_frame,
            views: self.membership.lock().views(),
            level: RecordLevel::PRESENT.0,
        };
        channel.send(&FromStandby { attach: Some(attach), confirm: None })?;
        let attached = match channel.receive::<FromLeader>()? {
            FromLeader { attached: Some(attached), .. } => attached,
            FromLeader { refusal: Some(refusal), .. } => return Err((&refusal).into()),
            _ => return Err(malformed()),
        };
        check_view(&attached, self.cluster.elector.view_max(), &self.membership.lock().views())?;
        self.check_lineage(&attached)?;
        Ok(attached)
    }

    /// Checks that the log of this member and that of a leader are of one cluster.
    ///
    /// # Errors
    /// The log of the leader is another one, and no operator has forced that.
    fn check_lineage(&self, attached: &Attached) -> Result<()> {
        let (timeline_id, is_empty) = {
            let log = self.log();
            (log.place().0, log.is_empty())
        };
        // Only a forced leader begins another log. The views of its set have a base.
        let set = self.cluster.elector.known().snapshot.in_sync;
        let is_forced = set.is_some_and(|set| set.view_base > 0);
        let is_member = !self.membership.lock().views().is_empty();
        if is_empty || is_forced || !is_member || attached.timeline_id[..] == timeline_id {
            return Ok(());
        }
        let text = "the log of that master is not the one that this member has followed or written";
        Err(founded_anew(text).with("view", attached.view))
    }

    /// Brings the log to where the leader begins to send frames.
    fn begin(&self, channel: &mut Channel, attached: &Attached) -> Result<()> {
        self.cluster.set_state(MemberState::CatchingUp);
        let timeline_id = attached.timeline_id[..].try_into().map_err(|_| malformed())?;
        let mut files = None;
        if attached.start() != Start::Place {
            self.give_up_log(attached)?;
            self.cluster.counts.replacements_begun.increment();
            self.log().cancel_compaction();
            files = Some(self.files.lock());
        }
        match attached.start() {
            Start::Place => {}
            Start::FirstFrame => self.log().begin_anew(timeline_id)?,
            Start::Snapshot => {
                let number = attached.snapshot;
                let mut snapshot = self.log().receive_snapshot(timeline_id, number)?;
                loop {
                    let message: FromLeader = channel.receive()?;
                    if let Some(refusal) = &message.refusal {
                        return Err(refusal.into());
                    }
                    let part = message.part.ok_or_else(malformed)?;
                    snapshot.append(&part.bytes)?;
                    if part.is_last {
                        break;
                    }
                }
                let mut alive = channel.split()?;
                let next_frame = say_alive(&mut alive, || {
                    let mut log = self.log();
                    let adopted = log.adopt_snapshot(snapshot);
                    adopted.inspect_err(|_| self.cluster.counts.refused.increment())?;
                    Ok(log.place().1)
                })?;
                confirm(channel, Confirm { position: 0, next_frame })?;
            }
        }
        if files.take().is_some() {
            self.cluster.counts.replacements.increment();
        }
        self.membership.lock().follow(&attached.views)
    }

    /// Prepares to empty the log: from here on this member does not lead before it has followed.
    fn give_up_log(&self, attached: &Attached) -> Result<()> {
        let is_empty = self.log().is_empty();
        self.membership.lock().give_up_log(is_empty)?;
        self.cluster.elector.set_complete(false);
        may_give_up_log(self.cluster.elector.role())?;
        tracing::info!(view = attached.view, "the log is replaced by that of the leader");
        Ok(())
    }

    /// Writes frames to the log, and takes notes of leases. Returns the number of the next frame, and what
    /// is to be applied.
    fn receive<'a>(
        &self,
        frames: &'a Frames,
        leases: Option<Leases>,
    ) -> Result<(u64, Accepted<'a>)> {
        let mut log = self.log();
        let before = log.place().1;
        // A log that cannot be written says nothing of the frames.
        let mut accepted = match log.accept(&frames.bytes) {
            Ok(accepted) => accepted,
            Err(error) => {
                if !log.is_broken() {
                    self.cluster.counts.refused.increment();
                }
                return Err(error);
            }
        };
        if let Some(leases) = leases {
            log.receive_leases(SystemClock.now(), &lease_notes::from_message(leases));
        }
        if frames.is_rest_logged {
            log.apply(mem::take(&mut accepted));
            log.set_rest_logged();
        }
        log.set_level(RecordLevel(frames.level))?;
        if self.cluster.settings.log_sync == LogSync::Always
            && let Some(point) = log.sync_point()
        {
            point.sync()?;
            log.end_sync(&point);
        }
        let next_frame = log.place().1;
        self.cluster.counts.applied_frames.add(next_frame - before);
        self.cluster.next_frame.store(next_frame, Ordering::Release);
        Ok((next_frame, accepted))
    }

    /// Records that the log has all that the leader had when this standby attached.
    fn record_completion(&self) -> Result<()> {
        self.cluster.set_state(MemberState::Standby);
        if self.membership.lock().complete()? {
            self.cluster.elector.set_complete(true);
        }
        Ok(())
    }

    /// Syncs the log at its interval, and bounds its files, until the end.
    fn maintain(&self) {
        let interval = match self.cluster.settings.log_sync {
            LogSync::Interval(interval) => interval,
            LogSync::Always | LogSync::Never => MAINTENANCE_INTERVAL,
        };
        while !self.is_ended() {
            if let Err(error) = self.maintain_once() {
                tracing::error!(%error, "the files of the standby's log");
            }
            let mut progress = self.progress.lock();
            if !self.is_ended() {
                self.changed.wait_for(&mut progress, interval);
            }
        }
    }

    fn maintain_once(&self) -> Result<()> {
        let is_synced = self.cluster.settings.log_sync != LogSync::Never;
        // A long log is synced before it goes on in another file, which frames wait for.
        let to_sync = |log: &StandbyLog| {
            if is_synced || log.is_long() { log.sync_point() } else { None }
        };
        let point = self.log.lock().as_ref().and_then(to_sync);
        if let Some(point) = point {
            point.sync()?;
            if let Some(log) = &mut *self.log.lock() {
                log.end_sync(&point);
            }
        }
        let _files = self.files.lock();
        let begun = self.log.lock().as_mut().map(StandbyLog::begin_compaction);
        let Some(compaction) = begun.transpose()?.flatten() else { return Ok(()) };
        match compaction.run() {
            Ok(bytes) => {
                if let Some(log) = &mut *self.log.lock() {
                    log.end_compaction(bytes);
                }
            }
            Err(_) if self.is_ended() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Checks that a leader leads in no view below those that this member has followed, or heard of.
///
/// # Errors
/// The leader is a former one, which must not be followed.
pub(super) fn check_view(attached: &Attached, heard: View, followed: &[ViewStart]) -> Result<()> {
    let known = heard.0.max(followed.last().map_or(0, |start| start.view));
    if attached.view >= known {
        return Ok(());
    }
    let text = "that master leads in a view below those that this member knows";
    Err(founded_anew(text).with("view", attached.view).with("known_view", known))
}

/// Checks that a member may empty its log, once its election knows that it is not complete.
///
/// # Errors
/// A bid that is under way may still win.
pub(super) fn may_give_up_log(role: Role) -> Result<()> {
    match role {
        Role::Candidate | Role::Leader { .. } => {
            Err(Error::closed("this member may be elected now"))
        }
        Role::Follower(_) | Role::Fenced { .. } => Ok(()),
    }
}

/// Runs something long while another thread tells the leader that this standby is alive.
fn say_alive<R: Send>(channel: &mut Channel, run: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    thread::scope(|scope| {
        let running = scope.spawn(run);
        while !running.is_finished() {
            thread::park_timeout(KEEPALIVE);
            // A broken connection is noticed by the next message.
            let _ = confirm(channel, Confirm { position: 0, next_frame: 0 });
        }
        running.join().unwrap_or_else(|_| Err(Error::internal("reading a snapshot panicked")))
    })
}

fn confirm(channel: &mut Channel, confirm: Confirm) -> Result<()> {
    channel.send(&FromStandby { attach: None, confirm: Some(confirm) })
}

fn ended() -> Error {
    Error::closed("this master does not follow any more")
}

/// The refusal to follow a leader that knows nothing of the log of this member.
fn founded_anew(why: &str) -> Error {
    let text = format!(
        "{why}; this member keeps its log and does not follow: if the lease service was emptied and \
         another master founded the cluster anew, and its objects are to be kept, move the state \
         directory of this master away and start it again"
    );
    Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text)
}

fn malformed() -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the message of the leader is malformed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leader_of_an_earlier_view_is_not_followed() {
        let attached = |view| Attached { view, ..Attached::default() };
        let followed =
            [ViewStart { view: 3, first_frame: 1 }, ViewStart { view: 5, first_frame: 9 }];
        for (heard, lowest) in [(0, 5), (7, 7)] {
            check_view(&attached(lowest), View(heard), &followed).unwrap();
            let error = check_view(&attached(lowest - 1), View(heard), &followed).unwrap_err();
            assert!(error.to_string().contains(&format!("known_view={lowest}")), "{error}");
        }
        check_view(&attached(1), View(0), &[]).unwrap();
    }
}
