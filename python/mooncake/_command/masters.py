"""The masters of a pool: which of them leads, and whether another could take over."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from mooncake._api.config import with_port
from mooncake._api.store import Store, StoreConfig
from mooncake._command import admin
from mooncake._command.output import CommandError, described
from mooncake._units import format_bytes, format_duration
from mooncake.errors import MooncakeError, UnavailableError

__all__ = [
    "Cluster",
    "Master",
    "Problem",
    "ask",
    "can_take_over",
    "find",
    "hand_over",
    "is_locator",
    "lag_text",
    "leader_in",
    "leader_text",
    "lines_of",
    "remedy_of",
    "since",
    "standby_text",
]

ADMIN_PORT = 9003
# A master that does not answer within this time counts as away.
_ANSWER_S = 3.0
# The leader drains its log to the standby, and holds calls for at most a second.
_HAND_OVER_S = 30.0
# Answers name further masters, which are asked in the next round.
_ROUNDS_MAX = 4
# The code of a call that finds no leader.
_NO_LEADER = -1010
# The address of a master of which only the admin port is known, which does not answer.
_UNKNOWN = "?"
_PATH = "/api/v1/ha"
_NAME_ADMIN = "If a master is there and its admin port is another one, name it: --admin HOST:PORT."


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the masters of a pool.

    Attributes:
        text: What is wrong.
        remedy: What to do.
        is_outage: Whether no master serves calls.
    """

    text: str
    remedy: str
    is_outage: bool = False


@dataclass(frozen=True, slots=True)
class Master:
    """A master, and what it says about itself.

    Attributes:
        address: Address for clients, as the cluster names it, or as it was given.
        admin: Address of the admin port that was asked.
        seen: Answer of ``/api/v1/ha``; None without one.
        failure: Why there is no answer.
    """

    address: str
    admin: str
    seen: dict[str, Any] | None = None
    failure: str = ""

    @property
    def is_elected(self) -> bool:
        """Whether it is one of several masters, rather than alone."""
        return self.seen is not None and bool(self.seen["enabled"])

    @property
    def is_leader(self) -> bool:
        """Whether it says that it leads."""
        return self.is_elected and self.get("role") == "leader"

    def get(self, name: str, absent: Any = None) -> Any:
        """Return a field of its answer."""
        return absent if self.seen is None else self.seen.get(name, absent)


@dataclass(slots=True)
class Cluster:
    """The masters that were found.

    Attributes:
        masters: The masters by address: the leader first.
        failures: Why the pool could not be joined at the addresses that were given.
    """

    masters: list[Master] = field(default_factory=list)
    failures: list[CommandError] = field(default_factory=list)

    @property
    def leader(self) -> Master | None:
        """The master that leads: of several that say so, the one with the latest view."""
        leaders = [each for each in self.masters if each.is_leader]
        return max(leaders, key=lambda each: each.get("view_version") or 0, default=None)

    @property
    def is_elected(self) -> bool:
        """Whether there are several masters, of which one is elected."""
        return any(each.is_elected for each in self.masters)

    @property
    def followers(self) -> dict[str, dict[str, Any]]:
        """What the leader says about its standbys, by address."""
        rows = self.leader.get("standbys", []) if self.leader else []
        return {row["address"]: row for row in rows}

    @property
    def has_successor(self) -> bool:
        """Whether a master serves, and a standby is in sync that could take over."""
        leader = self.leader
        is_serving = leader is not None and leader.get("state") == "serving"
        return is_serving and any(map(can_take_over, self.followers.values()))

    def problems(self) -> list[Problem]:
        """Return what is wrong, the worst first."""
        found = []
        leader = self.leader
        if leader is None:
            found.append(self._no_leader())
        elif leader.get("state") != "serving":
            text = f"{leader.address} leads, and does not serve yet: it is {leader.get('state')}"
            found.append(Problem(text, "Wait; the log of that master says what it does.", True))
        for master in self.masters:
            if failure := master.get("service_error"):
                text = f"{master.address} cannot use the lease service: {failure}"
                remedy = f"Mend {master.get('backend')}: a leader serves until its lease ends."
                found.append(Problem(text, remedy))
        if leader is not None and not any(map(can_take_over, self.followers.values())):
            text = f"no standby is in sync with {leader.address}"
            remedy = (
                "Until one is, there is no service without this master. Start a standby, with "
                "an empty state directory if it is new; its log says why it does not follow."
            )
            found.append(Problem(text, remedy))
        away = [master for master in self.masters if master.failure and self.is_elected]
        found += [_away(each) for each in away]
        return found

    def _no_leader(self) -> Problem:
        """Return why no master leads, and what helps."""
        known = [each for each in self.masters if each.is_elected]
        if not known:
            text = "no master with --enable_ha was found"
            remedy = (
                "Name the masters as HOST:PORT, separated by commas. " + _NAME_ADMIN
                if not any(each.seen for each in self.masters)
                else "A master of its own has no standby: see the guide, Several masters."
            )
            return Problem(text, remedy, True)
        return Problem("no master leads", _remedy_without_leader(known), True)


