"""`mooncake doctor`: reports what this machine has, what works, and which transports are chosen."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mooncake import env
from mooncake._command.output import described
from mooncake._runtime import __version__, _native
from mooncake._units import format_bytes
from mooncake.errors import MooncakeError

__all__ = ["add_options", "diagnose", "run"]

_USED = "used for the protocol rdma:"
# The values by which the store takes a switch for off; any other value turns it on.
_OFF = ("0", "false", "f", "no", "n", "off", "disable")
# Reads below this rate take as long as computing the keys and values of a prefix again.
_RECOMPUTING = 2_000_000_000
_RECOMPUTING_TEXT = "2 GB/s"
# Bytes that are written to measure a directory.
_MEASURED_MIN, _MEASURED_MAX = 64 << 20, 1 << 30
_PACKAGES = ("numpy", "torch", "vllm", "sglang", "lmcache")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument(
        "--disk",
        action="append",
        default=[],
        dest="disks",
        metavar="DIR",
        help="directory for copies of objects, to measure how fast it is written and read; may be "
        "repeated; by default those that MOONCAKE_OFFLOAD_FILE_STORAGE_PATH or _PATHS names",
    )


def run(options: argparse.Namespace, probe: Callable[[str], str]) -> int:
    """Print the result of `diagnose`.

    Args:
        options: ``is_json``, and ``disks``: directories to measure.
        probe: Moves bytes to a second process over a transport; returns a description of the
            result.

    Returns:
        0, or 1 if a transport that should work does not.
    """
    found = diagnose(probe, options.disks)
    if options.is_json:
        print(json.dumps(found, indent=2))
    else:
        for title, rows in found.items():
            print(f"{title}:")
            width = max(map(len, rows), default=0)
            for name, value in rows.items():
                print(f"  {name:<{width}}  {value}")
    is_bad = any("does not work" in value for value in found["transports"].values())
    return 1 if is_bad else 0


def diagnose(probe: Callable[[str], str], disks: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Return the findings by section."""
    devices, why_none = _native.rdma_devices()
    transports = _transports(probe)
    transports["rdma"] = why_none or _describe_devices(devices)
    return {
        "versions": _versions(),
        "transports": transports,
        "choice": _choice(transports),
        "networks": _networks(),
        "rdma devices": _rdma_devices(devices, why_none),
        "memory": _memory(),
        "disks": _disks(disks or _disks_of_environment()),
        "limits": _limits(),
        "environment": _environment(),
    }


