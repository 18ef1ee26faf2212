//! The standbys that follow the log: what each one still has to receive, and what each one has.
//!
//! A member of the in-sync set must have a change before the change is acknowledged, and before memory
//! that it frees is used again, since any of them may lead next. A lost connection takes no member out
//! of the set: only the lease service does, before [`require`](Followers::require) is told.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use mooncake_base::{
    Clock, Moment, SystemClock,
    sync::{Condvar, Mutex},
};

use super::{
    confirmations::{Confirmations, StandbyProgress},
    level::RecordLevel,
};
use crate::state::LeaseNotes;

/// Maximum number of bytes that wait for one standby. A standby that is further behind is detached,
/// and reads the log files instead.
const QUEUE_BYTES_MAX: usize = 64 << 20;

/// Frames that are sent at a time are joined up to this size.
const JOINED_BYTES_MAX: usize = 4 << 20;

/// Frames that are sent by the thread that writes the log; it does not copy larger ones.
const DIRECT_BYTES_MAX: usize = 64 << 10;

/// Bytes of effects that a standby may lack and count as caught up.
const NEAR_BYTES: u64 = 1 << 20;

/// Identifies one connection of a standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FollowerId(u64);

/// Frames of the log for a standby, and the log position behind them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shipment {
    pub(crate) frames: Arc<[u8]>,
    pub(crate) position: u64,
}

/// The next frames for a standby.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextShipment {
    /// These frames.
    Frames(Shipment),
    /// These notes of leases.
    Leases(LeaseNotes),
    /// That all memory which must rest is in the log.
    RestLogged,
    /// There are none yet.
    None,
    /// The standby is no longer attached: it was too far behind, or another connection took its place.
    Detached,
}

/// Sends frames to a standby from the thread that writes the log, so that no other has to be woken.
pub(crate) trait DirectSender: std::fmt::Debug + Send + Sync {
    /// Sends frames as far as that takes no wait.
    fn try_send(&self, shipment: &Shipment) -> Sent;
}

/// What became of frames that were to be sent without a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Whole,
    /// The rest goes before the next message, whose sender waits.
    Partly,
    Nothing,
}

/// A standby that connects.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Newcomer<'a> {
    /// The id of the member.
    pub(crate) member: &'a str,
    /// Where it would serve.
    pub(crate) address: &'a str,
    /// The highest level of records that it can read.
    pub(crate) level: RecordLevel,
}

/// A standby as its leader sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FollowerStatus {
    /// The id of the member.
    pub(crate) member: String,
    /// Where it would serve; empty while it has not attached.
    pub(crate) address: String,
    pub(crate) is_attached: bool,
    /// The highest level of records that it can read.
    pub(crate) level: RecordLevel,
    /// Whether changes wait for it.
    pub(crate) is_required: bool,
    /// Whether it lacks little or nothing.
    pub(crate) is_near: bool,
    /// Bytes of changes that it has not confirmed.
    pub(crate) lag_bytes: u64,
    /// The number of the frame that it lacks first.
    pub(crate) next_frame: u64,
    /// Since when it owes a confirmation, or a connection.
    pub(crate) silent_since: Option<Moment>,
    /// When it confirmed something last.
    pub(crate) heard: Moment,
}

/// All members but the leader.
#[derive(Debug)]
pub(crate) struct Followers {
    /// Tells for how long a standby is silent.
    clock: Arc<dyn Clock>,
    table: Mutex<Table>,
    /// There are frames or notes to send, or a connection has ended.
    changed: Condvar,
    /// Number of attached standbys, so that a master without any pays nothing.
    attached: AtomicUsize,
    /// The position that all required members have; `u64::MAX` without any.
    confirmed: AtomicU64,
    /// All frames with lower numbers are at all required members; `u64::MAX` without any.
    confirmed_frame: AtomicU64,
}

#[derive(Debug, Default)]
struct Table {
    attachments: u64,
    /// The position that was shipped last.
    shipped: u64,
    followers: Vec<Follower>,
}

#[derive(Debug)]
struct Follower {
    member: String,
    address: String,
    level: RecordLevel,
    attachment: Option<FollowerId>,
    /// Sends what need not wait for other frames.
    direct: Option<Arc<dyn DirectSender>>,
    /// Where its confirmations arrive.
    confirmations: Option<Arc<Confirmations>>,
    queue: VecDeque<Shipment>,
    queued_bytes: usize,
    leases: PendingLeases,
    /// It is to be told, behind all frames, that all memory which must rest is in the log.
    owes_rest: bool,
    /// Something that was taken out of the queue is being sent.
    is_sending: bool,
    confirmed: u64,
    /// The position up to which it gets the log from the files.
    attached_at: u64,
    next_frame: u64,
    is_required: bool,
    silent_since: Option<Moment>,
    heard: Moment,
}