def _remedy_without_leader(known: Sequence[Master]) -> str:
    """Return what helps if none of several masters leads."""
    named = {member for each in known for member in each.get("in_sync", [])}
    gone = ", ".join(sorted(named - {each.get("member") for each in known}))
    if any(each.get("promotable") for each in known):
        return "A master that may lead is there: it leads when the former lease has ended."
    if gone:
        return (
            f"Start the masters that are in sync and away ({gone}). If they are lost for good, "
            "start one of the others with --force_leader: the pool is empty then."
        )
    if named or any(each.get("service_error") for each in known):
        reasons = sorted({reason for each in known for reason in each.get("reasons", [])})
        return f"None may lead: {'; '.join(reasons) or 'their logs say why'}."
    return (
        "The lease service has no in-sync set, as after it was emptied. Start the master that led "
        "last with --force_leader: its log says that it did, and has everything. If it is gone, "
        "start one that was in sync."
    )


def _away(master: Master) -> Problem:
    """Return that a master does not answer."""
    if master.address == _UNKNOWN:
        return Problem(master.failure, "Start that master, or leave its admin port out.")
    return Problem(f"{master.address}: {master.failure}", _NAME_ADMIN)


def find(places: Sequence[str], admins: Sequence[str] = ()) -> Cluster:
    """Find the masters of a pool, and ask each.

    The leader tells where its admin port is. The others are asked at the same port of their hosts.

    Args:
        places: Addresses of masters, or of the services that name them, as clients take them.
        admins: Addresses of admin ports, for masters whose port differs.
    """
    cluster = Cluster()
    search = _Search()
    for place in places:
        try:
            search.add("", _admin_of(place))
            break
        except (MooncakeError, CommandError, ValueError) as error:
            remedy = remedy_of(error, place)
            remedy += "" if is_locator(place) else f" {_NAME_ADMIN}"
            cluster.failures.append(CommandError(described(error), remedy.strip()))
    for address in admins:
        search.add("", address)
    if port := next(iter(search.asked), "").rpartition(":")[2]:
        search.port = int(port)
    for address in addresses_in(places):
        search.add(address)
    search.run()
    named = {each.get("leader_address") for each in search.masters()} - {None}
    if not any(each.is_leader for each in search.masters()):
        for address in sorted(named):
            try:
                search.add("", _admin_of(address))
            except (MooncakeError, CommandError, ValueError):
                continue
        search.run()
    cluster.masters = search.masters()
    return cluster


def ask(address: str) -> dict[str, Any]:
    """Return what the master of an admin port says; a lone master is not enabled.

    Raises:
        CommandError: The port cannot be reached, or refuses.
    """
    status, answer = admin.request(address, "GET", _PATH, _ANSWER_S)
    if status == 404:
        # A master of a version that knew no others.
        return {"enabled": False}
    if status != 200:
        text = f"the admin port at {address} answers {_PATH} with status {status}"
        raise CommandError(f"{text}: {admin.message_of(answer)}")
    if not isinstance(answer, dict) or "enabled" not in answer:
        raise CommandError(f"{address} is not the admin port of a master")
    return answer


