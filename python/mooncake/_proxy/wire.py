"""HTTP/1.1 over asyncio streams: heads and bodies of requests and of responses, with limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = [
    "BODY_BYTES_MAX",
    "Head",
    "HttpError",
    "ResponseHead",
    "body_chunks",
    "read_body",
    "read_request_head",
    "read_response_head",
    "write_head",
]

HEAD_BYTES_MAX = 64 << 10
BODY_BYTES_MAX = 64 << 20
_READ_BYTES = 64 << 10
_LINE_BYTES_MAX = 1 << 10


class HttpError(Exception):
    """The other side sent what is no HTTP, or more than is allowed.

    `status` is the answer to a request like that.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request; names of headers are in lower case.

    `takes_chunks` is False for a client of HTTP/1.0: the end of the connection ends its answer.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    keeps_alive: bool
    takes_chunks: bool = True


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The head of a response; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]


async def read_request_head(reader: asyncio.StreamReader, first: bytes = b"") -> Head | None:
    """Read the head of a request, None if the connection ends before it begins.

    `first` is what was read of it before.

    Raises:
        HttpError: It is no head of a request, or too long.
    """
    lines = await _read_lines(reader, first)
    if lines is None:
        return None
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise HttpError(400, "the request line is no HTTP/1.x")
    headers = _parse_headers(lines[1:])
    wants_close = "close" in headers.get("connection", "").lower()
    is_first_version = parts[2] == "HTTP/1.0"
    return Head(
        parts[0],
        _path_of(parts[1]),
        headers,
        keeps_alive=not (is_first_version or wants_close),
        takes_chunks=not is_first_version,
    )


async def read_response_head(reader: asyncio.StreamReader) -> ResponseHead:
    """Read the head of a response; skip those that announce a later one.

    Raises:
        HttpError: It is no head of a response, or too long.
        EOFError: The connection ended.
    """
    while True:
        lines = await _read_lines(reader)
        if lines is None:
            raise EOFError("the connection was closed without a response")
        version, _, rest = lines[0].partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
            raise HttpError(502, "the status line is no HTTP/1.x")
        if int(status) >= 200:
            return ResponseHead(int(status), _parse_headers(lines[1:]))


async def body_chunks(
    reader: asyncio.StreamReader, headers: Mapping[str, str], *, is_request: bool
) -> AsyncIterator[bytes]:
    """Yield the pieces of a body as they arrive.

    Raises:
        HttpError: The framing is broken.
        EOFError: The connection ended within the body.
    """
    if headers.get("transfer-encoding", "").lower() == "chunked":
        async for piece in _chunked(reader):
            yield piece
        return
    if "transfer-encoding" in headers:
        raise HttpError(501, f"unknown transfer-encoding: {headers['transfer-encoding']}")
    length = headers.get("content-length")
    if length is None:
        while not is_request and (piece := await reader.read(_READ_BYTES)):
            yield piece
        return
    remaining = _parse_length(length, base=10)
    while remaining:
        piece = await _read_some(reader, remaining)
        remaining -= len(piece)
        yield piece


async def read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str], *, is_request: bool
) -> bytes:
    """Read a whole body.

    Raises:
        HttpError: The framing is broken, or the body is longer than `BODY_BYTES_MAX`.
        EOFError: The connection ended within the body.
    """
    body = bytearray()
    async for piece in body_chunks(reader, headers, is_request=is_request):
        if len(body) + len(piece) > BODY_BYTES_MAX:
            raise HttpError(413, f"the body is longer than {BODY_BYTES_MAX} bytes")
        body += piece
    return bytes(body)


def write_head(
    writer: asyncio.StreamWriter, first_line: str, headers: Mapping[str, object]
) -> None:
    """Write the head of a request or a response."""
    lines = [first_line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode("latin-1"))


async def _read_lines(reader: asyncio.StreamReader, first: bytes = b"") -> list[str] | None:
    lines: list[str] = []
    size = 0
    # An empty line before a request is skipped, also where its first byte was read before.
    first = first.lstrip(b"\r\n")
    while True:
        try:
            line = first + await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            if not lines and not first and not error.partial:
                return None
            raise HttpError(400, "the connection ended within a head") from error
        except asyncio.LimitOverrunError as error:
            raise HttpError(431, f"the head is longer than {HEAD_BYTES_MAX} bytes") from error
        first = b""
        size += len(line)
        if size > HEAD_BYTES_MAX:
            raise HttpError(431, f"the head is longer than {HEAD_BYTES_MAX} bytes")
        text = line.rstrip(b"\r\n").decode("latin-1")
        if text:
            lines.append(text)
        elif lines:
            return lines


def _path_of(target: str) -> str:
    """Return the path of a target, which a client of a proxy sends as a URL."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        target = "/" + rest.partition("/")[2]
    return target.partition("?")[0]


def _parse_headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpError(400, "a header line has no name")
        key = name.lower()
        # Two framings of one body are how requests are smuggled.
        if key in ("content-length", "transfer-encoding") and key in headers:
            raise HttpError(400, f"the header {key} stands twice")
        headers[key] = value.strip()
    if "content-length" in headers and "transfer-encoding" in headers:
        raise HttpError(400, "the body has two framings")
    return headers


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        remaining = _parse_length((await _read_line(reader)).partition(";")[0], base=16)
        if not remaining:
            break
        while remaining:
            piece = await _read_some(reader, remaining)
            remaining -= len(piece)
            yield piece
        if await _read_line(reader):
            raise HttpError(400, "a chunk is longer than it says")
    while await _read_line(reader):
        pass  # trailers


async def _read_line(reader: asyncio.StreamReader) -> str:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise HttpError(400, "a chunk line is too long") from error
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended within a body")
    if len(line) > _LINE_BYTES_MAX:
        raise HttpError(400, "a chunk line is too long")
    return line.strip().decode("latin-1")


async def _read_some(reader: asyncio.StreamReader, length_max: int) -> bytes:
    piece = await reader.read(min(length_max, _READ_BYTES))
    if not piece:
        raise EOFError("the connection ended within a body")
    return piece


def _parse_length(text: str, *, base: int) -> int:
    digits = text.strip()
    if (
        not digits
        or len(digits) > 16
        or not all(digit in "0123456789abcdefABCDEF" for digit in digits)
    ):
        raise HttpError(400, "a length is no number")
    try:
        return int(digits, base)
    except ValueError as error:
        raise HttpError(400, "a length is no number") from error