/// Notes of leases for a standby.
#[derive(Debug, Default)]
struct PendingLeases {
    /// It was told that it gets notes.
    is_told: bool,
    notes: LeaseNotes,
}

impl Default for Followers {
    fn default() -> Self {
        Self {
            clock: SystemClock::shared(),
            table: Mutex::default(),
            changed: Condvar::new(),
            attached: AtomicUsize::new(0),
            confirmed: AtomicU64::new(u64::MAX),
            confirmed_frame: AtomicU64::new(u64::MAX),
        }
    }
}

impl Followers {
    /// Takes the time from another clock than that of the system.
    pub(super) fn set_clock(&mut self, clock: Arc<dyn Clock>) {
        self.clock = clock;
    }

    /// Attaches a member in place of an earlier connection of it. `position` is that of the log.
    pub(super) fn attach(&self, standby: &Newcomer<'_>, position: u64) -> FollowerId {
        let table = &mut *self.table.lock();
        table.attachments += 1;
        let id = FollowerId(table.attachments);
        table.shipped = table.shipped.max(position);
        let now = self.clock.now();
        let follower = table.entry(standby.member, now);
        follower.attachment = Some(id);
        follower.level = standby.level;
        standby.address.clone_into(&mut follower.address);
        follower.attached_at = position;
        follower.clear();
        follower.silent_since = Some(now);
        self.publish(table);
        self.changed.notify_all();
        id
    }

    /// Lets the threads that write the log and wait for it use a connection themselves, where they need not
    /// wait for another: they send frames, and read confirmations. Called once all frames before the
    /// standby attached have been sent.
    pub(crate) fn share_connection(
        &self,
        id: FollowerId,
        sender: Arc<dyn DirectSender>,
        confirmations: Arc<Confirmations>,
    ) {
        if let Some(follower) = self.table.lock().attached(id) {
            follower.direct = Some(sender);
            follower.confirmations = Some(confirmations);
        }
    }

    /// Returns the confirmations of a required member that lacks a position, if no thread reads them.
    pub(super) fn unread(&self, position: u64) -> Option<Arc<Confirmations>> {
        self.table.lock().lacking(position).find(|one| one.is_unread()).map(Arc::clone)
    }

    /// Makes sure that confirmations of a position are read, for tasks that wait for it.
    pub(super) fn read_for_task(&self, position: u64) {
        if self.confirmed() < position {
            self.table.lock().lacking(position).for_each(|one| one.read_for_task(position));
        }
    }

    /// Ends a connection. A member for which changes wait stays required.
    pub(crate) fn detach(&self, id: FollowerId) {
        let table = &mut *self.table.lock();
        if let Some(follower) = table.attached(id) {
            follower.leave(self.clock.now());
        }
        self.publish(table);
        self.changed.notify_all();
    }

    /// Makes changes wait for exactly these members, attached or not.
    pub(super) fn require(&self, members: &BTreeSet<String>) {
        let table = &mut *self.table.lock();
        let now = self.clock.now();
        for member in members {
            table.entry(member, now);
        }
        for follower in &mut table.followers {
            follower.is_required = members.contains(&follower.member);
        }
        self.publish(table);
    }

    /// Records what a standby has.
    pub(super) fn confirm(&self, id: FollowerId, progress: StandbyProgress) {
        let StandbyProgress { position, next_frame } = progress;
        let table = &mut *self.table.lock();
        let shipped = table.shipped;
        let Some(follower) = table.attached(id) else { return };
        follower.heard = self.clock.now();
        follower.confirmed = follower.confirmed.max(position);
        follower.next_frame = follower.next_frame.max(next_frame);
        let owes = follower.confirmed < shipped;
        follower.silent_since = owes.then_some(follower.heard);
        self.publish(table);
    }

    /// Sends or queues frames for all standbys, and the position behind them. Frames may be empty: a
    /// position that is not new without frames is not sent.
    pub(super) fn ship(&self, frames: &[u8], position: u64) {
        if self.attached.load(Ordering::Acquire) == 0 {
            return;
        }
        let table = &mut *self.table.lock();
        if frames.is_empty() && position == table.shipped {
            return;
        }
        table.shipped = position;
        let shipment = Shipment { frames: frames.into(), position };
        let now = self.clock.now();
        let mut is_any_queued = false;
        for follower in &mut table.followers {
            is_any_queued |= follower.ship(&shipment, now);
        }
        if is_any_queued {
            self.publish(table);
            self.changed.notify_all();
        }
    }

