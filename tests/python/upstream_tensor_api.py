"""Upstream's calls of `mooncake.store` for tensors as data, in the form of `upstream_store_api`."""

from __future__ import annotations

from typing import Any, Final

from upstream_store_api import INVALID, Call, needs

TENSORS = {"tensors": "tensors_list"}
BASE_KEYS = {"base_keys": "keys"}
KEYS = {"keys": "base_keys"}
# Not a tensor, so that the calls need no torch: before `setup` every value is refused alike.
VALUE = b"not a tensor"
AT: Final = {"buffer_ptr": 4096, "size": 400}
MANY_AT: Final = {"buffer_ptrs": [4096], "sizes": [400]}
TP: Final = {"tp_rank": 0, "tp_size": 1}
SPLIT: Final = {**TP, "split_dim": 0}


def put() -> Call:
    return Call(needs("key", "tensor", config=None), ("k", VALUE), "int", INVALID)


def batch_put() -> Call:
    parameters = needs("keys", "tensors_list", config=None)
    return Call(parameters, (["k"], [VALUE]), "list[int]", [INVALID], TENSORS)


def put_from() -> Call:
    return Call(needs("key", *AT), ("k", *AT.values()), "int", INVALID)


def batch_put_from() -> Call:
    return Call(needs("keys", *MANY_AT), (["k"], *MANY_AT.values()), "list[int]", [INVALID])


def many(parameters: dict[str, Any], *arguments: Any) -> Call:
    """A call for many tensors with the names of the calls for tensor parallelism."""
    aliases = {**KEYS, **(TENSORS if "tensors_list" in parameters else {})}
    return Call(parameters, (["k"], *arguments), "list[int]", [INVALID], aliases)


TENSOR: Final = "torch.Tensor | None"

AXES: Final = {"parallelism": None, "config": None, "writer_partition": None}
MANY_AXES: Final = {"parallelisms": None, "config": None, "writer_partitions": None}


def put_parallel() -> Call:
    return Call(needs("key", "tensor", **AXES), ("k", VALUE), "int", INVALID)


def batch_put_parallel() -> Call:
    parameters = needs("keys", "tensors_list", **MANY_AXES)
    return Call(parameters, (["k"], [VALUE]), "list[int]", [INVALID], TENSORS)


def put_parallel_from() -> Call:
    return Call(needs("key", *AT, **AXES), ("k", *AT.values()), "int", INVALID)


def batch_put_parallel_from() -> Call:
    parameters = needs("keys", *MANY_AT, **MANY_AXES)
    return Call(parameters, (["k"], *MANY_AT.values()), "list[int]", [INVALID])


PARALLEL_CALLS: Final[dict[str, Call]] = {
    "put_tensor_with_parallelism": put_parallel(),
    "upsert_tensor_with_parallelism": put_parallel(),
    "batch_put_tensor_with_parallelism": batch_put_parallel(),
    "batch_upsert_tensor_with_parallelism": batch_put_parallel(),
    "put_tensor_with_parallelism_from": put_parallel_from(),
    "upsert_tensor_with_parallelism_from": put_parallel_from(),
    "batch_put_tensor_with_parallelism_from": batch_put_parallel_from(),
    "batch_upsert_tensor_with_parallelism_from": batch_put_parallel_from(),
    "get_tensor_with_parallelism": Call(needs("key", target=None), ("k",), TENSOR, None),
    "batch_get_tensor_with_parallelism": Call(
        needs("keys", targets=None), (["k"],), f"list[{TENSOR}]", [None]
    ),
    "get_tensor_with_parallelism_into": Call(
        needs("key", *AT, target=None), ("k", *AT.values()), TENSOR, None
    ),
    "batch_get_tensor_with_parallelism_into": Call(
        needs("keys", *MANY_AT, targets=None), (["k"], *MANY_AT.values()), f"list[{TENSOR}]", [None]
    ),
}

TENSOR_CALLS: Final[dict[str, Call]] = {
    "put_tensor": put(),
    "pub_tensor": put(),
    "upsert_tensor": put(),
    "upsert_pub_tensor": put(),
    "get_tensor": Call(needs("key"), ("k",), TENSOR, None),
    "batch_put_tensor": batch_put(),
    "batch_pub_tensor": batch_put(),
    "batch_upsert_tensor": batch_put(),
    "batch_upsert_pub_tensor": batch_put(),
    "batch_get_tensor": Call(needs("keys"), (["k"],), f"list[{TENSOR}]", [None], BASE_KEYS),
    "get_tensor_into": Call(needs("key", *AT), ("k", *AT.values()), TENSOR, None),
    "batch_get_tensor_into": Call(
        needs("keys", *MANY_AT), (["k"], *MANY_AT.values()), "list[Any]", [INVALID], BASE_KEYS
    ),
    "put_tensor_from": put_from(),
    "upsert_tensor_from": put_from(),
    "batch_put_tensor_from": batch_put_from(),
    "batch_upsert_tensor_from": batch_put_from(),
    "get_tensor_into_cuda": Call(needs("key", "tensor"), ("k", VALUE), "int", INVALID),
    "batch_get_tensor_into_cuda": Call(
        needs("keys", "tensors_list"), (["k"], [VALUE]), "list[int]", [INVALID], TENSORS
    ),
    "save_tensor_to_safetensor": Call(
        needs("key", file_name=None), ("k", "/nowhere/file"), "int", INVALID
    ),
    "load_tensor_from_safetensor": Call(
        needs(key=None, file_name=None), ("k", "/nowhere/file"), TENSOR, None
    ),
    "put_tensor_with_tp": Call(
        needs("key", "tensor", **SPLIT, config=None), ("k", VALUE), "int", INVALID
    ),
    "pub_tensor_with_tp": Call(
        needs("key", "tensor", config=None, **SPLIT), ("k", VALUE), "int", INVALID
    ),
    "batch_put_tensor_with_tp": many(
        needs("base_keys", "tensors_list", **SPLIT, config=None), [VALUE]
    ),
    "batch_pub_tensor_with_tp": many(
        needs("base_keys", "tensors_list", config=None, **SPLIT), [VALUE]
    ),
    "get_tensor_with_tp": Call(needs("key", **SPLIT), ("k",), TENSOR, None),
    "batch_get_tensor_with_tp": Call(
        needs("base_keys", **TP), (["k"],), f"list[{TENSOR}]", [None], KEYS
    ),
    "get_tensor_with_tp_into": Call(needs("key", *AT, **SPLIT), ("k", *AT.values()), TENSOR, None),
    "batch_get_tensor_with_tp_into": Call(
        needs("base_keys", *MANY_AT, **TP),
        (["k"], *MANY_AT.values()),
        "list[Any]",
        [INVALID],
        KEYS,
    ),
    "put_tensor_with_tp_from": Call(
        needs("key", *AT, **SPLIT), ("k", *AT.values()), "int", INVALID
    ),
    "batch_put_tensor_with_tp_from": many(needs("base_keys", *MANY_AT, **SPLIT), *MANY_AT.values()),
    **PARALLEL_CALLS,
}
