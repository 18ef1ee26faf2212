"""`mooncake ha status`, `handover` and `finalize`: several masters and their log."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mooncake._command.masters import (
    Cluster,
    Master,
    ask,
    finalize_log,
    find,
    hand_over,
    lag_text,
    since,
)
from mooncake._command.output import CommandError, UsageError, print_json, print_table
from mooncake._command.parser import Parser, add_json, host_port, master_address

__all__ = [
    "add_finalize_options",
    "add_handover_options",
    "add_options",
    "finalize",
    "handover",
    "print_cluster",
]

_FAILED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the commands of `mooncake ha`."""
    commands = parser.add_subparsers(
        required=True, metavar="ACTION", parser_class=Parser, help="what to do with the masters"
    )

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, exit_code_of_failure=_FAILED)
        return command

    about = "show the masters of a pool: which one leads, and which could take over"
    shown = add("status", _status, about)
    shown.epilog = "Exit codes: 0 a master serves and a standby is in sync, 1 otherwise."
    _add_places(shown, nargs="*")
    add_json(shown)


def add_handover_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `handover`."""
    _add_places(parser, nargs="?")
    parser.add_argument(
        "--to",
        type=host_port,
        metavar="HOST:PORT",
        help="the master that shall lead, as `mooncake ha status` names it; by default any "
        "standby that is in sync",
    )
    parser.add_argument(
        "--if-leader",
        action="store_true",
        help="do nothing, and succeed, if the master with the admin port of --admin does not lead: "
        "for scripts that stop a master",
    )
    add_json(parser)


def add_finalize_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `finalize`."""
    _add_places(parser, nargs="?")
    add_json(parser)


def _add_places(parser: argparse.ArgumentParser, nargs: str) -> None:
    """Declare the options that name masters."""
    parser.add_argument(
        "masters",
        nargs=nargs,
        metavar="MASTER",
        help="a master, or what names the masters: HOST:PORT, a list A:1,B:2, etcd://…, redis://… "
        "or k8s://… (MOONCAKE_MASTER, or 127.0.0.1:50051)",
    )
    parser.add_argument(
        "--master", metavar="MASTER", help="the same, as the other commands take it"
    )
    parser.add_argument(
        "--admin",
        action="append",
        default=[],
        type=host_port,
        dest="admins",
        metavar="HOST:PORT",
        help="admin port of a master; may be repeated. By default that which the leader reports, "
        "and the same port of the other masters' hosts",
    )


def _places(options: argparse.Namespace) -> list[str]:
    """Return the addresses that are given; those of the environment unless admin ports are."""
    given = options.masters if isinstance(options.masters, list) else [options.masters]
    named = [place for place in (*given, options.master) if place]
    return named or ([] if options.admins else [master_address()])


def _status(options: argparse.Namespace) -> int:
    cluster = find(_places(options), options.admins)
    problems = cluster.problems()
    is_safe = cluster.has_successor
    if options.is_json:
        rows = [_json_of(cluster, master) for master in cluster.masters]
        leader = cluster.leader
        print_json(
            {
                "is_safe": is_safe,
                "leader": leader and leader.address,
                "view_version": leader and leader.get("view_version"),
                "masters": rows,
                "problems": [asdict(problem) for problem in problems],
                "failures": [str(failure) for failure in cluster.failures],
            }
        )
        return 0 if is_safe else _FAILED
    if not cluster.is_elected:
        _refuse_lone(cluster)
    print_cluster(cluster)
    for problem in problems:
        print(f"\n{problem.text}\n  {problem.remedy}")
    return 0 if is_safe else _FAILED


def _refuse_lone(cluster: Cluster) -> None:
    """Fail if no master takes part in an election."""
    problem = cluster.problems()[0]
    lone = [master.address for master in cluster.masters if master.seen is not None]
    if lone:
        text = f"the master {', '.join(lone)} runs alone, without --enable_ha"
        raise CommandError(text, "The guide, Several masters, says how to add a standby.")
    if cluster.failures:
        raise cluster.failures[0]
    why = "; ".join(master.failure for master in cluster.masters)
    raise CommandError(f"{problem.text}: {why}" if why else problem.text, problem.remedy)


