//! A large batch over one lane or several at once: requests go out while answers come in, so that
//! no lane waits for the other end between two frames.
//!
//! All lanes are driven by the calling thread, which sleeps only when none can go on. Whatever goes
//! wrong here (local memory that is not mapped, a connection that breaks) ends the attempt: lanes
//! whose exchange is unfinished are closed, what was acknowledged stays so, and the caller goes on
//! with the rest frame by frame, which finds out whose fault it was. Moving the same bytes again
//! does no harm.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use mooncake_base::{Endpoint, Moment, Result};

use super::{
    frame::{self, ANSWER_BYTES, AnswerHeader, Malformed, REFUSAL_BYTES, Refusal, RequestHeader},
    lane::{LaneLease, Lanes},
    path::refused,
    plan::{FRAME_BYTES, FrameLimits, Part, Plan},
    vector::{self, Cursor, Patience, Span},
};
use crate::piece::{Opcode, Piece};

/// How many requests of one lane are under way: one travels while another is applied.
const DEPTH: usize = 2;

/// A lane is worth its while from so many bytes on.
const LANE_BYTES_MIN: usize = 2 << 20;

/// Frames of a batch that is shared out are no smaller than this.
const FRAME_BYTES_MIN: usize = 512 << 10;

/// What a batch is to one attempt.
pub(super) struct Load<'a> {
    pub(super) opcode: Opcode,
    pub(super) pieces: &'a mut [Piece],
    pub(super) deadline: Moment,
    pub(super) endpoint: &'a Endpoint,
}

/// How many lanes so many bytes may use, of the most that there are.
pub(super) fn lanes_for(bytes: usize, most: usize) -> usize {
    (bytes / LANE_BYTES_MIN).clamp(1, most)
}

/// Moves the open pieces over the lane and more of them.
///
/// # Errors
/// The attempt has ended before everything was moved; see the head of the file. Lanes that are in
/// step have gone back.
pub(super) fn run<'a>(
    lanes: &'a Lanes,
    first: LaneLease<'a>,
    (bytes, count): (usize, usize),
    load: Load<'_>,
) -> io::Result<()> {
    let share = (bytes / (count * DEPTH)).clamp(FRAME_BYTES_MIN, FRAME_BYTES);
    let limits = FrameLimits { bytes: share, ..FrameLimits::OWN };
    let plan = Plan::new(load.pieces, limits);
    let mut streams = vec![Stream::new(first)];
    while streams.len() < count {
        let Some(lease) = lanes.take_another(load.deadline) else { break };
        streams.push(Stream::new(lease));
    }
    let tally = Tally::new(load.pieces.len());
    let mut attempt = Attempt { lanes, plan, tally, load, streams, spare: Vec::new() };
    let ended = attempt.run();
    for stream in attempt.streams {
        // A lane with something under way is closed by being dropped.
        if stream.flights.is_empty() {
            stream.lease.keep();
        }
    }
    ended
}

struct Attempt<'a, 'b> {
    lanes: &'a Lanes,
    plan: Plan,
    tally: Tally,
    load: Load<'b>,
    streams: Vec<Stream<'a>>,
    /// Flights that have landed, to be used again.
    spare: Vec<Flight>,
}

/// One lane at work.
struct Stream<'a> {
    lease: LaneLease<'a>,
    /// Oldest first; answers come in this order.
    flights: VecDeque<Flight>,
    /// How many of them have been sent whole.
    sent: usize,
    incoming: Incoming,
    /// Whether it takes no more frames, since somebody else waits for a lane.
    is_leaving: bool,
}

/// A request and what its answer needs.
#[derive(Debug, Default)]
struct Flight {
    request: Option<RequestHeader>,
    parts: Vec<Part>,
    wire: Vec<u8>,
    spans: Vec<Span>,
    cursor: Cursor,
}

/// How far the answer of the oldest flight has come.
#[derive(Debug)]
enum Incoming {
    Header { bytes: [u8; ANSWER_BYTES], filled: usize },
    Refusals { answer: AnswerHeader, bytes: Vec<u8>, filled: usize },
    Payload { cursor: Cursor },
}

