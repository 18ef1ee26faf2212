//! The log lines about peers that connect as standbys and are refused, or whose connections end.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use mooncake_base::{Error, Moment, sync::Mutex};

/// The shortest time between two lines about one host and one kind of error.
const PAUSE: Duration = Duration::from_secs(60);

/// Maximum number of hosts and kinds of errors that are told apart at a time. Others are not logged.
const LINES_MAX: usize = 256;

/// A host, and the number of an error code.
type Line = (IpAddr, i32);

/// Lets one line for each host and kind of error through a minute, and counts those in between: a standby
/// that is refused comes back at once.
#[derive(Debug, Default)]
pub(super) struct PeerLog {
    /// When each line was written last, and how many were left out since.
    lines: Mutex<HashMap<Line, (Moment, u64)>>,
}

impl PeerLog {
    /// Records an event. Returns how many of its kind there were since the last line, if it is to be
    /// logged.
    pub(super) fn record(&self, now: Moment, host: IpAddr, error: &Error) -> Option<u64> {
        let mut lines = self.lines.lock();
        let line = (host, error.code().number());
        if let Some((last, left_out)) = lines.get_mut(&line) {
            *left_out += 1;
            if now.since(*last) < PAUSE {
                return None;
            }
            *last = now;
            return Some(std::mem::take(left_out));
        }
        if lines.len() >= LINES_MAX {
            lines.retain(|_, (last, _)| now.since(*last) < PAUSE);
        }
        if lines.len() >= LINES_MAX {
            return None;
        }
        lines.insert(line, (now, 0));
        Some(1)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use mooncake_base::ErrorCode;

    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_boot(Duration::from_secs(seconds))
    }

    fn host(number: u32) -> IpAddr {
        Ipv4Addr::from(number).into()
    }

    #[test]
    fn each_host_has_one_line_a_minute_for_each_error() {
        let log = PeerLog::default();
        let refused = Error::new(ErrorCode::ILLEGAL_CLIENT, "another token");
        let broken = Error::new(ErrorCode::RPC_FAIL, "it broke");
        assert_eq!(log.record(at(100), host(1), &refused), Some(1));
        assert_eq!(log.record(at(101), host(1), &refused), None);
        assert_eq!(log.record(at(101), host(1), &broken), Some(1));
        assert_eq!(log.record(at(102), host(2), &refused), Some(1));
        assert_eq!(log.record(at(160), host(1), &refused), Some(2));
        assert_eq!(log.record(at(161), host(1), &refused), None);
    }

    #[test]
    fn number_of_hosts_is_bounded() {
        let log = PeerLog::default();
        let error = Error::new(ErrorCode::RPC_FAIL, "it broke");
        let hosts = 0..2 * u32::try_from(LINES_MAX).unwrap();
        let logged = hosts.filter(|number| log.record(at(1), host(*number), &error).is_some());
        assert_eq!(logged.count(), LINES_MAX);
        assert_eq!(log.record(at(61), host(9999), &error), Some(1), "the others are forgotten");
        assert_eq!(log.lines.lock().len(), 1);
    }
}
