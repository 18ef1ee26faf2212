"""Names of files: the path of a URL is the key of an object."""

from __future__ import annotations

from urllib.parse import quote, unquote

__all__ = ["PROTOCOL", "joined_url", "names_several", "split_url"]

PROTOCOL = "mooncake"
_START = f"{PROTOCOL}://"
# Characters of addresses that a URL shows as they are.
_PLAIN = "[]:;,"


def split_url(text: str) -> tuple[str, str]:
    """Return the address of the master that a URL names, or "", and the path.

    A text that is no URL is a path. Slashes around a path do not count. The slashes of an address,
    as ``etcd://10.0.0.1`` has them, are ``%2F``.
    """
    if not text.startswith(_START):
        return "", text.removeprefix(f"{PROTOCOL}:").strip("/")
    address, _, path = text.removeprefix(_START).partition("/")
    return unquote(address), path.strip("/")


def joined_url(address: str, path: str) -> str:
    """Return the URL of a path in the pool of a master."""
    return f"{_START}{quote(address, safe=_PLAIN)}/{path}"


def names_several(address: str) -> bool:
    """Return whether an address is a list of masters, or that of a service that names one."""
    return "," in address or "://" in address
