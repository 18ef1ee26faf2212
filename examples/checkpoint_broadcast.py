"""A checkpoint that many processes load at once: put once, hard-pinned, read by each."""

import multiprocessing

import numpy as np

import mooncake

LAYERS, READERS = 6, 3


def load(address: str, version: int, results: "multiprocessing.Queue[float]") -> None:
    """A reader: loads all layers into memory that it has already."""
    with mooncake.Store(address) as store:
        layers = np.empty((LAYERS, 256, 256), np.float32)
        for number, layer in enumerate(layers):
            store.get_array(f"checkpoint/{version}/{number}", out=layer)
        results.put(float(layers.sum()))


def main() -> None:
    """Publishes a version, lets the readers load it, and withdraws it."""
    context = multiprocessing.get_context("spawn")
    with mooncake.Store() as store:
        weights = np.arange(LAYERS, dtype=np.float32).repeat(256 * 256).reshape(LAYERS, 256, 256)
        pinned = mooncake.PutOptions(is_hard_pinned=True)
        for number, layer in enumerate(weights):
            store.put_array(f"checkpoint/7/{number}", layer, options=pinned)
        results = context.Queue()
        readers = [
            context.Process(target=load, args=(store.master_address, 7, results))
            for _ in range(READERS)
        ]
        for reader in readers:
            reader.start()
        sums = {results.get(timeout=60) for _ in readers}
        for reader in readers:
            reader.join(60)
        assert sums == {float(weights.sum())}, sums
        removed = store.clear("checkpoint/7/", force=True, pinned=True)
        print(f"{READERS} processes loaded version 7; {removed} objects removed")


if __name__ == "__main__":
    main()
