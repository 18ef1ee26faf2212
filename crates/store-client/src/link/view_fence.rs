//! The highest view whose answers a client has seen: later answers of an earlier view are not taken.

use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_proto::v1;

/// Shared by all links of a client to the masters of one cluster.
#[derive(Debug, Default)]
pub(super) struct ViewFence(AtomicU64);

impl ViewFence {
    /// Takes the view of an answer; a single master has none.
    ///
    /// # Errors
    /// A later view has begun.
    pub(super) fn check(&self, response: &v1::Response) -> Result<()> {
        if response.view == 0 {
            return Ok(());
        }
        let seen = self.0.fetch_max(response.view, Ordering::Relaxed);
        if response.view >= seen {
            return Ok(());
        }
        let text = "a master that does not lead any more has answered";
        Err(Error::new(ErrorCode::RPC_FAIL, text).with("view", response.view).with("present", seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_earlier_views_are_not_taken() {
        let fence = ViewFence::default();
        for (view, is_taken) in [(0, true), (3, true), (3, true), (2, false), (4, true), (0, true)]
        {
            let response = v1::Response { view, ..v1::Response::default() };
            assert_eq!(fence.check(&response).is_ok(), is_taken, "{view}");
        }
    }
}
