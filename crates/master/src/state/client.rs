//! Clients: registrations, heartbeats and expiry.

pub(super) mod answers;
pub(super) mod mount_order;
pub(super) mod recovery;

use crate::state::{
    ids::ObjectSlot,
    inventory::Inventory,
    pool::{host::host_of, segment::Segments},
    put::{AbandonReason, PutCalls, write::Writes},
    reclaim::Searches,
    task::{TaskCalls, Tasks, drain::Jobs},
    timer::Timer,
};
use std::sync::Arc;

use mooncake_base::{ClientId, Error, ErrorCode, Moment, Result, TenantId};
use rustc_hash::{FxHashMap, FxHashSet};

/// Maximum number of clients.
const CLIENTS_MAX: usize = 65_536;
/// Maximum length of a client name.
const NAME_BYTES_MAX: usize = 1024;

/// Registered clients.
#[derive(Debug, Default)]
pub(super) struct Clients {
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
    fn of(id: ClientId, segments: &Segments) -> Self {
        let slots = segments.of_client(id);
        let allocators = slots.iter().map(|&slot| &segments.at(slot).allocator);
        let held = Self { id, segments: slots.len(), copies: 0, bytes: 0 };
        allocators.fold(held, |held, allocator| Self {
            copies: held.copies + allocator.count(),
            bytes: held.bytes + allocator.used(),
            ..held
        })
    }
}

#[derive(Debug)]
pub(super) struct Client {
    host: Arc<str>,
    last_heartbeat: Moment,
    /// The time of the last call that was reported. Unlike `last_heartbeat`, a pause of the master
    /// does not change it.
    last_heard: Moment,
    is_suspect: bool,
    /// Its process closed its connection or is dead; it sent no heartbeat since.
    is_disconnected: bool,
    registration: u64,
    /// Sequence number of the last mount message.
    pub(super) sequence: u64,
}

impl Clients {
    /// Checks that a client is registered.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`.
    pub(super) fn check(&self, client: ClientId) -> Result<()> {
        if self.by_id.contains_key(&client) { Ok(()) } else { Err(unknown(client)) }
    }

    /// Returns a registered client.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`.
    pub(super) fn at_mut(&mut self, client: ClientId) -> Result<&mut Client> {
        self.by_id.get_mut(&client).ok_or_else(|| unknown(client))
    }

    /// Returns whether any client is suspect.
    pub(super) fn has_suspects(&self) -> bool {
        self.suspects > 0
    }

    /// Returns whether the client called later than that, as far as the state was told.
    pub(super) fn was_heard_after(&self, client: ClientId, moment: Moment) -> bool {
        self.by_id.get(&client).is_some_and(|client| client.last_heard > moment)
    }

    pub(super) fn is_suspect(&self, client: ClientId) -> bool {
        self.by_id.get(&client).is_some_and(|client| client.is_suspect)
    }

    /// Returns the host of a client; empty if unknown.
    pub(super) fn host(&self, client: ClientId) -> Arc<str> {
        self.by_id.get(&client).map_or_else(|| Arc::from(""), |client| Arc::clone(&client.host))
    }

    pub(super) fn count(&self) -> u64 {
        self.by_id.len() as u64
    }
}

/// The calls about clients and their segments, with the parts that they change: all, since a client
/// that leaves takes its memory, its puts and its tasks along.
#[derive(Debug)]
pub(crate) struct ClientCalls<'a> {
    pub(super) inventory: &'a mut Inventory,
    pub(super) searches: &'a mut Searches,
    pub(super) writes: &'a mut Writes,
    pub(super) tasks: &'a mut Tasks,
    pub(super) jobs: &'a mut Jobs,
}

