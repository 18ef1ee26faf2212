"""The HTTP reader of the proxy meets arbitrary bytes, and the framing of bodies."""

from __future__ import annotations

import asyncio
import random

import pytest

from mooncake._proxy.wire import (
    BODY_BYTES_MAX,
    HttpError,
    read_body,
    read_request_head,
    read_response_head,
)

REQUEST = (
    b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nX-Y: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\n, x\r\n0\r\nT: 1\r\n\r\n"
)
RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=64 << 10)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def read_request(data: bytes) -> tuple[str, bytes] | None:
    reader = reader_of(data)
    head = await read_request_head(reader)
    if head is None:
        return None
    return head.path, await read_body(reader, head.headers, is_request=True)


async def read_response(data: bytes) -> tuple[int, bytes]:
    reader = reader_of(data)
    head = await read_response_head(reader)
    return head.status, await read_body(reader, head.headers, is_request=False)


def test_whole_messages_are_read():
    assert asyncio.run(read_request(REQUEST)) == ("/v1/completions", b"hello, x")
    assert asyncio.run(read_response(RESPONSE)) == (200, b"hello")
    assert asyncio.run(read_response(b"HTTP/1.0 200 OK\r\n\r\nto the end")) == (200, b"to the end")
    assert asyncio.run(read_request(b"")) is None


@pytest.mark.parametrize(("message", "read"), [(REQUEST, read_request), (RESPONSE, read_response)])
def test_cut_messages_are_never_whole(message, read):
    async def cut() -> None:
        for length in range(1, len(message)):
            with pytest.raises((HttpError, EOFError)):
                await read(message[:length])

    asyncio.run(cut())


def test_arbitrary_bytes_end_in_an_error():
    rng = random.Random(5)

    async def read_all() -> None:
        for _ in range(3000):
            message = bytearray(rng.choice((REQUEST, RESPONSE)))
            for _ in range(rng.randint(1, 6)):
                at = rng.randrange(len(message))
                change = rng.random()
                if change < 0.5:
                    message[at] = rng.choice(b"\r\n:; 0f\x00\xff")
                elif change < 0.8:
                    message[at : at + rng.randint(1, 8)] = b""
                else:
                    message[at:at] = rng.randbytes(rng.randint(1, 4))
                message += b"x"
            for read in (read_request, read_response):
                try:
                    found = await read(bytes(message))
                except (HttpError, EOFError):
                    continue
                assert found is None or isinstance(found[1], bytes)

    asyncio.run(read_all())


def test_length_of_a_body_is_limited():
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"x" * (1 << 20)
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
    count = BODY_BYTES_MAX // len(piece)
    _, body = asyncio.run(read_request(head + chunk * count + b"0\r\n\r\n"))
    assert len(body) == BODY_BYTES_MAX
    with pytest.raises(HttpError) as refused:
        asyncio.run(read_request(head + chunk * count + b"1\r\nx\r\n0\r\n\r\n"))
    assert refused.value.status == 413
