//! `Pending`: the calls in flight of one event loop. A thread that is attached to the interpreter
//! begins a call, a worker thread that is not attached makes it, and the loop takes the outcome
//! when a descriptor becomes readable.
//!
//! Memory that a call reads or writes is kept alive until its outcome is taken, even if the caller
//! no longer waits for it.

use std::{
    io::{Read as _, Write as _},
    os::{fd::AsRawFd, unix::net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, ObjectKey, Result, SystemClock, Version};
use mooncake_os::call_limit::{CallLimit, run_under};
use mooncake_store_client::{
    Client, DrainInfo, NewDrain, NewTask, ProbeTerms, RemovalTerms, Selector,
};
use mooncake_transfer_engine::LocalRange;
use pyo3::{IntoPyObjectExt, prelude::*};

use crate::{
    argument::{
        PackedKeys, Unsigned, call_with_valid, check_same_length, invalid_as_missing, object_keys,
        selector,
    },
    buffer::{Buffer, Views},
    error::{or_raise, py_error},
    options::PutOptions,
    store::{
        Keys, Open, Store, describe,
        details::Details,
        grids::{GridArgument, GridTable},
        located::{Located, RangeRead},
        outcome::{
            Absent, batch_options, done, is_there, length_of, listing, outcome_list, probe,
            probe_suffixes, removal_numbers, single_key, terms_of_sweep, writable_views,
        },
        settings::seconds,
        tasks::{self, IdParts},
        transfer::{self, GetTerms},
    },
    workers::{self, DropQueue},
};

/// The outcome of a call, converted to Python objects by a thread that is attached to the
/// interpreter.
type Outcome = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// The calls in flight of one event loop.
#[pyclass(frozen, module = "mooncake._native", name = "Pending")]
#[derive(Debug)]
pub(crate) struct Pending {
    calls: Arc<LoopCalls>,
    /// Longest duration of a call; `None`: the limits of the client.
    timeout: Option<Duration>,
}

/// The calls in flight, shared by handles with different limits.
#[derive(Debug)]
struct LoopCalls {
    store: Arc<Open>,
    completions: Option<Arc<CompletionQueue>>,
    waker: UnixStream,
    begun: AtomicU64,
}

/// The outcomes that worker threads have delivered and the loop has not taken.
struct CompletionQueue {
    state: Mutex<Completions>,
    /// Write end of the waker: a byte is written when the queue becomes non-empty, which makes the
    /// other end readable.
    waker: UnixStream,
}

#[derive(Default)]
struct Completions {
    done: Vec<(u64, Outcome)>,
    is_abandoned: bool,
}

#[pymethods]
impl Pending {
    /// Makes an empty set of calls of a store, for one event loop.
    #[new]
    fn new(py: Python<'_>, store: &Bound<'_, Store>) -> PyResult<Self> {
        store.get().call(py, |_client| ())?; // raises if the store is closed
        let (near, far) = or_raise(py, waker_pair())?;
        let completions = CompletionQueue { state: Mutex::default(), waker: far };
        let calls = LoopCalls {
            store: Arc::clone(store.get().open()),
            completions: Some(Arc::new(completions)),
            waker: near,
            begun: AtomicU64::new(0),
        };
        Ok(Self { calls: Arc::new(calls), timeout: None })
    }

    /// Returns the same calls with a limit for the duration of each call.
    fn within(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Self> {
        let timeout = or_raise(py, seconds("timeout_s", Some(timeout_s)))?;
        Ok(Self { calls: Arc::clone(&self.calls), timeout })
    }

    /// Returns the descriptor that becomes readable when outcomes can be taken.
    fn fileno(&self) -> i32 {
        self.calls.waker.as_raw_fd()
    }

    /// Takes the delivered outcomes: the number of each call, and its value or its exception.
    fn take(&self, py: Python<'_>) -> PyResult<Vec<(u64, Py<PyAny>)>> {
        or_raise(py, self.calls.check())?;
        // Drain the waker before the queue: an outcome pushed in between then wakes the loop again.
        let mut drained = [0; 64];
        while (&self.calls.waker).read(&mut drained).is_ok_and(|count| count == drained.len()) {}
        let done = std::mem::take(&mut self.calls.completions().state.lock().done);
        let to_object_pair = |(number, outcome): (u64, Outcome)| match outcome(py) {
            Ok(value) => (number, value),
            Err(error) => (number, error.into_value(py).into_any()),
        };
        Ok(done.into_iter().map(to_object_pair).collect())
    }

    /// Begins to put values. The outcome of each item is true if the value was stored.
    #[pyo3(signature = (keys, values, *, options = None, is_upsert = false, if_absent = None))]
    fn put<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        values: Vec<Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PutOptions>>,
        is_upsert: bool,
        if_absent: Option<Absent<'py>>,
    ) -> PyResult<u64> {
        or_raise(py, check_same_length("values", values.len(), keys.len()))?;
        let views = values.iter().map(Views::of).collect::<PyResult<Vec<_>>>()?;
        let names = PackedKeys::from_slice(&keys)?;
        let options = batch_options(py, options, is_upsert, keys.len(), if_absent.as_ref())?;
        let keys = unbound(keys);
        self.begin(py, move |client| {
            let stored = client.map(|client| {
                let ranges: Vec<&[LocalRange]> = views.iter().map(Views::ranges).collect();
                let stored = transfer::put(client, &names, &ranges, options).into_iter();
                stored.map(|stored| stored.map(|version| version.is_some())).collect()
            });
            Box::new(move |py| {
                drop(views);
                outcome_objects(py, &keys, stored)
            })
        })
    }

    /// Begins to get objects, as bytes or as buffers.
    #[pyo3(signature = (keys, *, as_bytes = false, lease = true))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        as_bytes: bool,
        lease: bool,
    ) -> PyResult<u64> {
        let names = invalid_as_missing(object_keys(&keys)?);
        let keys = unbound(keys);
        self.begin(py, move |client| {
            let fetched = client.map(|client| fetch(client, names, lease));
            Box::new(move |py| {
                if !as_bytes {
                    return outcome_objects(py, &keys, fetched);
                }
                let bytes = |got: Result<Buffer>| got.map(|buffer| buffer.to_bytes(py));
                outcome_objects(
                    py,
                    &keys,
                    fetched.map(|fetched| fetched.into_iter().map(bytes).collect()),
                )
            })
        })
    }

    /// Begins to get objects into writable buffers. The outcome of each item is the object's
    /// length.
    #[pyo3(signature = (keys, buffers, *, lease = true))]
    fn read_into<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        buffers: Vec<Bound<'py, PyAny>>,
        lease: bool,
    ) -> PyResult<u64> {
        let views = writable_views(&keys, &buffers)?;
        let names = invalid_as_missing(object_keys(&keys)?);
        let keys = unbound(keys);
        self.begin(py, move |client| {
            let lengths = client.map(|client| {
                let ranges: Vec<_> = views.iter().map(Views::ranges).collect();
                let terms = GetTerms { is_exact: false, takes_lease: lease };
                transfer::get_into(client, names, &ranges, terms)
            });
            Box::new(move |py| {
                drop(views);
                outcome_objects(py, &keys, lengths)
            })
        })
    }

    /// Begins to locate objects, to read ranges of them.
    #[pyo3(signature = (keys, *, lease = true))]
    fn locate<'py>(&self, py: Python<'py>, keys: Keys<'py>, lease: bool) -> PyResult<u64> {
        self.begin_for_keys(py, keys, move |client, names| Located::find(client, names, lease))
    }

    /// Begins to read a range of a located object as `bytes`.
    fn read_located(
        &self,
        py: Python<'_>,
        located: &Bound<'_, Located>,
        offset: Unsigned,
        length: Unsigned,
    ) -> PyResult<u64> {
        let (buffer, range) = Buffer::uninit(length.0 as u64, false)?;
        let located = located.get().clone();
        self.begin(py, move |client| {
            let read = client.and_then(|client| located.read(client, offset.0 as u64, &[range]));
            Box::new(move |py| {
                or_raise(py, read)?;
                to_object(py, buffer.to_bytes(py))
            })
        })
    }

    /// Begins to read a range of a located object into a writable buffer, which is filled.
    fn read_located_into(
        &self,
        py: Python<'_>,
        located: &Bound<'_, Located>,
        offset: Unsigned,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let range = RangeRead::new(located, offset, buffer)?;
        self.begin(py, move |client| {
            let read = client.and_then(|client| range.read(client));
            Box::new(move |py| {
                drop(range);
                to_object(py, or_raise(py, read)?)
            })
        })
    }

    /// Begins to read ranges of objects into memory at addresses, which belongs to `owner`. The
    /// outcome of each item is the number of bytes, the version, and the value of the tag.
    #[pyo3(signature = (keys, grids, owner, *, lease = true, tag = ""))]
    fn read_grids<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        grids: Vec<Vec<GridArgument>>,
        owner: Py<PyAny>,
        lease: bool,
        tag: &str,
    ) -> PyResult<u64> {
        let table = GridTable::new(&keys, grids, py)?;
        let (keys, tag) = (unbound(keys), tag.to_owned());
        self.begin(py, move |client| {
            let read = client.map(|client| table.read(client, false, lease, &tag));
            Box::new(move |py| {
                drop(owner);
                outcome_objects(py, &keys, read)
            })
        })
    }

    /// Begins to check which objects exist.
    #[pyo3(signature = (keys, *, lease = true, prefetch = false))]
    fn exists<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lease: bool,
        prefetch: bool,
    ) -> PyResult<u64> {
        let terms = ProbeTerms { takes_lease: lease, prefetches: prefetch };
        self.begin_for_keys(py, keys, move |client, names| {
            probe(client, names, terms).into_iter().map(is_there).collect()
        })
    }

    /// Begins to look for objects with the keys, or else with a suffix.
    fn exists_or_suffixed<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        suffixes: Vec<Vec<u8>>,
    ) -> PyResult<u64> {
        self.begin_for_keys(py, keys, move |client, names| probe_suffixes(client, names, &suffixes))
    }

    /// Begins to look up the lengths of objects.
    #[pyo3(signature = (keys, *, lease = true))]
    fn sizes<'py>(&self, py: Python<'py>, keys: Keys<'py>, lease: bool) -> PyResult<u64> {
        self.begin_for_keys(py, keys, move |client, names| {
            let terms = ProbeTerms { takes_lease: lease, prefetches: false };
            probe(client, names, terms).into_iter().map(length_of).collect()
        })
    }

    /// Begins to ask what the master knows of objects.
    fn describe<'py>(&self, py: Python<'py>, keys: Keys<'py>) -> PyResult<u64> {
        self.begin_for_keys(py, keys, move |client, names| {
            let found = call_with_valid(names, |names| client.details(&names));
            found.into_iter().map(|found| found.map(Details::from)).collect()
        })
    }

    /// Begins to let objects expire after that time from now; `None`: never.
    fn set_expiry<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        ttl_ms: Option<u64>,
    ) -> PyResult<u64> {
        let ttl = ttl_ms.map(Duration::from_millis);
        self.begin_for_keys(py, keys, move |client, names| {
            done(call_with_valid(names, |names| client.set_expiry(&names, ttl)))
        })
    }

    /// Begins to remove objects, or those that have a version.
    #[pyo3(signature = (keys, *, force = false, spare_pinned = false, if_version = None))]
    fn remove<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        force: bool,
        spare_pinned: bool,
        if_version: Option<u64>,
    ) -> PyResult<u64> {
        let if_version = if_version.map(Version);
        let terms = RemovalTerms { is_forced: force, spares_hard_pinned: spare_pinned, if_version };
        self.begin_for_keys(py, keys, move |client, names| {
            done(call_with_valid(names, |names| client.remove_under(&names, &terms)))
        })
    }

    /// Begins to remove all objects, or those that a regex or a prefix selects. The outcome is
    /// what the blocking call returns.
    #[pyo3(signature = (*, regex = None, prefix = None, force = false, spare_pinned = false))]
    fn remove_matching(
        &self,
        py: Python<'_>,
        regex: Option<String>,
        prefix: Option<Vec<u8>>,
        force: bool,
        spare_pinned: bool,
    ) -> PyResult<u64> {
        let which = or_raise(py, selector(regex, prefix))?;
        let terms = terms_of_sweep(force, spare_pinned);
        self.begin(py, move |client| {
            let counts = client.and_then(|client| client.remove_matching_under(&which, &terms));
            Box::new(move |py| to_object(py, removal_numbers(or_raise(py, counts)?)))
        })
    }

    /// Begins to list one page of the objects whose key has a prefix.
    #[pyo3(signature = (*, prefix = Vec::new(), after = None, limit = 0))]
    fn list(
        &self,
        py: Python<'_>,
        prefix: Vec<u8>,
        after: Option<Vec<u8>>,
        limit: u32,
    ) -> PyResult<u64> {
        let after = or_raise(py, after.map(ObjectKey::new).transpose())?;
        let prefix = Selector::Prefix(prefix);
        self.begin(py, move |client| {
            let page = client.and_then(|client| client.list(&prefix, after.as_ref(), limit));
            Box::new(move |py| to_object(py, listing(py, or_raise(py, page)?)))
        })
    }

    /// Begins to list the segments of the pool.
    fn segments(&self, py: Python<'_>) -> PyResult<u64> {
        self.begin(py, move |client| {
            let segments = client.and_then(Client::segments);
            Box::new(move |py| {
                let segments = or_raise(py, segments)?;
                let described: PyResult<Vec<_>> =
                    segments.iter().map(|segment| describe::segment(py, segment)).collect();
                to_object(py, described?)
            })
        })
    }

    /// Begins to get the status of the master.
    fn status(&self, py: Python<'_>) -> PyResult<u64> {
        self.begin(py, move |client| {
            let status = client.and_then(Client::status);
            Box::new(move |py| to_object(py, describe::status(py, &or_raise(py, status)?)?))
        })
    }

    /// Begins to locate the copies of objects.
    #[pyo3(signature = (keys, *, lease = true))]
    fn replicas<'py>(&self, py: Python<'py>, keys: Keys<'py>, lease: bool) -> PyResult<u64> {
        let names = invalid_as_missing(object_keys(&keys)?);
        let keys = unbound(keys);
        self.begin(py, move |client| {
            let described =
                client.map(|client| call_with_valid(names, |names| client.describe(&names, lease)));
            Box::new(move |py| {
                let mut places = Vec::with_capacity(keys.len());
                for located in or_raise(py, described)? {
                    places.push(match located {
                        Ok(located) => Ok(describe::places(py, &located)?),
                        Err(error) => Err(error),
                    });
                }
                outcome_objects(py, &keys, Ok(places))
            })
        })
    }

    /// Begins to create a copy task. The outcome is the id of the task.
    fn copy_object<'py>(
        &self,
        py: Python<'py>,
        key: Bound<'py, PyAny>,
        targets: Vec<String>,
    ) -> PyResult<u64> {
        let key = or_raise(py, single_key(key)?)?;
        self.begin_task(py, NewTask::Copy { key, targets })
    }

    /// Begins to create a move task. The outcome is the id of the task.
    fn move_object<'py>(
        &self,
        py: Python<'py>,
        key: Bound<'py, PyAny>,
        source: String,
        target: String,
    ) -> PyResult<u64> {
        let key = or_raise(py, single_key(key)?)?;
        self.begin_task(py, NewTask::Move { key, source, target })
    }

    /// Begins to query a task.
    fn task(&self, py: Python<'_>, task_id: IdParts) -> PyResult<u64> {
        self.begin(py, move |client| {
            let info = client.and_then(|client| tasks::info(client, task_id));
            Box::new(move |py| to_object(py, tasks::task(py, &or_raise(py, info)?)?))
        })
    }

    /// Begins to start a drain of segments.
    #[pyo3(signature = (segments, *, targets = Vec::new(), concurrency = 0, may_evict = false))]
    fn drain(
        &self,
        py: Python<'_>,
        segments: Vec<String>,
        targets: Vec<String>,
        concurrency: u32,
        may_evict: bool,
    ) -> PyResult<u64> {
        let new = NewDrain { segments, targets, concurrency, may_evict };
        self.begin_drain_call(py, move |client| client.drain(&new))
    }

    /// Begins to query a drain.
    fn drain_info(&self, py: Python<'_>, job_id: IdParts) -> PyResult<u64> {
        self.begin_drain_call(py, move |client| client.drain_info(tasks::job_id(job_id)))
    }

    /// Begins to cancel a drain.
    fn cancel_drain(&self, py: Python<'_>, job_id: IdParts) -> PyResult<u64> {
        self.begin_drain_call(py, move |client| client.cancel_drain(tasks::job_id(job_id)))
    }

    /// Begins to check that the master answers and knows this client.
    fn health(&self, py: Python<'_>) -> PyResult<u64> {
        self.begin(py, move |client| {
            let health = client.and_then(Client::health);
            Box::new(move |py| {
                or_raise(py, health)?;
                Ok(py.None())
            })
        })
    }
}

