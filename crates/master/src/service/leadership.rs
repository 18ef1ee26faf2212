//! The right of one of several masters to answer calls.

use std::sync::Arc;

use mooncake_base::{Clock, Error, SystemClock, sync::Mutex};
use mooncake_election::{Validity, View};

use crate::cluster::not_leader;

/// The right to answer in one view.
#[derive(Debug)]
pub(crate) struct Leadership {
    /// The number of the view.
    pub(crate) view: View,
    /// Until when it lasts.
    pub(crate) validity: Arc<Validity>,
    /// Why changes are not confirmed; `None` if they are.
    pub(crate) unconfirmed: Arc<Mutex<Option<Error>>>,
}

impl Leadership {
    /// Returns whether this master leads at this moment, by the clock of its machine.
    pub(crate) fn is_valid(&self) -> bool {
        self.validity.is_valid(self.view, SystemClock.now())
    }

    /// Returns the refusal of calls from the end of the lease on.
    pub(crate) fn refusal(&self) -> Error {
        let error = not_leader(None);
        match self.unconfirmed.lock().clone() {
            Some(cause) => error.caused_by(cause),
            None => error,
        }
    }
}
