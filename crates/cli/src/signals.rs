//! The signals that terminate a program.

use mooncake_base::{Error, Result};
use tokio::{
    runtime::Handle,
    signal::unix::{Signal, SignalKind, signal},
};

/// A handler of SIGTERM and SIGINT. It is installed before the program announces its ports, so that
/// no signal arrives without a handler.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Installs the handler.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(runtime: &Handle) -> Result<Self> {
        let _inside = runtime.enter();
        let on = |kind| {
            signal(kind).map_err(|source| {
                Error::internal("the signal handler cannot be installed").caused_by(source)
            })
        };
        Ok(Self {
            terminate: on(SignalKind::terminate())?,
            interrupt: on(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal and returns its name. Cancel-safe.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