    /// Returns whether any standby is attached.
    pub(super) fn are_any(&self) -> bool {
        self.attached.load(Ordering::Acquire) > 0
    }

    /// Queues notes of leases for all standbys. Returns whether one has to be told of all leases: these are
    /// its first notes, or too many wait for it.
    pub(super) fn tell_leases(&self, notes: &LeaseNotes) -> bool {
        let table = &mut *self.table.lock();
        let attached = table.followers.iter_mut().filter(|one| one.attachment.is_some());
        let (mut lacks_any, mut is_any_told) = (false, false);
        for follower in attached {
            lacks_any |= !follower.leases.push(notes);
            is_any_told |= !follower.leases.notes.is_empty();
        }
        if is_any_told {
            self.changed.notify_all();
        }
        lacks_any
    }

    /// Waits for notes, and for frames that are not sent directly, for at most `time`. Those returned
    /// before have been sent.
    pub(crate) fn next(&self, id: FollowerId, time: Duration) -> NextShipment {
        self.next_up_to(id, time, JOINED_BYTES_MAX)
    }

    /// Joins frames that wait already, up to so many bytes.
    fn next_up_to(&self, id: FollowerId, time: Duration, bytes_max: usize) -> NextShipment {
        let end = SystemClock.now() + time;
        let mut table = self.table.lock();
        loop {
            let Some(follower) = table.attached(id) else { return NextShipment::Detached };
            let was_sending = std::mem::take(&mut follower.is_sending);
            if let Some(next) = follower.next(bytes_max) {
                follower.is_sending = true;
                return next;
            }
            if was_sending {
                self.changed.notify_all();
            }
            let left = end.left(SystemClock.now());
            if left.is_zero() {
                return NextShipment::None;
            }
            self.changed.wait_for(&mut table, left);
        }
    }

    /// Tells all standbys that all memory which must rest is in the log. Void if more is written.
    pub(super) fn tell_rest_logged(&self) {
        let table = &mut *self.table.lock();
        for follower in table.followers.iter_mut().filter(|one| one.attachment.is_some()) {
            follower.owes_rest = true;
        }
        self.changed.notify_all();
    }

    /// Waits until everything was sent to all standbys that are attached, or the time is over.
    pub(super) fn wait_sent(&self, time: Duration) {
        let end = SystemClock.now() + time;
        let mut table = self.table.lock();
        while table.followers.iter().any(Follower::has_unsent) {
            let left = end.left(SystemClock.now());
            if left.is_zero() {
                return;
            }
            self.changed.wait_for(&mut table, left);
        }
    }

    /// Returns the position that all required members have; `u64::MAX` if there are none.
    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed.load(Ordering::Acquire)
    }

    /// Returns the frame before which all required members have every frame; `u64::MAX` if there are
    /// none.
    pub(super) fn confirmed_frame(&self) -> u64 {
        self.confirmed_frame.load(Ordering::Acquire)
    }

    /// Returns what is known of each member.
    pub(crate) fn status(&self) -> Vec<FollowerStatus> {
        let table = self.table.lock();
        let status = |follower: &Follower| {
            let lag_bytes = table.shipped.saturating_sub(follower.confirmed);
            FollowerStatus {
                member: follower.member.clone(),
                address: follower.address.clone(),
                is_attached: follower.attachment.is_some(),
                level: follower.level,
                is_required: follower.is_required,
                is_near: follower.next_frame > 0
                    && follower.confirmed >= follower.attached_at
                    && lag_bytes <= NEAR_BYTES,
                lag_bytes,
                next_frame: follower.next_frame,
                silent_since: follower.silent_since,
                heard: follower.heard,
            }
        };
        table.followers.iter().map(status).collect()
    }

    /// Updates what others read.
    fn publish(&self, table: &mut Table) {
        table.followers.retain(|follower| follower.is_required || follower.attachment.is_some());
        let attached = table.followers.iter().filter(|follower| follower.attachment.is_some());
        self.attached.store(attached.count(), Ordering::Release);
        let required = || table.followers.iter().filter(|follower| follower.is_required);
        let confirmed = required().map(|follower| follower.confirmed).min();
        let frame = required().map(|follower| follower.next_frame).min();
        self.confirmed.store(confirmed.unwrap_or(u64::MAX), Ordering::Release);
        self.confirmed_frame.store(frame.unwrap_or(u64::MAX), Ordering::Release);
    }
}

