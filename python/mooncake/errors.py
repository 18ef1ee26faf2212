"""What can go wrong, as one tree of exceptions.

MooncakeError
├── InvalidArgumentError (ValueError)      the call itself is wrong: fix the arguments
├── ClosedError (ValueError)               not set up, closed, or made before a fork: set it up
├── NotFoundError (KeyError)               the named thing does not exist
├── AlreadyExistsError                     the named thing exists already
├── NotReadyError                          the object is still being written: wait
├── BusyError                              a lease, a task or a reader holds it: wait, or force
├── NoSpaceError                           no room, and nothing may be evicted
├── QuotaExceededError                     the tenant's quota does not allow it
├── UnavailableError (ConnectionError)     the master or a metadata server cannot be reached
├── DeadlineError (TimeoutError)           the deadline passed: retry, or allow more time
├── TransferFailedError                    the bytes could not be moved: retry elsewhere
├── CorruptError                           the bytes do not match their checksum
├── DeniedError (PermissionError)          the caller may not do this
├── NotSupportedError                      this build or configuration cannot do it
├── StorageError                           a file or a device refused
└── InternalError                          a bug in mooncake: please report it

Each instance has a ``code`` with its established name ``code_name``, the ``key`` it is about (as
its caller wrote it, or None), the things involved as ``context``, and what usually helps as
``remedy``.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CLASSES",
    "AlreadyExistsError",
    "BusyError",
    "ClosedError",
    "CorruptError",
    "DeadlineError",
    "DeniedError",
    "InternalError",
    "InvalidArgumentError",
    "MooncakeError",
    "NoSpaceError",
    "NotFoundError",
    "NotReadyError",
    "NotSupportedError",
    "QuotaExceededError",
    "StorageError",
    "TransferFailedError",
    "UnavailableError",
    "explain",
]


class MooncakeError(Exception):
    """A failure of a call or of one item of a batch.

    Attributes:
        code: The established number; always negative.
        code_name: Its established name, for instance ``OBJECT_NOT_FOUND``.
        key: The key it is about, as its caller wrote it; None where it is about none.
        context: The things involved, by name.
        remedy: One sentence that says what usually helps.
    """

    code: int = -1
    code_name: str = "INTERNAL_ERROR"
    key: str | bytes | None = None
    context: dict[str, str]
    remedy: str = ""

    # Not KeyError's, which shows the representation of its argument.
    __str__ = Exception.__str__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by arguments and attributes, not by what a second base would do."""
        return type(self), self.args, self.__dict__


class InvalidArgumentError(MooncakeError, ValueError):
    """The call itself is wrong: fix the arguments."""


class ClosedError(MooncakeError, ValueError):
    """The handle is not set up, was closed, or belongs to the parent of a fork."""


class NotFoundError(MooncakeError, KeyError):
    """The named thing does not exist."""


class AlreadyExistsError(MooncakeError):
    """The named thing exists already."""


class NotReadyError(MooncakeError):
    """The object is still being written: wait."""


class BusyError(MooncakeError):
    """A lease, a task or a reader holds the object: wait, or use force."""


class NoSpaceError(MooncakeError):
    """There is no room, and nothing may be evicted."""


class QuotaExceededError(MooncakeError):
    """The tenant's quota does not allow it."""


class UnavailableError(MooncakeError, ConnectionError):
    """The master or a metadata server cannot be reached."""


class DeadlineError(MooncakeError, TimeoutError):
    """The deadline passed: retry, or allow more time."""


class TransferFailedError(MooncakeError):
    """The bytes could not be moved: the peer died or refused the address."""


class CorruptError(MooncakeError):
    """The bytes do not match their checksum, or a file is damaged."""


class DeniedError(MooncakeError, PermissionError):
    """The caller may not do this."""


class NotSupportedError(MooncakeError):
    """This build or configuration cannot do it."""


class StorageError(MooncakeError):
    """A file or a device refused."""


class InternalError(MooncakeError):
    """A bug in mooncake. Please report it."""


CLASSES: dict[str, type[MooncakeError]] = {
    "InvalidArgument": InvalidArgumentError,
    "Closed": ClosedError,
    "NotFound": NotFoundError,
    "AlreadyExists": AlreadyExistsError,
    "NotReady": NotReadyError,
    "Busy": BusyError,
    "NoSpace": NoSpaceError,
    "QuotaExceeded": QuotaExceededError,
    "Unavailable": UnavailableError,
    "Timeout": DeadlineError,
    "TransferFailed": TransferFailedError,
    "Corrupt": CorruptError,
    "PermissionDenied": DeniedError,
    "NotSupported": NotSupportedError,
    "Storage": StorageError,
    "Internal": InternalError,
}
"""The class of each kind of failure, by the kind's name in the native module."""


def explain(code: int | str) -> str:
    """Return in words what a number means that an established call returned.

    `mooncake.engine` has numbers of its own. Where one stands for something else in each of both
    modules there are two lines, and each says whose it is.

    Args:
        code: The number, or its name.

    Returns:
        Its number and name, the exception that our own face raises for it, and what usually helps;
        for 0 and above that it is success.
    """
    return "\n".join(meanings(code)) or f"{code}: no call of ours returns that"


def meanings(code: int | str) -> list[str]:
    """Return the lines of `explain`; none for what no call of ours returns."""
    if isinstance(code, int) and code >= 0:
        return [f"{code}: success"]
    from mooncake import _native

    wanted = code.upper() if isinstance(code, str) else code
    lines = [
        f"{number} {name} ({CLASSES[kind].__name__}): {remedy}"
        for number, name, kind, remedy in _native.codes()
        if wanted in (number, name)
    ]
    lines += [
        f"{number} {name} (mooncake.engine): {remedy}"
        for number, name, _, remedy in _native.codes(is_engine=True)
        if wanted in (number, name)
    ]
    return lines
