//! `Store`: a handle on a pool. Every call is a batch: a failed item is an exception instance at
//! its place in the result, a failed call raises.

mod advice;
mod calls;
pub(crate) mod describe;
pub(crate) mod details;
mod fetch;
pub(crate) mod grids;
pub(crate) mod located;
mod open;
pub(crate) mod outcome;
mod parts;
mod pool;
pub(crate) mod settings;
pub(crate) mod status_codes;
pub(crate) mod tasks;
pub(crate) mod transfer;

use std::{path::PathBuf, slice, sync::Arc, time::Duration};

use mooncake_base::{Error, ErrorCode, ObjectKey, SegmentId, Version};
use mooncake_store_client::{NewDrain, NewTask, Presence, ProbeTerms, RemovalTerms, Selector};
use mooncake_transfer_engine::LocalRange;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict, PyList},
};

pub(crate) use self::open::{Open, all_open};
use self::{
    calls::{call_for_names, put_values},
    details::Details,
    located::{Located, RangeRead},
    open::metrics_text,
    outcome::{
        Absent, Entry, RemovalNumbers, batch_options, done, is_there, length_of, listing,
        outcome_list, probe, probe_suffixes, removal_numbers, single_key, terms_of_sweep,
        writable_views,
    },
    parts::{Columns, Table},
    settings::{Arguments, DummyArguments, PrefetchArguments, Settings},
    tasks::IdParts,
    transfer::{GetTerms, Signed, Unsigned as UnsignedBuffer},
};
use crate::{
    argument::{
        self, Unsigned, call_with_valid, check_same_length, invalid_as_missing, key_batch,
        object_keys,
    },
    buffer::{Ranges, Views, uninit_bytes},
    detach::{detached, limited},
    engine::Engine,
    error::{exception, forget_last, or_raise},
    log,
    options::PutOptions,
    runtime::runtime,
};

pub(crate) type Keys<'py> = Vec<Bound<'py, PyAny>>;

/// A list of outcomes, one for each key.
type Outcomes<'py> = PyResult<Bound<'py, PyList>>;

/// A handle on a pool of memory.
#[pyclass(frozen, module = "mooncake._native", name = "Store")]
#[derive(Debug)]
pub(crate) struct Store {
    open: Option<Arc<Open>>,
    /// Longest duration of a call; `None`: the limits of the client.
    timeout: Option<Duration>,
}

