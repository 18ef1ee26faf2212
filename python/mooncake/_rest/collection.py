"""`/objects`: lists keys, and reads many objects with one request."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from secrets import token_hex
from typing import Any, Final
from urllib.parse import quote, urlencode

from mooncake._api.blocking.sharded import explained
from mooncake._api.native_calls import Native
from mooncake._api.types import ObjectInfo
from mooncake._api.values import decoded, encoded
from mooncake._http import Reply, Request
from mooncake._rest.replies import (
    RefusedError,
    failed,
    failure_of,
    json_reply,
    not_allowed,
    parameters,
    tag_of,
)
from mooncake._runtime import _native
from mooncake.errors import MooncakeError
from mooncake.tensor.sharded import TensorListing

__all__ = ["BATCH_MAX", "COLLECTION", "LIMIT_DEFAULT", "LIMIT_MAX", "answer_collection"]

COLLECTION: Final = "/objects"
"""Path of all objects."""

LIMIT_DEFAULT: Final = 1000
LIMIT_MAX: Final = 10_000
"""Largest number of keys in a page of a listing."""

BATCH_MAX: Final = 1000
"""Largest number of keys in a batch."""

_LISTED: Final = ("prefix", "limit", "continuation", "internal")
# Objects up to this length are read before the reply begins, as long as they fit into the second.
_EAGER_BYTES: Final = 1 << 20
_EAGER_TOTAL_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20
# A tensor in shards is many keys of the master's listing.
_PAGE_MIN: Final = 256


def answer_collection(native: Native, request: Request) -> Reply:
    """Return the reply to a request of `/objects`."""
    if request.method in ("GET", "HEAD"):
        return _listing(native, request)
    if request.method == "POST":
        return _batch(native, _keys(request))
    return not_allowed("GET, HEAD, POST")


def _listing(native: Native, request: Request) -> Reply:
    """Answer with a page of the complete objects and tensors whose key has a prefix."""
    given = parameters(request)
    for name in given:
        if name not in _LISTED:
            return failed(400, f"unknown parameter {name!r}; GET takes: {', '.join(_LISTED)}")
    prefix, limit = encoded(given.get("prefix", "")), _limit(given.get("limit"))
    internal = given.get("internal", "false")
    if internal not in ("true", "false"):
        return failed(400, "internal must be true or false")
    after, state = _position(given["continuation"]) if "continuation" in given else (None, ((), ()))
    tensors = None if internal == "true" else TensorListing.at_state(prefix, state)
    objects = _complete(native, prefix, after, tensors, max(limit + 1, _PAGE_MIN))
    found: list[dict[str, Any]] = []
    text = ""
    for each, last in objects:
        found.append(_listed(each.key_bytes, each.size))
        if len(found) == limit:
            text = _continuation(last, tensors)
            break
    told: dict[str, Any] = {"objects": found}
    if text and next(objects, None) is not None:
        query = {"prefix": prefix, "limit": limit, "continuation": text}
        query |= {"internal": "true"} if tensors is None else {}
        told |= {"continuation": text, "next": f"{COLLECTION}?{urlencode(query)}"}
    reply = json_reply(200, told)
    if request.method == "HEAD":
        return Reply(200, b"", reply.kind, length=len(reply.content()))
    return reply


def _complete(
    native: Native,
    prefix: bytes,
    after: bytes | None,
    tensors: TensorListing | None,
    page_keys: int,
) -> Iterator[tuple[ObjectInfo, bytes]]:
    """Yield complete objects and tensors, and the key after which the listing goes on."""
    is_last = False
    while not is_last:
        page, is_last = native.list(prefix=prefix, after=after, limit=page_keys)
        for key, size, is_complete, replicas, on_disk in page:
            each = ObjectInfo(decoded(key), size, is_complete, replicas, on_disk)
            if tensors is not None and after is not None:
                yield from (
                    (tensor, after) for tensor in tensors.over_at(key) if tensor.is_complete
                )
            after = key
            own = [each] if tensors is None else tensors.add_next(each)
            yield from ((found, key) for found in own if found.is_complete)
        if not page:
            break
    if tensors is not None and after is not None:
        yield from ((tensor, after) for tensor in tensors.rest() if tensor.is_complete)


def _continuation(after: bytes, tensors: TensorListing | None) -> str:
    """Return a text with which the next request goes on behind a key."""
    rows, whole = tensors.state if tensors is not None else ((), ())
    place = {
        "after": after.decode("latin-1"),
        "tensors": [[key.decode("latin-1"), *of] for key, *of in rows],
        "objects": [key.decode("latin-1") for key in whole],
    }
    return base64.urlsafe_b64encode(json.dumps(place, separators=(",", ":")).encode()).decode()


def _position(continuation: str) -> tuple[bytes, tuple[Any, ...]]:
    """Return the key and the state of a listing from `_continuation`."""
    try:
        text = base64.b64decode(continuation.encode("ascii"), altchars=b"-_", validate=True)
        place = json.loads(text)
        after = place["after"].encode("latin-1")
        rows = [
            (key.encode("latin-1"), int(size), bool(is_complete), int(replicas), int(on_disk))
            for key, size, is_complete, replicas, on_disk in place["tensors"]
        ]
        whole = [key.encode("latin-1") for key in place["objects"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        after = b""
    if not after:
        raise RefusedError(failed(400, "continuation must be that of the page before"))
    return after, (rows, whole)


def _listed(key: bytes, size: int) -> dict[str, Any]:
    return {"key": decoded(key), "size": size, "path": _path(key)}


def _path(key: bytes) -> str:
    return f"{COLLECTION}/{quote(key, safe='')}"


def _limit(given: str | None) -> int:
    if given is None:
        return LIMIT_DEFAULT
    if not (given.isascii() and given.isdecimal()) or not 1 <= int(given) <= LIMIT_MAX:
        raise RefusedError(failed(400, f"limit must be a number from 1 to {LIMIT_MAX}"))
    return int(given)


def _keys(request: Request) -> list[bytes]:
    """Return the keys that a body asks for."""
    form = f'the body must be JSON as {{"keys": ["a", "b"]}}, with 1 to {BATCH_MAX} keys'
    try:
        body = json.loads(bytes(request.body))
        keys = [encoded(key) for key in body["keys"] if isinstance(key, str)]
        is_list = list(body) == ["keys"] and isinstance(body["keys"], list)
        is_valid = is_list and len(keys) == len(body["keys"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RefusedError(failed(400, form)) from None
    if not is_valid or not 1 <= len(keys) <= BATCH_MAX:
        raise RefusedError(failed(400, form))
    return keys


def _batch(native: Native, keys: list[bytes]) -> Reply:
    """Answer with a part for each key, in order: the bytes of the object, or its failure."""
    boundary, parts, room = f"mooncake-{token_hex(16)}", list[_Part](), _EAGER_TOTAL_BYTES
    found = explained(lambda: native, keys, native.locate(keys, lease=False))
    for key, located in zip(keys, found, strict=True):
        part = _Part.of(native, key, located, room)
        room -= len(part.body)
        parts.append(part)
    heads = [part.head(boundary, is_first=at == 0) for at, part in enumerate(parts)]
    end = f"\r\n--{boundary}--\r\n".encode()
    total = len(end)
    for head, part in zip(heads, parts, strict=True):
        total += len(head) + part.length

    def pieces() -> Iterator[bytes]:
        for head, part in zip(heads, parts, strict=True):
            yield head
            yield from part.pieces(native)
        yield end

    return Reply(200, pieces(), f'multipart/mixed; boundary="{boundary}"', length=total)


class _Part:
    """The part of a reply for one key."""

    __slots__ = ("_fields", "body", "length", "located")

    def __init__(
        self, key: bytes, reply: Reply, located: _native.Located | None, length: int
    ) -> None:
        self.body = b"" if isinstance(reply.body, Iterator) else bytes(reply.body)
        self.located, self.length = located, length
        fields = {
            "Status": str(reply.status),
            "Content-Location": _path(key),
            "Content-Type": reply.kind,
            "Content-Length": str(length),
            **dict(reply.headers),
        }
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())

    @classmethod
    def of(
        cls, native: Native, key: bytes, located: _native.Located | MooncakeError, room: int
    ) -> _Part:
        """Return the part for a located object; a short one is read now, if there is room."""
        kind = "application/octet-stream"
        try:
            if isinstance(located, MooncakeError):
                raise located
            headers, size = (("ETag", tag_of(located.version)),), located.size
            if size > min(_EAGER_BYTES, room):
                return cls(key, Reply(200, b"", kind, headers), located, size)
            body = native.read_located(located, 0, size)
            return cls(key, Reply(200, body, kind, headers), None, size)
        except MooncakeError as error:
            reply = failure_of(error)
            return cls(key, reply, None, len(reply.content()))

    def head(self, boundary: str, *, is_first: bool) -> bytes:
        """Return what precedes the bytes of the part."""
        begin = "" if is_first else "\r\n"
        return f"{begin}--{boundary}\r\n{self._fields}\r\n".encode("latin-1")

    def pieces(self, native: Native) -> Sequence[bytes] | Iterator[bytes]:
        """Return the bytes of the part, a long object in pieces that are read one by one."""
        located = self.located
        if located is None:
            return [self.body]
        return (
            native.read_located(located, at, min(_PIECE_BYTES, located.size - at))
            for at in range(0, located.size, _PIECE_BYTES)
        )
