//! The signals that ask a program to end.

use mooncake_base::{Error, Result};
use tokio::{
    runtime::Handle,
    signal::unix::{Signal, SignalKind, signal},
};

/// Waits for SIGTERM and SIGINT from the moment it is made: before anything is announced, so that
/// no signal finds the program without a handler.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes the two signals over.
    ///
    /// # Errors
    /// The system refuses.
    pub fn new(runtime: &Handle) -> Result<Self> {
        let _inside = runtime.enter();
        let on = |kind| {
            signal(kind)
                .map_err(|source| Error::internal("signals cannot be waited for").caused_by(source))
        };
        Ok(Self {
            terminate: on(SignalKind::terminate())?,
            interrupt: on(SignalKind::interrupt())?,
        })
    }

    /// The name of the next one. Safe to cancel.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
