//! The leader's side: sends the log to each standby that connects, and takes its confirmations.

use std::{
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use bytes::BytesMut;
use mooncake_base::{Clock, Error, ErrorCode, Result, SystemClock, Token, sync::Mutex};
use mooncake_election::View;
use mooncake_os::threads::{self, start_scoped};
use mooncake_proto::{
    native_frame::{self, GREETING_BYTES_MAX, ServerGreeting},
    native_token::{Challenge, ClientProof, missing_token},
    standby::{
        self, Attach, Attached, Confirm, Frames, FromLeader, FromStandby, SnapshotPart, Start,
        ViewStart,
    },
};

use super::{
    channel::{Channel, Closer, KEEPALIVE, Sender},
    counts::LogCounts,
    lease_notes, not_leader,
    peer_log::PeerLog,
    views::LogHistory,
};
use crate::{
    journal::{
        ConfirmationSource, Confirmations, DirectSender, FollowerId, Journal, Newcomer,
        NextShipment, Sent, Shipment, StandbyProgress, level::RecordLevel,
    },
    service::{Service, VERSION, unproven::ConnectionPlace},
};

/// Maximum number of standbys that are connected.
const STANDBYS_MAX: usize = 16;

/// Maximum number of peers that have not shown yet that they are standbys.
const UNPROVEN_MAX: usize = 32;

/// The log of a leader, as standbys get it.
#[derive(Debug)]
pub(crate) struct LogSource {
    service: Arc<Service>,
    view: View,
    /// The views of the log, the leader's own included.
    views: Vec<ViewStart>,
    /// The id of the leader.
    member: String,
    token: Option<Token>,
    counts: Arc<LogCounts>,
    connections: Mutex<Vec<Closer>>,
    /// Number of peers that have not shown yet that they are standbys.
    unproven: AtomicUsize,
    /// The log lines about peers that are refused.
    log: PeerLog,
    is_closed: AtomicBool,
}

impl LogSource {
    pub(super) fn new(
        service: Arc<Service>,
        view: View,
        views: Vec<ViewStart>,
        member: String,
        token: Option<Token>,
        counts: Arc<LogCounts>,
    ) -> Self {
        Self {
            service,
            view,
            views,
            member,
            token,
            counts,
            connections: Mutex::default(),
            unproven: AtomicUsize::new(0),
            log: PeerLog::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Serves a connection that began with a standby's greeting, on a thread of its own. `read` are the
    /// bytes that were read already.
    pub(crate) fn serve(
        self: &Arc<Self>,
        stream: TcpStream,
        read: BytesMut,
        place: Arc<ConnectionPlace>,
    ) {
        // It may have gone already; then nothing is to be said of it.
        let Ok(peer) = stream.peer_addr() else { return };
        if self.unproven.fetch_add(1, Ordering::AcqRel) >= UNPROVEN_MAX {
            self.unproven.fetch_sub(1, Ordering::AcqRel);
            let error = Error::new(ErrorCode::RPC_FAIL, "too many peers connect as standbys");
            self.record_end(peer, &error.with("limit", UNPROVEN_MAX));
            return;
        }
        let source = Arc::clone(self);
        let serve = move || {
            let proven = source.prove(stream, read, &place);
            source.unproven.fetch_sub(1, Ordering::AcqRel);
            if let Err(error) = proven.and_then(|channel| source.run(channel)) {
                source.record_end(peer, &error);
            }
        };
        if let Err(error) = threads::start_detached("mc-ship", serve) {
            self.unproven.fetch_sub(1, Ordering::AcqRel);
            tracing::error!(%error, "a thread for a standby cannot be started");
        }
    }

    /// Counts and logs that the connection of a standby was refused, or ended.
    fn record_end(&self, peer: SocketAddr, error: &Error) {
        let is_refused_version = error.code() == ErrorCode::INVALID_VERSION;
        if is_refused_version {
            self.service.shared().refused_versions().add();
        }
        let is_refused_token = error.code() == ErrorCode::ILLEGAL_CLIENT;
        if is_refused_token {
            self.counts.refused_tokens.increment();
        }
        let Some(count) = self.log.record(SystemClock.now(), peer.ip(), error) else { return };
        if is_refused_version {
            tracing::warn!(%peer, %error, count, "refused a standby of another version");
        } else if is_refused_token {
            tracing::warn!(%peer, %error, count, "refused a standby: it does not show the token of this master");
        } else {
            tracing::warn!(%peer, %error, count, "the connection of a standby ended");
        }
    }

    /// Ends all connections, and refuses later ones.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        for connection in self.connections.lock().drain(..) {
            connection.close();
        }
    }

    /// Exchanges greetings. Returns the connection of a peer that knows the token.
    fn prove(&self, stream: TcpStream, read: BytesMut, place: &ConnectionPlace) -> Result<Channel> {
        let mut channel = Channel::over(stream, read)?;
        self.greet(&mut channel)?;
        channel.begin_checksums();
        place.prove()?;
        self.keep(channel.closer()?)?;
        Ok(channel)
    }

    fn run(&self, channel: Channel) -> Result<()> {
        let mut channel = channel;
        let first: FromStandby = channel.receive()?;
        let Some(attach) = first.attach else { return Err(malformed("it does not attach")) };
        let served = self.attach(&mut channel, &attach);
        if let Err(error) = &served {
            // The standby may be gone.
            let refusal = Some(error.into());
            let _ = channel.send(&FromLeader { refusal, ..FromLeader::default() });
        }
        served
    }

    fn keep(&self, closer: Closer) -> Result<()> {
        let mut connections = self.connections.lock();
        // Ended ones are forgotten with the oldest: a standby has one connection at a time.
        if connections.len() >= STANDBYS_MAX {
            connections.remove(0).close();
        }
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Error::closed("this master does not lead any more"));
        }
        connections.push(closer);
        Ok(())
    }

    fn greet(&self, channel: &mut Channel) -> Result<()> {
        let greeting: [u8; 12] = channel.receive_exact()?;
        let version = u32::from_le_bytes([greeting[8], greeting[9], greeting[10], greeting[11]]);
        let full = ServerGreeting {
            version: native_frame::VERSION,
            master: self.service.identity().to_vec(),
            ..ServerGreeting::default()
        };
        if version != standby::VERSION {
            let text = "the standby speaks another version of the log's protocol; install the version \
                        of the leader";
            let error = Error::new(ErrorCode::INVALID_VERSION, text)
                .with("standby_version", version)
                .with("our_version", standby::VERSION);
            channel.send(&ServerGreeting { refusal: Some((&error).into()), ..full })?;
            return Err(error);
        }
        let Some(token) = &self.token else { return channel.send(&full) };
        let challenge = Challenge::new();
        channel.send(&challenge.greeting())?;
        // A standby without a token hangs up here.
        let proof: ClientProof = channel
            .receive_up_to(GREETING_BYTES_MAX)
            .map_err(|error| missing_token().caused_by(error))?;
        match challenge.check(token, &proof) {
            Ok(exchange) => {
                let mut greeting = full;
                exchange.seal(token, &mut greeting);
                channel.send(&greeting)
            }
            Err(error) => {
                let refusal = Some((&error).into());
                channel.send(&ServerGreeting { refusal, ..ServerGreeting::default() })?;
                Err(error)
            }
        }
    }

    fn attach(&self, channel: &mut Channel, attach: &Attach) -> Result<()> {
        let journal = self.service.shared().journal().ok_or_else(|| Error::internal("no log"))?;
        if !self.service.shared().may_answer() {
            return Err(not_leader(None));
        }
        if attach.member == self.member {
            let text = "the standby has the id of the leader: its state directory is a copy; give it an \
                        empty one";
            return Err(Error::new(ErrorCode::PERSISTENT_FAIL, text).with("member", &self.member));
        }
        if attach.level < journal.level().get().0 {
            let text = "the standby is of an earlier version, which cannot read the records of this log: \
                        install the version of the leader";
            return Err(Error::new(ErrorCode::INVALID_VERSION, text)
                .with("standby_version", &attach.version)
                .with("our_version", VERSION));
        }
        let (member, address) = (&attach.member, &attach.address);
        tracing::info!(member, address, version = attach.version, "a standby attaches");
        let attached = answer_attach(journal, self.view, &self.views, attach)?;
        let (start, snapshot) = (attached.start(), attached.snapshot);
        channel.send(&FromLeader { attached: Some(attached), ..FromLeader::default() })?;
        let next_frame = match start {
            Start::Place => attach.next_frame,
            Start::FirstFrame => 1,
            Start::Snapshot => self.send_snapshot(journal, channel, snapshot)?,
        };
        let (id, position) = self.catch_up(journal, channel, attach, next_frame)?;
        let ended = self.follow(journal, channel, id, position);
        journal.followers().detach(id);
        ended
    }

    /// Sends the frames of the files. Returns the standby's place among those that follow the log.
    fn catch_up(
        &self,
        journal: &Journal,
        channel: &mut Channel,
        attach: &Attach,
        next_frame: u64,
    ) -> Result<(FollowerId, u64)> {
        let mut source = journal.catch_up(next_frame);
        let (member, address) = (&attach.member[..], &attach.address[..]);
        let standby = Newcomer { member, address, level: RecordLevel(attach.level) };
        loop {
            let missed = source.next(&standby)?;
            let position = missed.attached.map_or(0, |(_, position)| position);
            let shipment = Shipment { frames: missed.bytes.into(), position };
            channel.send(&frames_message(journal, &shipment))?;
            self.counts.sent_bytes.add(shipment.frames.len() as u64);
            if let Some(attached) = missed.attached {
                source.end();
                return Ok(attached);
            }
        }
    }

    /// Sends the frames that the thread that writes them does not, while another thread takes the
    /// confirmations that no thread that waits for them does.
    fn follow(
        &self,
        journal: &Journal,
        channel: &mut Channel,
        id: FollowerId,
        position: u64,
    ) -> Result<()> {
        let confirmations = Arc::new(Confirmations::new(id, Incoming(channel.split()?)));
        let closer = channel.closer()?;
        let sender = Arc::new(channel.sender()?);
        let (service, counts) = (Arc::downgrade(&self.service), Arc::clone(&self.counts));
        let direct = Direct { service, sender: Arc::clone(&sender), counts };
        let shared = Arc::clone(&confirmations);
        journal.followers().share_connection(id, Arc::new(direct), shared);
        let mut position = position;
        thread::scope(|scope| {
            let read = || confirmations.read_all(journal);
            let confirming = start_scoped(scope, "mc-confirm", read).map_err(|source| {
                Error::internal("a thread for a standby cannot be started").caused_by(source)
            })?;
            let sent = loop {
                let mut shipment = Shipment { frames: Arc::default(), position };
                let (mut leases, mut is_rest_logged) = (None, false);
                match journal.followers().next(id, KEEPALIVE) {
                    NextShipment::Frames(frames) => shipment = frames,
                    NextShipment::Leases(notes) => leases = Some(notes),
                    NextShipment::RestLogged => is_rest_logged = true,
                    NextShipment::None => {}
                    NextShipment::Detached => break Ok(()),
                }
                position = shipment.position;
                let frames = Frames {
                    leases: leases.map(lease_notes::to_message),
                    is_rest_logged,
                    ..frames(journal, &shipment)
                };
                let message = FromLeader { frames: Some(frames), ..FromLeader::default() };
                if let Err(error) = sender.send(&message) {
                    break Err(error);
                }
                self.counts.sent_bytes.add(shipment.frames.len() as u64);
            };
            closer.close();
            let confirmed =
                confirming.join().unwrap_or_else(|_| Err(Error::internal("it panicked")));
            confirmed.and(sent)
        })
    }

    /// Sends a snapshot file, and waits until the standby has made it its own. Returns the frame that the
    /// standby lacks then.
    fn send_snapshot(&self, journal: &Journal, channel: &mut Channel, number: u64) -> Result<u64> {
        for_each_part(journal, number, |bytes, message| {
            self.counts.sent_bytes.add(bytes as u64);
            channel.send(&message)
        })?;
        // It says that it is alive while it reads the snapshot.
        loop {
            let StandbyProgress { next_frame, .. } = confirmation(channel)?;
            if next_frame > 0 {
                return Ok(next_frame);
            }
        }
    }
}

