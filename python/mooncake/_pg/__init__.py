"""Process groups for torch over `mooncake._native`; the public names are in `mooncake.pg`.

Files, each above what it uses:

- `group.py`, `backend.py`: the process group with every name that torch calls; the backend that
  torch asks for from 2.14 on
- `collectives.py`, `monitored.py`: the operations; `monitored_barrier`
- `membership.py`: members that join and leave
- `work.py`: what torch waits for
- `context.py`, `devices.py`: the native context of the process; its RDMA devices
- `memory.py`, `codes.py`: tensors as host memory; codes of types and reductions
- `settings.py`: settings of the process and of a group
- `expert_rows.py`, `row_memory.py`, `device_links.py`: parts of expert parallelism
"""

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