impl Pending {
    /// Begins to create a task. The outcome is its id.
    fn begin_task(&self, py: Python<'_>, task: NewTask) -> PyResult<u64> {
        self.begin(py, move |client| {
            let id = client.and_then(|client| tasks::create(client, task));
            Box::new(move |py| to_object(py, or_raise(py, id)?))
        })
    }

    /// Begins a call that returns the state of a drain.
    fn begin_drain_call(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Client) -> Result<DrainInfo> + Send + 'static,
    ) -> PyResult<u64> {
        self.begin(py, move |client| {
            let info = client.and_then(call);
            Box::new(move |py| to_object(py, tasks::drain(py, &or_raise(py, info)?)?))
        })
    }

    /// Submits a call to the worker threads; returns its number.
    fn begin(
        &self,
        py: Python<'_>,
        call: impl FnOnce(Result<&Client>) -> Outcome + Send + 'static,
    ) -> PyResult<u64> {
        or_raise(py, self.calls.check())?;
        workers::drain_drop_queue();
        let number = self.calls.begun.fetch_add(1, Ordering::Relaxed) + 1;
        let store = Arc::clone(&self.calls.store);
        let completions = Arc::clone(self.calls.completions());
        let deadline = self.timeout.map(|timeout| SystemClock.now() + timeout);
        let job = move |drop_queue: &DropQueue| {
            let limit = deadline.map(|_| CallLimit::new(deadline, false));
            let make = || run_under(limit, || call(store.client()));
            let made = catch_unwind(AssertUnwindSafe(make));
            completions.push(number, made.unwrap_or_else(|_| panicked()), drop_queue);
        };
        or_raise(py, workers::submit(Box::new(job)))?;
        Ok(number)
    }

    /// Begins a call that has an outcome for each key.
    fn begin_for_keys<'py, T>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        call: impl FnOnce(&Client, Vec<Result<ObjectKey>>) -> Vec<Result<T>> + Send + 'static,
    ) -> PyResult<u64>
    where
        T: for<'a> IntoPyObject<'a> + Send + 'static,
    {
        let names = invalid_as_missing(object_keys(&keys)?);
        let keys = unbound(keys);
        self.begin(py, move |client| {
            let results = client.map(|client| call(client, names));
            Box::new(move |py| outcome_objects(py, &keys, results))
        })
    }
}

