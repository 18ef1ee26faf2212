"""`Store`: our own API of the pool, typed and with exceptions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

from mooncake._api.blocking.objects import ObjectCalls
from mooncake._api.blocking.ranges import RangeCalls
from mooncake._api.blocking.streams import StreamCalls
from mooncake._api.blocking.tensors import TensorCalls
from mooncake._api.config import (
    StoreConfig,
    address_to_rejoin,
    at_url,
    check_address,
    check_open,
    checked_config,
    connect,
    connect_dummy,
    master_of_environment,
)
from mooncake._api.files import FileReader, FileWriter, Target, already_exists, opened_reader
from mooncake._api.keywords import suggesting, suggesting_methods
from mooncake._api.types import Key, ObjectInfo, SegmentInfo
from mooncake._api.values import Seconds, with_terms
from mooncake._runtime import PutOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from mooncake._api.buffers import Readable

__all__ = ["ObjectInfo", "SegmentInfo", "Store", "StoreConfig"]


@suggesting_methods
class Store(ObjectCalls, RangeCalls, StreamCalls, TensorCalls):
    """A handle on a pool of memory, in which objects are put and got by key.

    Without an address the store starts a pool of its own, with the master in this process; other
    processes join at its `master_address`. With `daemon` the store is a dummy client of the daemon
    of this host. Any number of threads may use a store. Close it, or use it as a context manager.

    Example:
        >>> with Store() as store:
        ...     store.put("greeting", b"Hello!")
        ...     store.get("greeting")
        True
        b'Hello!'
    """

    __slots__ = ("__weakref__", "_config", "_master", "_native")

    @suggesting
    def __init__(
        self,
        master: str = "embedded",
        config: StoreConfig | None = None,
        *,
        daemon: str | None = None,
    ) -> None:
        """Join the pool of a master, directly or through a daemon, or start a pool.

        Args:
            master: ``host:port`` of the master, ``"embedded"``, or what names several masters: a
                list ``a:1,b:2``, or the service that elects one (``etcd://``, ``redis://``,
                ``k8s://``).
            config: Settings.
            daemon: ``host:port`` of the daemon of this host (`mooncake_client`), which lends the
                memory and connects to the master. The store is then a dummy client and uses the
                name, tenant and metadata server of the daemon.

        Raises:
            UnavailableError: The master or the daemon cannot be reached.
            InvalidArgumentError: An address or a setting is invalid, or cannot be combined with a
                daemon.
        """
        self._config = config = checked_config(config)
        check_address(master)
        self._master = master
        self._native = (
            connect(master, config) if daemon is None else connect_dummy(daemon, master, config)
        )

    @classmethod
    def from_url(cls, url: str, config: StoreConfig | None = None) -> Self:
        """Join the pool of a master at a URL, for instance ``mooncake://10.0.0.1:50051``.

        Args:
            url: ``mooncake://HOST:PORT``; the port is 50051 by default. ``?tenant=NAME`` sets the
                tenant.
            config: Settings; a tenant in the URL wins.

        Raises:
            InvalidArgumentError: The text is not such a URL.
            UnavailableError: The master cannot be reached.
        """
        return cls(*at_url(url, config))

    @classmethod
    def from_env(cls) -> Self:
        """Join the pool of the master at ``MOONCAKE_MASTER``, with `StoreConfig.from_env`.

        Raises:
            InvalidArgumentError: The variable is not set, or one of the others is invalid.
            UnavailableError: The master cannot be reached.
        """
        return cls(master_of_environment(), StoreConfig.from_env())

    @overload
    def file(
        self,
        key: Key,
        mode: Literal["rb"] = "rb",
        buffer_bytes: int = ...,
        *,
        timeout_s: float | None = None,
    ) -> FileReader: ...
    @overload
    def file(
        self,
        key: Key,
        mode: Literal["wb", "xb"],
        *,
        size: int | None = None,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> FileWriter: ...
    def file(
        self,
        key: Key,
        mode: str = "rb",
        buffer_bytes: int = 1 << 20,
        *,
        size: int | None = None,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> FileReader | FileWriter:
        """Return an object as a binary file.

        A file that is read is the version that is stored now; see `reader`. A file that is written
        becomes an object when it is closed, and replaces the one before, which readers find until
        then. A block that raises stores nothing. `put` refuses a value without a byte; an empty
        file is stored as an object of one byte with the tag ``mooncake.file=empty``.

        Args:
            key: Key of the object.
            mode: ``"rb"`` reads, ``"wb"`` writes, ``"xb"`` writes unless there is an object.
            buffer_bytes: Bytes that are read at a time; larger reads are made directly.
            size: Length of a file that is written. The bytes then go to the pool as they come;
                without it they stay in the memory of this process until the file is closed.
            options: Of a file that is written: number of copies, pins, placement.
            ttl_s: Of a file that is written: time after which it is removed.
            tags: Of a file that is written: text stored beside it.
            timeout_s: Longest duration of this call, and of each read, or of each call that writes.

        Raises:
            NotFoundError: The object to read does not exist.
            AlreadyExistsError: The object exists; for ``"xb"``.
            ValueError: The mode is none of these; a file cannot be appended to.

        Example:
            >>> with store.file("config.json", "wb") as file:
            ...     file.write(json.dumps(settings).encode())
            >>> with store.file("config.json") as file:
            ...     settings = json.load(file)
        """
        if not isinstance(mode, str):
            kind = type(mode).__name__
            raise TypeError(f"mode is 'rb', 'wb' or 'xb', not {kind}; name buffer_bytes=")
        if mode not in ("rb", "wb", "xb"):
            raise ValueError(f"mode is 'rb', 'wb' or 'xb', not {mode!r}; objects are binary")
        if mode == "rb":
            return opened_reader(self, key, buffer_bytes, timeout_s)
        if size is not None and size < 0:
            raise ValueError(f"the size of a file is not negative: {size}")
        if mode == "xb" and self.exists(key, timeout_s=timeout_s):
            raise already_exists(key)
        options = with_terms(options, ttl_s=ttl_s, tags=tags)
        native = self._within(timeout_s)
        return FileWriter(Target(native, key, options, overwrite=mode == "wb"), size)

    # Lifecycle

    def close(self) -> None:
        """Leave the pool; objects in the memory that this process lent are lost. Idempotent."""
        self._native.close()

    def __enter__(self) -> Self:
        check_open(self._native)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        self.close()
        return False

    def __del__(self) -> None:
        native = getattr(self, "_native", None)
        if native is not None and not native.is_closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    # Operators of a mapping that a store can honestly support

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | bytes) and self.exists(key)

    def __getitem__(self, key: Key) -> bytes:
        return self.get(key)

    def __setitem__(self, key: Key, value: Readable) -> None:
        self.put(key, value, overwrite=True)

    def __delitem__(self, key: Key) -> None:
        self.delete(key)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of the complete objects, in byte order."""
        return self.keys()

    def __len__(self) -> NoReturn:
        text = "a store has no length: its objects are counted by listing them all"
        raise TypeError(f"{text}; use stats()['pool']['keys'], or sum(1 for _ in store.keys())")

    @property
    def _pool_address(self) -> str:
        """The address of the pool, which stays right when another master leads."""
        return address_to_rejoin(self._master, self.master_address)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a joined store as its address and settings; unpickling joins the pool again.

        The copy lends no memory, has a name of its own and no HTTP server. Tokens are never
        pickled: the other process reads ``MOONCAKE_MASTER_TOKEN``.
        """
        native = self._native
        if native.is_dummy:
            return _rejoin, (None, self._config.for_another_process(), self.master_address)
        if native.is_embedded:
            text = "a store that runs its own pool cannot be pickled"
            raise TypeError(f"{text}; send store.master_address, and open Store(address) with it")
        return _rejoin, (self._pool_address, self._config.for_another_process(), None)

    def __copy__(self) -> NoReturn:
        raise TypeError("a store cannot be copied; use the same one, also from other threads")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __repr__(self) -> str:
        native = self._native
        kind = "dummy" if native.is_dummy else "embedded" if native.is_embedded else "joined"
        state = "closed" if native.is_closed else kind
        role = "daemon" if native.is_dummy else "master"
        return f"<mooncake.Store {native.hostname} {role}={native.master_address} {state}>"


def _rejoin(master: str | None, config: StoreConfig, daemon: str | None) -> Store:
    return Store(master or "embedded", config, daemon=daemon)
