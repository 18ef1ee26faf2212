"""`MooncakeConfig`: the settings of a store, from a file or the environment."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mooncake._protocols import unknown_protocol
from mooncake._units import parse_size

__all__ = [
    "DEFAULT_GLOBAL_SEGMENT_SIZE",
    "DEFAULT_LOCAL_BUFFER_SIZE",
    "MooncakeConfig",
    "logger",
]

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1073741824

_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_TRUE = ("true", "1", "yes", "on", "enable")
_FALSE = ("false", "0", "no", "off", "disable", "")

logger = logging.getLogger("mooncake.config")


@dataclass
class MooncakeConfig:
    """Settings of a store.

    Attributes:
        local_hostname: ``host[:port]`` by which peers reach this process.
        metadata_server: ``P2PHANDSHAKE``, or the URL of a metadata server.
        global_segment_size: Bytes to lend to the pool.
        local_buffer_size: Bytes that a `BufferPool` of the store may lend.
        protocol: ``tcp`` or ``rdma``; other known names are accepted here.
        device_name: Devices for ``rdma``.
        master_server_address: ``host:port`` of the master.
        enable_ssd_offload: True to use a local disk.
        ssd_offload_path: Directory on that disk.
        tenant_id: Tenant in whose namespace the keys are.
        enable_client_http_server: True to serve the client's health and metrics over HTTP.
        client_http_port: Port of that HTTP server.
        enable_ssd_prefetch: False gives probes that ask for objects from disk no effect.
        ssd_prefetch_cooldown_sec: See `MooncakeDistributedStore.setup`.
        ssd_prefetch_dedup_ttl_sec: See `MooncakeDistributedStore.setup`.
        ssd_get_wait_ms: See `MooncakeDistributedStore.setup`.
    """

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300
    enable_ssd_prefetch: bool = True
    ssd_prefetch_cooldown_sec: int = 5
    ssd_prefetch_dedup_ttl_sec: int = 30
    ssd_get_wait_ms: int = 10

    def __post_init__(self) -> None:
        """Validate and normalize the fields."""
        for field in _REQUIRED:
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(
                    f"Config field '{field}' must be a non-empty string, got {value!r}"
                )
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(
                f"Config field 'protocol' must be a non-empty string, got {self.protocol!r}"
            )
        self.protocol = self.protocol.strip().lower()
        if unknown := unknown_protocol(self.protocol):
            logger.warning("%s", unknown)
        for field in ("global_segment_size", "local_buffer_size"):
            size = getattr(self, field)
            if size < 0:
                raise ValueError(f"Invalid {field}: {size}. Size must be non-negative.")
        if not 0 <= self.client_http_port < 65536:
            raise ValueError(f"Invalid client_http_port: {self.client_http_port} is not a port")

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Read a JSON file.

        Args:
            file_path: Path of the file.

        Raises:
            ValueError: A required field is missing, or a value is invalid.
        """
        with open(file_path, encoding="utf-8") as file:
            settings: dict[str, Any] = json.load(file)
        return MooncakeConfig.from_settings(settings)

    @staticmethod
    def from_settings(settings: dict[str, Any]) -> MooncakeConfig:
        """Read settings from a dictionary, whose sizes and booleans may be text.

        Args:
            settings: Values by field name; missing fields have their defaults.

        Raises:
            ValueError: A required field is missing, or a value is invalid.
        """
        if not isinstance(settings, dict):
            raise ValueError(f"The settings are not a JSON object, but {type(settings).__name__}")
        for field in _REQUIRED:
            if field not in settings:
                hint = "; P2PHANDSHAKE needs no server" if field == "metadata_server" else ""
                raise ValueError(f"Missing required config field: {field}{hint}")
        return _from_settings(settings)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """Read the file that ``MOONCAKE_CONFIG_PATH`` names, or else the environment.

        Raises:
            ValueError: Neither that variable nor ``MOONCAKE_MASTER`` is set, or a value is invalid.
        """
        path = os.getenv("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        if not os.getenv("MOONCAKE_MASTER"):
            raise ValueError(
                "Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' "
                "is set."
            )
        names = {
            "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
            "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
            "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
            "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
            "protocol": "MOONCAKE_PROTOCOL",
            "device_name": "MOONCAKE_DEVICE",
            "master_server_address": "MOONCAKE_MASTER",
            "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
            "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
            "tenant_id": "MOONCAKE_TENANT_ID",
            "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
            "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
        }
        given = {field: os.getenv(name) for field, name in names.items()}
        settings: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        settings.setdefault("local_hostname", "localhost")
        settings.setdefault("metadata_server", "P2PHANDSHAKE")
        return _from_settings(settings)


def _from_settings(settings: dict[str, Any]) -> MooncakeConfig:
    tenant = settings.get("tenant_id")
    return MooncakeConfig(
        local_hostname=settings["local_hostname"],
        metadata_server=settings["metadata_server"],
        global_segment_size=_size(settings, "global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE),
        local_buffer_size=_size(settings, "local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE),
        protocol=settings.get("protocol", "tcp"),
        device_name=settings.get("device_name", ""),
        master_server_address=settings["master_server_address"],
        enable_ssd_offload=_flag(settings, "enable_ssd_offload", default=False),
        ssd_offload_path=settings.get("ssd_offload_path") or "",
        tenant_id="default" if tenant is None else tenant,
        enable_client_http_server=_flag(settings, "enable_client_http_server", default=False),
        client_http_port=_integer(settings, "client_http_port", 9300),
        enable_ssd_prefetch=_flag(settings, "enable_ssd_prefetch", default=True),
        ssd_prefetch_cooldown_sec=_integer(settings, "ssd_prefetch_cooldown_sec", 5),
        ssd_prefetch_dedup_ttl_sec=_integer(settings, "ssd_prefetch_dedup_ttl_sec", 30),
        ssd_get_wait_ms=_integer(settings, "ssd_get_wait_ms", 10),
    )


def _size(settings: dict[str, Any], field: str, default: int) -> int:
    return _number(_parse_segment_size, field, settings.get(field, default))


def _integer(settings: dict[str, Any], field: str, default: int) -> int:
    return _number(int, field, settings.get(field, default))


def _number(convert: Callable[[Any], int], field: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError(f"{value} is no number")
        return convert(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"Invalid {field}: {error}") from error


def _flag(settings: dict[str, Any], field: str, *, default: bool) -> bool:
    try:
        return _bool(settings.get(field, default))
    except ValueError as error:
        raise ValueError(f"Invalid {field}: {error}") from error


def _parse_segment_size(value: Any) -> int:
    """Return a number of bytes from a number or from text like "4gb".

    Upstream's name, which is private there too, but which serving engines import.
    """
    return parse_size(value) if isinstance(value, str) else int(value)


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        text = value.strip().lower()
        if text not in _TRUE + _FALSE:
            raise ValueError(f"Invalid boolean value: {value}")
        return text in _TRUE
    return bool(value)
