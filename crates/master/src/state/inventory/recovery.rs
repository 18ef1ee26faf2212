//! Segments and objects that are known from the log, but that no owner has claimed since the
//! restart.
//!
//! For a grace after a restart a call that needs an unclaimed object should wait; the driver of the
//! state asks [`State::recovery_wait`]. After the grace the object is absent for readers and does
//! not block writers. It comes back when its owner announces exactly that segment, unless the
//! object was removed or replaced meanwhile. Segments that are not announced in time are dropped.
//!
//! A master without the log of an earlier one knows nothing of the memory that comes back. Once a client
//! tells it that there was one, puts wait for the others' memory, for the same grace.
//!
//! A master that was stopped for a while treats clients that hung up on it in the same way: calls that
//! need their objects or memory wait for them for the same grace.

use std::time::Duration;

use mooncake_base::{ClientId, Moment, TenantId};

use crate::state::{ids::ObjectSlot, inventory::Inventory, pool::Pool, rules::Rules};

/// Deadlines of the recovery after a restart.
#[derive(Debug, Default)]
pub(in crate::state) struct Recovery {
    /// Unclaimed segments.
    pub(in crate::state) segments: u64,
    /// Whether the machine lost power, so that the end of the log may be missing. Nothing recovered
    /// is read before the grace is over: until then, a client that registers may show that even
    /// synced changes are missing.
    pub(in crate::state) is_doubtful: bool,
    grace: Moment,
    end: Moment,
    /// Until then calls wait for suspect clients: they may have hung up on the master only because
    /// it made a pause, and connect again.
    pause_grace: Option<Moment>,
    /// Until then puts wait for memory if there is none: a client has come from another master, as
    /// those that lend will.
    return_grace: Option<Moment>,
    /// End of the last access to memory that the earlier master may have granted without a record
    /// in the log.
    pub(in crate::state) unknown_grants_until: Moment,
    /// End of the leases that an earlier master may have granted.
    pub(in crate::state) leases_until: Moment,
}

impl Recovery {
    pub(in crate::state) fn begin(
        now: Moment,
        unknown_grants_until: Moment,
        leases_until: Moment,
        is_doubtful: bool,
        rules: &Rules,
    ) -> Self {
        let grace = now + rules.resume_grace;
        let end = grace.max(now + rules.unclaimed_ttl);
        Self {
            segments: 0,
            is_doubtful,
            grace,
            end,
            pause_grace: None,
            return_grace: None,
            unknown_grants_until,
            leases_until,
        }
    }

    /// Records that a client has come from another master.
    pub(in crate::state) fn record_returning_client(&mut self, now: Moment, rules: &Rules) {
        // Clients that come later do not extend it.
        self.return_grace.get_or_insert(now + rules.resume_grace);
    }

    /// Returns until when puts wait for the first memory of clients of another master; `None` if some
    /// is mounted.
    fn return_wait(&self, now: Moment, pool: &Pool) -> Option<Moment> {
        let until = self.return_grace.filter(|until| !until.has_passed(now))?;
        pool.segments.mounted().next().is_none().then_some(until)
    }

    /// Returns whether objects may have leases of an earlier master.
    pub(in crate::state) fn has_earlier_leases(&self, now: Moment) -> bool {
        !self.leases_until.has_passed(now)
    }

    /// Returns when unclaimed segments are dropped.
    pub(in crate::state) fn end(&self) -> Moment {
        self.end
    }

    /// Records a pause of the master: no owner could announce anything, and clients may have hung
    /// up.
    pub(in crate::state) fn record_pause(&mut self, now: Moment, pause: Duration, rules: &Rules) {
        (self.grace, self.end) = (self.grace + pause, self.end + pause);
        self.pause_grace = Some(now + rules.resume_grace);
    }
}

/// The objects or memory that a call needs.
#[derive(Debug)]
pub enum RecoveryScope<'a> {
    /// These keys.
    Keys(&'a TenantId, &'a [&'a [u8]]),
    /// Free memory for a new object.
    Space,
    /// Everything.
    All,
}

/// The first object of a call whose owner has not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AwaitedOwner {
    /// The number of its key.
    pub key: usize,
    /// The owner; `None` if it is not known which one is missing.
    pub client: Option<ClientId>,
    /// The deadline of the wait.
    pub until: Moment,
}

