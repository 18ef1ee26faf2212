//! A connection between two masters: messages in frames of the native protocol, over a blocking socket.
//! After the greetings, each frame is followed by a checksum of its bytes. The frames of the log in a
//! message have checksums of their own, but not the positions, confirmations and leases beside them.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    time::Duration,
};

use bytes::{Buf as _, BytesMut};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock, Token, sync::Mutex};
use mooncake_os::spin_wait::{SpinWait, peek};
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX, Filled, GREETING_BYTES_MAX, ServerGreeting},
    native_token,
    standby::standby_greeting,
};
use prost::Message;
use socket2::{Domain, SockRef, Socket, Type};

use crate::journal::Sent;

/// Time after which a peer that sends nothing is given up. Each side sends something at least every
/// [`KEEPALIVE`].
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// Time between messages of a leader that has nothing to say.
pub(super) const KEEPALIVE: Duration = Duration::from_millis(500);

/// Time in which a message must be written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Length of the checksum behind a frame.
pub(super) const CHECKSUM_BYTES: usize = 4;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Channel {
    stream: TcpStream,
    /// For how long a read waits.
    read_timeout: Duration,
    input: native_frame::Reader,
    output: BytesMut,
    /// Whether messages have checksums: those after the greetings do.
    has_checksums: bool,
    /// A message came whose checksum is that of other bytes.
    is_damaged: bool,
    /// Whether it is worthwhile to poll for a message that is expected.
    spin_wait: SpinWait,
}

