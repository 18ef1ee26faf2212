//! Limits of the connections of dummy clients.

use std::time::Duration;

/// Limits of connections of dummy clients.
#[derive(Debug, Clone, Copy)]
pub struct RelayLimits {
    /// Maximum number of connections. A dummy client opens up to 17. Above it, the oldest connection
    /// that has not made a call gives way.
    pub connections_max: usize,
    /// Time limit for the peer's greeting.
    pub greeting_timeout: Duration,
    /// Time limit for each frame, from its first byte to its last, in both directions.
    pub frame_timeout: Duration,
    /// Time after which a dummy client without connections is forgotten while its process lives. A
    /// client that is in use has a connection all the time, for its heartbeats.
    pub unconnected_max: Duration,
    /// Serves only processes of this user and of root, over the Unix socket. Over TCP the greeting
    /// names that socket, and calls are refused.
    pub own_user_only: bool,
}

impl Default for RelayLimits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            greeting_timeout: Duration::from_secs(10),
            frame_timeout: Duration::from_secs(30),
            unconnected_max: Duration::from_secs(30),
            own_user_only: false,
        }
    }
}