def _versions() -> dict[str, str]:
    system = os.uname()
    rows = {
        "mooncake": f"{__version__} ({platform.architecture()[0]}, native module abi3)",
        "python": f"{sys.version.split()[0]} ({sys.implementation.name})",
        "system": f"{system.sysname} {system.release} {system.machine}",
        "libc": " ".join(platform.libc_ver()) or "unknown",
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows[name] = importlib.metadata.version(name)
    return rows


def _transports(probe: Callable[[str], str]) -> dict[str, str]:
    rows = {"memory": "works: within one process bytes are copied"}
    for name in ("shm", "tcp"):
        try:
            rows[name] = probe(name)
        except (MooncakeError, OSError, RuntimeError) as error:
            rows[name] = f"does not work: {described(error)}"
    return rows


def _describe_devices(devices: list[_native.RdmaDevice]) -> str:
    usable = ", ".join(device.name for device in devices if device.chosen is not None)
    if usable:
        return f"{_USED} {usable}"
    names = ", ".join(device.name for device in devices)
    return f"no device can be used: {names}; see below" if names else "this machine has no device"


def _choice(transports: dict[str, str]) -> dict[str, str]:
    given = next((each.value for each in env.settings() if each.name == "MC_FORCE_TCP"), "off")
    is_forced = given.strip().lower() not in _OFF
    has_shm = transports["shm"].startswith("works") and not is_forced
    why = "MC_FORCE_TCP is set" if is_forced else "shared memory does not work"
    return {
        "same process": "memory: one copy, no system call",
        "same host": "shm: one copy, no socket" if has_shm else f"tcp, since {why}",
        "other hosts": _choice_between_hosts(transports["rdma"], is_forced),
    }


def _choice_between_hosts(rdma: str, is_forced: bool) -> str:
    if is_forced:
        return "tcp, since MC_FORCE_TCP is set"
    if rdma.startswith(_USED):
        return "rdma for the protocol rdma, where both hosts have devices; else tcp"
    return "tcp, since no RDMA device can be used"


def _networks() -> dict[str, str]:
    rows = {}
    for path in sorted(Path("/sys/class/net").glob("*")):
        state = _read(path / "operstate") or "unknown"
        speed = _read(path / "speed")
        parts = [state, f"mtu {_read(path / 'mtu')}"]
        if speed.isdigit():
            parts.append(f"{int(speed) / 1000:g} Gbit/s")
        if (path / "device" / "infiniband").is_dir():
            names = ", ".join(each.name for each in (path / "device" / "infiniband").iterdir())
            parts.append(f"RDMA device {names}")
        node = _read(path / "device" / "numa_node")
        if node.isdigit():
            parts.append(f"NUMA node {node}")
        rows[path.name] = ", ".join(parts)
    return rows or {"none": "no network interface is visible"}


def _rdma_devices(devices: list[_native.RdmaDevice], why_none: str | None) -> dict[str, str]:
    """Return the state of each device, and what an engine without named devices would choose."""
    rows = {}
    for device in devices:
        addresses = {
            index: f"{address} ({', '.join(filter(None, (kind, interface)))})"
            for index, address, kind, interface in device.addresses
        }
        rows[device.name] = (
            f"not used: {device.reason}"
            if device.chosen is None
            else f"used with address {device.chosen}: {addresses[device.chosen]}"
        )
        parts = [device.state, device.link_layer]
        if device.megabits_per_second:
            parts.append(f"{device.megabits_per_second / 1000:g} Gbit/s")
        if device.mtu:
            parts.append(f"MTU {device.mtu}")
        node = _read(Path("/sys/class/infiniband", device.name, "device/numa_node"))
        if node.isdigit():
            parts.append(f"NUMA node {node}")
        rows[f"{device.name} port"] = ", ".join(filter(None, parts)) or "unknown"
        rows[f"{device.name} addresses"] = (
            "; ".join(f"{index}: {text}" for index, text in addresses.items()) or "none"
        )
        rows[f"{device.name} limits"] = (
            ", ".join(f"{name}: {_limit(value)}" for name, value in device.limits.items())
            or "unknown"
        )
    return rows or {"none": why_none or "this machine has no device"}


def _limit(value: int) -> str:
    return str(value) if value < 1 << 63 else "unlimited"


def _memory() -> dict[str, str]:
    table = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        table[name] = value.strip()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = {"memory": format_bytes(total)}
    group = _native.cgroup_memory()
    if group is not None and group[0] < total:
        limit, available = (format_bytes(number) for number in group)
        rows["memory limit of the cgroup"] = (
            f"{limit}, of which {available} are available; counts the pages of peers' segments "
            "that this process writes first through shared memory"
        )
    free_now = int(table.get("MemAvailable", "0 kB").split()[0]) * 1024
    lent_max = total
    if group is not None:
        lent_max, free_now = min(total, group[0]), min(free_now, group[1])
    rows["memory to lend"] = (
        f"up to {format_bytes(free_now * 3 // 4)} is sensible, three quarters of what is "
        f"available; more than {format_bytes(lent_max)} is refused"
    )
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    if shared is not None:
        free, size = shared.f_bavail * shared.f_frsize, shared.f_blocks * shared.f_frsize
        rows["/dev/shm"] = (
            f"{format_bytes(free)} free of {format_bytes(size)} (segments do not need it)"
        )
    huge, size_text = table.get("HugePages_Total", "0"), table.get("Hugepagesize", "")
    rows["huge pages"] = (
        f"{table.get('HugePages_Free', '0')} free of {huge}, {size_text} each; used with "
        "MC_STORE_USE_HUGEPAGE=1"
        if huge != "0"
        else "none reserved; pages of the default size are used"
    )
    thp = _read(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    if "[" in thp:
        rows["transparent huge pages for shared memory"] = thp.partition("[")[2].partition("]")[0]
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    rows["NUMA nodes"] = (
        ", ".join(f"{node.name[4:]}: cores {_read(node / 'cpulist')}" for node in nodes)
        or "unknown"
    )
    return rows


def _disks_of_environment() -> list[str]:
    """Return the directories for copies of objects that variables name."""
    given = {each.name: each.value for each in env.settings() if each.source}
    several = given.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATHS", "").split(",")
    paths = [path.strip() for path in several if path.strip()]
    one = given.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "").strip()
    return paths or ([one] if one else [])


def _disks(paths: Sequence[str]) -> dict[str, str]:
    rows = {}
    for path in paths:
        try:
            rows[path] = _measured(Path(path))
        except (MooncakeError, OSError, ValueError) as error:
            rows[path] = f"cannot be measured: {described(error)}"
    hint = "none named: --disk DIR measures one, MOONCAKE_OFFLOAD_FILE_STORAGE_PATH names one"
    return rows or {"none": hint}


def _measured(path: Path) -> str:
    """Write and read files beside a directory of records, and return how fast that is."""
    existing = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(existing).free
    if free < 4 * _MEASURED_MIN:
        return f"too full to be measured: {format_bytes(free)} are free"
    folder = tempfile.mkdtemp(prefix=".mooncake-doctor-", dir=_beside(existing))
    try:
        written, read, _, why, refused = _native.disk_measure(
            folder, min(_MEASURED_MAX, max(_MEASURED_MIN, free // 8))
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outruns = (
        f"outruns recomputing ({_RECOMPUTING_TEXT})"
        if read >= _RECOMPUTING
        else f"does not outrun recomputing ({_RECOMPUTING_TEXT}): use several directories on "
        "disks of their own, or keep there only what takes long to compute"
    )
    cached = "; its file system refuses reads past the page cache" if refused else ""
    return (
        f"writes {format_bytes(int(written))}/s, reads {format_bytes(int(read))}/s through {why}"
        f"{cached}; {outruns}"
    )


def _beside(path: Path) -> Path:
    """Return a directory of the same file system that need not stay empty, if there is one."""
    parent = path.absolute().parent
    is_same = parent.stat().st_dev == path.stat().st_dev
    return parent if is_same and os.access(parent, os.W_OK | os.X_OK) else path


def _limits() -> dict[str, str]:
    files, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rows = {
        "cores": f"{len(os.sched_getaffinity(0))} for this process, {os.cpu_count()} in total",
        "open files": f"{files}, hard limit {files_max}",
        "locked memory": "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked),
        "mappings": _read(Path("/proc/sys/vm/max_map_count")) or "unknown",
    }
    scope = _read(Path("/proc/sys/kernel/yama/ptrace_scope"))
    if scope:
        means = (
            "processes of one user can map each other's memory"
            if scope == "0"
            else ("peers use TCP to reach registered memory unless they may trace its owner")
        )
        rows["ptrace scope"] = f"{scope}: {means}"
    return rows


def _environment() -> dict[str, str]:
    rows = {each.name: _with_origin(each) for each in env.settings() if each.source}
    rows |= {each.name: f"without effect: {each.reason}" for each in env.ignored()}
    return rows or {"none": "no Mooncake variable is set"}


def _with_origin(setting: env.Setting) -> str:
    is_explained = setting.is_alias_used or setting.invalid
    return f"{setting.value} ({setting.origin})" if is_explained else setting.value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
