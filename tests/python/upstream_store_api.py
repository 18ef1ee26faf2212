"""Upstream's calls of `mooncake.store` as data: names, parameters, defaults, results.

Calls for tensors are in `upstream_tensor_api`. Where two documents give a parameter different
names, the table has both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

REQUIRED: Final = object()
INVALID: Final = -600


@dataclass(frozen=True)
class Call:
    """A call: its parameters in order, its result, and its result before `setup`."""

    parameters: dict[str, Any]
    arguments: tuple[Any, ...]
    returns: str
    unready: Any
    aliases: dict[str, str] = field(default_factory=dict)
    variadic: bool = False


def needs(*names: str, **defaults: Any) -> dict[str, Any]:
    return {**dict.fromkeys(names, REQUIRED), **defaults}


# The ranges of two keys, for a call before `setup`.
RANGES = ([4096], [["k", "l"]], [[[0], [0, 1]]], [[[0], [0, 1]]], [[[1], [1, 1]]])

CALLS: Final[dict[str, Call]] = {
    "setup": Call(
        needs(
            "local_hostname",
            "metadata_server",
            global_segment_size=16777216,
            local_buffer_size=1073741824,
            protocol="tcp",
            rdma_devices="",
            master_server_addr="127.0.0.1:50051",
            engine=None,
            enable_ssd_offload=False,
            ssd_offload_path="",
            tenant_id="default",
            enable_client_http_server=False,
            client_http_port=9300,
        ),
        ("", ""),
        "int",
        INVALID,
    ),
    "setup_dummy": Call(
        needs("mem_pool_size", "local_buffer_size", "server_address"),
        (0, 0, "no address: at all"),
        "int",
        -1,
    ),
    "init_all": Call(
        needs("protocol", "device_name", mount_segment_size=16777216),
        ("foo", ""),
        "int",
        INVALID,
    ),
    "close": Call(needs(), (), "int", 0),
    "health_check": Call(needs(), (), "int", 1),
    "get_hostname": Call(needs(), (), "str", ""),
    "put": Call(needs("key", "value", config=None), ("k", b"v"), "int", INVALID),
    "get": Call(needs("key"), ("k",), "bytes", b""),
    "put_batch": Call(needs("keys", "values", config=None), (["k"], [b"v"]), "int", INVALID),
    "get_batch": Call(needs("keys"), (["k"],), "list[bytes]", [b""]),
    "upsert": Call(needs("key", "value", config=None), ("k", b"v"), "int", INVALID),
    "upsert_batch": Call(needs("keys", "values", config=None), (["k"], [b"v"]), "int", INVALID),
    "put_parts": Call(needs("key", config=None), ("k", b"v"), "int", INVALID, variadic=True),
    "upsert_parts": Call(needs("key", config=None), ("k", b"v"), "int", INVALID, variadic=True),
    "is_exist": Call(needs("key", options=None), ("k",), "int", INVALID),
    "batch_is_exist": Call(needs("keys", options=None), (["k", "l"],), "list[int]", [INVALID] * 2),
    "get_size": Call(needs("key"), ("k",), "int", INVALID),
    "remove": Call(needs("key", force=False), ("k",), "int", INVALID),
    "batch_remove": Call(needs("keys", force=False), (["k", "l"],), "list[int]", [INVALID] * 2),
    "remove_by_regex": Call(
        needs("regex_pattern", force=False),
        ("k",),
        "int",
        INVALID,
        {"regex": "regex_pattern", "pattern": "regex_pattern"},
    ),
    "remove_all": Call(needs(force=False), (), "int", INVALID),
    "register_buffer": Call(needs("buffer_ptr", "size"), (4096, 8), "int", INVALID),
    "unregister_buffer": Call(needs("buffer_ptr"), (4096,), "int", INVALID),
    "put_from": Call(needs("key", "buffer_ptr", "size", config=None), ("k", 1, 1), "int", INVALID),
    "upsert_from": Call(
        needs("key", "buffer_ptr", "size", config=None), ("k", 1, 1), "int", INVALID
    ),
    "put_from_with_metadata": Call(
        needs("key", "buffer_ptr", "metadata_buffer_ptr", "size", "metadata_size", config=None),
        ("k", 1, 1, 1, 1),
        "int",
        INVALID,
    ),
    "get_into": Call(needs("key", "buffer_ptr", "size"), ("k", 4096, 8), "int", INVALID),
    "batch_put_from": Call(
        needs("keys", "buffer_ptrs", "sizes", config=None),
        (["k"], [1], [1]),
        "list[int]",
        [INVALID],
    ),
    "batch_upsert_from": Call(
        needs("keys", "buffer_ptrs", "sizes", config=None),
        (["k"], [1], [1]),
        "list[int]",
        [INVALID],
    ),
    "batch_get_into": Call(
        needs("keys", "buffer_ptrs", "sizes"), (["k"], [1], [1]), "list[int]", [INVALID]
    ),
    "batch_put_from_multi_buffers": Call(
        needs("keys", "all_buffer_ptrs", "all_sizes", config=None),
        (["k"], [[1]], [[1]]),
        "list[int]",
        [],
        {"all_ptrs": "all_buffer_ptrs", "sizes": "all_sizes"},
    ),
    "batch_get_into_multi_buffers": Call(
        needs("keys", "all_buffer_ptrs", "all_sizes", prefer_alloc_in_same_node=False),
        (["k"], [[1]], [[1]]),
        "list[int]",
        [INVALID],
        {"all_ptrs": "all_buffer_ptrs", "sizes": "all_sizes"},
    ),
    "get_into_ranges": Call(
        needs("buffer_ptrs", "all_keys", "all_dst_offsets", "all_src_offsets", "all_sizes"),
        RANGES,
        "list[list[list[int]]]",
        [[[INVALID], [INVALID] * 2]],
    ),
    "batch_get_session_start": Call(needs("keys"), (["k"],), "list[int]", []),
    "batch_get_into_multi_buffer_ranges": Call(
        needs("keys", "all_buffer_ptrs", "all_sizes", "all_src_offsets"),
        (["k"], [[1]], [[1]], [[0]]),
        "list[int]",
        [INVALID],
    ),
    "batch_get_session_end": Call(needs("keys"), (["k"],), "int", -1),
    "batch_put_session_start": Call(
        needs("keys", "sizes", config=None), (["k"], [1]), "list[int]", [INVALID]
    ),
    "batch_put_from_multi_buffer_ranges": Call(
        needs("keys", "all_buffer_ptrs", "all_sizes", "all_dst_offsets"),
        (["k"], [[1]], [[1]], [[0]]),
        "list[int]",
        [INVALID],
    ),
    "batch_put_session_end": Call(needs("keys"), (["k"],), "list[int]", [INVALID]),
    "batch_put_session_revoke": Call(needs("keys"), (["k"],), "list[int]", [INVALID]),
    "get_buffer": Call(needs("key"), ("k",), "BufferHandle | None", None),
    "batch_get_buffer": Call(needs("keys"), (["k"],), "list[BufferHandle | None]", [None]),
    "alloc_from_mem_pool": Call(needs("size"), (8,), "int", 0),
    "get_offload_rpc_read_count": Call(needs(), (), "int", 0),
    "get_replica_desc": Call(needs("key"), ("k",), "list[ReplicaDescriptor]", []),
    "batch_get_replica_desc": Call(
        needs("keys"), (["k"],), "dict[str, list[ReplicaDescriptor]]", {}
    ),
    "batch_replica_clear": Call(needs("keys", segment_name=""), (["k"],), "list[str]", []),
    "create_copy_task": Call(
        needs("key", "targets"),
        ("k", ["s"]),
        "tuple[tuple[int, int], int]",
        ((0, 0), INVALID),
    ),
    "create_move_task": Call(
        needs("key", "source", "target"),
        ("k", "s", "t"),
        "tuple[tuple[int, int], int]",
        ((0, 0), INVALID),
    ),
    "query_task": Call(
        needs("task_id"),
        ((0, 1),),
        "tuple[QueryTaskResponse | None, int]",
        (None, INVALID),
    ),
    "mount_segment": Call(
        needs("path", "size", offset=0, protocol="tcp", location=""),
        ("/nowhere", 1),
        "dict[str, Any]",
        {"ret": -1, "segment_ids": []},
    ),
    "unmount_segment": Call(needs("segment_ids", grace_period_seconds=0), (["1-2"],), "int", -1),
    "allocate_and_mount_segment": Call(
        needs("size", protocol="tcp", location=""),
        (1,),
        "dict[str, Any]",
        {"ret": -1, "segment_ids": [], "allocated_size": 0},
    ),
    "unmount_and_free_segment": Call(
        needs("segment_ids", grace_period_seconds=0), (["1-2"],), "int", -1
    ),
    "unmount_local_disk_segment": Call(needs(grace_period_seconds=0), (), "int", -1),
}

# Fields of `ReplicateConfig`: the default, another valid value, an invalid value.
FIELDS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "replica_num": (1, 3, -1),
    "with_soft_pin": (False, True, "yes"),
    "soft_pin_ttl_ms": (None, 1000, "long"),
    "with_hard_pin": (False, True, "yes"),
    "preferred_segments": ([], ["a:1"], "a:1"),
    "preferred_segment": ("", "a:1", 5),
    "prefer_alloc_in_same_node": (False, True, "node-7"),
    "group_ids": (None, ["g", ""], "g"),
    "nof_replica_num": (0, 1, -1),
    "dfs_replica_num": (0, 1, -1),
    "preferred_nof_segments": ([], ["n"], "n"),
}

ENUMS: Final[dict[str, list[str]]] = {
    "ReplicaStatus": ["UNDEFINED", "INITIALIZED", "PROCESSING", "COMPLETE", "REMOVED", "FAILED"],
    "TaskStatus": ["PENDING", "PROCESSING", "FAILED", "SUCCESS"],
    "TaskType": ["REPLICA_COPY", "REPLICA_MOVE"],
    "SoftPinAction": ["PRESERVE", "ENABLE", "DISABLE"],
    "ObjectDataType": [
        "UNKNOWN",
        "KVCACHE",
        "TENSOR",
        "WEIGHT",
        "SAMPLE",
        "ACTIVATION",
        "GRADIENT",
        "OPTIMIZER_STATE",
        "METADATA",
        "GENERAL",
    ],
}

# Members that are also attributes of the module, each with its enumeration.
EXPORTED: Final[dict[str, str]] = {
    **dict.fromkeys(["UNDEFINED", "INITIALIZED", "COMPLETE", "REMOVED"], "ReplicaStatus"),
    **dict.fromkeys(ENUMS["TaskStatus"], "TaskStatus"),
    **dict.fromkeys(ENUMS["TaskType"], "TaskType"),
    **dict.fromkeys(ENUMS["ObjectDataType"], "ObjectDataType"),
}

CLASSES: Final = [
    "MooncakeDistributedStore",
    "ReplicateConfig",
    *ENUMS,
    "QueryTaskResponse",
    "ReplicaDescriptor",
    "MemoryDescriptor",
    "DiskDescriptor",
    "Descriptor",
    "BufferHandle",
    "BufferPool",
    "BufferLease",
    "BufferLeaseView",
    "RegisteredBufferPool",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "MooncakeHostMemAllocator",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
    "MooncakeDistributedNoFRegister",
    "EngramStore",
    "EngramStoreConfig",
    "_get_pyclient_from_wrapper",
    "_serialize_tensor",
    "_deserialize_tensor",
    "_tensor_metadata_size",
]
