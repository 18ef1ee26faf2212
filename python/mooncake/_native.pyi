"""The native module: batches in, batches out.

A failed item is an exception instance at its place in the result; a failed call raises. Keys are
``str`` or ``bytes``; text is encoded as UTF-8.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import (
    Any,
    Generic,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    final,
    overload,
    type_check_only,
)

from typing_extensions import Buffer as _Readable

from mooncake.errors import MooncakeError

# One file: stubtest compares the names defined here with the module, not imported names.
__all__ = [
    "VERSION",
    "AbsentSuffixes",
    "AddressRange",
    "Buffer",
    "CollectiveCompletion",
    "CollectiveContext",
    "CollectiveGroup",
    "Engine",
    "KeyMap",
    "Located",
    "ObjectItemsError",
    "Pending",
    "PutOptions",
    "RdmaDevice",
    "RpcClient",
    "RpcDelivery",
    "RpcServer",
    "Store",
    "at_exit",
    "cgroup_memory",
    "codes",
    "concat_arrays_into",
    "disk_measure",
    "disk_records",
    "disk_verify",
    "disk_wipe",
    "environment",
    "failure",
    "get_columns",
    "get_one",
    "get_values",
    "holds_objects",
    "host_allocator",
    "invalid_variables",
    "is_present",
    "last_error",
    "local_topology",
    "log_to_queue",
    "master_address",
    "port_holder",
    "put_columns",
    "put_one",
    "put_values",
    "rdma_devices",
    "read_grids",
    "read_memory",
    "readable_range",
    "run_daemon",
    "run_master",
    "run_topology_dump",
    "run_transfer_bench",
    "secret_variables",
    "take_log_records",
    "unmount_disks",
    "unsupported_variables",
    "use_exceptions",
    "writable_range",
    "write_memory",
    "xxh3",
]

VERSION: str
"""Version of the package."""

_T = TypeVar("_T")
_Key: TypeAlias = str | bytes
_List: TypeAlias = list
_Ranges: TypeAlias = Sequence[tuple[int, int] | list[tuple[int, int]]]
_Keys: TypeAlias = Sequence[_Key]
_Values: TypeAlias = Sequence[_Readable | Sequence[_Readable | AddressRange]]
_Options: TypeAlias = PutOptions | None
_Ints: TypeAlias = Sequence[int]
_Numbers: TypeAlias = tuple[list[int], MooncakeError | None]
_Columns: TypeAlias = Sequence[_Ints]
_Grid: TypeAlias = tuple[int, int, int, Sequence[tuple[int, int, int]]]

class ObjectItemsError(TypeError):
    """The items of a buffer are Python objects."""

@final
class Buffer:
    """Bytes that own their memory and offer the buffer protocol without a copy."""

    @staticmethod
    def allocate(length: int, alignment: int = ...) -> Buffer:
        """Return zeroed memory at a multiple of the page size and of `alignment`, a power of two.

        Pages take physical memory only when they are touched.
        """

    @property
    def exports(self) -> int:
        """Number of exported views."""

    def ptr(self) -> int:
        """Return the address of the first byte."""

    def size(self) -> int:
        """Return the length in bytes."""

    @property
    def buffer(self) -> memoryview:
        """A view of the bytes."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: SupportsIndex, /) -> int:
        """Return the byte at an index, or a view of a slice."""

    @overload
    def __getitem__(self, index: slice, /) -> memoryview: ...
    @overload
    def __setitem__(self, index: SupportsIndex, value: int, /) -> None:
        """Set the byte at an index, or the bytes of a slice."""

    @overload
    def __setitem__(self, index: slice, value: _Readable, /) -> None: ...
    def __eq__(self, other: object, /) -> bool:
        """Compare the bytes with those of another buffer, or of bytes, bytearray or memoryview."""

    def __hash__(self) -> int:
        """Hash the identity, since the bytes can change."""

    def __dlpack__(self, **options: Any) -> Any:
        """Return the memory as an array of bytes in a capsule, without a copy; needs numpy."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return kind and number of the device: the CPU."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class Engine:
    """A transfer engine. It closes when the last handle or store that uses it is gone."""

    @staticmethod
    def start(
        *,
        name: str,
        metadata: str,
        is_tcp_forced: bool | None = None,
        rdma_devices: str | None = None,
    ) -> Engine:
        """Start an engine that listens and publishes its segment.

        Args:
            name: ``host[:port]`` by which peers reach this process; "" chooses it.
            metadata: ``"P2PHANDSHAKE"`` or the URL of a metadata server.
            is_tcp_forced: Transfer bytes over TCP only; None uses ``MC_FORCE_TCP``.
            rdma_devices: Names of RDMA devices, separated by commas; "" uses all that are active,
                None none. Devices that cannot be used are logged.

        Raises:
            MooncakeError: No port is free, or the metadata server cannot be reached or has another
                live engine of that name.
        """

    def register(self, addresses: _Ints, lengths: _Ints, *, location: str = "*") -> None:
        """Register memory ranges of this process for peers, all or none. Touches no page."""

    def unregister(self, addresses: _Ints) -> None:
        """Unregister ranges by their first addresses. Tries every range, also after a failure."""

    def transfer(
        self,
        segment: str,
        addresses: _Ints,
        peer_addresses: _Ints,
        lengths: _Ints,
        *,
        is_write: bool,
        timeout_s: float,
        notify: tuple[str, str] | None = None,
        hint: str = "",
    ) -> str | None:
        """Transfer a batch between this process and a segment, then notify its owner.

        Args:
            segment: Name by which peers open the segment.
            addresses: Local addresses.
            peer_addresses: Remote addresses.
            lengths: Length of each entry in bytes.
            is_write: True to write to the segment, false to read from it.
            timeout_s: Timeout in seconds, to which a nanosecond per byte is added.
            notify: Name and message for the owner, sent after the bytes.
            hint: Transport to try first: ``"memory"``, ``"shm"`` or ``"tcp"``; "" is the fastest.

        Returns:
            The transport that served; None if the batch was empty.

        Raises:
            MooncakeError: The segment cannot be reached, or a range of it is not registered.
        """

    def transfer_one(
        self,
        segment: str,
        address: int,
        peer_address: int,
        length: int,
        is_write: bool,
        timeout_s: float,
        hint: str,
        /,
    ) -> None:
        """Transfer one range between this process and a segment; a batch of one without lists."""

    def transfer_on_stream(
        self,
        segment: str,
        addresses: _Ints,
        peer_addresses: _Ints,
        lengths: _Ints,
        *,
        stream: int,
        is_write: bool,
        timeout_s: float,
        hint: str = "",
    ) -> str | None:
        """Transfer as `transfer` does, in the order of a CUDA stream (0 is the default stream).

        The call waits for the work submitted to the stream before; the timeout starts then.

        Raises:
            MooncakeError: As for `transfer`; also if there is no CUDA driver.
        """

    def submit(
        self,
        segment: str,
        addresses: _Ints,
        peer_addresses: _Ints,
        lengths: _Ints,
        *,
        is_write: bool,
        timeout_s: float,
        hint: str = "",
    ) -> int:
        """Begin what `transfer` does; return the number of the batch, at least 1.

        Raises:
            MooncakeError: The segment cannot be reached, or too many batches are queued.
        """

    def is_done(self, batch: int) -> bool:
        """Return whether a batch has ended; raise if it failed. The outcome is reported once."""

    def wait(self, batches: _Ints) -> None:
        """Wait until all of the batches have ended; raise if one failed."""

    def allocate(self, length: int) -> int:
        """Return the address of a buffer of at least that many bytes that peers can reach."""

    def free(self, address: int, length: int) -> None:
        """Free a buffer that `allocate` returned."""

    def take_notifications(self) -> list[tuple[str, str]]:
        """Take the received notifications (name, message), oldest first."""

    def ranges(self, segment: str, *, timeout_s: float) -> list[tuple[int, int]]:
        """Return address and length of a segment's ranges, in the order of registration."""

    def probe(self, segment: str, *, timeout_s: float) -> None:
        """Raise unless the owner of a segment answers."""

    def snapshot(self) -> dict[str, Any]:
        """Return counters of each transport and peer, and the fill levels of the pools."""

    def metrics_text(self) -> str:
        """Return the counters as Prometheus text."""

    @property
    def segment(self) -> str:
        """Name by which peers open the segment of this engine."""

    @property
    def rpc_port(self) -> int:
        """Port that answers metadata requests of peers."""

    @property
    def identity(self) -> int:
        """Number that is unique among the live engines of this process."""

    @property
    def is_closed(self) -> bool:
        """True if the engine was started before this process was forked."""

