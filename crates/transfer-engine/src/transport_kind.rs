//! The kinds of transports, by which metrics are counted and callers name a transport.

use std::fmt;

/// The kind of a transport; metrics are counted per kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum TransportKind {
    /// Within one engine's process.
    #[default]
    Memory,
    /// Between processes of one host.
    Shm,
    /// Over the network.
    Tcp,
    /// One-sided verbs.
    Rdma,
}

impl TransportKind {
    /// Returns the kind with this name, in any case, as transport hints spell it.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Memory, Self::Shm, Self::Tcp, Self::Rdma];
        all.into_iter().find(|kind| name.trim().eq_ignore_ascii_case(kind.name()))
    }

    /// Returns the name that metrics and messages show.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
