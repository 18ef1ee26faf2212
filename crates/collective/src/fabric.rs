//! What this crate needs of a transfer engine, to read memory of ranks on other hosts.

use std::{fmt, time::Duration};

use mooncake_base::Result;

/// A way to read memory of other hosts without their processors, such as RDMA devices.
pub trait Fabric: fmt::Debug + Send + Sync {
    /// Returns the name by which other ranks read registered memory of this process.
    fn segment(&self) -> &str;

    /// Lets other ranks read memory of this process. It stays mapped until it is unregistered.
    ///
    /// # Errors
    /// The devices refuse the memory.
    fn register(&self, address: u64, length: u64) -> Result<()>;

    /// Ends what `register` began. Reads in progress fail.
    fn unregister(&self, address: u64);

    /// Reads bytes of another process into memory of this one: an address and a length.
    ///
    /// # Errors
    /// The segment is not reachable, the memory is not registered, or the time is up.
    fn read(&self, segment: &str, address: u64, target: (u64, u64), limit: Duration) -> Result<()>;
}