@final
class KeyMap:
    """A dictionary by strings in the order of their insertion, for millions of keys.

    A look-up in a large dictionary waits several times for memory that is in no cache. `find`
    overlaps the waits of its keys. The garbage collector does not see the values, which must not
    refer to the map.
    """

    def __init__(self) -> None: ...
    def __contains__(self, key: str, /) -> bool: ...
    def __len__(self) -> int: ...
    def __setitem__(self, key: str, value: Any, /) -> None: ...
    def find(self, keys: Sequence[str]) -> list[Any]:
        """Return the value of each key, None for those that have none."""

    def get(self, key: str) -> Any:
        """Return the value of a key, None if there is none."""

    def items(self) -> list[tuple[str, Any]]:
        """Return the keys and their values."""

    def pop(self, key: str) -> Any:
        """Remove a key; return its value, None if there was none."""

@final
class AbsentSuffixes:
    """Ends of keys with which no object may exist beside one that is put: at most 8."""

    def __new__(cls, suffixes: Sequence[bytes]) -> AbsentSuffixes:
        """Make a condition of puts."""

@final
class Located:
    """One version of an object and where its copies are, to read ranges of it.

    Reads find the copies again if they were moved; they fail once the object was replaced.
    """

    @property
    def key(self) -> bytes:
        """Key of the object."""

    @property
    def size(self) -> int:
        """Length of the object in bytes."""

    @property
    def version(self) -> int:
        """Number that changes when the object is replaced."""

@type_check_only
class Begun(int, Generic[_T]):
    """The number of a call of `Pending`, with the type of its outcome."""

@final
class AddressRange:
    """Memory of a device, or at a bare address, as a part of a value that `Store.put` stores."""

    def __new__(cls, address: int, length: int, owner: object) -> AddressRange:
        """Name memory that an object keeps."""

