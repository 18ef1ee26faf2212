"""Rules of `setup`: accepted settings, their aliases, and the retry with other ports."""

from __future__ import annotations

import logging
import operator
import os
import random
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final

from mooncake._runtime import _native
from mooncake._units import parse_size
from mooncake.errors import AlreadyExistsError, MooncakeError
from mooncake.store.codes import INVALID_PARAMS

__all__ = ["MASTER_ADDRESS", "HeldPort", "SetupArguments", "connect"]

MASTER_ADDRESS: Final = "127.0.0.1:50051"

_ALIASES = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}
_PROTOCOLS = ("tcp", "rdma")
_SEGMENT_BYTES_MIN = 16 << 20
_DICT_BYTES_MIN = 1024
_DICT_BYTES_DEFAULT = 16 << 20
_LOCAL_BUFFER_BYTES_MAX = 1 << 40
_SIZE_MAX = (1 << 64) - 1
_TIME_MAX = (1 << 32) - 1
_NAME_TRIES = 20
_TRUE = ("true", "1", "yes", "on", "enable")
_FALSE = ("false", "0", "no", "off", "disable", "")

_log = logging.getLogger("mooncake.store")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupArguments:
    """Arguments of `setup`, from either form."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int = _DICT_BYTES_DEFAULT
    local_buffer_size: int = _DICT_BYTES_DEFAULT
    protocol: str = "tcp"
    rdma_devices: str = ""
    master_server_addr: str = MASTER_ADDRESS
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300
    enable_checksum: bool = False
    enable_ssd_prefetch: bool = True
    ssd_prefetch_cooldown_sec: int = 5
    ssd_prefetch_dedup_ttl_sec: int = 30
    ssd_get_wait_ms: int = 10
    segment_bytes_min: int = _SEGMENT_BYTES_MIN

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> SetupArguments:
        """Take values of arguments, of which integers may be those of other libraries."""
        taken = dict(values)
        for field in fields(cls):
            value: Any = values.get(field.name)
            if field.type == "int" and hasattr(value, "__index__"):
                taken[field.name] = operator.index(value)
        return cls(**taken)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> SetupArguments:
        """Parse a dictionary of settings, whose values may be text.

        Raises:
            MooncakeError: A value is invalid.
        """
        known = {field.name for field in fields(cls)} - {"segment_bytes_min"}
        known |= {"ipc_socket_path", *_ALIASES}
        settings: dict[str, Any] = {}
        for name, value in config.items():
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                _log.warning("setup: unknown setting %r is ignored%s", name, hint)
            elif value is not None and name != "ipc_socket_path":
                settings.setdefault(_ALIASES.get(name, name), value)
        for name in ("local_hostname", "metadata_server"):
            settings.setdefault(name, "")
        read = {
            name: _READERS.get(name, _read_text)(name, value) for name, value in settings.items()
        }
        used = {name: value for name, value in read.items() if value is not None}
        return cls(segment_bytes_min=_DICT_BYTES_MIN, **used)

    def check(self) -> None:
        """Validate the arguments.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: The directory for the SSD tier does not exist.
            MooncakeError: A value is out of range, or asks for an unsupported feature.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = {"str": str, "int": int, "bool": int}
            if not isinstance(value, kinds[str(field.type)]):
                raise TypeError(
                    f"setup(): {field.name} must be {field.type}, not {type(value).__name__}"
                )
        for size in (self.global_segment_size, self.local_buffer_size):
            if not 0 <= size <= _SIZE_MAX:
                raise TypeError("setup(): sizes are integers from 0 to 2^64-1")
        for name in ("local_hostname", "metadata_server", "master_server_addr"):
            if not getattr(self, name).strip():
                raise _native.failure(INVALID_PARAMS, f"{name} is empty")
        if self.protocol.lower() not in _PROTOCOLS:
            known = " or ".join(_PROTOCOLS)
            raise _native.failure(
                INVALID_PARAMS, f"unknown protocol {self.protocol!r}; this build has {known}"
            )
        if 0 < self.global_segment_size < self.segment_bytes_min:
            raise _native.failure(
                INVALID_PARAMS,
                f"global_segment_size={self.global_segment_size} is too small; "
                f"use at least {self.segment_bytes_min} bytes, or 0 to lend nothing",
            )
        if self.enable_ssd_offload:
            for path in self._disk_paths():
                if not os.path.isdir(path):
                    raise ValueError(
                        f"Invalid FileStorage configuration: {path!r} is no directory; name one in "
                        "ssd_offload_path or MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"
                    )
        for name in ("ssd_prefetch_cooldown_sec", "ssd_prefetch_dedup_ttl_sec", "ssd_get_wait_ms"):
            if not 0 <= getattr(self, name) <= _TIME_MAX:
                raise _native.failure(
                    INVALID_PARAMS, f"{name}={getattr(self, name)} is not 0 to {_TIME_MAX}"
                )
        if self.enable_client_http_server and not 0 < self.client_http_port < 1 << 16:
            raise _native.failure(
                INVALID_PARAMS, f"client_http_port={self.client_http_port} is not a port"
            )

    def _disk_paths(self) -> list[str]:
        if self.ssd_offload_path:
            return [self.ssd_offload_path]
        values = _environment()
        several = values["MOONCAKE_OFFLOAD_FILE_STORAGE_PATHS"].split(",")
        paths = [path.strip() for path in several if path.strip()]
        return paths or [values["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"].strip()]


