"""A server on an event loop in front of the store: lines `PUT key value` and `GET key` over TCP."""

import asyncio

import mooncake

LINE_BYTES_MAX = 1 << 16
IDLE_S = 30
CALL_S = 2


async def answer(store: mooncake.AsyncStore, line: bytes) -> bytes:
    """Return the answer to one line, within the time limit of a call."""
    try:
        match line.split(maxsplit=2):
            case [b"PUT", key, value]:
                is_stored = await store.put(key, value, timeout_s=CALL_S)
                return b"stored" if is_stored else b"kept"
            case [b"GET", key]:
                value = await store.get(key, None, timeout_s=CALL_S)
                return b"missing" if value is None else bytes(value)
            case _:
                return b"error: PUT key value, or GET key"
    except mooncake.DeadlineError:
        return b"error: no answer in time"
    except mooncake.MooncakeError as error:
        return f"error: {error}".encode()


async def serve(
    store: mooncake.AsyncStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serve one connection. While one waits for the store, the loop serves others."""
    try:
        while line := await asyncio.wait_for(reader.readline(), IDLE_S):
            writer.write(await answer(store, line.strip()) + b"\n")
            await writer.drain()
    except (TimeoutError, ValueError, ConnectionError):
        pass
    finally:
        writer.close()


async def ask(port: int, number: int) -> bytes:
    """A client: puts one value, and gets it back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"PUT key-{number} value-{number}\nGET key-{number}\n".encode())
    answers = [await reader.readline(), await reader.readline()]
    writer.close()
    return b", ".join(line.strip() for line in answers)


async def main() -> None:
    """Start the server, and 20 clients at once."""
    async with mooncake.AsyncStore() as store:
        server = await asyncio.start_server(
            lambda reader, writer: serve(store, reader, writer),
            "127.0.0.1",
            0,
            limit=LINE_BYTES_MAX,
        )
        port = server.sockets[0].getsockname()[1]
        answers = await asyncio.gather(*(ask(port, number) for number in range(20)))
        print(answers[7].decode())
        print(f"{len(set(answers))} clients were served")
        server.close()


if __name__ == "__main__":
    asyncio.run(main())