/// Reads a snapshot file, and passes it in messages to `send`, each with the number of its bytes.
pub(super) fn for_each_part(
    journal: &Journal,
    number: u64,
    mut send: impl FnMut(usize, FromLeader) -> Result<()>,
) -> Result<()> {
    let mut offset = 0;
    loop {
        let bytes = journal.snapshots().read(number, offset)?;
        let (length, is_last) = (bytes.len(), bytes.is_empty());
        offset += length as u64;
        let part = Some(SnapshotPart { bytes, is_last });
        send(length, FromLeader { part, ..FromLeader::default() })?;
        if is_last {
            return Ok(());
        }
    }
}

/// Sends to one standby from the thread that writes the log.
#[derive(Debug)]
struct Direct {
    service: Weak<Service>,
    sender: Arc<Sender>,
    counts: Arc<LogCounts>,
}

impl DirectSender for Direct {
    fn try_send(&self, shipment: &Shipment) -> Sent {
        let Some(service) = self.service.upgrade() else { return Sent::Nothing };
        let Some(journal) = service.shared().journal() else { return Sent::Nothing };
        let sent = self.sender.try_send(&frames_message(journal, shipment));
        if sent != Sent::Nothing {
            self.counts.sent_bytes.add(shipment.frames.len() as u64);
        }
        sent
    }
}

