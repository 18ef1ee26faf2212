//! Registered clients: heartbeats, suspicion, expired ones.

use std::sync::Arc;

use mooncake_base::{ClientId, Error, ErrorCode, Moment, Result};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{ids::ObjectSlot, inventory::Inventory, pool::segment::Segments, timer::Timer};

/// Maximum number of clients.
pub(in crate::state) const CLIENTS_MAX: usize = 65_536;

/// Registered clients.
#[derive(Debug, Default)]
pub(in crate::state) struct Clients {
    by_id: FxHashMap<ClientId, Client>,
    /// Registered clients that asked for the SSD tier.
    offloading: FxHashSet<ClientId>,
    registrations: u64,
    /// Number of suspect clients.
    suspects: usize,
    /// Expired clients that were not taken yet.
    expired: Vec<ExpiredClient>,
}

/// A client that expired, and what its segments held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpiredClient {
    /// The client.
    pub id: ClientId,
    /// Its segments.
    pub segments: usize,
    /// Copies of objects in them. An object without a copy elsewhere is lost.
    pub copies: u64,
    /// Bytes of these copies.
    pub bytes: u64,
}

impl ExpiredClient {
    /// Returns a client with what its segments hold.
    pub(in crate::state) fn of(id: ClientId, segments: &Segments) -> Self {
        let slots = segments.of_client(id);
        let owned = slots.iter().map(|&slot| segments.at(slot));
        let held = Self { id, segments: slots.len(), copies: 0, bytes: 0 };
        owned.fold(held, |held, segment| Self {
            copies: held.copies + segment.allocator.count() - segment.prepared.len() as u64,
            bytes: held.bytes + segment.view().used,
            ..held
        })
    }
}

#[derive(Debug)]
pub(in crate::state) struct Client {
    pub(in crate::state) host: Arc<str>,
    pub(in crate::state) last_heartbeat: Moment,
    /// The time of the last call that was reported. Unlike `last_heartbeat`, a pause of the master
    /// does not change it.
    pub(in crate::state) last_heard: Moment,
    pub(in crate::state) is_suspect: bool,
    /// Its process closed its connection or is dead; it sent no heartbeat since.
    pub(in crate::state) is_disconnected: bool,
    pub(in crate::state) registration: u64,
    /// Sequence number of the last mount message.
    pub(in crate::state) sequence: u64,
}

impl Clients {
    /// Checks that a client is registered.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`.
    pub(in crate::state) fn check(&self, client: ClientId) -> Result<()> {
        if self.by_id.contains_key(&client) { Ok(()) } else { Err(unknown(client)) }
    }

    /// Returns a client, if it is registered.
    pub(in crate::state) fn get(&self, client: ClientId) -> Option<&Client> {
        self.by_id.get(&client)
    }

    /// Returns a registered client.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`.
    pub(in crate::state) fn at_mut(&mut self, client: ClientId) -> Result<&mut Client> {
        self.by_id.get_mut(&client).ok_or_else(|| unknown(client))
    }

    /// Returns whether any client is suspect.
    pub(in crate::state) fn has_suspects(&self) -> bool {
        self.suspects > 0
    }

    /// Returns whether the client called later than that, as far as the state was told.
    pub(in crate::state) fn was_heard_after(&self, client: ClientId, moment: Moment) -> bool {
        self.by_id.get(&client).is_some_and(|client| client.last_heard > moment)
    }

    pub(in crate::state) fn is_suspect(&self, client: ClientId) -> bool {
        self.by_id.get(&client).is_some_and(|client| client.is_suspect)
    }

    /// Returns the host of a client; empty if unknown.
    pub(in crate::state) fn host(&self, client: ClientId) -> Arc<str> {
        self.by_id.get(&client).map_or_else(|| Arc::from(""), |client| Arc::clone(&client.host))
    }

    pub(in crate::state) fn count(&self) -> u64 {
        self.by_id.len() as u64
    }
}

impl Clients {
    /// Records whether a registered client asked for the SSD tier, which does not exist yet.
    pub(in crate::state) fn set_wants_offload(&mut self, client: ClientId, wants: bool) {
        if wants && self.by_id.contains_key(&client) {
            self.offloading.insert(client);
        } else {
            self.offloading.remove(&client);
        }
    }

    /// Returns the number of the client's registration; 0 for an unknown client.
    ///
    /// A client that expired can be registered again by a late duplicate of an old message. The
    /// new number shows the client that the master has dropped its segments.
    pub(in crate::state) fn registration(&self, client: ClientId) -> u64 {
        self.by_id.get(&client).map_or(0, |known| known.registration)
    }

    /// Records that the process of a client closed its connection or is dead, as the kernel of its
    /// host reported. A process that does not come back within its time to live is dead: the memory
    /// of its puts is freed as for a client that [leaves](Self::unregister), and not after the
    /// release timeout.
    pub(in crate::state) fn record_disconnect(&mut self, client: ClientId) {
        if let Some(known) = self.by_id.get_mut(&client) {
            known.is_disconnected = true;
        }
    }

