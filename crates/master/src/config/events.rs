//! The settings of object events.

use mooncake_base::{Error, Result};

/// The endpoint, the names and the optional fields of published events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventsConfig {
    /// Whether events are published.
    pub is_on: bool,
    /// `tcp://HOST:PORT`; `*` for any host or any free port.
    pub endpoint: String,
    /// The name of the owner of the objects, in every event.
    pub backend_id: String,
    /// Whether events name their object. If not, only `cleared` events are published.
    pub has_object_key: bool,
    /// Adds the older names of fields.
    pub has_legacy: bool,
    /// The maximum number of queued events; 0: about 16 million.
    pub capacity: usize,
    /// Copied into every event, like the following fields; empty or 0 is sent as nil.
    pub model_name: String,
    /// The salt of key hashes.
    pub additional_salt: String,
    /// The name of the LoRA adapter.
    pub lora_name: String,
    /// The number of tokens per block.
    pub block_size: u32,
    /// The data-parallel rank.
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
    /// Events are enabled without an endpoint or a backend id.
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
