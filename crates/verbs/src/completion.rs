//! The outcome of a request, in numbers and in words.

use std::fmt;

use rdma_sys::{ibv_wc, ibv_wc_status};

/// The outcome of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Caller-chosen id of the request.
    pub request: u64,
    /// Success, or the reason of the failure.
    pub status: Status,
    /// Vendor-specific error code.
    pub vendor_error: u32,
    /// Bytes received; undefined after a failure.
    pub length: u32,
    /// Number of the queue pair of the request.
    pub queue_pair: u32,
}

/// Success, or why a request failed. Every failure but [`Status::ReceiverNotReady`] with retries left
/// ends the connection: later requests of the queue pair are flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// The peer has the bytes, or they have arrived.
    Success,
    /// The queue pair had failed before; the request was not tried, or only in part.
    Flushed,
    /// The peer did not answer: its process or host is gone, the link is down, or the routes or packet
    /// sizes of the two ends do not fit.
    NoAnswer,
    /// The peer has no receive posted.
    ReceiverNotReady,
    /// The peer refused the key, the range or the kind of access.
    RemoteAccess,
    /// The peer found the request malformed, or longer than its limit.
    RemoteInvalidRequest,
    /// The peer's queue pair failed while it served the request.
    RemoteOperation,
    /// The local range is not registered, or not with the access that the request needs.
    LocalProtection,
    /// The request is longer than the device allows.
    LocalLength,
    /// The device or the driver failed inside.
    LocalFailure,
    /// Another number of ibverbs.
    Other(u32),
}

impl Completion {
    pub(crate) fn from_entry(entry: &ibv_wc) -> Self {
        Self {
            request: entry.wr_id,
            status: Status::from_code(entry.status),
            vendor_error: entry.vendor_err,
            length: entry.byte_len,
            queue_pair: entry.qp_num,
        }
    }

    /// Returns whether the request succeeded.
    pub fn is_done(&self) -> bool {
        self.status == Status::Success
    }
}

impl Status {
    fn from_code(code: ibv_wc_status::Type) -> Self {
        match code {
            ibv_wc_status::IBV_WC_SUCCESS => Self::Success,
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            ibv_wc_status::IBV_WC_RETRY_EXC_ERR | ibv_wc_status::IBV_WC_RESP_TIMEOUT_ERR => {
                Self::NoAnswer
            }
            ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => Self::ReceiverNotReady,
            ibv_wc_status::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            ibv_wc_status::IBV_WC_REM_INV_REQ_ERR => Self::RemoteInvalidRequest,
            ibv_wc_status::IBV_WC_REM_OP_ERR | ibv_wc_status::IBV_WC_REM_ABORT_ERR => {
                Self::RemoteOperation
            }
            ibv_wc_status::IBV_WC_LOC_PROT_ERR | ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => {
                Self::LocalProtection
            }
            ibv_wc_status::IBV_WC_LOC_LEN_ERR => Self::LocalLength,
            ibv_wc_status::IBV_WC_LOC_QP_OP_ERR
            | ibv_wc_status::IBV_WC_FATAL_ERR
            | ibv_wc_status::IBV_WC_GENERAL_ERR => Self::LocalFailure,
            other => Self::Other(other),
        }
    }

    /// Returns whether the request itself was wrong, so that another path would refuse it, too.
    pub fn is_invalid_request(self) -> bool {
        matches!(
            self,
            Self::RemoteAccess
                | Self::RemoteInvalidRequest
                | Self::LocalProtection
                | Self::LocalLength
        )
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::Flushed => "not tried, since the connection had failed before",
            Self::NoAnswer => {
                "the peer does not answer: it is gone, the link is down, or MTU or GID differ"
            }
            Self::ReceiverNotReady => "the peer has posted no receive",
            Self::RemoteAccess => {
                "the peer refused the key or the range: it is not registered any more"
            }
            Self::RemoteInvalidRequest => "the peer found the request invalid",
            Self::RemoteOperation => "the peer's queue pair failed",
            Self::LocalProtection => "the local range is not registered for this access",
            Self::LocalLength => "the request is longer than the device allows",
            Self::LocalFailure => "the device or its driver failed",
            Self::Other(code) => return write!(f, "ibv_wc_status={code}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_ranges_are_no_fault_of_the_path() {
        assert!(Status::from_code(ibv_wc_status::IBV_WC_REM_ACCESS_ERR).is_invalid_request());
        assert!(Status::from_code(ibv_wc_status::IBV_WC_LOC_PROT_ERR).is_invalid_request());
        assert!(!Status::from_code(ibv_wc_status::IBV_WC_RETRY_EXC_ERR).is_invalid_request());
        assert!(!Status::from_code(ibv_wc_status::IBV_WC_WR_FLUSH_ERR).is_invalid_request());
    }

    #[test]
    fn operators_page_lists_every_failure() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        // Absent where the crate was packaged.
        let Ok(page) = std::fs::read_to_string(folder.join("../../docs/guide/rdma.md")) else {
            return;
        };
        for code in ibv_wc_status::IBV_WC_LOC_LEN_ERR..=ibv_wc_status::IBV_WC_GENERAL_ERR {
            let text = match Status::from_code(code) {
                Status::Other(_) => "ibv_wc_status=N".to_owned(),
                status => status.to_string(),
            };
            let beginning = text.split(':').next().unwrap();
            assert!(page.contains(&format!("| `{beginning}` | ")), "{beginning}");
        }
    }

    #[test]
    fn unknown_status_shows_its_number() {
        assert_eq!(Status::from_code(77).to_string(), "ibv_wc_status=77");
    }
}
