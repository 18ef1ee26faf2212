//! Puts and gets whole values as byte slices. The caller's memory is borrowed for the duration of
//! the call.

use mooncake_base::{Error, ErrorCode, ObjectKey, Result};
use mooncake_transfer_engine::LocalRange;

use super::Client;
use crate::object::{PutItem, PutOptions, PutOutcome, Read};

/// Maximum attempts to read a value that is replaced during the read.
const ATTEMPTS_MAX: usize = 3;

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

    /// Gets one value; `None` if no object has the key.
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
        let located = only(self.locate(std::slice::from_ref(key)))?;
        let mut value = vec![0; located.length() as usize];
        // SAFETY: this function owns the vector, which stays alive and unmoved until the read
        // returns.
        let into = unsafe { LocalRange::held(value.as_mut_ptr(), value.len()) };
        only(self.read(&[Read::whole(&located, &[into])]))?;
        Ok(value)
    }
}

/// Returns the outcome of a batch of one item.
fn only<T>(outcomes: Vec<Result<T>>) -> Result<T> {
    let mut outcomes = outcomes.into_iter();
    outcomes.next().unwrap_or_else(|| Err(Error::internal("a batch of one gave no outcome")))
}

/// A range for tests that transfer nothing.
#[cfg(test)]
pub(super) fn dangling_range(length: usize) -> LocalRange {
    // SAFETY: the range is never read or written.
    unsafe { LocalRange::foreign(4096, length) }
}
