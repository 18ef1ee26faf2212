"""Prefill and decode with the transfer engine alone: one process writes KV blocks into another."""

import multiprocessing

import numpy as np

from mooncake.engine import TransferEngine

BLOCKS, BLOCK_BYTES = 64, 32 << 10


def start() -> tuple[TransferEngine, str]:
    """Start an engine and return it with the name by which peers reach it."""
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the engine does not start")
    return engine, f"127.0.0.1:{engine.get_rpc_port()}"


def prefill(request: "multiprocessing.connection.Connection") -> None:
    """Take a request, compute its KV cache, and write it where the request says."""
    peer, address, blocks = request.recv()
    engine, _ = start()
    cache = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    cache[:] = np.arange(len(blocks), dtype=np.uint8)[:, None]
    done = engine.batch_transfer_sync_write(
        peer,
        [cache[index].ctypes.data for index in range(len(blocks))],
        [address + block * BLOCK_BYTES for block in blocks],
        [BLOCK_BYTES] * len(blocks),
    )
    request.send(done)


def main() -> None:
    """The decode side: registers its cache, and asks for the blocks of a prompt."""
    context = multiprocessing.get_context("spawn")
    engine, name = start()
    cache = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    assert engine.register_memory(cache.ctypes.data, cache.nbytes) == 0
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(there,))
    process.start()
    blocks = [5, 6, 7, 40]
    here.send((name, cache.ctypes.data, blocks))
    assert here.poll(60), "the prefill process does not answer"
    assert here.recv() == 0
    process.join(60)
    assert [int(cache[block][0]) for block in blocks] == [0, 1, 2, 3]
    assert not np.delete(cache, blocks, axis=0).any()
    # After this, no peer can reach the memory.
    assert engine.unregister_memory(cache.ctypes.data) == 0
    print(f"{len(blocks)} blocks of {BLOCK_BYTES} bytes were written by {process.name}")


if __name__ == "__main__":
    main()