impl ClientCalls<'_> {
    pub(super) fn puts(&mut self) -> PutCalls<'_> {
        PutCalls { inventory: self.inventory, searches: self.searches, writes: self.writes }
    }

    pub(super) fn tasks(&mut self) -> TaskCalls<'_> {
        TaskCalls {
            inventory: self.inventory,
            searches: self.searches,
            writes: self.writes,
            tasks: self.tasks,
            jobs: self.jobs,
        }
    }

    /// Registers the client under a name ("host:port"), or renews its registration.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the name is longer than 1 KiB or 65536 clients are registered.
    pub(in crate::state) fn register(
        &mut self,
        now: Moment,
        client: ClientId,
        name: &str,
    ) -> Result<()> {
        if name.len() > NAME_BYTES_MAX {
            return Err(Error::invalid("the name of the client is too long")
                .with("name_bytes", name.len())
                .with("limit", NAME_BYTES_MAX));
        }
        if self.heartbeat(now, client) {
            if let Some(known) = self.inventory.clients.by_id.get_mut(&client) {
                known.host = host_of(name).into();
            }
            return Ok(());
        }
        if self.inventory.clients.by_id.len() >= CLIENTS_MAX {
            return Err(Error::invalid("there are too many clients").with("limit", CLIENTS_MAX));
        }
        self.inventory.clients.registrations += 1;
        let registration = self.inventory.clients.registrations;
        let new = Client {
            host: host_of(name).into(),
            last_heartbeat: now,
            last_heard: now,
            is_suspect: false,
            is_disconnected: false,
            registration,
            sequence: 0,
        };
        self.inventory.clients.by_id.insert(client, new);
        self.inventory
            .timers
            .push(now + self.inventory.rules.client_ttl, Timer::Client(client, registration));
        Ok(())
    }

    /// Records that the master could not answer since `since`. The next run of the timers extends the
    /// time of all clients by that.
    pub(crate) fn record_stall(&mut self, since: Moment) {
        self.inventory.record_stall(since);
    }

    /// Returns the first of the keys for whose owner a call waits; `None` if it need not wait.
    pub(crate) fn awaited_owner(
        &self,
        now: Moment,
        tenant: &TenantId,
        keys: &[&[u8]],
    ) -> Option<recovery::AwaitedOwner> {
        self.inventory.awaited_owner(now, tenant, keys)
    }

    /// Records that a client has come from another master, whose other clients may come as well.
    pub(crate) fn record_returning_client(&mut self, now: Moment) {
        self.inventory.recovery.record_returning_client(now, &self.inventory.rules);
    }

    /// Records a heartbeat. Returns `false` if the client is unknown; it must register and mount
    /// again.
    pub(in crate::state) fn heartbeat(&mut self, now: Moment, client: ClientId) -> bool {
        let Some(known) = self.inventory.clients.by_id.get_mut(&client) else { return false };
        known.last_heartbeat = known.last_heartbeat.max(now);
        known.last_heard = known.last_heard.max(now);
        known.is_disconnected = false;
        if std::mem::take(&mut known.is_suspect) {
            self.inventory.clients.suspects -= 1;
            self.mark_segments(client, false);
        }
        true
    }

    /// Marks a client whose connection closed: until its next heartbeat its replicas are hidden
    /// from readers and its segments accept no objects. Has no effect on an unknown client.
    pub(in crate::state) fn suspect(&mut self, now: Moment, client: ClientId) {
        // The closed connection may be seen before the first timer after a pause.
        self.inventory.compensate_stall(now);
        let Some(known) = self.inventory.clients.by_id.get_mut(&client) else { return };
        if !std::mem::replace(&mut known.is_suspect, true) {
            self.inventory.clients.suspects += 1;
            self.mark_segments(client, true);
        }
    }

    /// Removes a client that leaves or is known to be dead. Its segments are dropped. The memory of
    /// its unfinished puts is freed as soon as no late byte of them can arrive, since bytes sent
    /// before may still be in flight. Returns whether the client was known.
    pub(in crate::state) fn unregister(&mut self, now: Moment, client: ClientId) -> bool {
        self.forget_client(now, client, AbandonReason::Leaving)
    }

    /// Handles the timer of a client: expires the client or sets the timer again.
    pub(super) fn check_client(&mut self, now: Moment, client: ClientId, registration: u64) {
        let Some(known) = self.inventory.clients.by_id.get(&client) else { return };
        if known.registration != registration {
            return;
        }
        let end = known.last_heartbeat + self.inventory.rules.client_ttl;
        let is_disconnected = known.is_disconnected;
        if end.has_passed(now) {
            self.inventory.log.counters.clients_expired += 1;
            if self.inventory.clients.expired.len() < CLIENTS_MAX {
                let gone = ExpiredClient::of(client, &self.inventory.pool.segments);
                self.inventory.clients.expired.push(gone);
            }
            let why = match is_disconnected {
                true => AbandonReason::Leaving,
                false => AbandonReason::Vanished,
            };
            self.forget_client(now, client, why);
        } else {
            self.inventory.timers.push(end, Timer::Client(client, registration));
        }
    }

    pub(super) fn forget_client(
        &mut self,
        now: Moment,
        client: ClientId,
        writes: AbandonReason,
    ) -> bool {
        let known = self.inventory.clients.by_id.remove(&client);
        self.inventory.clients.suspects -=
            usize::from(known.as_ref().is_some_and(|known| known.is_suspect));
        self.inventory.clients.offloading.remove(&client);
        self.puts().abandon_writes(now, client, writes);
        self.drop_segments(&self.inventory.pool.segments.of_client(client));
        self.tasks().reassign_tasks(now, client);
        known.is_some()
    }

    fn mark_segments(&mut self, client: ClientId, is_suspect: bool) {
        for slot in self.inventory.pool.segments.of_client(client) {
            self.inventory.pool.segments.at_mut(slot).is_suspect = is_suspect;
            self.inventory.pool.segments.refresh(slot);
        }
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

impl Inventory {
    /// Returns whether a client that asked for the SSD tier has a replica of the object.
    pub(super) fn wants_offload(&self, object: ObjectSlot) -> bool {
        let offloading = &self.clients.offloading;
        !offloading.is_empty()
            && self
                .catalog
                .objects
                .at(object)
                .replicas
                .iter()
                .any(|replica| offloading.contains(&self.pool.segments.at(replica.segment).client))
    }

    /// Records that the master could not answer since `since`. The next run of the timers extends the
    /// time of all clients by that.
    pub(in crate::state) fn record_stall(&mut self, since: Moment) {
        self.advanced = self.advanced.map(|last| last.min(since));
    }

    /// Extends the time of all clients by a pause of the master, in which no heartbeat could
    /// arrive.
    pub(super) fn compensate_stall(&mut self, now: Moment) {
        let Some(last) = self.advanced.replace(now) else { return };
        let pause = now.since(last);
        if pause <= self.rules.stall() {
            return;
        }
        for client in self.clients.by_id.values_mut() {
            client.last_heartbeat = now.min(client.last_heartbeat + pause);
        }
        self.recovery.record_pause(now, pause, &self.rules);
    }
}

fn unknown(client: ClientId) -> Error {
    Error::new(ErrorCode::CLIENT_NOT_FOUND, "the client is not registered").with("client", client)
}
