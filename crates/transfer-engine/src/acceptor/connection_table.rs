//! The open connections of a listener, and which of them gives way when the limit is reached.
//!
//! A stranger that opens connections and stays silent must not keep peers away. The oldest silent
//! connection gives way first, then the one that has waited longest for its peer.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// A connection is given this time to send its first request before it gives way to another.
const SILENT_TIME_MIN: Duration = Duration::from_millis(100);

/// A connection that has sent a valid request gives way only after waiting this long for its peer.
const WAIT_TIME_MIN: Duration = Duration::from_millis(500);

/// The number of connections that are looked at for one that gives way. The others are looked at when
/// room is asked for again.
const LOOKS_MAX: usize = 16;

/// When room may be asked for again after that.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// The open connections of one listener.
#[derive(Debug)]
pub(super) struct ConnectionTable {
    state: Mutex<TableState>,
    /// The origin of the times in the entries.
    start: Instant,
}

#[derive(Debug, Default)]
struct TableState {
    last_id: u64,
    /// Connections that have not sent a valid request yet, oldest first.
    silent: BTreeMap<u64, Arc<TableEntry>>,
    /// The other connections.
    known: KnownConnections,
}

/// Connections that have sent a valid request, in the order in which they are looked at.
#[derive(Debug, Default)]
struct KnownConnections {
    by_id: HashMap<u64, (Arc<TableEntry>, u64)>,
    /// By the earliest time since which each may wait, as its last look has shown: its real time is
    /// that or a later one. So the first whose real time is that one has waited longest.
    by_time: BTreeSet<(u64, u64)>,
    /// Connections looked at since the start.
    looks: u64,
}

/// What was found among the known connections.
enum Found {
    /// This one has waited longest, since this time.
    Waiting(u64, u64),
    /// Those looked at have worked since their last look.
    Unknown,
    /// Those looked at are at work.
    AtWork,
}

impl KnownConnections {
    fn insert(&mut self, id: u64, entry: Arc<TableEntry>, time: u64) {
        self.by_id.insert(id, (entry, time));
        self.by_time.insert((time, id));
    }

    fn remove(&mut self, id: u64) -> Option<Arc<TableEntry>> {
        let (entry, time) = self.by_id.remove(&id)?;
        self.by_time.remove(&(time, id));
        Some(entry)
    }

    /// Returns the connection that has waited longest. Looks at few connections.
    fn longest_wait(&mut self, now: u64) -> Found {
        let mut found = Found::AtWork;
        for _ in 0..LOOKS_MAX {
            let Some((time, id)) = self.by_time.pop_first() else { break };
            let Some((entry, last)) = self.by_id.get_mut(&id) else { continue };
            self.looks += 1;
            let waiting = entry.waiting_since.load(Ordering::Relaxed).checked_sub(1);
            // One at work waits later than now, if at all.
            *last = waiting.unwrap_or(now + 1).max(time);
            self.by_time.insert((*last, id));
            match waiting {
                Some(since) if since <= time => return Found::Waiting(id, since),
                Some(_) => found = Found::Unknown,
                None => {}
            }
        }
        found
    }
}

#[derive(Debug)]
struct TableEntry {
    since: Instant,
    /// Milliseconds from the start of the table to the time since which the connection waits for
    /// its peer, plus one; 0 while it does not wait.
    waiting_since: AtomicU64,
    /// Ends the connection.
    cut: CancellationToken,
}

/// A connection in the table, which it leaves on drop.
#[derive(Debug)]
pub(super) struct ConnectionEntry {
    table: Arc<ConnectionTable>,
    id: u64,
    entry: Arc<TableEntry>,
}

/// The result of asking for room.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Displacement {
    /// A connection was told to end.
    Ended,
    /// A connection may be ended after this time, if it still waits then.
    After(Duration),
    /// Every connection is at work.
    Refused,
}

impl ConnectionTable {
    pub(super) fn new(start: Instant) -> Self {
        Self { state: Mutex::default(), start }
    }

    /// Adds a connection, which `cut` ends.
    pub(super) fn add(self: &Arc<Self>, cut: CancellationToken, now: Instant) -> ConnectionEntry {
        let entry = Arc::new(TableEntry { since: now, waiting_since: AtomicU64::new(0), cut });
        let mut state = self.state.lock();
        state.last_id += 1;
        let id = state.last_id;
        state.silent.insert(id, Arc::clone(&entry));
        ConnectionEntry { table: Arc::clone(self), id, entry }
    }

