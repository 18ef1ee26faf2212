"""Standard streams that the caller of a program has closed."""

from __future__ import annotations

import os
import sys
from typing import TextIO, cast

__all__ = ["open_closed_streams"]


def open_closed_streams() -> None:
    """Open standard streams that are closed, before another file gets one of their numbers.

    Then output goes to no file or socket of the program, and no error to standard output. What is
    written is lost; a read fails, since a program would take no bytes for empty input.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_WRONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            # For the processes that the program starts.
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, _stream(number, mode))


def _stream(number: int, mode: str) -> TextIO:
    return cast(
        "TextIO", open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)
    )
