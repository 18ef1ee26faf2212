//! Renews the write windows of puts that take long.

use mooncake_base::{Clock, Moment, Result, SystemClock};
use mooncake_proto::v1;
use std::time::Duration;

use super::upload::{UploadWrite, WriteWindow};
use crate::{
    client::ClientInner,
    rpc::{batch, response},
};

impl ClientInner {
    /// Asks for new write windows if half of one is over. A failure changes nothing: the old windows
    /// last for a while, and later calls ask again. Returns the time afterwards.
    pub(in crate::client) fn renew_windows(
        &self,
        puts: &mut [UploadWrite<'_>],
        now: Moment,
    ) -> Moment {
        if !puts.iter().any(|put| put.upload.is_to_be_renewed(now)) {
            return now;
        }
        let mut due: Vec<&mut UploadWrite<'_>> =
            puts.iter_mut().filter(|put| put.upload.is_to_be_renewed(now)).collect();
        for part in due.chunks_mut(batch::ITEMS_MAX) {
            if let Err(error) = self.renew_part(part) {
                tracing::debug!(puts = part.len(), %error, "cannot renew write windows yet");
            }
        }
        SystemClock.now()
    }

    /// Renews the windows of one message.
    fn renew_part(&self, puts: &mut [&mut UploadWrite<'_>]) -> Result<()> {
        let versions = puts.iter().map(|put| put.upload.version().0).collect();
        let request = v1::PutRenewRequest { caller: self.rpc.caller(), versions };
        let sent = SystemClock.now();
        // The transfer waits meanwhile. A put whose window is over already goes on only if the master
        // still holds it, and may wait for that.
        let ends = puts.iter().map(|put| put.upload.write_until());
        let open = ends.filter(|end| !end.has_passed(sent));
        let deadline = open.chain([self.rpc.deadline()]).min().unwrap_or(sent);
        let answer = self.rpc.call_until(request, deadline)?;
        let window = WriteWindow::granted(sent, Duration::from_millis(answer.write_window_ms));
        let done = response::require_columns(answer.columns)?;
        let done = done.read(puts.len()).map_err(response::column_mismatch)?;
        for (put, renewed) in puts.iter_mut().zip(done) {
            match renewed {
                Ok(()) => put.upload.set_window(window),
                Err(failure) => {
                    let error = response::item_error(failure, put.key);
                    tracing::debug!(key = %put.key, %error, "a write window was not renewed");
                }
            }
        }
        Ok(())
    }
}
