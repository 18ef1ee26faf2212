//! The settings of the events of objects.

use mooncake_base::{Error, Result};

/// What is published, where, and under which names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventsConfig {
    /// Whether events are published at all.
    pub is_on: bool,
    /// `tcp://HOST:PORT`; `*` for any host or any free port.
    pub endpoint: String,
    /// Whose objects these are, in every event.
    pub backend_id: String,
    /// Whether events name their object; without, only `cleared` is published.
    pub has_object_key: bool,
    /// Adds the older names of fields.
    pub has_legacy: bool,
    /// Events that may wait; 0: about 16 million.
    pub capacity: usize,
    /// Copied into every event, as the next ones are; empty or 0: nil.
    pub model_name: String,
    /// A salt of the hashes of keys.
    pub additional_salt: String,
    /// The adapter.
    pub lora_name: String,
    /// Tokens of a block.
    pub block_size: u32,
    /// A rank.
    pub dp_rank: u32,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            is_on: false,
            endpoint: String::new(),
            backend_id: String::new(),
            has_object_key: true,
            has_legacy: true,
            capacity: 65_536,
            model_name: String::new(),
            additional_salt: String::new(),
            lora_name: String::new(),
            block_size: 0,
            dp_rank: 0,
        }
    }
}

impl EventsConfig {
    /// # Errors
    /// Events are switched on without an endpoint or a name.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_on && (self.endpoint.is_empty() || self.backend_id.is_empty()) {
            return Err(Error::invalid(
                "events need --kv_events_bind_endpoint and --kv_events_backend_id",
            )
            .with("option", "enable_kv_events"));
        }
        Ok(())
    }
}
