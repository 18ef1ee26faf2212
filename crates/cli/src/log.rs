//! The log of a program: on stderr, filtered by `MOONCAKE_LOG` and `MC_LOG_LEVEL`. A thread writes
//! it, so that a reader of stderr that stops reading stops no call.

mod queue;

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    io::Write as _,
    panic,
    sync::OnceLock,
    time::Duration,
};

use mooncake_base::{env, parse::read_level};
use tracing_subscriber::EnvFilter;

use self::queue::LogQueue;

/// How long the end of a program waits for a reader of stderr.
const FLUSH_DEADLINE: Duration = Duration::from_secs(1);

static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// Installs the stderr log, unless the process has a log already (as it may inside Python). Panics
/// are written to it, too: a thread that panics with a lock must not wait for a reader.
pub fn install() {
    let log = tracing_subscriber::fmt().with_env_filter(filter()).with_ansi(false);
    let Ok(queue) = LogQueue::start(std::io::stderr()) else {
        let _ = log.with_writer(std::io::stderr).try_init();
        return;
    };
    if log.with_writer(queue.clone()).try_init().is_ok() && QUEUE.set(queue).is_ok() {
        panic::set_hook(Box::new(|panicked| {
            let thread = std::thread::current();
            let mut text = format!("thread '{}' {panicked}", thread.name().unwrap_or("unnamed"));
            let trace = Backtrace::capture();
            if trace.status() == BacktraceStatus::Captured {
                text.push_str(&format!("\n{trace}"));
            }
            print_line(&text);
        }));
    }
}

/// Writes a line to stderr: behind the lines of the log, if there is one.
pub fn print_line(text: &str) {
    let line = format!("{text}\n").into_bytes();
    match QUEUE.get() {
        Some(queue) => queue.push(line),
        None => {
            let _ = std::io::stderr().lock().write_all(&line);
        }
    }
}

/// Writes what is queued. Gives up after a second, if nobody reads stderr.
pub fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(FLUSH_DEADLINE);
    }
}

/// Returns the filter that the environment sets. An invalid filter neither fails nor silences the
/// log: the level applies instead, see [`crate::variables::warn_of_invalid`].
pub fn filter() -> EnvFilter {
    let level = env::MC_LOG_LEVEL.read().and_then(|text| read_level(&text).ok());
    let level = level.unwrap_or(env::MC_LOG_LEVEL.default);
    match env::MOONCAKE_LOG.read().filter(|text| !text.is_empty()) {
        Some(text) => EnvFilter::try_new(&text).unwrap_or_else(|_| EnvFilter::new(level)),
        None => EnvFilter::new(level),
    }
}

/// Returns why the text is not a log filter, if it is none.
pub(crate) fn filter_error(text: &str) -> Option<String> {
    EnvFilter::try_new(text).err().map(|error| format!("not a log filter: {error}"))
}
