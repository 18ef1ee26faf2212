"""The program `mooncake_master`, which the wheel installs; also ``python -m mooncake.cli``."""

from __future__ import annotations

import sys

from mooncake._runtime import _native

__all__ = ["main"]


def main() -> int:
    """Run the master with the arguments of the command line until it is told to stop.

    Returns:
        Its exit code: 0 after SIGTERM or SIGINT.
    """
    return _native.run_master(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