impl LoopCalls {
    /// Returns an error in a forked child. Must be called before any lock is taken: the child may
    /// have inherited a lock in locked state.
    fn check(&self) -> Result<()> {
        if self.store.is_forked() {
            let text = "the store was opened before this process was forked; open one here";
            return Err(Error::closed(text));
        }
        Ok(())
    }

    fn completions(&self) -> &Arc<CompletionQueue> {
        self.completions.as_ref().expect("only drop takes what is inside")
    }
}

impl Drop for LoopCalls {
    fn drop(&mut self) {
        let Some(completions) = self.completions.take() else { return };
        if self.store.is_forked() {
            std::mem::forget(completions);
            return;
        }
        let mut state = completions.state.lock();
        state.is_abandoned = true;
        let done = std::mem::take(&mut state.done);
        drop(state);
        drop(done);
    }
}

impl CompletionQueue {
    fn push(&self, number: u64, outcome: Outcome, drop_queue: &DropQueue) {
        let mut state = self.state.lock();
        if state.is_abandoned {
            drop(state);
            drop_queue.push(Box::new(outcome));
            return;
        }
        let is_first = state.done.is_empty();
        state.done.push((number, outcome));
        drop(state);
        if is_first {
            // If the socket is full, the loop has a wake-up pending already.
            let _ = (&self.waker).write(&[1]);
        }
    }
}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue").finish_non_exhaustive()
    }
}

