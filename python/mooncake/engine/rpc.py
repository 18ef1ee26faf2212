"""`RpcInterface`: sends data and tensors to other processes, and receives them."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

# Slow to import; a caller with an event loop has imported it already.
from mooncake._hints import asyncio
from mooncake._runtime import Buffer, _native
from mooncake.engine import codes
from mooncake.engine.background import run_in_background
from mooncake.errors import ClosedError, MooncakeError

__all__ = [
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "create_rpc_client",
    "create_rpc_server",
]

_THREADS = 8
_POOL = 100
_TIMEOUT_S = 30
# Seconds that a thread waits for a message before it checks whether the server was stopped.
_TAKE_S = 1.0

_log = logging.getLogger("mooncake.engine.rpc")


class _Received:
    __slots__ = ("_body", "_source")

    def __init__(self) -> None:
        """Raise: only a server makes instances."""
        raise TypeError(f"{type(self).__name__} has no constructor; callbacks are given one")

    @property
    def source_address(self) -> str:
        """``host:port`` of the sender."""
        return self._source

    def get_memory_view(self) -> memoryview:
        """Return the bytes without a copy; the memory lives as long as a view of it."""
        return memoryview(self._body)

    _body: Buffer
    _source: str


class ReceivedData(_Received):
    """Received bytes."""

    __slots__ = ()

    @property
    def data_size(self) -> int:
        """Length in bytes."""
        return len(self._body)

    def get_bytes(self) -> bytes:
        """Return a copy of the bytes."""
        return bytes(self._body)


class ReceivedTensor(_Received):
    """A received tensor."""

    __slots__ = ("_dtype", "_shape")

    _dtype: str
    _shape: list[int]

    @property
    def shape(self) -> list[int]:
        """Number of elements along each dimension."""
        return list(self._shape)

    @property
    def dtype(self) -> str:
        """Name of the element type as the sender writes it, like ``torch.float32``."""
        return self._dtype

    @property
    def total_bytes(self) -> int:
        """Length in bytes."""
        return len(self._body)

    def get_data_size(self) -> int:
        """Return the length in bytes."""
        return len(self._body)

    def get_data_as_bytes(self) -> bytes:
        """Return a copy of the bytes."""
        return bytes(self._body)


class RpcInterface:
    """A client, a server, or both.

    Calls return numbers: 0 if the receiver accepted the message; -1 if it did not, or if that is
    unknown. `mooncake.last_error()` has the reason. A message for which the receiver has no
    callback is accepted and dropped, as in upstream; the receiver logs a warning. Only arguments of
    a wrong type raise. Any number of threads may use one interface. Every call ends within its
    timeout.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_client",
        "_finalizer",
        "_lock",
        "_server",
        "_settings",
        "_threads",
    )

    def __init__(self) -> None:
        """Make an interface that is neither client nor server yet."""
        self._lock = threading.Lock()
        self._client: _native.RpcClient | None = None
        self._server: _native.RpcServer | None = None
        # Stops the server where this is dropped without `stop_server`.
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._settings: tuple[str, int, int] | None = None
        self._threads: list[threading.Thread] = []
        self._callbacks: dict[str, Callable[[Any], object]] = {}

    def initialize(
        self,
        listen_address: str = "",
        thread_count: int = 0,
        timeout_seconds: int = _TIMEOUT_S,
        pool_size: int = _POOL,
    ) -> bool:
        """Set up a client, and a server if there is an address to listen at.

        Args:
            listen_address: ``host:port``; "" for no server.
            thread_count: Number of callbacks that may run at the same time; 0 is one per processor,
                up to 8.
            timeout_seconds: Timeout of a call.
            pool_size: Maximum number of connections to one receiver.

        Returns:
            True on success.
        """
        is_ready = self.initialize_client(pool_size, timeout_seconds)
        if is_ready and listen_address:
            threads = thread_count or min(os.cpu_count() or 1, _THREADS)
            is_ready = self.initialize_server(listen_address, threads, timeout_seconds)
        return is_ready

    def initialize_client(self, pool_size: int = _POOL, timeout_seconds: int = _TIMEOUT_S) -> bool:
        """Set up a client.

        Args:
            pool_size: Maximum number of connections to one receiver; further calls wait for a free
                one.
            timeout_seconds: Timeout of a call.

        Returns:
            True on success.
        """
        try:
            self._client = _native.RpcClient(connections_max=pool_size, timeout_s=timeout_seconds)
        except (MooncakeError, OverflowError) as error:
            _log.error("initialize_client failed: %s", error)
            return False
        return True

    def initialize_server(
        self,
        listen_address: str,
        thread_count: int = _THREADS,
        timeout_seconds: int = _TIMEOUT_S,
    ) -> bool:
        """Set up a server; `start_server_async` or `start_server` starts it.

        Args:
            listen_address: ``host:port``; port 0 takes a free port.
            thread_count: Number of callbacks that may run at the same time.
            timeout_seconds: Timeout of one message, including its callback.

        Returns:
            True on success. An address that is in use fails only at the start.
        """
        if not isinstance(listen_address, str):
            raise TypeError(f"listen_address must be str, not {type(listen_address).__name__}")
        if thread_count < 1 or timeout_seconds <= 0 or not listen_address.strip():
            _log.error(
                "initialize_server needs an address, thread_count >= 1 and timeout_seconds > 0"
            )
            return False
        with self._lock:
            self._settings = (listen_address.strip(), thread_count, timeout_seconds)
        return True

    def start_server(self) -> bool:
        """Receive until another thread, or a callback, calls `stop_server`.

        Returns:
            False if the server could not listen.
        """
        if not self.start_server_async():
            return False
        for thread in list(self._threads):
            # Joins in steps, so that signals are handled.
            while thread.is_alive():
                thread.join(_TAKE_S)
        return True

    def start_server_async(self) -> bool:
        """Start receiving in the background.

        Returns:
            True if the server listens, also if it did already.
        """
        with self._lock:
            if self._server is not None:
                return True
            if self._settings is None:
                _log.error("start_server before initialize_server")
                return False
            address, threads, timeout_s = self._settings
            try:
                self._server = _native.RpcServer(address, timeout_s=timeout_s)
            except (MooncakeError, OverflowError) as error:
                _log.error("start_server failed: %s", error)
                return False
            self._finalizer = weakref.finalize(self, self._server.stop)
            self._finalizer.atexit = False
            for number in range(threads):
                thread = threading.Thread(
                    target=_serve,
                    args=(self._server, self._callbacks),
                    name=f"mooncake-rpc-{number}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        return True

    def stop_server(self) -> None:
        """Stop receiving: refuse queued messages, and wait for running callbacks."""
        with self._lock:
            server, self._server = self._server, None
            threads, self._threads = self._threads, []
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.detach()
        if server is not None:
            server.stop()
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join()

    def set_data_receive_callback(self, callback: Callable[[ReceivedData], object]) -> None:
        """Set the callback for data.

        Args:
            callback: Called with `ReceivedData` in a thread of the server. The sender waits until
                it returns; an exception is logged here.
        """
        self._callbacks["data"] = _callable(callback)

    def set_tensor_receive_callback(self, callback: Callable[[ReceivedTensor], object]) -> None:
        """Set the callback for tensors.

        Args:
            callback: Called with `ReceivedTensor`, as described for `set_data_receive_callback`.
        """
        self._callbacks["tensor"] = _callable(callback)

    def send_data(self, target_address: str, data: bytes) -> int:
        """Send bytes to a receiver and wait until it has accepted them.

        Args:
            target_address: ``host:port`` of the receiver.
            data: Bytes, or an object with the buffer protocol; not copied as a whole.

        Returns:
            0; -1 if the receiver did not accept it, or on timeout.
        """
        return self._send(target_address, memoryview(data), None)

    def send_data_async(
        self, target_address: str, data: bytes, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[int]:
        """Send bytes to a receiver without blocking an event loop.

        Args:
            target_address: Address as for `send_data`.
            data: Bytes as for `send_data`; must not change before the future is done.
            loop: Loop of the future.

        Returns:
            A future of the result of `send_data`.
        """
        view = memoryview(data)
        return run_in_background(loop, lambda: self._send(target_address, view, None))

    def send_tensor(self, target_address: str, tensor: Any) -> int:
        """Send a tensor to a receiver and wait until it has accepted it.

        Args:
            target_address: ``host:port`` of the receiver.
            tensor: A torch tensor (one on a device is copied to the host) or a numpy array.

        Returns:
            0; -1 if the receiver did not accept it, or on timeout.
        """
        body, described = _tensor(tensor)
        return self._send(target_address, body, described)

    def send_tensor_async(
        self, target_address: str, tensor: Any, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[int]:
        """Send a tensor to a receiver without blocking an event loop.

        Args:
            target_address: Address as for `send_tensor`.
            tensor: Tensor as for `send_tensor`; must not change before the future is done.
            loop: Loop of the future.

        Returns:
            A future of the result of `send_tensor`.
        """
        body, described = _tensor(tensor)
        return run_in_background(loop, lambda: self._send(target_address, body, described))

    def _send(self, target: str, body: memoryview, tensor: str | None) -> int:
        if not isinstance(target, str):
            raise TypeError(f"target_address must be str, not {type(target).__name__}")
        client = self._client
        try:
            if client is None:
                raise _native.failure(codes.FAILED, "the client is not initialized", is_closed=True)
            client.send(target, body, tensor=tensor)
        except MooncakeError as error:
            _log.debug("%s", error)
            return codes.FAILED
        return codes.OK


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Make an interface that can send.

    Args:
        local_rank: Accepted; unused.
        world_size: Accepted; unused.
    """
    del local_rank, world_size
    interface = RpcInterface()
    interface.initialize_client()
    return interface


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Make an interface that can send, and receive after `initialize_server`.

    Args:
        local_rank: Accepted; unused.
        world_size: Accepted; unused.
    """
    return create_rpc_client(local_rank, world_size)


def _serve(server: _native.RpcServer, callbacks: dict[str, Callable[[Any], object]]) -> None:
    """Deliver messages to the callbacks until the server is stopped."""
    while True:
        try:
            delivery = server.take(timeout_s=_TAKE_S)
        except ClosedError:
            return
        if delivery is None:
            continue
        try:
            _dispatch(delivery, callbacks)
        except BaseException:  # noqa: BLE001 - the bytes have arrived; the sender gets no error
            # Also SystemExit, or CancelledError of asyncio: this thread serves the next message.
            _log.exception("a callback failed")
        delivery.answer(None)


def _dispatch(delivery: _native.RpcDelivery, callbacks: dict[str, Callable[[Any], object]]) -> None:
    """Call the callback of a message; drop the message if there is none, as upstream does."""
    kind = "data" if delivery.tensor is None else "tensor"
    callback = callbacks.get(kind)
    if callback is None:
        # From now on messages of this kind are dropped in silence, until there is a callback.
        callback = callbacks.setdefault(kind, _drop)
        _log.warning("a message of kind %s was dropped: there is no callback for it", kind)
    received: ReceivedData | ReceivedTensor
    if delivery.tensor is None:
        received = object.__new__(ReceivedData)
    else:
        received = object.__new__(ReceivedTensor)
        described = json.loads(delivery.tensor)
        received._dtype, received._shape = str(described["dtype"]), list(described["shape"])
    received._body, received._source = delivery.body, delivery.source
    callback(received)


def _drop(_: object) -> None:
    pass


def _tensor(tensor: Any) -> tuple[memoryview, str]:
    """Return the bytes of a tensor, and the JSON description of its dtype and shape."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        body = memoryview(flat.view(torch.uint8).numpy())
    elif hasattr(tensor, "__array_interface__"):
        import numpy as np

        if tensor.dtype.hasobject:
            raise TypeError("an array of Python objects is not a tensor")
        body = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    else:
        raise TypeError(f"a tensor must be of torch or numpy, not {type(tensor).__name__}")
    shape = [int(length) for length in tensor.shape]
    return body, json.dumps({"dtype": str(tensor.dtype), "shape": shape})


def _callable(callback: object) -> Callable[[Any], object]:
    if not callable(callback):
        raise TypeError(f"a callback must be callable, not {type(callback).__name__}")
    return callback
