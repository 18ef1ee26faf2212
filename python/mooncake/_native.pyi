"""The native core: batches in, batches out.

An item that failed stands as an exception instance in its place of the result; a call that failed
as a whole raises. Keys are ``str`` or ``bytes``; text counts as its UTF-8 bytes.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, final

from typing_extensions import Buffer as _Readable

from mooncake.errors import MooncakeError

# One file: stubtest compares what is defined here with the module, and not what is imported.
__all__ = [
    "VERSION",
    "Buffer",
    "Engine",
    "Pending",
    "PutOptions",
    "RpcClient",
    "RpcDelivery",
    "RpcServer",
    "Store",
    "at_exit",
    "codes",
    "environment",
    "failure",
    "get_columns",
    "get_one",
    "get_values",
    "host_allocator",
    "is_present",
    "last_error",
    "local_topology",
    "log_to_queue",
    "put_columns",
    "put_one",
    "put_values",
    "rdma_devices",
    "read_memory",
    "run_daemon",
    "run_master",
    "run_topology_dump",
    "run_transfer_bench",
    "secret_variables",
    "take_log_records",
    "unsupported_variables",
    "use_exceptions",
    "writable_range",
    "write_memory",
]

VERSION: str
"""The version of the package."""

_Key: TypeAlias = str | bytes
_Ranges: TypeAlias = Sequence[tuple[int, int] | list[tuple[int, int]]]
_Keys: TypeAlias = Sequence[_Key]
_Values: TypeAlias = Sequence[_Readable | Sequence[_Readable]]
_Options: TypeAlias = PutOptions | None
_Ints: TypeAlias = Sequence[int]
_Numbers: TypeAlias = tuple[list[int], MooncakeError | None]
_Columns: TypeAlias = Sequence[_Ints]

@final
class Buffer:
    """Bytes in memory of their own, which speak the buffer protocol without a copy."""

    @staticmethod
    def allocate(length: int) -> Buffer:
        """Return new memory of zeros, which takes room only as it is touched."""

    @property
    def exports(self) -> int:
        """How many views of it there are."""

    def ptr(self) -> int:
        """Return the address of the first byte."""

    def size(self) -> int:
        """Return the length in bytes."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class Engine:
    """A transfer engine. It ends when nobody holds it, no store either."""

    @staticmethod
    def start(*, name: str, metadata: str, is_tcp_forced: bool | None = None) -> Engine:
        """Start an engine: it listens, and peers can find its segment.

        Args:
            name: ``host[:port]`` by which peers reach this process; "": chosen.
            metadata: ``"P2PHANDSHAKE"`` or the URL of a metadata server.
            is_tcp_forced: Move bytes over TCP only; None: as ``MC_FORCE_TCP`` says.

        Raises:
            MooncakeError: No port is to be had, or the metadata server cannot be reached or knows
                another live engine of that name.
        """

    def register(self, addresses: _Ints, lengths: _Ints, *, location: str = "*") -> None:
        """Let peers reach ranges of this process, all of them or none. Touches no page of them."""

    def unregister(self, addresses: _Ints) -> None:
        """Withdraw ranges, by their first addresses. Every one of them is tried."""

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
        """Move a batch between this process and a segment, then notify its owner.

        Args:
            segment: The name by which peers open it.
            addresses: The addresses here.
            peer_addresses: The addresses there.
            lengths: How many bytes each has.
            is_write: From here to there, or the other way.
            timeout_s: How long it may take, besides a nanosecond for each byte.
            notify: Name and message for the owner, after the bytes.
            hint: The way to try first: ``"memory"``, ``"shm"`` or ``"tcp"``; "": the fastest.

        Returns:
            The way that served; None if there was nothing to move.

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
        """Move one range between this process and a segment; a batch of one without its lists."""

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
        """Do as `transfer` does, in the order of a CUDA stream (0: the default one).

        It waits until the stream has come to its end; the time that it may take begins then.

        Raises:
            MooncakeError: Also where there is no CUDA driver.
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
        """Begin what `transfer` does; return its number, at least 1.

        Raises:
            MooncakeError: The segment cannot be reached, or too many batches wait.
        """

    def is_done(self, batch: int) -> bool:
        """Say whether a batch has ended; raise if it failed. How it ended is told once."""

    def wait(self, batches: _Ints) -> None:
        """Wait until all of the batches have ended; raise if one failed."""

    def allocate(self, length: int) -> int:
        """Return the address of a buffer of at least that many bytes, in reach of peers."""

    def free(self, address: int, length: int) -> None:
        """Take a buffer back."""

    def take_notifications(self) -> list[tuple[str, str]]:
        """Return the notifications that have come, oldest first, each once."""

    def ranges(self, segment: str, *, timeout_s: float) -> list[tuple[int, int]]:
        """Return address and length of a segment's ranges, in the order of registration."""

    def probe(self, segment: str, *, timeout_s: float) -> None:
        """Raise unless the owner of a segment answers."""

    def snapshot(self) -> dict[str, Any]:
        """Return what it has moved over which way, and how full its pools are."""

    def metrics_text(self) -> str:
        """Return the same as text that Prometheus reads."""

    @property
    def segment(self) -> str:
        """What peers call its segment."""

    @property
    def rpc_port(self) -> int:
        """Where it answers peers that ask for its segment."""

    @property
    def identity(self) -> int:
        """A number that no other engine of this process has while this one lives."""

    @property
    def is_closed(self) -> bool:
        """Whether it was started before this process was forked."""

