//! Metadata stores: where segments are published and found.
//!
//! With `P2PHANDSHAKE` a segment's name is the address of its owner's handshake socket, and nothing
//! is stored anywhere. Otherwise descriptors are stored on a key-value server: upstream's HTTP
//! server, etcd or Redis.

mod etcd;
#[cfg(test)]
pub(crate) mod fuzz;
mod http;
mod keyed;
pub mod p2p;
mod redis;

use std::{fmt, sync::Arc, time::Duration};

use mooncake_base::{Endpoint, Error, ErrorCode, Moment, Result, options::nearest};
use mooncake_kv_client::ErrorTexts;
pub use mooncake_kv_client::redis::RedisLogin;

use crate::{discovery::descriptor::SegmentDescriptor, token::Token};

/// The messages of errors of metadata servers.
static TEXTS: ErrorTexts = ErrorTexts {
    unreachable: "the metadata server cannot be reached; start one, as mooncake_master does with \
        --enable_http_metadata_server, or use P2PHANDSHAKE as the metadata server, which needs none",
    late: "the metadata server did not answer in time",
    broken: "the connection to the metadata server broke",
    refused: "the metadata server refused the request",
    remedy: "Check that the metadata server runs at that address, or use P2PHANDSHAKE, \
             which needs none; mooncake_master --enable_http_metadata_server=true starts one.",
};

/// Publishes our segment and finds those of peers. Calls block, up to their deadline.
pub trait MetadataStore: fmt::Debug + Send + Sync {
    /// Publishes our segment under its name, or updates it. `rpc` is the address of our handshake
    /// socket.
    ///
    /// # Errors
    /// The store cannot be reached, or another live engine holds the name.
    fn publish(&self, own: &SegmentDescriptor, rpc: &Endpoint, deadline: Moment) -> Result<()>;

    /// Returns the current descriptor of a segment.
    ///
    /// # Errors
    /// There is no such segment, or the store or the peer does not answer.
    fn resolve(&self, name: &str, deadline: Moment) -> Result<SegmentDescriptor>;

    /// Returns the handshake address of a segment's owner, for probes and notifications.
    ///
    /// # Errors
    /// Those of [`MetadataStore::resolve`].
    fn locate(&self, name: &str, deadline: Moment) -> Result<Endpoint>;

    /// Removes what was published. Succeeds if nothing was published.
    ///
    /// # Errors
    /// The store cannot be reached; the entry stays there.
    fn withdraw(&self, deadline: Moment) -> Result<()>;
}

/// Settings of a metadata store.
#[derive(Debug, Clone)]
pub struct MetadataSettings {
    /// Timeout for connecting to the server.
    pub connect_timeout: Duration,
    /// Part of every key, so that clusters can share a server; empty for none.
    pub prefix: String,
    /// Login for a Redis server.
    pub redis: RedisLogin,
    /// Token that peers must prove when they are asked for their segment, if any.
    pub token: Option<Token>,
}

impl Default for MetadataSettings {
    fn default() -> Self {
        let connect_timeout = Duration::from_secs(5);
        let redis = RedisLogin::default();
        Self { connect_timeout, prefix: String::new(), redis, token: None }
    }
}