@final
class Pending:
    """The calls in flight of one event loop: begun here, made by native threads, taken later.

    Each call returns a number; `take` returns its outcome under that number.
    """

    def __new__(cls, store: Store) -> Pending:
        """Make an empty set of calls. Outcomes that are never taken are kept."""

    def within(self, timeout_s: float) -> Pending:
        """Return the same calls with a limit for the duration of each call."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when outcomes can be taken."""

    def take(self) -> Sequence[tuple[int, Any]]:
        """Take the delivered outcomes: the number of each call, and its value or its exception."""

    # Not generated: the blocking `read_grids` is a function, and its arguments differ. Its caller
    # keeps the memory alive. Here the call does, by `owner`; the memory need not be registered.
    def read_grids(
        self,
        keys: _Keys,
        grids: Sequence[Sequence[_Grid]],
        owner: object,
        *,
        lease: bool = True,
        tag: str = "",
    ) -> Begun[_List[tuple[int, int, str] | MooncakeError]]:
        """Begin what `read_grids` does; hold `owner`, whose memory it is, until it is taken."""

    # Generated from `Store` by scripts/generate_native_calls.py, to the end of the class

    def put(
        self,
        keys: _Keys,
        values: _Values,
        *,
        options: _Options = None,
        is_upsert: bool = False,
        if_absent: _Keys | AbsentSuffixes | None = None,
    ) -> Begun[_List[bool | MooncakeError]]:
        """Begin what `Store.put` does. The memory is held until it is taken."""

    def get(self, keys: _Keys, *, lease: bool = True) -> Begun[_List[bytes | MooncakeError]]:
        """Begin what `Store.get` does."""

    def get_buffers(
        self, keys: _Keys, *, is_signed: bool = False, lease: bool = True
    ) -> Begun[_List[Buffer | MooncakeError]]:
        """Begin what `Store.get_buffers` does."""

    def read_into(
        self, keys: _Keys, buffers: Sequence[_Readable], *, lease: bool = True
    ) -> Begun[_List[int | MooncakeError]]:
        """Begin what `Store.read_into` does. The memory is held until it is taken."""

    def locate(self, keys: _Keys, *, lease: bool = True) -> Begun[_List[Located | MooncakeError]]:
        """Begin what `Store.locate` does."""

    def read_located(self, located: Located, offset: int, length: int) -> Begun[bytes]:
        """Begin what `Store.read_located` does."""

    def read_located_into(self, located: Located, offset: int, buffer: _Readable) -> Begun[int]:
        """Begin what `Store.read_located_into` does. The memory is held until it is taken."""

    def exists(
        self, keys: _Keys, *, lease: bool = True, prefetch: bool = False
    ) -> Begun[_List[bool | MooncakeError]]:
        """Begin what `Store.exists` does."""

    def exists_or_suffixed(
        self, keys: _Keys, suffixes: Sequence[bytes]
    ) -> Begun[_List[int | MooncakeError]]:
        """Begin what `Store.exists_or_suffixed` does."""

    def sizes(self, keys: _Keys, *, lease: bool = True) -> Begun[_List[int | MooncakeError]]:
        """Begin what `Store.sizes` does."""

    def describe(self, keys: _Keys) -> Begun[_List[dict[str, Any] | MooncakeError]]:
        """Begin what `Store.describe` does."""

    def set_expiry(self, keys: _Keys, ttl_ms: int | None) -> Begun[_List[bool | MooncakeError]]:
        """Begin what `Store.set_expiry` does."""

    def remove(
        self,
        keys: _Keys,
        *,
        force: bool = False,
        spare_pinned: bool = False,
        if_version: int | None = None,
    ) -> Begun[_List[bool | MooncakeError]]:
        """Begin what `Store.remove` does."""

    def remove_matching(
        self,
        *,
        regex: str | None = None,
        prefix: bytes | None = None,
        force: bool = False,
        spare_pinned: bool = False,
    ) -> Begun[tuple[int, int, int, int]]:
        """Begin what `Store.remove_matching` does."""

    def segments(self) -> Begun[Sequence[dict[str, Any]]]:
        """Begin what `Store.segments` does."""

    def status(self) -> Begun[dict[str, Any]]:
        """Begin what `Store.status` does."""

    def health(self) -> Begun[None]:
        """Begin what `Store.health` does."""

    def replicas(
        self, keys: _Keys, *, lease: bool = True
    ) -> Begun[_List[_List[dict[str, Any]] | MooncakeError]]:
        """Begin what `Store.replicas` does."""

    def copy_object(self, key: _Key, targets: Sequence[str]) -> Begun[tuple[int, int]]:
        """Begin what `Store.copy_object` does."""

    def move_object(self, key: _Key, source: str, target: str) -> Begun[tuple[int, int]]:
        """Begin what `Store.move_object` does."""

    def task(self, task_id: tuple[int, int]) -> Begun[dict[str, Any]]:
        """Begin what `Store.task` does."""

    def drain(
        self,
        segments: Sequence[str],
        *,
        targets: Sequence[str] = ...,
        concurrency: int = 0,
        may_evict: bool = False,
    ) -> Begun[dict[str, Any]]:
        """Begin what `Store.drain` does."""

    def drain_info(self, job_id: tuple[int, int]) -> Begun[dict[str, Any]]:
        """Begin what `Store.drain_info` does."""

    def cancel_drain(self, job_id: tuple[int, int]) -> Begun[dict[str, Any]]:
        """Begin what `Store.cancel_drain` does."""

    def list(
        self, *, prefix: bytes = ..., after: bytes | None = None, limit: int = 0
    ) -> Begun[tuple[Sequence[tuple[bytes, int, bool, int, int]], bool]]:
        """Begin what `Store.list` does."""