    /// Ends the connection that should give way to a new one.
    pub(super) fn displace(&self, now: Instant) -> Displacement {
        let mut state = self.state.lock();
        let oldest = state.silent.first_key_value();
        let oldest = oldest.map(|(id, entry)| (*id, now.saturating_duration_since(entry.since)));
        if let Some((id, age)) = oldest
            && age >= SILENT_TIME_MIN
        {
            let entry = state.silent.remove(&id);
            return Self::end(entry);
        }
        let silent = oldest.map(|(_, age)| SILENT_TIME_MIN.saturating_sub(age));
        let waiting = match state.known.longest_wait(self.millis(now)) {
            Found::Waiting(id, since) => {
                let since = self.start + Duration::from_millis(since);
                let waited = now.saturating_duration_since(since);
                if waited >= WAIT_TIME_MIN {
                    return Self::end(state.known.remove(id));
                }
                Some(WAIT_TIME_MIN.saturating_sub(waited))
            }
            Found::Unknown => Some(LOOK_PAUSE),
            Found::AtWork => None,
        };
        let soonest = silent.into_iter().chain(waiting).min();
        soonest.map_or(Displacement::Refused, Displacement::After)
    }

    fn millis(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_millis() as u64
    }

    fn end(entry: Option<Arc<TableEntry>>) -> Displacement {
        entry.iter().for_each(|entry| entry.cut.cancel());
        Displacement::Ended
    }
}

impl ConnectionEntry {
    /// Marks the connection as one that has sent a valid request.
    pub(super) fn mark_known(&self) {
        let mut state = self.table.state.lock();
        if let Some(entry) = state.silent.remove(&self.id) {
            let since = self.table.millis(entry.since);
            state.known.insert(self.id, entry, since);
        }
    }

    /// Marks the connection as waiting for its peer.
    pub(super) fn begin_wait(&self, now: Instant) {
        let since = self.table.millis(now) + 1;
        self.entry.waiting_since.store(since, Ordering::Relaxed);
    }

    pub(super) fn end_wait(&self) {
        self.entry.waiting_since.store(0, Ordering::Relaxed);
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        let mut state = self.table.state.lock();
        if state.silent.remove(&self.id).is_none() {
            state.known.remove(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn oldest_silent_connection_gives_way_first() {
        let start = Instant::now();
        let table = Arc::new(ConnectionTable::new(start));
        let add = |at| {
            let cut = CancellationToken::new();
            (table.add(cut.clone(), start + at), cut)
        };
        let [(known, kept), (_first, one), (_second, two)] =
            [add(Duration::ZERO), add(SILENT_TIME_MIN), add(2 * SILENT_TIME_MIN)];
        known.mark_known();
        assert_eq!(table.displace(start + SILENT_TIME_MIN), Displacement::After(SILENT_TIME_MIN));
        assert_eq!(table.displace(start + 3 * SILENT_TIME_MIN), Displacement::Ended);
        assert_eq!((one.is_cancelled(), two.is_cancelled()), (true, false));
        assert_eq!(table.displace(start + 3 * SILENT_TIME_MIN), Displacement::Ended);
        assert!(two.is_cancelled() && !kept.is_cancelled());
        assert_eq!(table.displace(start + 100 * SECOND), Displacement::Refused);
    }

    #[test]
    fn known_connection_gives_way_only_while_it_waits() {
        let start = Instant::now();
        let table = Arc::new(ConnectionTable::new(start));
        let cuts = [CancellationToken::new(), CancellationToken::new()];
        let entries = cuts.clone().map(|cut| table.add(cut, start));
        entries.iter().for_each(ConnectionEntry::mark_known);
        entries[1].begin_wait(start + SECOND);
        assert_eq!(table.displace(start + SECOND), Displacement::After(WAIT_TIME_MIN));
        entries[1].end_wait();
        assert_eq!(table.displace(start + 9 * SECOND), Displacement::Refused, "at work");
        entries[0].begin_wait(start + 2 * SECOND);
        entries[1].begin_wait(start + 3 * SECOND);
        assert_eq!(table.displace(start + 9 * SECOND), Displacement::Ended);
        assert!(cuts[0].is_cancelled() && !cuts[1].is_cancelled(), "the longest wait ends first");
        drop(entries);
        assert_eq!(table.displace(start + 99 * SECOND), Displacement::Refused, "all have left");
    }

    #[test]
    fn few_connections_are_looked_at_for_each_that_gives_way() {
        const CONNECTIONS: u64 = 8192;
        let start = Instant::now();
        let table = Arc::new(ConnectionTable::new(start));
        let millis = Duration::from_millis;
        let mut entries: Vec<_> = (0..CONNECTIONS)
            .map(|_| table.add(CancellationToken::new(), start))
            .inspect(ConnectionEntry::mark_known)
            .collect();
        // The later ones wait for longer.
        for (at, entry) in (0..).zip(&entries) {
            entry.begin_wait(start + millis(CONNECTIONS - at));
        }
        let mut now = start + 10 * SECOND;
        for nth in 0..1000 {
            while table.displace(now) != Displacement::Ended {
                now += LOOK_PAUSE;
            }
            let last = entries.pop().unwrap();
            assert!(last.entry.cut.is_cancelled(), "the longest wait ends first: {nth}");
            drop(last);
            // One that waits begins to work, and another one comes.
            entries[nth].end_wait();
            entries[nth].begin_wait(now);
        }
        let looks = table.state.lock().known.looks;
        assert!(looks < CONNECTIONS + 5000, "{looks} looks");
    }
}
