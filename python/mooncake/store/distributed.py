"""`MooncakeDistributedStore`: the established calls over the native store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake._runtime import Buffer as BufferHandle, _native
from mooncake.engine.types import shared_engine
from mooncake.errors import MooncakeError, NotSupportedError
from mooncake.store.batch import (
    Key,
    as_bytes,
    as_codes,
    as_numbers,
    contiguous,
    paired,
    ranges_of,
    refuse,
    refuse_unready,
)
from mooncake.store.codes import INVALID_PARAMS, OK, RPC_FAIL, RPC_TIMEOUT
from mooncake.store.config import ReplicateConfig, put_options
from mooncake.store.setup import MASTER_ADDRESS, SetupArguments, connect

if TYPE_CHECKING:
    from typing_extensions import Buffer as Readable

__all__ = ["MooncakeDistributedStore"]

T = TypeVar("T")

_log = logging.getLogger("mooncake.store")


class MooncakeDistributedStore:
    """A distributed store of bytes by key.

    Calls return numbers: 0 or a count is success, a negative number is a failure, by the table in
    the reference. `mooncake.last_error()` tells in words what the last failure in the thread was
    about. Only arguments of a wrong type raise.

    Any number of threads may use one store. Before `setup` and after `close`, and in a forked
    child, every call fails with -600, None, ``b""`` or an empty list.
    """

    __slots__ = ("__weakref__", "_is_warned", "_name", "_native")

    def __init__(self) -> None:
        """Make a store that is not set up yet."""
        self._native: _native.Store | None = None
        self._name = ""
        self._is_warned = False

    # Life

    def setup(
        self,
        local_hostname: str | dict[str, Any] | None = None,
        metadata_server: str | None = None,
        global_segment_size: int = 16777216,
        local_buffer_size: int = 1073741824,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = MASTER_ADDRESS,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
        *,
        config: dict[str, Any] | None = None,
    ) -> int:
        """Join the pool, by arguments or by one dictionary of settings.

        A store that is set up already is closed first.

        Args:
            local_hostname: ``host`` or ``host:port`` by which peers reach this process, or a
                dictionary with the settings (the same as `config`).
            metadata_server: ``"P2PHANDSHAKE"`` or ``"http://host:port/metadata"``.
            global_segment_size: Bytes to lend to the pool; 0, or at least 16 MiB.
            local_buffer_size: Accepted; copying calls here need no buffer.
            protocol: ``"tcp"``, or ``"rdma"`` (TCP where there is no device).
            rdma_devices: Names of devices, for ``"rdma"``; "" chooses.
            master_server_addr: ``host:port`` of the master, or ``"embedded"`` for one in this
                process.
            engine: What `TransferEngine.get_engine` returned, to share that engine; None for one of
                its own.
            enable_ssd_offload: Not in this build: true fails with -1300.
            ssd_offload_path: A directory, with `enable_ssd_offload`.
            tenant_id: Whose namespace the keys live in; "" is the default tenant.
            enable_client_http_server: Not in this build: true fails with -1012.
            client_http_port: A port, with `enable_client_http_server`.
            config: A dictionary with the settings above under the same names. Sizes may be text
                like ``"512MB"`` and default to 16 MiB. Also read: ``master_server_address`` and
                ``device_name``. Unknown names are logged.

        Returns:
            0, or a negative number; the log and `mooncake.last_error()` say why.
        """
        if isinstance(local_hostname, dict):
            config, local_hostname = local_hostname, None
        if config is None and (local_hostname is None or metadata_server is None):
            missing = "local_hostname" if local_hostname is None else "metadata_server"
            raise TypeError(f"setup() missing required argument: {missing!r}")
        shared = shared_engine(engine)
        self.close()
        try:
            if config is not None:
                arguments = SetupArguments.from_dict(config)
            else:
                arguments = SetupArguments(
                    local_hostname=local_hostname or "",
                    metadata_server=metadata_server or "",
                    global_segment_size=global_segment_size,
                    local_buffer_size=local_buffer_size,
                    protocol=protocol,
                    rdma_devices=rdma_devices,
                    master_server_addr=master_server_addr,
                    enable_ssd_offload=enable_ssd_offload,
                    ssd_offload_path=ssd_offload_path,
                    tenant_id=tenant_id,
                    enable_client_http_server=enable_client_http_server,
                    client_http_port=client_http_port,
                )
            self._name = arguments.local_hostname
            arguments.check()
            self._native = connect(arguments, shared)
        except MooncakeError as error:
            _log.error("setup failed: %s (%s)", error, error.remedy)
            # Callers know a setup that failed by one number, but for what a build cannot do.
            return error.code if isinstance(error, NotSupportedError) else INVALID_PARAMS
        self._name = self._native.hostname
        self._is_warned = False
        return OK

    def close(self) -> int:
        """Leave the pool. What only this process held a copy of is gone.

        Returns:
            0, also when it is closed already.
        """
        native, self._native = self._native, None
        self._name = ""
        if native is not None:
            native.close()
        return OK

    def health_check(self) -> int:
        """Say how it is: 0 healthy, 1 not set up or closed, 2 the master is unreachable."""
        native = self._native
        if native is None or native.is_closed:
            return 1
        try:
            native.health()
        except MooncakeError:
            return 2
        return 0

    def get_hostname(self) -> str:
        """Return ``host:port``, the name of this process's segments; "" before `setup`."""
        return self._name

    # Copying calls

    def put(self, key: Key, value: Readable, config: ReplicateConfig | None = None) -> int:
        """Store bytes under a key. An object that is there is kept, and that counts as success.

        Args:
            key: The name of the object.
            value: Anything that speaks the buffer protocol, stored whole; it is copied first only
                if it is not contiguous.
            config: Copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        return self._put([key], [value], config, is_upsert=False)[0]

    def upsert(self, key: Key, value: Readable, config: ReplicateConfig | None = None) -> int:
        """Store bytes under a key, replacing an object that is there.

        Args:
            key: The name of the object.
            value: Anything that speaks the buffer protocol, stored whole.
            config: Copies, pins and placement.

        Returns:
            0, or a negative number; then the old object is still there.
        """
        return self._put([key], [value], config, is_upsert=True)[0]

    def put_batch(
        self, keys: Sequence[Key], values: Sequence[Readable], config: ReplicateConfig | None = None
    ) -> int:
        """Store many objects. Those that are there are kept, and that counts as success.

        Args:
            keys: Their names.
            values: Their bytes, one for each key; none may be empty.
            config: Copies, pins and placement.

        Returns:
            0, or the first failure.
        """
        return self._put_all(keys, values, config, is_upsert=False)

    def upsert_batch(
        self, keys: Sequence[Key], values: Sequence[Readable], config: ReplicateConfig | None = None
    ) -> int:
        """Store many objects, replacing those that are there.

        Args:
            keys: Their names.
            values: Their bytes, one for each key; none may be empty.
            config: Copies, pins and placement.

        Returns:
            0, or the first failure.
        """
        return self._put_all(keys, values, config, is_upsert=True)

    def put_parts(self, key: Key, *parts: Readable, config: ReplicateConfig | None = None) -> int:
        """Store the concatenation of parts under a key.

        Args:
            key: The name of the object.
            parts: One-dimensional bytes-like objects; empty ones are skipped.
            config: Copies, pins and placement.

        Returns:
            0 (also if there was nothing to store), or a negative number.

        Raises:
            RuntimeError: A part is not one-dimensional or its items are not bytes.
        """
        return self._put_parts(key, parts, config, is_upsert=False)

    def upsert_parts(
        self, key: Key, *parts: Readable, config: ReplicateConfig | None = None
    ) -> int:
        """Store the concatenation of parts under a key, replacing an object that is there.

        Args:
            key: The name of the object.
            parts: One-dimensional bytes-like objects; empty ones are skipped.
            config: Copies, pins and placement.

        Returns:
            0 (also if there was nothing to store), or a negative number.
        """
        return self._put_parts(key, parts, config, is_upsert=True)

    def get(self, key: Key) -> bytes:
        """Return the bytes of an object; ``b""`` if there is none or it could not be read."""
        return as_bytes(self._each(1, lambda native: native.get([key]))[0])

    def get_batch(self, keys: Sequence[Key]) -> list[bytes]:
        """Return the bytes of many objects; ``b""`` for each that could not be read.

        For no keys at all it returns ``[b""]``, as callers have come to know it.
        """
        if len(keys) == 0:
            return [b""]
        return [as_bytes(value) for value in self._each(len(keys), lambda native: native.get(keys))]

    def get_buffer(self, key: Key) -> BufferHandle | None:
        """Return an object as memory of its own (`BufferHandle`); None if it could not be read."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[Key]) -> list[BufferHandle | None]:
        """Return many objects as memory of their own; None for each that could not be read."""
        fetched = self._each(len(keys), lambda native: native.get_buffers(keys, is_signed=True))
        return [value if isinstance(value, BufferHandle) else None for value in fetched]

    # Looking and removing

    def is_exist(self, key: Key) -> int:
        """Return 1 if an object is there and complete, 0 if not, a negative number if unknown."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[Key]) -> list[int]:
        """Return for each key 1, 0, or a negative number."""
        found = self._each(len(keys), lambda native: native.exists(keys))
        return as_numbers(found)

    def get_size(self, key: Key) -> int:
        """Return the length of an object in bytes, or a negative number."""
        return as_numbers(self._each(1, lambda native: native.sizes([key])))[0]

    def remove(self, key: Key, force: bool = False) -> int:
        """Remove an object.

        Args:
            key: The name of the object.
            force: Also one that was read or probed a moment ago.

        Returns:
            0, or a negative number: -704 if there is none, -706 if it is leased.
        """
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[Key], force: bool = False) -> list[int]:
        """Remove many objects.

        Args:
            keys: Their names.
            force: Also those that were read or probed a moment ago.

        Returns:
            For each key 0 or a negative number.
        """
        return as_codes(self._each(len(keys), lambda native: native.remove(keys, force=force)))

    def remove_by_regex(
        self, regex_pattern: str | None = None, force: bool = False, *, regex: str | None = None
    ) -> int:
        """Remove the objects whose key has a match of an expression anywhere.

        Args:
            regex_pattern: The expression.
            force: Also objects that were read or probed a moment ago; they are skipped otherwise.
            regex: Another name for `regex_pattern`.

        Returns:
            How many were removed, or a negative number.
        """
        pattern = regex if regex_pattern is None else regex_pattern
        if not isinstance(pattern, str):
            raise TypeError("remove_by_regex() missing required argument: 'regex_pattern' (a str)")
        return self._whole(lambda native: native.remove_matching(regex=pattern, force=force))

    def remove_all(self, force: bool = False) -> int:
        """Remove every object of the tenant.

        Args:
            force: Also objects that were read or probed a moment ago; they are skipped otherwise.

        Returns:
            How many were removed, or a negative number.
        """
        return self._whole(lambda native: native.remove_matching(force=force))

    # Memory of the caller

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Let peers reach memory of this process directly. Touches no page of it.

        Args:
            buffer_ptr: Its first address.
            size: Its length in bytes.

        Returns:
            0, or -600 if it is null, empty or overlaps with memory that is registered.
        """
        return self._done(lambda native: native.register_buffer(buffer_ptr, size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Withdraw memory that was registered.

        Args:
            buffer_ptr: Its first address.

        Returns:
            0, or -600 if no memory was registered there.
        """
        return self._done(lambda native: native.unregister_buffer(buffer_ptr))

    def put_from(
        self, key: Key, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """Store the bytes at an address. An object that is there is kept.

        Args:
            key: The name of the object.
            buffer_ptr: Where the bytes begin.
            size: How many; 0 stores nothing and succeeds.
            config: Copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        return self._put_one_from(key, buffer_ptr, size, config, is_upsert=False)

    def upsert_from(
        self, key: Key, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """Store the bytes at an address, replacing an object that is there.

        Args:
            key: The name of the object.
            buffer_ptr: Where the bytes begin.
            size: How many; 0 changes nothing and succeeds.
            config: Copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        return self._put_one_from(key, buffer_ptr, size, config, is_upsert=True)

    def batch_put_from(
        self,
        keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store many objects from addresses. Those that are there are kept.

        Args:
            keys: Their names.
            buffer_ptrs: Where the bytes of each begin.
            sizes: How many each has.
            config: Copies, pins and placement.

        Returns:
            For each key 0 or a negative number; -600 for all if the lists differ in length.
        """
        return self._put_each_from(keys, buffer_ptrs, sizes, config, is_upsert=False)

    def batch_upsert_from(
        self,
        keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store many objects from addresses, replacing those that are there.

        Args:
            keys: Their names.
            buffer_ptrs: Where the bytes of each begin.
            sizes: How many each has.
            config: Copies, pins and placement.

        Returns:
            For each key 0 or a negative number; -600 for all if the lists differ in length.
        """
        return self._put_each_from(keys, buffer_ptrs, sizes, config, is_upsert=True)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[Key],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store many objects, each the concatenation of buffers. Those that are there are kept.

        Args:
            keys: Their names.
            all_buffer_ptrs: For each key where its buffers begin.
            all_sizes: For each key how long its buffers are.
            config: Copies, pins and placement.

        Returns:
            For each key 0 or a negative number; nothing before `setup`.
        """
        if self._native is None:
            refuse_unready()
            return []
        ranges = ranges_of(keys, all_buffer_ptrs, all_sizes)
        if ranges is None:
            return [INVALID_PARAMS] * len(keys)
        return as_codes(self._put_from(keys, ranges, config, may_prefer_own=True))

    def get_into(self, key: Key, buffer_ptr: int, size: int) -> int:
        """Read an object into memory.

        Args:
            key: The name of the object.
            buffer_ptr: Where the memory begins.
            size: How long it is; at least as long as the object.

        Returns:
            The length of the object, or a negative number.
        """
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[Key], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Read many objects into memory.

        Args:
            keys: Their names.
            buffer_ptrs: Where the memory for each begins.
            sizes: How long it is.

        Returns:
            For each key the length of the object or a negative number; -600 for all if the lists
            differ in length.
        """
        pairs = paired(keys, buffer_ptrs, sizes)
        if pairs is None:
            return [INVALID_PARAMS] * len(keys)
        ranges = [[pair] for pair in pairs]
        return as_numbers(self._each(len(keys), lambda native: native.get_into(keys, ranges)))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[Key],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,  # noqa: ARG002
    ) -> list[int]:
        """Read many objects, each into buffers that are filled in order.

        Args:
            keys: Their names.
            all_buffer_ptrs: For each key where its buffers begin.
            all_sizes: For each key how long its buffers are; together as long as the object.
            prefer_alloc_in_same_node: Accepted; the nearest copy is read anyway.

        Returns:
            For each key the length of the object or a negative number: -600 if the buffers are
            too small, -800 if they are too large.
        """
        ranges = ranges_of(keys, all_buffer_ptrs, all_sizes)
        if ranges is None:
            return [INVALID_PARAMS] * len(keys)
        return as_numbers(
            self._each(len(keys), lambda native: native.get_into(keys, ranges, is_exact=True))
        )

    # What the calls above have in common

    def _each(
        self, count: int, call: Callable[[_native.Store], list[T | MooncakeError]]
    ) -> list[T | MooncakeError]:
        """Make a call; a failure of the whole stands for each item."""
        native = self._native
        if native is None:
            return [refuse_unready()] * count
        try:
            outcomes = call(native)
        except MooncakeError as error:
            self._warn(error)
            return [error] * count
        if outcomes and isinstance(outcomes[0], MooncakeError):
            self._warn(outcomes[0])
        else:
            self._is_warned = False
        return outcomes

    def _whole(self, call: Callable[[_native.Store], int]) -> int:
        def alone(native: _native.Store) -> list[int | MooncakeError]:
            return [call(native)]

        return as_numbers(self._each(1, alone))[0]

    def _done(self, call: Callable[[_native.Store], None]) -> int:
        """Make a call that says nothing; established callers know one number of its failure."""

        def ok(native: _native.Store) -> list[bool | MooncakeError]:
            call(native)
            return [True]

        return OK if self._each(1, ok)[0] is True else INVALID_PARAMS

    def _put(
        self,
        keys: Sequence[Key],
        values: Sequence[Readable | Sequence[Readable]],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> list[int]:
        def call(native: _native.Store) -> list[bool | MooncakeError]:
            options = put_options(config)
            try:
                return native.put(keys, values, options=options, is_upsert=is_upsert)
            except BufferError:
                copies = [contiguous(value) for value in values]
                return native.put(keys, copies, options=options, is_upsert=is_upsert)

        return as_codes(self._each(len(keys), call))

    def _put_all(
        self,
        keys: Sequence[Key],
        values: Sequence[Readable],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> int:
        if len(keys) != len(values):
            return refuse(f"the lists differ in length keys={len(keys)} values={len(values)}").code
        if any(memoryview(value).nbytes == 0 for value in values):
            return refuse("a value is empty; nothing was stored").code
        outcomes = self._put(keys, values, config, is_upsert=is_upsert)
        return next((code for code in outcomes if code != OK), OK)

    def _put_parts(
        self,
        key: Key,
        parts: Sequence[Readable],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> int:
        views = [memoryview(part) for part in parts]
        if any(view.ndim != 1 or view.itemsize != 1 for view in views):
            raise RuntimeError("parts must be 1-D bytes-like")
        if self._native is not None and all(view.nbytes == 0 for view in views):
            return OK
        return self._put([key], [views], config, is_upsert=is_upsert)[0]

    def _put_from(
        self,
        keys: Sequence[Key],
        ranges: Sequence[Sequence[tuple[int, int]]],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool = False,
        may_prefer_own: bool = False,
    ) -> list[bool | MooncakeError]:
        def call(native: _native.Store) -> list[bool | MooncakeError]:
            options = put_options(config, may_prefer_own=may_prefer_own)
            return native.put_from(keys, ranges, options=options, is_upsert=is_upsert)

        return self._each(len(keys), call)

    def _put_one_from(
        self, key: Key, address: int, size: int, config: ReplicateConfig | None, *, is_upsert: bool
    ) -> int:
        if size == 0 and self._native is not None:
            return OK
        ranges = [[(address, size)]]
        return as_codes(self._put_from([key], ranges, config, is_upsert=is_upsert))[0]

    def _put_each_from(
        self,
        keys: Sequence[Key],
        addresses: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> list[int]:
        pairs = paired(keys, addresses, sizes)
        if pairs is None:
            return [INVALID_PARAMS] * len(keys)
        ranges = [[pair] for pair in pairs]
        return as_codes(self._put_from(keys, ranges, config, is_upsert=is_upsert))

    def _warn(self, error: MooncakeError) -> None:
        """Log that the master is out of reach, once until it is back."""
        if error.code in (RPC_FAIL, RPC_TIMEOUT) and not self._is_warned:
            self._is_warned = True
            _log.warning("%s (%s)", error, error.remedy)
