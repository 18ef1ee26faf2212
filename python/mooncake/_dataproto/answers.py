"""Parts of an answer of the catalog, each of which is copied when its reader takes it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from .handle import Handle, copied

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values

__all__ = ["HandleCopies", "TagCopies"]


class TagCopies(list[dict[str, Any]]):
    """Tags, each of which is copied when it is first taken out.

    Copying thousands of tags takes longer than finding them. The reader may change what it takes
    out, without an effect on what other readers get.
    """

    __slots__ = ("_own",)

    def __init__(self, tags: list[dict[str, Any]]) -> None:
        super().__init__(tags)
        # Places of the tags that are the reader's own; None when all of them are.
        self._own: set[int] | None = set()

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            self.copy_all()
            return super().__getitem__(at)
        tag = super().__getitem__(at)
        place = at.__index__() % len(self)
        if self._own is None or place in self._own:
            return tag
        self._own.add(place)
        tag = copied(tag)
        super().__setitem__(place, tag)
        return tag

    def __radd__(self, others: list[Any]) -> list[Any]:
        # Without this method, a list would take the items past `__iter__`.
        return [*others, *self]

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        # Readers in other processes, and deep copies, get a plain list.
        return list, (list(self),)

    def copy_all(self) -> None:
        """Copy the tags that were not taken out before."""
        if self._own is None:
            return
        own, self._own = self._own, None
        tags = enumerate(super().__iter__())
        copies = [tag if place in own else copied(tag) for place, tag in tags]
        super().__setitem__(slice(None), copies)


def _after_copying(name: str) -> Callable[..., Any]:
    """Return a method of lists for `TagCopies`: it takes out or moves all tags."""
    method = getattr(list, name)

    def call(self: TagCopies, *given: Any, **named: Any) -> Any:
        self.copy_all()
        return method(self, *given, **named)

    call.__name__ = name
    call.__doc__ = method.__doc__
    return call


for _name in (
    *("__add__", "__delitem__", "__iadd__", "__imul__", "__iter__", "__mul__", "__reversed__"),
    *("__rmul__", "__setitem__", "append", "clear", "copy", "extend", "insert", "pop", "remove"),
    *("reverse", "sort"),
):
    setattr(TagCopies, _name, _after_copying(_name))


class HandleCopies(dict[str, Handle]):
    """Handles by fragment, each of which is copied when it is first taken out.

    An answer may name thousands of fragments of which its reader takes few. The reader may change
    what it takes out, without an effect on what other readers get.
    """

    def __init__(self, handles: Mapping[str, Handle]) -> None:
        super().__init__(handles)
        # Names whose handles are the reader's own.
        self._own: set[str] = set()

    def __getitem__(self, name: str) -> Handle:
        handle = super().__getitem__(name)
        if name not in self._own:
            handle = copied(handle)
            self[name] = handle
        return handle

    def __setitem__(self, name: str, handle: Handle) -> None:
        super().__setitem__(name, handle)
        self._own.add(name)

    def __iter__(self) -> Iterator[str]:
        # Without this method, `dict(...)` and `{**...}` would read the items past `__getitem__`.
        return super().__iter__()

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**self, **other}

    def __reduce__(self) -> tuple[type, tuple[dict[str, Handle]]]:
        # Readers in other processes, and deep copies, get a plain dictionary.
        return dict, (dict(self),)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the handle of a fragment, or `default`."""
        # `dict.get` would return what others have, too.
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> dict_items[str, Handle]:
        """Return the fragments and their handles."""
        self._copy_all()
        return super().items()

    def values(self) -> dict_values[str, Handle]:
        """Return the handles."""
        self._copy_all()
        return super().values()

    def copy(self) -> dict[str, Handle]:
        """Return the handles in a plain dictionary."""
        return dict(self)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a fragment; return its handle, or `default`."""
        self._copy_all()
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Handle]:
        """Remove a fragment; return it with its handle."""
        self._copy_all()
        return super().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return the handle of a fragment, after setting it to `default` if there is none."""
        self._copy_all()
        return super().setdefault(name, default)

    def _copy_all(self) -> None:
        for name in tuple(self):
            # Taking a handle out copies it.
            self.get(name)
