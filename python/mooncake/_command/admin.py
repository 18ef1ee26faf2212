"""JSON from the admin port of a master."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote

from mooncake._api.store import Store
from mooncake._command.output import CommandError, reason

__all__ = [
    "address_of",
    "address_of_pool",
    "code_of",
    "fetch",
    "message_of",
    "object_of",
    "reachable",
    "request",
]

_TIMEOUT_S = 5.0
# A master that does not lead answers so to what only the leader knows.
_NOT_SERVING = -1011
_WHO_LEADS = "`mooncake ha status` shows which master leads."
_NO_PORT = (
    "Start mooncake_master with --metrics_port; the pool that a Store starts has no such port, but "
    "`mooncake stat`, `ls` and `segments` show it."
)


def address_of(master: str) -> str:
    """Return the address of the admin port of a master, which runs on the same host."""
    with Store(master) as store:
        return address_of_pool(store)


def address_of_pool(store: Store) -> str:
    """Return the address of the admin port of the master of a store.

    Raises:
        CommandError: The port is off.
    """
    master = store.master_address
    address: str = store.stats()["pool"]["admin_address"]
    if not address:
        text = f"the master at {master} has no admin port"
        raise CommandError(text, _NO_PORT)
    return reachable(address, master)


def reachable(address: str, other: str) -> str:
    """Return an address; instead of every address of a host, the host of another address of it."""
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "::"):
        return address
    return f"{other.rpartition(':')[0] or host}:{port}"


def object_of(admin: str, key: bytes, tenant: str) -> dict[str, Any] | None:
    """Return copies, leases and pins of an object; None if there is none."""
    path = f"/api/v1/object?key={quote(key)}&tenant_id={quote(tenant)}"
    found: dict[str, Any] | None = fetch(admin, path)
    return found


def _credentials() -> dict[str, str]:
    """Return the header with the admin token or else the master token of the environment."""
    for name in ("MOONCAKE_ADMIN_TOKEN", "MOONCAKE_MASTER_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return {"Authorization": f"Bearer {token}"}
    return {}


def fetch(admin: str, path: str) -> Any:
    """Return the JSON of a page.

    Args:
        admin: host:port of the admin port.
        path: Path and query.

    Returns:
        The value; None if the page says that there is no such thing (404 with JSON).

    Raises:
        CommandError: The port cannot be reached, is no admin port of a master, or is that of a
            master that does not lead.
    """
    status, answer = request(admin, "GET", path)
    if status == 404 and answer is not None:
        return None
    if status == 403 and answer is not None:
        raise CommandError(f"the admin port at {admin}: {message_of(answer)}")
    if status == 503 and code_of(answer) == _NOT_SERVING:
        raise CommandError(f"the master at {admin} does not lead: {message_of(answer)}", _WHO_LEADS)
    if status != 200:
        raise CommandError(f"the admin port at {admin} answers {path} with status {status}")
    return answer


def request(admin: str, method: str, path: str, timeout_s: float = _TIMEOUT_S) -> tuple[int, Any]:
    """Send a request with the token of the environment.

    Args:
        admin: host:port of the admin port.
        method: GET or POST.
        path: Path and query.
        timeout_s: Time to wait for a connection, and for each part of the answer.

    Returns:
        The status, and the JSON of the answer; None if a failure has no JSON.

    Raises:
        CommandError: The port cannot be reached, or is no admin port of a master.
    """
    # Most commands ask no admin port, and the module is slow to load.
    import http.client

    host, _, port = admin.rpartition(":")
    if not port.isdecimal():
        raise CommandError(f"not an address: {admin!r}", "Write it as HOST:PORT.")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        connection.request(method, path, headers=_credentials())
        response = connection.getresponse()
        body = response.read()
        is_json = response.getheader("content-type", "").startswith("application/json")
        if response.status != 200 and not is_json:
            return response.status, None
        return response.status, json.loads(body)
    except OSError as error:
        text = f"the admin port at {admin} cannot be reached: {reason(error)}"
        raise CommandError(text) from error
    except (http.client.HTTPException, ValueError) as error:
        raise CommandError(f"{admin} is not the admin port of a master: {error!r}") from error
    finally:
        connection.close()


def message_of(answer: Any) -> str:
    """Return the message of a refusal."""
    text = answer.get("error_message") if isinstance(answer, dict) else None
    return text if isinstance(text, str) else "no reason is given"


def code_of(answer: Any) -> int | None:
    """Return the error code of a refusal; None if it has none."""
    code = answer.get("error_code") if isinstance(answer, dict) else None
    return code if isinstance(code, int) else None
