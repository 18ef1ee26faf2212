"""The program `mooncake_master`, which the wheel installs; also ``python -m mooncake.cli``."""

from __future__ import annotations

import signal
import sys

from mooncake._runtime import _native

__all__ = ["main"]


def main() -> int:
    """Run the master with the arguments of the command line until it is told to stop.

    Returns:
        Its exit code: 0 after SIGTERM or SIGINT.
    """
    # The master ends on SIGINT by itself; Python must not make an exception of it as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.run_master(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
