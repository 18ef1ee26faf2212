"""A pipeline of two processes: the first computes batches, the second consumes and removes them."""

import multiprocessing

import numpy as np

import mooncake

BATCHES = 5


def consume(address: str, keys: "multiprocessing.Queue[str | None]") -> None:
    """The second process: takes keys from a queue and batches from the store."""
    with mooncake.Store(address) as store:
        while (key := keys.get(timeout=60)) is not None:
            batch = store.get_array(key)
            print(f"{key}: {batch.shape} {batch.dtype}, sum {int(batch.sum())}", flush=True)
            store.delete(key, force=True)


def main() -> None:
    """The first process: it has the pool, and puts batches."""
    context = multiprocessing.get_context("spawn")
    with mooncake.Store() as store:
        keys = context.Queue()
        consumer = context.Process(target=consume, args=(store.master_address, keys))
        consumer.start()
        for number in range(BATCHES):
            key = f"batch/{number}"
            store.put_array(key, np.full((4, 256), number, np.int32))
            keys.put(key)
        keys.put(None)
        consumer.join(60)
        assert consumer.exitcode == 0, consumer.exitcode
        print(f"left in the store: {list(store.keys('batch/'))}")


if __name__ == "__main__":
    main()
