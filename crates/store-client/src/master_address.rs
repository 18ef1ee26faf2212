//! The address of a master, in every form in which a caller may write it.

use std::{fmt, str::FromStr};

use mooncake_base::{Endpoint, Error, ErrorCode, Result};
use mooncake_kv_client::redis::{RedisAddress, RedisLogin};

/// Maximum number of addresses in a list.
const ADDRESSES_MAX: usize = 16;

/// Where the master is, or who knows where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MasterAddress {
    /// One master: `host`, `host:port`, `[v6]` or `[v6]:port`.
    Fixed(Endpoint),
    /// The first of these masters that answers: `a:1,b:2`.
    List(Vec<Endpoint>),
    /// The leader that these members of etcd name: `etcd://a;b;c`.
    Etcd(Vec<Endpoint>),
    /// The leader that a Redis server names: `redis://[user[:password]@]host[:port][/database]`.
    Redis(RedisAddress),
    /// The leader that a Lease names: `k8s://[namespace/]lease`.
    Kubernetes {
        /// The namespace of the Lease.
        namespace: String,
        /// The name of the Lease.
        lease: String,
    },
}

impl MasterAddress {
    /// Parses an address. What the address of a Redis server leaves out is taken from `login`.
    ///
    /// # Errors
    /// The text is no address of a known form; the error names the forms.
    pub fn parse(text: &str, login: &RedisLogin) -> Result<Self> {
        let text = text.trim();
        let Some((scheme, place)) = text.split_once("://") else {
            let mut list = endpoints(text, &[','])?;
            return Ok(match list.len() {
                1 => Self::Fixed(list.remove(0)),
                _ => Self::List(list),
            });
        };
        match scheme {
            "etcd" => endpoints(place, &[';', ',']).map(Self::Etcd),
            "redis" => RedisAddress::parse(place, login).map(Self::Redis),
            "k8s" => {
                let (namespace, lease) = place.split_once('/').unwrap_or(("default", place));
                if namespace.is_empty() || lease.is_empty() || lease.contains('/') {
                    let why = "the address of a Lease is k8s://[namespace/]lease";
                    return Err(Error::invalid(why).with("address", text));
                }
                Ok(Self::Kubernetes { namespace: namespace.into(), lease: lease.into() })
            }
            _ => {
                let why =
                    "masters are named by host:port, a list a:1,b:2, etcd://, redis:// or k8s://";
                Err(Error::new(ErrorCode::INVALID_PARAMS, why).with("kind", scheme))
            }
        }
    }

    /// Returns the hosts in the address, which are on the network of the masters.
    pub fn endpoints(&self) -> &[Endpoint] {
        match self {
            Self::Fixed(endpoint) => std::slice::from_ref(endpoint),
            Self::List(list) | Self::Etcd(list) => list,
            Self::Redis(address) => std::slice::from_ref(&address.endpoint),
            Self::Kubernetes { .. } => &[],
        }
    }
}

/// Parses an address, without a login for what the address of a Redis server leaves out.
impl FromStr for MasterAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text, &RedisLogin::default())
    }
}

/// Parses a list of addresses.
fn endpoints(text: &str, separators: &[char]) -> Result<Vec<Endpoint>> {
    let list = text.split(separators).map(|part| part.trim().parse());
    let list = list.collect::<Result<Vec<Endpoint>>>()?;
    if list.len() > ADDRESSES_MAX {
        let why = "at most 16 addresses can be named";
        return Err(Error::invalid(why).with("addresses", list.len()));
    }
    Ok(list)
}

/// The address without a password.
impl fmt::Display for MasterAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joined = |list: &[Endpoint], separator| {
            list.iter().map(ToString::to_string).collect::<Vec<_>>().join(separator)
        };
        match self {
            Self::Fixed(endpoint) => endpoint.fmt(f),
            Self::List(list) => f.write_str(&joined(list, ",")),
            Self::Etcd(list) => write!(f, "etcd://{}", joined(list, ";")),
            Self::Redis(address) => address.fmt(f),
            Self::Kubernetes { namespace, lease } => write!(f, "k8s://{namespace}/{lease}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        let login = RedisLogin { password: "secret".into(), ..RedisLogin::default() };
        match MasterAddress::parse(text, &login) {
            Ok(address) => {
                assert!(!format!("{address:?}{address}").contains("secret"));
                address.to_string()
            }
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn every_form_is_read_and_shown_without_secrets() {
        for (text, shown) in [
            ("10.0.0.1:50051", "10.0.0.1:50051"),
            (" host ", "host"),
            ("[::1]:7", "[::1]:7"),
            ("a:1, b:2", "a:1,b:2"),
            ("etcd://a;b:2379;c", "etcd://a;b:2379;c"),
            ("etcd://a,b", "etcd://a;b"),
            ("redis://user:secret@h:1/2", "redis://h:1/2"),
            ("redis://h", "redis://h:6379/0"),
            ("k8s://lease", "k8s://default/lease"),
            ("k8s://ns/lease", "k8s://ns/lease"),
        ] {
            assert_eq!(parsed(text), shown);
        }
    }

    #[test]
    fn other_forms_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "no host"),
            ("a:1,", "no host"),
            ("a:x", "port"),
            ("etcd://", "no host"),
            ("redis://user:secret@/x", "Redis"),
            ("k8s://a/b/c", "k8s://[namespace/]lease"),
            ("k8s://", "k8s://[namespace/]lease"),
            ("http://a:1", "etcd://"),
            (&["a:1"; 17].join(","), "at most 16"),
        ] {
            let shown = parsed(text);
            assert!(shown.starts_with("error: ") && shown.contains(reason), "{text}: {shown}");
            assert!(!shown.contains("secret"), "{shown}");
        }
    }
}
