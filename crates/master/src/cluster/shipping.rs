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
    native_token::{Challenge, ClientProof},
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
        let Some(count) = self.log.record(SystemClock.now(), peer.ip(), error) else { return };
        if is_refused_version {
            tracing::warn!(%peer, %error, count, "refused a standby of another version");
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
        let proof: ClientProof = channel.receive_up_to(GREETING_BYTES_MAX)?;
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
    use std::net::TcpListener;

    use super::*;
    use crate::{service::unproven::ConnectionPermits, state::Rules};

    #[test]
    fn refused_standby_of_another_version_is_counted() {
        let service = Arc::new(Service::new(Rules::default(), SystemClock::shared()));
        let (shared, member) = (Arc::clone(&service), "a".to_owned());
        let source = LogSource::new(shared, View(1), Vec::new(), member, None, Arc::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let standby = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut greeting = standby::standby_greeting();
        greeting[8] += 1;
        let (stream, _) = listener.accept().unwrap();
        let place = Arc::new(ConnectionPermits::new(8).take_in());
        Arc::new(source).serve(stream, BytesMut::from(&greeting[..]), place);
        let mut channel = Channel::over(standby, BytesMut::new()).unwrap();
        let answer: ServerGreeting = channel.receive_up_to(GREETING_BYTES_MAX).unwrap();
        let refusal = answer.check_refusal().unwrap_err().to_string();
        for version in [format!("standby_version={}", standby::VERSION + 1), "our_version=2".into()]
        {
            assert!(refusal.contains(&version), "{refusal}");
        }
        let deadline = SystemClock.now() + Duration::from_secs(20);
        while service.shared().refused_versions().count() == 0 {
            assert!(!deadline.has_passed(SystemClock.now()), "it is not counted");
            thread::yield_now();
        }
    }
}
