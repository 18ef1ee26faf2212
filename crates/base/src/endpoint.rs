//! The address of a listener: a host and an optional port, IPv6 with or without brackets.

use std::{fmt, str::FromStr};

use crate::{Error, Result};

/// A host (name or address, without brackets) and an optional port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// A name or an address, never in brackets.
    pub host: String,
    /// The port, if one was given.
    pub port: Option<u16>,
}

impl Endpoint {
    /// Creates an endpoint with a port.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port: Some(port) }
    }

    /// Sets the port unless the endpoint has one.
    #[must_use]
    pub fn or_port(self, port: u16) -> Self {
        Self { port: self.port.or(Some(port)), ..self }
    }

    /// Returns the pair that `std::net::ToSocketAddrs` takes; port 0 if none is set.
    pub fn to_pair(&self) -> (&str, u16) {
        (&self.host, self.port.unwrap_or(0))
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    /// Parses `host`, `host:port`, `[v6]`, `[v6]:port` and a bare IPv6 address.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Err(Error::invalid(why).with("address", text));
        let text = text.trim();
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let Some((host, rest)) = rest.split_once(']') else {
                return bad("the bracket of the address is not closed");
            };
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return bad("only a port may follow the bracket"),
            }
        } else if text.parse::<std::net::Ipv6Addr>().is_ok() {
            (text, None)
        } else {
            match text.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => {
                    return bad("an IPv6 address with a port needs brackets");
                }
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c == '/') {
            return bad("the address has no host");
        }
        let port = match port.map(str::parse::<u16>) {
            Some(Err(_)) => return bad("the port is not a number from 0 to 65535"),
            Some(Ok(port)) => Some(port),
            None => None,
        };
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?;
        } else {
            f.write_str(&self.host)?;
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_are_optional_where_unambiguous() {
        let check = |text: &str, host: &str, port: Option<u16>, printed: &str| {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!((endpoint.host.as_str(), endpoint.port), (host, port), "{text}");
            assert_eq!(endpoint.to_string(), printed);
        };
        check("localhost", "localhost", None, "localhost");
        check("10.0.0.1:7", "10.0.0.1", Some(7), "10.0.0.1:7");
        check("::1", "::1", None, "[::1]");
        check("[::1]", "::1", None, "[::1]");
        check("[fe80::1]:65535", "fe80::1", Some(65535), "[fe80::1]:65535");
    }

    #[test]
    fn rejects_malformed_addresses() {
        for text in ["", ":1", "a:b", "a:65536", "[::1", "[::1]x", "1:2:3:x", "a b:1", "http://x"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text:?}");
        }
    }
}
