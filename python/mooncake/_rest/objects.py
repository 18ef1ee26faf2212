"""Objects over HTTP: `/objects`, `/objects/{key}`, `/health`, `/metrics`, `/openapi.json`, `/`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from mooncake._api.blocking.objects import ObjectCalls
from mooncake._api.blocking.puts import put_refused
from mooncake._api.blocking.ranges import RangeCalls
from mooncake._api.outcomes import only
from mooncake._api.values import with_terms
from mooncake._http import Body, Headers, Reply, Request
from mooncake._rest.collection import COLLECTION, answer_collection
from mooncake._rest.openapi import description
from mooncake._rest.replies import (
    RefusedError,
    failed,
    failure_of,
    json_reply,
    not_allowed,
    parameters,
    tag_of,
)
from mooncake._runtime import __version__
from mooncake.errors import AlreadyExistsError, MooncakeError, VersionDiffersError
from mooncake.tensor.replaced import NO_SHARDS

if TYPE_CHECKING:
    from mooncake._api.blocking.ranges import ObjectReader
    from mooncake._runtime import _native

__all__ = ["ObjectRoutes", "is_object", "is_route"]

_OBJECTS: Final = "/objects/"
_METHODS: Final = {_OBJECTS: "GET, HEAD, PUT, DELETE"}
_PAGES: Final = ("/", "/health", "/metrics", "/openapi.json")
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
_TAG: Final = re.compile(r'"(\d{1,20})"', re.ASCII)
# Reads of an object that others replace meanwhile.
_READS_MAX: Final = 4
# Longer objects are read and sent in pieces of this length, so that a slow client holds one piece.
_PIECE_BYTES: Final = 1 << 20
_KEY_BYTES_MAX: Final = 64 << 10
_LINKS: Final = {
    "list": "/objects",
    "objects": "/objects/{key}",
    "description": "/openapi.json",
    "health": "/health",
}
_OTHER_LINKS: Final = {"metrics": "/metrics", "upstream": "/api/"}


def is_object(path: str) -> bool:
    """Return whether the path is that of an object, or of all of them."""
    return path == COLLECTION or path.startswith(_OBJECTS)


def is_route(path: str) -> bool:
    """Return whether the path is one of these routes."""
    return path in _PAGES or is_object(path)


class ObjectRoutes(ObjectCalls, RangeCalls):
    """The routes over a native store, which their caller keeps open."""

    __slots__ = ("_native",)

    def __init__(self, native: _native.Store) -> None:
        """Serve a store.

        Args:
            native: The native store.
        """
        self._native = native

    def answer(self, request: Request) -> Reply:
        """Return the reply to a request of one of these routes."""
        try:
            if request.path in _PAGES:
                return self._page(request)
            if request.path == COLLECTION:
                return answer_collection(self._native, request)
            return self._object(request)
        except RefusedError as refused:
            return refused.reply
        except MooncakeError as error:
            return failure_of(error)

    def _page(self, request: Request) -> Reply:
        if request.method not in ("GET", "HEAD"):
            return not_allowed("GET, HEAD")
        if request.path == "/health":
            return self._health()
        if request.path == "/metrics":
            text = self._native.metrics_text().encode()
            return Reply(200, text, "text/plain; version=0.0.4; charset=utf-8")
        if request.path == "/openapi.json":
            return json_reply(200, description())
        links = {**_LINKS, **_OTHER_LINKS}
        return json_reply(
            200, {"service": "mooncake store", "version": __version__, "links": links}
        )

    def _health(self) -> Reply:
        try:
            self._native.health()
        except MooncakeError as error:
            return failed(503, str(error), code=error.code_name)
        return json_reply(200, {"status": "ok", "master": self._native.master_address})

    def _object(self, request: Request) -> Reply:
        handlers: dict[str, Callable[[bytes, Request], Reply]] = {
            "GET": self._read,
            "HEAD": self._read,
            "PUT": self._write,
            "DELETE": self._remove,
        }
        handler = handlers.get(request.method)
        if handler is None:
            return not_allowed(_METHODS[_OBJECTS])
        key = unquote_to_bytes(request.path[len(_OBJECTS) :].encode("latin-1"))
        if not 0 < len(key) <= _KEY_BYTES_MAX:
            return failed(400, f"a key has 1 to {_KEY_BYTES_MAX} bytes, not {len(key)}")
        known = _PARAMETERS.get(request.method, ())
        unknown = [name for name in parameters(request) if name not in known]
        if unknown:
            names = ", ".join(known) or "none"
            return failed(400, f"unknown parameter {unknown[0]!r}; {request.method} takes: {names}")
        return handler(key, request)

    def _read(self, key: bytes, request: Request) -> Reply:
        """Answer with bytes, size and version of one version of the object."""
        for _ in range(_READS_MAX):
            reader = self.reader(key)
            reply = self._described(reader, request)
            if reply is not None:
                return reply
            if reader.size > _PIECE_BYTES:
                break
            # Reads the object anew, which verifies its checksum.
            body = memoryview(self.get_buffer(key))
            if self.reader(key).version == reader.version:
                return _whole(reader, body)
        # The object is long, or is replaced again and again; the bytes of one location are of one
        # version.
        return _whole(reader, _pieces(reader, reader.size))

    def whole(self, key: bytes) -> Reply:
        """Answer with all bytes of an object, and lease it, as upstream's route does.

        Raises:
            MooncakeError: The object does not exist, or cannot be read.
        """
        only(self._native.sizes([key], lease=True))
        return self._read(key, Request("GET", "", "", b""))

    def _described(self, reader: ObjectReader, request: Request) -> Reply | None:
        """Return the reply of HEAD, of a condition, or of a range; None if all bytes are needed."""
        tag = tag_of(reader.version)
        wanted = request.headers.get("If-Match")
        if wanted is not None and not _names(wanted, tag):
            return failed(412, f"the object has the version {tag}", code=_OTHER_VERSION)
        headers = _headers(reader)
        if _names(_weakened(request.headers.get("If-None-Match", "")), tag):
            return Reply(304, b"", _BINARY, headers, length=0)
        if request.method == "HEAD":
            return _whole(reader, b"")
        # The rest of another version would be joined to what the caller has.
        is_same = request.headers.get("If-Range", tag).strip() == tag
        part = _range(request.headers.get("Range"), reader.size) if is_same else None
        if part is None:
            return None
        begin, end = part
        shown = ("Content-Range", f"bytes {begin}-{end - 1}/{reader.size}")
        reader.seek(begin)
        pieces = _pieces(reader, end - begin)
        return Reply(206, pieces, _BINARY, (*headers, shown), length=end - begin)

    def _write(self, key: bytes, request: Request) -> Reply:
        if not request.body:
            return failed(400, "an object has at least one byte; the body is empty")
        if "Content-Range" in request.headers:
            return failed(400, "a PUT replaces the whole object; it takes no Content-Range")
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            return failed(400, "objects have no Content-Encoding; send the bytes to be stored")
        known = request.headers.get("If-None-Match")
        if known not in (None, "*"):
            return failed(400, "If-None-Match of a PUT must be *")
        version = _version(request)
        if known and version is not None:
            return failed(400, "If-Match and If-None-Match exclude each other")
        is_kept = known == "*" or not _switch(request, "overwrite", default=True)
        ttl_s = _seconds(request, "ttl_s")
        options = with_terms(None, ttl_s=ttl_s, tags=None, if_version=version)
        is_upsert = not is_kept and version is None
        native, keys, values = self._native, [key], [request.body]
        stored = native.put_versions(
            keys, values, options=options, is_upsert=is_upsert, if_absent=NO_SHARDS
        )
        if isinstance(stored[0], AlreadyExistsError):

            def put_rows(_: list[int]) -> list[int | MooncakeError]:
                return native.put_versions(keys, values, options=options, is_upsert=is_upsert)

            put_refused(lambda: native, keys, stored, put_rows, replaces=is_upsert)
        new = only(stored)
        if new:
            return Reply(204, b"", _BINARY, (("ETag", tag_of(new)),), length=None)
        if version is not None:
            text = "the object has another version, or is gone"
            return failed(412, text, code=_OTHER_VERSION)
        status = 412 if known == "*" else 409
        return failed(status, "an object has that key and was kept", code="OBJECT_ALREADY_EXISTS")

    def _remove(self, key: bytes, request: Request) -> Reply:
        force = _switch(request, "force", default=False)
        try:
            self.delete(key, force=force, if_version=_version(request))
        except VersionDiffersError as error:
            return failed(412, str(error), code=_OTHER_VERSION)
        return Reply(204, b"", _BINARY, length=None)


# The store has no code of its own for it.
_OTHER_VERSION: Final = "VERSION_DIFFERS"
_BINARY: Final = "application/octet-stream"
_PARAMETERS: Final = {"PUT": ("overwrite", "ttl_s"), "DELETE": ("force",)}


def _headers(reader: ObjectReader) -> Headers:
    return (("Accept-Ranges", "bytes"), ("ETag", tag_of(reader.version)))


def _pieces(reader: ObjectReader, length: int) -> Iterator[bytes]:
    """Yield that many bytes from the position of the reader on; the first piece is read at once."""
    first = reader.read(min(length, _PIECE_BYTES))

    def rest() -> Iterator[bytes]:
        yield first
        left = length - len(first)
        while left > 0:
            piece = reader.read(min(left, _PIECE_BYTES))
            left -= len(piece)
            yield piece

    return rest()


def _whole(reader: ObjectReader, body: Body) -> Reply:
    return Reply(200, body, _BINARY, _headers(reader), length=reader.size)


def _range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return the range that is asked for; None for all bytes, also for ranges not understood."""
    found = _RANGE.fullmatch(text.replace(" ", "")) if text else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        begin, end = max(size - int(last), 0), size
    else:
        begin, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < begin:
            return None
    if begin >= end:
        refused = failed(416, f"the range is outside of the object, which has {size} bytes")
        headers = (("Content-Range", f"bytes */{size}"),)
        raise RefusedError(Reply(416, refused.body, refused.kind, headers))
    return begin, end


def _switch(request: Request, name: str, *, default: bool) -> bool:
    given = parameters(request).get(name)
    if given is None:
        return default
    if given not in ("true", "false"):
        raise RefusedError(failed(400, f"{name} must be true or false"))
    return given == "true"


def _seconds(request: Request, name: str) -> float | None:
    given = parameters(request).get(name)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        raise RefusedError(failed(400, f"{name} must be a number of seconds")) from None
    return seconds


def _names(tags: str, tag: str) -> bool:
    """Return whether a list of entity tags, or `*`, names this one."""
    return tags.strip() == "*" or tag in [word.strip() for word in tags.split(",")]


def _weakened(tags: str) -> str:
    """Return tags without the marks of weak ones, for comparisons in which these count, too."""
    return ",".join(word.strip().removeprefix("W/") for word in tags.split(","))


def _version(request: Request) -> int | None:
    """Return the version that a change is made for; None if for any."""
    given = request.headers.get("If-Match")
    if given is None:
        return None
    found = _TAG.fullmatch(given.strip())
    if found is None or int(found[1]) >= 1 << 64:
        text = 'If-Match of a change must be one ETag of the object, as in If-Match: "7"'
        raise RefusedError(failed(400, text))
    return int(found[1])
