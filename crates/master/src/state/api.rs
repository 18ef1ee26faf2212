//! The calls that the state passes on to its parts.

use std::time::Duration;

use mooncake_base::{
    ClientId, JobId, Moment, ReplicaId, Result, SegmentId, TaskId, TenantId, Version,
};

use crate::state::{
    State,
    calls::{
        lease_sweep::LeaseSweep,
        put::{UnfinishedPut, unfinished_put},
        query::{listing::Listing, removal::Removal},
        task::{TaskView, drain::JobView},
        view::ObjectView,
    },
    catalog::tenant::TenantQuota,
    ids::{DiskSlot, SegmentSlot},
    inventory::{
        clear,
        clients::ExpiredClient,
        memory,
        memory_use::{self, MemoryUse},
        quota,
        read::{self, FenceTicket, LocateOptions, Located, LocatedObject, Probed},
        recovery::{self, RecoveryScope},
        removal::{self, RemovalTerms},
    },
    ledger::lease_notes::LeaseNotes,
    pool::{
        disks::DiskSpec,
        request::SegmentFilter,
        segment::{SegmentSpec, SegmentView},
    },
};

impl State {
    /// Returns the value of a tag of an object that was just located.
    pub fn tag(&self, located: &LocatedObject, name: &str) -> Option<&str> {
        self.inventory.catalog().annotation(located.slot)?.tags.value(name)
    }
}

impl State {
    /// Drops the replicas of the object in segments of that name, or all if the name is empty; the
    /// object is removed with its last replica. Returns whether a replica was dropped. An object
    /// that is leased, being written for the first time or being copied is left alone.
    pub fn clear_copies(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        segment: &str,
    ) -> bool {
        clear::clear_copies(&mut self.inventory, now, tenant, key, segment)
    }

    /// Releases a fence that was granted to one reader only: if the memory was freed meanwhile, its
    /// quarantine ends. Has no effect on fences of several readers and on fences that were released
    /// before.
    pub fn release_fence(&mut self, ticket: FenceTicket) {
        self.inventory.release_fence(ticket)
    }

    /// Removes the object.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: the first put is unfinished, forced or not;
    /// `OBJECT_HAS_LEASE` and `OBJECT_HAS_REPLICATION_TASK` unless forced.
    pub fn remove(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        is_forced: bool,
    ) -> Result<()> {
        let terms = RemovalTerms { is_forced, ..RemovalTerms::default() };
        self.inventory.remove(now, tenant, key, &terms)
    }

    /// Removes the object if the terms allow it, like [`remove`](Self::remove).
    ///
    /// # Errors
    /// The errors of [`remove`](Self::remove); `OBJECT_HAS_LEASE` for a hard-pinned object that the
    /// terms spare; `OBJECT_ALREADY_EXISTS`: it has another version.
    pub fn remove_under(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        terms: &RemovalTerms,
    ) -> Result<()> {
        self.inventory.remove(now, tenant, key, terms)
    }

    /// Runs one slice of a removal. Returns whether it is done.
    pub fn remove_matching(&mut self, now: Moment, removal: &mut Removal) -> bool {
        removal.step(now, &mut self.inventory)
    }

    /// Runs one slice of a listing. Returns whether the page is complete. Grants no lease.
    pub fn list_objects(&self, listing: &mut Listing) -> bool {
        listing.step(&self.inventory, &self.writes)
    }

    /// Visits one slice of the complete objects of a tenant, in no order. Returns the next
    /// position, if there is more. Grants no lease.
    pub fn walk(
        &self,
        tenant: &TenantId,
        from: u32,
        visit: &mut dyn FnMut(&[u8], u64),
    ) -> Option<u32> {
        removal::walk(&self.inventory, tenant, from, visit)
    }

    /// Returns the object of a key with its copies, leases, pins and unfinished puts. Grants no
    /// lease.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`
    pub fn view_object(&self, now: Moment, tenant: &TenantId, key: &[u8]) -> Result<ObjectView> {
        ObjectView::find(&self.inventory, now, tenant, key, &self.writes)
    }

