//! Where segments are published and found: the seam, and its two kinds.
//!
//! With `P2PHANDSHAKE` a segment's name is the address of its owner's handshake socket and nothing
//! is stored anywhere; with `http://…` descriptors lie on a small key-value server.

pub mod http;
pub mod p2p;

use std::{fmt, sync::Arc, time::Duration};

use mooncake_base::{Endpoint, Error, ErrorCode, Moment, Result};

use crate::descriptor::SegmentDescriptor;

/// A place to publish our segment and to find those of peers. Calls block, up to their deadline.
pub trait MetadataStore: fmt::Debug + Send + Sync {
    /// Makes our segment known under its name, or renews what is known of it. `rpc` is where our
    /// handshake socket is reached.
    ///
    /// # Errors
    /// The store cannot be reached, or another live engine holds the name.
    fn publish(&self, own: &SegmentDescriptor, rpc: &Endpoint, deadline: Moment) -> Result<()>;

    /// The descriptor of a segment, fresh.
    ///
    /// # Errors
    /// No such segment, or the store or the peer does not answer.
    fn resolve(&self, name: &str, deadline: Moment) -> Result<SegmentDescriptor>;

    /// Where the segment's owner has its handshake socket (for probes and notifications).
    ///
    /// # Errors
    /// As [`MetadataStore::resolve`].
    fn locate(&self, name: &str, deadline: Moment) -> Result<Endpoint>;

    /// Takes back what was published. Nothing published is no error.
    ///
    /// # Errors
    /// The store cannot be reached; the entry stays there.
    fn withdraw(&self, deadline: Moment) -> Result<()>;
}

/// How a store behaves.
#[derive(Debug, Clone)]
pub struct MetadataSettings {
    /// How long connecting to the server may take.
    pub connect_timeout: Duration,
    /// Part of every key, so that clusters can share a server; empty for none.
    pub prefix: String,
}

impl Default for MetadataSettings {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(5), prefix: String::new() }
    }
}

/// Opens the store that the text names; connects to nothing yet.
///
/// # Errors
/// The text names no store that we know; the error names those that we do.
pub fn open(address: &str, settings: MetadataSettings) -> Result<Arc<dyn MetadataStore>> {
    let address = address.trim();
    if address.eq_ignore_ascii_case("P2PHANDSHAKE") {
        return Ok(Arc::new(p2p::P2pStore::default()));
    }
    if address.starts_with("http://") {
        return Ok(Arc::new(http::HttpStore::new(address, settings)?));
    }
    let known = "use P2PHANDSHAKE or http://host:port/metadata";
    if address.is_empty() {
        return Err(Error::invalid(format!("the metadata server is not named; {known}")));
    }
    let scheme = address.split_once("://").map_or("etcd", |(scheme, _)| scheme);
    let text = format!("metadata servers of this kind are not supported; {known}");
    Err(Error::new(ErrorCode::NOT_SUPPORTED, text).with("kind", scheme).with("address", address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_decides_which_store_it_is() {
        for good in ["P2PHANDSHAKE", "p2phandshake", "http://h:8080/metadata", "http://[::1]:1/m"] {
            assert!(open(good, MetadataSettings::default()).is_ok(), "{good}");
        }
    }

    #[test]
    fn unknown_kinds_are_refused_by_an_error_that_names_the_known_ones() {
        for bad in ["foo://x", "etcd://h:1", "redis://h:1", "h:2379", "https://h/metadata"] {
            let error = open(bad, MetadataSettings::default()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::NOT_SUPPORTED, "{bad}");
            assert!(error.to_string().contains("P2PHANDSHAKE or http://"), "{error}");
        }
        for bad in ["", " ", "http://", "http://:80:80/"] {
            assert!(open(bad, MetadataSettings::default()).is_err(), "{bad:?}");
        }
    }
}
