//! A call that the master executes in slices. Other calls run between two slices.

use mooncake_base::{ClientId, ErrorCode, TenantId};
use mooncake_master::state::{Listing, PutProgress, Removal, Selector};

use crate::call::{Call, CallMessage, Start, key_prefix};

/// The number of objects on a page of a list.
const PAGE: usize = 8;

/// A call in progress.
#[derive(Debug)]
pub(crate) struct RunningCall {
    pub(crate) message: CallMessage,
    pub(crate) client: ClientId,
    pub(crate) work: Work,
    /// The entries of the history that its slices have made.
    pub(crate) entries: std::ops::Range<usize>,
    /// The log position for which the answer has to wait.
    pub(crate) position: u64,
    pub(crate) slices: u64,
    /// The master has marked the call as running, and keeps its answer.
    pub(crate) is_numbered: bool,
    /// The call holds the permit of a large call.
    pub(crate) is_large: bool,
}

/// What a call keeps between two slices.
#[derive(Debug)]
pub(crate) enum Work {
    /// Nothing: the call takes one slice.
    Once,
    /// The puts that were started so far, and the next one, which may have to wait for memory.
    Start(StartWork),
    /// The results for the puts that were renewed, ended or revoked so far.
    Close(Vec<Result<(), ErrorCode>>),
    Removal(Box<Removal>),
    Listing(Box<Listing>),
    Report(ReportWork),
}

/// A report of records, between two slices.
#[derive(Debug, Default)]
pub(crate) struct ReportWork {
    /// The number of records that were handled.
    pub(crate) handled: usize,
    pub(crate) stale: Vec<usize>,
    /// The next object to look at, once copies are dropped that the owner did not name.
    pub(crate) next: Option<u32>,
}

/// A call that starts puts, between two slices.
#[derive(Debug, Default)]
pub(crate) struct StartWork {
    pub(crate) progress: PutProgress,
    pub(crate) starts: Vec<Start>,
}

impl Work {
    /// Returns the work of a call for a tenant.
    pub(crate) fn of(call: &Call, tenant: &TenantId) -> Self {
        match call {
            Call::PutStart { .. } => Self::Start(StartWork::default()),
            Call::PutRenew { .. } | Call::PutEnd { .. } | Call::PutRevoke { .. } => {
                Self::Close(Vec::new())
            }
            Call::RemoveAll { is_forced, .. } => {
                let removal = Removal::new(tenant.clone(), Selector::All, *is_forced);
                Self::Removal(Box::new(removal))
            }
            Call::RemovePrefix { key, is_forced } => {
                let selector = Selector::Prefix(key_prefix(*key).into());
                Self::Removal(Box::new(Removal::new(tenant.clone(), selector, *is_forced)))
            }
            Call::ReportRecords(_) => Self::Report(ReportWork::default()),
            Call::List { .. } => {
                let listing = Listing::new(tenant.clone(), Selector::All, None, PAGE);
                Self::Listing(Box::new(listing))
            }
            _ => Self::Once,
        }
    }
}
