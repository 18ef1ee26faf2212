"""Checks `mooncake.engine` against a table of upstream's names and parameters.

The table has, for each call, the parameters with upstream's names and defaults, and then the other
names that upstream's documents use for them.
"""

from __future__ import annotations

import inspect

import pytest

import mooncake.engine
from mooncake.engine import (
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    SharedSegment,
    TransferEngine,
    create_rpc_client,
    create_rpc_server,
)

ATTRIBUTES = [
    *("CoroRPCInterface", "InnerTransferEngine", "Read", "ReceivedData", "ReceivedTensor"),
    *("RpcInterface", "SUPPORT_CUDA", "SUPPORT_EFA", "SUPPORT_HIP", "SUPPORT_INTRA_NVLINK"),
    *("SUPPORT_MNNVL", "SUPPORT_MUSA", "SharedSegment", "TransferEngine", "TransferNotify"),
    *("TransferOpcode", "Write", "create_rpc_client", "create_rpc_server"),
]

START = "local_hostname metadata_server protocol device_name"
SINGLE = "target_hostname buffer peer_buffer_address length"
BATCH = "target_hostname buffers peer_buffer_addresses lengths"
HINT = "transport_hint=''"
ONE = {"target": "target_hostname", "peer_addr": "peer_buffer_address"}
MANY = {"target": "target_hostname", "peer_addrs": "peer_buffer_addresses"}
HOST = {"hostname": "local_hostname"}
LIST = {"addresses": "buffer_addresses"}

ENGINE = {
    "initialize": (START, HOST),
    "initialize_ext": (f"{START} metadata_type", HOST),
    "get_rpc_port": ("", {}),
    "get_engine": ("", {}),
    "get_engine_ptr": ("", {}),
    "get_local_topology": ("device_name=None", {}),
    "register_memory": ("buffer_addr capacity location='*'", {}),
    "unregister_memory": ("buffer_addr", {}),
    "batch_register_memory": ("buffer_addresses capacities location='*'", LIST),
    "batch_unregister_memory": ("buffer_addresses", LIST),
    "allocate_managed_buffer": ("length", {}),
    "free_managed_buffer": ("buffer_addr length", {"ptr": "buffer_addr"}),
    "write_bytes_to_buffer": ("dest_address src_ptr length", {}),
    "read_bytes_from_buffer": ("source_address length", {}),
    "get_first_buffer_address": ("segment_name", {}),
    "transfer_sync_write": (f"{SINGLE} {HINT}", ONE),
    "transfer_sync_read": (f"{SINGLE} {HINT}", ONE),
    "transfer_sync": (f"{SINGLE} opcode notify=None {HINT}", ONE),
    "transfer_submit_write": (f"{SINGLE} {HINT}", ONE),
    "transfer_check_status": ("batch_id", {}),
    "batch_transfer_sync_write": (f"{BATCH} {HINT}", MANY),
    "batch_transfer_sync_read": (f"{BATCH} {HINT}", MANY),
    "batch_transfer_sync": (f"{BATCH} opcode notify=None {HINT}", MANY),
    "batch_transfer_async_write": (f"{BATCH} {HINT}", MANY),
    "batch_transfer_async_read": (f"{BATCH} {HINT}", MANY),
    "batch_transfer_async": (f"{BATCH} opcode {HINT}", MANY),
    "get_batch_transfer_status": ("batch_ids", {}),
    "transfer_write_on_cuda": (f"{SINGLE} stream_ptr=0 {HINT}", ONE),
    "transfer_read_on_cuda": (f"{SINGLE} stream_ptr=0 {HINT}", ONE),
    "batch_transfer_write_on_cuda": (f"{BATCH} stream_ptr=0 {HINT}", MANY),
    "batch_transfer_read_on_cuda": (f"{BATCH} stream_ptr=0 {HINT}", MANY),
    "send_probe": ("peer_server_name", {}),
    "warmup_efa_segment": ("segment_name", {}),
    "get_notifies": ("", {}),
}
CALLER = "listen_address='' thread_count=0 timeout_seconds=30 pool_size=100"
RPC = {
    "initialize": (CALLER, {}),
    "initialize_client": ("pool_size=100 timeout_seconds=30", {}),
    "initialize_server": ("listen_address thread_count=8 timeout_seconds=30", {}),
    "start_server": ("", {}),
    "start_server_async": ("", {}),
    "stop_server": ("", {}),
    "send_data": ("target_address data", {}),
    "send_data_async": ("target_address data loop", {}),
    "send_tensor": ("target_address tensor", {}),
    "send_tensor_async": ("target_address tensor loop", {}),
    "set_data_receive_callback": ("callback", {}),
    "set_tensor_receive_callback": ("callback", {}),
}
WORLD = "name size world_size rank_id owner_rank=0 device_id=0 mmap=True host_register=False"
SHARED = {
    "create": (WORLD, {}),
    "complete": ("blobs", {}),
    "ready": ("", {}),
    "base_addr": ("", {}),
    "device_addr": ("", {}),
    "size": ("", {}),
    "supported": ("mmap=True host_register=False", {}),
}
# Names that upstream's classes do not have.
OWN_NAMES = {"metrics", "metrics_text", "TransferOpcode"}
CLASSES = {TransferEngine: ENGINE, RpcInterface: RPC, SharedSegment: SHARED}
CALLS = [
    pytest.param(cls, name, *row, id=f"{cls.__name__}.{name}")
    for cls, table in CLASSES.items()
    for name, row in table.items()
]