impl Table {
    fn attached(&mut self, id: FollowerId) -> Option<&mut Follower> {
        self.followers.iter_mut().find(|follower| follower.attachment == Some(id))
    }

    /// Returns where the confirmations of the required members arrive that lack a position.
    fn lacking(&self, position: u64) -> impl Iterator<Item = &Arc<Confirmations>> {
        let lacks = move |one: &&Follower| one.is_required && one.confirmed < position;
        self.followers.iter().filter(lacks).filter_map(|follower| follower.confirmations.as_ref())
    }

    /// Returns the entry of a member, which is made if there is none.
    fn entry(&mut self, member: &str, now: Moment) -> &mut Follower {
        let found = self.followers.iter().position(|follower| follower.member == member);
        let at = found.unwrap_or_else(|| {
            self.followers.push(Follower {
                member: member.to_owned(),
                address: String::new(),
                level: RecordLevel::PRESENT,
                attachment: None,
                direct: None,
                confirmations: None,
                queue: VecDeque::new(),
                queued_bytes: 0,
                leases: PendingLeases::default(),
                owes_rest: false,
                is_sending: false,
                confirmed: 0,
                attached_at: 0,
                next_frame: 0,
                is_required: false,
                silent_since: Some(now),
                heard: now,
            });
            self.followers.len() - 1
        });
        &mut self.followers[at]
    }
}

impl Follower {
    /// Sends frames at once or queues them; ends the connection of a standby that is too far behind.
    /// Returns whether anything is left to do for the thread of the connection.
    fn ship(&mut self, shipment: &Shipment, now: Moment) -> bool {
        if self.attachment.is_none() {
            return false;
        }
        self.silent_since.get_or_insert(now);
        match self.send(shipment) {
            Sent::Whole => return false,
            // Makes the thread of the connection send the rest.
            Sent::Partly => {
                let rest = Shipment { frames: Arc::default(), position: shipment.position };
                self.queue.push_back(rest);
            }
            Sent::Nothing if self.queued_bytes + shipment.frames.len() > QUEUE_BYTES_MAX => {
                self.leave(now);
            }
            Sent::Nothing => {
                self.queued_bytes += shipment.frames.len();
                self.queue.push_back(shipment.clone());
            }
        }
        true
    }

    /// Sends frames if no earlier ones are left, and if that takes no wait.
    fn send(&self, shipment: &Shipment) -> Sent {
        let is_first = self.queue.is_empty() && !self.is_sending;
        match &self.direct {
            Some(direct) if is_first && shipment.frames.len() <= DIRECT_BYTES_MAX => {
                direct.try_send(shipment)
            }
            _ => Sent::Nothing,
        }
    }

    /// Takes out what is sent next.
    fn next(&mut self, bytes_max: usize) -> Option<NextShipment> {
        if !self.leases.notes.is_empty() {
            return Some(NextShipment::Leases(self.leases.notes.take_part()));
        }
        if let Some(shipment) = self.take(bytes_max) {
            return Some(NextShipment::Frames(shipment));
        }
        std::mem::take(&mut self.owes_rest).then_some(NextShipment::RestLogged)
    }

    fn has_unsent(&self) -> bool {
        self.is_sending || self.owes_rest || !self.queue.is_empty() || !self.leases.notes.is_empty()
    }

    fn take(&mut self, bytes_max: usize) -> Option<Shipment> {
        let mut shipment = self.queue.pop_front()?;
        self.queued_bytes -= shipment.frames.len();
        let is_small = |next: &Shipment, bytes: usize| bytes + next.frames.len() <= bytes_max;
        if self.queue.front().is_some_and(|next| is_small(next, shipment.frames.len())) {
            let mut joined = shipment.frames.to_vec();
            while self.queue.front().is_some_and(|next| is_small(next, joined.len()))
                && let Some(next) = self.queue.pop_front()
            {
                self.queued_bytes -= next.frames.len();
                joined.extend_from_slice(&next.frames);
                shipment.position = next.position;
            }
            shipment.frames = joined.into();
        }
        Some(shipment)
    }

    fn leave(&mut self, now: Moment) {
        self.attachment = None;
        self.clear();
        self.silent_since.get_or_insert(now);
    }

