"""Base class of the upstream calls: the native store, and failures as numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mooncake.errors import MooncakeError, with_remedy
from mooncake.store.batch import Key, as_numbers, as_upstream, not_set_up
from mooncake.store.codes import (
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OK,
    RPC_FAIL,
    RPC_TIMEOUT,
)

if TYPE_CHECKING:
    from mooncake._runtime import _native
    from mooncake.store.setup import HeldPort

__all__ = ["StoreBase"]

T = TypeVar("T")

_log = logging.getLogger("mooncake.store")


class StoreBase:
    """A store that may or may not be set up, and helpers that make native calls.

    Subclasses, one for each subject, add the public calls.
    """

    __slots__ = (
        "__weakref__",
        "_held_port",
        "_is_outage_logged",
        "_local_bytes",
        "_mounted",
        "_name",
        "_native",
    )

    def __init__(self) -> None:
        """Make a store that is not set up yet."""
        self._native: _native.Store | None = None
        self._held_port: HeldPort | None = None
        self._name = ""
        self._local_bytes = 0
        self._is_outage_logged = False
        # Kind of memory of each segment that was mounted after setup, by segment id.
        self._mounted: dict[str, str] = {}

    def _call_batch(
        self, count: int, call: Callable[[_native.Store], list[T | MooncakeError]]
    ) -> list[T | MooncakeError]:
        """Make a batch call; a failure of the whole call counts for each item."""
        native = self._native
        if native is None:
            return [not_set_up()] * count
        try:
            outcomes = call(native)
        except MooncakeError as error:
            self._log_outage(error)
            return [error] * count
        if outcomes and isinstance(outcomes[0], MooncakeError):
            self._log_outage(outcomes[0])
        else:
            self._is_outage_logged = False
        return outcomes

    def _call_with_failure(
        self, otherwise: T, call: Callable[[_native.Store], tuple[T, MooncakeError | None]]
    ) -> tuple[T, MooncakeError | None]:
        """Make a call that returns a result and the last failure; `otherwise` if it raises."""
        native = self._native
        if native is None:
            return otherwise, not_set_up()
        try:
            reply = call(native)
        except MooncakeError as error:
            self._log_outage(error)
            return otherwise, error
        if reply[1] is None:
            self._is_outage_logged = False
        else:
            self._log_outage(reply[1])
        return reply

    def _call_codes(
        self, count: int, call: Callable[[_native.Store], tuple[list[int], MooncakeError | None]]
    ) -> list[int]:
        """Make a batch call that returns numbers; a failure of the whole counts for each item."""
        none: list[int] = []
        numbers, failure = self._call_with_failure(none, call)
        if failure is None:
            return numbers
        return [as_upstream(number) for number in numbers or [failure.code] * count]

    def _call_one(self, call: Callable[..., int], *arguments: object) -> int:
        """Make a call for one object that returns a number: the fastest path."""
        native = self._native
        if native is None:
            return as_upstream(not_set_up().code)
        try:
            number = call(native, *arguments)
        except MooncakeError as error:
            self._log_outage(error)
            return as_upstream(error.code)
        self._is_outage_logged = False
        return number

    def _call_count(self, call: Callable[[_native.Store], int]) -> int:
        def alone(native: _native.Store) -> list[int | MooncakeError]:
            return [call(native)]

        return as_numbers(self._call_batch(1, alone))[0]

    def _call_status(self, call: Callable[[_native.Store], None]) -> int:
        """Make a call without a result; every failure is the same number, as in upstream."""

        def ok(native: _native.Store) -> list[bool | MooncakeError]:
            call(native)
            return [True]

        return OK if self._call_batch(1, ok)[0] is True else INVALID_PARAMS

    def _skip_empty(self, key: Key) -> int:
        """Log that a put had no bytes to store, which upstream treats as success."""
        _log.info("there were no bytes, so nothing was stored or changed key=%r", key)
        return OK

    def _log_outage(self, error: MooncakeError) -> None:
        """Log that the master is unreachable, or that nobody lends memory, once per outage."""
        is_outage = error.code in (RPC_FAIL, RPC_TIMEOUT) or (
            error.code == NO_AVAILABLE_HANDLE and error.context.get("largest_segment") == "0"
        )
        if is_outage and not self._is_outage_logged:
            self._is_outage_logged = True
            _log.warning("%s", with_remedy(error))