def print_cluster(cluster: Cluster) -> None:
    """Print the masters of a pool as a table."""
    one = next(master for master in cluster.masters if master.is_elected)
    print(f"cluster   {one.get('cluster_id')}, elected through {one.get('backend')}")
    leader = cluster.leader
    if leader is None:
        print("leader    none")
    else:
        lease_ms = leader.get("lease_ms")
        lease = f", lease for {lease_ms / 1000:g} s" if lease_ms else ""
        print(f"leader    {leader.address}, view {leader.get('view_version')}{lease}")
    print()
    rows = [_row(cluster, master) for master in cluster.masters]
    known = {master.address for master in cluster.masters}
    rows += [
        (address, "standby", "not asked", *_following(row), "?")
        for address, row in cluster.followers.items()
        if address not in known
    ]
    head = ("MASTER", "ROLE", "STATE", "IN SYNC", "BEHIND", "HEARD", "MAY LEAD")
    print_table(head, rows, right=(4, 5))


def _row(cluster: Cluster, master: Master) -> tuple[str, ...]:
    """Return a master as a row: what it says, and what the leader says about it."""
    following = _following(cluster.followers.get(master.address))
    if master.seen is None:
        return (master.address, "?", "no answer", *following, "?")
    if not master.is_elected:
        return (master.address, "alone", "serving", *following, "no: runs without --enable_ha")
    if master is cluster.leader:
        following = ("yes", "-", "-")
    reasons = "; ".join(master.get("reasons", []))
    may_lead = "yes" if master.get("promotable") else f"no: {reasons or 'its log says why'}"
    return (master.address, master.get("role"), master.get("state"), *following, may_lead)


def _following(row: dict[str, Any] | None) -> tuple[str, str, str]:
    """Return whether a standby is in sync, how far it is behind, and when it was heard."""
    if row is None:
        return "?", "?", "?"
    is_in_sync = "yes" if row["is_in_sync"] else "no"
    is_in_sync += "" if row.get("is_attached", True) else ", away"
    return is_in_sync, lag_text(row), since(row["silent_ms"])


def _json_of(cluster: Cluster, master: Master) -> dict[str, Any]:
    names = {"address": master.address, "admin": master.admin, "failure": master.failure or None}
    following = cluster.followers.get(master.address)
    return {**names, "following": following, "seen": master.seen}


def handover(options: argparse.Namespace) -> int:
    """Let the leader hand the lead over to a standby.

    Returns:
        0 once another master serves, or if there is nothing to do with ``--if-leader``.
    """
    if options.if_leader:
        if len(options.admins) != 1 or options.masters or options.master:
            text = "--if-leader goes with one --admin, and without MASTER"
            raise UsageError(text, "As in `mooncake handover --admin 127.0.0.1:9003 --if-leader`.")
        seen = ask(options.admins[0])
        leader = Master(seen.get("address", options.admins[0]), options.admins[0], seen)
        if not leader.is_leader:
            if options.is_json:
                print_json({"leader_address": leader.get("leader_address"), "handed_over": False})
            else:
                print(f"{leader.address} does not lead: nothing to hand over")
            return 0
    else:
        leader = _leader(options)
    answer = hand_over(leader, options.to or "")
    if options.is_json:
        print_json({**answer, "former_leader_address": leader.address, "handed_over": True})
    else:
        view = answer.get("view_version")
        print(f"{answer.get('leader_address')} leads now, view {view}; before {leader.address}")
    return 0


def finalize(options: argparse.Namespace) -> int:
    """Let the master that leads write kinds of records that earlier versions cannot read.

    Returns:
        0 once it may.
    """
    cluster = find(_places(options), options.admins)
    master = _leader(options) if cluster.is_elected else cluster.masters[0]
    answer = finalize_log(master)
    if options.is_json:
        print_json(answer)
    else:
        print(f"{master.address}: the log may have all records of this version; an earlier master")
        print("can read it until the first of them is written")
    return 0


def _leader(options: argparse.Namespace) -> Master:
    """Return the master that leads."""
    cluster = find(_places(options), options.admins)
    if not cluster.is_elected:
        _refuse_lone(cluster)
    leader = cluster.leader
    if leader is not None:
        return leader
    problem = cluster.problems()[0]
    named = {master.get("leader_address") for master in cluster.masters} - {None}
    if named:
        text = f"{', '.join(sorted(named))} leads, but its admin port was not found"
        raise CommandError(text, "Name it: --admin HOST:PORT.")
    raise CommandError(f"nothing to hand over: {problem.text}", problem.remedy)
