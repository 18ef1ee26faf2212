"""The catalog: which fragment and row holds each field of each key, and what may be deleted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from mooncake._native import KeyMap

from .answers import HandleCopies, TagCopies
from .handle import (
    Handle,
    HandleView,
    checked_names,
    checked_tags,
    checked_text,
    copied,
    is_plain,
    view_handle,
)

__all__ = ["UNACKNOWLEDGED_MAX", "DataProtoCatalog"]

# Results of publications that no client has acknowledged. The oldest are dropped above this
# number: their clients are gone, or would have repeated the publication long ago.
UNACKNOWLEDGED_MAX = 65536
# Row numbers and lists of fields of which each entry shares one, instead of its own.
_SHARED_ROWS_MAX = 65536
_SHARED_NAMES_MAX = 1024


@dataclass(slots=True, eq=False)
class _Fragment:
    """A stored batch, alive while a field of a key or a pinned read refers to it.

    A managed fragment is retired after that, and clients are asked to delete it.
    """

    id: str
    # The handle and its `meta_info` as in `view`. A look-up reads only these and the id, which lie
    # side by side in memory.
    handle: Handle = field(init=False)
    meta_info: Mapping[str, Any] | None = field(init=False)
    view: HandleView
    is_managed: bool
    references: int = 0
    readers: int = 0

    def __post_init__(self) -> None:
        self.show(self.view, None)

    def show(self, view: HandleView, shared: Mapping[str, Any] | None) -> None:
        """Take a handle, with the `meta_info` of another fragment if that is equal."""
        self.view = view
        self.handle = view.handle
        own = view.handle.get("meta_info") or None
        self.meta_info = shared if shared == own else own


Place: TypeAlias = tuple[_Fragment, int]

# Names of an entry whose fields are in several places. No field has an empty name.
_MIXED = ("",)
# The tag of keys without one. Tags never change: another one takes their place.
_NO_TAG: dict[str, Any] = {}


@dataclass(slots=True, eq=False)
class _Entry:
    """A key: its tags, and the fragment and row of each of its fields.

    There are millions of entries, and a look-up finds most of their parts in no cache. Most have
    all fields in one place, so these have no dictionary of their own: `names` is shared by all
    entries with the same fields, and `fragment` and `row` are the place of all of them. Once a key
    has fields in several places, `names` is `_MIXED`, and `fragment` is the dictionary of the
    places. With four attributes CPython lays an entry out in one line of a cache.
    """

    tag: dict[str, Any] = field(default_factory=lambda: _NO_TAG)
    names: tuple[str, ...] = ()
    # Not used without names.
    fragment: Any = None
    row: int = 0

    @property
    def places(self) -> dict[str, Place] | None:
        """The place of each field of a key that has them in several places; None for others."""
        return self.fragment if self.names is _MIXED else None

    def fields(self) -> Iterable[str]:
        """Return the names of the fields, in the order in which they came."""
        places = self.places
        return self.names if places is None else places

    def place_of(self, name: str) -> Place | None:
        """Return the place of a field; None if there is no such field."""
        places = self.places
        if places is not None:
            return places.get(name)
        return (self.fragment, self.row) if name in self.names else None

    def fragments(self) -> list[_Fragment]:
        """Return the fragment of each field."""
        places = self.places
        if places is not None:
            return [fragment for fragment, _ in places.values()]
        return [self.fragment] * len(self.names)

    def locate(self, names: tuple[str, ...], fragment: _Fragment, row: int) -> list[_Fragment]:
        """Set the place of fields; return the fragments that they had."""
        places = self.places
        if places is None and (not self.names or names == self.names):
            previous = self.fragments()
            self.names, self.fragment, self.row = names, fragment, row
            return previous
        if places is None:
            places = dict.fromkeys(self.names, (self.fragment, self.row))
            self.names, self.fragment = _MIXED, places
        previous = [places[name][0] for name in names if name in places]
        places.update(dict.fromkeys(names, (fragment, row)))
        return previous

    def add_tag(self, tag: dict[str, Any]) -> None:
        """Merge a tag, which other entries may share, into that of the key."""
        self.tag = {**self.tag, **tag} if self.tag else tag


class DataProtoCatalog:
    """Maps the keys of a partition to rows of stored DataProto batches.

    Each key has tags and fields; each field lies in one row of one fragment. A later publication
    of a field replaces its location. Fragments that no key refers to any more are *retired*: each
    mutation returns their handles until `ack_retired` confirms that they were deleted.

    The methods may be called from several threads at once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._partitions: dict[str, KeyMap] = {}
        self._fragments: dict[str, _Fragment] = {}
        self._retired: dict[str, HandleView] = {}
        # The fragment of each stage of the retired: a later stage has another key than a fragment.
        self._retired_stages: dict[str, str] = {}
        self._publications: dict[str, dict[str, Any]] = {}
        self._reads: dict[int, tuple[_Fragment, ...]] = {}
        self._shared_names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._shared_rows: list[int] = []
        self._next_token = 1
        self._is_drained = False
        self._last_meta_info: Mapping[str, Any] | None = None

    def update(
        self,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Set tags of keys, or the locations of their fields, or both.

        The fragment stays the caller's: it is never retired. Tags are merged into those that
        the key has.

        Returns:
            `keys`, their `tags`, their `fields`, and the `retired_handles`.

        Raises:
            ValueError: Neither tags nor a handle were given, a name is bad, the handle does not
                have a row per key, or another fragment has the same id.
            RuntimeError: The catalog is drained.
        """
        with self._lock:
            return self._update(partition, keys, tags, handle, is_managed=False)

    def publish(
        self,
        operation_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Do what `update` does, once per `operation_id`, and take over the fragment.

        A repetition returns the result of the first call, until `ack_publication`.

        Raises:
            ValueError: As `update`, or the fragment waits for its deletion.
            RuntimeError: The catalog is drained.
        """
        checked_text(operation_id, "operation_id")
        with self._lock:
            recorded = self._publications.get(operation_id)
            if recorded is None:
                recorded = self._update(partition, keys, tags, handle, is_managed=True)
                self._record(operation_id, recorded)
            return copied(recorded)

    def ack_publication(self, operation_id: str) -> None:
        """Forget the result of a publication, which will not be repeated any more."""
        checked_text(operation_id, "operation_id")
        with self._lock:
            self._publications.pop(operation_id, None)

    def publish_append(
        self,
        operation_id: str,
        fragment_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        previous_handle: Mapping[str, Any],
        handle: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Replace the handle of a fragment by one with more stages, once per `operation_id`.

        Returns:
            The result as of `update`, or `append_rejected` with the reason: the fragment is gone
            or has another handle than `previous_handle`, a key is gone, or the handle is no
            continuation of the previous one.

        Raises:
            ValueError: A name is bad, or a handle is none.
        """
        checked_text(operation_id, "operation_id")
        with self._lock:
            recorded = self._publications.get(operation_id)
            if recorded is None:
                checked_text(fragment_id, "fragment_id")
                checked_text(partition, "partition")
                names = checked_names(keys, "keys")
                before, after = view_handle(previous_handle), view_handle(handle)
                reason = self._append_refusal(fragment_id, partition, names, before, after)
                if reason is None:
                    recorded = self._append(fragment_id, partition, names, after)
                else:
                    recorded = {"append_rejected": reason}
                self._record(operation_id, recorded)
            return copied(recorded)

    def resolve(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str] | None = None,
        *,
        pin: bool = False,
    ) -> dict[str, Any]:
        """Return where the fields of keys lie; all fields that any of the keys has by default.

        Args:
            partition: The partition.
            keys: The keys, in the order of the answer.
            fields: The fields.
            pin: Keeps the fragments until `release_read` is called with the answer's
                `read_token`.

        Returns:
            `keys`, `tags`, `fields`, `handles` by fragment, the common `meta_info`, and
            `field_groups`: fields that lie in the same rows, with a fragment and row per key.

        Raises:
            ValueError: A key is unknown, a key lacks a field, no key has a field, or fragments
                disagree about an entry of `meta_info`.
        """
        checked_text(partition, "partition")
        names = checked_names(keys, "keys")
        wanted = None if fields is None else checked_names(fields, "field names")
        with self._lock:
            entries = self._entries(partition, names)
            used, locations = _places_of(entries, wanted)
            if wanted is None:
                wanted = entries[0].names if used else _fields_of(entries)
                if not wanted:
                    raise ValueError("requested keys do not contain any fields")
            field_groups: list[dict[str, Any]]
            if used:
                field_groups = [{"fields": list(wanted), "locations": locations}]
            else:
                groups = _groups_of(entries, wanted)
                if groups is None:
                    raise _not_ready(names, entries, wanted)
                field_groups = [
                    {"fields": grouped, "locations": [(each.id, row) for each, row in places]}
                    for places, grouped in groups.items()
                ]
                used = dict.fromkeys(place[0] for places in groups for place in places)
            answer = {
                "keys": list(names),
                "tags": TagCopies([entry.tag for entry in entries]),
                "fields": list(wanted),
                "field_groups": field_groups,
                "handles": HandleCopies({each.id: each.handle for each in used}),
                "meta_info": _meta_info(used),
            }
            if pin:
                answer["read_token"] = self._pin(tuple(used))
            return answer

    def release_read(self, token: int) -> dict[str, Any]:
        """End a pinned read. A token that is unknown or was released already has no effect."""
        with self._lock:
            for fragment in self._reads.pop(token, ()):
                fragment.readers -= 1
                self._retire_if_unused(fragment)
            return self._retired_handles()

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the tags of each key of one or of all partitions."""
        if partition is not None:
            checked_text(partition, "partition")
        with self._lock:
            return {
                name: {key: copied(entry.tag) for key, entry in entries.items()}
                for name, entries in self._partitions.items()
                if partition in (None, name)
            }

    def remove(self, partition: str, keys: Sequence[str]) -> dict[str, Any]:
        """Remove keys; unknown ones have no effect. Return the `retired_handles`."""
        checked_text(partition, "partition")
        names = checked_names(keys, "keys")
        with self._lock:
            self._remove(partition, names)
            return self._retired_handles()

    def drain(self) -> dict[str, Any]:
        """Remove all keys and refuse new ones. Return the `retired_handles`.

        Raises:
            RuntimeError: A pinned read has not ended.
        """
        with self._lock:
            if self._reads:
                raise RuntimeError(
                    f"cannot drain DataProto catalog with {len(self._reads)} active read(s)"
                )
            self._is_drained = True
            for partition, entries in list(self._partitions.items()):
                self._remove(partition, [key for key, _ in entries.items()])
            self._publications.clear()
            return self._retired_handles()

    def ack_retired(self, handles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Confirm that retired fragments were deleted. Return those that remain.

        Raises:
            ValueError: A handle is none, or is not the last one of its fragment.
        """
        views = [view_handle(handle) for handle in handles]
        with self._lock:
            for view in views:
                keys = view.stages.values()
                ids = [self._retired_stages.get(key, key) for key in keys]
                for fragment_id in dict.fromkeys((*keys, *ids)):
                    retired = self._retired.get(fragment_id)
                    if retired is not None and retired.handle == view.handle:
                        self._forget_retired(fragment_id)
                    elif retired is not None and fragment_id in keys:
                        raise ValueError(f"retired DataProto fragment mismatch: {fragment_id!r}")
            return self._retired_handles()

    def _update(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None,
        handle: Mapping[str, Any] | None,
        *,
        is_managed: bool,
    ) -> dict[str, Any]:
        if self._is_drained:
            raise RuntimeError("DataProto catalog is drained")
        checked_text(partition, "partition")
        names = checked_names(keys, "keys")
        checked = checked_tags(tags, len(names))
        if handle is None and checked is None:
            raise ValueError("catalog update requires tags or a DataProto handle")
        fragment: _Fragment | None = None
        fields: tuple[str, ...] = ()
        if handle is not None:
            view = view_handle(handle)
            fragment_id = view.fragment_id
            view.require_rows(len(names))
            fragment = self._add_fragment(fragment_id, view, is_managed=is_managed)
            fields = self._shared(view.fields)
        table = self._partitions.setdefault(partition, KeyMap())
        entries: Sequence[_Entry | None] = table.find(names)
        last: dict[str, Any] | None = None
        for at, row in enumerate(self._rows(len(names))):
            entry = entries[at]
            if entry is None:
                entry = table[names[at]] = _Entry()
            if checked is not None and checked[at]:
                # Equal tags of neighbours are one dictionary.
                if last is None or not _is_same(last, checked[at]):
                    last = checked[at]
                entry.add_tag(last)
            if fragment is not None:
                self._locate(entry, fields, fragment, row)
        return self._result(partition, names)

    def _append_refusal(
        self,
        fragment_id: str,
        partition: str,
        keys: Sequence[str],
        before: HandleView,
        after: HandleView,
    ) -> str | None:
        """Return why a fragment cannot be replaced by a longer one, None if it can."""
        if self._is_drained:
            return "DataProto catalog is drained"
        fragment = self._fragments.get(fragment_id)
        if fragment is None or not fragment.is_managed or fragment.view.handle != before.handle:
            return f"stale DataProto append handle: {fragment_id!r}"
        group, previous_group = (view.handle.get("storage_group_id") for view in (after, before))
        if (
            after.batch_size != before.batch_size
            or after.batch_size != len(keys)
            or after.partition != partition
            or group != previous_group
        ):
            return "appended DataProto handle changed fragment identity"
        absent = [
            key
            for key, entry in zip(keys, self._found(partition, keys), strict=True)
            if entry is None
        ]
        if absent:
            return f"keys not found in partition {partition!r}: {absent}"
        index, previous_index = (view.handle["field_index"] for view in (after, before))
        keeps_fields = all(index.get(name) == previous_index[name] for name in before.fields)
        # A stage that got more fields has another manifest, which names all of them.
        if not keeps_fields or not before.stages.keys() <= after.stages.keys():
            return "appended DataProto handle changed existing fields"
        return None

    def _append(
        self, fragment_id: str, partition: str, keys: Sequence[str], view: HandleView
    ) -> dict[str, Any]:
        fragment = self._fragments[fragment_id]
        added = tuple(name for name in view.fields if name not in fragment.view.fields)
        fragment.show(view, fragment.meta_info)
        entries = self._entries(partition, keys)
        for row, entry in zip(self._rows(len(keys)), entries, strict=True):
            if entry.fragment is fragment and entry.row == row and added:
                # All fields of the key stay in one place.
                fragment.references += len(added)
                entry.names = self._shared((*entry.names, *added))
            else:
                self._locate(entry, added, fragment, row)
        return self._result(partition, keys)

    def _add_fragment(self, fragment_id: str, view: HandleView, *, is_managed: bool) -> _Fragment:
        if fragment_id in self._retired:
            raise ValueError(f"DataProto fragment id is pending retirement: {fragment_id!r}")
        fragment = self._fragments.get(fragment_id)
        if fragment is None:
            fragment = _Fragment(fragment_id, view, is_managed)
            # Fragments of one producer have the same, which is then compared once for all of them.
            fragment.show(view, self._last_meta_info)
            self._last_meta_info = fragment.meta_info
            self._fragments[fragment_id] = fragment
        if fragment.view.handle != view.handle:
            raise ValueError(f"DataProto fragment id collision: {fragment_id!r}")
        if fragment.is_managed != is_managed:
            raise ValueError(f"DataProto fragment management mismatch: {fragment_id!r}")
        return fragment

    def _shared(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return equal names that other entries have, too."""
        if len(self._shared_names) >= _SHARED_NAMES_MAX:
            self._shared_names.clear()
        return self._shared_names.setdefault(names, names)

    def _rows(self, count: int) -> Sequence[int]:
        """Return the row numbers up to a count; the entries share them, so that few are read."""
        if count > _SHARED_ROWS_MAX:
            return range(count)
        if len(self._shared_rows) < count:
            self._shared_rows += range(len(self._shared_rows), count)
        return self._shared_rows[:count]

    def _locate(
        self, entry: _Entry, fields: tuple[str, ...], fragment: _Fragment, row: int
    ) -> None:
        if not fields:
            return
        previous = entry.locate(fields, fragment, row)
        # Counted before the previous ones are dropped, which may be of the same fragment.
        fragment.references += len(fields)
        for each in previous:
            self._drop_reference(each)

    def _drop_reference(self, fragment: _Fragment) -> None:
        fragment.references -= 1
        self._retire_if_unused(fragment)

    def _retire_if_unused(self, fragment: _Fragment) -> None:
        if fragment.references or fragment.readers:
            return
        del self._fragments[fragment.id]
        if fragment.is_managed:
            self._retired[fragment.id] = fragment.view
            stages = dict.fromkeys(fragment.view.stages.values(), fragment.id)
            self._retired_stages.update(stages)

    def _forget_retired(self, fragment_id: str) -> None:
        for key in self._retired.pop(fragment_id).stages.values():
            self._retired_stages.pop(key, None)

    def _pin(self, fragments: tuple[_Fragment, ...]) -> int:
        token = self._next_token
        self._next_token += 1
        self._reads[token] = fragments
        for fragment in fragments:
            fragment.readers += 1
        return token

    def _remove(self, partition: str, keys: Sequence[str]) -> None:
        table = self._partitions.get(partition)
        if table is None:
            return
        for key in keys:
            entry: _Entry | None = table.pop(key)
            for fragment in entry.fragments() if entry else ():
                self._drop_reference(fragment)
        if not table:
            del self._partitions[partition]

    def _found(self, partition: str, keys: Sequence[str]) -> Sequence[_Entry | None]:
        table = self._partitions.get(partition)
        return [None] * len(keys) if table is None else table.find(keys)

    def _entries(self, partition: str, keys: Sequence[str]) -> Sequence[_Entry]:
        found = self._found(partition, keys)
        if not all(found):
            absent = [key for key, entry in zip(keys, found, strict=True) if entry is None]
            raise ValueError(f"keys were not found in partition {partition!r}: {absent}")
        return cast("Sequence[_Entry]", found)

    def _record(self, operation_id: str, result: dict[str, Any]) -> None:
        self._publications[operation_id] = result
        while len(self._publications) > UNACKNOWLEDGED_MAX:
            del self._publications[next(iter(self._publications))]

    def _result(self, partition: str, keys: Sequence[str]) -> dict[str, Any]:
        entries = self._entries(partition, keys)
        return {
            "keys": list(keys),
            "tags": [copied(entry.tag) for entry in entries],
            "fields": list(_fields_of(entries)),
            **self._retired_handles(),
        }

    def _retired_handles(self) -> dict[str, Any]:
        return {"retired_handles": [copied(view.handle) for view in self._retired.values()]}


def _not_ready(keys: Sequence[str], entries: Sequence[_Entry], wanted: Sequence[str]) -> ValueError:
    """Return the error that names the first key without all of the fields."""
    key, absent = next(
        (key, absent)
        for key, entry in zip(keys, entries, strict=True)
        if (absent := [name for name in wanted if name not in entry.fields()])
    )
    return ValueError(f"fields are not ready for key {key!r}: {absent}")


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether tags are equal, with items in one order and of the same plain classes."""
    if one != other or list(one) != list(other) or not is_plain(other):
        return False
    kinds = [each.__class__ for each in other.values()]
    # 0.0 equals -0.0.
    return float not in kinds and kinds == [each.__class__ for each in one.values()]


def _places_of(
    entries: Sequence[_Entry], wanted: Sequence[str] | None
) -> tuple[dict[_Fragment, None], list[tuple[str, int]]]:
    """Return the fragments of keys and where the keys lie in them.

    Returns nothing unless the keys have the same fields, the wanted ones among them if they are
    named, and each key has them in one place.
    """
    names = entries[0].names
    used: dict[_Fragment, None] = {}
    locations: list[tuple[str, int]] = []
    if not names or names is _MIXED or not all(name in names for name in wanted or ()):
        return used, locations
    for entry in entries:
        if entry.names is not names:
            return {}, []
        fragment = entry.fragment
        used[fragment] = None
        locations.append((fragment.id, entry.row))
    return used, locations


def _fields_of(entries: Sequence[_Entry]) -> tuple[str, ...]:
    """Return the fields that any of the keys has, each once, in order."""
    names = entries[0].names
    if names is not _MIXED and all(entry.names is names for entry in entries):
        return names
    return tuple(dict.fromkeys(name for entry in entries for name in entry.fields()))


def _groups_of(
    entries: Sequence[_Entry], wanted: Sequence[str]
) -> dict[tuple[Place, ...], list[str]] | None:
    """Return the fields that lie in the same places; None if a key lacks one."""
    groups: dict[tuple[Place, ...], list[str]] = {}
    for name in wanted:
        places = [place for entry in entries if (place := entry.place_of(name)) is not None]
        if len(places) != len(entries):
            return None
        groups.setdefault(tuple(places), []).append(name)
    return groups


def _meta_info(fragments: Iterable[_Fragment]) -> dict[str, Any]:
    """Return the common metadata of fragments.

    Raises:
        ValueError: They disagree about an entry.
    """
    merged: dict[str, Any] = {}
    last = None
    for fragment in fragments:
        meta_info = fragment.meta_info
        if meta_info is None or meta_info is last:
            continue
        last = meta_info
        for name, value in meta_info.items():
            if merged.setdefault(name, value) != value:
                raise ValueError(f"conflicting DataProto meta_info value for {name!r}")
    return copied(merged)
