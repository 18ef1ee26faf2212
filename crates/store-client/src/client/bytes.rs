//! Puts and gets whole values as byte slices. The caller's memory is borrowed for the duration of
//! the call.

use mooncake_base::{Error, ErrorCode, ObjectKey, Result};
use mooncake_transfer_engine::LocalRange;

use super::Client;
use crate::object::{PutItem, PutOptions, PutOutcome, Read};

/// Maximum attempts to read a value that is replaced during the read.
const ATTEMPTS_MAX: usize = 3;

/// Longer values are allocated only if there is memory.
const FALLIBLE_BYTES_MIN: usize = 1 << 20;

impl Client {
    /// Puts one value.
    ///
    /// # Errors
    /// Same as [`put`](Self::put).
    pub fn put_bytes(
        &self,
        key: &ObjectKey,
        value: &[u8],
        options: &PutOptions,
    ) -> Result<PutOutcome> {
        // SAFETY: the slice is borrowed until the put returns, and a put only reads it.
        let part = unsafe { LocalRange::held(value.as_ptr().cast_mut(), value.len()) };
        only(self.put(&[PutItem { key: key.into(), parts: &[part] }], options))
    }

    /// Gets one value; `None` if no object has the key. Takes no lease.
    ///
    /// # Errors
    /// Same as [`locate`](Self::locate) and [`read`](Self::read).
    pub fn get_bytes(&self, key: &ObjectKey) -> Result<Option<Vec<u8>>> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.read_value(key) {
                Ok(value) => return Ok(Some(value)),
                Err(error) if error.code() == ErrorCode::OBJECT_NOT_FOUND => return Ok(None),
                Err(error)
                    if error.code() == ErrorCode::LEASE_EXPIRED && attempts < ATTEMPTS_MAX => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn read_value(&self, key: &ObjectKey) -> Result<Vec<u8>> {
        let located = only(self.locate_owned(vec![key.clone()], false))?;
        let mut value = zeroed(located.length()).map_err(|error| error.with("key", key))?;
        // SAFETY: this function owns the vector, which stays alive and unmoved until the read
        // returns.
        let into = unsafe { LocalRange::held(value.as_mut_ptr(), value.len()) };
        only(self.read(&[Read::whole(&located, &[into])]))?;
        Ok(value)
    }
}

/// Allocates a buffer. Its length comes from the network: one that does not fit into memory is an
/// error of this call, and does not abort the process.
fn zeroed(length: u64) -> Result<Vec<u8>> {
    let too_large = || {
        Error::new(ErrorCode::INVALID_PARAMS, "there is no memory for a value of this length")
            .with("bytes", length)
    };
    let length_here = usize::try_from(length).map_err(|_| too_large())?;
    if length_here > FALLIBLE_BYTES_MIN {
        // `vec!` gets zeroed pages from the system without touching them, but cannot fail. The
        // space is given back at once, so that `vec!` finds it free.
        Vec::<u8>::new().try_reserve_exact(length_here).map_err(|_| too_large())?;
    }
    Ok(vec![0; length_here])
}

/// Returns the outcome of a batch of one item.
fn only<T>(outcomes: Vec<Result<T>>) -> Result<T> {
    let mut outcomes = outcomes.into_iter();
    outcomes.next().unwrap_or_else(|| Err(Error::internal("a batch of one gave no outcome")))
}

/// A range for tests that transfer nothing.
#[cfg(test)]
pub(crate) fn dangling_range(length: usize) -> LocalRange {
    // SAFETY: the range is never read or written.
    unsafe { LocalRange::foreign(4096, length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_beyond_memory_is_an_error() {
        for length in [u64::MAX, 1 << 63, 1 << 60, 1 << 47] {
            let error = zeroed(length).unwrap_err();
            assert_eq!(error.code(), ErrorCode::INVALID_PARAMS);
            assert!(error.to_string().contains(&length.to_string()), "{error}");
        }
        for length in [1, FALLIBLE_BYTES_MIN + 1] {
            assert_eq!(zeroed(length as u64).unwrap(), vec![0; length]);
        }
    }
}
