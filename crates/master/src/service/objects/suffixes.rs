//! Objects beside a key: those whose keys are that key with a suffix.
//!
//! A tensor in shards has no object with its own key. A probe finds the objects that tell of it in the
//! same call.

use mooncake_base::{Error, Moment, Result, TenantId};
use mooncake_proto::v1;

use super::super::{SLICE_ITEMS, shared_state::SharedState};
use crate::state::ObjectState;

/// The maximum number of suffixes of a probe.
const SUFFIXES_MAX: usize = 8;

/// The maximum length of a suffix.
const SUFFIX_BYTES_MAX: usize = 64;

/// Checks the suffixes of a probe.
///
/// # Errors
/// `INVALID_PARAMS`: there are too many of them, or one is too long.
pub(super) fn check<S: AsRef<[u8]>>(suffixes: &[S]) -> Result<()> {
    if suffixes.len() > SUFFIXES_MAX {
        return Err(Error::invalid("the probe has too many suffixes")
            .with("suffixes", suffixes.len())
            .with("limit", SUFFIXES_MAX));
    }
    match suffixes.iter().map(|suffix| suffix.as_ref().len()).max() {
        Some(longest) if longest > SUFFIX_BYTES_MAX => {
            Err(Error::invalid("a suffix of the probe is too long")
                .with("bytes", longest)
                .with("limit", SUFFIX_BYTES_MAX))
        }
        _ => Ok(()),
    }
}

/// Returns for each key the suffixes with which there is a complete object, as bits; nothing if none
/// is asked for. The suffixes of complete objects are not looked for, which costs those nothing.
pub(super) fn find(
    shared: &SharedState,
    now: Moment,
    tenant: &TenantId,
    request: &v1::ProbeRequest,
    states: &[i32],
) -> Vec<u32> {
    let suffixes = &request.suffixes;
    if suffixes.is_empty() {
        return Vec::new();
    }
    let is_complete = |&state: &i32| state == i32::from(v1::ObjectState::Complete);
    let mut found = vec![0; states.len()];
    let absent: Vec<usize> = (0..states.len()).filter(|&at| !is_complete(&states[at])).collect();
    for absent in absent.chunks(SLICE_ITEMS) {
        // The keys are made while the state is not locked.
        let keys = absent.iter().flat_map(|&at| {
            suffixes.iter().map(move |suffix| [&request.keys[at][..], &suffix[..]].concat())
        });
        let keys: Vec<Vec<u8>> = keys.collect();
        let mut probed = Vec::with_capacity(keys.len());
        shared.for_each_slice(&keys, |state, keys| {
            probed.extend(state.probe_all(now, tenant, keys, false));
        });
        for (&at, probed) in absent.iter().zip(probed.chunks(suffixes.len())) {
            let bits = probed.iter().enumerate().map(|(suffix, probed)| {
                u32::from(matches!(probed.state, ObjectState::Complete)) << suffix
            });
            found[at] = bits.sum();
        }
    }
    found
}
