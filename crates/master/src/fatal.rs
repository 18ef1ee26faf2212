//! The error that ends the service: a panic inside the state, or a log that failed and must not be
//! done without.

use std::sync::OnceLock;

use mooncake_base::{Error, ErrorCode};
use tokio::sync::Notify;

/// The error after which no call is answered any more. Shared by the log and the service.
#[derive(Debug, Default)]
pub(crate) struct FatalError {
    error: OnceLock<Error>,
    raised: Notify,
}

impl FatalError {
    /// Records the first error, and logs it. Later ones follow from it.
    pub(crate) fn raise(&self, error: Error) {
        if self.error.set(error).is_ok() {
            tracing::error!(error = self.get().map(tracing::field::display), "the master ends");
            self.raised.notify_waiters();
        }
    }

    /// Records that nothing is answered any more, without calling it a failure.
    pub(crate) fn end(&self, why: Error) {
        if self.error.set(why).is_ok() {
            self.raised.notify_waiters();
        }
    }

    /// Returns the error, if there was one.
    pub(crate) fn get(&self) -> Option<&Error> {
        self.error.get()
    }

    /// Returns whether there was an error.
    pub(crate) fn is_raised(&self) -> bool {
        self.get().is_some()
    }

    /// Returns the error of a call that is refused. Clients repeat such a call, at the next master.
    pub(crate) fn refusal(&self) -> Option<Error> {
        let cause = self.get()?;
        Some(Error::new(ErrorCode::RPC_FAIL, "the master has ended").caused_by(cause.clone()))
    }

    /// Waits for an error.
    ///
    /// Cancel-safe.
    pub(crate) async fn raised(&self) -> Error {
        loop {
            let mut raised = std::pin::pin!(self.raised.notified());
            raised.as_mut().enable();
            if let Some(error) = self.get() {
                return error.clone();
            }
            raised.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_error_stays_and_wakes_those_that_wait() {
        let fatal = FatalError::default();
        assert!(fatal.refusal().is_none());
        let (error, ()) = tokio::join!(fatal.raised(), async {
            fatal.raise(Error::internal("first"));
            fatal.raise(Error::internal("second"));
        });
        assert!(error.to_string().contains("first"), "{error}");
        assert!(fatal.raised().await.to_string().contains("first"));
        let refusal = fatal.refusal().unwrap();
        assert_eq!(refusal.code(), ErrorCode::RPC_FAIL);
        assert!(refusal.to_string().contains("first"), "{refusal}");
    }
}