    /// Returns the bytes of the segments that accept objects, by the reason that holds them.
    pub fn memory_use(&self, now: Moment) -> MemoryUse {
        memory_use::memory_use(&self.inventory, now, SegmentFilter::All).0
    }

    /// Sets the quota of a tenant in bytes.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy. `INVALID_PARAMS`: an invalid name, or a
    /// quota outside 1 to 2^63 - 1.
    pub fn set_quota(&mut self, tenant: &TenantId, bytes: u64) -> Result<()> {
        quota::set_quota(&mut self.inventory, tenant, bytes)
    }

    /// Removes the quota of a tenant, and with it the right to write.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` if it has none,
    /// `TENANT_NOT_EMPTY` while it has objects or unfinished puts.
    pub fn remove_quota(&mut self, tenant: &TenantId) -> Result<()> {
        quota::remove_quota(&mut self.inventory, tenant)
    }

    /// Returns the quota of a tenant.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` if it has none.
    pub fn quota(&self, tenant: &TenantId) -> Result<TenantQuota> {
        quota::quota(&self.inventory, tenant)
    }

    /// Returns every quota, by name.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy.
    pub fn quotas(&self) -> Result<Vec<TenantQuota>> {
        quota::quotas(&self.inventory)
    }

    /// Registers the client under a name ("host:port"), or renews its registration.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the name is longer than 1 KiB or 65536 clients are registered.
    pub fn register(&mut self, now: Moment, client: ClientId, name: &str) -> Result<()> {
        self.clients().register(now, client, name)
    }

    /// Records whether a registered client asked for the SSD tier, which does not exist yet.
    pub fn set_wants_offload(&mut self, client: ClientId, wants: bool) {
        self.inventory.clients_mut().set_wants_offload(client, wants)
    }

    /// Records a heartbeat. Returns `false` if the client is unknown; it must register and mount
    /// again.
    pub fn heartbeat(&mut self, now: Moment, client: ClientId) -> bool {
        self.clients().heartbeat(now, client)
    }

    /// Returns the number of the client's registration; 0 for an unknown client.
    ///
    /// A client that expired can be registered again by a late duplicate of an old message. The
    /// new number shows the client that the master has dropped its segments.
    pub fn registration(&self, client: ClientId) -> u64 {
        self.inventory.clients().registration(client)
    }

    /// Marks a client whose connection closed: until its next heartbeat its replicas are hidden
    /// from readers and its segments accept no objects. Has no effect on an unknown client.
    pub fn suspect(&mut self, now: Moment, client: ClientId) {
        self.clients().suspect(now, client)
    }

    /// Records that the process of a client closed its connection or is dead, as the kernel of its
    /// host reported. A process that does not come back within its time to live is dead: the memory
    /// of its puts is freed as for a client that [leaves](Self::unregister), and not after the
    /// release timeout.
    pub fn record_disconnect(&mut self, client: ClientId) {
        self.inventory.clients_mut().record_disconnect(client)
    }

    /// Removes a client that leaves or is known to be dead. Its segments are dropped. The memory of
    /// its unfinished puts is freed as soon as no late byte of them can arrive, since bytes sent
    /// before may still be in flight. Returns whether the client was known.
    pub fn unregister(&mut self, now: Moment, client: ClientId) -> bool {
        self.clients().unregister(now, client)
    }

    /// Returns the clients that expired since the last call.
    pub fn take_expired(&mut self) -> Vec<ExpiredClient> {
        self.inventory.clients_mut().take_expired()
    }

    /// Accepts a mount message by its sequence number. 0 is not checked; an equal number is the
    /// same message, sent again.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `INVALID_PARAMS`: a later message was processed before;
    /// drop this one.
    pub fn check_sequence(&mut self, client: ClientId, sequence: u64) -> Result<()> {
        self.inventory.clients_mut().check_sequence(client, sequence)
    }

    /// Drops all segments of the client but these.
    pub fn retain_segments(&mut self, client: ClientId, segments: &[SegmentId]) {
        self.clients().retain_segments(client, segments)
    }

