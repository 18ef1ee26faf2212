"""Forwarding of the native log to Python's ``logging``."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from mooncake import errors
from mooncake._runtime import _native

__all__ = ["log_to_python"]

_WAIT_S = 1.0

_lock = threading.Lock()
_logger = ""


def log_to_python(logger: str = "mooncake") -> None:
    """Send the native log to Python's ``logging`` instead of standard error.

    A separate thread forwards the records, so that no native thread ever waits for the interpreter.
    At most 4096 records are queued; further records are dropped, and their number is logged. The
    level of the native log is set at start by ``MOONCAKE_LOG`` or ``MC_LOG_LEVEL``.

    Args:
        logger: Parent logger of the native parts, which appear for instance as
            ``mooncake.mooncake_master.service``.
    """
    global _logger
    with _lock:
        is_first = not _logger
        _logger = logger
        if is_first:
            _native.log_to_queue()
            _start()
            os.register_at_fork(after_in_child=_start)
            atexit.register(_forward, 0.0)


def _start() -> None:
    threading.Thread(target=_run, name="mooncake-log", daemon=True).start()


def _run() -> None:
    while True:
        try:
            _forward(_WAIT_S)
        except errors.ClosedError:
            return


def _forward(timeout_s: float) -> None:
    records, dropped = _native.take_log_records(timeout_s=timeout_s)
    for level, target, text in records:
        logging.getLogger(f"{_logger}.{target}").log(level, "%s", text)
    if dropped:
        logging.getLogger(_logger).warning("%d log records were dropped", dropped)
