"""Which network devices are near which memory, as the kernel tells."""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["local_topology"]

_NODES = Path("/sys/devices/system/node")
_DEVICES = Path("/sys/class/infiniband")


def local_topology(
    wanted: str | None = None, *, nodes: Path = _NODES, devices: Path = _DEVICES
) -> str:
    """Return JSON: for each location the devices beside it, then the others.

    Args:
        wanted: Names of devices, with commas between them; None or "" for all.
        nodes: Where the kernel lists the NUMA nodes.
        devices: Where it lists the RDMA devices.
    """
    names = {name.strip() for name in (wanted or "").split(",")} - {""}
    near: dict[str, int] = {}
    for device in sorted(_entries(devices)):
        if not names or device.name in names:
            near[device.name] = _node_of(device)
    topology = {}
    for node in _node_numbers(nodes):
        beside = [name for name, at in near.items() if at == node]
        topology[f"cpu:{node}"] = [beside, [name for name in near if name not in beside]]
    return json.dumps(topology, indent=2)


def _node_numbers(nodes: Path) -> list[int]:
    found = (re.fullmatch(r"node(\d+)", entry.name) for entry in _entries(nodes))
    # A kernel without NUMA lists none; its memory is all in one place.
    return sorted(int(match[1]) for match in found if match) or [0]


def _node_of(device: Path) -> int:
    try:
        return max(0, int((device / "device" / "numa_node").read_text()))
    except (OSError, ValueError):
        return 0


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
