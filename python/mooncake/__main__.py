"""``python -m mooncake`` is the command `mooncake`."""

from __future__ import annotations

import sys

from mooncake._command.entry import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
