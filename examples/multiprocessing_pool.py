"""A pool of processes that share arrays through the store instead of pickling them.

Use the start method `spawn`: a store does not work in a forked child, where its calls fail.
"""

import multiprocessing

import numpy as np

import mooncake

_store: mooncake.Store | None = None


def join(address: str) -> None:
    """Open the store of a worker process, once."""
    global _store
    _store = mooncake.Store(address)


def square(key: str) -> str:
    """The task: only keys travel through the pool."""
    assert _store is not None
    result = f"{key}/squared"
    _store.put_array(result, _store.get_array(key) ** 2)
    return result


def main() -> None:
    """Square arrays in three processes."""
    # Workers lend memory only if asked: results stay in the pool of this process.
    with mooncake.Store() as store:
        keys = [f"in/{number}" for number in range(12)]
        for number, key in enumerate(keys):
            store.put_array(key, np.full(1000, number, np.int64))
        context = multiprocessing.get_context("spawn")
        with context.Pool(3, initializer=join, initargs=(store.master_address,)) as pool:
            results = pool.map_async(square, keys).get(timeout=100)
        sums = [int(store.get_array(key).sum()) for key in results]
        assert sums == [1000 * number**2 for number in range(12)]
        print(f"{len(results)} arrays squared, the last sums to {sums[-1]}")


if __name__ == "__main__":
    main()
