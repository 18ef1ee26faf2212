"""`StoreConfig`: the settings with which a store joins its pool, and the native store for them."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Final, Self, SupportsIndex
from urllib.parse import parse_qs, urlsplit

from mooncake._api.keywords import suggesting
from mooncake._protocols import unknown_protocol
from mooncake._runtime import _native
from mooncake._units import parse_size
from mooncake.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mooncake._api.native_calls import AsyncNative
    from mooncake.errors import MooncakeError

__all__ = [
    "StoreConfig",
    "address_to_rejoin",
    "at_url",
    "check_address",
    "check_open",
    "checked_config",
    "connect",
    "connect_dummy",
    "master_of_environment",
    "with_port",
]

_EMBEDDED_BYTES = 1 << 30
_INVALID_PARAMS = -600
_PORT_MAX = 0xFFFF
_MASTER_PORT = 50051
_BYTES_MAX = (1 << 64) - 1


_NONE = type(None)
_TEXT: Final = ((str,), "text")
_BOOL: Final = ((bool, _NONE), "a bool or None")
_TIME: Final = ((Real, _NONE), "a number of seconds or None")
_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "segment_bytes": ((SupportsIndex, Real, str, _NONE), "a number of bytes or text like '4GB'"),
    "name": _TEXT,
    "metadata": _TEXT,
    "tenant": _TEXT,
    "is_tcp_forced": _BOOL,
    "rpc_timeout_s": _TIME,
    "connect_timeout_s": _TIME,
    "transfer_timeout_s": _TIME,
    "retry_s": _TIME,
    "listen": _TEXT,
    "has_checksums": _BOOL,
    "http_port": ((int, _NONE), "a number or None"),
    "has_prefetch": ((bool,), "a bool"),
    "prefetch_dedup_s": ((Real,), "a number of seconds"),
    "prefetch_cooldown_s": ((Real,), "a number of seconds"),
    "prefetch_wait_s": ((Real,), "a number of seconds"),
    "token": ((str, _NONE), "text or None"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings with which a store joins its pool.

    Attributes:
        segment_bytes: Memory to lend to the pool, as a number or as text like ``"512MB"``. None
            lends 1 GiB to a pool that this store starts, and nothing to a pool that it joins: the
            memory that a process lends is lost when the process ends. Pages take physical memory
            only when objects are written to them.
        name: ``host[:port]`` by which peers reach this process; "" chooses it.
        metadata: ``"P2PHANDSHAKE"``, or the URL of a metadata server.
        tenant: Tenant in whose namespace the keys are. A master without ``--enable_multi_tenants``
            has one namespace for all, and is refused unless this is the default.
        is_tcp_forced: Transfer bytes over TCP only; None uses ``MC_FORCE_TCP``. Data in this
            store's own memory is still copied directly, unless ``MC_STORE_MEMCPY=0``.
        rpc_timeout_s: Timeout of a call to the master; None uses ``MC_RPC_TIMEOUT_MS``.
        connect_timeout_s: Timeout for connecting to the master; None uses
            ``MC_RPC_CONNECT_TIMEOUT_MS``.
        transfer_timeout_s: Timeout of the transfers of one call, of an object of more than 64 MiB
            for each 64 MiB; None uses ``MC_TRANSFER_TIMEOUT``.
        retry_s: Time during which a call to the master is repeated after its first failure, and
            waits for a master that is away; 0 lets it fail at once. None is 2 s. A copy that cannot
            be read or written is replaced by another one in any case.
        listen: Listen address of an embedded master as ``host[:port]``; "" is loopback and a free
            port.
        has_checksums: Store a checksum with every object that is put whole, and verify it when an
            object is read whole; None uses ``MOONCAKE_STORE_CHECKSUM``. Reads and writes of parts
            are not checked.
        http_port: Port that serves ``/health``, ``/metrics`` and ``/metrics/summary`` of this store
            over HTTP; 0 takes a free port, None disables the server.
        disk: Directory in which this process keeps copies of the pool's objects, which stay
            readable from there once they leave memory; several directories are a tuple. "" keeps
            none. The master needs ``--enable_offload``; a pool that this store starts has it then.
        disk_bytes: Bytes that each directory may take, as a number or as text like ``"500GB"``;
            None takes ``MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES``, or 90 % of what is free.
        has_prefetch: Let ``exists(key, prefetch=True)`` bring objects into memory that only a disk
            has; False gives it no effect.
        prefetch_dedup_s: Time for which such an object is not asked for again.
        prefetch_cooldown_s: The same after the pool refused it, or it did not come.
        prefetch_wait_s: Time that a read of an object which this store has asked for waits until it
            is in memory, before it reads the disk; 0 waits for none.
        token: Secret that the master and its clients share, at least 8 bytes; None uses
            ``MOONCAKE_MASTER_TOKEN``. A pool that this store starts accepts only others that know
            it.
    """

    segment_bytes: int | str | None = None
    name: str = ""
    metadata: str = "P2PHANDSHAKE"
    tenant: str = "default"
    is_tcp_forced: bool | None = None
    rpc_timeout_s: float | None = None
    connect_timeout_s: float | None = None
    transfer_timeout_s: float | None = None
    retry_s: float | None = None
    listen: str = ""
    has_checksums: bool | None = None
    http_port: int | None = None
    disk: str | os.PathLike[str] | tuple[str | os.PathLike[str], ...] = ""
    disk_bytes: int | str | None = None
    has_prefetch: bool = True
    prefetch_dedup_s: float = 30.0
    prefetch_cooldown_s: float = 5.0
    prefetch_wait_s: float = 0.01
    token: str | None = field(default=None, repr=False)

    @classmethod
    def from_env(cls) -> Self:
        """Return the settings that environment variables have.

        ``MOONCAKE_GLOBAL_SEGMENT_SIZE`` (memory to lend; none if it is not set),
        ``MOONCAKE_LOCAL_HOSTNAME``, ``MOONCAKE_TE_META_DATA_SERVER`` and ``MOONCAKE_TENANT_ID`` are
        read here. The variables of the other settings have an effect on every store. Each variable
        that is not read, and whose name is nearly one that is, causes a warning.

        Raises:
            ValueError: The size of the memory is no size, or ``MOONCAKE_PROTOCOL`` names no
                protocol; the text names the variable.
        """
        from mooncake.env import misspelled

        for sentence in misspelled():
            warnings.warn(sentence, stacklevel=2)
        # The transport is chosen for each transfer, but a wrong name shows a wrong setting.
        if unknown := unknown_protocol(os.environ.get("MOONCAKE_PROTOCOL") or "tcp"):
            raise ValueError(f"MOONCAKE_PROTOCOL: {unknown}")
        lent = os.environ.get("MOONCAKE_GLOBAL_SEGMENT_SIZE") or None
        try:
            segment_bytes = None if lent is None else parse_size(lent)
        except ValueError as error:
            raise ValueError(f"MOONCAKE_GLOBAL_SEGMENT_SIZE: {error}") from error
        return cls(
            segment_bytes=segment_bytes,
            name=os.environ.get("MOONCAKE_LOCAL_HOSTNAME", ""),
            metadata=os.environ.get("MOONCAKE_TE_META_DATA_SERVER") or "P2PHANDSHAKE",
            tenant=os.environ.get("MOONCAKE_TENANT_ID") or "default",
        )

    def __post_init__(self) -> None:
        """Check the types, the port and the size of the memory.

        Raises:
            InvalidArgumentError: The port is out of range, or the size is none.
            TypeError: A setting has another type; the text names it.
        """
        for name, (types, what) in _TYPES.items():
            value = getattr(self, name)
            is_allowed = bool in types if isinstance(value, bool) else isinstance(value, types)
            if not is_allowed:
                # The value may be a secret.
                raise TypeError(f"{name} is {what}, not {type(value).__name__}")
        if self.segment_bytes is not None:
            _lent_bytes(self.segment_bytes)
        port = self.http_port
        if port is None:
            return
        if not 0 <= port <= _PORT_MAX:
            text = f"a port is a number from 0 to {_PORT_MAX}"
            raise _native.failure(_INVALID_PARAMS, text, context={"http_port": port})

    def for_another_process(self) -> Self:
        """Return the settings with which another process may join beside this one.

        It lends no memory, has a name of its own and no HTTP server, and reads the token from its
        environment.
        """
        return replace(self, segment_bytes=None, name="", http_port=None, token=None, listen="")


