//! Where segments are published and found: the seam, and its kinds.
//!
//! With `P2PHANDSHAKE` a segment's name is the address of its owner's handshake socket and nothing
//! is stored anywhere; otherwise descriptors lie on a server of keys and values: the established
//! HTTP one, etcd or Redis.

mod etcd;
#[cfg(test)]
pub(crate) mod fuzz;
mod http;
mod http_client;
mod keyed;
pub mod p2p;
mod redis;

use std::{fmt, sync::Arc, time::Duration};

use mooncake_base::{Endpoint, Error, ErrorCode, Moment, Result};

use crate::{descriptor::SegmentDescriptor, token::Token};

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
    /// Who we are to a Redis server.
    pub redis: RedisLogin,
    /// What peers that are asked for their segment must know as well, if there is one.
    pub token: Option<Token>,
}

impl Default for MetadataSettings {
    fn default() -> Self {
        let connect_timeout = Duration::from_secs(5);
        let redis = RedisLogin::default();
        Self { connect_timeout, prefix: String::new(), redis, token: None }
    }
}

/// Who we are to a Redis server, and which of its databases is ours. What the address of the
/// server says wins over this.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct RedisLogin {
    /// Empty for the server's default user.
    pub username: String,
    /// Empty for none.
    pub password: String,
    /// The number of the database.
    pub database: u32,
}

impl fmt::Debug for RedisLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = if self.password.is_empty() { "none" } else { "given" };
        f.debug_struct("RedisLogin")
            .field("username", &self.username)
            .field("password", &password)
            .field("database", &self.database)
            .finish()
    }
}

/// Opens the store that the text names; connects to nothing yet.
///
/// `P2PHANDSHAKE`; `http://host:port/metadata`; `etcd://host:port`, with more members after commas
/// or semicolons; `redis://host:port`. An address without a scheme is one of etcd, as it is in the
/// established engine.
///
/// # Errors
/// The text names no store that we know; the error names those that we do.
pub fn open(address: &str, settings: MetadataSettings) -> Result<Arc<dyn MetadataStore>> {
    let address = address.trim();
    if address.eq_ignore_ascii_case("P2PHANDSHAKE") {
        return Ok(Arc::new(p2p::P2pStore::new(settings.token)));
    }
    if address.is_empty() {
        let text = format!("the metadata server is not named; {KNOWN}");
        return Err(Error::invalid(text));
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

/// The kinds, for errors.
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
    fn the_text_decides_which_store_it_is() {
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
    fn unknown_kinds_are_refused_by_an_error_that_names_the_known_ones() {
        let error = open("foo://x", MetadataSettings::default()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::NOT_SUPPORTED);
        assert!(error.to_string().contains("P2PHANDSHAKE, http://"), "{error}");
        for bad in ["", " ", "http://", "http://:80:80/", "etcd://", "etcd://a:1,,", "redis://a/x"]
        {
            assert!(open(bad, MetadataSettings::default()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn tls_is_refused_by_name() {
        for bad in ["https://h/metadata", "etcds://h", "rediss://u:secret@h"] {
            let error = open(bad, MetadataSettings::default()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::NOT_SUPPORTED, "{bad}");
            assert!(error.to_string().contains("without TLS"), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_password_is_never_told() {
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
