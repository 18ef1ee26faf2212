//! The table of connected pairs of devices, from which pairs of peers that are gone are removed.

use std::{collections::HashMap, sync::Arc, time::Duration};

use mooncake_base::Moment;
use mooncake_base::sync::Mutex;

use crate::{endpoint::Endpoint, nic::Nic};

/// How long nothing is known of the peer of a connection before it is asked.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// How often the connections of a device are looked through.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Pairs of an own device and one of a peer.
#[derive(Debug, Default)]
pub(crate) struct Endpoints {
    /// By own device and path of the peer's.
    table: Mutex<HashMap<(usize, String), Arc<Endpoint>>>,
    /// When the connections of each device were last looked through.
    checked: Mutex<HashMap<usize, Moment>>,
}

impl Endpoints {
    /// Returns the endpoint of an own device and one of a peer, or makes it. Where there are `most`, the one
    /// that was connected first and is not in use is given up.
    pub(crate) fn get_or_add(
        &self,
        nic: usize,
        peer_path: &str,
        most: usize,
        make: impl FnOnce() -> Endpoint,
    ) -> Arc<Endpoint> {
        let mut table = self.table.lock();
        let key = (nic, peer_path.to_owned());
        if let Some(endpoint) = table.get(&key) {
            return Arc::clone(endpoint);
        }
        let oldest = excess(&table, most).and_then(|oldest| table.remove(&oldest));
        let endpoint = Arc::new(make());
        table.insert(key, Arc::clone(&endpoint));
        drop(table);
        // Destroying queue pairs takes a while.
        drop(oldest);
        endpoint
    }

    /// Asks the peers of idle connections of a device whether they are still there, and gives up those of
    /// peers that are not. Does that now and then; costs little otherwise.
    pub(crate) fn check_idle(&self, nic: &Nic) {
        let now = nic.now();
        let mut checked = self.checked.lock();
        let last = checked.entry(nic.index()).or_default();
        if now.since(*last) < CHECK_INTERVAL {
            return;
        }
        *last = now;
        drop(checked);
        let table = self.table.lock();
        let own = table.iter().filter(|((index, _), _)| *index == nic.index());
        let own: Vec<_> = own.map(|(key, endpoint)| (key.clone(), Arc::clone(endpoint))).collect();
        drop(table);
        for (key, endpoint) in own {
            // One in the table and one here: no link uses it, and no request is being answered.
            let is_unused = || Arc::strong_count(&endpoint) == 2;
            if !endpoint.is_gone(now, IDLE_MAX, is_unused()) {
                continue;
            }
            let mut table = self.table.lock();
            let removed = is_unused().then(|| table.remove(&key));
            drop(table);
            drop(removed);
        }
    }

    /// Returns the number of pairs.
    pub(crate) fn len(&self) -> usize {
        self.table.lock().len()
    }

    /// Gives up all connections.
    pub(crate) fn close(&self) {
        let endpoints = std::mem::take(&mut *self.table.lock());
        endpoints.values().for_each(|endpoint| endpoint.disconnect());
    }
}

/// Returns the endpoint that was connected first, if there are as many as there may be.
fn excess(table: &HashMap<(usize, String), Arc<Endpoint>>, most: usize) -> Option<(usize, String)> {
    if table.len() < most {
        return None;
    }
    let unused = table.iter().filter(|(_, endpoint)| Arc::strong_count(endpoint) == 1);
    let oldest = unused.min_by_key(|(_, endpoint)| endpoint.connected_since())?;
    Some(oldest.0.clone())
}
