"""The exceptions of the package, as one tree.

MooncakeError
├── InvalidArgumentError (ValueError)      the call is invalid: fix the arguments
│   └── ShardedTensorError                 the key is that of a tensor in shards: get_tensor
├── ClosedError (ValueError)               not set up, closed, or made before a fork: set it up
├── NotFoundError (KeyError)               the named thing does not exist
├── AlreadyExistsError                     the named thing exists already
│   └── VersionDiffersError                another version than `if_version`: ask for it again
├── NotReadyError                          the object is still being written: wait
├── BusyError                              a lease, a task or a reader holds it: wait, or force
├── LeaseLostError                         a lease could not be renewed: read the objects again
├── NoSpaceError                           no free space, and nothing may be evicted
├── QuotaExceededError                     the tenant's quota does not allow it
├── UnavailableError (ConnectionError)     the master or a metadata server cannot be reached
├── DeadlineError (TimeoutError)           the deadline passed: retry, or allow more time
├── TransferFailedError                    the bytes could not be moved: retry elsewhere
├── CorruptError                           the bytes do not match their checksum
├── DeniedError (PermissionError)          the caller may not do this
├── NotSupportedError                      this build or configuration cannot do it
├── StorageError                           a file or a device failed
└── InternalError                          a bug in mooncake: please report it

Each instance has a ``code`` and its upstream name ``code_name``, the ``key`` it is about (as its
caller wrote it, or None), details as ``context``, and a hint for the caller as ``remedy``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

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
    "LeaseLostError",
    "MooncakeError",
    "NoSpaceError",
    "NotFoundError",
    "NotReadyError",
    "NotSupportedError",
    "QuotaExceededError",
    "ShardedTensorError",
    "StorageError",
    "TransferFailedError",
    "UnavailableError",
    "VersionDiffersError",
    "explain",
]


class MooncakeError(Exception):
    """A failure of a call or of one item of a batch.

    Attributes:
        code: Upstream's error code; always negative.
        code_name: Upstream's name of the code, for instance ``OBJECT_NOT_FOUND``.
        key: Key that the failure is about, as its caller wrote it; None if there is none.
        remedy: One sentence that says what usually helps; "" where the message says it all.
        outcomes: For a batch the result of each item in order, or its failure; else None.
    """

    code: int = -1
    code_name: str = "INTERNAL_ERROR"
    key: str | bytes | None = None
    remedy: str = ""
    outcomes: list[Any] | None = None

    # Overrides KeyError's, which shows the representation of its argument.
    __str__ = Exception.__str__

    @cached_property
    def context(self) -> dict[str, str]:
        """Details by name."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by arguments and attributes, not by the rules of a second base class."""
        return type(self), self.args, self.__dict__

    @classmethod
    def of(cls, failure: MooncakeError) -> Self:
        """Return a failure as one of this class, with the same text, code and context."""
        made = cls(*failure.args)
        made.__dict__.update(failure.__dict__)
        return made


class InvalidArgumentError(MooncakeError, ValueError):
    """The call is invalid: fix the arguments."""


class ShardedTensorError(InvalidArgumentError):
    """The call is about one object, and the key is that of a tensor that is stored in shards."""


class ClosedError(MooncakeError, ValueError):
    """The handle is not set up, was closed, or belongs to the parent of a fork."""


class NotFoundError(MooncakeError, KeyError):
    """The named thing does not exist."""


class AlreadyExistsError(MooncakeError):
    """The named thing exists already."""


class VersionDiffersError(AlreadyExistsError):
    """The object has another version than `if_version`: it was replaced meanwhile."""


class NotReadyError(MooncakeError):
    """The object is still being written: wait."""


class BusyError(MooncakeError):
    """A lease, a task or a reader holds the object: wait, or use force."""


class LeaseLostError(MooncakeError):
    """A lease could not be renewed: its objects may be gone or replaced.

    The failure of the renewal is the cause; code, key and context are those of the failure.
    """

    @classmethod
    def of(cls, failure: MooncakeError) -> Self:
        """Return the loss of a lease whose renewal failed."""
        lost = cls(f"the lease was lost: {failure}")
        lost.code, lost.code_name = failure.code, failure.code_name
        lost.key, lost.context = failure.key, failure.context
        lost.remedy = "The objects may be gone or replaced since then; read them again."
        lost.__notes__ = [lost.remedy]
        lost.__cause__ = failure
        return lost


class NoSpaceError(MooncakeError):
    """There is no free space, and nothing may be evicted."""


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
    """A file or a device failed."""


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
"""Exception class of each error kind, by the kind's name in the native module."""


def explain(code: int | str) -> str:
    """Explain a number that an upstream call returned.

    `mooncake.store` and `mooncake.engine` have error codes of their own. If a number has different
    meanings in the two modules, the result has one line for each; each line names its module.

    Args:
        code: The number, its name, or the name of an exception, which several codes may have.

    Returns:
        Number and name, the exception that our own API raises for it, and what usually helps; for 0
        and above, that it is success.
    """
    return "\n".join(meanings(code)) or f"{code}: unknown code"


def with_remedy(error: MooncakeError) -> str:
    """Return the message of an error, and in parentheses what usually helps, if anything does."""
    return f"{error} ({error.remedy})" if error.remedy else str(error)


def meanings(code: int | str) -> list[str]:
    """Return the lines of `explain`; none for an unknown code."""
    if isinstance(code, int) and code >= 0:
        return [f"{code}: success"]
    from mooncake import _native

    wanted = code.upper() if isinstance(code, str) else code
    lines = [
        f"{number} {name} (mooncake.store, {CLASSES[kind].__name__}): {remedy}"
        for number, name, kind, remedy in _native.codes()
        if wanted in (number, name, CLASSES[kind].__name__.upper())
    ]
    lines += [
        f"{number} {name} (mooncake.engine): {remedy}"
        for number, name, _, remedy in _native.codes(is_engine=True)
        if wanted in (number, name)
    ]
    return lines