impl Inventory {
    /// Returns whether every replica of the object is in an unclaimed segment, or on a disk that is
    /// away.
    pub(in crate::state) fn is_unclaimed(&self, slot: ObjectSlot) -> bool {
        if self.recovery.segments == 0 && !self.pool.disks.has_away() {
            return false;
        }
        let copies = &self.catalog.objects.at(slot).replicas[..];
        let mut mounted = copies
            .iter()
            .map(|copy| self.pool.segments.at(copy.segment))
            .filter(|segment| segment.is_mounted())
            .map(|segment| segment.is_unclaimed)
            .chain(self.disk_copy(slot).map(|disk| self.pool.disks.at(disk).is_away()))
            .peekable();
        mounted.peek().is_some() && mounted.all(|is_unclaimed| is_unclaimed)
    }
}

/// Returns the number of unclaimed segments.
pub(in crate::state) fn unclaimed_segments(inventory: &Inventory) -> u64 {
    inventory.recovery.segments
}

/// Returns the first of the keys for whose owner a call waits; `None` if it need not wait.
pub(in crate::state) fn awaited_owner(
    inventory: &Inventory,
    now: Moment,
    tenant: &TenantId,
    keys: &[&[u8]],
) -> Option<AwaitedOwner> {
    let restart_wait = restart_grace(inventory, now);
    let doubt = if inventory.recovery.is_doubtful { restart_wait } else { None };
    let pause_wait = pause_grace(inventory, now);
    if restart_wait.is_none() && pause_wait.is_none() {
        return None;
    }
    let objects = &inventory.catalog.objects;
    let tenant = objects.tenant_index(tenant)?;
    keys.iter().enumerate().find_map(|(key, name)| {
        let slot = objects.find(tenant, name)?;
        let restart_wait = if inventory.is_unclaimed(slot) { restart_wait } else { None };
        let pause_wait = if inventory.is_unreachable(slot) { pause_wait } else { None };
        let until = restart_wait.or(doubt).or(pause_wait)?;
        let copies = objects.at(slot).replicas.iter();
        let missing = copies
            .map(|copy| inventory.pool.segments.at(copy.segment))
            .find(|segment| segment.is_mounted() && !segment.is_readable());
        Some(AwaitedOwner { key, client: missing.map(|segment| segment.client), until })
    })
}

/// Records that a client has come from another master, whose other clients may come as well.
pub(in crate::state) fn record_returning_client(inventory: &mut Inventory, now: Moment) {
    let Inventory { recovery, rules, .. } = inventory;
    recovery.record_returning_client(now, rules);
}

/// Returns when unclaimed segments are dropped.
pub(in crate::state) fn recovery_end(inventory: &Inventory) -> Moment {
    inventory.recovery.end()
}

/// Records that everything that was in doubt has been dropped.
pub(in crate::state) fn end_doubt(inventory: &mut Inventory) {
    inventory.recovery.is_doubtful = false;
}

/// Returns until when calls may wait for owners after a restart.
fn restart_grace(inventory: &Inventory, now: Moment) -> Option<Moment> {
    let is_over = inventory.recovery.segments == 0 && !inventory.recovery.is_doubtful;
    (!is_over && !inventory.recovery.grace.has_passed(now)).then_some(inventory.recovery.grace)
}

/// Returns the deadline of the call's wait for owners that have not come back; `None` if it
/// need not wait.
pub(in crate::state) fn recovery_wait(
    inventory: &Inventory,
    now: Moment,
    awaited: &RecoveryScope<'_>,
) -> Option<Moment> {
    match awaited {
        RecoveryScope::Keys(tenant, keys) => {
            awaited_owner(inventory, now, tenant, keys).map(|owner| owner.until)
        }
        // Lists show the objects of suspect clients, too.
        RecoveryScope::All => restart_grace(inventory, now),
        RecoveryScope::Space => {
            let grace = if inventory.pool.segments.open().is_empty() {
                restart_grace(inventory, now).or_else(|| pause_grace(inventory, now))
            } else {
                None
            };
            grace.or_else(|| inventory.recovery.return_wait(now, &inventory.pool))
        }
    }
}

/// Returns until when calls may wait for suspect clients; `None` if there are none, or if the
/// master made no pause.
fn pause_grace(inventory: &Inventory, now: Moment) -> Option<Moment> {
    let until = inventory.recovery.pause_grace.filter(|until| !until.has_passed(now))?;
    inventory.clients.has_suspects().then_some(until)
}

/// Returns whether calls may have to wait: segments are unclaimed, the recovered state is in
/// doubt, clients hung up during a pause of the master, or have come from another one.
pub(in crate::state) fn is_recovering(inventory: &Inventory, now: Moment) -> bool {
    let is_doubted = inventory.recovery.is_doubtful && !inventory.recovery.grace.has_passed(now);
    inventory.recovery.segments > 0
        || is_doubted
        || pause_grace(inventory, now).is_some()
        || inventory.recovery.return_wait(now, &inventory.pool).is_some()
}
