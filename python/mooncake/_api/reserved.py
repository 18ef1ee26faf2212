"""Space for an object of a known length, into which the bytes go as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake._api.outcomes import only
from mooncake._api.values import encoded
from mooncake.errors import AlreadyExistsError, MooncakeError
from mooncake.tensor.calls import run
from mooncake.tensor.replaced import NO_SHARDS, may_replace, remove_shards, split_forms

if TYPE_CHECKING:
    from mooncake._api.types import Key
    from mooncake._runtime import PutOptions, _native
    from mooncake.tensor.forms import Form

__all__ = ["Reservation"]


class Reservation:
    """Space for one object, which becomes readable by `publish`."""

    __slots__ = ("_keys", "_native", "_replaced")

    def __init__(
        self,
        native: _native.Store,
        key: Key,
        size: int,
        *,
        options: PutOptions | None = None,
        overwrite: bool,
    ) -> None:
        """Reserve the space.

        Args:
            native: The native store.
            key: Key of the object.
            size: Its length.
            options: Number of copies, pins, placement.
            overwrite: Replace an object, or a tensor in shards.

        Raises:
            AlreadyExistsError: There is an object, or a tensor in shards, that is to be kept.
            NoSpaceError: There is no space.
        """
        self._native, self._keys = native, [key]
        self._replaced: Form | None = None
        (begun,) = native.begin_writes(
            self._keys, [size], options=options, is_upsert=overwrite, if_absent=NO_SHARDS
        )
        if isinstance(begun, AlreadyExistsError):
            (form,) = run(native, split_forms([encoded(key)]))
            if isinstance(form, MooncakeError):
                raise form
            if form is None or may_replace(options, overwrite=overwrite):
                self._replaced = form
                (begun,) = native.begin_writes(
                    self._keys, [size], options=options, is_upsert=overwrite
                )
        only([begun])

    def write(self, address: int, length: int, offset: int) -> None:
        """Write bytes from an address to a part of the object."""
        only(self._native.write_begun(self._keys, [[address]], [[offset]], [[length]]))

    def publish(self) -> None:
        """Make the object readable, and remove the tensor in shards that it replaces."""
        only(self._native.end_writes(self._keys))
        if self._replaced is not None:
            run(self._native, remove_shards(self._replaced))

    def revoke(self) -> None:
        """Give the space back."""
        only(self._native.end_writes(self._keys, is_revoked=True))
