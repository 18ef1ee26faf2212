"""Names of checkpoints, and the keys of the objects that a checkpoint consists of.

A checkpoint `run/1` has a manifest ``run/1/@checkpoint`` and parts ``run/1/@SAVE/PART``, where
``SAVE`` is the id of the save that wrote them. No segment of a name begins with ``@``, so that the
objects of `run/1` are not those of `run/10`, nor those of `run/1/ema`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, Final

from mooncake._api.async_store import AsyncStore
from mooncake._api.store import Store
from mooncake._api.values import decoded
from mooncake._runtime import _native
from mooncake.errors import MooncakeError

__all__ = [
    "CORRUPT",
    "INVALID",
    "MANIFEST",
    "NOT_FOUND",
    "NO_SPACE",
    "Keys",
    "error_of",
    "listed",
    "native_of",
    "new_save_id",
]

MANIFEST: Final = "/@checkpoint"
NOT_FOUND: Final = -704
CORRUPT: Final = -801
INVALID: Final = -600
NO_SPACE: Final = -200

_SAVE = re.compile(r"@([0-9a-f]{16})/")
_OBJECT = re.compile(r"@[0-9a-f]{16}/[A-Za-z0-9._~-]{1,256}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_NAME_CHARACTERS = 200
_NAME_BYTES_MAX = 4096


class Keys:
    """The keys of one checkpoint.

    Attributes:
        prefix: Name of the checkpoint.
        manifest: Key of the manifest.
    """

    __slots__ = ("manifest", "prefix")

    def __init__(self, prefix: str) -> None:
        """Check a name.

        Raises:
            InvalidArgumentError: A segment of the name is empty, ``.``, ``..`` or begins with
                ``@``, or the name is too long.
        """
        self.prefix = checked_name(prefix)
        self.manifest = prefix + MANIFEST

    @property
    def saves(self) -> str:
        """Beginning of the keys of all parts, and of the manifest."""
        return f"{self.prefix}/@"

    def of(self, name: str) -> str:
        """Return the key of a part that the manifest names.

        Raises:
            ValueError: The name is not one of a part.
        """
        if _OBJECT.fullmatch(name) is None:
            raise ValueError(f"a part has a name outside of the checkpoint: {name!r:.100}")
        return f"{self.prefix}/{name}"

    def save_of(self, key: str) -> str | None:
        """Return the id of the save that wrote a part; None for another object."""
        found = _SAVE.match(key, len(self.prefix) + 1)
        return found[1] if found and key.startswith(self.saves) else None


def checked_name(prefix: str) -> str:
    """Return the name of a checkpoint.

    Raises:
        InvalidArgumentError: It is not one.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"the name of a checkpoint is text, not {type(prefix).__name__}")
    bad = [part for part in prefix.split("/") if part in ("", ".", "..") or part.startswith("@")]
    if bad:
        text = "a name of a checkpoint is segments with / between them, of which none is empty, .,"
        raise error_of(INVALID, f"{text} .. or begins with @", prefix=repr(prefix))
    if len(prefix.encode("utf-8", "surrogateescape")) > _NAME_BYTES_MAX:
        text = f"the name of a checkpoint is longer than {_NAME_BYTES_MAX} bytes"
        raise error_of(INVALID, text, prefix=f"{prefix[:60]!r}…")
    return prefix


def new_save_id() -> str:
    """Return an id that no other save has."""
    return secrets.token_hex(8)


def part_name(save: str, number: int, name: str) -> str:
    """Return the name of a part below the prefix; that of the tensor only helps readers."""
    return f"@{save}/{number:06d}.{_UNSAFE.sub('_', name)[:_NAME_CHARACTERS]}"


def native_of(store: Store | AsyncStore) -> _native.Store:
    """Return the native store, whose calls block.

    Raises:
        TypeError: The value is no store of our own API.
        ClosedError: The store is not open.
    """
    if isinstance(store, Store):
        return store._native
    if isinstance(store, AsyncStore):
        return store._native.opened()
    kind = f"{type(store).__module__}.{type(store).__qualname__}"
    raise TypeError(f"a checkpoint is in a mooncake.Store or mooncake.AsyncStore, not a {kind}")


def listed(native: _native.Store, prefix: str) -> Iterator[tuple[str, int, bool]]:
    """Iterate over key, length and completeness of the objects whose key has a prefix."""
    start, after = prefix.encode("utf-8", "surrogateescape"), None
    while True:
        page, is_last = native.list(prefix=start, after=after)
        for key, size, is_complete, *_ in page:
            yield decoded(key), size, is_complete
        if is_last or not page:
            return
        after = page[-1][0]


def error_of(
    code: int, text: str, *, key: str | None = None, remedy: str = "", **context: Any
) -> MooncakeError:
    """Return the exception of a code, about a key, with details by name."""
    return _native.failure(code, text, key=key, context=context or None, remedy=remedy)
