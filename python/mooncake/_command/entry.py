"""Entry point of the command `mooncake`: Ctrl-C ends it without a traceback from its imports on."""

from __future__ import annotations

import os
import signal

from mooncake._standard_streams import open_closed_streams

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> int:
    """Run the command with the arguments of the command line.

    Returns:
        The exit code, as of `mooncake._command.main.main`.
    """
    open_closed_streams()
    # A shell lets commands that it runs in the background ignore the signal.
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_handled:
        # Nothing is begun while modules load, and they may not expect an exception.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from mooncake._command.main import parsed, run

    options = parsed()
    try:
        if is_handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED
