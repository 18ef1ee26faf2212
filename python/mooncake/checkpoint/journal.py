"""What a save notes of the parts that it has put, so that the next one can use them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooncake.errors import MooncakeError

__all__ = ["JOURNAL", "is_journal", "journal", "read_journals", "suffix_of"]

JOURNAL: Final = "~journal."


def suffix_of(name: str) -> str:
    """Return what follows the id of the save in the name of a part."""
    return name.rpartition("/")[2]


def is_journal(key: str) -> bool:
    """Return whether an object of a save is a note."""
    return suffix_of(key).startswith(JOURNAL)


def journal(group: str, put: Mapping[int, tuple[str, int, int | None]]) -> bytes:
    """Return the text of a note.

    Args:
        group: Group of the parts.
        put: Name, version and checksum of each.
    """
    return json.dumps({"group": group, "parts": [*put.values()]}).encode()


def read_journals(native: Any, keys: Sequence[str]) -> tuple[str, dict[str, tuple[str, int, int]]]:
    """Return the group of most parts that notes name, and name, version and checksum of those.

    The parts are known by what follows the id of the save in their names. Notes that are damaged or
    gone count for nothing.
    """
    found: dict[str, dict[str, tuple[str, int, int]]] = {}
    for data in native.get(keys, lease=False) if keys else ():
        if isinstance(data, MooncakeError):
            continue
        try:
            note = json.loads(data)
            parts = found.setdefault(str(note["group"]), {})
            for name, version, xxh3 in note["parts"]:
                parts[suffix_of(str(name))] = (str(name), int(version), int(xxh3))
        except (KeyError, TypeError, ValueError, RecursionError):
            continue
    group = max(found, key=lambda each: len(found[each]), default="")
    return group, found.get(group, {})
