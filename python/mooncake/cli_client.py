"""The program `mooncake_client` of the wheel; also ``python -m mooncake.cli_client``."""

from __future__ import annotations

import signal
import sys

from mooncake._runtime import _native
from mooncake._standard_streams import open_closed_streams
from mooncake.env import warn_of_misspelled

__all__ = ["main"]


def main() -> int:
    """Run the daemon of this host, to which stores connect with `setup_dummy`.

    Returns:
        The exit code: 0 after SIGTERM or SIGINT.
    """
    open_closed_streams()
    # The native code handles SIGINT; Python must not raise an exception for it as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warn_of_misspelled()
    return _native.run_daemon(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
