"""Gets of large objects: their memory is backed by huge pages where the kernel has them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING

from conftest import MIB

if TYPE_CHECKING:
    import mooncake

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_of(address: int) -> list[str]:
    """Return the flags of the mapping that contains an address."""
    mapping = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(text, 16) for text in found.groups())
            mapping = line if start <= address < end else ""
        elif mapping and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping contains {address:#x}")


def test_large_results_prefer_huge_pages(store: mooncake.Store):
    value = b"v" * (40 * MIB)
    assert store.put("large", value)
    assert store.put("small", b"v" * MIB)
    whole, text = store.get_buffer("large"), store.get("large")
    assert text == value
    assert memoryview(whole) == value
    # The content of `bytes` begins behind the header of the object.
    inside = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0
    large = [flags_of(address + 8 * MIB) for address in (whole.ptr(), inside)]
    assert all(("hg" in flags) == HUGE_PAGES.exists() for flags in large)
    assert "hg" not in flags_of(store.get_buffer("small").ptr())
