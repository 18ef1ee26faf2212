"""Tensors that are stored in shards, by the keys of their objects.

No object has the key of such a tensor itself. A manifest or the first shard beside it tells that
the tensor is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from mooncake._api.outcomes import all_of
from mooncake._api.types import ObjectInfo
from mooncake._api.values import decoded
from mooncake._runtime import _native
from mooncake.errors import MooncakeError, NotFoundError, ShardedTensorError
from mooncake.tensor.calls import ExistsOrSuffixed, Lease, Operation
from mooncake.tensor.format import GUIDE_SUFFIXES, MANIFEST_BYTES
from mooncake.tensor.forms import Form, forms_of
from mooncake.tensor.inventory import stored_keys

__all__ = [
    "OF_SHARDS",
    "READS",
    "TensorListing",
    "are_sharded",
    "are_split",
    "internal_pattern",
    "lease",
    "manifest_pattern",
    "refusal",
]

_INVALID_PARAMS = -600
# Number of times that the objects of a tensor are looked up which others replace meanwhile.
_SEARCHES_MAX = 3
_MANIFEST = rb"__(?:parallelism|writer)_manifest"
_AXES = rb"(?:__(?:dp|tp|ep|pp)_\d{1,9}of\d{1,9}(?:_(?:sd|eid|sid)\d{1,9})?)+"
_PART = rb"(?:" + _AXES + rb"|__writer_\d{1,9}of\d{1,9}_sd\d{1,9})"
_PLAIN = rb"_tp_(?:0|[1-9]\d{0,8})"
_IS_MANIFEST = re.compile(rb"(.+)" + _MANIFEST, re.DOTALL)
_IS_PART = re.compile(rb"(.+?)" + _PART, re.DOTALL)
# The keys of all objects of a tensor precede its own with this behind it.
_BEHIND = b"_tp_:"
_MANIFEST_BITS = 0b110
_IS_PLAIN = re.compile(rb"(.+)" + _PLAIN, re.DOTALL)


def are_sharded(keys: Sequence[bytes]) -> Operation[list[bool]]:
    """Return for each key whether a tensor is stored in shards under it; lease nothing.

    One call, and those of `are_split` if there are objects with the names of manifests or shards.

    Args:
        keys: Keys that no object has.
    """
    found = yield ExistsOrSuffixed(keys, GUIDE_SUFFIXES)
    return (yield from are_split(keys, all_of(found)))


def are_split(keys: Sequence[bytes], found: Sequence[int]) -> Operation[list[bool]]:
    """Return for each key whether a tensor is stored in shards under it; lease nothing.

    Anybody may give the names of manifests or shards to other objects, so that these are read.

    Args:
        keys: The keys.
        found: For each key what `ExistsOrSuffixed` finds with `GUIDE_SUFFIXES`.
    """
    # Many keys of a batch may be missing, so that little is done for each.
    wanted = [key for key, bits in zip(keys, found, strict=True) if bits > 1]
    if not wanted:
        return [False] * len(keys)
    forms = dict(zip(wanted, (yield from forms_of([(key, ()) for key in wanted])), strict=True))
    return [_is_split(forms.get(key), bits) for key, bits in zip(keys, found, strict=True)]


def lease(keys: Sequence[bytes]) -> Operation[None]:
    """Lease objects; where a tensor is stored in shards under a key, lease all of its objects.

    One call, and those that look up the objects of tensors in shards if there are any.

    Args:
        keys: Keys of objects and tensors.

    Raises:
        NotFoundError: An object, or one of a tensor, does not exist.
    """
    outcomes = yield Lease([decoded(key) for key in keys])
    failures = {
        key: each
        for key, each in zip(keys, outcomes, strict=True)
        if isinstance(each, MooncakeError)
    }
    missing = [key for key, each in failures.items() if isinstance(each, NotFoundError)]
    for key, is_sharded in zip(missing, (yield from are_sharded(missing)), strict=True):
        if is_sharded:
            yield from _lease_shards(key)
            del failures[key]
    for failure in failures.values():
        raise failure


def _lease_shards(key: bytes) -> Operation[None]:
    failure: MooncakeError | None = None
    for _ in range(_SEARCHES_MAX):
        (form,) = yield from forms_of([(key, ())])
        if isinstance(form, MooncakeError):
            raise form
        keys = yield from stored_keys(form)
        outcomes = yield Lease([decoded(each) for each in keys])
        failure = next((each for each in outcomes if isinstance(each, MooncakeError)), None)
        if not isinstance(failure, NotFoundError):
            break
    if failure is not None:
        raise failure


READS: Final = "Use get_tensor or get_array to read it; `info` has its layout and its objects."
"""What to do instead of a read of one object."""

OF_SHARDS: Final = "Make the call for each of its objects; keys(prefix, internal=True) lists them."
"""What to do instead of a change of one object."""


def refusal(key: str | bytes, remedy: str = READS, *, text: str = "") -> ShardedTensorError:
    """Return the error for a call that is about one object, where a tensor is stored in shards.

    Args:
        key: Key of the tensor.
        remedy: What to do instead.
        text: Why the call cannot be made; "" for the usual reason.
    """
    why = text or "the key is that of a tensor that is stored in shards, not of one object"
    failure = _native.failure(_INVALID_PARAMS, why, key=key, remedy=remedy)
    return ShardedTensorError.of(failure)


def manifest_pattern(prefix: bytes) -> str:
    """Return a regular expression for the manifests of the tensors whose keys have a prefix."""
    return _pattern(prefix, _MANIFEST)


def internal_pattern(prefix: bytes) -> str:
    """Return a regular expression for the shards of the tensors whose keys have a prefix."""
    return _pattern(prefix, rb"(?:" + _PART + rb"|" + _PLAIN + rb")")


def _pattern(prefix: bytes, suffix: bytes) -> str:
    literal = "".join(f"\\x{byte:02x}" for byte in prefix)
    return f"(?s-u)^{literal}.*{suffix.decode()}$"


def _is_split(form: Form | MooncakeError | None, found: int) -> bool:
    if isinstance(form, MooncakeError):
        # Nobody can read the objects now; manifests have names that nobody else gives.
        return bool(found & _MANIFEST_BITS)
    return form is not None and form.is_split


@dataclass(slots=True)
class _Parts:
    """The objects of a tensor that a listing has seen."""

    size: int = 0
    is_complete: bool = True
    replicas: int | None = None
    disk_replicas: int = 0

    def add(self, found: ObjectInfo) -> None:
        self.size += found.size
        self.is_complete = self.is_complete and found.is_complete
        known, on_disk = self.replicas, found.disk_replicas
        self.replicas = found.replicas if known is None else min(known, found.replicas)
        self.disk_replicas = on_disk if known is None else min(self.disk_replicas, on_disk)

    @property
    def copies(self) -> tuple[int, int]:
        """Number of copies, and of those on disks."""
        return self.replicas or 0, self.disk_replicas


class TensorListing:
    """Puts the objects of tensors in shards together, in a listing in the byte order of keys."""

    __slots__ = ("_open", "_prefix", "_whole")

    def __init__(self, prefix: bytes) -> None:
        """Begin a listing.

        Args:
            prefix: Prefix of the listed keys; tensors whose keys do not have it are left out.
        """
        self._prefix = prefix
        self._open: dict[bytes, _Parts] = {}
        # The listed keys with which the present one begins.
        self._whole: list[bytes] = []

    @property
    def state(self) -> tuple[Any, ...]:
        """What `at_state` needs to go on with the listing, as lists of bytes and numbers."""
        rows = (
            (key, each.size, each.is_complete, *each.copies) for key, each in self._open.items()
        )
        return list(rows), list(self._whole)

    @classmethod
    def at_state(cls, prefix: bytes, state: tuple[Any, ...]) -> Self:
        """Go on with a listing."""
        listing = cls(prefix)
        rows, whole = state
        listing._open = {key: _Parts(*of) for key, *of in rows}
        listing._whole = list(whole)
        return listing

    def add(self, found: ObjectInfo) -> Iterator[ObjectInfo]:
        """Take the next object; yield it, or the tensors of which no more objects can follow."""
        yield from self.over_at(found.key_bytes)
        yield from self.add_next(found)

    def over_at(self, key: bytes) -> Iterator[ObjectInfo]:
        """Yield the tensors of which no more objects can follow when a key does."""
        for base in [base for base in self._open if key > base + _BEHIND]:
            yield from self._close(base)

    def add_next(self, found: ObjectInfo) -> Iterator[ObjectInfo]:
        """Take the next object, after `over_at` of its key; yield it if it is no part."""
        key = found.key_bytes
        while self._whole and not key.startswith(self._whole[-1]):
            self._whole.pop()
        of = self._tensor_of(key, found.size)
        if of is not None:
            self._open.setdefault(of, _Parts()).add(found)
            return
        self._whole.append(key)
        yield found

    def rest(self) -> Iterator[ObjectInfo]:
        """Yield the tensors that are left at the end."""
        for base in list(self._open):
            yield from self._close(base)

    def _tensor_of(self, key: bytes, size: int) -> bytes | None:
        """Return the key of the tensor of which an object is a part; None if it is none."""
        match = _IS_MANIFEST.fullmatch(key) if size == MANIFEST_BYTES else None
        match = match or _IS_PART.fullmatch(key)
        if match is not None:
            return match[1]
        match = _IS_PLAIN.fullmatch(key)
        # Other objects may have such names, too; the manifest precedes the shards.
        return match[1] if match is not None and match[1] in self._open else None

    def _close(self, base: bytes) -> Iterator[ObjectInfo]:
        parts = self._open.pop(base)
        if base.startswith(self._prefix) and base not in self._whole:
            yield ObjectInfo(decoded(base), parts.size, parts.is_complete, *parts.copies)
