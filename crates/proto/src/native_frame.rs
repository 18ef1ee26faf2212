//! The greeting and frames of the native protocol: a codec without I/O, driven by a blocking client
//! and by the master's runtime.
//!
//! A connection begins with the client's greeting; the server answers with its own, which names
//! the Unix socket that serves the same master on the same host. After that, each side sends
//! frames: a length of four bytes, little-endian, and that many bytes of a protobuf message, a
//! [`Request`](crate::v1::Request) one way and a [`Response`](crate::v1::Response) the other, in
//! the order of the requests. A master with a token greets twice, see
//! [`native_token`](crate::native_token). A blocking end reads through a [`Reader`].

mod reader;

use bytes::{Buf, BufMut, BytesMut};
use mooncake_base::{Error, ErrorCode, Result};
use prost::Message;

pub use self::reader::{Filled, Reader};
use crate::{decode_limits, v1};

/// The first bytes of a native connection. No HTTP method and no HTTP/2 preface begins with them.
pub const MAGIC: [u8; 8] = *b"MOONLEAN";

/// The version of the frames. Messages evolve by protobuf's rules and need no new version, except
/// where a field is removed that the other side may still write or need, as in version 2: batches
/// are columns only.
pub const VERSION: u32 = 2;

/// The largest frame that either side accepts. Clients split batches to stay below this limit.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// The largest server greeting.
pub const GREETING_BYTES_MAX: usize = 1024;

/// A buffer that grew beyond this size for a frame is freed with it.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// The length in front of a frame.
const LENGTH_BYTES: usize = 4;

/// Items are fields of a call, which is a field of the request or response: two levels down.
const ITEM_LEVELS: u32 = 2;

/// Returns a client's greeting: [`MAGIC`], then [`VERSION`] in four bytes, little-endian.
pub fn client_greeting() -> [u8; 12] {
    let mut greeting = [0; 12];
    greeting[..8].copy_from_slice(&MAGIC);
    greeting[8..].copy_from_slice(&VERSION.to_le_bytes());
    greeting
}

/// Checks a client's greeting.
///
/// # Errors
/// If the peer is not a native client, or has another version.
pub fn check_client_greeting(greeting: &[u8; 12]) -> Result<()> {
    if greeting[..8] != MAGIC {
        return Err(Error::new(ErrorCode::RPC_FAIL, "the peer does not speak the native protocol"));
    }
    let version = u32::from_le_bytes([greeting[8], greeting[9], greeting[10], greeting[11]]);
    if version == VERSION {
        Ok(())
    } else {
        let why = "the client speaks another version of the native protocol; install the version of \
                   the master";
        Err(Error::new(ErrorCode::INVALID_VERSION, why)
            .with("client_version", version)
            .with("our_version", VERSION))
    }
}

/// The server's greeting, sent as a frame.
#[derive(Clone, PartialEq, Message)]
pub struct ServerGreeting {
    /// The server's [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The master's id: 16 random bytes, new at every start.
    #[prost(bytes = "vec", tag = "2")]
    pub master: Vec<u8>,
    /// The name of the abstract Unix socket of the same master; empty if there is none.
    #[prost(string, tag = "3")]
    pub unix_socket: String,
    /// The greeting of a host's daemon, which forwards calls; absent for a master.
    #[prost(message, optional, tag = "4")]
    pub daemon: Option<DaemonGreeting>,
    /// The challenge of a master with a token; empty without one. See
    /// [`native_token`](crate::native_token).
    #[prost(bytes = "vec", tag = "5")]
    pub challenge: Vec<u8>,
    /// The master's proof that it knows the token, in its second greeting.
    #[prost(bytes = "vec", tag = "6")]
    pub proof: Vec<u8>,
    /// Why the master refuses the client's proof.
    #[prost(message, optional, tag = "7")]
    pub refusal: Option<v1::Failure>,
}

impl ServerGreeting {
    /// Checks that the server does not refuse the client.
    ///
    /// # Errors
    /// The refusal.
    pub fn check_refusal(&self) -> Result<()> {
        self.refusal.as_ref().map_or(Ok(()), |refusal| Err(refusal.into()))
    }
}

/// The properties of a daemon that the processes it serves need.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DaemonGreeting {
    /// The name of the daemon's own client: its host, as peers know it, and a port.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The metadata server of the daemon's engine: `P2PHANDSHAKE` or an address.
    #[prost(string, tag = "2")]
    pub metadata: String,
}

/// Appends one message as a frame.
///
/// # Errors
/// If the message is larger than [`FRAME_BYTES_MAX`]; nothing is appended.
pub fn encode(message: &impl Message, into: &mut BytesMut) -> Result<()> {
    let length = message.encoded_len();
    if length > FRAME_BYTES_MAX {
        return Err(Error::invalid("the message is larger than a frame may be")
            .with("message_bytes", length)
            .with("limit", FRAME_BYTES_MAX));
    }
    into.reserve(LENGTH_BYTES + length);
    into.put_u32_le(u32::try_from(length).expect("the limit of a frame fits into 32 bits"));
    message.encode_raw(into);
    Ok(())
}

/// Removes one frame from the front and decodes it; `None` if the frame is incomplete.
///
/// # Errors
/// `INVALID_PARAMS`: the frame exceeds the limits of a call and was removed. Any other error means a
/// length above `limit` or malformed bytes; the connection is unusable.
pub fn decode<M: Message + Default>(from: &mut BytesMut, limit: usize) -> Result<Option<M>> {
    decode_with_trailer(from, limit, 0)
}

