//! What a network device moves, as its transport measures it and metrics show it.

/// The use of a device at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Name of the device.
    pub name: String,
    /// The link is up.
    pub is_active: bool,
    /// Bytes read from peers.
    pub bytes_read: u64,
    /// Bytes written to peers.
    pub bytes_written: u64,
    /// Slices that were moved.
    pub slices: u64,
    /// Slices that failed on this device, by reason. A slice that fails is tried again.
    pub errors: Vec<(&'static str, u64)>,
    /// Times that the device was given up, because its link went down or it failed.
    pub link_failures: u64,
    /// Requests in flight.
    pub in_flight: u32,
    /// Maximum number of requests in flight.
    pub in_flight_max: u32,
    /// Connected queue pairs.
    pub queue_pairs: usize,
}
