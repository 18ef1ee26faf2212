//! Promotions: records of a directory that the master wants in memory again. Reads each into private
//! memory and writes it from there to its place.
//!
//! A read from a device may take longer than the window, so that no read goes straight to the place.

use std::time::Duration;

use mooncake_base::{Clock, Moment, ReplicaId, Result, SystemClock};
use mooncake_proto::{
    columns::Record,
    records::{Loaded, Wanted},
    v1,
};
use mooncake_transfer_engine::{LocalRange, Opcode, TransferEntry};

use super::{Offload, Report};
use crate::{
    disk::lent_memory::of_caller, object::Place, protocol::hand_over_end, rpc::response,
    transfer::jobs::Jobs,
};

impl Offload<'_> {
    /// Brings the promotions of an answer into memory and reports them. Returns whether there were any.
    pub(super) fn promote(
        &mut self,
        answer: &v1::FetchOffloadsResponse,
        sent: Moment,
    ) -> Result<bool> {
        let Some(records) = &answer.promotions else { return Ok(false) };
        let records: Vec<Record<'_>> = records.read()?.collect();
        if records.is_empty() {
            return Ok(false);
        }
        let segments = response::read_segments(answer.segments.clone())?;
        let places = response::require_columns(answer.promotion_places.as_ref())?;
        let mut places = places.read(records.len()).map_err(response::column_mismatch)?;
        let targets: Vec<Place> = records
            .iter()
            .map(|record| {
                let messages = places.take().to_messages(record.length);
                let found = response::read_places(messages, &segments, record.length)?;
                let none = || response::protocol_error("a promotion has no place");
                found.into_iter().next().ok_or_else(none)
            })
            .collect::<Result<_>>()?;
        let window = Duration::from_millis(answer.write_window_ms);
        let outcomes = self.write_to_memory(&records, &targets, hand_over_end(sent, window));
        let (mut promoted, mut not_promoted) = (Vec::new(), Vec::new());
        for (target, is_written) in targets.iter().zip(&outcomes) {
            let ReplicaId(replica) = target.replica;
            if *is_written { &mut promoted } else { &mut not_promoted }.push(replica);
        }
        let written = records.iter().zip(&outcomes).filter(|(_, is_written)| **is_written);
        let bytes = written.map(|(record, _)| record.length).sum();
        let counters = &self.directory.client.metrics.disk;
        counters.promoted.add_nonzero(promoted.len() as u64);
        counters.promoted_bytes.add_nonzero(bytes);
        let report =
            Report { promoted: &promoted, not_promoted: &not_promoted, ..Report::default() };
        let disk = self.directory.owner.disk()?;
        self.directory.report(&disk, &report, self.directory.client.rpc.deadline())?;
        Ok(true)
    }

    /// Reads records and writes them to their places. Returns for each whether it was written, and no
    /// byte can arrive later.
    fn write_to_memory(
        &mut self,
        records: &[Record<'_>],
        targets: &[Place],
        until: Moment,
    ) -> Vec<bool> {
        let mut written = vec![false; records.len()];
        let directory = self.directory;
        let wanted: Vec<Wanted<'_>> = records
            .iter()
            .map(|&Record { tenant, key, version, length }| Wanted {
                tenant,
                key,
                version,
                offset: 0,
                length,
            })
            .collect();
        let bytes = records.iter().map(|record| record.length as usize).sum();
        self.buffer.fill(bytes, |memory| {
            let mut end = 0;
            let ranges: Vec<LocalRange> = records
                .iter()
                .map(|record| {
                    let begin = end;
                    end += record.length as usize;
                    memory.part(begin, record.length as usize)
                })
                .collect();
            let loaded = directory.owner.read(&wanted, ranges.iter().map(of_caller));
            let mut jobs = Jobs::with_capacity(records.len());
            let mut numbers = Vec::with_capacity(records.len());
            for (at, loaded) in loaded.into_iter().enumerate() {
                if loaded == Loaded::Good && !until.has_passed(SystemClock.now()) {
                    let entry = TransferEntry::new(ranges[at], targets[at].address());
                    jobs.push(&targets[at].segment, [entry], false);
                    numbers.push(at);
                }
            }
            directory.client.transfers.run(Opcode::Write, &mut jobs, until);
            for (at, (outcome, may_arrive_late)) in numbers.into_iter().zip(jobs.finish_writes()) {
                written[at] = outcome.is_ok() && !may_arrive_late;
            }
        });
        self.buffer.shrink(false);
        written
    }
}