/// How many parts of each piece are under way, and whether all have been cut.
struct Tally(Vec<Count>);

#[derive(Clone, Default)]
struct Count {
    open: u32,
    is_cut: bool,
}

impl Attempt<'_, '_> {
    fn run(&mut self) -> io::Result<()> {
        loop {
            let mut has_moved = false;
            for index in 0..self.streams.len() {
                has_moved |= self.launch(index);
                has_moved |= self.streams[index].send(self.load.opcode)?;
                has_moved |= self.receive(index)?;
            }
            if self.streams.iter().all(|stream| stream.flights.is_empty()) {
                return Ok(());
            }
            if !has_moved {
                let waits = self.streams.iter().filter(|stream| !stream.flights.is_empty());
                let mut waits: Vec<_> = waits.map(Stream::wait).collect();
                vector::wait_for_any(&mut waits, self.load.deadline)?;
            }
        }
    }

    /// Gives a stream its next frame, if it has room and there is one.
    fn launch(&mut self, index: usize) -> bool {
        if index > 0 && self.lanes.is_wanted() {
            self.streams[index].is_leaving = true;
        }
        let stream = &mut self.streams[index];
        if stream.is_leaving || stream.flights.len() >= DEPTH {
            return false;
        }
        let mut flight = self.spare.pop().unwrap_or_default();
        self.plan.next_frame(self.load.pieces, &mut flight.parts);
        if flight.parts.is_empty() {
            self.spare.push(flight);
            return false;
        }
        self.tally.enter(&flight.parts);
        stream.launch(flight, self.load.opcode);
        true
    }

    /// Takes in what has come for a stream.
    fn receive(&mut self, index: usize) -> io::Result<bool> {
        let mut has_moved = false;
        loop {
            let stream = &mut self.streams[index];
            if stream.sent == 0 {
                return Ok(has_moved);
            }
            match stream.step(&mut self.load, &mut self.tally) {
                Ok(true) => {
                    let landed = stream.flights.pop_front().expect("one was sent");
                    stream.sent -= 1;
                    self.tally.land(&landed.parts, self.load.pieces);
                    self.spare.push(landed);
                    // The next frame goes out before this lane's next answer is looked for.
                    return Ok(true);
                }
                Ok(false) => has_moved = true,
                Err(failure) if failure.kind() == io::ErrorKind::Interrupted => {}
                Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(has_moved);
                }
                Err(failure) => return Err(failure),
            }
        }
    }
}

impl<'a> Stream<'a> {
    fn new(lease: LaneLease<'a>) -> Self {
        let incoming = Incoming::header();
        Self { lease, flights: VecDeque::new(), sent: 0, incoming, is_leaving: false }
    }

    fn launch(&mut self, mut flight: Flight, opcode: Opcode) {
        let lane = self.lease.lane();
        lane.sequence += 1;
        let payload = flight.parts.iter().map(|part| part.remote.length).sum();
        let count = flight.parts.len();
        let request = RequestHeader { opcode, count, sequence: lane.sequence, payload };
        flight.wire.clear();
        request.encode(&mut flight.wire);
        for part in &flight.parts {
            frame::encode_entry(part.remote, &mut flight.wire);
        }
        flight.spans.clear();
        if opcode == Opcode::Write {
            flight.spans.extend(flight.parts.iter().map(Part::span));
        }
        flight.request = Some(request);
        flight.cursor = Cursor::default();
        self.flights.push_back(flight);
    }

    /// Sends as much as the connection takes.
    fn send(&mut self, opcode: Opcode) -> io::Result<bool> {
        let mut has_moved = false;
        while let Some(flight) = self.flights.get_mut(self.sent) {
            let socket = self.lease.lane().descriptor();
            match vector::send(socket, &flight.wire, &flight.spans, &mut flight.cursor) {
                Ok(()) => has_moved = true,
                Err(failure) if failure.kind() == io::ErrorKind::Interrupted => continue,
                Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => break,
                Err(failure) => return Err(failure),
            }
            if flight.cursor.is_done(&flight.wire, &flight.spans) {
                if opcode == Opcode::Read {
                    flight.spans.extend(flight.parts.iter().map(Part::span));
                }
                self.sent += 1;
            }
        }
        Ok(has_moved)
    }

