//! Clients: registrations, heartbeats and expiry.

pub(in crate::state) mod recovery;
pub(in crate::state) mod segments;

use mooncake_base::{ClientId, Error, Moment, Result, SegmentId, TenantId};
use rustc_hash::FxHashSet;

use crate::state::{
    calls::{
        disks::DiskCalls,
        put::{AbandonReason, PutCalls, write::Writes},
        reclaim::Searches,
        task::{TaskCalls, Tasks, drain::Jobs},
    },
    inventory::{
        Inventory,
        clients::{self, CLIENTS_MAX},
        mounted_disks,
        recovery::{AwaitedOwner, awaited_owner, record_returning_client},
        segments::mark_suspect,
    },
    pool::host::host_of,
    timer::Timer,
};

/// Maximum length of a client name.
const NAME_BYTES_MAX: usize = 1024;

/// The calls about clients and their segments, with the parts that they change: all, since a client
/// that leaves takes its memory, its puts and its tasks along.
#[derive(Debug)]
pub(crate) struct ClientCalls<'a> {
    pub(in crate::state) inventory: &'a mut Inventory,
    pub(in crate::state) searches: &'a mut Searches,
    pub(in crate::state) writes: &'a mut Writes,
    pub(in crate::state) tasks: &'a mut Tasks,
    pub(in crate::state) jobs: &'a mut Jobs,
}

impl ClientCalls<'_> {
    pub(in crate::state) fn puts(&mut self) -> PutCalls<'_> {
        PutCalls { inventory: self.inventory, searches: self.searches, writes: self.writes }
    }

    pub(in crate::state) fn disks(&mut self) -> DiskCalls<'_> {
        DiskCalls { inventory: self.inventory }
    }

    pub(in crate::state) fn tasks(&mut self) -> TaskCalls<'_> {
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
            clients::set_host(self.inventory, client, host_of(name));
            return Ok(());
        }
        if self.inventory.clients().count() >= CLIENTS_MAX as u64 {
            return Err(Error::invalid("there are too many clients").with("limit", CLIENTS_MAX));
        }
        clients::register(self.inventory, now, client, host_of(name));
        Ok(())
    }

    /// Records that the master could not answer since `since`. The next run of the timers extends the
    /// time of all clients by that.
    pub(crate) fn record_stall(&mut self, since: Moment) {
        clients::record_stall(self.inventory, since);
    }

    /// Returns the first of the keys for whose owner a call waits; `None` if it need not wait.
    pub(crate) fn awaited_owner(
        &self,
        now: Moment,
        tenant: &TenantId,
        keys: &[&[u8]],
    ) -> Option<AwaitedOwner> {
        awaited_owner(self.inventory, now, tenant, keys)
    }

    /// Records that a client has come from another master, whose other clients may come as well.
    pub(crate) fn record_returning_client(&mut self, now: Moment) {
        record_returning_client(self.inventory, now);
    }

    /// Records a heartbeat. Returns `false` if the client is unknown; it must register and mount
    /// again.
    pub(in crate::state) fn heartbeat(&mut self, now: Moment, client: ClientId) -> bool {
        let Some(was_suspect) = clients::record_heartbeat(self.inventory, now, client) else {
            return false;
        };
        if was_suspect {
            self.mark_segments(client, false);
        }
        true
    }

    /// Marks a client whose connection closed: until its next heartbeat its replicas are hidden
    /// from readers and its segments accept no objects. Has no effect on an unknown client.
    pub(in crate::state) fn suspect(&mut self, now: Moment, client: ClientId) {
        // The closed connection may be seen before the first timer after a pause.
        clients::compensate_stall(self.inventory, now);
        if clients::suspect(self.inventory, client) {
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
    pub(in crate::state) fn check_client(
        &mut self,
        now: Moment,
        client: ClientId,
        registration: u64,
    ) {
        let Some(known) = self.inventory.clients().get(client) else { return };
        if known.registration != registration {
            return;
        }
        let end = known.last_heartbeat + self.inventory.rules().client_ttl;
        let is_disconnected = known.is_disconnected;
        if end.has_passed(now) {
            clients::record_expired(self.inventory, client);
            let why =
                if is_disconnected { AbandonReason::Leaving } else { AbandonReason::Vanished };
            self.forget_client(now, client, why);
        } else {
            self.inventory.set_timer(end, Timer::Client(client, registration));
        }
    }

    pub(in crate::state) fn forget_client(
        &mut self,
        now: Moment,
        client: ClientId,
        writes: AbandonReason,
    ) -> bool {
        let was_known = clients::forget(self.inventory, client);
        self.puts().abandon_writes(now, client, writes);
        self.drop_segments(&self.inventory.segments().of_client(client));
        for disk in self.inventory.disks().of_client(client) {
            mounted_disks::set_away(self.inventory, now, disk);
        }
        self.tasks().reassign_tasks(now, client);
        was_known
    }

    fn mark_segments(&mut self, client: ClientId, is_suspect: bool) {
        mounted_disks::mark_suspect(self.inventory, client, is_suspect);
        mark_suspect(self.inventory, client, is_suspect);
    }
}

impl ClientCalls<'_> {
    /// Drops all segments of the client but these.
    pub(in crate::state) fn retain_segments(&mut self, client: ClientId, segments: &[SegmentId]) {
        let kept: FxHashSet<SegmentId> = segments.iter().copied().collect();
        let mut dropped = self.inventory.segments().of_client(client);
        dropped.retain(|&slot| !kept.contains(&self.inventory.segment(slot).spec.id));
        self.drop_segments(&dropped);
    }
}