    /// Returns the clients that expired since the last call.
    pub(in crate::state) fn take_expired(&mut self) -> Vec<ExpiredClient> {
        std::mem::take(&mut self.expired)
    }
}

/// Returns whether a client that asked for the SSD tier has a replica of the object.
pub(in crate::state) fn wants_offload(inventory: &Inventory, object: ObjectSlot) -> bool {
    let offloading = &inventory.clients.offloading;
    !offloading.is_empty()
        && inventory
            .catalog
            .objects
            .at(object)
            .replicas
            .iter()
            .any(|replica| offloading.contains(&inventory.pool.segments.at(replica.segment).client))
}

/// Records that the master could not answer since `since`. The next run of the timers extends the
/// time of all clients by that.
pub(in crate::state) fn record_stall(inventory: &mut Inventory, since: Moment) {
    inventory.advanced = inventory.advanced.map(|last| last.min(since));
}

/// Extends the time of all clients by a pause of the master, in which no heartbeat could
/// arrive.
pub(in crate::state) fn compensate_stall(inventory: &mut Inventory, now: Moment) {
    let Some(last) = inventory.advanced.replace(now) else { return };
    let pause = now.since(last);
    if pause <= inventory.rules.stall() {
        return;
    }
    for client in inventory.clients.by_id.values_mut() {
        client.last_heartbeat = now.min(client.last_heartbeat + pause);
    }
    inventory.recovery.record_pause(now, pause, &inventory.rules);
}

/// Registers a client that is not yet, and sets its timer.
pub(in crate::state) fn register(
    inventory: &mut Inventory,
    now: Moment,
    client: ClientId,
    host: Box<str>,
) {
    let Inventory { clients, timers, rules, .. } = inventory;
    clients.registrations += 1;
    let registration = clients.registrations;
    let new = Client {
        host: host.into(),
        last_heartbeat: now,
        last_heard: now,
        is_suspect: false,
        is_disconnected: false,
        registration,
        sequence: 0,
    };
    clients.by_id.insert(client, new);
    timers.push(now + rules.client_ttl, Timer::Client(client, registration));
}

/// Sets the host of a client.
pub(in crate::state) fn set_host(inventory: &mut Inventory, client: ClientId, host: Box<str>) {
    if let Some(known) = inventory.clients.by_id.get_mut(&client) {
        known.host = host.into();
    }
}

/// Records a heartbeat. Returns whether the client was suspect; `None` if it is unknown.
pub(in crate::state) fn record_heartbeat(
    inventory: &mut Inventory,
    now: Moment,
    client: ClientId,
) -> Option<bool> {
    let clients = &mut inventory.clients;
    let known = clients.by_id.get_mut(&client)?;
    known.last_heartbeat = known.last_heartbeat.max(now);
    known.last_heard = known.last_heard.max(now);
    known.is_disconnected = false;
    let was_suspect = std::mem::take(&mut known.is_suspect);
    clients.suspects -= usize::from(was_suspect);
    Some(was_suspect)
}

/// Makes a client suspect. Returns `false` if it is unknown, or was suspect before.
pub(in crate::state) fn suspect(inventory: &mut Inventory, client: ClientId) -> bool {
    let clients = &mut inventory.clients;
    let Some(known) = clients.by_id.get_mut(&client) else { return false };
    let is_new = !std::mem::replace(&mut known.is_suspect, true);
    clients.suspects += usize::from(is_new);
    is_new
}

/// Records that a client has expired, and what its segments hold.
pub(in crate::state) fn record_expired(inventory: &mut Inventory, client: ClientId) {
    let Inventory { clients, pool, log, .. } = inventory;
    log.counters.clients_expired += 1;
    if clients.expired.len() < CLIENTS_MAX {
        clients.expired.push(ExpiredClient::of(client, &pool.segments));
    }
}

/// Forgets a client. Returns whether it was known.
pub(in crate::state) fn forget(inventory: &mut Inventory, client: ClientId) -> bool {
    let clients = &mut inventory.clients;
    let known = clients.by_id.remove(&client);
    clients.suspects -= usize::from(known.as_ref().is_some_and(|known| known.is_suspect));
    clients.offloading.remove(&client);
    known.is_some()
}

fn unknown(client: ClientId) -> Error {
    Error::new(ErrorCode::CLIENT_NOT_FOUND, "the client is not registered").with("client", client)
}

impl Clients {
    /// Accepts a mount message by its sequence number. 0 is not checked; an equal number is the
    /// same message, sent again.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `INVALID_PARAMS`: a later message was processed before;
    /// drop this one.
    pub(in crate::state) fn check_sequence(
        &mut self,
        client: ClientId,
        sequence: u64,
    ) -> Result<()> {
        let known = self.at_mut(client)?;
        if sequence == 0 || sequence >= known.sequence {
            known.sequence = known.sequence.max(sequence);
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::INVALID_PARAMS,
            "a later mount message of the client was processed",
        )
        .with("client", client)
        .with("sequence", sequence)
        .with("last_sequence", known.sequence))
    }
}
