"""Upstream's calls that this build refuses: a table of the reasons, and the maker of the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from .errors import NotSupportedError

__all__ = ["NofUnsupportedError", "refused"]


class NofUnsupportedError(NotImplementedError):
    """NVMe-oF targets were asked for, and this package has none."""


_Reason = tuple[type[Exception], str, str]


def _no_nof(action: str) -> _Reason:
    text = (
        f"cannot {action}: this version of mooncake has no NVMe-oF tier, and its master keeps no "
        "NVMe-oF segments; lend memory with `mooncake_client` instead"
    )
    docstring = f"Refuse to {action}.\n\nRaises:\n    NofUnsupportedError: Always."
    return NofUnsupportedError, text, docstring


# The exception, its text, in which `{call}` stands for the name of the call, and the docstring.
_NO_KERNELS: _Reason = (
    NotSupportedError,
    (
        "{call} runs on kernels for GPUs, which this build does not have: use "
        "mooncake.mooncake_ep_buffer.Buffer"
    ),
    "Refuse: there are no kernels for GPUs.",
)
_NO_LINKS: _Reason = (
    NotSupportedError,
    (
        "{call} is for direct links between GPUs, which this build does not have: dispatch and "
        "combine work without them"
    ),
    "Refuse: there are no direct links between GPUs.",
)

# By the class to which the calls belong, or by the qualified name of a call.
_REASONS: dict[str, _Reason] = {
    "Buffer": _NO_LINKS,
    "ElasticBuffer": _NO_KERNELS,
    "EPHandle": _NO_KERNELS,
    "MooncakeNoFRegister": _no_nof("register NVMe-oF targets"),
    "MooncakeNoFUnregister": _no_nof("unregister NVMe-oF targets"),
    "SPDKTgtCreator.deploy_target": _no_nof("start an SPDK target"),
    "SPDKTgtCreator.deploy_all_targets": _no_nof("start SPDK targets"),
}


def refused(owner: str, name: str) -> Callable[..., NoReturn]:
    """Return a call that refuses whatever it is passed.

    Args:
        owner: Class of the call, as users know it.
        name: Name of the call.
    """
    qualified = f"{owner}.{name}"
    error, text, docstring = _REASONS.get(qualified) or _REASONS[owner]
    # A constructor is known by the name of its class.
    text = text.format(call=owner if name == "__init__" else name)

    def call(*arguments: Any, **options: Any) -> NoReturn:  # noqa: ARG001
        raise error(text)

    call.__name__, call.__qualname__, call.__doc__ = name, qualified, docstring
    return call
