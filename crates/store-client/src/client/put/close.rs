//! Closes puts: ends those that were written, revokes the others, and settles those that the master
//! may still hold.

use mooncake_base::{Clock, Error, Moment, ReplicaId, Result, SystemClock};
use mooncake_proto::{
    columns::Outcome,
    v1::{self, request::Call},
};

use super::upload::KeyedUpload;
use crate::{
    client::ClientInner,
    object::PutOutcome,
    protocol::{ClosePuts, CloseStep, Closing, UnconfirmedPut},
    rpc::{batch, response},
};

/// Kinds of calls that close puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CloseCall {
    End,
    Revoke,
}

impl ClientInner {
    /// Makes objects readable. Objects without a complete replica, or past their write window, are
    /// revoked instead.
    pub(in crate::client) fn publish(
        &self,
        puts: &[KeyedUpload<'_>],
        deadline: Moment,
    ) -> Vec<Result<PutOutcome>> {
        let now = SystemClock.now();
        let mut close = ClosePuts::with_capacity(puts.len());
        let mut outcomes = Vec::with_capacity(puts.len());
        for (at, &(key, upload)) in puts.iter().enumerate() {
            let replicas = upload.healthy_count();
            let closing = Closing::of(replicas > 0, upload.write_until(), now);
            outcomes.push(match closing {
                Closing::End => Ok(PutOutcome::Stored { replicas, version: upload.version() }),
                Closing::NoReplica => Err(upload.no_replica_error(key)),
                Closing::TooLate => Err(upload.window_error(key)),
            });
            close.push(at, closing);
        }
        loop {
            match close.next_step() {
                CloseStep::End(items) => {
                    let part: Vec<_> = items.iter().map(|&at| puts[at]).collect();
                    let ended = self.close_puts(&part, CloseCall::End, deadline);
                    for (at, ended) in items.into_iter().zip(ended) {
                        if let Err(error) = ended {
                            outcomes[at] = Err(error);
                        }
                    }
                }
                CloseStep::Revoke(items) => {
                    let part: Vec<_> = items.iter().map(|&at| puts[at]).collect();
                    let revoked = self.close_puts(&part, CloseCall::Revoke, deadline);
                    for (at, error) in failures(items.iter().zip(revoked)) {
                        let (key, _) = puts[*at];
                        tracing::debug!(%key, %error, "cannot revoke a failed put");
                    }
                }
                CloseStep::Done => return outcomes,
            }
        }
    }

    /// Revokes puts and releases their space.
    pub(in crate::client) fn revoke_puts(
        &self,
        puts: &[KeyedUpload<'_>],
        deadline: Moment,
    ) -> Vec<Result<()>> {
        self.close_puts(puts, CloseCall::Revoke, deadline)
    }

    /// Revokes puts that stand in the way of others, and returns for each whether the master is
    /// known not to hold it any more.
    pub(in crate::client) fn settle(
        &self,
        puts: &[UnconfirmedPut],
        deadline: Moment,
    ) -> Vec<Result<()>> {
        let mut results = Vec::with_capacity(puts.len());
        let sizes = puts.iter().map(|put| put.key.as_bytes().len());
        for range in batch::split(sizes, batch::KEY_BYTES_MAX) {
            let part = &puts[range];
            let (caller, columns) = (self.rpc.caller(), Some(unconfirmed_refs(part)));
            let request = v1::PutRevokeRequest { caller, columns };
            // A refusal of one put says that the master does not hold it.
            let answer = self.rpc.call_until(request, deadline).map(|response| response.columns);
            let answer = answer.and_then(response::require_columns);
            match answer.and_then(|done| response::check_count(done.items as usize, part.len())) {
                Ok(()) => {
                    self.open_puts.confirm(part.iter());
                    results.extend(part.iter().map(|_| Ok(())));
                }
                Err(error) => {
                    let error = error.with("because", "an earlier put of the key is unconfirmed");
                    let named = |put: &UnconfirmedPut| Err(error.clone().with("key", &put.key));
                    results.extend(part.iter().map(named));
                }
            }
        }
        results
    }

    /// Settles some unconfirmed puts, if there are any.
    pub(in crate::client) fn settle_some(&self, deadline: Moment) {
        if self.open_puts.unconfirmed_count() == 0 {
            return;
        }
        let puts = self.open_puts.some_unconfirmed(batch::ITEMS_MAX);
        if let Some(Err(error)) = self.settle(&puts, deadline).into_iter().find(Result::is_err) {
            tracing::debug!(client = self.lifetime.name(), %error, "cannot settle unconfirmed puts yet");
        }
    }

    /// Ends or revokes puts, split into messages. Those without an answer become unconfirmed.
    fn close_puts(
        &self,
        puts: &[KeyedUpload<'_>],
        kind: CloseCall,
        deadline: Moment,
    ) -> Vec<Result<()>> {
        let mut results = Vec::with_capacity(puts.len());
        for part in puts.chunks(batch::ITEMS_MAX) {
            if let Err(error) = self.close_part(part, kind, deadline, &mut results) {
                results.extend(part.iter().map(|(key, _)| Err(error.clone().with("key", key))));
                self.open_puts.add_unconfirmed(
                    part.iter().filter_map(|(key, upload)| upload.to_unconfirmed(*key)),
                );
            }
        }
        results
    }

    /// Closes the puts of one message. Appends their results, or nothing if it is unknown what the
    /// master has done. The failure of an item says that the master does not hold the put any more.
    fn close_part(
        &self,
        puts: &[KeyedUpload<'_>],
        kind: CloseCall,
        deadline: Moment,
        results: &mut Vec<Result<()>>,
    ) -> Result<()> {
        let (caller, columns) = (self.rpc.caller(), Some(put_refs(puts, kind)));
        // By its key, the master recognizes a put that the lost call has ended.
        let name_keys = |call: &mut Call| {
            if let Call::PutEnd(end) = call
                && let Some(columns) = &mut end.columns
            {
                columns.keys = Some(v1::KeyColumn::pack(puts.iter().map(|(key, _)| *key)));
            }
        };
        let columns = match kind {
            CloseCall::End => {
                let request = v1::PutEndRequest { caller, columns };
                self.rpc.call_repeating(request, deadline, name_keys)?.columns
            }
            CloseCall::Revoke => {
                let request = v1::PutRevokeRequest { caller, columns };
                self.rpc.call_until(request, deadline)?.columns
            }
        };
        let answer = response::require_columns(columns)?;
        let done = answer.read(puts.len()).map_err(response::column_mismatch)?;
        let read = |(done, (key, _)): (Outcome<'_, ()>, &KeyedUpload<'_>)| {
            done.map_err(|failure| response::item_error(failure, key))
        };
        results.extend(done.zip(puts).map(read));
        Ok(())
    }
}

/// Converts puts to columns. Their versions identify them.
fn put_refs(puts: &[KeyedUpload<'_>], kind: CloseCall) -> v1::PutRefColumns {
    let mut columns = v1::PutRefColumns {
        versions: puts.iter().map(|(_, upload)| upload.version().0).collect(),
        ..Default::default()
    };
    for ((_, upload), item) in puts.iter().zip(0_u32..) {
        if let Some(checksum) = upload.checksum() {
            columns.checksums.get_or_insert_default().push(item as usize, checksum);
        }
        match kind {
            CloseCall::End => {
                push_failed(&mut columns, item, upload.failed_replicas().iter().copied());
                for replica in upload.late_replicas() {
                    columns.late_items.push(item);
                    columns.late_replicas.push(replica.0);
                }
            }
            CloseCall::Revoke => push_failed(&mut columns, item, upload.unsettled_replicas()),
        }
    }
    columns
}

/// Converts unconfirmed puts to columns, with their keys.
fn unconfirmed_refs(puts: &[UnconfirmedPut]) -> v1::PutRefColumns {
    let mut columns = v1::PutRefColumns {
        versions: puts.iter().map(|put| put.version.0).collect(),
        keys: Some(v1::KeyColumn::pack(puts.iter().map(|put| put.key.as_bytes()))),
        ..Default::default()
    };
    for (put, item) in puts.iter().zip(0_u32..) {
        push_failed(&mut columns, item, put.failed_replicas.iter().copied());
    }
    columns
}

fn push_failed(
    columns: &mut v1::PutRefColumns,
    item: u32,
    replicas: impl Iterator<Item = ReplicaId>,
) {
    for replica in replicas {
        columns.failed_items.push(item);
        columns.failed_replicas.push(replica.0);
    }
}

fn failures<T>(
    outcomes: impl Iterator<Item = (T, Result<()>)>,
) -> impl Iterator<Item = (T, Error)> {
    outcomes.filter_map(|(item, outcome)| Some((item, outcome.err()?)))
}