#[pymethods]
impl Store {
    /// Joins a pool, or starts one with a master in this process (`master="embedded"`).
    #[staticmethod]
    #[pyo3(signature = (
        *, master, name = String::new(), metadata = String::from("P2PHANDSHAKE"),
        segment_bytes = 0, tenant = String::from("default"), refuses_ignored_tenant = true,
        disks = Vec::new(), is_tcp_forced = None, rdma_devices = None,
        rpc_timeout_s = None, connect_timeout_s = None, transfer_timeout_s = None, retry_s = None,
        fails_as_upstream = false, listen = String::new(), has_checksums = None,
        http_port = None, token = None, prefetch = None, engine = None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "each setting is a keyword")]
    fn connect(
        py: Python<'_>,
        master: String,
        name: String,
        metadata: String,
        #[pyo3(from_py_with = argument::unsigned)] segment_bytes: u64,
        tenant: String,
        refuses_ignored_tenant: bool,
        disks: Vec<(String, Option<u64>)>,
        is_tcp_forced: Option<bool>,
        rdma_devices: Option<String>,
        rpc_timeout_s: Option<f64>,
        connect_timeout_s: Option<f64>,
        transfer_timeout_s: Option<f64>,
        retry_s: Option<f64>,
        fails_as_upstream: bool,
        listen: String,
        has_checksums: Option<bool>,
        #[pyo3(from_py_with = argument::optional_unsigned)] http_port: Option<u16>,
        token: Option<String>,
        prefetch: Option<PrefetchArguments>,
        engine: Option<&Bound<'_, Engine>>,
    ) -> PyResult<Self> {
        log::install();
        log::warn_of_variables();
        let arguments = Arguments {
            master,
            name,
            metadata,
            segment_bytes,
            tenant,
            refuses_ignored_tenant,
            disks,
            is_tcp_forced,
            rdma_devices,
            rpc_timeout_s,
            connect_timeout_s,
            transfer_timeout_s,
            retry_s,
            fails_as_upstream,
            listen,
            has_checksums,
            http_port,
            token,
            prefetch,
        };
        let settings = or_raise(py, Settings::read(arguments))?;
        let runtime = or_raise(py, runtime())?;
        let shared = engine.map(|engine| Arc::clone(engine.get().running()));
        let opened = limited(py, None, || Open::start(settings, shared, runtime))?;
        let store = Arc::new(opened);
        open::track(&store);
        forget_last();
        Ok(Self { open: Some(store), timeout: None })
    }

    /// Joins a pool as a dummy client of the daemon of this host.
    #[staticmethod]
    #[pyo3(signature = (
        daemon, *, pool_bytes = 0, is_tcp_forced = None, rpc_timeout_s = None,
        connect_timeout_s = None, transfer_timeout_s = None, retry_s = None,
        fails_as_upstream = false, has_checksums = None, http_port = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "a call of Python with many options")]
    fn connect_daemon(
        py: Python<'_>,
        daemon: String,
        #[pyo3(from_py_with = argument::unsigned)] pool_bytes: u64,
        is_tcp_forced: Option<bool>,
        rpc_timeout_s: Option<f64>,
        connect_timeout_s: Option<f64>,
        transfer_timeout_s: Option<f64>,
        retry_s: Option<f64>,
        fails_as_upstream: bool,
        has_checksums: Option<bool>,
        #[pyo3(from_py_with = argument::optional_unsigned)] http_port: Option<u16>,
    ) -> PyResult<Self> {
        log::install();
        log::warn_of_variables();
        let runtime = or_raise(py, runtime())?;
        let arguments = DummyArguments {
            is_tcp_forced,
            rpc_timeout_s,
            connect_timeout_s,
            transfer_timeout_s,
            retry_s,
            fails_as_upstream,
            has_checksums,
            http_port,
        };
        let open = || Open::start_dummy(&daemon, pool_bytes, &arguments, runtime);
        let store = Arc::new(limited(py, None, open)?);
        open::track(&store);
        forget_last();
        Ok(Self { open: Some(store), timeout: None })
    }

    /// Returns the same store with a limit for the duration of each call.
    fn within(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Self> {
        let timeout = or_raise(py, settings::seconds("timeout_s", Some(timeout_s)))?;
        Ok(Self { open: self.open.clone(), timeout })
    }

    /// Allocates from the memory pool of a dummy client; returns the address.
    fn allocate_from_pool(&self, py: Python<'_>, length: Unsigned) -> PyResult<u64> {
        let none = || Error::invalid("only a dummy client has a memory pool; use setup_dummy");
        let pool = or_raise(py, self.open().pool())?;
        or_raise(py, pool.ok_or_else(none).and_then(|pool| pool.allocate(length.0 as u64)))
    }

    /// Leaves the pool. Objects whose only copy this process held are lost.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open();
        or_raise(py, detached(py, || open.close()))
    }

    /// Puts values: true where the value was stored, false where an existing object was kept.
    #[pyo3(signature = (keys, values, *, options = None, is_upsert = false, if_absent = None))]
    fn put<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        values: Vec<Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
        if_absent: Option<Absent<'py>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let options = batch_options(py, options, is_upsert, keys.len(), if_absent.as_ref())?;
        put_values(self, py, &keys, &values, options, |it| it.is_some())
    }

    /// Puts values: the version of each new object, 0 where an existing object was kept.
    #[pyo3(signature = (keys, values, *, options = None, is_upsert = false, if_absent = None))]
    fn put_versions<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        values: Vec<Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
        if_absent: Option<Absent<'py>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let version = |stored: Option<Version>| stored.map_or(0, |version| version.0);
        let options = batch_options(py, options, is_upsert, keys.len(), if_absent.as_ref())?;
        put_values(self, py, &keys, &values, options, version)
    }

    /// Puts values from addresses: true where the value was stored, false where an existing object
    /// was kept.
    #[pyo3(signature = (keys, ranges, *, options = None, is_upsert = false))]
    fn put_from<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        ranges: Ranges,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        or_raise(py, check_same_length("ranges", ranges.len(), keys.len()))?;
        let options = batch_options(py, options, is_upsert, keys.len(), None)?;
        transfer::put_ranges(self, py, &keys, &ranges.items(), options, |it| it.is_some())
    }

    /// Gets objects as `bytes`. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let finish = |py, bytes: Py<PyBytes>| Ok(bytes.into_bound(py).into_any());
        self.fetch::<Py<PyBytes>>(py, &keys, lease, finish)
    }

    /// Gets objects as buffers that own their memory. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, is_signed = false, lease = true))]
    fn get_buffers<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        is_signed: bool,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        if is_signed {
            let bind = |py, target: Signed| Ok(Bound::new(py, target.0)?.into_any());
            self.fetch::<Signed>(py, &keys, lease, bind)
        } else {
            let bind = |py, target: UnsignedBuffer| Ok(Bound::new(py, target.0)?.into_any());
            self.fetch::<UnsignedBuffer>(py, &keys, lease, bind)
        }
    }

    /// Gets objects into memory at addresses; returns their lengths. Leases the objects unless
    /// `lease` is false.
    #[pyo3(signature = (keys, ranges, *, is_exact = false, lease = true))]
    fn get_into<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        ranges: Ranges,
        is_exact: bool,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        or_raise(py, check_same_length("ranges", ranges.len(), keys.len()))?;
        let names = invalid_as_missing(object_keys(&keys)?);
        let ranges = ranges.items();
        let terms = GetTerms { is_exact, takes_lease: lease };
        let lengths = self.call(py, |client| transfer::get_into(client, names, &ranges, terms))?;
        outcome_list(py, &keys, lengths)
    }

    /// Gets objects into writable buffers; returns their lengths. Leases the objects unless `lease`
    /// is false.
    #[pyo3(signature = (keys, buffers, *, lease = true))]
    fn read_into<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        buffers: Vec<Bound<'py, PyAny>>,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let views = writable_views(&keys, &buffers)?;
        let names = invalid_as_missing(object_keys(&keys)?);
        let ranges: Vec<&[LocalRange]> = views.iter().map(Views::ranges).collect();
        let terms = GetTerms { is_exact: false, takes_lease: lease };
        let lengths = self.call(py, |client| transfer::get_into(client, names, &ranges, terms))?;
        outcome_list(py, &keys, lengths)
    }

    /// Locates objects, to read ranges of them. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn locate<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let names = invalid_as_missing(object_keys(&keys)?);
        let located = self.call(py, |client| Located::find(client, names, lease))?;
        outcome_list(py, &keys, located)
    }

    /// Reads a range of a located object as `bytes`.
    fn read_located<'py>(
        &self,
        py: Python<'py>,
        located: &Bound<'py, Located>,
        offset: Unsigned,
        length: Unsigned,
    ) -> PyResult<Py<PyBytes>> {
        let (bytes, range) = uninit_bytes(py, length.0 as u64)?;
        let located = located.get();
        let read =
            self.call(py, |client| located.read(client, offset.0 as u64, slice::from_ref(&range)))?;
        or_raise(py, read).map(|_| bytes)
    }

    /// Reads a range of a located object into a writable buffer, which is filled.
    fn read_located_into<'py>(
        &self,
        py: Python<'py>,
        located: &Bound<'py, Located>,
        offset: Unsigned,
        buffer: &Bound<'py, PyAny>,
    ) -> PyResult<u64> {
        let range = RangeRead::new(located, offset, buffer)?;
        let read = self.call(py, |client| range.read(client))?;
        or_raise(py, read)
    }

    /// Gets parts of objects into memory; returns for each key a list with the length of each part.
    #[pyo3(signature = (keys, bases, destinations, offsets, lengths, *, is_registered = false))]
    #[allow(clippy::too_many_arguments, reason = "columns of one table")]
    fn get_parts<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        bases: Vec<Unsigned>,
        destinations: Columns,
        offsets: Columns,
        lengths: Columns,
        is_registered: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let names = invalid_as_missing(object_keys(&keys)?);
        let table = Table::new(names, Some(bases), destinations, offsets, lengths);
        let table = or_raise(py, table)?;
        let open = self.open();
        let read = self.call(py, |client| match is_registered {
            true => table.get_registered(client, open.pool().ok().flatten()),
            false => table.get(client),
        })?;
        parts::lists(py, &keys, read)
    }

    /// Locates objects, for `read_begun`.
    fn begin_reads<'py>(&self, py: Python<'py>, keys: Keys<'py>) -> PyResult<Bound<'py, PyList>> {
        self.call_for_keys(py, &keys, |client, names| done(client.sessions().begin_reads(names)))
    }

    /// Gets parts of objects that `begin_reads` located; returns the bytes read of each object.
    fn read_begun<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        addresses: Columns,
        offsets: Columns,
        lengths: Columns,
    ) -> PyResult<Bound<'py, PyList>> {
        let table = Table::new(object_keys(&keys)?, None, addresses, offsets, lengths);
        let table = or_raise(py, table)?;
        let read = self.call(py, |client| table.read_begun(client))?;
        outcome_list(py, &keys, read)
    }

    /// Forgets the locations of objects that `begin_reads` located.
    fn end_reads(&self, py: Python<'_>, keys: Keys<'_>) -> PyResult<()> {
        let names: Vec<ObjectKey> = object_keys(&keys)?.into_iter().flatten().collect();
        self.call(py, |client| client.sessions().end_reads(&names))
    }

    /// Reserves space for objects of these lengths, for `write_begun`.
    #[pyo3(signature = (keys, lengths, *, options = None, is_upsert = false, if_absent = None))]
    fn begin_writes<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lengths: Vec<Unsigned>,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
        if_absent: Option<Absent<'py>>,
    ) -> PyResult<Bound<'py, PyList>> {
        or_raise(py, check_same_length("lengths", lengths.len(), keys.len()))?;
        let names = object_keys(&keys)?;
        let options = batch_options(py, options, is_upsert, keys.len(), if_absent.as_ref())?;
        let begun =
            self.call(py, |client| parts::begin_writes(client, names, &lengths, options))?;
        outcome_list(py, &keys, begun)
    }

    /// Writes parts of objects that `begin_writes` reserved; returns the bytes written to each
    /// object.
    fn write_begun<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        addresses: Columns,
        offsets: Columns,
        lengths: Columns,
    ) -> PyResult<Bound<'py, PyList>> {
        let table = Table::new(object_keys(&keys)?, None, addresses, offsets, lengths);
        let table = or_raise(py, table)?;
        let written = self.call(py, |client| table.write_begun(client))?;
        outcome_list(py, &keys, written)
    }

    /// Makes written objects readable, or gives their space back.
    #[pyo3(signature = (keys, *, is_revoked = false))]
    fn end_writes<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        is_revoked: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let names = object_keys(&keys)?;
        let ended = self.call(py, |client| {
            call_with_valid(names, |keys| match is_revoked {
                true => client.sessions().revoke_writes(&keys),
                false => client.sessions().end_writes(&keys),
            })
        })?;
        outcome_list(py, &keys, ended.into_iter().map(|ended| ended.map(|()| true)).collect())
    }

    /// Returns where the copies of objects are. Leases the objects unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn replicas<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let names = invalid_as_missing(object_keys(&keys)?);
        let described =
            self.call(py, |client| call_with_valid(names, |keys| client.describe(&keys, lease)))?;
        let mut places = Vec::with_capacity(described.len());
        for located in described {
            places.push(match located {
                Ok(located) => Ok(describe::places(py, &located)?),
                Err(error) => Err(error),
            });
        }
        outcome_list(py, &keys, places)
    }

    /// Creates a copy task for an object; returns its id.
    fn copy_object<'py>(
        &self,
        py: Python<'py>,
        key: Bound<'py, PyAny>,
        targets: Vec<String>,
    ) -> PyResult<IdParts> {
        let key = or_raise(py, single_key(key)?)?;
        let task = NewTask::Copy { key, targets };
        let id = self.call(py, |client| tasks::create(client, task))?;
        or_raise(py, id)
    }

    /// Creates a task that moves a copy of an object to another segment; returns its id.
    fn move_object<'py>(
        &self,
        py: Python<'py>,
        key: Bound<'py, PyAny>,
        source: String,
        target: String,
    ) -> PyResult<IdParts> {
        let key = or_raise(py, single_key(key)?)?;
        let task = NewTask::Move { key, source, target };
        let id = self.call(py, |client| tasks::create(client, task))?;
        or_raise(py, id)
    }

    /// Returns the state of a task.
    fn task<'py>(&self, py: Python<'py>, task_id: IdParts) -> PyResult<Bound<'py, PyDict>> {
        let info = self.call(py, |client| tasks::info(client, task_id))?;
        tasks::task(py, &or_raise(py, info)?)
    }

    /// Drops the copies of objects in segments of that name, or all copies.
    #[pyo3(signature = (keys, *, segment = String::new()))]
    fn clear_replicas<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        segment: String,
    ) -> PyResult<Bound<'py, PyList>> {
        self.call_for_keys(py, &keys, |client, names| client.clear_replicas(names, &segment))
    }

    /// Starts a drain of segments.
    #[pyo3(signature = (segments, *, targets = Vec::new(), concurrency = 0, may_evict = false))]
    fn drain<'py>(
        &self,
        py: Python<'py>,
        segments: Vec<String>,
        targets: Vec<String>,
        concurrency: u32,
        may_evict: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let new = NewDrain { segments, targets, concurrency, may_evict };
        let info = self.call(py, |client| client.drain(&new))?;
        tasks::drain(py, &or_raise(py, info)?)
    }

    /// Returns the state of a drain.
    fn drain_info<'py>(&self, py: Python<'py>, job_id: IdParts) -> PyResult<Bound<'py, PyDict>> {
        let info = self.call(py, |client| client.drain_info(tasks::job_id(job_id)))?;
        tasks::drain(py, &or_raise(py, info)?)
    }

    /// Cancels a drain.
    fn cancel_drain<'py>(&self, py: Python<'py>, job_id: IdParts) -> PyResult<Bound<'py, PyDict>> {
        let info = self.call(py, |client| client.cancel_drain(tasks::job_id(job_id)))?;
        tasks::drain(py, &or_raise(py, info)?)
    }

    /// Returns which objects exist and are complete. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true, prefetch = false))]
    fn exists<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lease: bool,
        prefetch: bool,
    ) -> Outcomes<'py> {
        let terms = ProbeTerms { takes_lease: lease, prefetches: prefetch };
        call_for_names(self, py, &keys, |client, names| {
            probe(client, names, terms).into_iter().map(is_there).collect()
        })
    }

    /// Looks for objects with the keys, or else with keys that are these with a suffix; leases none.
    /// Returns 1 for an object with the key itself, else the sum of `2 << n` for each suffix `n`.
    fn exists_or_suffixed<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        suffixes: Vec<Vec<u8>>,
    ) -> Outcomes<'py> {
        call_for_names(self, py, &keys, |client, names| probe_suffixes(client, names, &suffixes))
    }

    /// Does what `exists` does, with numbers: 1, 0, or an error code where the answer is unknown,
    /// and the last error.
    #[pyo3(signature = (keys, *, lease = true, prefetch = false))]
    fn presence<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        lease: bool,
        prefetch: bool,
    ) -> PyResult<(Bound<'py, PyList>, Option<Bound<'py, PyAny>>)> {
        let (keys, terms) =
            (key_batch(keys)?, ProbeTerms { takes_lease: lease, prefetches: prefetch });
        let Presence { found, failure } = self.call(py, |client| client.presence(keys, terms))?;
        let unknown = failure.as_ref().map_or(0, |error| error.code().number());
        let numbers = found.into_iter().map(|found| found.map_or(unknown, i32::from));
        let failure = failure.map(|error| exception(py, &error, None)).transpose()?;
        Ok((PyList::new(py, numbers)?, failure))
    }

    /// Returns the lengths of objects. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn sizes<'py>(&self, py: Python<'py>, keys: Keys<'py>, lease: bool) -> Outcomes<'py> {
        call_for_names(self, py, &keys, |client, names| {
            let terms = ProbeTerms { takes_lease: lease, prefetches: false };
            probe(client, names, terms).into_iter().map(length_of).collect()
        })
    }

    /// Returns what the master knows of objects: a dictionary for each.
    fn describe<'py>(&self, py: Python<'py>, keys: Keys<'py>) -> Outcomes<'py> {
        self.call_for_keys(py, &keys, |client, names| {
            client.details(names).into_iter().map(|found| found.map(Details::from)).collect()
        })
    }

    /// Lets objects expire after that time from now; `None`: never.
    fn set_expiry<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        ttl_ms: Option<u64>,
    ) -> Outcomes<'py> {
        let ttl = ttl_ms.map(Duration::from_millis);
        self.call_for_keys(py, &keys, |client, names| done(client.set_expiry(names, ttl)))
    }

    /// Removes objects, or those that have a version; with `force` also leased ones. Hard-pinned
    /// ones stay if they are spared.
    #[pyo3(signature = (keys, *, force = false, spare_pinned = false, if_version = None))]
    fn remove<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        force: bool,
        spare_pinned: bool,
        if_version: Option<u64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let if_version = if_version.map(Version);
        let terms = RemovalTerms { is_forced: force, spares_hard_pinned: spare_pinned, if_version };
        self.call_for_keys(py, &keys, |client, names| done(client.remove_under(names, &terms)))
    }

    /// Removes all objects, or those that a regex or a prefix selects. Returns the number of removed
    /// ones, and of those that stayed: leased, hard-pinned, being copied.
    #[pyo3(signature = (*, regex = None, prefix = None, force = false, spare_pinned = false))]
    fn remove_matching(
        &self,
        py: Python<'_>,
        regex: Option<String>,
        prefix: Option<Vec<u8>>,
        force: bool,
        spare_pinned: bool,
    ) -> PyResult<RemovalNumbers> {
        let which = or_raise(py, argument::selector(regex, prefix))?;
        let terms = terms_of_sweep(force, spare_pinned);
        let counts = self.call(py, |client| client.remove_matching_under(&which, &terms))?;
        Ok(removal_numbers(or_raise(py, counts)?))
    }

    /// Lists one page of the objects whose key has a prefix, in key order.
    #[pyo3(signature = (*, prefix = Vec::new(), after = None, limit = 0))]
    fn list<'py>(
        &self,
        py: Python<'py>,
        prefix: Vec<u8>,
        after: Option<Vec<u8>>,
        limit: u32,
    ) -> PyResult<(Vec<Entry<'py>>, bool)> {
        let after = or_raise(py, after.map(ObjectKey::new).transpose())?;
        let prefix = Selector::Prefix(prefix);
        let page = self.call(py, |client| client.list(&prefix, after.as_ref(), limit))?;
        Ok(listing(py, or_raise(py, page)?))
    }

    /// Returns the segments of the pool.
    fn segments<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let segments = self.call(py, |client| client.segments())?;
        or_raise(py, segments)?.iter().map(|segment| describe::segment(py, segment)).collect()
    }

    /// Returns the status of the master.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let status = self.call(py, |client| client.status())?;
        describe::status(py, &or_raise(py, status)?)
    }

    /// Returns the counters of this client.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = self.call(py, |client| client.metrics())?;
        describe::metrics(py, &metrics)
    }

    /// Raises unless the master answers and knows this client.
    fn health(&self, py: Python<'_>) -> PyResult<()> {
        let health = self.call(py, |client| client.health())?;
        or_raise(py, health)
    }

    /// Registers memory of this process for peers. Touches no page.
    fn register_buffer(&self, py: Python<'_>, address: Unsigned, length: Unsigned) -> PyResult<()> {
        let open = self.open();
        let registered = detached(py, || open.register(address.0 as u64, length.0 as u64));
        or_raise(py, registered.and_then(|registered| registered))
    }

    /// Unregisters memory by its first address.
    fn unregister_buffer(&self, py: Python<'_>, address: Unsigned) -> PyResult<()> {
        let open = self.open();
        let withdrawn = detached(py, || open.unregister(address.0 as u64));
        or_raise(py, withdrawn.and_then(|withdrawn| withdrawn))
    }

    /// Lends more memory to the pool; returns the ids of the segments.
    fn mount(&self, py: Python<'_>, length: Unsigned) -> PyResult<Vec<String>> {
        let mounted = self.call(py, |client| client.mount(length.0 as u64))?;
        Ok(or_raise(py, mounted)?.iter().map(ToString::to_string).collect())
    }

    /// Lends a part of a file to the pool; returns the id of the segment.
    #[pyo3(signature = (path, length, *, offset = 0, location = "*"))]
    fn mount_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        length: Unsigned,
        offset: u64,
        location: &str,
    ) -> PyResult<String> {
        let length = length.0 as u64;
        let mounted = self.call(py, |client| client.mount_file(&path, offset, length, location))?;
        or_raise(py, mounted).map(|id| id.to_string())
    }

    /// Unmounts a segment of this client, at once or after a grace period.
    #[pyo3(signature = (segment, *, grace_s = 0.0))]
    fn unmount(&self, py: Python<'_>, segment: &str, grace_s: f64) -> PyResult<()> {
        let unknown =
            || Error::new(ErrorCode::SEGMENT_NOT_FOUND, "no such segment").with("segment", segment);
        let id = or_raise(py, SegmentId::parse(segment).ok_or_else(unknown))?;
        let grace = Duration::try_from_secs_f64(grace_s).map_err(|_| {
            Error::invalid("a grace period must be a number of seconds").with("grace_s", grace_s)
        });
        let grace = or_raise(py, grace)?;
        let unmounted = self.call(py, |client| client.unmount(id, grace))?;
        or_raise(py, unmounted)
    }

    /// The name of this client's segments.
    #[getter]
    fn hostname(&self) -> String {
        self.open().names().0
    }

    /// The address of the master, with which other processes join.
    #[getter]
    fn master_address(&self) -> String {
        self.open().names().1
    }

    /// The address of the client's HTTP server as `host:port`, if it has one.
    #[getter]
    fn http_address(&self) -> Option<String> {
        self.open().http_address().map(|address| address.to_string())
    }

    /// Returns the counters as Prometheus text.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, metrics_text)
    }

    /// True if the master runs in this process, for this store.
    #[getter]
    fn is_embedded(&self) -> bool {
        self.open().is_embedded()
    }

    /// True for a dummy client, which reaches the master through the daemon of this host.
    #[getter]
    fn is_dummy(&self) -> bool {
        self.open().is_dummy()
    }

    /// True if the store was closed, or opened before this process was forked.
    #[getter]
    fn is_closed(&self) -> bool {
        self.open().is_closed() || self.open().is_forked()
    }
}

impl Store {
    pub(crate) fn open(&self) -> &Arc<Open> {
        self.open.as_ref().expect("only drop takes what is inside")
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            open::release(open);
        }
    }
}
