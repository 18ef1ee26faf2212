"""The catalog: which fragment and row holds each field of each key, and what may be deleted."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .handle import (
    Handle,
    HandleView,
    checked_names,
    checked_tags,
    checked_text,
    copied,
    view_handle,
)

__all__ = ["UNACKNOWLEDGED_MAX", "DataProtoCatalog"]

# Results of publications that no client has acknowledged. The oldest are dropped above this
# number: their clients are gone, or would have repeated the publication long ago.
UNACKNOWLEDGED_MAX = 65536

Location: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class _Entry:
    """A key: its tags, and the fragment and row of each of its fields."""

    tag: dict[str, Any] = field(default_factory=dict)
    locations: dict[str, Location] = field(default_factory=dict)


@dataclass(slots=True)
class _Fragment:
    """A stored batch, alive while a field of a key or a pinned read refers to it.

    A managed fragment is retired after that, and clients are asked to delete it.
    """

    view: HandleView
    is_managed: bool
    references: int = 0
    readers: int = 0


class DataProtoCatalog:
    """Maps the keys of a partition to rows of stored DataProto batches.

    Each key has tags and fields; each field lies in one row of one fragment. A later publication
    of a field replaces its location. Fragments that no key refers to any more are *retired*: each
    mutation returns their handles until `ack_retired` confirms that they were deleted.

    The methods may be called from several threads at once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._partitions: dict[str, dict[str, _Entry]] = {}
        self._fragments: dict[str, _Fragment] = {}
        self._retired: dict[str, Handle] = {}
        self._publications: dict[str, dict[str, Any]] = {}
        self._reads: dict[int, tuple[str, ...]] = {}
        self._next_token = 1
        self._is_drained = False

    def update(
        self,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Sets tags of keys, or the locations of their fields, or both.

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
        """Does what `update` does, once per `operation_id`, and takes over the fragment.

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
        """Forgets the result of a publication, which will not be repeated any more."""
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
        """Replaces the handle of a fragment by one with more stages, once per `operation_id`.

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
        """Returns where the fields of keys lie; all fields that any of the keys has by default.

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
            if wanted is None:
                wanted = _fields_of(entries)
                if not wanted:
                    raise ValueError("requested keys do not contain any fields")
            groups: dict[tuple[Location, ...], list[str]] = {}
            for name in wanted:
                try:
                    places = tuple([entry.locations[name] for entry in entries])
                except KeyError:
                    raise _not_ready(names, entries, wanted) from None
                groups.setdefault(places, []).append(name)
            used = tuple(dict.fromkeys(place[0] for places in groups for place in places))
            answer = {
                "keys": list(names),
                "tags": [copied(entry.tag) for entry in entries],
                "fields": list(wanted),
                "field_groups": [
                    {"fields": grouped, "locations": list(places)}
                    for places, grouped in groups.items()
                ],
                "handles": {name: copied(self._fragments[name].view.handle) for name in used},
                "meta_info": self._meta_info(used),
            }
            if pin:
                answer["read_token"] = self._pin(used)
            return answer

    def release_read(self, token: int) -> dict[str, Any]:
        """Ends a pinned read. A token that is unknown or was released already has no effect."""
        with self._lock:
            for fragment_id in self._reads.pop(token, ()):
                self._fragments[fragment_id].readers -= 1
                self._retire_if_unused(fragment_id)
            return self._retired_handles()

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns the tags of each key of one or of all partitions."""
        if partition is not None:
            checked_text(partition, "partition")
        with self._lock:
            return {
                name: {key: copied(entry.tag) for key, entry in entries.items()}
                for name, entries in self._partitions.items()
                if partition in (None, name)
            }

    def remove(self, partition: str, keys: Sequence[str]) -> dict[str, Any]:
        """Removes keys; unknown ones have no effect. Returns the `retired_handles`."""
        checked_text(partition, "partition")
        names = checked_names(keys, "keys")
        with self._lock:
            entries = self._partitions.get(partition, {})
            for key in names:
                entry = entries.pop(key, None)
                for location in entry.locations.values() if entry else ():
                    self._drop_reference(location[0])
            if not entries:
                self._partitions.pop(partition, None)
            return self._retired_handles()

    def drain(self) -> dict[str, Any]:
        """Removes all keys and refuses new ones. Returns the `retired_handles`.

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
                self.remove(partition, list(entries))
            self._publications.clear()
            return self._retired_handles()

    def ack_retired(self, handles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Confirms that retired fragments were deleted. Returns those that remain.

        Raises:
            ValueError: A handle is none, or is not the last one of its fragment.
        """
        views = [view_handle(handle) for handle in handles]
        with self._lock:
            for view in views:
                for fragment_id in view.stages.values():
                    retired = self._retired.get(fragment_id)
                    if retired is None:
                        continue
                    if retired != view.handle:
                        raise ValueError(f"retired DataProto fragment mismatch: {fragment_id!r}")
                    del self._retired[fragment_id]
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
        view, fragment_id = None, ""
        if handle is not None:
            view = view_handle(handle)
            fragment_id = view.fragment_id
            view.require_rows(len(names))
            self._add_fragment(fragment_id, view, is_managed=is_managed)
        entries = self._partitions.setdefault(partition, {})
        for row, key in enumerate(names):
            entry = entries.setdefault(key, _Entry())
            if checked is not None:
                entry.tag.update(checked[row])
            if view is not None:
                self._locate(entry, view.fields, (fragment_id, row))
        return self._result(partition, names)

    def _append_refusal(
        self,
        fragment_id: str,
        partition: str,
        keys: Sequence[str],
        before: HandleView,
        after: HandleView,
    ) -> str | None:
        """Returns why a fragment cannot be replaced by a longer one, None if it can."""
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
        entries = self._partitions.get(partition, {})
        absent = [key for key in keys if key not in entries]
        if absent:
            return f"keys not found in partition {partition!r}: {absent}"
        index, previous_index = (view.handle["field_index"] for view in (after, before))
        keeps_fields = all(index.get(name) == previous_index[name] for name in before.fields)
        if not keeps_fields or not before.stages.items() <= after.stages.items():
            return "appended DataProto handle changed existing fields"
        return None

    def _append(
        self, fragment_id: str, partition: str, keys: Sequence[str], view: HandleView
    ) -> dict[str, Any]:
        fragment = self._fragments[fragment_id]
        added = [name for name in view.fields if name not in fragment.view.fields]
        fragment.view = view
        entries = self._partitions[partition]
        for row, key in enumerate(keys):
            self._locate(entries[key], added, (fragment_id, row))
        return self._result(partition, keys)

    def _add_fragment(self, fragment_id: str, view: HandleView, *, is_managed: bool) -> None:
        if fragment_id in self._retired:
            raise ValueError(f"DataProto fragment id is pending retirement: {fragment_id!r}")
        fragment = self._fragments.setdefault(fragment_id, _Fragment(view, is_managed))
        if fragment.view.handle != view.handle:
            raise ValueError(f"DataProto fragment id collision: {fragment_id!r}")
        if fragment.is_managed != is_managed:
            raise ValueError(f"DataProto fragment management mismatch: {fragment_id!r}")

    def _locate(self, entry: _Entry, fields: Sequence[str], location: Location) -> None:
        for name in fields:
            previous = entry.locations.get(name)
            entry.locations[name] = location
            # Counted before the previous one is dropped, which may be the same fragment.
            self._fragments[location[0]].references += 1
            if previous is not None:
                self._drop_reference(previous[0])

    def _drop_reference(self, fragment_id: str) -> None:
        self._fragments[fragment_id].references -= 1
        self._retire_if_unused(fragment_id)

    def _retire_if_unused(self, fragment_id: str) -> None:
        fragment = self._fragments[fragment_id]
        if fragment.references or fragment.readers:
            return
        del self._fragments[fragment_id]
        if fragment.is_managed:
            self._retired[fragment_id] = fragment.view.handle

    def _pin(self, fragment_ids: tuple[str, ...]) -> int:
        token = self._next_token
        self._next_token += 1
        self._reads[token] = fragment_ids
        for fragment_id in fragment_ids:
            self._fragments[fragment_id].readers += 1
        return token

    def _entries(self, partition: str, keys: Sequence[str]) -> Sequence[_Entry]:
        entries = self._partitions.get(partition, {})
        absent = [key for key in keys if key not in entries]
        if absent:
            raise ValueError(f"keys were not found in partition {partition!r}: {absent}")
        return [entries[key] for key in keys]

    def _meta_info(self, fragment_ids: Sequence[str]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for fragment_id in fragment_ids:
            meta_info = self._fragments[fragment_id].view.handle.get("meta_info") or {}
            for name, value in meta_info.items():
                if merged.setdefault(name, value) != value:
                    raise ValueError(f"conflicting DataProto meta_info value for {name!r}")
        return copied(merged)

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
        return {"retired_handles": [copied(handle) for handle in self._retired.values()]}


def _not_ready(keys: Sequence[str], entries: Sequence[_Entry], wanted: Sequence[str]) -> ValueError:
    """Returns the error that names the first key without all of the fields."""
    key, absent = next(
        (key, absent)
        for key, entry in zip(keys, entries, strict=True)
        if (absent := [name for name in wanted if name not in entry.locations])
    )
    return ValueError(f"fields are not ready for key {key!r}: {absent}")


def _fields_of(entries: Sequence[_Entry]) -> tuple[str, ...]:
    """Returns the fields that any of the keys has, each once, in order."""
    return tuple(dict.fromkeys(name for entry in entries for name in entry.locations))