fn waker_pair() -> Result<(UnixStream, UnixStream)> {
    let pair = UnixStream::pair().and_then(|(near, far)| {
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        Ok((near, far))
    });
    pair.map_err(|error| Error::internal("no socket pair to wake the event loop").caused_by(error))
}

/// Gets objects into buffers that own their memory.
fn fetch(client: &Client, names: Vec<Result<ObjectKey>>, takes_lease: bool) -> Vec<Result<Buffer>> {
    let target = |length| {
        Buffer::uninit(length, false)
            .map_err(|_| Error::internal("no memory for the object").with("length", length))
    };
    let located = transfer::locate(client, names, takes_lease);
    let targets: Vec<Result<(Buffer, LocalRange)>> = located
        .iter()
        .map(|located| located.as_ref().map_err(Clone::clone).and_then(|l| target(l.length())))
        .collect();
    let wanted = located
        .iter()
        .zip(&targets)
        .map(|(located, target)| match target {
            Ok(_) => located.as_ref().map_err(Clone::clone),
            Err(error) => Err(error.clone()),
        })
        .collect();
    let ranges: Vec<_> = targets.iter().flatten().map(|(_, range)| *range).collect();
    let read = transfer::read(client, wanted, &ranges);
    let filled = |(target, read): (Result<(Buffer, LocalRange)>, Result<u64>)| {
        let (buffer, _) = target?;
        read.map(|_| buffer)
    };
    targets.into_iter().zip(read).map(filled).collect()
}

/// Returns a list with each value, or the exception in its place. Raises an error of the whole
/// call.
fn outcome_objects<'py, T: IntoPyObject<'py>>(
    py: Python<'py>,
    keys: &[Py<PyAny>],
    results: Result<Vec<Result<T>>>,
) -> PyResult<Py<PyAny>> {
    let results = or_raise(py, results)?;
    let keys: Vec<_> = keys.iter().map(|key| key.bind(py).clone()).collect();
    Ok(outcome_list(py, &keys, results)?.into_any().unbind())
}

fn to_object<'py, T: IntoPyObject<'py>>(py: Python<'py>, value: T) -> PyResult<Py<PyAny>> {
    value.into_py_any(py)
}

fn unbound(keys: Keys<'_>) -> Vec<Py<PyAny>> {
    keys.into_iter().map(Bound::unbind).collect()
}

/// Returns the outcome of a call that panicked.
fn panicked() -> Outcome {
    Box::new(|py| Err(py_error(py, &Error::internal("a call panicked"))))
}
