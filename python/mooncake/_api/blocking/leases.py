"""Leases on objects that a block works with."""

# Generated from asynchronous/leases.py by scripts/generate_blocking_api.py; do not edit.

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Self

from mooncake._api.background import Repeater
from mooncake._api.native_calls import Native
from mooncake._api.types import Key
from mooncake._api.values import encoded
from mooncake.errors import LeaseLostError, MooncakeError
from mooncake.tensor.calls import run
from mooncake.tensor.sharded import lease

if TYPE_CHECKING:
    from types import TracebackType


__all__ = ["Lease"]

_log = logging.getLogger("mooncake.lease")

# Duration of a lease unless the master is configured otherwise, which no answer tells.
_GRANTED_S = 10.0
_RENEWAL_MIN_S = 1.0


class Lease:
    """Protect objects from eviction and unforced removal; use it with ``with``.

    All objects of a tensor in shards are leased by its key.

    The lease is renewed in the background at an interval. Leaving the block lets the lease expire,
    which takes as long as the master is configured to hold it (``--default_kv_lease_ttl``).

    A lease is lost if a renewal fails: an object is gone, or the master does not answer within 10 s
    since it was last asked with success, the duration of a lease unless the master is configured
    otherwise, or within twice the interval if that is longer. The program is told once, by the
    callback that it gave, or else by `LeaseLostError` at the end of the block.
    """

    __slots__ = (
        "_granted_s",
        "_held_until",
        "_keys",
        "_loss",
        "_native",
        "_on_lost",
        "_renewals",
        "_timeout_s",
    )

    def __init__(
        self,
        native: Native,
        keys: list[Key],
        every_s: float,
        on_lost: Callable[[LeaseLostError], object] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Prepare the value that `Store.lease` returns."""
        if not every_s > 0:
            raise ValueError("every_s must be more than 0 seconds")
        self._native = native
        self._keys = keys
        self._on_lost = on_lost
        self._loss: LeaseLostError | None = None
        self._timeout_s = timeout_s
        # On the monotonic clock.
        self._held_until = 0.0
        self._granted_s = max(_GRANTED_S, 2 * every_s)
        self._renewals = Repeater(self._renew_again, self._report_loss, every_s, "mooncake-lease")

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the objects."""
        return tuple(self._keys)

    @property
    def is_held(self) -> bool:
        """True while every renewal has found every object."""
        return self._renewals.is_started and self._loss is None

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            NotFoundError: An object no longer exists.
            MooncakeError: The master could not be asked.
        """
        try:
            self._ask()
        except MooncakeError as failure:
            self._record_loss(failure)
            raise

    def __repr__(self) -> str:
        """Show whether the lease is held."""
        state = "lost" if self._loss is not None else "held" if self.is_held else "not held"
        return f"<mooncake.{type(self).__name__} keys={len(self._keys)} {state}>"

    def __enter__(self) -> Self:
        self._loss = None
        self.renew()
        self._renewals.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        self._renewals.stop()
        if self._loss is not None and self._on_lost is None:
            if error is None:
                raise self._loss
            error.add_note(f"before that, a lease was lost: {self._loss}")
        return False

    def _ask(self) -> None:
        began, limit_s = time.monotonic(), self._timeout_s
        if self.is_held:
            left_s = max(self._held_until - began, _RENEWAL_MIN_S)
            limit_s = left_s if limit_s is None else min(limit_s, left_s)
        run(self._native, lease([encoded(key) for key in self._keys]), limit_s)
        self._held_until = began + self._granted_s

    def _renew_again(self) -> MooncakeError | None:
        try:
            self._ask()
        except MooncakeError as failure:
            return failure
        return None

    def _record_loss(self, failure: MooncakeError) -> LeaseLostError:
        if self._loss is None:
            self._loss = LeaseLostError.of(failure)
        return self._loss

    def _report_loss(self, failure: MooncakeError) -> None:
        loss = self._record_loss(failure)
        if self._on_lost is not None:
            try:
                self._on_lost(loss)
            except Exception:  # noqa: BLE001 - code of the caller may raise anything
                _log.exception("the callback for a lost lease failed")
