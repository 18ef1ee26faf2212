//! Objects beside a key: those whose keys are that key with a suffix.
//!
//! A tensor in shards has no object with its own key. A probe finds the objects that tell of it in the
//! same call, and a put of its key is refused.

use bytes::Bytes;
use mooncake_base::{Error, ErrorCode, Moment, Result, TenantId, key::Printed};
use mooncake_proto::v1;

use super::super::{SLICE_ITEMS, shared_state::SharedState};
use crate::state::ObjectState;

/// The maximum number of suffixes of a call.
const SUFFIXES_MAX: usize = 8;

/// The maximum length of a suffix.
const SUFFIX_BYTES_MAX: usize = 64;

/// Checks the suffixes of a probe or a put.
///
/// # Errors
/// `INVALID_PARAMS`: there are too many of them, or one is too long.
pub(super) fn check<S: AsRef<[u8]>>(suffixes: &[S]) -> Result<()> {
    if suffixes.len() > SUFFIXES_MAX {
        return Err(Error::invalid("the call has too many suffixes")
            .with("suffixes", suffixes.len())
            .with("limit", SUFFIXES_MAX));
    }
    match suffixes.iter().map(|suffix| suffix.as_ref().len()).max() {
        Some(longest) if longest > SUFFIX_BYTES_MAX => {
            Err(Error::invalid("a suffix of the call is too long")
                .with("bytes", longest)
                .with("limit", SUFFIX_BYTES_MAX))
        }
        _ => Ok(()),
    }
}

/// Returns the keys with each suffix, those of one key after another.
pub(super) fn suffixed<'a>(
    keys: impl IntoIterator<Item = &'a [u8]>,
    suffixes: &[Bytes],
) -> Vec<Vec<u8>> {
    let keys = keys.into_iter();
    keys.flat_map(|key| suffixes.iter().map(move |suffix| [key, &suffix[..]].concat())).collect()
}

/// Returns the error for a put of a key beside which there is an object.
pub(super) fn refusal(found: &[u8]) -> Error {
    let text = "an object exists beside the key with which the object was not to be put";
    Error::new(ErrorCode::OBJECT_ALREADY_EXISTS, text).with("beside", Printed(found))
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
        let keys = suffixed(absent.iter().map(|&at| &request.keys[at][..]), suffixes);
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
