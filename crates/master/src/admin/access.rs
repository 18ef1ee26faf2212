//! Access control of the admin port. Changes need a peer on this host or a token; in a pool with a
//! token for its RPC port, changes and the names of keys need a token from everybody.

use std::{net::IpAddr, sync::Arc};

use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::Next,
    response::Response,
};
use mooncake_base::{Error, ErrorCode, token::Token};
use mooncake_http::Peer;

use super::{AdminContext, failure};
use crate::config::{MasterConfig, Secret};

/// Headers added by proxies. Behind a proxy, the peer address is not the client's.
const FORWARDED: [&str; 3] = ["forwarded", "x-forwarded-for", "x-real-ip"];

/// The secrets that requests may carry as `Authorization: Bearer SECRET`.
#[derive(Debug, Clone)]
pub(crate) struct Secrets {
    /// The admin token, which may be empty.
    pub(crate) admin: Secret,
    /// The token of the RPC port. Its holders can read and change objects there.
    pub(crate) rpc: Option<Token>,
}

impl Secrets {
    /// Returns the secrets of a master.
    pub(crate) fn of(config: &MasterConfig) -> Self {
        Self { admin: config.admin_token.clone(), rpc: config.rpc_token.clone() }
    }

    /// Returns whether the request carries one of the secrets; `None` if it carries none at all.
    fn are_shown(&self, headers: &HeaderMap) -> Option<bool> {
        let shown = headers.get(header::AUTHORIZATION)?.as_bytes();
        let shown = shown.strip_prefix(b"Bearer ").unwrap_or_default();
        Some(self.admin.is(shown) || self.rpc.as_ref().is_some_and(|token| token.is(shown)))
    }

    /// Returns whether the request may see the keys of objects: everybody may, unless the RPC port
    /// has a token.
    pub(super) fn may_see_keys(&self, headers: &HeaderMap) -> bool {
        self.rpc.is_none() || self.are_shown(headers) == Some(true)
    }
}

/// The middleware that refuses requests that may not see the keys of objects.
pub(super) async fn guard_keys(
    State(admin): AdminContext,
    request: Request,
    next: Next,
) -> Response {
    if admin.settings.secrets.may_see_keys(request.headers()) {
        return next.run(request).await;
    }
    let why = "this pool shows keys and objects only to holders of its token: send the master token \
               or the admin token as Authorization: Bearer TOKEN";
    failure(StatusCode::FORBIDDEN, &Error::new(ErrorCode::ILLEGAL_CLIENT, why))
}

/// The middleware that passes or refuses a request that changes something.
pub(super) async fn guard(
    State(admin): AdminContext,
    peer: ConnectInfo<Peer>,
    request: Request,
    next: Next,
) -> Response {
    guard_with(State(admin.settings.secrets.clone()), peer, request, next).await
}

