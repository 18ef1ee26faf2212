//! The messages between the leader of several masters and a standby, which receives the log.
//!
//! A standby connects to the port of the native protocol with a greeting of its own. The master
//! greets and asks for the token as it does with clients; then each side sends frames of
//! [`native_frame`](crate::native_frame), each with a checksum: [`FromStandby`] one way,
//! [`FromLeader`] the other. The first one is an [`Attach`], and the answer an [`Attached`] or a
//! refusal.

use prost::Message;

use crate::v1;

/// The first bytes of the connection of a standby.
pub const MAGIC: [u8; 8] = *b"MOONSTBY";

/// The version of the messages. They evolve by protobuf's rules. In version 2 each frame after the
/// greetings is followed by a checksum: four bytes, little-endian, the CRC-32 of the frame with its length.
pub const VERSION: u32 = 2;

/// Returns a standby's greeting: [`MAGIC`], then [`VERSION`] in four bytes, little-endian.
pub fn standby_greeting() -> [u8; 12] {
    let mut greeting = [0; 12];
    greeting[..8].copy_from_slice(&MAGIC);
    greeting[8..].copy_from_slice(&VERSION.to_le_bytes());
    greeting
}

/// Where the log of a view begins.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ViewStart {
    /// The number of the view.
    #[prost(uint64, tag = "1")]
    pub view: u64,
    /// The number of its first frame.
    #[prost(uint64, tag = "2")]
    pub first_frame: u64,
}

/// A message of a standby; one field is set.
#[derive(Clone, PartialEq, Message)]
pub struct FromStandby {
    /// Its first message.
    #[prost(message, optional, tag = "1")]
    pub attach: Option<Attach>,
    /// Each later one.
    #[prost(message, optional, tag = "2")]
    pub confirm: Option<Confirm>,
}

/// Asks for the log.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Attach {
    /// The id of the member.
    #[prost(string, tag = "1")]
    pub member: String,
    /// Where it serves once it leads, as a leader writes it into the lease service.
    #[prost(string, tag = "2")]
    pub address: String,
    /// The version of its program.
    #[prost(string, tag = "3")]
    pub version: String,
    /// The timeline of its log.
    #[prost(bytes = "vec", tag = "4")]
    pub timeline_id: Vec<u8>,
    /// The number of the frame that it lacks first.
    #[prost(uint64, tag = "5")]
    pub next_frame: u64,
    /// The views in its log, in rising order.
    #[prost(message, repeated, tag = "6")]
    pub views: Vec<ViewStart>,
    /// The highest level of records that it can read.
    #[prost(uint32, tag = "7")]
    pub level: u32,
}

/// Says what a standby has.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Confirm {
    /// The position of the last frames that it has received and written.
    #[prost(uint64, tag = "1")]
    pub position: u64,
    /// The number of the frame that it lacks first.
    #[prost(uint64, tag = "2")]
    pub next_frame: u64,
}

/// A message of the leader; one field is set.
#[derive(Clone, PartialEq, Message)]
pub struct FromLeader {
    /// The answer to [`Attach`].
    #[prost(message, optional, tag = "1")]
    pub attached: Option<Attached>,
    /// A part of a snapshot.
    #[prost(message, optional, tag = "2")]
    pub part: Option<SnapshotPart>,
    /// Frames of the log.
    #[prost(message, optional, tag = "3")]
    pub frames: Option<Frames>,
    /// Why the leader ends the connection.
    #[prost(message, optional, tag = "4")]
    pub refusal: Option<v1::Failure>,
}

/// How a standby gets what it lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Start {
    /// It goes on from its place.
    Place = 0,
    /// It empties its log and begins with the first frame.
    FirstFrame = 1,
    /// It empties its log and begins with a snapshot.
    Snapshot = 2,
}

/// Where a standby begins.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Attached {
    /// The view of the leader.
    #[prost(uint64, tag = "1")]
    pub view: u64,
    /// The timeline of the leader's log.
    #[prost(bytes = "vec", tag = "2")]
    pub timeline_id: Vec<u8>,
    /// The views in the leader's log, in rising order.
    #[prost(message, repeated, tag = "3")]
    pub views: Vec<ViewStart>,
    /// How it gets what it lacks.
    #[prost(enumeration = "Start", tag = "4")]
    pub start: i32,
    /// The end of the leader's log at this moment: a standby that has all frames before it has
    /// everything that was acknowledged before.
    #[prost(uint64, tag = "5")]
    pub end_frame: u64,
    /// The number of the snapshot's file.
    #[prost(uint64, tag = "6")]
    pub snapshot: u64,
}

/// A part of a snapshot file.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SnapshotPart {
    /// Bytes of the file, in order.
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
    /// Nothing follows.
    #[prost(bool, tag = "2")]
    pub is_last: bool,
}

/// Frames of the log, as they are in its files.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Frames {
    /// Whole frames; there may be none.
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
    /// The position behind them, to be confirmed; 0 while earlier frames still follow.
    #[prost(uint64, tag = "2")]
    pub position: u64,
    /// The level of records that the leader may write.
    #[prost(uint32, tag = "3")]
    pub level: u32,
    /// Objects that have a lease; they come in no order among the frames.
    #[prost(message, optional, tag = "4")]
    pub leases: Option<Leases>,
    /// All memory that must rest is in the log up to here. Void when more frames follow.
    #[prost(bool, tag = "5")]
    pub is_rest_logged: bool,
}

/// Objects that have a lease: those that got one since the last message of this kind, and for a standby
/// that attaches the others, too.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Leases {
    /// The versions of the objects.
    #[prost(fixed64, repeated, tag = "1")]
    pub versions: Vec<u64>,
    /// For how long the leases last, in the same order.
    #[prost(uint64, repeated, tag = "2")]
    pub left_ms: Vec<u64>,
    /// Any object may have got a lease before, as in the first message of a connection; earlier messages
    /// are void.
    #[prost(bool, tag = "3")]
    pub is_any: bool,
    /// Since the last message with `is_any`, all objects that have a lease were named.
    #[prost(bool, tag = "4")]
    pub is_whole: bool,
}
