"""The program `mooncake_client`, which the wheel installs; also ``-m mooncake.cli_client``."""

from __future__ import annotations

import signal
import sys

from mooncake._runtime import _native

__all__ = ["main"]


def main() -> int:
    """Run the daemon of this host, whose guests set up stores with `setup_dummy`.

    Returns:
        Its exit code: 0 after SIGTERM or SIGINT.
    """
    # The daemon ends on SIGINT by itself; Python must not make an exception of it as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.run_daemon(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
