"""`mooncake ha status` and `handover`: who leads, who could take over, and what helps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_masters
import pytest
from fake_masters import Masters

from mooncake._command import admin, pool
from mooncake._command.ha import print_cluster
from mooncake._command.main import main
from mooncake._command.masters import Cluster, Master

if TYPE_CHECKING:
    from conftest import MasterProcess


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MOONCAKE_") and name != "MOONCAKE_STATE_DIR":
            monkeypatch.delenv(name)


@pytest.fixture
def masters() -> Iterator[Masters]:
    """Three masters, of which the first leads."""
    with fake_masters.running(3) as masters:
        yield masters


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return its code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def rows(shown: str) -> dict[str, list[str]]:
    """Return the words of each row of the table, by the address."""
    table = shown.split("\n\n")[1].splitlines()[1:]
    return {line.split()[0]: line.split()[1:] for line in table}


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_status_finds_every_master_from_one(run: Any, masters: Masters, asked: int):
    code, shown, errors = run("ha", "status", "--admin", masters.admin(asked))
    assert (code, errors) == (0, "")
    assert "cluster   mooncake_cluster, elected through etcd://10.0.0.1:2379\n" in shown
    assert f"leader    {masters.address(0)}, view 7, lease for 3.3 s\n" in shown
    assert rows(shown) == {
        masters.address(0): ["leader", "serving", "yes", "-", "-", "yes"],
        masters.address(1): ["standby", "standby", "yes", "0", "B", "3", "ms", "ago", "yes"],
        masters.address(2): ["standby", "standby", "yes", "0", "B", "3", "ms", "ago", "yes"],
    }


def test_guide_shows_what_status_prints(capsys: pytest.CaptureFixture[str]):
    guide = Path(__file__).resolve().parents[2] / "docs/guide/several-masters.md"
    text = re.sub("^ +", "", guide.read_text(encoding="utf-8"), flags=re.MULTILINE)
    masters = Masters(2, hosts="10.0.0.", first=4)
    backend = {"backend": "etcd://10.0.0.1:2379;10.0.0.2:2379;10.0.0.3:2379"}
    found = [Master(masters.address(each), "", masters.seen(each) | backend) for each in range(2)]
    print_cluster(Cluster(found))
    assert capsys.readouterr().out in text


def test_status_finds_masters_by_their_address(run: Any, masters: Masters):
    # No pool is joined there; the port is that of the admin port which is given.
    words = ("ha", "status", "127.0.0.2:50051,127.0.0.3", "--admin", masters.admin(1), "--json")
    code, shown, _ = run(*words)
    seen = json.loads(shown)
    assert (code, seen["is_safe"], seen["leader"]) == (0, True, masters.address(0))
    assert [row["address"] for row in seen["masters"]] == [masters.address(i) for i in range(3)]
    assert {row["failure"] for row in seen["masters"]} == {None}
    assert len(seen["failures"]) == 1


def test_status_shows_lag_and_fails_without_a_standby_in_sync(run: Any, masters: Masters):
    masters.in_sync, masters.lags = {0}, {1: 1200}
    code, shown, _ = run("ha", "status", "--admin", masters.admin(0))
    assert code == 1
    assert rows(shown)[masters.address(1)][2:5] == ["no", "1.2", "KiB"]
    assert "no: it is not in sync" in shown
    assert f"no standby is in sync with {masters.address(0)}\n  Until one is," in shown


def test_standby_that_has_gone_cannot_take_over(run: Any, seen_by_stat: Masters):
    seen_by_stat.away, seen_by_stat.in_sync = {1}, {0, 1}
    code, shown, _ = run("ha", "status", "--admin", seen_by_stat.admin(0))
    assert code == 1
    assert rows(shown)[seen_by_stat.address(1)][2:4] == ["yes,", "away"]
    assert "no standby is in sync with" in shown
    shown = run("stat")[1]
    assert "standby   127.0.0.2:50051  in sync, but away: heard 3 ms ago\n" in shown
    assert "NONE IN SYNC" in shown


def test_status_names_a_master_that_does_not_answer(run: Any, masters: Masters):
    masters.count = 4
    masters.in_sync = {0, 1, 3}
    code, shown, _ = run("ha", "status", "--admin", masters.admin(0))
    assert code == 0, "another standby is in sync"
    assert rows(shown)[masters.address(3)][1:5] == ["no", "answer", "yes", "0"]
    assert f"{masters.address(3)}: the admin port at {masters.admin(3)} cannot be reached" in shown


def test_status_names_an_admin_port_that_does_not_answer(run: Any, masters: Masters):
    code, shown, _ = run("ha", "status", "--admin", masters.admin(0), "--admin", "127.0.0.1:1")
    assert code == 0
    assert rows(shown)["?"][1:3] == ["no", "answer"]
    failure = "\nthe admin port at 127.0.0.1:1 cannot be reached: Connection refused\n  Start that"
    assert failure in shown


@pytest.mark.parametrize(
    ("in_sync", "expected"),
    [
        ({1}, "A master that may lead is there"),
        ({3}, r"Start the masters that are in sync and away (m3)."),
        ({2}, "A master that may lead is there"),
        (set[int](), "The lease service has no in-sync set, as after it was emptied. Start the"),
    ],
)
def test_status_says_what_helps_without_a_leader(
    run: Any, masters: Masters, in_sync: set[int], expected: str
):
    masters.leader, masters.in_sync = None, in_sync
    admins = [word for index in range(3) for word in ("--admin", masters.admin(index))]
    code, shown, _ = run("ha", "status", *admins)
    assert code == 1
    assert "leader    none\n" in shown
    assert f"no master leads\n  {expected}" in shown


def test_lost_set_is_told_from_a_service_that_fails(run: Any, masters: Masters):
    masters.leader, masters.in_sync = None, set()
    admins = [word for index in range(3) for word in ("--admin", masters.admin(index))]
    assert "Start the master that led last with --force_leader" in run("ha", "status", *admins)[1]
    masters.service_error = "no route to host"
    assert "no master leads\n  None may lead: it is not in sync." in run("ha", "status", *admins)[1]


def test_status_says_that_the_lease_service_fails(run: Any, masters: Masters):
    masters.service_error = "no route to host"
    code, shown, _ = run("ha", "status", "--admin", masters.admin(2))
    assert code == 0, "the lease holds"
    assert "cannot use the lease service: no route to host\n  Mend etcd://10.0.0.1:2379" in shown


def test_status_waits_for_a_leader_to_serve(run: Any, masters: Masters):
    masters.state = "leader_warmup"
    code, shown, _ = run("ha", "status", "--admin", masters.admin(0))
    assert code == 1
    assert "does not serve yet: it is leader_warmup" in shown


def test_lone_master_has_no_standby(run: Any, master: MasterProcess):
    code, shown, errors = run("ha", "status", master.address)
    assert (code, shown) == (1, "")
    assert f"the master {master.address} runs alone, without --enable_ha" in errors
    code, _, again = run("handover", "--master", master.address)
    assert (code, again) == (1, errors)


def test_unreachable_masters_are_reported_with_a_remedy(run: Any):
    code, shown, errors = run("ha", "status", "127.0.0.1:1")
    assert (code, shown) == (1, "")
    assert "no connection to the master" in errors
    assert "--admin HOST:PORT" in errors


def test_handover_goes_to_the_leader(run: Any, masters: Masters):
    code, shown, _ = run("handover", "--admin", masters.admin(1))
    assert code == 0
    assert shown == f"{masters.address(1)} leads now, view 8; before {masters.address(0)}\n"
    code, shown, _ = run(
        *("handover", "--admin", masters.admin(0), "--to", masters.address(2), "--json")
    )
    assert json.loads(shown) == {
        "leader_address": masters.address(2),
        "view_version": 9,
        "former_leader_address": masters.address(1),
        "handed_over": True,
    }
    assert (code, masters.leader) == (0, 2)


def test_handover_fails_without_a_standby_that_can_lead(run: Any, masters: Masters):
    code, _, errors = run("handover", "--admin", masters.admin(0), "--to", "127.0.0.9:50051")
    assert code == 1
    assert "does not hand over: 127.0.0.9:50051 cannot lead\n" in errors
    assert "hint: `mooncake ha status` shows" in errors
    masters.leader = None
    code, _, errors = run("handover", "--admin", masters.admin(0))
    assert code == 1
    assert "nothing to hand over: no master leads" in errors


@pytest.mark.parametrize("word", ["foo", "foo:", ":9003", "a:x", "a:99999"])
def test_words_that_are_no_addresses_are_refused(word: str, capsys: pytest.CaptureFixture[str]):
    for words in (["ha", "status", "--admin", word], ["handover", "--to", word]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert f"not an address HOST:PORT: '{word}'" in capsys.readouterr().err


def test_handover_sends_the_admin_token(
    run: Any, masters: Masters, monkeypatch: pytest.MonkeyPatch
):
    masters.token = "a secret of the test"
    code, _, errors = run("handover", "--admin", masters.admin(0))
    assert code == 1
    assert "Set MOONCAKE_ADMIN_TOKEN" in errors
    monkeypatch.setenv("MOONCAKE_ADMIN_TOKEN", masters.token)
    assert run("handover", "--admin", masters.admin(0))[0] == 0


def test_handover_before_a_stop_leaves_standbys_alone(run: Any, masters: Masters):
    words = ("handover", "--if-leader", "--admin")
    code, shown, _ = run(*words, masters.admin(1))
    assert (code, masters.leader) == (0, 0)
    assert shown == f"{masters.address(1)} does not lead: nothing to hand over\n"
    assert run(*words, masters.admin(0))[0] == 0
    assert masters.leader == 1
    assert {index for index, method, _ in masters.asked if method == "POST"} == {0}
    assert run("handover", "--if-leader")[0] == 2


@pytest.fixture
def seen_by_stat(
    masters: Masters, master: MasterProcess, monkeypatch: pytest.MonkeyPatch
) -> Masters:
    """A pool of a real master, whose admin port is that of the first of the masters."""
    monkeypatch.setenv("MOONCAKE_MASTER", master.address)
    monkeypatch.setattr(pool.admin, "address_of_pool", lambda _: masters.admin(0))
    return masters


def test_stat_shows_leader_and_standbys(run: Any, seen_by_stat: Masters):
    seen_by_stat.in_sync, seen_by_stat.lags = {0, 1}, {2: 1200}
    code, shown, _ = run("stat")
    assert code == 0
    assert "leader    127.0.0.1:50051, view 7, elected through etcd://10.0.0.1:2379\n" in shown
    assert "standby   127.0.0.2:50051  in sync, heard 3 ms ago\n" in shown
    assert "standby   127.0.0.3:50051  not in sync, 1.2 KiB behind, heard 3 ms" in shown
    assert "NONE" not in shown
    seen_by_stat.in_sync = {0}
    seen_by_stat.service_error = "no route to host"
    shown = run("stat")[1]
    assert "standby   NONE IN SYNC: there is no service without this master\n" in shown
    assert "          the lease service cannot be used: no route to host\n" in shown
    assert json.loads(run("stat", "--json")[1])["ha"]["in_sync"] == ["m0"]


def test_stat_of_a_lone_master_has_no_such_lines(run: Any, master: MasterProcess):
    code, shown, _ = run("stat", "--master", master.address)
    assert code == 0
    assert not {"leader", "standby"} & {line.partition(" ")[0] for line in shown.splitlines()}


def test_top_shows_leader_and_standbys(run: Any, masters: Masters, master: MasterProcess):
    masters.more["/api/v1/overview"] = admin.fetch(
        master.admin.removeprefix("http://"), "/api/v1/overview"
    )
    words = ("top", "--once", "--interval", "0.01", "--admin", masters.admin(0))
    code, shown, _ = run(*words)
    assert code == 0
    assert "\nmasters  leader 127.0.0.1:50051, view 7" in shown
    assert "127.0.0.3:50051 in sync" in shown
    masters.in_sync = {0}
    assert "NO STANDBY IN SYNC" in run(*words)[1]
    masters.leader = 1
    code, shown, errors = run(*words)
    assert (code, shown) == (1, "")
    assert f"the master at {masters.admin(0)} does not lead: service plane is not active" in errors
    assert "hint: `mooncake ha status` shows which master leads." in errors