@final
class PutOptions:
    """Options of puts. Immutable; may be used for any number of puts."""

    def __new__(
        cls,
        *,
        replicas: int = 1,
        soft_pin: str = "preserve",
        soft_pin_ttl_ms: int | None = None,
        is_hard_pinned: bool = False,
        preferred_segments: Sequence[str] = ...,
        prefers_own_segments: bool = False,
        data_type: int = 0,
        groups: Sequence[str] | None = None,
        ttl_ms: int | None = None,
        tags: Mapping[str, str] = ...,
        if_versions: Sequence[int] | None = None,
    ) -> PutOptions:
        """Validate the options.

        Args:
            replicas: Number of copies, each on another segment; fewer if there are not enough
                segments.
            soft_pin: ``"enable"`` protects the objects from eviction for a while, ``"disable"``
                ends that, ``"preserve"`` leaves it unchanged.
            soft_pin_ttl_ms: Duration of a soft pin; None uses the master's default.
            is_hard_pinned: True if the objects must never be evicted.
            preferred_segments: Names of segments to use first.
            prefers_own_segments: True to use the segments of this process first.
            data_type: Kind of data, as a number that only callers interpret.
            groups: Group of each item of the batch, kept or evicted as a whole; "" for none.
            ttl_ms: Time after which the objects are removed; None: never.
            tags: Text stored beside each object: at most 32 names and values, 1 KiB in all.
            if_versions: Version that each item of the batch replaces; 0 for any. Existing objects
                of other versions are kept.

        Raises:
            InvalidArgumentError: An option is out of range.
        """

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        """Return the arguments of the constructor, with which copies and pickles are made."""

    @property
    def replicas(self) -> int:
        """Number of copies."""

    @property
    def soft_pin(self) -> str:
        """``"preserve"``, ``"enable"`` or ``"disable"``."""

    @property
    def soft_pin_ttl_ms(self) -> int | None:
        """Duration of a soft pin."""

    @property
    def is_hard_pinned(self) -> bool:
        """True if the objects are never evicted."""

    @property
    def preferred_segments(self) -> list[str]:
        """The names of segments to use first."""

    @property
    def prefers_own_segments(self) -> bool:
        """True if the segments of this process are used first."""

    @property
    def data_type(self) -> int:
        """Kind of data."""

    @property
    def groups(self) -> list[str] | None:
        """Group of each item."""

    @property
    def ttl_ms(self) -> int | None:
        """Time after which the objects are removed."""

    @property
    def tags(self) -> dict[str, str]:
        """Text stored beside each object."""

    @property
    def if_versions(self) -> Sequence[int] | None:
        """Version that each item of the batch replaces."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Store:
    """A handle on a pool of memory."""

    @staticmethod
    def connect(
        *,
        master: str,
        name: str = ...,
        metadata: str = ...,
        segment_bytes: int = 0,
        tenant: str = ...,
        refuses_ignored_tenant: bool = True,
        disks: list[tuple[str, int | None]] = ...,
        is_tcp_forced: bool | None = None,
        rdma_devices: str | None = None,
        rpc_timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        transfer_timeout_s: float | None = None,
        retry_s: float | None = None,
        fails_as_upstream: bool = False,
        listen: str = ...,
        has_checksums: bool | None = None,
        http_port: int | None = None,
        token: str | None = None,
        prefetch: tuple[bool, float, float, float] | None = None,
        engine: Engine | None = None,
    ) -> Store:
        """Join a pool, or start one with a master in this process.

        Args:
            master: ``host:port`` of the master, or ``"embedded"``.
            name: ``host[:port]``, the name of this process's segments; "" chooses it.
            metadata: ``"P2PHANDSHAKE"`` or the URL of a metadata server.
            segment_bytes: Memory to lend to the pool.
            tenant: Tenant in whose namespace the keys are.
            refuses_ignored_tenant: Refuse a master that ignores tenants, if another tenant than the
                default one is named; False logs a warning.
            disks: Directories in which this process keeps copies of objects for the pool, each with
                the bytes that it may take (None: 90 % of what is free). An empty path stands for
                the directories that the environment names.
            is_tcp_forced: Transfer bytes over TCP only; None uses ``MC_FORCE_TCP``.
            rdma_devices: RDMA devices as for `Engine.start`.
            rpc_timeout_s: Timeout of a call to the master; None uses the environment.
            connect_timeout_s: Timeout for connecting to the master; None uses the environment.
            transfer_timeout_s: Timeout of the transfers of a call; None uses the environment.
            retry_s: Time during which a call to the master is repeated after its first failure,
                and waits for a master that is away; None is 2 s.
            fails_as_upstream: Let calls fail at once while the connection to the master is known
                to be lost, instead of waiting for `retry_s`; and report an object whose holders
                have all lost their connection as a failed transfer, instead of as absent.
            listen: ``host[:port]`` for an embedded master; "" is loopback and a free port.
            has_checksums: Store a checksum with objects and verify it when they are read whole;
                None uses ``MOONCAKE_STORE_CHECKSUM``.
            http_port: Port that serves health and metrics over HTTP; 0 takes a free port, None
                disables the server.
            token: Token of the master; None uses ``MOONCAKE_MASTER_TOKEN``.
            prefetch: Whether probes may prefetch, and three times in seconds: for which an object
                is not asked for again, for which it is not after a failure, and for which a read
                waits for an object that was asked for; None takes the defaults.
            engine: Engine to share; None starts a separate one.

        Raises:
            MooncakeError: The master cannot be reached, an argument is invalid, or there is no
                memory.
        """

    @staticmethod
    def connect_daemon(
        daemon: str,
        *,
        pool_bytes: int = 0,
        is_tcp_forced: bool | None = None,
        rpc_timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        transfer_timeout_s: float | None = None,
        retry_s: float | None = None,
        fails_as_upstream: bool = False,
        has_checksums: bool | None = None,
        http_port: int | None = None,
    ) -> Store:
        """Join a pool as a dummy client of the daemon of this host, which is at ``host[:port]``.

        `allocate_from_pool` allocates from a pool of `pool_bytes`; the other arguments are those of
        `connect`.

        Raises:
            MooncakeError: No daemon answers at that address, it cannot reach its master, or there
                is no memory.
        """

    def within(self, timeout_s: float) -> Store:
        """Return the same store with a limit for the duration of each call."""

    def allocate_from_pool(self, length: int) -> int:
        """Allocate pages of a dummy client, valid while the store is open; return their address.

        Raises:
            MooncakeError: The pool is exhausted, or the store is not a dummy client.
        """

    def close(self) -> None:
        """Leave the pool. Idempotent."""

    def put_versions(
        self,
        keys: _Keys,
        values: _Values,
        *,
        options: _Options = None,
        is_upsert: bool = False,
        if_absent: _Keys | AbsentSuffixes | None = None,
    ) -> list[int | MooncakeError]:
        """Put values: the version of each new object, 0 where an existing object was kept."""

    def put_from(
        self, keys: _Keys, ranges: _Ranges, *, options: _Options = None, is_upsert: bool = False
    ) -> list[bool | MooncakeError]:
        """Put values from ``(address, length)`` ranges."""

    def get_into(
        self, keys: _Keys, ranges: _Ranges, *, is_exact: bool = False, lease: bool = True
    ) -> list[int | MooncakeError]:
        """Get objects into memory at addresses; return their lengths.

        With `is_exact` the memory must be exactly as large as the object.
        """

    def get_parts(
        self,
        keys: _Keys,
        bases: _Ints,
        destinations: _Columns,
        offsets: _Columns,
        lengths: _Columns,
        *,
        is_registered: bool = False,
    ) -> list[list[int | MooncakeError] | MooncakeError]:
        """Get parts of objects into memory: one call to the master, one transfer per peer.

        Args:
            keys: Key of each row; a key may occur in several rows.
            bases: Address to which the destinations of the row are relative.
            destinations: Destination of each part of the row, relative to its base.
            offsets: Offset of each part in the object.
            lengths: Length of each part in bytes; 0 reads nothing and succeeds.
            is_registered: Refuse parts whose destination is not in one registered range.

        Returns:
            For each row the length of each part, or the failure of the whole row.
        """

    def begin_reads(self, keys: _Keys) -> list[bool | MooncakeError]:
        """Locate objects, for `read_begun`. Objects that were located before are located again."""

    def read_begun(
        self, keys: _Keys, addresses: _Columns, offsets: _Columns, lengths: _Columns
    ) -> list[int | MooncakeError]:
        """Get parts of objects that `begin_reads` located; return the bytes read of each object."""

    def end_reads(self, keys: _Keys) -> None:
        """Forget the locations of objects; keys that were not located are ignored."""

    def begin_writes(
        self,
        keys: _Keys,
        lengths: _Ints,
        *,
        options: _Options = None,
        is_upsert: bool = False,
        if_absent: _Keys | AbsentSuffixes | None = None,
    ) -> list[bool | MooncakeError]:
        """Reserve space for objects, for `write_begun`; an existing object is a failure."""

    def write_begun(
        self, keys: _Keys, addresses: _Columns, offsets: _Columns, lengths: _Columns
    ) -> list[int | MooncakeError]:
        """Write parts of objects that `begin_writes` reserved; return the bytes of each object."""

    def end_writes(self, keys: _Keys, *, is_revoked: bool = False) -> list[bool | MooncakeError]:
        """Make written objects readable, or give their space back."""

    def clear_replicas(self, keys: _Keys, *, segment: str = ...) -> list[bool | MooncakeError]:
        """Drop the copies in segments of that name, or all; return whether a copy was dropped."""

    def presence(self, keys: _Keys, *, lease: bool = True, prefetch: bool = False) -> _Numbers:
        """Do what `exists` does, with numbers: 1, 0 or an error code; and the last failure."""

    def metrics(self) -> dict[str, Any]:
        """Return the counters of this client."""

    def metrics_text(self) -> str:
        """Return the counters as Prometheus text."""

    @property
    def http_address(self) -> str | None:
        """Address of the HTTP server for health and metrics, as ``host:port``."""

    def register_buffer(self, address: int, length: int) -> None:
        """Register memory of this process for peers. Touches no page."""

    def unregister_buffer(self, address: int) -> None:
        """Unregister memory by its first address. Raise ``BusyError`` if a peer may access it."""

    def mount(self, length: int) -> Sequence[str]:
        """Lend more memory to the pool, as one segment or several; return their ids."""

    def mount_file(self, path: str, length: int, *, offset: int = 0, location: str = "*") -> str:
        """Lend a part of a file to the pool; return the id of the segment.

        Objects are written into the file, from an offset on that is a multiple of the page size.
        """

    def unmount(self, segment: str, *, grace_s: float = 0.0) -> None:
        """Unmount a segment, which is readable but takes no objects during a grace period."""

    @property
    def hostname(self) -> str:
        """Name of this client's segments."""

    @property
    def master_address(self) -> str:
        """Address of the master; other processes join with it."""

    @property
    def is_dummy(self) -> bool:
        """True for a dummy client, which reaches the master through the daemon of this host."""

    @property
    def is_embedded(self) -> bool:
        """True if the master runs in this process, for this store."""

    @property
    def is_closed(self) -> bool:
        """True if the store was closed, or opened before this process was forked."""

    # Calls of `Pending` and of event loops, too: `make generate` writes them again.

    def put(
        self,
        keys: _Keys,
        values: _Values,
        *,
        options: _Options = None,
        is_upsert: bool = False,
        if_absent: _Keys | AbsentSuffixes | None = None,
    ) -> list[bool | MooncakeError]:
        """Put values: true where the value was stored, false where an existing object was kept.

        A value is a contiguous buffer, or a list or tuple of buffers that make up one object. The
        memory is read in place during the call. If an object of `if_absent` is readable, nothing is
        put, and each outcome is an `AlreadyExistsError`; a batch that takes several calls makes the
        check in each. With `AbsentSuffixes` that is the outcome of the items beside which there is
        such an object.
        """

    def get(self, keys: _Keys, *, lease: bool = True) -> list[bytes | MooncakeError]:
        """Get objects as bytes; lease them unless `lease` is false."""

    def get_buffers(
        self, keys: _Keys, *, is_signed: bool = False, lease: bool = True
    ) -> list[Buffer | MooncakeError]:
        """Get objects as buffers of unsigned (format B) or signed (format b) bytes."""

    def read_into(
        self, keys: _Keys, buffers: Sequence[_Readable], *, lease: bool = True
    ) -> list[int | MooncakeError]:
        """Get objects into writable buffers, one for each key; return their lengths."""

    def locate(self, keys: _Keys, *, lease: bool = True) -> list[Located | MooncakeError]:
        """Locate objects, to read ranges of them; lease them unless `lease` is false."""

    def read_located(self, located: Located, offset: int, length: int) -> bytes:
        """Read a range of a located object."""

    def read_located_into(self, located: Located, offset: int, buffer: _Readable) -> int:
        """Read a range of a located object into a writable buffer; return the buffer's length."""

    def exists(
        self, keys: _Keys, *, lease: bool = True, prefetch: bool = False
    ) -> list[bool | MooncakeError]:
        """Return which objects exist and are complete; lease them unless `lease` is false.

        With `prefetch` the pool brings objects into memory that only a disk has. The call does not
        wait for that.
        """

    def exists_or_suffixed(
        self, keys: _Keys, suffixes: Sequence[bytes]
    ) -> list[int | MooncakeError]:
        """Look for objects with the keys, or else with keys that are these with a suffix.

        Return 1 for an object with the key itself, else the sum of ``2 << n`` for each suffix
        ``n``. Lease none.
        """

    def sizes(self, keys: _Keys, *, lease: bool = True) -> list[int | MooncakeError]:
        """Return the lengths of objects; lease them unless `lease` is false."""

    def describe(self, keys: _Keys) -> list[dict[str, Any] | MooncakeError]:
        """Return what the master knows of objects: version, size, expiry, tags and pins."""

    def set_expiry(self, keys: _Keys, ttl_ms: int | None) -> list[bool | MooncakeError]:
        """Let objects expire after a time from now; None: never."""

    def remove(
        self,
        keys: _Keys,
        *,
        force: bool = False,
        spare_pinned: bool = False,
        if_version: int | None = None,
    ) -> list[bool | MooncakeError]:
        """Remove objects, or those that have a version; with `force` also leased ones."""

    def remove_matching(
        self,
        *,
        regex: str | None = None,
        prefix: bytes | None = None,
        force: bool = False,
        spare_pinned: bool = False,
    ) -> tuple[int, int, int, int]:
        """Remove all objects, or those that a regex or a prefix selects.

        Returns:
            Number of removed ones, and of those that stayed: leased, hard-pinned, being copied.
        """

    def segments(self) -> Sequence[dict[str, Any]]:
        """Return the segments of the pool."""

    def status(self) -> dict[str, Any]:
        """Return the status of the master."""

    def health(self) -> None:
        """Raise unless the master answers and knows this client."""

    def replicas(
        self, keys: _Keys, *, lease: bool = True
    ) -> list[list[dict[str, Any]] | MooncakeError]:
        """Describe the copies of objects; lease the objects unless `lease` is false.

        Returns:
            For each copy ``replica``, ``segment_id``, ``segment``, ``endpoint``, ``address`` (in
            its owner's process) and ``size``.
        """

    def copy_object(self, key: _Key, targets: Sequence[str]) -> tuple[int, int]:
        """Create a task that copies an object to more segments; return its id."""

    def move_object(self, key: _Key, source: str, target: str) -> tuple[int, int]:
        """Create a task that moves a copy of an object to another segment; return its id."""

    def task(self, task_id: tuple[int, int]) -> dict[str, Any]:
        """Return the state of a task.

        Returns:
            ``id``, ``kind``, ``status``, ``created_at_ms``, ``updated_at_ms``, ``client`` and
            ``message``.
        """

    def drain(
        self,
        segments: Sequence[str],
        *,
        targets: Sequence[str] = ...,
        concurrency: int = 0,
        may_evict: bool = False,
    ) -> dict[str, Any]:
        """Start a drain of segments into the targets, or anywhere; return its state."""

    def drain_info(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """Return the state of a drain."""

    def cancel_drain(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """Cancel a drain; its segments accept objects again."""

    def list(
        self, *, prefix: bytes = ..., after: bytes | None = None, limit: int = 0
    ) -> tuple[Sequence[tuple[bytes, int, bool, int, int]], bool]:
        """Return a page of a listing, and whether it is the last one.

        Returns:
            Key, length, whether it is complete, replicas, and how many of them are on disks.
        """

def at_exit() -> None:
    """Refuse new calls of other threads and close every store and engine. To be called at exit."""

@final
class CollectiveContext:
    """The process's part in collective operations."""

    def __new__(
        cls,
        *,
        global_rank: int,
        host: str,
        coordinator: str | None = None,
        engine: Engine | None = None,
        heartbeat_timeout_us: int = 10_000_000,
        bootstrap_timeout_us: int = 300_000_000,
    ) -> CollectiveContext: ...
    @staticmethod
    def metrics_text() -> str:
        """Return the metrics of all groups of this process as Prometheus text."""

    @staticmethod
    def element_names() -> list[str]:
        """Return the names of the types of elements, by their code; 255 stands for others."""

    @property
    def address(self) -> str:
        """Address of the coordinator."""

    def group(
        self,
        name: str,
        slot: int,
        *,
        declared_size: int,
        max_group_size: int,
        is_extension: bool,
        auto_deactivate: bool,
        first_rank: int,
        timeout_s: float,
    ) -> CollectiveGroup:
        """Make a group, and wait until all founders have made it.

        Args:
            name: Name of the group, the same at all ranks.
            slot: Slot of this process.
            declared_size: Number of founders.
            max_group_size: Number of slots.
            is_extension: Whether this rank joins a group that runs.
            auto_deactivate: Whether lost ranks leave the view, not only the operations.
            first_rank: Global rank of slot 0. It tells groups of one name apart.
            timeout_s: Longest wait for the other founders.

        Raises:
            DeadlineError: Not all of them have made the group in time.
        """

    def close(self) -> None:
        """End connections and threads. Groups must be closed before."""

@final
class CollectiveGroup:
    """A group of processes, as this one sees it. Addresses are those of host memory."""

    def size(self) -> int:
        """Return the highest active slot + 1."""

    def epoch(self) -> int:
        """Return the number of the view."""

    def active_ranks(self) -> list[bool]:
        """Return for each slot whether it is active."""

    def set_mirror(self, address: int) -> None:
        """Show the active slots in memory, one 32-bit integer each, until `close`."""

    def allreduce(
        self, source: int, target: int, count: int, dtype: int, operation: int
    ) -> CollectiveCompletion:
        """Reduce elements over all members."""

    def reduce(
        self, source: int, target: int, count: int, dtype: int, operation: int, root: int
    ) -> CollectiveCompletion:
        """Reduce elements over all members; the root gets the result."""

    def broadcast(
        self, address: int, length: int, root: int, elements: int
    ) -> CollectiveCompletion:
        """Send the bytes of the root to all members. `elements` is the code of their type."""

    def allgather(
        self, source: int, targets: Sequence[int], length: int, elements: int
    ) -> CollectiveCompletion:
        """Gather the bytes of each member at all members."""

    def gather(
        self, source: int, targets: Sequence[int], length: int, root: int, elements: int
    ) -> CollectiveCompletion:
        """Gather the bytes of each member at the root."""

    def scatter(
        self, sources: Sequence[int], target: int, length: int, root: int, elements: int
    ) -> CollectiveCompletion:
        """Send each slot its part of the bytes of the root."""

    def reduce_scatter(
        self,
        sources: Sequence[int],
        counts: Sequence[int],
        target: int,
        count: int,
        dtype: int,
        operation: int,
    ) -> CollectiveCompletion:
        """Reduce a part per slot; this member gets that of its slot."""

    def all_to_all(
        self,
        sources: Sequence[int],
        source_lengths: Sequence[int],
        targets: Sequence[int],
        target_lengths: Sequence[int],
        elements: int,
    ) -> CollectiveCompletion:
        """Send bytes to each slot, and take bytes from each."""

    def barrier(self) -> CollectiveCompletion:
        """Wait for all members."""

    def send(self, address: int, length: int, to: int, tag: int) -> CollectiveCompletion:
        """Send a message; done when the receiver has taken it."""

    def recv(self, address: int, length: int, source: int | None, tag: int) -> CollectiveCompletion:
        """Receive a message of a slot; of any if none is given."""

    def peer_state(self) -> list[bool]:
        """Return for each slot whether its rank is reachable and active, or waits."""

    def cancel_receive(self, completion: CollectiveCompletion) -> bool:
        """Give up a receive unless its bytes arrive just now; return whether it was given up."""

    def cancel_send(self, completion: CollectiveCompletion) -> bool:
        """Withdraw a message unless its receiver has taken it; return whether it was withdrawn."""

    def activate(self, slots: Sequence[int], limit_s: float) -> tuple[int, int, list[int], str]:
        """Make waiting ranks members; return status, epoch, dropped ranks and reason."""

    def deactivate(self, slots: Sequence[int], limit_s: float) -> tuple[int, int, list[int], str]:
        """Take ranks out of the view; return as `activate`."""

    def sync_after_failure(self, limit_s: float) -> bool:
        """Return whether the members have agreed on a loss since the last call."""

    def join(self, timeout_us: int) -> bool:
        """Wait until a member activates this rank; return whether one did."""

    def metrics(self) -> dict[str, Any]:
        """Return what the group did, by name."""

    def close(self) -> None:
        """End the group: operations that are not done fail."""

@final
class CollectiveCompletion:
    """The end of an operation."""

    def start(self) -> None:
        """Let the group carry out the operation without a thread that waits for it."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long and return whether the operation is done."""

    def done(self) -> bool:
        """Return whether the operation is done. Looks for frames of the peers."""

    @property
    def has_ended(self) -> bool:
        """Whether the end was seen already, without a look at the peers."""

    def error(self) -> BaseException | None:
        """Return why the operation failed as a whole."""

    def failed_ranks(self) -> list[int]:
        """Return the slots that were lost while the operation ran."""

    def source(self) -> int | None:
        """Return the slot that a receive got its message from."""

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call back once the operation is done, from a native thread; at once if it is."""

@final
class RdmaDevice:
    """An RDMA device of this machine, and what an engine without named devices would choose."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str | None:
        """State of the port: active, down or waiting; None if the device cannot be opened."""
    @property
    def link_layer(self) -> str | None: ...
    @property
    def megabits_per_second(self) -> int | None: ...
    @property
    def mtu(self) -> int | None: ...
    @property
    def addresses(self) -> list[tuple[int, str, str, str | None]]:
        """Index, address, protocol and network interface of each address."""
    @property
    def limits(self) -> dict[str, int]: ...
    @property
    def chosen(self) -> int | None:
        """Index of the address that would be used."""
    @property
    def reason(self) -> str | None:
        """Why the device would not be used."""

@final
class RpcClient:
    """A client that sends to any number of servers, from any number of threads."""

    def __new__(cls, *, connections_max: int, timeout_s: float) -> RpcClient: ...
    def send(self, target: str, body: _Readable, *, tensor: str | None = None) -> None:
        """Send bytes and wait until the receiver has accepted them; raise if it does not."""

@final
class RpcServer:
    """A server that receives until it is stopped or dropped."""

    def __new__(cls, address: str, *, timeout_s: float) -> RpcServer: ...
    def take(self, *, timeout_s: float) -> RpcDelivery | None:
        """Wait for the next message; None on timeout. Raises once the server is stopped."""

    def stop(self) -> None:
        """Stop listening and end every connection."""

    @property
    def address(self) -> str:
        """Address that the server listens at."""

@final
class RpcDelivery:
    """A received message. The sender sees a refusal if it is dropped without an answer."""

    @property
    def source(self) -> str:
        """Address of the sender."""

    @property
    def tensor(self) -> str | None:
        """Description of dtype and shape, if the body is a tensor."""

    @property
    def body(self) -> Buffer:
        """The payload."""

    def answer(self, refusal: str | None = None) -> None:
        """Accept the message, or refuse it with a reason. Only the first answer counts."""

def codes(*, is_engine: bool = False) -> list[tuple[int, str, str, str]]:
    """Return every error code: number, name, kind ("" for codes of the engine), remedy."""

def disk_measure(path: str | PathLike[str], length: int) -> tuple[float, float, str, str, int]:
    """Write `length` bytes to a directory that is empty or absent, and read them.

    Returns:
        The bytes written and read in a second, "io_uring" or "threads", a text that says why it is
        that, and the number of reads past the page cache that the system refused.
    """

def disk_records(
    path: str | PathLike[str],
) -> tuple[list[tuple[str, bytes, int, int, int, int, bool]], list[tuple[Path, str]]]:
    """Return the records of a directory that no process uses.

    Returns:
        Tenant, key, version, length, extent, offset in it, and whether the extent is sealed; path
        and cause of each extent that cannot be read, of which records may be missing.
    """

def disk_verify(
    path: str | PathLike[str],
) -> tuple[int, int, int, list[tuple[str, bytes, int]], list[tuple[Path, str]]]:
    """Read every record of a directory that no process uses.

    Returns:
        The numbers of extents, of good records and of their bytes, tenant, key and version of each
        damaged record, and path and cause of each extent that cannot be read.
    """

def disk_wipe(path: str | PathLike[str]) -> int:
    """Remove all records of a directory, and its identity; return how many extents it had."""

def unmount_disks(store: Store, grace_s: int) -> None:
    """Take the directories of a store out of the pool.

    Args:
        store: The store.
        grace_s: Seconds during which their records can still be read, while none is added.

    Raises:
        MooncakeError: The store keeps no directory (code -101), or is closed.
    """

def environment() -> list[tuple[str, list[str], str, str, str | None]]:
    """Return every environment variable: name, older names, default, help, current value."""

def unsupported_variables() -> list[tuple[str, str]]:
    """Return the variables of upstream that have no effect here, each with the reason."""

def invalid_variables() -> list[tuple[str, str]]:
    """Return the variables with an invalid value, each with the reason and what the value does."""

def secret_variables() -> list[str]:
    """Return the names of the variables whose values must not be shown."""

def local_topology(wanted: str, *, is_custom: bool = True) -> str:
    """Return which devices are near which memory, as JSON."""

def cgroup_memory() -> tuple[int, int] | None:
    """Return limit and available memory of the control groups in bytes; None without a limit."""

def port_holder(port: int) -> str | None:
    """Return the process that listens at a TCP port of this host; None if it cannot be told."""

def master_address(text: str) -> tuple[str, list[tuple[str, int | None]], str]:
    """Return what an address of a master names, as a store reads it.

    Returns:
        ``"master"``, ``"list"``, ``"etcd"``, ``"redis"`` or ``"k8s"``; the hosts with their ports;
        and the address without a login.

    Raises:
        InvalidArgumentError: It has no known form.
    """

def rdma_devices() -> tuple[list[RdmaDevice], str | None]:
    """Return the RDMA devices of this machine, or the reason why none can be used."""

def is_present(store: Store, key: _Key, *, prefetch: bool = False) -> int:
    """Return 1 if an object exists, which leases it, else 0.

    With `prefetch` an object that only a disk has is brought into memory.
    """

def put_one(
    store: Store, key: _Key, buffer_ptr: int, size: int, options: _Options, is_upsert: bool
) -> int:
    """Put a value from an address; return 0."""

def get_one(store: Store, key: _Key, buffer_ptr: int, size: int) -> int:
    """Get an object into memory; return its length."""

def put_columns(
    store: Store, keys: _Keys, addresses: _Ints, lengths: _Ints, options: _Options, is_upsert: bool
) -> _Numbers:
    """Put values from addresses; return 0 or an error code for each, and the last failure."""

def put_values(
    store: Store, keys: _Keys, values: Sequence[_Readable], options: _Options, is_upsert: bool
) -> _Numbers:
    """Put values of one non-empty buffer each; return codes as `put_columns` does."""

def get_columns(store: Store, keys: _Keys, addresses: _Ints, lengths: _Ints) -> _Numbers:
    """Get objects into memory; return a length or an error code for each, and the last failure."""

def get_values(store: Store, keys: _Keys) -> tuple[list[bytes], MooncakeError | None]:
    """Get objects as bytes, ``b""`` for a failure; also return the last failure."""

def failure(
    code: int,
    text: str,
    *,
    key: _Key | None = None,
    context: dict[str, Any] | None = None,
    remedy: str | None = None,
    is_closed: bool = False,
) -> MooncakeError:
    """Build the exception for a failure found in Python code, and record it as the last error.

    Args:
        code: Upstream's error code.
        text: Beginning of the message, which ends with the values of `context` and with the key.
        key: Key that the failure is about.
        context: Details by name.
        remedy: What usually helps; None is the remedy of the code.
        is_closed: The failure is that of a closed handle.
    """

def concat_arrays_into(
    arrays: Sequence[_Readable],
    dest_ptr: int,
    dest_size: int,
    start: int = 0,
    count: int | None = None,
    nthreads: int = 1,
) -> int:
    """Copy arrays to an address, one after the other, without the GIL.

    Args:
        arrays: Contiguous buffers.
        dest_ptr: Address of the destination.
        dest_size: Length of the destination in bytes.
        start: First array that is copied.
        count: Number of arrays; None or negative for all the rest.
        nthreads: Threads that copy, at most 16.

    Returns:
        The number of bytes.

    Raises:
        InvalidArgumentError: The arrays do not fit, or `start` and `count` are outside of the list.
    """

def holds_objects(codes: bytes) -> bool:
    """Return whether a format of the buffer protocol has Python objects, also in a structure."""

def host_allocator() -> tuple[int, int]:
    """Return the addresses of the C functions that allocate and free host memory."""

def last_error() -> MooncakeError | None:
    """Return the last failure of this thread, also of calls that returned it as a number."""

def log_to_queue() -> None:
    """Send the log to the queue that `take_log_records` drains."""

def read_memory(address: int, length: int) -> bytes:
    """Return the bytes at an address of this process; raise if it is not readable."""

def read_grids(
    store: Store,
    keys: _Keys,
    grids: Sequence[Sequence[_Grid]],
    *,
    is_registered: bool = False,
    lease: bool = True,
    tag: str = "",
) -> list[tuple[int, int, str] | MooncakeError]:
    """Read ranges of objects into memory: one call to the master, one transfer per peer.

    Args:
        store: The store.
        keys: Keys of the objects.
        grids: For each object a list of grids, which are ranges of one length at regular distances.
            A grid is the address of the memory, the offset in the object, and the length of its
            first range; and for each dimension, outermost first, the number of ranges and their
            distances in the object and in memory. Without dimensions it is one range.
        is_registered: Refuse grids whose memory is not in one registered range.
        lease: Lease the objects.
        tag: Name of a tag of the objects; "" for none.

    Returns:
        For each object the number of bytes read, the version of the object, and the value of the
        tag, which is "" if the object does not have it; or the first failure among its ranges.
    """

def readable_range(buffer: _Readable) -> tuple[int, int]:
    """Return address and length of contiguous memory, which the caller keeps alive and reads."""

def run_daemon(arguments: Sequence[str]) -> int:
    """Run the daemon of a host until SIGTERM or SIGINT; return its exit code."""

def run_master(arguments: Sequence[str]) -> int:
    """Run the master until it is stopped; return its exit code."""

def run_topology_dump(arguments: Sequence[str]) -> int:
    """Print the topology of this machine; return the exit code."""

def run_transfer_bench(arguments: Sequence[str]) -> int:
    """Run the benchmark of the transfer engine; return its exit code."""

def take_log_records(*, timeout_s: float) -> tuple[list[tuple[int, str, str]], int]:
    """Wait for log records; return them, and how many were dropped."""

def use_exceptions(classes: dict[str, type[MooncakeError]]) -> None:
    """Set the exception class of each error kind. Only the first call has an effect."""

def xxh3(value: _Readable) -> int:
    """Return the 64-bit XXH3 of a contiguous buffer, computed without the GIL."""

def writable_range(buffer: _Readable) -> tuple[int, int]:
    """Return address and length of writable, contiguous memory, which the caller keeps alive."""

def write_memory(address: int, data: _Readable, length: int) -> None:
    """Copy bytes to an address of this process; raise if it is not writable."""
