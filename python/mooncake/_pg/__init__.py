"""Process groups for torch over `mooncake._native`; the public names are in `mooncake.pg`."""

from __future__ import annotations

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise ImportError(
        "process groups and expert parallelism need torch; install it by "
        "`pip install 'mooncake-transfer-engine[tensor]'`"
    ) from error

__all__ = ["torch_version", "version_suffix"]

torch_version = _torch.__version__.partition("+")[0]
"""Version of torch, without the name of its build."""

version_suffix = "_" + torch_version.replace(".", "_")
"""Upstream's suffix for extensions of a version of torch, of which this package needs none."""
