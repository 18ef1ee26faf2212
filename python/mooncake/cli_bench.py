"""The program `transfer_engine_bench`, which the wheel installs; also ``-m mooncake.cli_bench``."""

from __future__ import annotations

import signal
import sys

from mooncake._runtime import _native

__all__ = ["main"]


def main() -> int:
    """Measure how fast bytes move to or from another process that runs this as target.

    Returns:
        Its exit code: 0 when the time is over, or after SIGTERM or SIGINT as target.
    """
    # The program ends on SIGINT by itself; Python must not make an exception of it as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.run_transfer_bench(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
