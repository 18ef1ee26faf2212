//! The log of the native code: to standard error, or on request to Python's `logging`.
//!
//! A native thread must not wait for the interpreter in order to log, because the thread that holds
//! the interpreter may be waiting for it. Records for Python therefore go into a bounded queue that
//! a Python thread drains. A record that finds the queue full, or locked for long (a fork may leave
//! it locked for ever in the child), is counted and dropped.

use std::{
    collections::VecDeque,
    fmt::Write as _,
    fs::File,
    io::{self, Write as _},
    mem,
    os::fd::AsFd,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_base::env::{self, Unsupported};
use mooncake_base::sync::{Condvar, Mutex, MutexGuard};
use pyo3::prelude::*;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, layer::Context, prelude::*};

use crate::{detach::detached, error::or_raise};

/// Maximum number of records that wait for Python's `logging`.
const QUEUE_MAX: usize = 4096;
/// How long a record waits for the queue. Others hold it for less than a microsecond, unless the
/// system takes the processor away from them.
const QUEUE_WAIT: Duration = Duration::from_millis(100);

/// A record for Python: level in the numbers of `logging`, logger, text.
type LogRecord = (u8, String, String);

static TO_PYTHON: AtomicBool = AtomicBool::new(false);
static DROPPED: AtomicU64 = AtomicU64::new(0);
static QUEUE: Mutex<VecDeque<LogRecord>> = Mutex::new(VecDeque::new());
static ARRIVED: Condvar = Condvar::new();

/// Installs the subscriber, unless the program has installed one already.
pub(crate) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let filter = mooncake_cli::log::filter();
        let asked = [&env::MC_TE_METRIC, &env::MC_STORE_CLIENT_METRIC_INTERVAL];
        let filter = if asked.iter().any(|var| var.is_on()) {
            // The metric lines were asked for, so they are logged at any level.
            let directive = "mooncake::metric=info".parse();
            filter.add_directive(directive.expect("a target and a level are a directive"))
        } else {
            filter
        };
        // Fails only if a subscriber is installed already, which is then the one to use.
        let _ = tracing_subscriber::registry().with(Log.with_filter(filter)).try_init();
    });
}

/// Warns once about variables that are set to an invalid value, or that have no effect here, since
/// upstream's engine reads them.
pub(crate) fn warn_of_variables() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        mooncake_cli::variables::warn_of_every_invalid();
        for (name, reason) in Unsupported::set_in_environment() {
            tracing::warn!(variable = name, "has no effect here: {reason}");
        }
    });
}

/// Sends records into the queue for Python's `logging` from now on.
#[pyfunction]
pub(crate) fn log_to_queue() {
    install();
    TO_PYTHON.store(true, Ordering::Relaxed);
}

/// Waits for records; returns the queued records and how many were dropped since the last call.
#[pyfunction]
#[pyo3(signature = (*, timeout_s))]
pub(crate) fn take_log_records(py: Python<'_>, timeout_s: f64) -> PyResult<(Vec<LogRecord>, u64)> {
    let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
    let records = detached(py, || {
        let mut queue = QUEUE.lock();
        if queue.is_empty() {
            ARRIVED.wait_for(&mut queue, timeout);
        }
        mem::take(&mut *queue).into()
    });
    Ok((or_raise(py, records)?, DROPPED.swap(0, Ordering::Relaxed)))
}

struct Log;

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = EventText::default();
        event.record(&mut text);
        let text = text.finish();
        let (level, target) = (event.metadata().level(), event.metadata().target());
        if TO_PYTHON.load(Ordering::Relaxed) {
            enqueue((python_level(level), target.replace("::", "."), text));
        } else {
            // A failed write of the log cannot be reported anywhere.
            let _ = write_line(&format!("{level:>5} {target}: {text}\n"));
        }
    }
}

fn enqueue(record: LogRecord) {
    let Some(mut queue) = lock_queue().filter(|queue| queue.len() < QUEUE_MAX) else {
        DROPPED.fetch_add(1, Ordering::Relaxed);
        return;
    };
    queue.push_back(record);
    ARRIVED.notify_one();
}

fn lock_queue() -> Option<MutexGuard<'static, VecDeque<LogRecord>>> {
    if let Some(queue) = QUEUE.try_lock() {
        return Some(queue);
    }
    let begin = Instant::now();
    while begin.elapsed() < QUEUE_WAIT {
        thread::yield_now();
        if let Some(queue) = QUEUE.try_lock() {
            return Some(queue);
        }
    }
    None
}

/// Writes a line with one `write` to the current standard error, without the lock of
/// `std::io::stderr`: a fork could leave that lock held forever in the child.
fn write_line(line: &str) -> io::Result<()> {
    File::from(io::stderr().as_fd().try_clone_to_owned()?).write_all(line.as_bytes())
}

fn python_level(level: &Level) -> u8 {
    match *level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// Formats an event as its message followed by the fields as `name=value`.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl EventText {
    fn finish(self) -> String {
        self.message + &self.fields
    }
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
