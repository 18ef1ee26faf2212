//! The log of a program: on stderr, filtered by `MOONCAKE_LOG` and `MC_LOG_LEVEL`.

use mooncake_base::{env, parse::read_level};
use tracing_subscriber::EnvFilter;

/// Installs the stderr log, unless the process has a log already (as it may inside Python).
pub fn install() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter())
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
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