StoreConfig.__init__ = suggesting(StoreConfig.__init__)  # type: ignore[method-assign]


def checked_config(config: object) -> StoreConfig:
    """Return the settings, or the default ones for None; refuse other types."""
    if config is None:
        return StoreConfig()
    if not isinstance(config, StoreConfig):
        kind = type(config).__name__
        raise TypeError(f"config is a StoreConfig, not {kind}; use StoreConfig(segment_bytes=...)")
    return config


def check_address(master: object) -> None:
    """Refuse what is no address, above all the value of a variable that is not set."""
    if not isinstance(master, str):
        kind = type(master).__name__
        raise TypeError(f"the address of the master is 'host:port' or 'embedded', not {kind}")
    if not master:
        text = "the address of the master is empty; write host:port, or 'embedded' for a new pool"
        raise _native.failure(_INVALID_PARAMS, text)
    try:
        _native.master_address(master)
    except InvalidArgumentError as error:
        scheme = error.context.get("kind")
        if scheme is None:
            raise
        text = "the address of the master is host:port, a list, etcd://, redis:// or k8s://"
        hint = "use Store.from_url for mooncake://"
        raise _native.failure(_INVALID_PARAMS, f"{text}, not {scheme}://; {hint}") from None


def address_to_rejoin(given: str, current: str) -> str:
    """Return the address at which another process joins the same pool.

    It names all masters where the given one does, as another may lead then. It has no login.
    """
    kind, _, shown = _native.master_address(given)
    return current if kind == "master" else shown


