//! Releases of dummy clients that are gone, until the master has answered them.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::{ClientId, Moment};
use mooncake_proto::v1;

use crate::client_table::CLIENTS_MAX;

/// Pause after a release that the master did not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time after which a release is given up. By then a master that was there all the time has expired
/// the client, and any other expires it when its heartbeats stay away.
const OWED_TIME_MAX: Duration = Duration::from_secs(60);

/// The releases in the order in which they are sent. Above the limit the oldest is given up.
#[derive(Debug, Default)]
pub(crate) struct OwedReleases {
    queue: VecDeque<OwedRelease>,
    /// None is sent before.
    retry_at: Moment,
}

/// What the master is told of a client that is gone.
#[derive(Debug, Clone)]
pub(crate) struct OwedRelease {
    pub(crate) client: ClientId,
    /// The fences that end now. All others end by time.
    pub(crate) fences: Vec<v1::FenceRelease>,
    until: Moment,
}

impl OwedReleases {
    /// Adds the release of a client.
    pub(crate) fn add(&mut self, now: Moment, client: ClientId, fences: Vec<v1::FenceRelease>) {
        self.remove(client);
        if self.queue.len() >= CLIENTS_MAX {
            self.queue.pop_front();
        }
        self.queue.push_back(OwedRelease { client, fences, until: now + OWED_TIME_MAX });
    }

    /// Removes the release of a client that was released or is back.
    pub(crate) fn remove(&mut self, client: ClientId) {
        self.queue.retain(|release| release.client != client);
    }

    /// Delays all releases after a call that the master did not answer. Returns whether they were
    /// not delayed already.
    pub(crate) fn delay(&mut self, now: Moment) -> bool {
        let was_due = self.retry_at + RETRY_INTERVAL <= now;
        self.retry_at = now + RETRY_INTERVAL;
        was_due
    }

    /// Returns the next release, if it is due. It stays until it is removed, so that a client that
    /// comes back meanwhile is not released after a failed attempt.
    pub(crate) fn next(&mut self, now: Moment) -> Option<OwedRelease> {
        self.queue.retain(|release| !release.until.has_passed(now));
        if self.retry_at.has_passed(now) { self.queue.front().cloned() } else { None }
    }

    /// Returns the time at which the next release is due.
    pub(crate) fn due_at(&self) -> Option<Moment> {
        (!self.queue.is_empty()).then_some(self.retry_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Moment = Moment::from_boot(Duration::from_secs(100));

    fn owed(clients: &[ClientId]) -> OwedReleases {
        let mut owed = OwedReleases::default();
        clients.iter().for_each(|client| owed.add(START, *client, Vec::new()));
        owed
    }

    fn next(owed: &mut OwedReleases, now: Moment) -> Option<ClientId> {
        owed.next(now).map(|release| release.client)
    }

    #[test]
    fn release_stays_until_it_is_removed() {
        let (first, second) = (ClientId::random(), ClientId::random());
        let mut owed = owed(&[first, second, first]);
        assert_eq!(next(&mut owed, START), Some(second), "that of the first was replaced");
        assert_eq!(next(&mut owed, START), Some(second));
        owed.remove(second);
        assert_eq!(next(&mut owed, START), Some(first));
        owed.remove(first);
        assert_eq!((next(&mut owed, START), owed.due_at()), (None, None));
    }

    #[test]
    fn unanswered_release_is_sent_again_after_pause() {
        let client = ClientId::random();
        let mut owed = owed(&[client]);
        assert!(owed.delay(START));
        let due = START + RETRY_INTERVAL;
        assert_eq!((next(&mut owed, START), owed.due_at()), (None, Some(due)));
        assert_eq!(next(&mut owed, due), Some(client));
    }

    #[test]
    fn release_is_given_up_after_its_time() {
        let client = ClientId::random();
        let mut owed = owed(&[client]);
        let end = START + OWED_TIME_MAX;
        let before = Moment::from_boot(end.since_boot() - Duration::from_nanos(1));
        assert_eq!(next(&mut owed, before), Some(client));
        assert_eq!(next(&mut owed, end), None);
    }

    #[test]
    fn oldest_release_is_given_up_above_limit() {
        let clients: Vec<ClientId> = (0..=CLIENTS_MAX).map(|_| ClientId::random()).collect();
        let mut owed = owed(&clients);
        assert_eq!(owed.queue.len(), CLIENTS_MAX);
        assert_eq!(next(&mut owed, START), Some(clients[1]));
    }
}
