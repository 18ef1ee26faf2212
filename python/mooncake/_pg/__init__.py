"""Process groups for torch over `mooncake._native`; the public names are in `mooncake.pg`."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 - every module here needs it
except ModuleNotFoundError as error:
    raise ImportError(
        "process groups and expert parallelism need torch; install it by "
        "`pip install 'mooncake-transfer-engine[tensor]'`"
    ) from error

__all__: list[str] = []
