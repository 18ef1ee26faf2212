"""The progress of long transfers, and a closing line with what was moved."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

from mooncake._units import format_bytes, format_seconds, format_speed

__all__ = ["Progress", "add_progress"]

_STEP_S = 0.2
# Lines in a log come less often.
_LINE_S = 5.0
_SLOW_S = 1.0
# The rate is that of the last seconds, so that it follows a change.
_RATE_S = 5.0


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Declare `--progress` and `--no-progress`."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show progress and a closing line on standard error; the default if it is a terminal",
    )


class Progress:
    """A line about a long transfer: rewritten on a terminal, repeated elsewhere if asked for."""

    __slots__ = (
        "_begin",
        "_is_shown",
        "_is_terminal",
        "_marks",
        "_name",
        "_next",
        "_size",
        "_verb",
    )

    def __init__(self, verb: str, name: str, size: int | None, wanted: bool | None) -> None:
        """Start the clock.

        Args:
            verb: What is done, for instance "get".
            name: Quoted key, or what else is moved.
            size: Bytes in total; None if unknown.
            wanted: True or False as the user said; None shows progress on a terminal only.
        """
        self._verb, self._name, self._size = verb, name, size
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = self._is_terminal if wanted is None else wanted
        self._begin = time.monotonic()
        self._next = self._begin + _SLOW_S
        self._marks = deque([(self._begin, 0)])

    @property
    def is_shown(self) -> bool:
        """True if anything is printed."""
        return self._is_shown

    def advance(self, done: int) -> None:
        """Show how many bytes are done, once the transfer takes a second."""
        now = time.monotonic()
        if not self._is_shown or now < self._next:
            return
        self._next = now + (_STEP_S if self._is_terminal else _LINE_S)
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_S:
            self._marks.popleft()
        text = self._text(done)
        sys.stderr.write(f"\r{text}\033[K" if self._is_terminal else f"{text}\n")
        sys.stderr.flush()

    def _text(self, done: int) -> str:
        (first, before), (last, _) = self._marks[0], self._marks[-1]
        rate = (done - before) / max(last - first, 1e-9)
        text = f"{self._verb} {self._name}: {format_bytes(done)}"
        if self._size is not None:
            share = done / self._size if self._size else 1.0
            text += f" of {format_bytes(self._size)} ({share:.0%})"
        text += f", {format_speed(rate)}"
        if self._size is not None and done < self._size:
            text += f", {format_seconds((self._size - done) / rate)} left" if rate else ", waiting"
        return text

    def end(self) -> None:
        """Clear the line on the terminal."""
        if self._is_shown and self._is_terminal and len(self._marks) > 1:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def close(self, done: int) -> None:
        """Print the closing line: bytes, time and rate."""
        self.end()
        if not self._is_shown:
            return
        took = time.monotonic() - self._begin
        rate = format_speed(done / max(took, 1e-9))
        text = f"{self._verb} {self._name}: {format_bytes(done)} in {format_seconds(took)}, {rate}"
        print(text, file=sys.stderr)
