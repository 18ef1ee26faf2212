"""Access control of changes over HTTP: clients on this host, and holders of a token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mooncake._http import Request

__all__ = ["refusal"]

# Headers added by proxies. Behind a proxy, the peer address is not the client's.
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


def refusal(request: Request, token: str, variable: str) -> str | None:
    """Return why a request may not change anything; None if it may.

    Args:
        request: The request; its body is not looked at.
        token: Token that requests from elsewhere must carry; "" for none.
        variable: Name of the variable that sets the token, for the reason.
    """
    shown = request.headers.get("Authorization")
    if shown is not None:
        kind, _, given = shown.partition(" ")
        is_token = hmac.compare_digest(given.encode(), token.encode())
        if token and kind == "Bearer" and is_token:
            return None
        return f"the token is not that of {variable}"
    needs = f"needs 'Authorization: Bearer TOKEN' with the token of {variable}"
    if not _is_loopback(request.peer) and request.peer != request.host:
        return f"a change from another host {needs}"
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


def _is_this_host(url: str, own: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    is_name = name in ("localhost", socket.gethostname().lower())
    return is_name or name == own or _is_loopback(name)
