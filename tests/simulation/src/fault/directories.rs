//! Directories of records: which process opens which, and the faults of their devices.

use std::time::Duration;

use mooncake_base::SegmentId;

use crate::{
    actor::directory_owner::OwnDirectory,
    directory::Directory,
    plan::{Bug, DiskPlan},
    simulator::Simulator,
};

/// The first id of directories, above those of segments.
const FIRST_ID: u128 = 1 << 64;

impl Simulator {
    /// Opens a directory for a new process, if it is to have one: one that nobody has open, a copy, or
    /// a new one.
    pub(crate) fn open_directory(&mut self, process: u64) -> Option<OwnDirectory> {
        let DiskPlan { owners, capacity, extent_words, faults } = self.plan.disks.clone()?;
        if !self.random.happens(owners) {
            return None;
        }
        let is_copied = !self.is_quiet && self.random.happens(faults.copy);
        let number = match (is_copied, self.pick_closed_directory()) {
            (false, Some(number)) => number,
            (true, _) if !self.directories.is_empty() => {
                self.outcome.disks_copied += 1;
                let source = self.random.below(self.directories.len() as u64) as usize;
                let copy = self.directories[source].copied();
                self.directories.push(copy);
                self.directories.len() - 1
            }
            _ => {
                let id = SegmentId::from_bits(FIRST_ID + self.directories.len() as u128);
                self.directories.push(Directory::new(id, capacity, extent_words));
                self.directories.len() - 1
            }
        };
        let trusts_all = self.plan.has(Bug::TrustsUnsyncedRecords);
        self.outcome.torn_records += self.directories[number].open(process, trusts_all);
        Some(OwnDirectory::new(number, self.now))
    }

    fn pick_closed_directory(&mut self) -> Option<usize> {
        let numbered = self.directories.iter().enumerate();
        let closed = numbered.filter(|(_, directory)| directory.open_by.is_none());
        let closed: Vec<usize> = closed.map(|(number, _)| number).collect();
        self.random.pick(&closed).copied()
    }

    /// Closes the directory of a process that was killed, perhaps with the power of its host.
    pub(crate) fn abandon_directory(&mut self, process: u64) {
        let Some(faults) = self.plan.disks.as_ref().map(|disks| disks.faults.clone()) else {
            return;
        };
        let is_power_loss = self.random.happens(faults.power_loss);
        let open = |directory: &&mut Directory| directory.open_by == Some(process);
        let Some(directory) = self.directories.iter_mut().find(open) else { return };
        directory.open_by = None;
        if is_power_loss {
            self.outcome.disk_power_losses += 1;
            directory.lose_power(&mut self.random);
        }
    }

    /// Injects the faults of the directory of a process.
    pub(super) fn inject_directory_faults(&mut self, process: u64) {
        let Some(faults) = self.plan.disks.as_ref().map(|disks| disks.faults.clone()) else {
            return;
        };
        let leaves = self.random.happens(faults.leave);
        let until = self.now + Duration::from_millis(self.random.below(8000));
        let own = self.processes.get_mut(&process).and_then(|found| found.directory.as_mut());
        let Some(own) = own else { return };
        own.is_leaving |= leaves;
        let directory = &mut self.directories[own.number];
        if self.random.happens(faults.full) {
            directory.full_until = until;
        }
        if self.random.happens(faults.damage) {
            directory.damage(&mut self.random);
        }
        if self.random.happens(faults.crash) {
            self.kill_process(process);
        }
    }
}
