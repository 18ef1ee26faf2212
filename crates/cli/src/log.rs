//! The log of a program: on stderr, filtered by `MOONCAKE_LOG` and `MC_LOG_LEVEL`.

use mooncake_base::env;
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
/// log: the level applies instead.
pub fn filter() -> EnvFilter {
    let level = env::MC_LOG_LEVEL.read();
    let level = level_of(level.as_deref().unwrap_or(env::MC_LOG_LEVEL.default));
    match env::MOONCAKE_LOG.read().filter(|text| !text.is_empty()) {
        Some(text) => EnvFilter::try_new(&text).unwrap_or_else(|_| EnvFilter::new(level)),
        None => EnvFilter::new(level),
    }
}

/// Parses upstream's and our spellings of a level.
fn level_of(text: &str) -> &'static str {
    match text.trim().to_ascii_lowercase().as_str() {
        "trace" => "trace",
        "debug" => "debug",
        "info" | "0" => "info",
        "error" | "fatal" | "2" | "3" => "error",
        "off" | "none" => "off",
        _ => "warn",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_spelling_of_a_level() {
        for (text, level) in [("INFO", "info"), ("1", "warn"), ("0", "info"), ("ERROR", "error")] {
            assert_eq!(level_of(text), level, "{text}");
        }
    }
}
