//! Starts puts: reserves space for them, after what stands in their way is settled.

use std::{collections::BTreeMap, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, KeyRef, Moment, ObjectKey, Result, SystemClock, Version,
};
use mooncake_proto::{
    columns::{ItemPlaces, Outcome},
    v1,
};

use super::upload::{Upload, WriteWindow};
use crate::{
    client::ClientInner,
    object::{PutOptions, SoftPin},
    protocol::{
        Refusal, StartPuts, StartStep, StartVerdict, UnconfirmedPut, own_puts::UNCONFIRMED_MAX,
    },
    rpc::{batch, response},
};

/// An object to reserve space for, with its index in the batch.
#[derive(Debug, Clone)]
pub(in crate::client) struct ReserveItem<'a> {
    pub(in crate::client) at: usize,
    pub(in crate::client) key: KeyRef<'a>,
    pub(in crate::client) length: u64,
}

/// Name of the value with which the master refuses an item for the sake of an object beside its key.
const BESIDE: &str = "beside";

/// The result of a start: `None` if an object with the key exists and is kept.
type Reserved = Result<Option<Upload>>;

impl ClientInner {
    /// Reserves space, split into messages. `None`: an object with the key exists and is kept.
    pub(in crate::client) fn reserve(
        &self,
        items: &[ReserveItem<'_>],
        options: &PutOptions,
        deadline: Moment,
    ) -> Vec<Reserved> {
        let mut results = Vec::with_capacity(items.len());
        let size = |item: &ReserveItem<'_>| {
            item.key.as_bytes().len() + options.groups.get(item.at).map_or(0, String::len)
        };
        for range in batch::split(items.iter().map(size), batch::KEY_BYTES_MAX) {
            let part = &items[range];
            let reserved = self
                .check_unconfirmed(deadline)
                .and_then(|()| self.reserve_part(part, options, deadline));
            match reserved {
                Ok(part) => results.extend(part),
                Err(error) => {
                    results
                        .extend(part.iter().map(|item| Err(error.clone().with("key", item.key))));
                }
            }
        }
        results
    }

    /// Bounds the number of unconfirmed puts: settles some if there are too many.
    fn check_unconfirmed(&self, deadline: Moment) -> Result<()> {
        if self.open_puts.unconfirmed_count() < UNCONFIRMED_MAX {
            return Ok(());
        }
        self.settle_some(deadline);
        let count = self.open_puts.unconfirmed_count();
        if count < UNCONFIRMED_MAX {
            return Ok(());
        }
        let text = "too many earlier puts wait until the master confirms that they have ended";
        Err(Error::new(ErrorCode::RPC_FAIL, text)
            .with("puts", count)
            .with("master", self.rpc.address()))
    }