impl Channel {
    /// Takes a connected socket and the bytes that were read from it already.
    ///
    /// # Errors
    /// The socket refuses an option.
    pub(super) fn over(stream: TcpStream, input: BytesMut) -> Result<Self> {
        let set = || {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(SILENCE_MAX))?;
            stream.set_write_timeout(Some(WRITE_TIMEOUT))
        };
        set().map_err(broken)?;
        Ok(Self {
            stream,
            read_timeout: SILENCE_MAX,
            input: native_frame::Reader::new(input),
            output: BytesMut::new(),
            has_checksums: false,
            is_damaged: false,
            spin_wait: SpinWait::giving_way(),
        })
    }

    /// Connects to the addresses of a leader as a standby, and proves the token. `keep` takes what ends the
    /// connection from another thread, also while it is made; it fails once the end has come.
    ///
    /// # Errors
    /// The leader cannot be reached, does not lead, or has another token, or `keep` failed.
    pub(super) fn connect(
        addresses: &[SocketAddr],
        token: Option<&Token>,
        deadline: Moment,
        keep: impl Fn(Closer) -> Result<()>,
    ) -> Result<Self> {
        let mut last = io::Error::other("the host name has no address");
        for (index, address) in addresses.iter().enumerate() {
            let left = deadline.left(SystemClock.now());
            // A silent address must leave time for the addresses after it.
            let share = left / u32::try_from(addresses.len() - index).unwrap_or(1);
            if share.is_zero() {
                last = io::ErrorKind::TimedOut.into();
                break;
            }
            let socket = Socket::new(Domain::for_address(*address), Type::STREAM, None)
                .map_err(unreachable)?;
            keep(Closer(socket.try_clone().map_err(unreachable)?.into()))?;
            match socket.connect_timeout(&(*address).into(), share) {
                Ok(()) => {
                    let mut channel = Self::over(socket.into(), BytesMut::new())?;
                    channel.greet(token)?;
                    channel.begin_checksums();
                    return Ok(channel);
                }
                Err(error) => last = error,
            }
        }
        Err(unreachable(last))
    }

    fn greet(&mut self, token: Option<&Token>) -> Result<()> {
        self.stream.write_all(&standby_greeting()).map_err(broken)?;
        let greeting: ServerGreeting = self.receive_up_to(GREETING_BYTES_MAX)?;
        native_token::authenticate(token, greeting, |proof| {
            self.send(proof)?;
            self.receive_up_to(GREETING_BYTES_MAX)
        })?;
        Ok(())
    }

    /// Ends the greetings: from here on, messages of both sides have checksums.
    pub(super) const fn begin_checksums(&mut self) {
        self.has_checksums = true;
        self.input.set_trailer_bytes(CHECKSUM_BYTES);
    }

    /// Returns whether a message was damaged on its way.
    pub(super) const fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    /// Returns a second handle, for another thread.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(super) fn split(&mut self) -> Result<Self> {
        let stream = self.stream.try_clone().map_err(broken)?;
        Ok(Self {
            stream,
            read_timeout: self.read_timeout,
            input: self.input.split_off(),
            output: BytesMut::new(),
            has_checksums: self.has_checksums,
            is_damaged: false,
            spin_wait: SpinWait::giving_way(),
        })
    }

    /// Returns the sending end, for several threads. This one sends nothing any more.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(super) fn sender(&self) -> Result<Sender> {
        let stream = self.stream.try_clone().map_err(broken)?;
        Ok(Sender { stream, has_checksums: self.has_checksums, unsent: Mutex::default() })
    }

    /// Returns a handle that ends the connection.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(super) fn closer(&self) -> Result<Closer> {
        self.stream.try_clone().map(Closer).map_err(broken)
    }

    /// Reads so many bytes.
    ///
    /// # Errors
    /// The connection broke, or the peer is silent.
    pub(super) fn receive_exact<const N: usize>(&mut self) -> Result<[u8; N]> {
        loop {
            if let Some(bytes) = self.input.take_bytes() {
                return Ok(bytes);
            }
            self.fill().map_err(broken)?;
        }
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// The connection broke, the peer is silent, or the message is malformed.
    pub(super) fn receive<M: Message + Default>(&mut self) -> Result<M> {
        self.receive_up_to(FRAME_BYTES_MAX)
    }

    /// Waits for a message of limited size.
    ///
    /// # Errors
    /// Those of [`receive`](Self::receive).
    pub(super) fn receive_up_to<M: Message + Default>(&mut self, limit: usize) -> Result<M> {
        let message = self.next_message(limit, SILENCE_MAX)?;
        message.ok_or_else(|| broken(io::ErrorKind::TimedOut.into()))
    }

    /// Waits for a message that the peer is about to send, for a time; returns `None` if none came.
    ///
    /// # Errors
    /// The connection broke, or the message is malformed.
    pub(super) fn receive_within<M: Message + Default>(
        &mut self,
        time: Duration,
    ) -> Result<Option<M>> {
        if self.input.is_empty() {
            // What came is read below.
            let _ = self.spin_wait.poll(|| peek(&self.stream));
        }
        self.next_message(FRAME_BYTES_MAX, time)
    }

    /// Waits for a message of limited size; returns `None` if nothing came for a time.
    fn next_message<M: Message + Default>(
        &mut self,
        limit: usize,
        time: Duration,
    ) -> Result<Option<M>> {
        self.set_read_timeout(time)?;
        loop {
            if let Some(message) = self.take_message(limit)? {
                return Ok(Some(message));
            }
            match self.fill() {
                Err(error) if is_timeout(&error) => return Ok(None),
                filled => filled.map_err(broken)?,
            }
        }
    }

    fn set_read_timeout(&mut self, timeout: Duration) -> Result<()> {
        if self.read_timeout != timeout {
            self.stream.set_read_timeout(Some(timeout)).map_err(broken)?;
            self.read_timeout = timeout;
        }
        Ok(())
    }

    /// Returns the next message if it was read as a whole.
    ///
    /// # Errors
    /// The message is malformed, or was damaged on its way.
    fn take_message<M: Message + Default>(&mut self, limit: usize) -> Result<Option<M>> {
        if self.has_checksums {
            check_frame(&self.input).inspect_err(|_| self.is_damaged = true)?;
        }
        self.input.take_message(limit)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection broke, or the peer does not read.
    pub(super) fn send(&mut self, message: &impl Message) -> Result<()> {
        self.output.clear();
        send(&self.stream, message, self.has_checksums, &mut self.output)
    }

    fn fill(&mut self) -> io::Result<()> {
        match self.input.fill(|into| self.stream.read(into))? {
            Filled::Open => Ok(()),
            Filled::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// The sending end of a connection, for several threads.
#[derive(Debug)]
pub(super) struct Sender {
    stream: TcpStream,
    has_checksums: bool,
    /// The end of the last message.
    unsent: Mutex<BytesMut>,
}

impl Sender {
    /// Sends a message, after what is left of an earlier one.
    ///
    /// # Errors
    /// The connection broke, or the peer does not read.
    pub(super) fn send(&self, message: &impl Message) -> Result<()> {
        send(&self.stream, message, self.has_checksums, &mut self.unsent.lock())
    }

    /// Sends a message as far as that takes no wait: nothing while another thread sends. A broken
    /// connection is noticed by the next [`send`](Self::send).
    pub(super) fn try_send(&self, message: &impl Message) -> Sent {
        let Some(mut unsent) = self.unsent.try_lock().filter(|unsent| unsent.is_empty()) else {
            return Sent::Nothing;
        };
        if encode(message, self.has_checksums, &mut unsent).is_err() {
            return Sent::Nothing;
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        match SockRef::from(&self.stream).send_with_flags(&unsent, flags).unwrap_or(0) {
            0 => {
                unsent.clear();
                Sent::Nothing
            }
            sent => {
                unsent.advance(sent);
                if unsent.is_empty() { Sent::Whole } else { Sent::Partly }
            }
        }
    }
}

/// Ends a connection from another thread, also one that is being made.
#[derive(Debug)]
pub(super) struct Closer(TcpStream);

impl Closer {
    /// Ends the connection. Connecting, reads and writes under way fail.
    pub(super) fn close(&self) {
        // Fails if the peer has already closed it.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Sends a message, after what `unsent` has of an earlier one.
fn send(
    mut stream: &TcpStream,
    message: &impl Message,
    has_checksums: bool,
    unsent: &mut BytesMut,
) -> Result<()> {
    encode(message, has_checksums, unsent)?;
    stream.write_all(unsent).map_err(broken)?;
    unsent.clear();
    native_frame::release_large(unsent);
    Ok(())
}

/// Checks the checksum behind the next frame, if both were read as a whole.
///
/// # Errors
/// The frame was damaged on its way.
pub(super) fn check_frame(input: &native_frame::Reader) -> Result<()> {
    if let Some((frame, checksum)) = input.next_frame()
        && crc32fast::hash(frame).to_le_bytes() != checksum
    {
        let text = "a message between two masters was damaged on its way";
        return Err(Error::new(ErrorCode::RPC_FAIL, text).with("bytes", frame.len()));
    }
    Ok(())
}

/// Appends a message as a frame, with a checksum behind it if messages have one.
///
/// # Errors
/// The message is larger than a frame may be.
pub(super) fn encode(
    message: &impl Message,
    has_checksums: bool,
    into: &mut BytesMut,
) -> Result<()> {
    let start = into.len();
    native_frame::encode(message, into)?;
    if has_checksums {
        let checksum = crc32fast::hash(&into[start..]);
        into.extend_from_slice(&checksum.to_le_bytes());
    }
    Ok(())
}

fn unreachable(source: io::Error) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the other master cannot be reached").caused_by(source)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn broken(source: io::Error) -> Error {
    let text = if is_timeout(&source) {
        "the other master is silent"
    } else {
        "the connection between two masters broke"
    };
    Error::new(ErrorCode::RPC_FAIL, text).caused_by(source)
}

#[cfg(test)]
mod tests {
    use std::{fmt, net::TcpListener, sync::mpsc, thread};

    use mooncake_proto::standby::{Confirm, Frames, FromLeader, FromStandby, Leases, SnapshotPart};

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    /// Returns two connected sockets.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn channel(stream: TcpStream) -> Channel {
        let mut channel = Channel::over(stream, BytesMut::new()).unwrap();
        channel.begin_checksums();
        channel
    }

    /// Returns a message as it is sent.
    fn sent(message: &impl Message) -> Vec<u8> {
        let (one, mut other) = pair();
        channel(one).send(message).unwrap();
        let mut bytes = Vec::new();
        other.read_to_end(&mut bytes).unwrap();
        bytes
    }

    /// Receives bytes after which the peer sends nothing more.
    fn received<M: Message + Default>(bytes: &[u8]) -> (Result<M>, bool) {
        let (mut one, other) = pair();
        one.write_all(bytes).unwrap();
        drop(one);
        let mut channel = channel(other);
        (channel.receive(), channel.is_damaged())
    }

    fn check<M: Message + Default + PartialEq + fmt::Debug>(message: &M) {
        let bytes = sent(message);
        assert_eq!(&received::<M>(&bytes).0.unwrap(), message);
        let mut damaged = 0;
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let (outcome, is_damaged) = received::<M>(&bytes);
            outcome.expect_err("a flipped bit is noticed");
            damaged += usize::from(is_damaged);
        }
        // A length that has become longer waits for bytes that do not come.
        assert!(damaged >= (bytes.len() - size_of::<u32>()) * 8, "{damaged}");
    }

    #[test]
    fn flipped_bit_of_a_message_is_noticed() {
        let leases = Leases { versions: vec![9], left_ms: vec![10], ..Leases::default() };
        let leases = Some(leases);
        let frames =
            Frames { bytes: vec![7; 9], position: 300, level: 1, leases, is_rest_logged: true };
        check(&FromLeader { frames: Some(frames), ..FromLeader::default() });
        let confirm = Confirm { position: 1 << 40, next_frame: 12 };
        check(&FromStandby { confirm: Some(confirm), ..FromStandby::default() });
    }

    #[test]
    fn messages_one_after_the_other_are_received() {
        let bytes = [sent(&message(1)), sent(&message(2))].concat();
        let (mut one, other) = pair();
        one.write_all(&bytes).unwrap();
        drop(one);
        let mut channel = channel(other);
        assert_eq!(channel.receive::<FromStandby>().unwrap(), message(1));
        assert_eq!(channel.receive::<FromStandby>().unwrap(), message(2));
        channel.receive::<FromStandby>().unwrap_err();
    }

    /// Connects on a thread, and ends that once the connection is wanted. Returns the failure.
    fn interrupted(address: SocketAddr, end_when: impl FnOnce()) -> Error {
        let (sender, closers) = mpsc::sync_channel(1);
        let connecting = thread::spawn(move || {
            let keep = |closer| {
                sender.send(closer).unwrap();
                Ok(())
            };
            Channel::connect(&[address], None, SystemClock.now() + DEADLINE, keep).unwrap_err()
        });
        let closer = closers.recv_timeout(DEADLINE).expect("it can be ended from the start");
        end_when();
        closer.close();
        connecting.join().unwrap()
    }

    #[test]
    fn waiting_for_a_greeting_can_be_ended() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut accepted = None;
        let greeted = || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 12]).unwrap();
            accepted = Some(stream);
        };
        let error = interrupted(listener.local_addr().unwrap(), greeted).to_string();
        assert!(error.contains("broke"), "not after a silence: {error}");
    }

    #[test]
    fn waiting_for_a_silent_host_can_be_ended() {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        listener.bind(&any.into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        // A listener whose queue is full does not answer.
        let mut queued = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(300)) {
            queued.push(stream);
        }
        let error = interrupted(address, || {}).to_string();
        assert!(error.contains("cannot be reached"), "{error}");
        assert!(!error.contains("timed out"), "not at the deadline: {error}");
    }

    #[test]
    fn nothing_is_connected_after_the_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let keep = |_| Err(Error::closed("the end has come"));
        let connected = Channel::connect(&[address], None, SystemClock.now() + DEADLINE, keep);
        assert!(connected.unwrap_err().to_string().contains("the end has come"));
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    fn connected() -> (Channel, Channel) {
        let (near, far) = pair();
        (channel(near), channel(far))
    }

    fn message(position: u64) -> FromStandby {
        let confirm = Some(Confirm { position, next_frame: 1 });
        FromStandby { attach: None, confirm }
    }

    #[test]
    fn each_message_is_sent_once_whoever_sends_it() {
        let (mut near, mut far) = connected();
        near.send(&message(1)).unwrap();
        let sender = near.sender().unwrap();
        sender.send(&message(2)).unwrap();
        assert_eq!(sender.try_send(&message(3)), Sent::Whole);
        sender.send(&message(4)).unwrap();
        for number in 1..=4 {
            assert_eq!(far.receive::<FromStandby>().unwrap(), message(number));
        }
    }

    #[test]
    fn rest_of_a_message_is_sent_before_the_next_one() {
        let (near, mut far) = connected();
        let sender = near.sender().unwrap();
        let part = |number: u8| {
            let part = Some(SnapshotPart { bytes: vec![number; 8 << 20], is_last: false });
            FromLeader { part, ..FromLeader::default() }
        };
        assert_eq!(sender.try_send(&part(1)), Sent::Partly, "more than a socket takes");
        assert_eq!(sender.try_send(&part(2)), Sent::Nothing);
        thread::scope(|scope| {
            scope.spawn(|| sender.send(&part(3)).unwrap());
            for number in [1, 3] {
                assert!(far.receive::<FromLeader>().unwrap() == part(number), "{number}");
            }
        });
    }
}
