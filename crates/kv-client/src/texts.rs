//! The words of errors, which say for what purpose a server is asked.

use mooncake_base::{Error, ErrorCode};

/// The messages of the errors of one kind of server, such as a metadata server.
#[derive(Debug, PartialEq, Eq)]
pub struct ErrorTexts {
    /// The server cannot be reached.
    pub unreachable: &'static str,
    /// The server did not answer before the deadline.
    pub late: &'static str,
    /// The connection broke during an exchange.
    pub broken: &'static str,
    /// The server refused the request.
    pub refused: &'static str,
    /// What the reader can do; empty for the remedy of the error code.
    pub remedy: &'static str,
}

impl ErrorTexts {
    /// Adds the remedy, if there is one.
    pub(crate) fn with_remedy(&self, error: Error) -> Error {
        if self.remedy.is_empty() { error } else { error.with_remedy(self.remedy) }
    }

    pub(crate) fn late(&self) -> Error {
        Error::new(ErrorCode::RPC_TIMEOUT, self.late)
    }
}

/// Neutral messages, for tests of this crate.
#[cfg(test)]
pub(crate) static TEST_TEXTS: ErrorTexts = ErrorTexts {
    unreachable: "the server cannot be reached",
    late: "the server did not answer in time",
    broken: "the connection to the server broke",
    refused: "the server refused",
    remedy: "",
};
