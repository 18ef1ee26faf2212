//! Errors about objects that more than one call returns.

use mooncake_base::{Error, ErrorCode, Version, key::Printed};

/// Returns the error of a call that asks for another version than the present one.
pub(in crate::state) fn other_version(
    key: &[u8],
    expected: Version,
    present: Option<Version>,
) -> Error {
    let why = match present {
        Some(_) => "the object has another version",
        None => "the object does not exist any more",
    };
    let error = Error::new(ErrorCode::OBJECT_ALREADY_EXISTS, why)
        .with("key", Printed(key))
        .with("expected", expected);
    match present {
        Some(present) => error.with("version", present),
        None => error,
    }
}

pub(in crate::state) fn not_found(key: &[u8]) -> Error {
    Error::new(ErrorCode::OBJECT_NOT_FOUND, "no object has that key").with("key", Printed(key))
}

pub(in crate::state) fn not_ready(key: &[u8]) -> Error {
    Error::new(ErrorCode::REPLICA_IS_NOT_READY, "the object is still being written")
        .with("key", Printed(key))
}
