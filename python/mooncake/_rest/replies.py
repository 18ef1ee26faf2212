"""Replies of the REST server's own routes, and what all of them refuse."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import parse_qsl

from mooncake._http import Reply, Request
from mooncake.errors import (
    AlreadyExistsError,
    BusyError,
    DeadlineError,
    InvalidArgumentError,
    MooncakeError,
    NoSpaceError,
    NotFoundError,
    NotReadyError,
    QuotaExceededError,
    ShardedTensorError,
    UnavailableError,
)

__all__ = [
    "RefusedError",
    "failed",
    "failure_of",
    "json_reply",
    "not_allowed",
    "parameters",
    "tag_of",
]

# Subclasses precede their bases; the first match counts.
_STATUS: Final[list[tuple[type[MooncakeError], int]]] = [
    (NotFoundError, 404),
    (BusyError, 409),
    (NotReadyError, 409),
    (ShardedTensorError, 409),
    (AlreadyExistsError, 409),
    (InvalidArgumentError, 400),
    (NoSpaceError, 507),
    (QuotaExceededError, 507),
    (UnavailableError, 503),
    (DeadlineError, 504),
]


def failure_of(error: MooncakeError) -> Reply:
    """Return the reply for a failed call."""
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    return failed(status, str(error), code=error.code_name, remedy=error.remedy)


class RefusedError(Exception):
    """A refused request, with its reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def tag_of(version: int) -> str:
    """Return the entity tag of a version."""
    return f'"{version}"'


def parameters(request: Request) -> dict[str, str]:
    """Return the parameters of the query; bytes that are no text are surrogates."""
    return dict(parse_qsl(request.query, keep_blank_values=True, errors="surrogateescape"))


def not_allowed(methods: str) -> Reply:
    """Return the refusal of a method."""
    refused = failed(405, f"the method is not one of {methods}")
    return Reply(405, refused.body, refused.kind, (("Allow", methods),))


def failed(status: int, text: str, *, code: str | None = None, remedy: str = "") -> Reply:
    """Return a failure in JSON."""
    told = {"error": text, "code": code, "remedy": remedy}
    return json_reply(status, {name: value for name, value in told.items() if value})


def json_reply(status: int, values: dict[str, Any]) -> Reply:
    """Return values in JSON."""
    return Reply(status, json.dumps(values).encode())