/// The same, without a service.
pub(super) async fn guard_with(
    State(secrets): State<Secrets>,
    ConnectInfo(Peer(peer)): ConnectInfo<Peer>,
    request: Request,
    next: Next,
) -> Response {
    match check(&secrets, peer.ip(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => failure(StatusCode::FORBIDDEN, &error),
    }
}

/// The middleware that refuses browsers that were led here under a foreign name: a page of that name
/// could read the keys (DNS rebinding).
pub(super) async fn check_host(
    State(hosts): State<Arc<[String]>>,
    request: Request,
    next: Next,
) -> Response {
    if is_known_host(&hosts, &mooncake_os::process::host_name(), request.headers()) {
        return next.run(request).await;
    }
    let why = "browsers reach this port by address, as localhost or under a name of --admin_hosts";
    failure(StatusCode::FORBIDDEN, &Error::new(ErrorCode::ILLEGAL_CLIENT, why))
}

/// Returns whether the `Host` of a browser is an address, this host or a known name. Other programs
/// do not run pages of strangers.
fn is_known_host(known: &[String], own: &str, headers: &HeaderMap) -> bool {
    let agent = headers.get(header::USER_AGENT).map_or(&b""[..], |value| value.as_bytes());
    if !agent.starts_with(b"Mozilla/") {
        return true;
    }
    let Some(host) = headers.get(header::HOST) else { return true };
    let host = host_of(host.as_bytes());
    let short = own.split('.').next().unwrap_or_default();
    let is_own =
        [own, short].iter().any(|name| !name.is_empty() && host.eq_ignore_ascii_case(name));
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok()
        || is_own
        || known.iter().any(|name| host.eq_ignore_ascii_case(name))
}

/// # Errors
/// `ILLEGAL_CLIENT`: the request has no valid token, and the peer is not on this host or the RPC port
/// has a token.
fn check(secrets: &Secrets, peer: IpAddr, headers: &HeaderMap) -> Result<(), Error> {
    let refuse = |why: &str| Err(Error::new(ErrorCode::ILLEGAL_CLIENT, why));
    match secrets.are_shown(headers) {
        Some(true) => return Ok(()),
        Some(false) => return refuse("the token is not the admin token"),
        None => {}
    }
    if secrets.rpc.is_some() {
        return refuse("changes in a pool with a token need the admin token or the master token");
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
    let host = host_of(value.strip_prefix(b"http://").unwrap_or(value));
    host.eq_ignore_ascii_case("localhost")
        || host.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_loopback())
}

/// Returns the host of a `Host` header, without its port and brackets.
fn host_of(value: &[u8]) -> &str {
    let host = match value.strip_prefix(b"[") {
        Some(rest) => rest.split(|byte| *byte == b']').next(),
        None => value.split(|byte| *byte == b':').next(),
    };
    str::from_utf8(host.unwrap_or_default()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: &str = "127.0.0.1";
    const REMOTE: &str = "192.0.2.7";

    fn header_map(headers: &[(&'static str, &str)]) -> HeaderMap {
        headers
            .iter()
            .map(|&(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    fn is_allowed(token: &str, peer: &str, headers: &[(&'static str, &str)]) -> bool {
        let secrets = Secrets { admin: Secret::new(token), rpc: None };
        check(&secrets, peer.parse().unwrap(), &header_map(headers)).is_ok()
    }

    #[test]
    fn pools_with_a_token_need_one_for_keys_and_changes() {
        let rpc = Some(Token::new("master token").unwrap());
        let secrets = Secrets { admin: Secret::new("admin"), rpc };
        for (shown, is_valid) in [
            ("Bearer master token", true),
            ("Bearer admin", true),
            ("Bearer ", false),
            ("x", false),
        ] {
            let headers = header_map(&[("authorization", shown)]);
            assert_eq!(secrets.may_see_keys(&headers), is_valid, "{shown}");
            assert_eq!(check(&secrets, LOCAL.parse().unwrap(), &headers).is_ok(), is_valid);
        }
        assert!(!secrets.may_see_keys(&HeaderMap::new()));
        assert!(check(&secrets, LOCAL.parse().unwrap(), &HeaderMap::new()).is_err());
        let open = Secrets { admin: Secret::new("admin"), rpc: None };
        assert!(open.may_see_keys(&HeaderMap::new()), "an admin token alone hides nothing");
    }

    #[test]
    fn browsers_are_refused_under_foreign_names() {
        let known = ["pool.example".to_owned()];
        let is_known = |host: &str, agent: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("host", host.parse().unwrap());
            headers.insert("user-agent", agent.parse().unwrap());
            is_known_host(&known, "node7.rack.example", &headers)
        };
        let hosts = "127.0.0.1:9003 [::1]:9003 10.0.0.7 localhost:9003 pool.example:80 node7:9003 \
            NODE7.rack.example";
        for host in hosts.split_whitespace() {
            assert!(is_known(host, "Mozilla/5.0"), "{host}");
        }
        for host in ["evil.example", "evil.example:9003", "node7.evil.example", ""] {
            assert!(!is_known(host, "Mozilla/5.0"), "{host}");
            assert!(is_known(host, "Prometheus/2"), "{host}");
        }
        assert!(is_known_host(&[], "", &HeaderMap::new()), "an old client names no host");
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
