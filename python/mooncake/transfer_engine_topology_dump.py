"""The program `transfer_engine_topology_dump`: prints which devices are near which memory.

The program is native. The other functions are those of upstream's module, for scripts that import
them; the topology of the engine TENT is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from mooncake._runtime import _native
from mooncake._standard_streams import open_closed_streams
from mooncake.errors import NotSupportedError

__all__ = [
    "apply_backend",
    "dump_te_topology",
    "dump_tent_topology",
    "main",
    "parse_args",
    "resolve_backend",
    "sanitize_tent_conf_for_discover",
]

_TENT_VARIABLES = ("MC_USE_TENT", "MC_USE_TEV1")
_OVERRIDES = ("priority_matrix", "custom_json_path")


def main() -> int:
    """Print the topology of this machine.

    Returns:
        The exit code: 0, or 1 after an error.
    """
    open_closed_streams()
    return _native.run_topology_dump(sys.argv[1:])


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the program, under upstream's names.

    Args:
        arguments: The words of the command line; None stands for those of this process.
    """
    parser = argparse.ArgumentParser(
        description="Prints which network devices are close to which memory of this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--device-name", default="", help="only these devices; names separated by commas"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "te", "tent"),
        default="auto",
        help="engine whose topology is printed; auto follows MC_USE_TENT and MC_USE_TEV1",
    )
    parser.add_argument(
        "--use-custom-topo", action="store_true", help="the file that MC_CUSTOM_TOPO_JSON names"
    )
    parser.add_argument("--custom-topo-json", default=None, help="this topology file")
    return parser.parse_args(arguments)


def resolve_backend(backend: str) -> str:
    """Return the engine that a value of `--backend` means: `te` or `tent`."""
    if backend != "auto":
        return backend
    return "tent" if any(map(os.environ.get, _TENT_VARIABLES)) else "te"


def apply_backend(backend: str) -> None:
    """Set the variables of this process by which upstream's engine is chosen."""
    if backend == "tent":
        os.environ.setdefault("MC_USE_TENT", "1")
        return
    for name in _TENT_VARIABLES:
        os.environ.pop(name, None)


def sanitize_tent_conf_for_discover() -> str | None:
    """Let `MC_TENT_CONF` name a copy of its configuration that does not override the topology.

    Returns:
        Path of the copy, which the caller deletes; None if nothing is overridden.
    """
    data = _tent_configuration(os.environ.get("MC_TENT_CONF", ""))
    topology = data.get("topology") if isinstance(data, dict) else None
    if not isinstance(topology, dict) or not any(name in topology for name in _OVERRIDES):
        return None
    kept = {name: value for name, value in topology.items() if name not in _OVERRIDES}
    descriptor, path = tempfile.mkstemp(prefix="tent-topo-dump-", suffix=".json")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({**data, "topology": kept}, file)
    os.environ["MC_TENT_CONF"] = path
    return path


def dump_te_topology(device_name: str) -> str:
    """Return the topology as JSON text.

    Args:
        device_name: Names of devices, separated by commas; "" for all.
    """
    from mooncake.engine import TransferEngine

    return TransferEngine().get_local_topology(device_name or None)


def dump_tent_topology(device_name: str) -> str:
    """Refuse: the engine TENT is not in this package.

    Raises:
        NotSupportedError: Always.
    """
    raise NotSupportedError(
        "the topology of the engine TENT is not supported: call dump_te_topology, "
        f"device_name={device_name!r}"
    )


def _tent_configuration(text: str) -> Any:
    """Return the configuration in a file or in the text itself; None if it is neither."""
    if os.path.isfile(text):
        with open(text, encoding="utf-8") as file:
            return json.load(file)
    try:
        return json.loads(text)
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main())
