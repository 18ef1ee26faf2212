//! Prefetches: probes that have the pool bring objects from disk into memory, and reads that wait a
//! little for these objects.

mod asked_keys;

use std::time::Duration;

use mooncake_base::{Backoff, Clock, Moment, Result, SystemClock};

pub(super) use self::asked_keys::AskedKeys;
use super::{ClientInner, read::locate::Grants};
use crate::object::Located;

/// Pauses of a read that waits for an object.
const PAUSES: Backoff = Backoff::new(Duration::from_micros(500), Duration::from_millis(4));

/// Waits a little for objects that are only on disk and that this client has asked for in memory.
/// Returns them where they are then.
pub(super) fn await_prefetched(
    client: &ClientInner,
    mut located: Vec<Result<Located>>,
    grants: Grants<'_>,
    deadline: Moment,
) -> Vec<Result<Located>> {
    let begin = SystemClock.now();
    let until = deadline.min(begin + client.config.prefetch.get_wait);
    if client.asked_keys.is_empty() || until.has_passed(begin) {
        return located;
    }
    let is_awaited = |found: &Result<Located>| match found {
        Ok(found) => is_only_on_disk(found) && client.asked_keys.awaits(&found.key, begin),
        Err(_) => false,
    };
    let mut open: Vec<usize> = (0..located.len()).filter(|&at| is_awaited(&located[at])).collect();
    let mut pauses = 0;
    while !open.is_empty() {
        let left = until.left(SystemClock.now());
        if left.is_zero() || !client.lifetime.sleep_or_closed(PAUSES.pause(pauses).min(left)) {
            break;
        }
        pauses += 1;
        let keys = open.iter().filter_map(|&at| Some(located[at].as_ref().ok()?.key.clone()));
        let found = client.locate_uncounted(keys.collect(), grants, deadline);
        let is_done = found.into_iter().zip(&open).map(|(found, &at)| match found {
            Ok(found) if is_only_on_disk(&found) => false,
            // The read itself finds out why an object cannot be located any more.
            Err(_) => true,
            found => {
                located[at] = found;
                true
            }
        });
        let is_done: Vec<bool> = is_done.collect();
        let mut is_done = is_done.into_iter();
        open.retain(|_| !is_done.next().unwrap_or(true));
    }
    let late = open.iter().filter_map(|&at| located[at].as_ref().ok());
    client.asked_keys.record_late(late.map(|found| &found.key), SystemClock.now());
    located
}

fn is_only_on_disk(found: &Located) -> bool {
    !found.places.is_empty() && found.places.iter().all(|place| place.segment.is_disk)
}
