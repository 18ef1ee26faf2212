//! The calls to the master about one directory: it is mounted, its records are reported, it leaves.

use std::time::Duration;

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_disk::{Disk, OwnedName};
use mooncake_proto::{columns::Record, v1};

use crate::{client::ClientInner, disk::owner::Owner};

/// How long a directory whose earlier owner seems to live is tried to be mounted.
const TAKE_OVER_TIME: Duration = Duration::from_secs(3);
/// Pause before a directory is mounted again whose earlier owner seems to live.
const TAKE_OVER_PAUSE: Duration = Duration::from_millis(50);
/// Maximum number of records in one report, and of the bytes of their keys.
const REPORT_RECORDS_MAX: usize = 1 << 16;
const REPORT_KEY_BYTES_MAX: usize = 1 << 20;
/// Time limit of a report from a thread that reads.
const LOSS_TIMEOUT: Duration = Duration::from_secs(1);

/// The calls to the master about one directory.
#[derive(Clone, Copy)]
pub(in crate::client) struct DirectoryCalls<'a> {
    pub(in crate::client) client: &'a ClientInner,
    pub(in crate::client) owner: &'a Owner,
}

/// A record, and its length.
type LongName = (OwnedName, u64);

/// What a report says.
#[derive(Debug, Default)]
pub(super) struct Report<'a> {
    pub(super) added: &'a [LongName],
    pub(super) refused: &'a [LongName],
    pub(super) dropped: &'a [OwnedName],
    pub(super) is_complete: bool,
    /// Replicas that were written from records, and those that were not.
    pub(super) promoted: &'a [u64],
    pub(super) not_promoted: &'a [u64],
}