/// Decides how a standby gets what it lacks. `views` are those of the leader's log.
///
/// # Errors
/// A file of the log cannot be read.
pub(super) fn answer_attach(
    journal: &Journal,
    view: View,
    views: &[ViewStart],
    attach: &Attach,
) -> Result<Attached> {
    let own = LogHistory { views, end: journal.end_frame() };
    let theirs = LogHistory { views: &attach.views, end: attach.next_frame };
    let is_same = journal.timeline_id().is_some_and(|id| id[..] == attach.timeline_id[..]);
    let goes_on = is_same
        && theirs.is_prefix_of(&own)
        && journal.catch_up(attach.next_frame).is_possible()?;
    let (start, snapshot) = match journal.snapshots().newest()? {
        _ if goes_on => (Start::Place, 0),
        Some(snapshot) => (Start::Snapshot, snapshot),
        None => (Start::FirstFrame, 0),
    };
    Ok(Attached {
        view: view.0,
        timeline_id: journal.timeline_id().unwrap_or_default().to_vec(),
        views: views.to_vec(),
        start: start.into(),
        end_frame: journal.end_frame(),
        snapshot,
    })
}

fn frames(journal: &Journal, shipment: &Shipment) -> Frames {
    let (bytes, position) = (shipment.frames.to_vec(), shipment.position);
    Frames { bytes, position, level: journal.level().get().0, ..Frames::default() }
}