def with_port(address: str) -> str:
    """Return the address of one master with its port, which is 50051 if it has none.

    Text of any other form is returned as it is.
    """
    try:
        kind, places, shown = _native.master_address(address)
    except InvalidArgumentError:
        return address
    return f"{shown}:{_MASTER_PORT}" if kind == "master" and places[0][1] is None else address


def check_open(native: _native.Store | AsyncNative) -> None:
    """Refuse a store that was closed, or opened before a fork."""
    if native.is_closed:
        text = "the store is closed and cannot be opened again; make a new one"
        raise _native.failure(_INVALID_PARAMS, text, is_closed=True)


def at_url(url: str, config: StoreConfig | None) -> tuple[str, StoreConfig]:
    """Return the address and the settings that a URL names."""
    config = checked_config(config)
    if not isinstance(url, str):
        raise TypeError(f"the URL of a pool is text, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _wrong_url(url) from error
    if parts.scheme != "mooncake" or not parts.netloc or "@" in parts.netloc:
        raise _wrong_url(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    unknown = sorted(options.keys() - {"tenant"})
    if unknown or parts.path not in ("", "/") or parts.fragment:
        named = ", ".join(unknown) or parts.path or parts.fragment
        raise _wrong_url(url, f", and nothing else: {named}")
    if "tenant" in options:
        tenant = options["tenant"][-1]
        if not tenant:
            raise _wrong_url(url)
        config = replace(config, tenant=tenant)
    return parts.netloc, config


def _wrong_url(url: str, why: str = "") -> MooncakeError:
    text = f"the URL of a pool is mooncake://HOST:PORT, optionally with ?tenant=NAME{why}"
    return _native.failure(_INVALID_PARAMS, text, context={"url": url})


def master_of_environment() -> str:
    """Return the address of the master that the environment names."""
    master = os.environ.get("MOONCAKE_MASTER", "")
    if not master:
        from mooncake.env import misspelled

        near = [each for each in misspelled() if each.endswith("mean MOONCAKE_MASTER?")]
        text = "MOONCAKE_MASTER is not set; set it to the host:port of the master"
        raise _native.failure(_INVALID_PARAMS, "; ".join([text, *near]))
    return master


def connect(master: str, config: StoreConfig) -> _native.Store:
    """Join the pool of a master, or start a pool."""
    lent = config.segment_bytes
    if lent is None:
        lent = _EMBEDDED_BYTES if master == "embedded" else 0
    return _native.Store.connect(
        master=master,
        name=config.name,
        metadata=config.metadata,
        segment_bytes=_lent_bytes(lent),
        tenant=config.tenant,
        is_tcp_forced=config.is_tcp_forced,
        rpc_timeout_s=config.rpc_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        transfer_timeout_s=config.transfer_timeout_s,
        retry_s=config.retry_s,
        listen=config.listen,
        has_checksums=config.has_checksums,
        http_port=config.http_port,
        disks=_disks(config),
        token=config.token,
        prefetch=(
            config.has_prefetch,
            config.prefetch_dedup_s,
            config.prefetch_cooldown_s,
            config.prefetch_wait_s,
        ),
    )


def _disks(config: StoreConfig) -> list[tuple[str, int | None]]:
    """Return the directories of a store, each with the bytes that it may take."""
    given = config.disk if isinstance(config.disk, tuple) else (config.disk,)
    paths = [os.fspath(path) for path in given if os.fspath(path)]
    if config.disk_bytes is None:
        return [(path, None) for path in paths]
    try:
        capacity = parse_size(config.disk_bytes)
    except ValueError as error:
        text = f"the size of a directory is a number of bytes, or text like '500GB': {error}"
        context = {"disk_bytes": config.disk_bytes}
        raise _native.failure(_INVALID_PARAMS, text, context=context) from None
    if not 0 < capacity <= _BYTES_MAX:
        text = "the size of a directory is out of range"
        context = {"disk_bytes": config.disk_bytes}
        raise _native.failure(_INVALID_PARAMS, text, context=context)
    return [(path, capacity) for path in paths]


def _lent_bytes(given: int | str) -> int:
    """Return the size of the memory that a store lends."""
    try:
        lent = parse_size(given)
        if lent != given and not isinstance(given, str):
            raise ValueError(f"not a whole number of bytes: {given}")
    except ValueError as error:
        text = f"the memory to lend is a number of bytes, or text like '4GB': {error}"
        raise _native.failure(_INVALID_PARAMS, text, context={"segment_bytes": given}) from None
    if not 0 <= lent <= _BYTES_MAX:
        text = "the size of the lent memory is out of range"
        raise _native.failure(_INVALID_PARAMS, text, context={"segment_bytes": given})
    return lent


def connect_dummy(daemon: str, master: str, config: StoreConfig) -> _native.Store:
    """Join the pool of a daemon as its dummy client."""
    defaults = StoreConfig()
    wrong = [
        name
        for name in (
            "segment_bytes",
            "name",
            "metadata",
            "tenant",
            "listen",
            "disk",
            "disk_bytes",
            "has_prefetch",
            "prefetch_dedup_s",
            "prefetch_cooldown_s",
            "prefetch_wait_s",
            "token",
        )
        if getattr(config, name) != getattr(defaults, name)
    ]
    wrong += ["master"] if master != "embedded" else []
    if wrong:
        text = f"a dummy client takes these settings from its daemon: {', '.join(wrong)}"
        raise _native.failure(_INVALID_PARAMS, text)
    return _native.Store.connect_daemon(
        daemon,
        is_tcp_forced=config.is_tcp_forced,
        rpc_timeout_s=config.rpc_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        transfer_timeout_s=config.transfer_timeout_s,
        retry_s=config.retry_s,
        has_checksums=config.has_checksums,
        http_port=config.http_port,
    )