    /// Returns the deadline of the call's wait for owners that have not come back; `None` if it
    /// need not wait.
    pub fn recovery_wait(&self, now: Moment, awaited: &RecoveryScope<'_>) -> Option<Moment> {
        recovery::recovery_wait(&self.inventory, now, awaited)
    }

    /// Returns whether calls may have to wait: segments are unclaimed, the recovered state is in
    /// doubt, or clients hung up during a pause of the master.
    pub fn is_recovering(&self, now: Moment) -> bool {
        recovery::is_recovering(&self.inventory, now)
    }

    /// Drops all segments that came from the log, with their objects, since the log is older than
    /// it may be: their memory may have been reused. Owners that announced them again are
    /// forgotten, so that they register and mount other memory. Puts whose memory is gone with the
    /// segments are abandoned. Returns the number of segments.
    pub fn drop_recovered(&mut self, now: Moment) -> usize {
        self.clients().drop_recovered(now)
    }

    /// Returns the number of unclaimed segments.
    pub fn unclaimed_segments(&self) -> u64 {
        recovery::unclaimed_segments(&self.inventory)
    }

    /// Claims a segment that the owner mounted at an earlier master. The objects are readable
    /// again. Has no effect on a segment that is claimed already.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_NOT_FOUND`: the segment is unknown, or its
    /// memory has changed; mount other memory in its place.
    pub fn resume(&mut self, client: ClientId, segment: &SegmentSpec) -> Result<()> {
        self.clients().resume(client, segment)
    }

    /// Records effects from now on.
    pub fn record_effects(&mut self) {
        self.inventory.record_effects()
    }

    /// Adds the segment to the pool. A repetition with the same id, incarnation and memory changes
    /// nothing; a later incarnation drops the objects of the earlier one. Memory that left the pool
    /// and comes back accepts no objects before the fences and writes granted in it have ended.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_ALREADY_EXISTS`: another client or another
    /// memory has that id. `INVALID_PARAMS`: no length, or memory that overlaps another segment of
    /// the client or the end of the address space.
    pub fn mount(&mut self, now: Moment, client: ClientId, segment: SegmentSpec) -> Result<()> {
        self.clients().mount(now, client, segment)
    }

    /// Removes the segment from the pool: at once, or after a grace in which it is readable but
    /// accepts no objects. A second call may shorten the grace, but not extend it.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns it.
    pub fn unmount(
        &mut self,
        now: Moment,
        client: ClientId,
        segment: SegmentId,
        grace: Duration,
    ) -> Result<()> {
        self.clients().unmount(now, client, segment, grace)
    }