def hand_over(leader: Master, to: str) -> dict[str, Any]:
    """Let the leader hand the lead to a standby, and return address and view of the next leader.

    Args:
        leader: The master that leads.
        to: Address of the standby; empty: any that is in sync.

    Raises:
        CommandError: The leader does not lead any more, or no standby can take over.
    """
    path = "/api/v1/handover" + (f"?to={quote(to, safe=':[]')}" if to else "")
    remedy = "`mooncake ha status` shows which standby is in sync, or why none is."
    return _change(leader, path, instead="does not hand over", remedy=remedy)


def finalize_log(master: Master) -> dict[str, Any]:
    """Let a master write kinds of records that earlier versions cannot read.

    Raises:
        CommandError: A standby is of an earlier version, or the master does not answer.
    """
    remedy = "Install this version of mooncake on every master first: `mooncake ha status`."
    return _change(master, "/api/v1/finalize", instead="keeps its log as it is", remedy=remedy)


def _change(master: Master, path: str, *, instead: str, remedy: str) -> dict[str, Any]:
    """Ask a master for a change; if it refuses, tell what it does instead, and the remedy."""
    status, answer = admin.request(master.admin, "POST", path, _HAND_OVER_S)
    if status == 200 and isinstance(answer, dict):
        return answer
    text = f"{master.address} {instead}: "
    text += admin.message_of(answer) if answer is not None else f"it answers with status {status}"
    if status == 403:
        remedy = "Set MOONCAKE_ADMIN_TOKEN to the admin token of the master."
    raise CommandError(text, remedy)


def lines_of(seen: dict[str, Any]) -> list[str]:
    """Return the lines about leader and standbys for `mooncake stat`; none of a lone master."""
    if not seen.get("enabled"):
        return []
    lines = [f"leader    {leader_text(seen)}"]
    lines += [f"standby   {row['address']}  {standby_text(row)}" for row in seen["standbys"]]
    if not any(map(can_take_over, seen["standbys"])):
        lines.append("standby   NONE IN SYNC: there is no service without this master")
    if failure := seen.get("service_error"):
        lines.append(f"          the lease service cannot be used: {failure}")
    return lines


def leader_text(seen: dict[str, Any]) -> str:
    """Return which master leads, its view and the service that elected it."""
    leads = f"{seen.get('leader_address') or 'none'}, view {seen.get('view_version')}"
    return f"{leads}, elected through {seen.get('backend')}"


def standby_text(row: dict[str, Any]) -> str:
    """Return how far a standby is."""
    heard = f"heard {since(row['silent_ms'])}"
    if row["is_in_sync"]:
        return (
            f"in sync, {heard}" if row.get("is_attached", True) else f"in sync, but away: {heard}"
        )
    return f"not in sync, {lag_text(row)} behind, {heard}"


def can_take_over(row: dict[str, Any]) -> bool:
    """Return whether a standby is in sync, and connected to the leader.

    One that has gone stays in the set until a change waits for it.
    """
    return bool(row["is_in_sync"] and row.get("is_attached", True))


def lag_text(row: dict[str, Any]) -> str:
    """Return how much of the log of the leader a standby lacks."""
    return format_bytes(row["lag_bytes"])


def since(silent_ms: int) -> str:
    """Return how long ago something was heard."""
    return f"{silent_ms} ms ago" if silent_ms < 1000 else f"{format_duration(silent_ms / 1000)} ago"


def remedy_of(failure: Exception, place: str) -> str:
    """Return what helps if a pool cannot be joined at an address."""
    remedy: str = getattr(failure, "remedy", "") or ""
    if leader := leader_in(failure):
        return f"{leader} leads now. Name all masters, as in {leader},{place}."
    if isinstance(failure, MooncakeError) and failure.code == _NO_LEADER and is_locator(place):
        cluster_id = os.environ.get("MC_STORE_CLUSTER_ID") or "mooncake_cluster"
        return (
            f"Start masters with --enable_ha, this service and --cluster_id={cluster_id}, which "
            "MC_STORE_CLUSTER_ID names. If they run, `mooncake ha status HOST:PORT,HOST:PORT` "
            "asks them why none leads."
        )
    return remedy


