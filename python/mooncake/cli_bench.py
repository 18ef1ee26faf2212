"""The program `transfer_engine_bench` of the wheel; also ``python -m mooncake.cli_bench``."""

from __future__ import annotations

import signal
import sys

from mooncake._runtime import _native
from mooncake._standard_streams import open_closed_streams

__all__ = ["main"]


def main() -> int:
    """Measure the throughput of transfers to or from another process that runs this as target.

    Returns:
        The exit code: 0 when the time is over, or after SIGTERM or SIGINT as target.
    """
    open_closed_streams()
    # The native code handles SIGINT; Python must not raise an exception for it as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.run_transfer_bench(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