impl DirectoryCalls<'_> {
    /// Mounts the directory. An earlier owner that was killed is known to be gone only once its
    /// connections have ended, which is awaited for a short time.
    pub(super) fn mount_first(&self) -> Result<()> {
        let until = SystemClock.now() + TAKE_OVER_TIME;
        loop {
            match self.mount() {
                Err(error)
                    if error.code() == ErrorCode::SEGMENT_ALREADY_EXISTS
                        && !until.has_passed(SystemClock.now())
                        && self.client.lifetime.sleep_or_closed(TAKE_OVER_PAUSE) => {}
                outcome => return outcome,
            }
        }
    }

    pub(super) fn mount(&self) -> Result<()> {
        let used = self.owner.disk()?.statistics().allocated_bytes;
        let request = v1::MountDiskRequest {
            caller: self.client.rpc.caller(),
            disk: Some(
                self.owner.segment(self.client.lifetime.name(), self.client.disks.endpoint()),
            ),
            used,
            reports_all: true,
        };
        self.client.rpc.call(request).map(drop).map_err(|error| {
            let error = error.with("path", self.owner.path().display());
            match error.code() {
                ErrorCode::UNABLE_OFFLOAD => {
                    error.with_remedy("Start the master with --enable_offload.")
                }
                _ => error,
            }
        })
    }

    pub(super) fn unmount(&self, deadline: Moment) -> Result<()> {
        let request = v1::UnmountDiskRequest {
            caller: self.client.rpc.caller(),
            disk: self.owner.id().to_bytes().to_vec().into(),
            forget: false,
        };
        self.client.rpc.exchange(request, SystemClock.now(), deadline, |_| {}).map(drop)
    }

    /// Takes a directory out of the pool and closes it.
    ///
    /// # Errors
    /// Those of the master. The directory stays open until it knows.
    pub(super) fn leave(&self, deadline: Moment) -> Result<()> {
        match self.unmount(deadline) {
            // The master does not count on the directory any more.
            Ok(()) => {}
            Err(error)
                if matches!(
                    error.code(),
                    ErrorCode::SEGMENT_NOT_FOUND
                        | ErrorCode::ILLEGAL_CLIENT
                        | ErrorCode::CLIENT_NOT_FOUND
                ) => {}
            Err(error) => {
                return Err(error
                    .with("path", self.owner.path().display())
                    .with_remedy("The directory stays open, and leaves once the master knows."));
            }
        }
        self.owner.close();
        Ok(())
    }

    /// Reports all records of the directory.
    pub(super) fn report_all(&self) -> Result<()> {
        let disk = self.owner.disk()?;
        let mut page: Vec<LongName> = Vec::new();
        let (mut key_bytes, mut records, mut stale) = (0, 0_u64, 0);
        let mut outcome = Ok(());
        let begin = SystemClock.now();
        let mut send = |page: &mut Vec<LongName>, is_complete: bool| -> Result<()> {
            records += page.len() as u64;
            let report = Report { added: page, is_complete, ..Report::default() };
            stale += self.report(&disk, &report, self.client.rpc.deadline())?;
            page.clear();
            Ok(())
        };
        let scanned = disk.records(|name, length| {
            if outcome.is_err() {
                return;
            }
            if page.len() == REPORT_RECORDS_MAX || key_bytes + name.key.len() > REPORT_KEY_BYTES_MAX
            {
                key_bytes = 0;
                outcome = send(&mut page, false);
            }
            key_bytes += name.key.len();
            page.push((name.to_owned(), length));
        });
        outcome?;
        scanned.map_err(|error| Error::new(ErrorCode::FILE_READ_FAIL, error.to_string()))?;
        send(&mut page, true)?;
        tracing::info!(
            path = %self.owner.path().display(),
            records,
            stale,
            took_ms = SystemClock.now().since(begin).as_millis() as u64,
            "reported the records of a directory"
        );
        Ok(())
    }

    /// Reports records that reads found to be gone.
    pub(super) fn report_lost(&self, deadline: Moment) -> Result<()> {
        let lost = self.owner.take_lost();
        if lost.is_empty() {
            return Ok(());
        }
        let report = Report { dropped: &lost, ..Report::default() };
        let reported = self.owner.disk().and_then(|disk| self.report(&disk, &report, deadline));
        if reported.is_err() {
            self.owner.put_back_lost(lost);
        }
        reported.map(drop)
    }

    /// Reports records that a read of this client found to be gone, so that it is not sent there
    /// again. If the master does not answer soon, the thread of the directory repeats the report.
    pub(in crate::client) fn report_lost_soon(&self) {
        if let Err(error) = self.report_lost(SystemClock.now() + LOSS_TIMEOUT) {
            tracing::debug!(%error, "could not report lost records yet");
        }
    }

    /// Sends a report, in several calls if it is long. Removes the records that nobody will ask for,
    /// and returns their number.
    pub(super) fn report(
        &self,
        disk: &Disk,
        report: &Report<'_>,
        deadline: Moment,
    ) -> Result<usize> {
        let used = disk.statistics().allocated_bytes;
        let mut dropped = report.dropped;
        loop {
            let (now, later) = dropped.split_at(page_of(dropped));
            dropped = later;
            let is_last = dropped.is_empty();
            let (added, refused) =
                if is_last { (report.added, report.refused) } else { (&[][..], &[][..]) };
            let request = v1::ReportRecordsRequest {
                caller: self.client.rpc.caller(),
                disk: self.owner.id().to_bytes().to_vec().into(),
                added: columns(added.iter().map(|(name, length)| record_of(name, *length))),
                refused: columns(refused.iter().map(|(name, length)| record_of(name, *length))),
                dropped: columns(now.iter().map(|name| record_of(name, 0))),
                used,
                is_complete: is_last && report.is_complete,
                promoted: if is_last { report.promoted.to_vec() } else { Vec::new() },
                not_promoted: if is_last { report.not_promoted.to_vec() } else { Vec::new() },
            };
            let answer = self.client.rpc.call_until(request, deadline)?;
            if is_last {
                let stale = answer.stale.iter().filter_map(|&at| added.get(at as usize));
                return Ok(stale.filter(|(name, _)| disk.remove(name.borrow())).count());
            }
        }
    }
}

/// Returns how many of the first names go into one report.
fn page_of(names: &[OwnedName]) -> usize {
    let mut bytes = 0;
    let fits = |name: &&OwnedName| {
        bytes += name.key.len();
        bytes <= REPORT_KEY_BYTES_MAX
    };
    names.iter().take(REPORT_RECORDS_MAX).take_while(fits).count()
}

fn columns<'a>(
    records: impl ExactSizeIterator<Item = Record<'a>> + Clone,
) -> Option<v1::RecordColumns> {
    (records.len() > 0).then(|| v1::RecordColumns::pack(records))
}

fn record_of(name: &OwnedName, length: u64) -> Record<'_> {
    Record { tenant: &name.tenant, key: &name.key, version: name.version, length }
}