fn frames_message(journal: &Journal, shipment: &Shipment) -> FromLeader {
    FromLeader { frames: Some(frames(journal, shipment)), ..FromLeader::default() }
}

/// The end of a connection at which the confirmations of a standby arrive.
#[derive(Debug)]
struct Incoming(Channel);

impl ConfirmationSource for Incoming {
    fn receive(&mut self) -> Result<StandbyProgress> {
        confirmation(&mut self.0)
    }

    fn receive_within(&mut self, time: Duration) -> Result<Option<StandbyProgress>> {
        self.0.receive_within(time)?.map(confirmed).transpose()
    }
}

fn confirmation(channel: &mut Channel) -> Result<StandbyProgress> {
    channel.receive().and_then(confirmed)
}

fn confirmed(message: FromStandby) -> Result<StandbyProgress> {
    let Confirm { position, next_frame } =
        message.confirm.ok_or_else(|| malformed("it confirms nothing"))?;
    Ok(StandbyProgress { position, next_frame })
}

fn malformed(why: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the message of a standby is malformed").with("because", why)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, TcpListener};

    use mooncake_proto::native_token;

    use super::*;
    use crate::{
        journal::{Directory, LogSync, SimulatedDisk},
        service::unproven::ConnectionPermits,
        state::Rules,
    };

    const TOKEN: &str = "open sesame";

    /// A leader in view 1.
    fn leader(service: Service, token: Option<&str>) -> Arc<LogSource> {
        let (service, member) = (Arc::new(service), "a".to_owned());
        let token = token.map(|token| Token::new(token).unwrap());
        let (view, views) = (View(1), vec![ViewStart { view: 1, first_frame: 1 }]);
        Arc::new(LogSource::new(service, view, views, member, token, Arc::default()))
    }

    fn without_log() -> Service {
        Service::new(Rules::default(), SystemClock::shared())
    }

    fn with_log() -> Service {
        let directory = Directory::on(Arc::new(SimulatedDisk::default()));
        let recovered = Journal::open(directory, LogSync::Never).unwrap();
        Service::from_log(Rules::default(), SystemClock::shared(), recovered).0
    }

    /// Connects to a leader, which has read the greeting of a standby already.
    fn connect(leader: &Arc<LogSource>, greeting: &[u8]) -> Channel {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let standby = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let place = Arc::new(ConnectionPermits::new(8).take_in());
        leader.serve(stream, BytesMut::from(greeting), place);
        Channel::over(standby, BytesMut::new()).unwrap()
    }

    #[track_caller]
    fn eventually(what: &str, holds: impl Fn() -> bool) {
        let deadline = SystemClock.now() + Duration::from_secs(20);
        while !holds() {
            assert!(!deadline.has_passed(SystemClock.now()), "not in time: {what}");
            thread::yield_now();
        }
    }

    /// Returns whether there is a line in the log about such a refusal of this host.
    fn has_logged(leader: &LogSource, code: ErrorCode) -> bool {
        let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
        leader.log.record(SystemClock.now(), host, &Error::new(code, "again")).is_none()
    }

    #[test]
    fn refused_standby_of_another_version_is_counted() {
        let leader = leader(without_log(), None);
        let mut greeting = standby::standby_greeting();
        greeting[8] += 1;
        let mut channel = connect(&leader, &greeting);
        let answer: ServerGreeting = channel.receive_up_to(GREETING_BYTES_MAX).unwrap();
        let refusal = answer.check_refusal().unwrap_err().to_string();
        for version in [format!("standby_version={}", standby::VERSION + 1), "our_version=2".into()]
        {
            assert!(refusal.contains(&version), "{refusal}");
        }
        let count = || leader.service.shared().refused_versions().count();
        eventually("it is counted", || count() == 1);
    }

    /// Attaches as a standby that knows the kinds of records of a level; returns the answer.
    fn attach(leader: &Arc<LogSource>, level: u32) -> FromLeader {
        let mut channel = connect(leader, &standby::standby_greeting());
        let _: ServerGreeting = channel.receive_up_to(GREETING_BYTES_MAX).unwrap();
        channel.begin_checksums();
        let (member, version) = ("b".to_owned(), "0.1-old".to_owned());
        let attach = Attach { member, version, level, next_frame: 1, ..Attach::default() };
        channel.send(&FromStandby { attach: Some(attach), confirm: None }).unwrap();
        channel.receive().unwrap()
    }

    #[test]
    fn standby_that_cannot_read_the_log_is_refused_and_counted() {
        let leader = leader(with_log(), None);
        let level = leader.service.shared().journal().unwrap().level().get().0;
        let count = || leader.service.shared().refused_versions().count();
        for able in [level, level + 1] {
            assert!(attach(&leader, able).attached.is_some(), "level {able}");
        }
        assert_eq!(count(), 0);
        let refusal = Error::from(&attach(&leader, level - 1).refusal.unwrap());
        assert_eq!(refusal.code(), ErrorCode::INVALID_VERSION);
        let text = refusal.to_string();
        for part in ["standby_version=0.1-old", &format!("our_version={VERSION}")] {
            assert!(text.contains(part), "{text}");
        }
        eventually("it is counted", || count() == 1);
        eventually("it is logged", || has_logged(&leader, ErrorCode::INVALID_VERSION));
    }

    #[test]
    fn refused_token_of_a_standby_is_counted() {
        let leader = leader(without_log(), Some(TOKEN));
        let challenged = || {
            let mut channel = connect(&leader, &standby::standby_greeting());
            let greeting: ServerGreeting = channel.receive_up_to(GREETING_BYTES_MAX).unwrap();
            (channel, greeting)
        };
        let prove = |token: &str| {
            let (mut channel, greeting) = challenged();
            let token = Token::new(token).unwrap();
            native_token::authenticate(Some(&token), greeting, |proof| {
                channel.send(proof)?;
                channel.receive_up_to(GREETING_BYTES_MAX)
            })
        };
        let count = || leader.counts.snapshot().refused_tokens;
        prove(TOKEN).unwrap();
        let refusal = prove("another one").unwrap_err();
        assert_eq!(refusal.code(), ErrorCode::ILLEGAL_CLIENT, "{refusal}");
        eventually("another token is counted", || count() == 1);
        eventually("it is logged", || has_logged(&leader, ErrorCode::ILLEGAL_CLIENT));
        drop(challenged());
        eventually("no token is counted", || count() == 2);
        assert_eq!(leader.service.shared().refused_versions().count(), 0);
    }
}
