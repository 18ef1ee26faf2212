//! Messages between the coordinator and the agents of the ranks.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Longest message: the address book of the largest group takes a few kilobytes.
const MESSAGE_BYTES_MAX: u32 = 1 << 20;

/// A member of a view: its slot, its global rank, and where its data listener is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Member {
    pub(crate) slot: usize,
    pub(crate) rank: u32,
    pub(crate) incarnation: u64,
    pub(crate) address: String,
}

/// What a rank asks for when it makes a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Attach {
    pub(crate) group: String,
    pub(crate) slot: usize,
    /// Number of founders.
    pub(crate) declared: usize,
    pub(crate) capacity: usize,
    pub(crate) is_extension: bool,
    pub(crate) removes_lost: bool,
}

/// From an agent to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum Request {
    Register { rank: u32, incarnation: u64, address: String },
    Ping,
    Attach(Attach),
    Report { group: String, attempt: u32, finished: i64 },
    Suspect { rank: u32, incarnation: u64 },
    Join { group: String },
    Activate { group: String, slots: Vec<usize>, id: u64 },
    Deactivate { group: String, slots: Vec<usize>, id: u64 },
    Synchronize { group: String, id: u64 },
    Leave { group: String },
    Goodbye,
}

/// From the coordinator to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum Notice {
    Pong,
    /// The extension rank is known, and outside of the view.
    Attached {
        group: String,
    },
    Refused {
        group: String,
        reason: String,
    },
    /// Stop the group and report how far it is.
    Prepare {
        group: String,
        attempt: u32,
        members: Vec<Member>,
    },
    Commit(Commit),
    /// For each slot, whether its rank is reachable and active, or waits for activation.
    Peers {
        group: String,
        states: Vec<bool>,
    },
    Reply {
        id: u64,
        answer: Answer,
    },
    Goodbye,
}

/// What a notice names in place of a group if it is about all groups of a process.
pub(crate) const PROCESS: &str = "";

/// A new view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Commit {
    pub(crate) group: String,
    pub(crate) attempt: u32,
    pub(crate) generation: u32,
    pub(crate) epoch: u64,
    pub(crate) active: Vec<bool>,
    /// The active members that take part in operations.
    pub(crate) members: Vec<Member>,
    /// Slots that failed since the last view.
    pub(crate) failed: Vec<usize>,
    /// Operations up to this number have their data at each member; later ones are done again.
    pub(crate) finished: i64,
}

/// Answer to a change that a rank asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Hash))]
pub struct Answer {
    /// What became of the change.
    pub status: Status,
    /// Number of the view.
    pub epoch: u64,
    /// Slots that could not be activated.
    pub dropped: Vec<usize>,
    /// Why the change was refused.
    pub reason: String,
}

/// What became of a change of the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Hash))]
pub enum Status {
    /// The view is as before.
    Rejected,
    /// The view has changed, or was so already.
    Applied,
    /// The view has changed without some of the ranks.
    AppliedWithDropped,
    /// There was nothing to do.
    NothingPending,
    /// The view is as before: a rank does not wait in `join` yet.
    NotReady,
}

impl Answer {
    pub(crate) fn new(status: Status, epoch: u64) -> Self {
        Self { status, epoch, dropped: Vec::new(), reason: String::new() }
    }

    pub(crate) fn rejected(epoch: u64, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..Self::new(Status::Rejected, epoch) }
    }
}

/// Writes one message.
pub(crate) fn send<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(&body);
    stream.write_all(&frame)
}

/// Reads one message.
pub(crate) fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::other("the message is too long"));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}