/// Opens the store at an address; connects to nothing yet.
///
/// The address is `P2PHANDSHAKE`, `http://host:port/metadata`, `etcd://host:port` (more members
/// follow after commas or semicolons) or `redis://host:port`. As in upstream, an address without a
/// scheme belongs to etcd.
///
/// # Errors
/// The address names no supported store; the error lists the supported ones.
pub fn open(address: &str, settings: MetadataSettings) -> Result<Arc<dyn MetadataStore>> {
    let address = address.trim();
    if address.eq_ignore_ascii_case(P2P) {
        return Ok(Arc::new(p2p::P2pStore::new(settings.token)));
    }
    if address.is_empty() {
        let text = format!("the address of the metadata server is empty; {KNOWN}");
        return Err(Error::invalid(text));
    }
    // A word without a port may be the name of an etcd host, but hardly one like this.
    if !address.contains([':', '/', '.']) && nearest(&address.to_ascii_uppercase(), [P2P]).is_some()
    {
        let text = format!("the metadata server is misspelled; {KNOWN}");
        return Err(Error::invalid(text)
            .with("metadata_server", address)
            .with("did_you_mean", P2P));
    }
    let (scheme, place) = address.split_once("://").unwrap_or(("etcd", address));
    let prefix = &settings.prefix;
    match scheme {
        "http" => keyed(http::HttpServer::new(address, &settings)?, prefix),
        "etcd" => keyed(etcd::EtcdServer::new(place, &settings)?, prefix),
        "redis" => keyed(redis::RedisServer::new(place, &settings)?, prefix),
        "https" | "etcds" | "rediss" => {
            let text = "metadata servers are reached without TLS only; name a plain address on a \
                        network that you trust, or a tunnel";
            Err(Error::new(ErrorCode::NOT_SUPPORTED, text).with("kind", scheme))
        }
        _ => {
            let text = format!("metadata servers of this kind are not supported; {KNOWN}");
            Err(Error::new(ErrorCode::NOT_SUPPORTED, text).with("kind", scheme))
        }
    }
}

/// The word for no metadata server.
const P2P: &str = "P2PHANDSHAKE";

/// The supported kinds, for error messages.
const KNOWN: &str =
    "use P2PHANDSHAKE, http://host:port/metadata, etcd://host:port or redis://host:port";

fn keyed(
    server: impl keyed::KeyValueServer + 'static,
    prefix: &str,
) -> Result<Arc<dyn MetadataStore>> {
    Ok(Arc::new(keyed::KeyedStore::new(server, prefix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_selects_the_store() {
        for good in [
            "P2PHANDSHAKE",
            "p2phandshake",
            "http://h:8080/metadata",
            "http://[::1]:1/m",
            "h:2379",
            "etcd://a:1,b:2;[::1]:3",
            "etcd://http://a:1",
            "redis://h",
            "redis://u:p@h:1/3",
        ] {
            assert!(open(good, MetadataSettings::default()).is_ok(), "{good}");
        }
    }

    #[test]
    fn rejects_unknown_kinds_and_lists_known_ones() {
        let error = open("foo://x", MetadataSettings::default()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::NOT_SUPPORTED);
        assert!(error.to_string().contains("P2PHANDSHAKE, http://"), "{error}");
        for bad in ["", " ", "http://", "http://:80:80/", "etcd://", "etcd://a:1,,", "redis://a/x"]
        {
            assert!(open(bad, MetadataSettings::default()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn misspelled_word_is_no_etcd_host() {
        for bad in ["P2PHANDSHAK", "p2p_handshake", "P2PHANDSHAKEE"] {
            let error = open(bad, MetadataSettings::default()).unwrap_err();
            assert!(error.to_string().ends_with("did_you_mean=P2PHANDSHAKE"), "{error}");
        }
        for good in ["etcd-1", "localhost", "P2PHANDSHAK:2379"] {
            assert!(open(good, MetadataSettings::default()).is_ok(), "{good}");
        }
    }

    #[test]
    fn rejects_tls_by_name() {
        for bad in ["https://h/metadata", "etcds://h", "rediss://u:secret@h"] {
            let error = open(bad, MetadataSettings::default()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::NOT_SUPPORTED, "{bad}");
            assert!(error.to_string().contains("without TLS"), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn password_is_never_printed() {
        let login = RedisLogin { password: "secret".into(), ..RedisLogin::default() };
        let settings = MetadataSettings { redis: login, ..MetadataSettings::default() };
        assert!(!format!("{settings:?}").contains("secret"));
        let store = open("redis://u:secret@127.0.0.1:1/2", settings).unwrap();
        assert!(!format!("{store:?}").contains("secret"), "{store:?}");
        let deadline = Moment::from_boot(Duration::ZERO);
        let error = store.resolve("a", deadline).unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