def leader_in(failure: Exception) -> str:
    """Return the address of the leader that a standby names when it refuses a call."""
    context = failure.context if isinstance(failure, MooncakeError) else {}
    leader = str(context.get("leader", ""))
    return leader if leader.rpartition(":")[2].isdecimal() else ""


def is_locator(place: str) -> bool:
    """Return whether an address names a service that knows the leader."""
    return "://" in place


def addresses_in(places: Iterable[str]) -> list[str]:
    """Return the addresses of masters in what was given, with their ports."""
    parts = [part.strip() for place in places if not is_locator(place) for part in place.split(",")]
    return [with_port(part) for part in parts if part]


def _admin_of(place: str) -> str:
    """Return the admin port of the master that serves a pool."""
    config = StoreConfig(rpc_timeout_s=_ANSWER_S, connect_timeout_s=_ANSWER_S, retry_s=0.0)
    try:
        with Store(place, config) as store:
            return admin.address_of_pool(store)
    except UnavailableError as error:
        # A standby names the leader.
        leader = leader_in(error)
        if not leader:
            raise
    with Store(leader, config) as store:
        return admin.address_of_pool(store)


class _Search:
    """Asks masters, and those that they name.

    Attributes:
        asked: Answers, or failures, by the address of the admin port.
        wanted: The admin ports that are asked for the masters of these addresses.
        port: Admin port of masters of which only the address for clients is known.
    """

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any] | str | None] = {}
        self.wanted: dict[str, str] = {}
        self.port = ADMIN_PORT

    def add(self, address: str, at: str = "") -> None:
        """Ask a master in the next round, unless it is known.

        Args:
            address: Address for clients; empty if only the admin port is known.
            at: Address of the admin port; empty: the usual port of its host.
        """
        if address in self._known():
            return
        at = at or f"{address.rpartition(':')[0]}:{self.port}"
        if address:
            self.wanted.setdefault(address, at)
        self.asked.setdefault(at, None)

    def run(self) -> None:
        """Ask all that were added, and then those that the answers name."""
        for _ in range(_ROUNDS_MAX):
            waiting = [at for at, answer in self.asked.items() if answer is None]
            if not waiting:
                return
            with ThreadPoolExecutor(len(waiting)) as pool:
                answers = list(pool.map(_answer, waiting))
            self.asked.update(zip(waiting, answers, strict=True))
            for answer in answers:
                if isinstance(answer, dict):
                    rows = answer.get("standbys", [])
                    for address in [answer.get("leader_address"), *(r["address"] for r in rows)]:
                        if address:
                            self.add(address)

    def masters(self) -> list[Master]:
        """Return each master once: leaders first, then by address."""
        found: dict[str, Master] = {}
        for at, answer in self.asked.items():
            if isinstance(answer, dict):
                address = answer.get("address") or self._address_of(at)
                found.setdefault(answer.get("member") or address, Master(address, at, answer))
        for address, at in self.wanted.items():
            if address not in self._known():
                found.setdefault(address, Master(address, at, None, self._failure(at)))
        for at, answer in self.asked.items():
            if isinstance(answer, str) and at not in self.wanted.values():
                found.setdefault(at, Master(_UNKNOWN, at, None, answer))
        return sorted(found.values(), key=lambda each: (not each.is_leader, each.address))

    def _failure(self, at: str) -> str:
        answer = self.asked[at]
        if isinstance(answer, dict):
            return f"the admin port at {at} is that of {answer.get('address', 'another master')}"
        return answer or "was not asked"

    def _address_of(self, at: str) -> str:
        """Return the address for clients of a master that does not name it."""
        return next((each for each, port in self.wanted.items() if port == at), at)

    def _known(self) -> set[str]:
        """Return the addresses of the masters that have answered, in each form that is used."""
        known = set()
        for at, answer in self.asked.items():
            if not isinstance(answer, dict):
                continue
            own = answer.get("address")
            known |= {own} if own else set()
            # A host has several names; the port says which of its masters is meant.
            for address, port in self.wanted.items():
                is_same = own is None or own.rpartition(":")[2] == address.rpartition(":")[2]
                if port == at and is_same:
                    known.add(address)
        return known


def _answer(at: str) -> dict[str, Any] | str:
    try:
        return ask(at)
    except CommandError as error:
        return str(error)
