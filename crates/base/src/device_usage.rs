//! What a network device moves, as its transport measures it and metrics show it.

use crate::counters;

counters! {
    /// Counts what a device moves.
    pub struct DeviceCounters;
    /// The use of a device at one moment.
    pub struct DeviceUsage {
        /// Name of the device.
        pub name: String,
        /// The link is up.
        pub is_active: bool,
        /// Slices that failed on this device, by reason. A slice that fails is tried again.
        pub errors: Vec<(&'static str, u64)>,
        /// Requests in flight.
        pub in_flight: u32,
        /// Maximum number of requests in flight.
        pub in_flight_max: u32,
        /// Connected queue pairs.
        pub queue_pairs: usize,
    }
    METRICS {
        /// Bytes read from peers.
        bytes_read,
        /// Bytes written to peers.
        bytes_written,
        /// Slices that were moved.
        slices,
        /// Times that the device was given up, because its link went down or it failed.
        link_failures,
    }
}
