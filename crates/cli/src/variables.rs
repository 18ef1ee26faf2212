//! Environment variables whose values are invalid.

use mooncake_base::env::{self, EnvVar, Invalid};

use crate::log;

/// Returns what is wrong with the value of a variable, if it is set.
pub fn invalid(variable: &EnvVar) -> Option<Invalid> {
    if variable.name != env::MOONCAKE_LOG.name {
        return variable.invalid();
    }
    let reason = log::filter_error(&variable.read()?)?;
    Some(Invalid { reason, effect: "is ignored, and MC_LOG_LEVEL applies" })
}

/// Warns of all variables as [`warn_of_invalid`] does, for a process that reads most of them.
pub fn warn_of_every_invalid() {
    warn_of_invalid(env::ALL.iter().copied());
}

/// Warns of the variables that have an invalid value and are read nevertheless. The others are
/// refused where they are read.
pub fn warn_of_invalid<'a>(variables: impl IntoIterator<Item = &'a EnvVar>) {
    for variable in variables {
        if let Some(Invalid { reason, effect }) =
            invalid(variable).filter(|it| !it.effect.is_empty())
        {
            let (variable, value) = (variable.name, variable.read().unwrap_or_default());
            tracing::warn!(variable, value, "{reason}; the value {effect}");
        }
    }
}
