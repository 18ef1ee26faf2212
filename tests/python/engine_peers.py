"""Transfer engines in other processes, which register memory and take commands about it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from mooncake.engine import TransferEngine

PEER = """
import ctypes, json, sys
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

def decoded(argument):
    if isinstance(argument, dict) and "opcode" in argument:
        return getattr(TransferOpcode, argument["opcode"])
    return TransferNotify(*argument["notify"]) if isinstance(argument, dict) else argument

name, metadata, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
protocol, device = sys.argv[4:]
engine = TransferEngine()
assert engine.initialize(name, metadata, protocol, device) == 0
memory = ctypes.create_string_buffer(length)
address = ctypes.addressof(memory)
assert engine.register_memory(address, length) == 0
managed = engine.allocate_managed_buffer(length)
print(json.dumps([engine.get_rpc_port(), address, managed]), flush=True)
for line in sys.stdin:
    what, *rest = json.loads(line)
    if what == "bytes":
        answer = engine.read_bytes_from_buffer(*rest).hex()
    elif what == "write":
        answer = engine.write_bytes_to_buffer(rest[0], bytes.fromhex(rest[1]), len(rest[1]) // 2)
    elif what == "notifies":
        answer = [[n.name, n.msg] for n in engine.get_notifies()]
    elif what == "call":
        answer = getattr(engine, rest[0])(*map(decoded, rest[1:]))
    elif what == "refused":
        answer = engine.metrics()["refused"]
    elif what == "unregister":
        answer = engine.unregister_memory(address)
    print(json.dumps(answer), flush=True)
"""


@dataclass
class EnginePeer:
    """An engine in another process, with registered user memory and a managed buffer."""

    process: subprocess.Popen[str]
    segment: str
    address: int
    managed: int

    def ask(self, *question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the engine. Opcodes are ``{"opcode": name}``, messages ``{"notify": [n, m]}``."""
        return self.ask("call", name, *arguments)

    def bytes_at(self, address: int, length: int) -> bytes:
        return bytes.fromhex(self.ask("bytes", address, length))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def start_peer(
    *,
    name: str = "127.0.0.1:1",
    metadata: str = "P2PHANDSHAKE",
    length: int = 8 << 20,
    python: str = sys.executable,
    protocol: str = "tcp",
    device: str = "",
    namespace: str = "",
) -> EnginePeer:
    """Start an engine in another process, with the current environment.

    In another network namespace it cannot share memory with engines of this one.
    """
    enter = ["ip", "netns", "exec", namespace] if namespace else []
    process = subprocess.Popen(
        [*enter, python, "-c", PEER, name, metadata, str(length), protocol, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    if not ready:
        process.communicate(timeout=10)
        raise AssertionError(f"the peer did not start: exit code {process.returncode}")
    port, address, managed = json.loads(ready)
    segment = f"{name.partition(':')[0]}:{port}" if metadata == "P2PHANDSHAKE" else name
    return EnginePeer(process, segment, address, managed)


def start_engine(*, name: str = "127.0.0.1:2", metadata: str = "P2PHANDSHAKE") -> TransferEngine:
    """Start an engine in this process."""
    engine = TransferEngine()
    assert engine.initialize(name, metadata, "tcp", "") == 0
    return engine


@dataclass
class Memory:
    """Memory of this process, with its address."""

    buffer: Any
    address: int

    @classmethod
    def of(cls, content: bytes) -> Memory:
        buffer = ctypes.create_string_buffer(content, len(content))
        return cls(buffer, ctypes.addressof(buffer))

    @property
    def content(self) -> bytes:
        return bytes(self.buffer.raw)