@final
class Pending:
    """Calls of a store for one event loop: begun here, made by native threads, taken later.

    Each call returns a number; `take` tells its outcome under that number.
    """

    def __new__(cls, store: Store) -> Pending:
        """Prepare for a loop. What is never taken is kept until then."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when outcomes can be taken."""

    def take(self) -> Sequence[tuple[int, Any]]:
        """Return number and value of the calls that have ended; an exception if one failed."""

    def put(
        self, keys: _Keys, values: _Values, *, options: _Options = None, is_upsert: bool = False
    ) -> int:
        """Begin what `Store.put` does. The memory is held until the outcome is taken."""

    def get(self, keys: _Keys, *, as_bytes: bool = False) -> int:
        """Begin to get objects as buffers, or as bytes, which `take` copies."""

    def get_into(self, keys: _Keys, buffers: Sequence[_Readable]) -> int:
        """Begin to get objects into writable memory, held until the outcome is taken."""

    def exists(self, keys: _Keys, *, lease: bool = True) -> int:
        """Begin what `Store.exists` does."""

    def sizes(self, keys: _Keys, *, lease: bool = True) -> int:
        """Begin what `Store.sizes` does."""

    def remove(self, keys: _Keys, *, force: bool = False) -> int:
        """Begin what `Store.remove` does."""

    def remove_matching(
        self, *, regex: str | None = None, prefix: bytes | None = None, force: bool = False
    ) -> int:
        """Begin what `Store.remove_matching` does."""

    def list(self, *, prefix: bytes = ..., after: bytes | None = None, limit: int = 0) -> int:
        """Begin what `Store.list` does."""

    def segments(self) -> int:
        """Begin what `Store.segments` does."""

    def status(self) -> int:
        """Begin what `Store.status` does."""

    def health(self) -> int:
        """Begin what `Store.health` does."""

    def replicas(self, keys: _Keys) -> int:
        """Begin what `Store.replicas` does."""

    def copy_object(self, key: _Key, targets: Sequence[str]) -> int:
        """Begin what `Store.copy_object` does."""

    def move_object(self, key: _Key, source: str, target: str) -> int:
        """Begin what `Store.move_object` does."""

    def task(self, task_id: tuple[int, int]) -> int:
        """Begin what `Store.task` does."""

    def drain(
        self, segments: Sequence[str], *, targets: Sequence[str] = ..., concurrency: int = 0
    ) -> int:
        """Begin what `Store.drain` does."""

    def drain_info(self, job_id: tuple[int, int]) -> int:
        """Begin what `Store.drain_info` does."""

    def cancel_drain(self, job_id: tuple[int, int]) -> int:
        """Begin what `Store.cancel_drain` does."""

