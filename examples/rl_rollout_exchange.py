"""Rollouts of reinforcement learning: actors put batches, a trainer gets the columns that it needs.

Only a handle of a few hundred bytes travels from an actor to the trainer.
"""

import json
import multiprocessing

import numpy as np

import mooncake
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import MooncakeBundleTransfer, export_dataproto_ref

ROWS = 8


def connect(address: str) -> MooncakeDistributedStore:
    """Open a store that lends 64 MiB."""
    store = MooncakeDistributedStore()
    if store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 64 << 20, "tcp", "", address) != 0:
        raise ConnectionError(f"no master at {address}")
    return store


def act(address: str, actor: int, handles: "multiprocessing.Queue[str]", done: object) -> None:
    """An actor: puts one batch, and stays until the trainer has it."""
    store = connect(address)
    transfer = MooncakeBundleTransfer(store, key_prefix="rollouts")
    random = np.random.default_rng(actor)
    ref = transfer.put(
        {
            "batch": {
                "tokens": random.integers(0, 32_000, (ROWS, 64)),
                "reward": np.full(ROWS, actor, np.float32),
            },
            "non_tensor_batch": {"prompt": np.array([f"prompt {actor}"] * ROWS, dtype=object)},
            "meta_info": {"actor": actor},
        },
        field_schemas=None,
    )
    handles.put(json.dumps(export_dataproto_ref(ref)))
    done.wait(60)  # type: ignore[attr-defined]
    store.close()


def main() -> None:
    """The trainer, with three actors."""
    context = multiprocessing.get_context("spawn")
    with mooncake.Store() as pool:
        handles, done = context.Queue(), context.Event()
        actors = [
            context.Process(target=act, args=(pool.master_address, number, handles, done))
            for number in range(3)
        ]
        for actor in actors:
            actor.start()
        store = connect(pool.master_address)
        transfer = MooncakeBundleTransfer(store, key_prefix="rollouts")
        for _ in actors:
            handle = json.loads(handles.get(timeout=60))
            batch = transfer.get(handle, fields=["reward", "prompt"], rows=[0, 1])
            reward, prompt = batch["batch"]["reward"], batch["non_tensor_batch"]["prompt"]
            print(f"{prompt[0]}: {len(reward)} rows of reward {float(reward.mean())}")
            transfer.cleanup_dataproto(handle)
        done.set()
        for actor in actors:
            actor.join(60)
        store.close()


if __name__ == "__main__":
    main()