    fn clear(&mut self) {
        self.direct = None;
        self.confirmations = None;
        self.queue.clear();
        self.queued_bytes = 0;
        self.leases = PendingLeases::default();
        self.owes_rest = false;
        self.is_sending = false;
    }
}

impl PendingLeases {
    /// Adds notes. The first ones say that any object may have a lease, since earlier ones were not sent.
    /// Returns whether the standby has all that was noted.
    fn push(&mut self, notes: &LeaseNotes) -> bool {
        if std::mem::replace(&mut self.is_told, true) {
            return self.notes.join(notes);
        }
        self.notes = LeaseNotes::any();
        false
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::Result;

    use super::{super::confirmations::ConfirmationSource, *};

    fn members(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn attach(followers: &Followers, member: &str) -> FollowerId {
        followers.attach(&Newcomer { member, address: "", level: RecordLevel::PRESENT }, 0)
    }

    fn confirm(followers: &Followers, id: FollowerId, position: u64, next_frame: u64) {
        followers.confirm(id, StandbyProgress { position, next_frame });
    }

    fn shipment(frames: &[u8], position: u64) -> NextShipment {
        NextShipment::Frames(Shipment { frames: frames.into(), position })
    }

    #[test]
    fn slowest_required_member_counts() {
        let followers = Followers::default();
        assert_eq!(followers.confirmed(), u64::MAX);
        let ids = ["a", "b", "c"].map(|name| attach(&followers, name));
        for (id, position) in ids.into_iter().zip([30, 20, 10]) {
            confirm(&followers, id, position, position);
        }
        assert_eq!(followers.confirmed(), u64::MAX, "none is required");
        followers.require(&members(&["a", "b"]));
        assert_eq!((followers.confirmed(), followers.confirmed_frame()), (20, 20));
        confirm(&followers, ids[1], 40, 40);
        assert_eq!(followers.confirmed(), 30);
        confirm(&followers, ids[1], 5, 5);
        assert_eq!(followers.confirmed(), 30, "a late confirmation takes nothing back");
        followers.require(&members(&["b"]));
        assert_eq!(followers.confirmed(), 40);
    }

    #[test]
    fn lost_connection_does_not_shrink_set() {
        let followers = Followers::default();
        let id = attach(&followers, "a");
        followers.require(&members(&["a", "away"]));
        confirm(&followers, id, 7, 7);
        assert_eq!(followers.confirmed(), 0, "a member that never attached has nothing");
        followers.require(&members(&["a"]));
        followers.detach(id);
        assert_eq!(followers.confirmed(), 7);
        assert!(followers.status()[0].silent_since.is_some());
        // What it has confirmed counts, over whichever connection.
        let again = attach(&followers, "a");
        confirm(&followers, id, 100, 100);
        assert_eq!(followers.confirmed(), 7, "the earlier connection has ended");
        confirm(&followers, again, 9, 9);
        assert_eq!(followers.confirmed(), 9);
        followers.require(&members(&[]));
        followers.detach(again);
        assert_eq!((followers.confirmed(), followers.status()), (u64::MAX, Vec::new()));
        assert_eq!(followers.next_up_to(again, Duration::ZERO, 100), NextShipment::Detached);
    }

    #[test]
    fn standby_is_silent_while_it_owes_a_confirmation() {
        let followers = Followers::default();
        let id = attach(&followers, "a");
        let is_silent = || followers.status()[0].silent_since.is_some();
        assert!(is_silent(), "it has said nothing yet");
        confirm(&followers, id, 0, 1);
        assert!(!is_silent());
        followers.ship(b"frame", 5);
        assert!(is_silent());
        confirm(&followers, id, 5, 2);
        assert!(!is_silent() && followers.status()[0].is_near);
    }

    #[test]
    fn standby_that_still_reads_the_files_is_not_near() {
        let followers = Followers::default();
        let level = RecordLevel::PRESENT;
        let id = followers.attach(&Newcomer { member: "a", address: "", level }, 5);
        confirm(&followers, id, 0, 1000);
        assert!(!followers.status()[0].is_near, "the first part of several");
        confirm(&followers, id, 5, 2000);
        assert!(followers.status()[0].is_near);
    }

    #[test]
    fn queued_frames_are_joined_up_to_a_limit() {
        let followers = Followers::default();
        let id = attach(&followers, "a");
        for position in 1..=3 {
            followers.ship(b"frame", position);
        }
        assert_eq!(followers.next_up_to(id, Duration::ZERO, 10), shipment(b"frameframe", 2));
        assert_eq!(followers.next_up_to(id, Duration::ZERO, 10), shipment(b"frame", 3));
        assert_eq!(followers.next_up_to(id, Duration::ZERO, 10), NextShipment::None);
    }

    /// A socket whose buffer has space for so many bytes.
    #[derive(Debug)]
    struct Socket {
        space: AtomicUsize,
        sent: Mutex<Vec<u64>>,
    }

    impl DirectSender for Socket {
        fn try_send(&self, shipment: &Shipment) -> Sent {
            let (space, bytes) = (self.space.load(Ordering::Relaxed), shipment.frames.len());
            if space == 0 {
                return Sent::Nothing;
            }
            self.space.store(space.saturating_sub(bytes), Ordering::Relaxed);
            self.sent.lock().push(shipment.position);
            if bytes <= space { Sent::Whole } else { Sent::Partly }
        }
    }

    /// Confirmations that no thread reads.
    #[derive(Debug)]
    struct Unread;

    impl ConfirmationSource for Unread {
        fn receive(&mut self) -> Result<StandbyProgress> {
            unreachable!("no thread reads");
        }

        fn receive_within(&mut self, _: Duration) -> Result<Option<StandbyProgress>> {
            unreachable!("no thread reads");
        }
    }

    #[test]
    fn frames_are_sent_in_order_by_whichever_thread() {
        let followers = Followers::default();
        let id = attach(&followers, "a");
        let socket = Arc::new(Socket { space: AtomicUsize::new(8), sent: Mutex::default() });
        let set_space = |bytes| socket.space.store(bytes, Ordering::Relaxed);
        let next = || followers.next_up_to(id, Duration::ZERO, 100);
        let unread = Arc::new(Confirmations::new(id, Unread));
        followers.share_connection(id, Arc::<Socket>::clone(&socket), unread);
        followers.ship(b"frame", 1);
        assert_eq!(next(), NextShipment::None, "it was sent");
        followers.ship(b"frame", 2);
        assert_eq!(next(), shipment(b"", 2), "the thread of the connection sends the rest");
        set_space(100);
        followers.ship(b"frame", 3);
        assert_eq!(*socket.sent.lock(), [1, 2], "the rest is still being sent");
        assert_eq!(next(), shipment(b"frame", 3));
        assert_eq!(next(), NextShipment::None);
        set_space(0);
        followers.ship(b"frame", 4);
        set_space(100);
        followers.ship(b"frame", 5);
        assert_eq!(next(), shipment(b"frameframe", 5), "an earlier one was queued");
        assert_eq!(next(), NextShipment::None);
        followers.ship(&[0; DIRECT_BYTES_MAX + 1], 6);
        assert!(matches!(next(), NextShipment::Frames(_)), "too large to be copied");
        assert_eq!(*socket.sent.lock(), [1, 2]);
    }

    #[test]
    fn leases_are_told_from_the_attachment_on() {
        let notes = |versions: &[u64]| LeaseNotes {
            leases: versions.iter().map(|&version| (version, 10_000)).collect(),
            ..LeaseNotes::default()
        };
        let last = LeaseNotes { is_whole: true, ..LeaseNotes::default() };
        let followers = Followers::default();
        let id = attach(&followers, "a");
        let next = |id| followers.next(id, Duration::ZERO);
        assert!(followers.tell_leases(&notes(&[1])), "earlier ones are not known");
        assert_eq!(next(id), NextShipment::Leases(LeaseNotes::any()));
        assert!(!followers.tell_leases(&notes(&[])));
        assert_eq!(next(id), NextShipment::None);
        followers.ship(b"frame", 1);
        assert!(!followers.tell_leases(&notes(&[2])));
        followers.tell_leases(&notes(&[3]));
        assert_eq!(next(id), NextShipment::Leases(notes(&[2, 3])));
        assert_eq!(next(id), shipment(b"frame", 1));
        followers.tell_leases(&notes(&[4]));
        let again = attach(&followers, "a");
        assert_eq!(next(again), NextShipment::None);
        assert!(followers.tell_leases(&last));
        assert!(!followers.tell_leases(&last));
        let whole = LeaseNotes { is_any: true, ..last };
        assert_eq!(next(again), NextShipment::Leases(whole));
    }

    #[test]
    fn standby_too_far_behind_is_detached() {
        let followers = Followers::default();
        let id = attach(&followers, "a");
        followers.ship(&vec![0; QUEUE_BYTES_MAX + 1], 6);
        assert_eq!(followers.next_up_to(id, Duration::ZERO, 100), NextShipment::Detached);
    }
}
