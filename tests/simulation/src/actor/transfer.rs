//! Transfers between the memory of two processes, piece by piece. A piece may arrive when its sender
//! has given it up, over an earlier connection than the pieces after it.

use std::{ops::Range, time::Duration};

use mooncake_store_client::protocol::STALL_LIMIT;

use crate::{
    actor::client::Input,
    call::Place,
    fault::network,
    plan::WORD_BYTES,
    simulator::{Event, Simulator},
};

/// The longest delay of a piece of data, apart from the time in which a process is stopped. Decision 6
/// relies on this bound.
const PIECE_DELAY_MAX: Duration = Duration::from_millis(1900);
/// The longest time until a process that goes on has handled a piece that waited for it.
const WAKE_MICROS_MAX: u64 = 2000;

impl Simulator {
    /// Sends words to a replica, to be written from the word `first` on. Returns the number of the
    /// piece.
    pub(crate) fn write_piece(
        &mut self,
        caller: (u64, u64),
        place: Place,
        first: u64,
        words: Vec<u64>,
    ) -> u64 {
        let (there, piece) = (self.piece_delay(), self.next_number());
        self.after(there, Event::Write { caller, piece, place, first, words });
        self.after(STALL_LIMIT, Event::Input { caller, input: Input::Silent { piece } });
        piece
    }

    /// Requests words of a replica.
    pub(crate) fn read_piece(&mut self, caller: (u64, u64), place: Place, words: Range<u64>) {
        let there = self.piece_delay();
        self.after(there, Event::Read { caller, place, words });
    }

    /// Lets a piece wait for a process that is stopped: for the holder, whose system has taken the
    /// words, or within a host for the caller, which copies them itself. Returns the event if the
    /// process runs.
    fn unless_stopped(&mut self, caller: u64, holder: u64, event: Event) -> Option<Event> {
        let is_one_host = (caller + holder).is_multiple_of(2);
        let copies = if is_one_host { caller } else { holder };
        let until = self.processes.get(&copies).map(|process| process.stalled_until);
        let Some(until) = until.filter(|until| !until.has_passed(self.now)) else {
            return Some(event);
        };
        self.outcome.stopped_pieces += 1;
        let stop = until.left(self.now);
        // Nothing holds back a caller that is stopped within a copy for longer than that.
        if !is_one_host || stop < self.plan.rules.client_ttl {
            let wake = Duration::from_micros(self.random.below(WAKE_MICROS_MAX));
            self.after(stop + wake, event);
        }
        None
    }

    /// Writes words that have reached their holder.
    pub(crate) fn write_words(
        &mut self,
        caller: (u64, u64),
        piece: u64,
        (place, first): (Place, u64),
        words: Vec<u64>,
    ) {
        let event = Event::Write { caller, piece, place, first, words };
        let Some(Event::Write { words, .. }) = self.unless_stopped(caller.0, place.endpoint, event)
        else {
            return;
        };
        let addresses = (place.address + first * WORD_BYTES..).step_by(WORD_BYTES as usize);
        let is_written = addresses
            .zip(words)
            .all(|(address, word)| self.memories.write(place.endpoint, address, word));
        let process = self.processes.get(&caller.0);
        let is_late = process.is_none_or(|process| !process.running.contains_key(&caller.1));
        self.outcome.late_pieces += u64::from(is_late && is_written);
        let back = self.piece_delay();
        self.after(back, Event::Input { caller, input: Input::Wrote { piece, is_written } });
    }

    /// Reads words for a request that has reached their holder.
    pub(crate) fn read_words(&mut self, caller: (u64, u64), place: &Place, words: Range<u64>) {
        let event = Event::Read { caller, place: *place, words };
        let Some(Event::Read { words, .. }) = self.unless_stopped(caller.0, place.endpoint, event)
        else {
            return;
        };
        let words = self.words_at(place, words);
        let back = self.piece_delay();
        self.after(back, Event::Input { caller, input: Input::Read(words) });
    }

    /// Returns words of a copy. `None`: the memory is gone.
    pub(crate) fn words_at(&self, place: &Place, mut words: Range<u64>) -> Option<Vec<u64>> {
        let read = |index| self.memories.read(place.endpoint, place.address + index * WORD_BYTES);
        words.by_ref().map(read).collect()
    }

    pub(crate) fn piece_delay(&mut self) -> Duration {
        network::delay(&mut self.random, &self.plan.faults).min(PIECE_DELAY_MAX)
    }
}