    /// Reserves the items of one message.
    fn reserve_part(
        &self,
        items: &[ReserveItem<'_>],
        options: &PutOptions,
        deadline: Moment,
    ) -> Result<Vec<Reserved>> {
        let unconfirmed = self.open_puts.unconfirmed_of(items.iter().map(|item| item.key));
        let mut start = StartPuts::new(options.is_upsert, unconfirmed);
        let mut results: Vec<Reserved> = Vec::new();
        let missing = || Err(Error::internal("an item of a put was not started"));
        loop {
            match start.next_step() {
                StartStep::Settle(puts) => {
                    results.resize_with(items.len(), missing);
                    self.settle_for(items, &mut start, &puts, deadline, &mut results);
                }
                StartStep::Send(None) => {
                    results = self.send_start(items, None, options, deadline, &mut start)?;
                }
                StartStep::Send(Some(some)) => {
                    let part: Vec<_> = some.iter().map(|&item| items[item].clone()).collect();
                    match self.send_start(&part, Some(&some), options, deadline, &mut start) {
                        Ok(sent) => {
                            for (item, sent) in some.into_iter().zip(sent) {
                                results[item] = sent;
                            }
                        }
                        Err(error) => {
                            for item in some {
                                results[item] = Err(error.clone().with("key", items[item].key));
                            }
                        }
                    }
                }
                StartStep::Done => return Ok(results),
            }
        }
    }

    /// Settles puts that stand in the way. Items for which that fails get its error.
    fn settle_for(
        &self,
        items: &[ReserveItem<'_>],
        start: &mut StartPuts,
        puts: &[UnconfirmedPut],
        deadline: Moment,
        results: &mut [Reserved],
    ) {
        let settled = self.settle(puts, deadline);
        let is_settled: Vec<bool> = settled.iter().map(Result::is_ok).collect();
        let failed = start.settled(items.len(), &is_settled);
        let Some(error) = settled.into_iter().find_map(Result::err) else { return };
        for item in failed {
            results[item] = Err(error.clone().with("key", items[item].key));
        }
    }

    /// Sends one start. `numbers` are those of the items in the message of `start`.
    fn send_start(
        &self,
        items: &[ReserveItem<'_>],
        numbers: Option<&[usize]>,
        options: &PutOptions,
        deadline: Moment,
        start: &mut StartPuts,
    ) -> Result<Vec<Reserved>> {
        let request = self.open_puts.begin_start();
        let call = self.start_call(items, options, request);
        let sent = SystemClock.now();
        let answer = self.rpc.call_until(call, deadline);
        let read = answer.and_then(|response| {
            self.read_started(response, items, sent, request, |item, failure| {
                let number = numbers.map_or(item, |numbers| numbers[item]);
                self.refused(start, number, items[item].key, options, failure)
            })
        });
        let versions = read.iter().flatten().filter_map(|reserved| {
            reserved.as_ref().ok().and_then(Option::as_ref).map(|upload| upload.version().0)
        });
        self.open_puts.end_start(request, versions.collect());
        read
    }

    fn start_call(
        &self,
        items: &[ReserveItem<'_>],
        options: &PutOptions,
        request: u64,
    ) -> v1::PutStartRequest {
        let group =
            |item: &ReserveItem<'_>| options.groups.get(item.at).cloned().unwrap_or_default();
        let groups =
            if options.groups.is_empty() { Vec::new() } else { items.iter().map(group).collect() };
        let if_version = |item: &ReserveItem<'_>| Some(options.if_versions.get(item.at)?.0);
        let if_versions = items.iter().filter_map(if_version).collect();
        let columns = v1::PutColumns::pack(items.iter().map(|item| (item.key, item.length)));
        let absent = &options.if_absent;
        let if_absent =
            (!absent.is_empty()).then(|| v1::KeyColumn::pack(absent.iter().map(KeyRef::from)));
        v1::PutStartRequest {
            caller: self.rpc.caller(),
            config: Some(wire_options(options)),
            replace: options.is_upsert,
            request_id: request,
            columns: Some(v1::PutColumns { groups, if_versions, ..columns }),
            avoided_endpoints: self.transfers.replicas().suspected().endpoints(),
            if_absent,
            absent_suffixes: options.absent_suffixes.to_wire(),
        }
    }

    /// Reads the response to a start. `refused` converts the failure of an item.
    fn read_started(
        &self,
        response: v1::PutStartResponse,
        items: &[ReserveItem<'_>],
        sent: Moment,
        request: u64,
        mut refused: impl FnMut(usize, &v1::Failure) -> Reserved,
    ) -> Result<Vec<Reserved>> {
        self.session.record_log_mark(response.log_mark);
        let columns = response::require_columns(response.columns)?;
        let started = columns.read(items.len()).map_err(response::column_mismatch)?;
        let segments = response::read_segments(response.segments)?;
        let window = Duration::from_millis(response.write_window_ms);
        let window = WriteWindow::granted(sent, window);
        let mut read = |item: usize, started: Outcome<'_, (u64, ItemPlaces<'_>)>| {
            let length = items[item].length;
            let (version, places) = match started {
                Err(failure) => return refused(item, failure),
                Ok(started) => started,
            };
            let places = response::read_places(places.to_messages(length), &segments, length)?;
            Ok(Some(Upload::new(Version(version), request, length, places, window)))
        };
        Ok(started.enumerate().map(|(item, started)| read(item, started)).collect())
    }

    fn refused(
        &self,
        start: &mut StartPuts,
        number: usize,
        key: KeyRef<'_>,
        options: &PutOptions,
        failure: &v1::Failure,
    ) -> Reserved {
        let error = response::item_error(failure, key);
        if error.context().any(|(name, _)| name == BESIDE) {
            return Err(error);
        }
        if options.is_refusal(error.code()) {
            return Ok(None);
        }
        let own = failure.unfinished_put.as_ref().filter(|own| own.request_id != 0);
        let orphan = own
            .map(|own| (own.request_id, Version(own.version)))
            .filter(|&(request, version)| !self.open_puts.is_live(key, request, version))
            .map(|(_, version)| version);
        let refusal = Refusal { code: error.code(), orphan };
        let owned = || ObjectKey::new(key.as_bytes());
        match start.refused(number, owned, &refusal)? {
            StartVerdict::Existed => Ok(None),
            StartVerdict::Fail if !options.is_upsert && orphan.is_some() => {
                let text = "earlier puts of the key by this client keep reappearing; retry";
                Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, text).with("key", key))
            }
            StartVerdict::Fail | StartVerdict::Again => Err(error),
        }
    }
}

/// Returns whole milliseconds, rounded up, so that a short time is not none.
pub(in crate::client) fn wire_millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

fn wire_tags(tags: &BTreeMap<String, String>) -> Vec<v1::Tag> {
    let tag =
        |(name, value): (&String, &String)| v1::Tag { name: name.clone(), value: value.clone() };
    tags.iter().map(tag).collect()
}

fn wire_options(options: &PutOptions) -> v1::ReplicateConfig {
    let soft_pin = match options.soft_pin {
        SoftPin::Preserve => v1::SoftPin::Preserve,
        SoftPin::Enable => v1::SoftPin::Enable,
        SoftPin::Disable => v1::SoftPin::Disable,
    };
    v1::ReplicateConfig {
        replica_num: options.replicas,
        soft_pin: soft_pin.into(),
        soft_pin_ttl_ms: options.soft_pin_ttl.map(wire_millis),
        with_hard_pin: options.is_hard_pinned,
        preferred_segments: options.preferred_segments.clone(),
        prefer_same_node: options.prefers_own_segments,
        data_type: options.data_type,
        ttl_ms: options.ttl.map(wire_millis),
        tags: wire_tags(&options.tags),
    }
}