class HeldPort:
    """A port that no other store of this host takes into its name. Nothing listens at it.

    Two stores of one name would be one place for tasks and drains.
    """

    def __init__(self, port: int) -> None:
        import socket  # `import mooncake` stays quick: many programs set up no store.

        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.bind(("", port))
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def connect(
    arguments: SetupArguments, engine: _native.Engine | None = None
) -> tuple[_native.Store, HeldPort | None]:
    """Join the pool.

    A host name without a port gets a random port, which the caller holds while the store is open.
    If that name is taken, another port is tried.

    Raises:
        MooncakeError: The master or the metadata server cannot be reached, or refuses.
    """
    host = arguments.local_hostname.strip()
    if _has_port(host):
        return _join(arguments, host, engine), None
    first, last = _name_ports()
    ports = random.sample(range(first, last + 1), min(_NAME_TRIES, last + 1 - first))
    failure: MooncakeError | None = None
    for port in ports:
        try:
            held = HeldPort(port)
        except OSError as error:
            _log.debug("port %d is in use, trying another: %s", port, error)
            continue
        try:
            return _join(arguments, _with_port(host, port), engine), held
        except AlreadyExistsError as error:
            held.close()
            failure = error
            _log.debug("the name is taken, trying another: %s", error)
        except BaseException:
            held.close()
            raise
    if failure is not None:
        raise failure
    raise _native.failure(
        INVALID_PARAMS,
        f"no port of MC_STORE_CLIENT_MIN_PORT={first} to MC_STORE_CLIENT_MAX_PORT={last} is free "
        f"for the name of the store, of {len(ports)} that were tried; name a port in the host name",
    )


def _join(arguments: SetupArguments, name: str, engine: _native.Engine | None) -> _native.Store:
    return _native.Store.connect(
        master=arguments.master_server_addr.strip(),
        name=name,
        metadata=arguments.metadata_server.strip(),
        segment_bytes=arguments.global_segment_size,
        tenant=arguments.tenant_id,
        # As upstream, which joins any master; a warning is logged.
        refuses_ignored_tenant=False,
        disks=[(arguments.ssd_offload_path, None)] if arguments.enable_ssd_offload else [],
        rdma_devices=arguments.rdma_devices if arguments.protocol.lower() == "rdma" else None,
        # Engines look keys up in the thread that schedules requests: no call waits for a master.
        fails_as_upstream=True,
        has_checksums=arguments.enable_checksum or None,
        http_port=arguments.client_http_port if arguments.enable_client_http_server else None,
        prefetch=(
            arguments.enable_ssd_prefetch,
            arguments.ssd_prefetch_dedup_ttl_sec,
            arguments.ssd_prefetch_cooldown_sec,
            arguments.ssd_get_wait_ms / 1000,
        ),
        engine=engine,
    )


def _environment() -> dict[str, str]:
    return {name: value or default for name, _, default, _, value in _native.environment()}


def _name_ports() -> tuple[int, int]:
    values = _environment()
    try:
        first = int(values["MC_STORE_CLIENT_MIN_PORT"])
        last = int(values["MC_STORE_CLIENT_MAX_PORT"])
    except ValueError as error:
        raise _native.failure(
            INVALID_PARAMS,
            f"MC_STORE_CLIENT_MIN_PORT or MC_STORE_CLIENT_MAX_PORT is not a number: {error}",
        ) from error
    if first > last:
        raise _native.failure(
            INVALID_PARAMS, "MC_STORE_CLIENT_MIN_PORT is above MC_STORE_CLIENT_MAX_PORT"
        )
    return first, last


def _has_port(name: str) -> bool:
    if name.startswith("["):
        return "]:" in name
    return name.count(":") == 1


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _read_text(_: str, value: object) -> str:
    return str(value)


def _read_size(name: str, value: object) -> int:
    try:
        size = parse_size(value if isinstance(value, int) else str(value))
    except ValueError as error:
        raise _native.failure(INVALID_PARAMS, f"{name}: {error}") from error
    most = _LOCAL_BUFFER_BYTES_MAX if name == "local_buffer_size" else size
    if 0 < size < _DICT_BYTES_MIN or size > most:
        raise _native.failure(INVALID_PARAMS, f"{name}={size} is out of range")
    return size


def _read_switch(name: str, value: object) -> bool | None:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        _log.warning("setup: %s=%r is neither true nor false and is ignored", name, value)
        return None
    return text in _TRUE


def _read_time(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError as error:
        raise _native.failure(INVALID_PARAMS, f"{name}={value!r} is no whole number") from error


def _read_port(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError as error:
        raise _native.failure(INVALID_PARAMS, f"{name}={value!r} is not a port") from error


_READERS: dict[str, Any] = {
    "global_segment_size": _read_size,
    "local_buffer_size": _read_size,
    "enable_ssd_offload": _read_switch,
    "enable_client_http_server": _read_switch,
    "enable_checksum": _read_switch,
    "client_http_port": _read_port,
    "enable_ssd_prefetch": _read_switch,
    "ssd_get_wait_ms": _read_time,
    "ssd_prefetch_cooldown_sec": _read_time,
    "ssd_prefetch_dedup_ttl_sec": _read_time,
}