def test_engine_exports_exactly_upstreams_names():
    assert sorted(mooncake.engine.__all__) == sorted(ATTRIBUTES)
    assert mooncake.engine.CoroRPCInterface is RpcInterface
    for cls, table in CLASSES.items():
        calls = {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}
        assert calls - OWN_NAMES == set(table), cls
    members = "data_size get_bytes get_memory_view source_address"
    assert public(ReceivedData) == members.split()
    members = (
        "dtype get_data_as_bytes get_data_size get_memory_view shape source_address total_bytes"
    )
    assert public(ReceivedTensor) == members.split()
    for create in (create_rpc_client, create_rpc_server):
        assert [str(p).partition(":")[0] for p in parameters(create)] == [
            "local_rank",
            "world_size",
        ]
        assert [p.default for p in parameters(create)] == [0, 1]


def public(cls: type) -> list[str]:
    return sorted(name for name in dir(cls) if not name.startswith("_"))


def parameters(call: object) -> list[inspect.Parameter]:
    listed = inspect.signature(call).parameters.values()
    return [parameter for parameter in listed if parameter.name != "self"]


def shown(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"


@pytest.mark.parametrize(("cls", "name", "wanted", "others"), CALLS)
def test_engine_parameters_match_upstream(cls, name, wanted, others):
    call = getattr(cls, name)
    assert " ".join(shown(parameter) for parameter in parameters(call)) == wanted
    for parameter in parameters(call):
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert f"{parameter.name}:" in call.__doc__, "clients read the parameters in the docstring"
    assert call.__doc__.splitlines()[0].endswith(".")


ARGUMENTS = {
    "local_hostname": "127.0.0.1:1",
    "metadata_server": "",
    "protocol": "tcp",
    "device_name": "",
    "metadata_type": "",
    "target_hostname": "127.0.0.1:1",
    "segment_name": "127.0.0.1:1",
    "peer_server_name": "127.0.0.1:1",
    "location": "*",
    "src_ptr": b"",
    "opcode": mooncake.engine.Read,
    "notify": None,
    "transport_hint": "",
    "buffers": [1],
    "peer_buffer_addresses": [1],
    "lengths": [1],
    "buffer_addresses": [4096],
    "capacities": [1],
    "batch_ids": [1],
    "length": 0,
}


@pytest.mark.parametrize(("name", "wanted", "others"), [(n, *row) for n, row in ENGINE.items()])
def test_parameters_accept_their_aliases(name, wanted, others):
    engine = TransferEngine()
    names = [word.partition("=")[0] for word in wanted.split()]
    given = {each: ARGUMENTS.get(each, 4096) for each in names}
    first = answer(engine, name, given)
    assert not isinstance(first, TypeError)
    for other, canonical in others.items():
        renamed = {**given, other: given[canonical]}
        both = answer(engine, name, renamed)
        assert isinstance(both, TypeError)
        assert other in str(both)
        assert canonical in str(both)
        del renamed[canonical]
        assert repr(answer(engine, name, renamed)) == repr(first)
    unknown = answer(engine, name, {**given, "nonsense": 1})
    assert isinstance(unknown, TypeError)
    assert "nonsense" in str(unknown)


def answer(engine: TransferEngine, name: str, arguments: dict[str, object]) -> object:
    try:
        return getattr(engine, name)(**arguments)
    except (TypeError, RuntimeError) as error:
        return error