@final
class PutOptions:
    """How objects are put. It cannot be changed and may be used for any number of puts."""

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
    ) -> PutOptions:
        """Check the options.

        Args:
            replicas: How many copies, each on another segment; fewer if there are not so many.
            soft_pin: ``"enable"`` spares the objects by eviction for a while, ``"disable"`` takes
                that back, ``"preserve"`` leaves it as it was.
            soft_pin_ttl_ms: How long a soft pin lasts; None: as long as the master says.
            is_hard_pinned: The objects are never evicted.
            preferred_segments: Names of segments to take first.
            prefers_own_segments: The segments of this process are taken first.
            data_type: What the bytes are, as a number that only callers understand.
            groups: The group of each item of the batch, kept or evicted as a whole; "" for none.

        Raises:
            InvalidArgumentError: An option is out of its range.
        """

    @property
    def replicas(self) -> int:
        """How many copies."""

    @property
    def soft_pin(self) -> str:
        """``"preserve"``, ``"enable"`` or ``"disable"``."""

    @property
    def soft_pin_ttl_ms(self) -> int | None:
        """How long a soft pin lasts."""

    @property
    def is_hard_pinned(self) -> bool:
        """Whether the objects are never evicted."""

    @property
    def preferred_segments(self) -> list[str]:
        """Names of segments to take first."""

    @property
    def prefers_own_segments(self) -> bool:
        """Whether the segments of this process are taken first."""

    @property
    def data_type(self) -> int:
        """What the bytes are."""

    @property
    def groups(self) -> list[str] | None:
        """The group of each item."""

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
        is_tcp_forced: bool | None = None,
        rpc_timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        listen: str = ...,
        has_checksums: bool | None = None,
        http_port: int | None = None,
        engine: Engine | None = None,
    ) -> Store:
        """Join a pool, or begin one with a master in this process.

        Args:
            master: ``host:port`` of the master, or ``"embedded"``.
            name: ``host[:port]``, the name that this process's segments go by; "": chosen.
            metadata: ``"P2PHANDSHAKE"`` or the URL of a metadata server.
            segment_bytes: How much memory to lend to the pool.
            tenant: Whose namespace the keys live in.
            is_tcp_forced: Move bytes over TCP only; None: as ``MC_FORCE_TCP`` says.
            rpc_timeout_s: How long the master may take to answer; None: as the environment says.
            connect_timeout_s: How long to try to reach the master; None: as the environment says.
            listen: ``host[:port]`` for an embedded master; "": loopback and a free port.
            has_checksums: Keep a checksum with objects and check it at reads of whole ones; None:
                as ``MOONCAKE_STORE_CHECKSUM`` says.
            http_port: Where to serve health and metrics over HTTP; 0: any port; None: nowhere.
            engine: The engine to share; None: one of its own.

        Raises:
            MooncakeError: The master cannot be reached, an argument is wrong, or there is no
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
        has_checksums: bool | None = None,
        http_port: int | None = None,
    ) -> Store:
        """Join a pool as a guest of the daemon of this host, which is at ``host[:port]``.

        `allocate_from_pool` may hand out so many `pool_bytes`; the rest is as of `connect`.

        Raises:
            MooncakeError: No daemon answers there, it does not reach its master, or there is no
                memory.
        """

    def allocate_from_pool(self, length: int) -> int:
        """Hand out pages of a guest, for as long as the store is open; return their address.

        Raises:
            MooncakeError: So much is not left, or the store is no guest.
        """

    def close(self) -> None:
        """Leave the pool. Closing again does nothing."""

    def put(
        self, keys: _Keys, values: _Values, *, options: _Options = None, is_upsert: bool = False
    ) -> list[bool | MooncakeError]:
        """Put values: true where it was stored, false where the key had an object that was kept.

        A value is a contiguous buffer, or a list or tuple of them that make up one object. The
        memory is read in place during the call.
        """

    def put_from(
        self, keys: _Keys, ranges: _Ranges, *, options: _Options = None, is_upsert: bool = False
    ) -> list[bool | MooncakeError]:
        """Put values that lie at ``(address, length)`` ranges."""

    def get(self, keys: _Keys) -> list[bytes | MooncakeError]:
        """Get objects as bytes."""

    def get_buffers(self, keys: _Keys, *, is_signed: bool = False) -> list[Buffer | MooncakeError]:
        """Get objects as buffers of unsigned (format B) or signed (format b) bytes."""

    def get_into(
        self, keys: _Keys, ranges: _Ranges, *, is_exact: bool = False
    ) -> list[int | MooncakeError]:
        """Get objects into memory at addresses: how many bytes each has.

        With `is_exact` memory that is larger than the object is a failure too.
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
            keys: The object of each row; it may stand in many rows.
            bases: The address that the row's destinations count from.
            destinations: Where each part of the row goes, from its base on.
            offsets: Where each part begins in the object.
            lengths: How many bytes each part has; 0 reads nothing and succeeds.
            is_registered: Refuse parts whose destination is not in one registered range.

        Returns:
            For each row how many bytes each part brought, or the failure of the whole row.
        """

    def begin_reads(self, keys: _Keys) -> list[bool | MooncakeError]:
        """Locate objects, for `read_begun`. What was begun before is located again."""

    def read_begun(
        self, keys: _Keys, addresses: _Columns, offsets: _Columns, lengths: _Columns
    ) -> list[int | MooncakeError]:
        """Get parts of objects whose read has begun; return the bytes of each object."""

    def end_reads(self, keys: _Keys) -> None:
        """Forget where objects lie whose read has begun; others are passed over."""

    def begin_writes(
        self, keys: _Keys, lengths: _Ints, *, options: _Options = None, is_upsert: bool = False
    ) -> list[bool | MooncakeError]:
        """Reserve space for objects, for `write_begun`; an object that exists is a failure."""

    def write_begun(
        self, keys: _Keys, addresses: _Columns, offsets: _Columns, lengths: _Columns
    ) -> list[int | MooncakeError]:
        """Write parts of objects whose write has begun; return the bytes of each object."""

    def end_writes(self, keys: _Keys, *, is_revoked: bool = False) -> list[bool | MooncakeError]:
        """Make objects readable whose write has begun, or give their space back."""

    def replicas(self, keys: _Keys) -> list[list[dict[str, Any]] | MooncakeError]:
        """Describe the copies of objects and lease the objects.

        Returns:
            For each copy ``replica``, ``segment_id``, ``segment``, ``endpoint``, ``address`` (in
            its owner's memory) and ``size``.
        """

    def copy_object(self, key: _Key, targets: Sequence[str]) -> tuple[int, int]:
        """Ask for copies of an object in more segments; return the id of the task."""

    def move_object(self, key: _Key, source: str, target: str) -> tuple[int, int]:
        """Ask for the move of a copy of an object to another segment; return the task's id."""

    def task(self, task_id: tuple[int, int]) -> dict[str, Any]:
        """Say how a task stands.

        Returns:
            ``id``, ``kind``, ``status``, ``created_at_ms``, ``updated_at_ms``, ``client`` and
            ``message``.
        """

    def clear_replicas(self, keys: _Keys, *, segment: str = ...) -> list[bool | MooncakeError]:
        """Drop the copies in segments of that name, or all; whether there was one to drop."""

    def drain(
        self, segments: Sequence[str], *, targets: Sequence[str] = ..., concurrency: int = 0
    ) -> dict[str, Any]:
        """Begin to empty segments, into the targets or anywhere; how that stands."""

    def drain_info(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """Say how a drain stands."""

    def cancel_drain(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """End a drain; its segments take objects again."""

    def exists(self, keys: _Keys, *, lease: bool = True) -> list[bool | MooncakeError]:
        """Say whether objects are there and complete; lease those that are, unless told not to."""

    def presence(self, keys: _Keys, *, lease: bool = True) -> _Numbers:
        """Do as `exists` does, in numbers: 1, 0, or the code of a failure, which stands beside."""

    def sizes(self, keys: _Keys, *, lease: bool = True) -> list[int | MooncakeError]:
        """Return the lengths of objects; lease those that are there, unless told not to."""

    def remove(self, keys: _Keys, *, force: bool = False) -> list[bool | MooncakeError]:
        """Remove objects; with `force` also those that were read a moment ago."""

    def remove_matching(
        self, *, regex: str | None = None, prefix: bytes | None = None, force: bool = False
    ) -> int:
        """Remove the objects that an expression or a prefix selects, or all; return how many."""

    def list(
        self, *, prefix: bytes = ..., after: bytes | None = None, limit: int = 0
    ) -> tuple[Sequence[tuple[bytes, int, bool, int]], bool]:
        """Return a page of (key, length, is complete, replicas), and whether it is the last."""

    def segments(self) -> Sequence[dict[str, Any]]:
        """Return the segments of the pool."""

    def status(self) -> dict[str, Any]:
        """Return what the master says of itself."""

    def metrics(self) -> dict[str, Any]:
        """Return what this client has done so far."""

    def metrics_text(self) -> str:
        """Return the same as text that Prometheus reads."""

    @property
    def http_address(self) -> str | None:
        """Where it serves its health and metrics, as ``host:port``."""

    def health(self) -> None:
        """Raise unless the master answers and knows this client."""

    def register_buffer(self, address: int, length: int) -> None:
        """Let peers reach memory of this process. Touches no page of it."""

    def unregister_buffer(self, address: int) -> None:
        """Withdraw memory that was registered, by its first address."""

    def mount(self, length: int) -> Sequence[str]:
        """Lend more memory to the pool, as one segment or several; return their ids."""

    def mount_file(self, path: str, length: int, *, offset: int = 0, location: str = "*") -> str:
        """Lend a part of a file to the pool; return the id of the segment.

        Objects are written into it, from an offset on that is a multiple of the page size.
        """

    def unmount(self, segment: str, *, grace_s: float = 0.0) -> None:
        """Take a segment out of the pool, which can be read for a grace, but takes no objects."""

    @property
    def hostname(self) -> str:
        """The name that this client's segments go by."""

    @property
    def master_address(self) -> str:
        """Where the master is; other processes join there."""

    @property
    def is_dummy(self) -> bool:
        """Whether its way to the pool leads through the daemon of this host."""

    @property
    def is_embedded(self) -> bool:
        """Whether the master runs in this process, for this store."""

    @property
    def is_closed(self) -> bool:
        """Whether the store was closed, or opened before this process was forked."""

def at_exit() -> None:
    """Refuse new calls of other threads and close every store. To be called at exit."""

@final
class RpcClient:
    """Sends to any number of servers, from any number of threads."""

    def __new__(cls, *, connections_max: int, timeout_s: float) -> RpcClient: ...
    def send(self, target: str, body: _Readable, *, tensor: str | None = None) -> None:
        """Send bytes and wait until somebody has taken them; raise if nobody does."""

@final
class RpcServer:
    """Receives until it is stopped or dropped."""

    def __new__(cls, address: str, *, timeout_s: float) -> RpcServer: ...
    def take(self, *, timeout_s: float) -> RpcDelivery | None:
        """Wait for the next message; None if none comes in time. Raises when it is stopped."""

    def stop(self) -> None:
        """Stop listening and end every connection."""

    @property
    def address(self) -> str:
        """Where it listens."""

@final
class RpcDelivery:
    """A message that was taken; dropped without an answer it is refused."""

    @property
    def source(self) -> str:
        """Who sent it."""

    @property
    def tensor(self) -> str | None:
        """How its bytes are to be read, if they are those of a tensor."""

    @property
    def body(self) -> Buffer:
        """The bytes."""

    def answer(self, refusal: str | None = None) -> None:
        """Tell the sender that it was taken, or why not. The first answer counts."""

def codes(*, is_engine: bool = False) -> list[tuple[int, str, str, str]]:
    """Return every code: number, name, kind ("" of those of the engine), remedy."""

def environment() -> list[tuple[str, list[str], str, str, str | None]]:
    """Return every environment variable: name, older names, default, meaning, present value."""

def unsupported_variables() -> list[tuple[str, str]]:
    """Return the established variables that have no effect here, each with the reason."""

def secret_variables() -> list[str]:
    """Return the names of those of our variables whose values are not to be shown."""

def local_topology(wanted: str, *, is_custom: bool = True) -> str:
    """Return which devices are near which memory, as JSON."""

def rdma_devices() -> tuple[list[str], str | None]:
    """Return the RDMA devices of this machine, and why none can be used where that is so."""

def is_present(store: Store, key: _Key) -> int:
    """Return 1 if an object is there, which leases it, or 0."""

def put_one(
    store: Store, key: _Key, buffer_ptr: int, size: int, options: _Options, is_upsert: bool
) -> int:
    """Put a value that lies at an address; return 0."""

def get_one(store: Store, key: _Key, buffer_ptr: int, size: int) -> int:
    """Get an object into memory; return its length."""

def put_columns(
    store: Store, keys: _Keys, addresses: _Ints, lengths: _Ints, options: _Options, is_upsert: bool
) -> _Numbers:
    """Do as `Store.put_from` does, in numbers: 0, or that of a failure; the last stands beside."""

def put_values(
    store: Store, keys: _Keys, values: Sequence[_Readable], options: _Options, is_upsert: bool
) -> _Numbers:
    """Do as `Store.put` does, in numbers, with values of one buffer each, none of them empty."""

def get_columns(store: Store, keys: _Keys, addresses: _Ints, lengths: _Ints) -> _Numbers:
    """Do as `Store.get_into` does, in numbers: a length, or that of a failure."""

def get_values(store: Store, keys: _Keys) -> tuple[list[bytes], MooncakeError | None]:
    """Do as `Store.get` does, with no bytes for a failure, of which the last stands beside."""

def failure(
    code: int, text: str, *, key: _Key | None = None, is_closed: bool = False
) -> MooncakeError:
    """Make the exception for a failure that was found in Python, and remember it."""

def host_allocator() -> tuple[int, int]:
    """Return the addresses of the C functions that allocate and free memory of the host."""

def last_error() -> MooncakeError | None:
    """Return the last failure in this thread, also of calls that returned it as a number."""

def log_to_queue() -> None:
    """Send the log into the queue that `take_log_records` empties."""

def read_memory(address: int, length: int) -> bytes:
    """Return the bytes at an address of this process; raise where there are none."""

def run_daemon(arguments: Sequence[str]) -> int:
    """Run the daemon of a host until SIGTERM or SIGINT; its exit code."""

def run_master(arguments: Sequence[str]) -> int:
    """Run the master until it is told to stop; return its exit code."""

def run_topology_dump(arguments: Sequence[str]) -> int:
    """Print the topology of this machine; return the exit code."""

def run_transfer_bench(arguments: Sequence[str]) -> int:
    """Run the benchmark of the transfer engine; return its exit code."""

def take_log_records(*, timeout_s: float) -> tuple[list[tuple[int, str, str]], int]:
    """Wait for log records and take them, and how many were dropped."""

def use_exceptions(classes: dict[str, type[MooncakeError]]) -> None:
    """Say which class of exceptions is for which kind of failure. The first time counts."""

def writable_range(buffer: _Readable) -> tuple[int, int]:
    """Return address and length of writable, contiguous memory, which the caller keeps alive."""

def write_memory(address: int, data: _Readable, length: int) -> None:
    """Copy so many bytes to an address of this process; raise where none can be written."""
