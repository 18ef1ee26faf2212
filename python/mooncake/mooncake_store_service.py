"""A store behind a small REST API, for clients that speak only HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, Final, Literal
from urllib.parse import parse_qs, unquote_to_bytes

from mooncake._http import Reply, Request, Server, listen_failure
from mooncake._rest.access import Access
from mooncake._rest.handlers import AiohttpHandlers
from mooncake._rest.mountable import MountRefusedError, open_mountable, roots
from mooncake._rest.objects import ObjectRoutes, is_object, is_route
from mooncake._runtime import _native
from mooncake._standard_streams import open_closed_streams
from mooncake.errors import MooncakeError, NoSpaceError
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import ExistOptions, MooncakeDistributedStore

__all__ = ["MooncakeStoreService", "main", "parse_arguments", "sync_main"]

_VALUE_BODY_BYTES_MAX: Final = 100 << 20
_OTHER_BODY_BYTES_MAX: Final = 1 << 20
_TOKEN: Final = "MOONCAKE_REST_TOKEN"
_POOL_TOKEN: Final = "MOONCAKE_MASTER_TOKEN"
_RETRY_S: Final = 1.0
_GRACE_MAX_S: Final = 3600
_SHARED_MEMORY: Final = "/dev/shm"
# Fields that the command line may omit, as the environment may.
_DEFAULTS: Final = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
# Required fields, and what their values look like.
_REQUIRED: Final = {
    "local_hostname": "HOST",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "HOST:PORT",
}

_log = logging.getLogger("mooncake.store_service")


class _RefusedError(Exception):
    """A refused request; the text of the exception is the response."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class MooncakeStoreService(AiohttpHandlers):
    """A store, and the HTTP server in front of it.

    Everyone may read objects. Requests that change something must come from this host, or carry the
    token of ``MOONCAKE_REST_TOKEN``.

    Attributes:
        store: The store; None before it is set up and after `stop`.
        config: Settings of the store.
        current_mode: ``"prefill"``, or ``"decode"`` with memory mounted by a request.
        mounted_segment_ids: Segments of that memory.
        last_mount_info: Request that mounted that memory.
    """

    def __init__(
        self,
        config_path: str | None = None,
        cli_config: dict[str, Any] | None = None,
        mount_root: str | None = None,
    ) -> None:
        """Read the configuration.

        Args:
            config_path: A JSON file; None reads the environment if it has a configuration.
            cli_config: Fields of `MooncakeConfig` that override it. Without a file and without
                ``MOONCAKE_MASTER`` only ``master_server_address`` is required.
            mount_root: Directory whose files may be mounted, besides those of ``/dev/shm`` and of
                mounted hugetlbfs.

        Raises:
            ValueError: A required field is missing, or a value is invalid.
        """
        path = config_path or os.getenv("MOONCAKE_CONFIG_PATH")
        if path:
            settings = _read_object(path)
        elif os.getenv("MOONCAKE_MASTER") or not cli_config:
            settings = asdict(MooncakeConfig.load_from_env())
        else:
            settings = dict(_DEFAULTS)
        self.config = MooncakeConfig.from_settings({**settings, **(cli_config or {})})
        self.store: MooncakeDistributedStore | None = None
        self.current_mode = "prefill"
        self.mounted_segment_ids: list[str] = []
        self.last_mount_info: dict[str, Any] | None = None
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._roots = roots(mount_root)
        self._access = Access(_token(_TOKEN), _TOKEN, _token(_POOL_TOKEN))
        # Serializes mounting and unmounting.
        self._mounting = threading.Lock()
        # Descriptors of mounted files, by segment id: a store that lost its master opens the file
        # again.
        self._files: dict[str, int] = {}

    async def start_store_service(
        self, max_wait_time: float = 60, shutdown_event: asyncio.Event | None = None
    ) -> bool:
        """Set up the store; retry while its master is not reachable.

        Args:
            max_wait_time: Longest time to retry, in seconds.
            shutdown_event: Event that ends the retries when it is set.

        Returns:
            True if the store is set up.
        """
        loop = asyncio.get_running_loop()
        shutdown_event = shutdown_event or asyncio.Event()
        until = loop.time() + max_wait_time
        while not shutdown_event.is_set():
            store = MooncakeDistributedStore()
            if await loop.run_in_executor(None, self._set_up, store) == 0:
                self.store = store
                return True
            left = until - loop.time()
            if left <= 0:
                _log.error("the store is not set up after max_wait_time=%s", max_wait_time)
                return False
            try:
                await asyncio.wait_for(shutdown_event.wait(), min(_RETRY_S, left))
            except TimeoutError:
                continue
        return False

    async def start_http_service(self, port: int = 8080, host: str = "0.0.0.0") -> bool:
        """Start the HTTP server.

        Args:
            port: Port to listen at; 0 takes a free port.
            host: Address to listen at; the default is every address of this host.

        Returns:
            True on success; otherwise the log has the reason.
        """
        try:
            self._server = Server((host, port), self._answer, self._admit, _failed)
        except (OSError, OverflowError) as error:
            _log.error("%s", listen_failure(host, port, error))
            return False
        self._thread = self._server.start("mooncake-rest")
        return True

    async def stop(self) -> None:
        """Stop the HTTP server and leave the pool. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._stop)

    @property
    def port(self) -> int | None:
        """Port of the HTTP server; None if it does not run."""
        return None if self._server is None else self._server.port

    def _set_up(self, store: MooncakeDistributedStore) -> int:
        config = self.config
        return store.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name or "",
            config.master_server_address,
            enable_ssd_offload=config.enable_ssd_offload,
            ssd_offload_path=config.ssd_offload_path,
            tenant_id=config.tenant_id,
            enable_client_http_server=config.enable_client_http_server,
            client_http_port=config.client_http_port,
            enable_ssd_prefetch=config.enable_ssd_prefetch,
            ssd_prefetch_cooldown_sec=config.ssd_prefetch_cooldown_sec,
            ssd_prefetch_dedup_ttl_sec=config.ssd_prefetch_dedup_ttl_sec,
            ssd_get_wait_ms=config.ssd_get_wait_ms,
        )

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._thread is not None:
            self._thread.join()
        store, self.store = self.store, None
        if store is not None:
            store.close()
        with self._mounting:
            self._forget_files(list(self._files))

    # Routes

    def _admit(self, request: Request) -> int | Reply:
        """Return the maximum length of the body; or the refusal of a stranger's request."""
        route = _route_of(request.path)
        is_change = (is_route(request.path) and request.method in ("PUT", "DELETE")) or (
            route is not None and route.is_change and request.method == route.method
        )
        reason = None
        if is_change:
            reason = self._access.refusal_of_change(request)
        elif route is not None or is_object(request.path):
            reason = self._access.refusal_of_read(request)
        if reason is not None:
            return _failed(403, reason)
        is_put = route == _PUT or (is_change and is_object(request.path))
        return _VALUE_BODY_BYTES_MAX if is_put else _OTHER_BODY_BYTES_MAX

    def _answer(self, request: Request) -> Reply:
        if is_route(request.path):
            native = None if self.store is None else self.store._native
            if native is None:
                return _failed(503, "the store is not set up")
            return ObjectRoutes(native).answer(request)
        route = _route_of(request.path)
        if route is None:
            return _failed(
                404, f"there is no {request.path}; GET / and /openapi.json list the routes"
            )
        if request.method != route.method:
            failed = _failed(405, f"the method is not {route.method}")
            return Reply(405, failed.body, failed.kind, (("Allow", route.method),))
        store = self.store
        if store is None:
            return _failed(500, "the store is not set up")
        try:
            given = (
                _Asked(route.key_of(request.path), request.query)
                if route.takes_key
                else _fields(request)
            )
            return _ROUTES[route](self, store, given)
        except _RefusedError as error:
            return _failed(error.status, str(error))

    def _put(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        key, value = given.get("key"), given.get("value")
        if not key or value is None:
            raise _RefusedError("Missing key or value")
        if not isinstance(key, str) or not isinstance(value, str):
            raise _RefusedError("key and value must be strings")
        try:
            name, stored = key.encode(), value.encode()
        except UnicodeEncodeError as error:
            raise _RefusedError("key and value must be encodable as UTF-8") from error
        if store.put(name, stored) != 0:
            return _json(500, {"error": "PUT operation failed", **_reason()})
        return _done()

    def _get(self, store: MooncakeDistributedStore, given: _Asked) -> Reply:
        native = store._native
        try:
            if native is not None:
                return ObjectRoutes(native).whole(given.key)
        except MooncakeError as error:
            _log.debug("%s", error)
        return _failed(404, "Key not found")

    def _exist(self, store: MooncakeDistributedStore, given: _Asked) -> Reply:
        prefetch = parse_qs(given.query, keep_blank_values=True).get("prefetch", ["false"])[-1]
        if prefetch not in ("true", "false"):
            raise _RefusedError("prefetch must be true or false")
        found = store.is_exist(given.key, ExistOptions(prefetch == "true"))
        return _failed(500, "Exist check failed") if found < 0 else _reply(exists=found == 1)

    def _remove(self, store: MooncakeDistributedStore, given: _Asked) -> Reply:
        return _done() if store.remove(given.key) == 0 else _failed(500, "Remove operation failed")

    def _remove_all(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        del given
        removed = store.remove_all()
        if removed < 0:
            return _failed(500, "Remove all operation failed")
        return _reply(status=f"success removed {removed} keys")

    def _mount(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        size: int = given.get("size", 0)
        if not _is_count(size) or size == 0:
            raise _RefusedError("Invalid size, must be a positive integer")
        protocol, location = _place(given)
        with self._mounting:
            mounted = store.allocate_and_mount_segment(size, protocol, location)
        if mounted["ret"] != 0:
            return _failed(500, f"Mount failed, ret={mounted['ret']}")
        ids, allocated = mounted["segment_ids"], mounted["allocated_size"]
        return _reply(status="success", segment_ids=ids, allocated_size=allocated)

    def _unmount(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        ids, grace = _ids(given), _grace(given)
        with self._mounting:
            ret = store.unmount_and_free_segment(ids, grace)
        return _done() if ret == 0 else _failed(500, f"Unmount and free failed, ret={ret}")

    def _mount_shm(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        name, size = given.get("name"), given.get("size")
        name = name.lstrip("/") if isinstance(name, str) else ""
        if not name or "/" in name or name in (".", "..") or not _is_count(size) or size == 0:
            raise _RefusedError("Missing or invalid name or size")
        with self._mounting:
            mounted = self._map(store, {**given, "path": f"{_SHARED_MEMORY}/{name}"})
        if mounted["ret"] != 0:
            return _failed(500, f"Mount failed, ret={mounted['ret']}")
        return _reply(status="success", segment_ids=mounted["segment_ids"])

    def _unmount_shm(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        ids, grace = _ids(given), _grace(given)
        with self._mounting:
            failed = [each for each in ids if store.unmount_segment([each], grace) != 0]
            self._forget_files([each for each in ids if each not in failed])
        if failed:
            text = "Unmount failed for one or more segments"
            return _json(500, {"error": text, "failed_segment_ids": failed})
        return _done()

    def _reconfigure(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        mode = given.get("mode")
        if mode not in ("decode", "prefill"):
            raise _RefusedError("Invalid mode. Use 'decode' or 'prefill'")
        if mode == "decode" and not (given.get("path") and given.get("size")):
            raise _RefusedError("Missing path or size")
        with self._mounting:
            old, mounted = self.mounted_segment_ids, []
            if mode == "decode":
                # Mount the new memory before unmounting the old, so that there is always some.
                outcome = self._map(store, given)
                if outcome["ret"] != 0:
                    return _failed(500, f"Mount failed, the mode stays {self.current_mode}")
                mounted = outcome["segment_ids"]
            if old and store.unmount_segment(old) != 0:
                if mounted and store.unmount_segment(mounted) == 0:
                    self._forget_files(mounted)
                return _failed(500, f"Unmount failed, the mode stays {self.current_mode}")
            self._forget_files(old)
            self.mounted_segment_ids, self.current_mode = mounted, mode
            self.last_mount_info = given if mode == "decode" else None
        return _reply(status="success", mode=mode, segment_ids=mounted)

    def _unmount_local_disk(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> Reply:
        ret = store.unmount_local_disk_segment(_grace(given))
        return _done() if ret == 0 else _failed(500, f"Unmount local disk failed, ret={ret}")

    def _map(self, store: MooncakeDistributedStore, given: dict[str, Any]) -> dict[str, Any]:
        """Mount a file below one of the allowed directories."""
        path, size, offset = given["path"], given["size"], given.get("offset", 0)
        if not isinstance(path, str) or not _is_count(size) or not _is_count(offset):
            raise _RefusedError("path must be a string, and size and offset integers")
        place = _place(given)
        try:
            file = open_mountable(path, self._roots)
        except MountRefusedError as error:
            raise _RefusedError(str(error), 403) from error
        except (OSError, ValueError) as error:
            _log.error("cannot open the file to mount path=%r: %s", path, error)
            return {"ret": -1, "segment_ids": []}
        # The path of the descriptor: a component of the path may be replaced by a link meanwhile.
        mounted = store.mount_segment(f"/proc/self/fd/{file}", size, offset, *place)
        ids = mounted["segment_ids"]
        if ids:
            self._files.update(dict.fromkeys(ids, file))
        else:
            os.close(file)
        return mounted

    def _forget_files(self, ids: list[str]) -> None:
        """Close the descriptors of unmounted files."""
        for file in {self._files.pop(each) for each in ids if each in self._files}:
            os.close(file)


@dataclass(frozen=True, slots=True)
class _Route:
    """A route of upstream's API.

    Attributes:
        method: The one method that it has.
        path: Its path; with a slash at its end, the key of an object follows.
    """

    method: Literal["GET", "PUT", "POST", "DELETE"]
    path: str

    @property
    def is_change(self) -> bool:
        """True if the route changes something."""
        return self.method != "GET"

    @property
    def takes_key(self) -> bool:
        """True if the path ends with a key; otherwise the body has fields."""
        return self.path.endswith("/")

    def matches(self, path: str) -> bool:
        """Return whether a request for a path is for this route."""
        if self.takes_key:
            return path.startswith(self.path) and path != self.path
        return path == self.path

    def key_of(self, path: str) -> bytes:
        """Return the key at the end of a path, in which any byte may be escaped."""
        return unquote_to_bytes(path[len(self.path) :].encode("latin-1"))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request about one key names.

    Attributes:
        key: The key at the end of its path.
        query: Its query string.
    """

    key: bytes
    query: str


_PUT: Final = _Route("PUT", "/api/put")

_ROUTES: Final[
    dict[_Route, Callable[[MooncakeStoreService, MooncakeDistributedStore, Any], Reply]]
] = {
    _PUT: MooncakeStoreService._put,
    _Route("GET", "/api/get/"): MooncakeStoreService._get,
    _Route("GET", "/api/exist/"): MooncakeStoreService._exist,
    _Route("DELETE", "/api/remove/"): MooncakeStoreService._remove,
    _Route("DELETE", "/api/remove_all"): MooncakeStoreService._remove_all,
    _Route("POST", "/api/mount"): MooncakeStoreService._mount,
    _Route("POST", "/api/unmount"): MooncakeStoreService._unmount,
    _Route("POST", "/api/mount_shm"): MooncakeStoreService._mount_shm,
    _Route("POST", "/api/unmount_shm"): MooncakeStoreService._unmount_shm,
    _Route("POST", "/api/reconfigure"): MooncakeStoreService._reconfigure,
    _Route("POST", "/api/unmount_local_disk"): MooncakeStoreService._unmount_local_disk,
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        arguments: Arguments; None takes those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="mc_store_rest_server", description="A store behind a small REST API."
    )
    parser.add_argument("--config", help="JSON file with the configuration")
    parser.add_argument(
        "-D",
        dest="define",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_definition,
        help="a field of the configuration; may be repeated",
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port to listen at; 0 takes a free port"
    )
    parser.add_argument(
        "--host", default="0.0.0.0", help="address to listen at; the default is every address"
    )
    parser.add_argument(
        "--mount_root",
        metavar="DIRECTORY",
        help="directory whose files may be mounted, besides those of /dev/shm and of hugetlbfs",
    )
    parser.add_argument(
        "--max-wait-time", type=float, default=60, help="seconds to retry the setup of the store"
    )
    return parser.parse_args(arguments)


async def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code.

    Args:
        arguments: Arguments of the command; None takes the command line.
    """
    options = parse_arguments(arguments)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        service = MooncakeStoreService(options.config, dict(options.define), options.mount_root)
    except (OSError, ValueError) as error:
        _log.error("the configuration cannot be read: %s%s", error, _hint(str(error)))
        return 1
    try:
        if not await service.start_store_service(options.max_wait_time, stop):
            return 0 if stop.is_set() else 1
        if not await service.start_http_service(options.port, options.host):
            return 1
        at = f"http://{options.host}:{service.port}"
        _log.info("serving %s/api and %s/objects", at, at)
        await stop.wait()
    finally:
        await service.stop()
    return 0


def sync_main() -> int:
    """Serve until SIGINT or SIGTERM; return the exit code."""
    open_closed_streams()
    logging.basicConfig(level=logging.INFO)
    return asyncio.run(main())


def _definition(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    known = [field.name for field in fields(MooncakeConfig)]
    if not is_there or name not in known:
        near = get_close_matches(name, known, 1)
        what = f"did you mean {near[0]}=...?" if near else f"the keys are {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE with a known key; {what}")
    return name, value


def _read_object(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} has no JSON object")
    return settings


def _hint(reason: str) -> str:
    """Return what to do about an invalid configuration; "" if the reason says it."""
    if "MOONCAKE_MASTER" in reason:
        return " Give --config=FILE or -D master_server_address=HOST:PORT, or set MOONCAKE_MASTER."
    missing = reason.rpartition("Missing required config field: ")[2].partition(";")[0]
    form = _REQUIRED.get(missing)
    return f"; give it as -D {missing}={form}" if form else ""


def _token(variable: str) -> str:
    """Return a token of the environment; "" for none."""
    values = (value for name, *_, value in _native.environment() if name == variable)
    return (next(values, "") or "").strip()


def _route_of(path: str) -> _Route | None:
    """Return the route of a path."""
    return next((route for route in _ROUTES if route.matches(path)), None)


def _fields(request: Request) -> dict[str, Any]:
    """Parse the body, which is a JSON object; an empty body is an empty object."""
    try:
        given = json.loads(request.body) if request.body else {}
    except (ValueError, RecursionError) as error:
        raise _RefusedError("Malformed JSON body") from error
    if not isinstance(given, dict):
        raise _RefusedError("Request body must be a JSON object")
    return given


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _place(given: dict[str, Any]) -> tuple[str, str]:
    protocol, location = given.get("protocol", "tcp"), given.get("location", "")
    if not isinstance(protocol, str) or not isinstance(location, str):
        raise _RefusedError("protocol and location must be strings")
    return protocol, location


def _ids(given: dict[str, Any]) -> list[str]:
    ids = given.get("segment_ids")
    ids = [ids] if isinstance(ids, str) else ids
    if not isinstance(ids, list) or not ids or not all(isinstance(each, str) for each in ids):
        raise _RefusedError("Missing segment_ids")
    return ids


def _grace(given: dict[str, Any]) -> int:
    grace: int = given.get("grace_period_seconds", 0)
    if not _is_count(grace) or grace > _GRACE_MAX_S:
        raise _RefusedError(f"grace_period_seconds must be an integer from 0 to {_GRACE_MAX_S}")
    return grace


def _done() -> Reply:
    return _reply(status="success")


def _reply(**values: Any) -> Reply:
    return _json(200, values)


def _reason() -> dict[str, str]:
    """Return why the last call found no memory; nothing for other failures, as in upstream."""
    failure = _native.last_error()
    if not isinstance(failure, NoSpaceError):
        return {}
    return {"reason": str(failure), "remedy": failure.remedy}


def _failed(status: int, text: str) -> Reply:
    return _json(status, {"error": text})


def _json(status: int, values: dict[str, Any]) -> Reply:
    return Reply(status, json.dumps(values).encode())


if __name__ == "__main__":
    raise SystemExit(sync_main())