    /// One step of taking in the answer of the oldest flight; true when it is complete.
    fn step(&mut self, load: &mut Load<'_>, tally: &mut Tally) -> io::Result<bool> {
        let flight = self.flights.front_mut().expect("one was sent");
        let lane = self.lease.lane();
        match &mut self.incoming {
            Incoming::Header { bytes, filled } => {
                *filled += lane.read_some(&mut bytes[*filled..])?;
                if *filled == ANSWER_BYTES {
                    let request = flight.request.as_ref().expect("it was launched");
                    let answer = AnswerHeader::decode(bytes, request)?;
                    let bytes = vec![0; answer.refused * REFUSAL_BYTES];
                    self.incoming = Incoming::Refusals { answer, bytes, filled: 0 };
                }
                Ok(false)
            }
            Incoming::Refusals { answer, bytes, filled } => {
                if *filled < bytes.len() {
                    *filled += lane.read_some(&mut bytes[*filled..])?;
                    return Ok(false);
                }
                let refusals = Refusal::decode_all(bytes, flight.parts.len())?;
                flight.refuse(&refusals, load, tally);
                if load.opcode == Opcode::Write {
                    self.incoming = Incoming::header();
                    return Ok(true);
                }
                let expected: u64 = flight.spans.iter().map(|span| span.length() as u64).sum();
                if answer.payload != expected {
                    return Err(Malformed("the bytes do not add up").into());
                }
                self.incoming = Incoming::Payload { cursor: Cursor::default() };
                Ok(false)
            }
            Incoming::Payload { cursor } => {
                let socket = lane.socket_and_void();
                vector::receive(socket.0, &flight.spans, cursor, socket.1, Patience::None)?;
                let is_complete = cursor.is_done(&[], &flight.spans);
                if is_complete {
                    self.incoming = Incoming::header();
                }
                Ok(is_complete)
            }
        }
    }

    /// What it waits for.
    fn wait(&self) -> libc::pollfd {
        let is_sending = self.sent < self.flights.len();
        let events = if is_sending { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
        let socket: BorrowedFd<'_> = self.lease.peek().descriptor();
        libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 }
    }
}

impl Flight {
    /// Gives the parts that were refused their outcome; nothing is received for them.
    fn refuse(&mut self, refusals: &[Refusal], load: &mut Load<'_>, tally: &mut Tally) {
        for refusal in refusals {
            let part = &self.parts[refusal.index];
            let error = refused(part, refusal.code, load.endpoint);
            tally.fail(part, load.pieces, Err(error));
            if load.opcode == Opcode::Read {
                self.spans[refusal.index] = Span::void(0);
            }
        }
    }
}

impl Incoming {
    const fn header() -> Self {
        Self::Header { bytes: [0; ANSWER_BYTES], filled: 0 }
    }
}

impl Tally {
    fn new(pieces: usize) -> Self {
        Self(vec![Count::default(); pieces])
    }

    fn enter(&mut self, parts: &[Part]) {
        for part in parts {
            let count = &mut self.0[part.piece];
            count.open += 1;
            count.is_cut |= part.is_last;
        }
    }

    /// The first failure of a piece stands.
    fn fail(&self, part: &Part, pieces: &mut [Piece], outcome: Result<()>) {
        debug_assert!(self.0[part.piece].open > 0, "it is under way");
        pieces[part.piece].outcome.get_or_insert(outcome);
    }

    /// The parts are done; a piece is when all of its are.
    fn land(&mut self, parts: &[Part], pieces: &mut [Piece]) {
        for part in parts {
            let count = &mut self.0[part.piece];
            count.open -= 1;
            if count.open == 0 && count.is_cut {
                pieces[part.piece].outcome.get_or_insert(Ok(()));
            }
        }
    }
}
