//! One environment variable as a value.

use mooncake_base::{Result, env::EnvVar, parse::read_bool};

/// Returns the parsed value of a variable, if it is set and not empty.
///
/// # Errors
/// `read` rejects the value; the error names the variable.
pub(crate) fn value<T>(var: &'static EnvVar, read: fn(&str) -> Result<T>) -> Result<Option<T>> {
    let text = var.read().filter(|text| !text.trim().is_empty());
    text.map(|text| read(&text)).transpose().map_err(|error| error.with("variable", var.name))
}

/// Returns the state of a switch that is on by default. An invalid value turns it off.
pub(crate) fn is_on_by_default(var: &'static EnvVar) -> bool {
    let text = var.read().filter(|text| !text.trim().is_empty());
    text.is_none_or(|text| read_bool(&text).unwrap_or(false))
}
