//! Access control of changes through the admin port: peers on this host and holders of the token.

use std::net::IpAddr;

use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::Next,
    response::Response,
};
use mooncake_base::{Error, ErrorCode};
use mooncake_http::Peer;

use super::{AdminContext, failure};
use crate::config::Secret;

/// Headers added by proxies. Behind a proxy, the peer address is not the client's.
const FORWARDED: [&str; 3] = ["forwarded", "x-forwarded-for", "x-real-ip"];

/// The middleware that passes or refuses a request that changes something.
pub(super) async fn guard(
    State(admin): AdminContext,
    ConnectInfo(Peer(peer)): ConnectInfo<Peer>,
    request: Request,
    next: Next,
) -> Response {
    match check(&admin.settings.token, peer.ip(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => failure(StatusCode::FORBIDDEN, &error),
    }
}

/// # Errors
/// `ILLEGAL_CLIENT`: the peer is not on this host and has no valid token.
fn check(token: &Secret, peer: IpAddr, headers: &HeaderMap) -> Result<(), Error> {
    let refuse = |why: &str| Err(Error::new(ErrorCode::ILLEGAL_CLIENT, why));
    if let Some(shown) = headers.get(header::AUTHORIZATION) {
        let shown = shown.as_bytes().strip_prefix(b"Bearer ").unwrap_or_default();
        return match token.is(shown) {
            true => Ok(()),
            false => refuse("the token is not the admin token"),
        };
    }
    if !peer.to_canonical().is_loopback() {
        return refuse("changes need the admin token, except from this host");
    }
    if FORWARDED.iter().any(|name| headers.contains_key(*name)) {
        return refuse("a forwarded request needs the admin token");
    }
    // A cross-site page in a browser on this host names its site as the origin. A page that uses
    // DNS rebinding names its own domain as the host.
    let own = |name| headers.get(name).is_none_or(|value| is_this_host(value.as_bytes()));
    if own(header::ORIGIN) && own(header::HOST) {
        return Ok(());
    }
    refuse("a cross-site request needs the admin token")
}

/// Returns whether the value of an `Origin` or `Host` header names the loopback.
fn is_this_host(value: &[u8]) -> bool {
    let value = value.strip_prefix(b"http://").unwrap_or(value);
    let host = match value.strip_prefix(b"[") {
        Some(rest) => rest.split(|byte| *byte == b']').next(),
        None => value.split(|byte| *byte == b':').next(),
    };
    let host = str::from_utf8(host.unwrap_or_default()).unwrap_or_default();
    host.eq_ignore_ascii_case("localhost")
        || host.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: &str = "127.0.0.1";
    const REMOTE: &str = "192.0.2.7";

    fn is_allowed(token: &str, peer: &str, headers: &[(&'static str, &str)]) -> bool {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        check(&Secret::new(token), peer.parse().unwrap(), &map).is_ok()
    }

    #[test]
    fn local_peers_need_no_token() {
        for peer in [LOCAL, "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert!(is_allowed("", peer, &[("host", "localhost:9003")]), "{peer}");
            assert!(is_allowed("secret", peer, &[]), "{peer}");
        }
        assert!(is_allowed("", LOCAL, &[("host", "[::1]:9003"), ("origin", "http://[::1]:9003")]));
    }

    #[test]
    fn remote_peers_need_exact_token() {
        assert!(!is_allowed("", REMOTE, &[]));
        assert!(!is_allowed("secret", REMOTE, &[]));
        assert!(is_allowed("secret", REMOTE, &[("authorization", "Bearer secret")]));
        for shown in ["Bearer secre", "Bearer secrets", "Bearer ", "secret", "Basic secret"] {
            assert!(!is_allowed("secret", REMOTE, &[("authorization", shown)]), "{shown}");
        }
        assert!(!is_allowed("", REMOTE, &[("authorization", "Bearer ")]), "no token is no key");
    }

    #[test]
    fn forwarded_and_cross_site_requests_need_token() {
        assert!(!is_allowed("secret", LOCAL, &[("x-forwarded-for", REMOTE)]));
        assert!(!is_allowed("", LOCAL, &[("origin", "https://evil.example")]));
        assert!(!is_allowed("", LOCAL, &[("origin", "null")]));
        assert!(
            !is_allowed("", LOCAL, &[("host", "evil.example:9003")]),
            "a name that was led here"
        );
        assert!(!is_allowed("", LOCAL, &[("host", "127.0.0.1.evil.example")]));
        assert!(is_allowed("t", LOCAL, &[("x-real-ip", REMOTE), ("authorization", "Bearer t")]));
    }
}
