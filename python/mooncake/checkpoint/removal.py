"""Removal of the parts that neither a manifest nor a running save names."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from mooncake.checkpoint.journal import is_journal
from mooncake.checkpoint.manifest import read_manifest
from mooncake.checkpoint.marks import in_use, is_mark
from mooncake.checkpoint.names import Keys, listed
from mooncake.errors import CorruptError, NotFoundError, NotSupportedError

__all__ = ["remove_unused"]

_BATCH = 1024


def remove_unused(
    native: Any,
    keys: Keys,
    *,
    saves: Container[str] | None = None,
    ended: Container[str] = (),
    unrelated: int | None = None,
) -> int:
    """Remove the parts of saves that no manifest names and no running save uses.

    The order of the steps is what keeps the parts of others. A save puts its mark before its parts,
    and looks for it after its manifest. So either the mark is removed here before the save looks,
    and the save fails; or the manifest that is read here names the parts. A save that uses parts of
    another one puts a mark among them and then looks for the notes that told it of them; here the
    notes are removed before the second look for marks.

    Args:
        native: The native store.
        keys: Keys of the checkpoint.
        saves: Ids of the saves whose parts may be removed; None for all.
        ended: Ids of saves that can no longer end well: their marks do not count.
        unrelated: Version of a manifest that names none of the parts.

    Returns:
        Number of removed objects. Parts that are being written or copied stay; the next save or
        removal finds them again.
    """
    first = _objects(native, keys, saves)
    removed = 0
    found: set[str] = set()
    for save, objects in first.items():
        marks = [key for key in objects if is_mark(key)]
        if in_use(native, marks, ended):
            continue
        found.add(save)
        removed += len(marks)
        removed += _remove(native, [key for key in objects if is_journal(key)])
    if not found:
        return removed
    second = _objects(native, keys, found)
    kept = _named(native, keys, unrelated)
    if kept is None:
        return removed
    for objects in second.values():
        if not any(map(is_mark, objects)):
            removed += _remove(native, [key for key in objects if key not in kept])
    return removed


def _objects(native: Any, keys: Keys, saves: Container[str] | None) -> dict[str, list[str]]:
    """Return the keys of the objects of saves by the ids of these."""
    found: dict[str, list[str]] = {}
    for key, _, _ in listed(native, keys.saves):
        save = keys.save_of(key)
        if save is not None and (saves is None or save in saves):
            found.setdefault(save, []).append(key)
    return found


def _named(native: Any, keys: Keys, unrelated: int | None) -> set[str] | None:
    """Return the keys of the parts that the manifest names; None if it cannot be read."""
    (known,) = native.describe([keys.manifest])
    if isinstance(known, dict) and known["version"] == unrelated:
        return set()
    try:
        return {keys.of(part.name) for part in read_manifest(native, keys).parts()}
    except NotFoundError:
        return set()
    except (CorruptError, NotSupportedError):
        return None


def _remove(native: Any, stale: list[str]) -> int:
    removed = 0
    for at in range(0, len(stale), _BATCH):
        outcomes = native.remove(stale[at : at + _BATCH], force=True)
        removed += sum(outcome is True for outcome in outcomes)
    return removed
