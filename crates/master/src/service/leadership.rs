//! The right of one of several masters to answer calls.

use std::sync::Arc;

use mooncake_base::{Clock, SystemClock};
use mooncake_election::{Validity, View};

/// The right to answer in one view.
#[derive(Debug)]
pub(crate) struct Leadership {
    /// The number of the view.
    pub(crate) view: View,
    /// Until when it lasts.
    pub(crate) validity: Arc<Validity>,
}

impl Leadership {
    /// Returns whether this master leads at this moment, by the clock of its machine.
    pub(crate) fn is_valid(&self) -> bool {
        self.validity.is_valid(self.view, SystemClock.now())
    }
}
