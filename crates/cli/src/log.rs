//! The log of a program: what `MOONCAKE_LOG` and `MC_LOG_LEVEL` let through, on stderr.

use mooncake_base::env;
use tracing_subscriber::EnvFilter;

/// Sends the log to stderr, unless the process has one already (inside Python it may).
pub fn install() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter())
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}

/// What the environment lets through. A filter that cannot be read is no reason to be silent or to
/// fail: then the level counts.
pub fn filter() -> EnvFilter {
    let level = env::MC_LOG_LEVEL.read();
    let level = level_of(level.as_deref().unwrap_or(env::MC_LOG_LEVEL.default));
    match env::MOONCAKE_LOG.read().filter(|text| !text.is_empty()) {
        Some(text) => EnvFilter::try_new(&text).unwrap_or_else(|_| EnvFilter::new(level)),
        None => EnvFilter::new(level),
    }
}

/// The established spellings of a level, and ours.
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
    fn every_spelling_of_a_level_is_read() {
        for (text, level) in [("INFO", "info"), ("1", "warn"), ("0", "info"), ("ERROR", "error")] {
            assert_eq!(level_of(text), level, "{text}");
        }
    }
}