    /// Returns the segment of a [`Place`](crate::state::Place) of the last call.
    pub fn segment(&self, segment: SegmentSlot) -> SegmentView<'_> {
        self.inventory.pool().segment(segment)
    }

    /// Returns every mounted segment, by name.
    pub fn list_segments(&self) -> Vec<SegmentView<'_>> {
        self.inventory.pool().list_segments()
    }

    /// Tells the state that effects up to this position are on disk: `u64::MAX` while nothing has
    /// to be. Freed memory waits from the first call on. Frees a bounded number of blocks; the rest
    /// is freed by [`advance`](Self::advance) or by the next put that needs memory.
    pub fn confirm_synced(&mut self, position: u64) {
        memory::confirm_synced(&mut self.inventory, position)
    }

    /// Returns whether the log should be synced soon, since puts will need memory that waits for
    /// it. Returns it once.
    pub fn take_sync_request(&mut self) -> bool {
        memory::take_sync_request(&mut self.inventory)
    }

    /// Locates objects. The length of the fence depends on the bytes of all of them together.
    ///
    /// # Errors
    /// By object: `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: the first put is unfinished;
    /// `TRANSFER_FAIL`: every process that holds a replica has just lost its connection.
    pub fn locate<K: AsRef<[u8]>>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        options: LocateOptions,
    ) -> Located {
        let (objects, fence) =
            self.locate_counted(now, tenant, keys, options, None, |_, object| object);
        Located { objects, fence }
    }

    /// Locates objects like [`locate`](Self::locate), as a part of a call whose objects have so many
    /// bytes together; `None`: these are all of them. Converts each result with `make`.
    pub fn locate_counted<K: AsRef<[u8]>, R>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        options: LocateOptions,
        bytes: Option<u64>,
        mut make: impl FnMut(&Self, Result<LocatedObject>) -> R,
    ) -> (Vec<R>, Duration) {
        let found = read::find_readable(&mut self.inventory, now, tenant, keys);
        let fence = if options.has_fence {
            let objects = self.inventory.objects();
            let lengths = found.iter().flatten().map(|&slot| objects.at(slot).length);
            let bytes = bytes.unwrap_or_else(|| lengths.fold(0, u64::saturating_add));
            let wanted = self.inventory.rules().fence(bytes);
            read::grantable_fence(&mut self.inventory, now, wanted)
        } else {
            Duration::ZERO
        };
        let answers = found.into_iter().map(|slot| {
            let object = slot.map(|slot| self.inventory.locate_one(now, slot, options, fence));
            make(self, object)
        });
        (answers.collect(), fence)
    }

    /// Returns whether the replica of that version exists and has existed since the locate.
    pub fn verify(
        &self,
        tenant: &TenantId,
        key: &[u8],
        version: Version,
        replica: ReplicaId,
    ) -> bool {
        read::verify(&self.inventory, tenant, key, version, replica)
    }

    /// Returns whether the object exists; renews the retention lease on request.
    pub fn probe(&mut self, now: Moment, tenant: &TenantId, key: &[u8], has_lease: bool) -> Probed {
        self.inventory.probe(now, tenant, key, has_lease)
    }

    /// Probes several keys like [`probe`](Self::probe): one result per key, in order.
    pub fn probe_all<K: AsRef<[u8]>>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        has_lease: bool,
    ) -> Vec<Probed> {
        read::probe_all(&mut self.inventory, now, tenant, keys, has_lease)
    }

    /// Tells the state that effects up to this position survive a restart of the master.
    pub fn confirm_durable(&mut self, position: u64) {
        memory::confirm_durable(&mut self.inventory, position);
    }

    /// Returns how many steps calls have taken since the start, as far as a call may take many of
    /// them: segments tried, objects and blocks looked at or evicted by searches for memory, for the
    /// text of a refusal, too, tasks begun, and objects looked at by drain jobs.
    pub fn steps(&self) -> u64 {
        self.searches.steps()
    }

    /// Returns a task that has not been forgotten.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`.
    pub fn task(&self, id: TaskId) -> Result<TaskView> {
        self.tasks.view(id)
    }

    /// Returns a job that has not been forgotten.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`.
    pub fn job(&self, id: JobId) -> Result<JobView> {
        self.jobs.view(id)
    }

    /// Returns the newest unfinished put of the client that prevents a plain put of the key; `None`
    /// if there is none, or if the key has a readable value.
    ///
    /// The answer to the start or to the end of that put may be lost. The client, which knows what it
    /// is still writing, ends or revokes the put before it starts another one.
    pub fn unfinished_put(
        &self,
        client: ClientId,
        tenant: &TenantId,
        key: &[u8],
    ) -> Option<UnfinishedPut> {
        unfinished_put(&self.inventory, &self.writes, client, tenant, key)
    }
}

/// Returns the disk of a [`DiskPlace`](crate::state::DiskPlace) of the last call.
pub fn disk_of(state: &State, disk: DiskSlot) -> &DiskSpec {
    &state.inventory.disk(disk).spec
}

/// Returns the number of changes so far that may let a put go on which waits for disks.
pub fn disk_progress(state: &State) -> u64 {
    state.inventory.offloads().progress()
}

/// Runs one slice of a look at all objects for those that are leased; `None` when it is over.
pub fn sweep_leases(state: &State, sweep: &mut LeaseSweep, now: Moment) -> Option<LeaseNotes> {
    sweep.slice(&state.inventory, now)
}
