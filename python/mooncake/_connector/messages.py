"""The message with which a decode worker asks a prefill worker for blocks. Needs msgspec."""

from __future__ import annotations

import msgspec

__all__ = ["MooncakeAgentMetadata", "decode", "encode", "endpoint"]


class MooncakeAgentMetadata(  # type: ignore[call-arg, unused-ignore]
    msgspec.Struct,  # type: ignore[misc, unused-ignore]
    omit_defaults=True,
    dict=True,
):
    """A call for blocks, in MessagePack. Upstream knows the first five fields and skips the rest.

    Attributes:
        remote_hostname: Host of the engine of the decode worker.
        remote_port: Port of that engine.
        request_ids: Requests, by their ids at the prefill worker.
        kv_caches_base_addr: Address of block 0 in each region of the decode worker.
        block_ids: For each request the blocks to fill.
        timeout_s: Time for which the decode worker waits; 0 if the sender does not say.
        block_bytes: Length of a block in each region; empty if the sender does not say.
        layers: Name of the layer of each region; empty if the sender does not say.
        stage: Pipeline stage of the decode worker.
        stages: Number of pipeline stages; 0 if the sender does not say.
    """

    remote_hostname: str
    remote_port: int
    request_ids: list[str]
    kv_caches_base_addr: list[int]
    block_ids: list[list[int]]
    timeout_s: float = 0.0
    block_bytes: list[int] = []
    layers: list[str] = []
    stage: int = 0
    stages: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(MooncakeAgentMetadata)


def encode(message: MooncakeAgentMetadata) -> bytes:
    """Return the bytes of a message."""
    encoded: bytes = _ENCODER.encode(message)
    return encoded


def decode(payload: bytes) -> MooncakeAgentMetadata:
    """Return the message in the bytes.

    Raises:
        ValueError: The bytes are not such a message.
    """
    try:
        message: MooncakeAgentMetadata = _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a call for blocks: {error}") from error
    if len(message.request_ids) != len(message.block_ids):
        raise ValueError(
            f"not a call for blocks: {len(message.request_ids)} requests, "
            f"{len(message.block_ids)} lists of blocks"
        )
    if len(set(message.request_ids)) != len(message.request_ids):
        raise ValueError("not a call for blocks: a request is named twice")
    return message


def endpoint(host: str, port: int) -> str:
    """Return a host and a port as one text; the address of an IPv6 host gets brackets."""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"
