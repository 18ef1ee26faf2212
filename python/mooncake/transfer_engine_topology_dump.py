"""The program `transfer_engine_topology_dump`: prints which devices are near which memory."""

from __future__ import annotations

import sys

from mooncake._runtime import _native

__all__ = ["main"]


def main() -> int:
    """Print the topology of this machine.

    Returns:
        The exit code: 0, or 1 after an error.
    """
    return _native.run_topology_dump(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