/// Frees a buffer that has grown large, unless it holds bytes.
pub fn release_large(buffer: &mut BytesMut) {
    if buffer.capacity() > KEPT_BYTES_MAX && buffer.is_empty() {
        *buffer = BytesMut::new();
    }
}

/// Removes one frame and so many bytes behind it from the front, and decodes the frame.
fn decode_with_trailer<M: Message + Default>(
    from: &mut BytesMut,
    limit: usize,
    trailer_bytes: usize,
) -> Result<Option<M>> {
    let Some(length) = from.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > limit {
        return Err(Error::new(ErrorCode::RPC_FAIL, "the peer announces a frame above the limit")
            .with("frame_bytes", length)
            .with("limit", limit));
    }
    let whole = LENGTH_BYTES + length + trailer_bytes;
    if from.len() < whole {
        from.reserve(whole - from.len());
        return Ok(None);
    }
    from.advance(LENGTH_BYTES);
    let frame = from.split_to(length).freeze();
    from.advance(trailer_bytes);
    decode_limits::decode(frame, ITEM_LEVELS).map(Some)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::v1::{ProbeRequest, Request, request::Call};

    fn request() -> Request {
        let probe = ProbeRequest {
            caller: None,
            keys: vec![b"k".as_slice().into()],
            lease: true,
            ..Default::default()
        };
        Request { call: Some(Call::Probe(probe)), ..Default::default() }
    }

    #[test]
    fn incomplete_frame_is_not_decoded() {
        let mut wire = BytesMut::new();
        encode(&request(), &mut wire).unwrap();
        for cut in 0..wire.len() {
            let mut part = BytesMut::from(&wire[..cut]);
            assert_eq!(decode::<Request>(&mut part, FRAME_BYTES_MAX).unwrap(), None);
        }
        wire.extend_from_slice(b"next");
        assert_eq!(decode(&mut wire, FRAME_BYTES_MAX).unwrap(), Some(request()));
        assert_eq!(&wire[..], b"next");
    }

    #[test]
    fn rejects_an_oversized_frame_by_its_length() {
        let mut wire = BytesMut::from(&u32::MAX.to_le_bytes()[..]);
        assert!(decode::<Request>(&mut wire, FRAME_BYTES_MAX).is_err());
    }

    /// The bytes of each version: both greetings, and a frame with a request.
    const VERSION_1: [&[u8]; 3] = [
        b"MOONLEAN\x01\0\0\0",
        b"\x0b\0\0\0\x08\x01\x12\x02\x07\x08\x1a\x03a-b",
        b"\x05\0\0\0\x4a\x03\x12\x01k",
    ];
    const VERSION_2: [&[u8]; 3] = [
        b"MOONLEAN\x02\0\0\0",
        b"\x0b\0\0\0\x08\x02\x12\x02\x07\x08\x1a\x03a-b",
        b"\x0f\0\0\0\x4a\x0d\x18\x01\x2a\x09\x0a\x01k\x12\x04\x01\0\0\0",
    ];

    fn server_greeting(version: u32) -> ServerGreeting {
        let unix_socket = "a-b".to_owned();
        ServerGreeting { version, master: vec![7, 8], unix_socket, ..ServerGreeting::default() }
    }

    #[test]
    fn bytes_of_this_version_stay_as_they_are() {
        assert_eq!(VERSION, 2, "a new version needs bytes of its own here");
        let greeting = server_greeting(VERSION);
        let mut written = BytesMut::new();
        encode(&greeting, &mut written).unwrap();
        assert_eq!([&client_greeting()[..], &written], VERSION_2[..2]);
        let mut read = BytesMut::from(VERSION_2[1]);
        assert_eq!(decode(&mut read, GREETING_BYTES_MAX).unwrap(), Some(greeting));
        let keys = Some(v1::KeyColumn::pack(["k"]));
        let locate = v1::LocateRequest { lease: true, keys, ..Default::default() };
        let request = Request { call: Some(Call::Locate(locate)), ..Default::default() };
        written.clear();
        encode(&request, &mut written).unwrap();
        assert_eq!(&written[..], VERSION_2[2]);
        let mut read = BytesMut::from(VERSION_2[2]);
        assert_eq!(decode(&mut read, FRAME_BYTES_MAX).unwrap(), Some(request));
    }

    #[test]
    fn each_end_recognizes_version_1() {
        let refused = check_client_greeting(VERSION_1[0].try_into().unwrap()).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::INVALID_VERSION);
        let text = refused.to_string();
        assert!(text.contains("client_version=1 our_version=2"), "{text}");
        let mut read = BytesMut::from(VERSION_1[1]);
        assert_eq!(decode(&mut read, GREETING_BYTES_MAX).unwrap(), Some(server_greeting(1)));
        // A message per key: such a call is refused rather than answered as an empty batch.
        let mut read = BytesMut::from(VERSION_1[2]);
        let request: Request = decode(&mut read, FRAME_BYTES_MAX).unwrap().unwrap();
        let Some(Call::Locate(locate)) = request.call else { panic!("{request:?}") };
        assert!(locate.keys().is_err());
    }

    #[test]
    fn rejects_foreign_and_newer_greetings() {
        assert!(check_client_greeting(&client_greeting()).is_ok());
        assert!(check_client_greeting(b"GET / HTTP/1").is_err());
        let mut newer = client_greeting();
        newer[8] = 9;
        assert_eq!(check_client_greeting(&newer).unwrap_err().code(), ErrorCode::INVALID_VERSION);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let mut wire = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = decode::<Request>(&mut wire, 1 << 16) {}
        }
    }
}
