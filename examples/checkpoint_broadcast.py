"""A checkpoint that many processes load at once: saved once, hard-pinned, read by each."""

import multiprocessing

import numpy as np

import mooncake
from mooncake import checkpoint

LAYERS, READERS = 6, 3


def load(address: str, name: str, results: "multiprocessing.Queue[float]") -> None:
    """A reader: loads all layers into memory that it has already."""
    state = {f"layer.{number}": np.empty((256, 256), np.float32) for number in range(LAYERS)}
    with mooncake.Store(address) as store:
        checkpoint.load(store, name, into=state)
    results.put(float(sum(layer.sum() for layer in state.values())))


def main() -> None:
    """Publish a version, let the readers load it, and withdraw it."""
    context = multiprocessing.get_context("spawn")
    with mooncake.Store() as store:
        state = {
            f"layer.{number}": np.full((256, 256), number, np.float32) for number in range(LAYERS)
        }
        saved = checkpoint.save(state, store, "weights/7", pin="hard")
        results = context.Queue()
        readers = [
            context.Process(target=load, args=(store.master_address, saved.prefix, results))
            for _ in range(READERS)
        ]
        for reader in readers:
            reader.start()
        sums = {results.get(timeout=60) for _ in readers}
        for reader in readers:
            reader.join(60)
        assert sums == {float(sum(layer.sum() for layer in state.values()))}, sums
        checkpoint.delete(store, saved.prefix)
        print(f"{READERS} processes loaded {saved.prefix}: {saved.tensors} tensors")


if __name__ == "__main__":
    main()
