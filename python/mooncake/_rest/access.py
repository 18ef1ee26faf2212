"""Access control over HTTP: clients on this host, and holders of a token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mooncake._http import Request

__all__ = ["Access", "refusal"]

# Headers added by proxies. Behind a proxy, the peer address is not the client's.
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


@dataclass(frozen=True, slots=True)
class Access:
    """Decides which requests may read and change objects.

    Attributes:
        token: Token of the server; "" for none. Requests from other hosts need it, those that read,
            too. Without a token everybody may read.
        variable: Name of the variable that sets it.
        pool_token: Token of the pool; "" for none. With one, requests from this host need one of
            the two tokens, too.
    """

    token: str
    variable: str
    pool_token: str = ""

    def refusal_of_change(self, request: Request) -> str | None:
        """Return why a request may not change anything; None if it may."""
        if not self.pool_token:
            return refusal(request, self.token, self.variable)
        if any(token and _shows(request, token) for token in (self.token, self.pool_token)):
            return None
        return (
            "this pool has a token: the request needs 'Authorization: Bearer TOKEN' with that of "
            f"{self.variable} or of the pool"
        )

    def refusal_of_read(self, request: Request) -> str | None:
        """Return why a request may not read objects; None if it may."""
        if self.token or self.pool_token:
            return self.refusal_of_change(request)
        # A page of another site that was led here under its own name (DNS rebinding) could read.
        is_browser = request.headers.get("User-Agent", "").startswith("Mozilla/")
        host = request.headers.get("Host")
        if is_browser and host is not None and not _is_address_or_own(host, request.host):
            return "browsers reach this server by address, as localhost or by the name of its host"
        return None


def _shows(request: Request, token: str) -> bool:
    """Return whether the request carries the token."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return kind == "Bearer" and hmac.compare_digest(given.encode(), token.encode())


def refusal(request: Request, token: str, variable: str) -> str | None:
    """Return why a request may not change anything; None if it may.

    Args:
        request: The request; its body is not looked at.
        token: Token that requests from elsewhere must carry; "" for none.
        variable: Name of the variable that sets the token, for the reason.
    """
    if "Authorization" in request.headers:
        if token and _shows(request, token):
            return None
        return f"the token is not that of {variable}"
    needs = f"needs 'Authorization: Bearer TOKEN' with the token of {variable}"
    if not _is_loopback(request.peer) and request.peer != request.host:
        return f"a request from another host {needs}"
    if any(name in request.headers for name in _FORWARDED):
        return f"a forwarded request {needs}"
    # A cross-site page in a browser on this host names its site as the origin. A page that uses DNS
    # rebinding names its own domain as the host.
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    is_own_host = host is None or _is_this_host(f"//{host}", request.host)
    is_own_origin = origin is None or _is_this_host(origin, request.host)
    if is_own_host and is_own_origin:
        return None
    return f"a cross-site request {needs}"


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return parsed.is_loopback or (mapped is not None and mapped.is_loopback)


def _is_address_or_own(host: str, own: str) -> bool:
    if _is_this_host(f"//{host}", own):
        return True
    try:
        ipaddress.ip_address(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
    return True


def _is_this_host(url: str, own: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    is_name = name in ("localhost", socket.gethostname().lower())
    return is_name or name == own or _is_loopback(name)
