"""Process groups whose ranks die, stop, or leave, with real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pg_faults
import pytest
from pg_forked import LIMIT_S, Forked

IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"
LONG = pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1")
KILLS = Path(__file__).parent / "pg_kills.py"
RANKS = Path(__file__).parent / "pg_ranks.py"
# The product's: silence after which a rank is removed.
HEARTBEAT_S = 10.0

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.mark.parametrize(
    ("scenario", "size", "dead"),
    [
        ("two_die_at_once", 4, (1, 2)),
        ("all_but_one_die", 3, (1, 2)),
        ("manual_mode", 3, (1,)),
        ("removal_without_sync", 3, (1,)),
        ("ddp_step_continues", 3, (1,)),
        ("highest_slot_dies", 3, (2,)),
        ("made_and_destroyed_often:60", 2, ()),
        ("default_group_made_and_destroyed_often:12", 2, ()),
        pytest.param("made_and_destroyed_often:200", 2, (), marks=LONG),
        pytest.param("default_group_made_and_destroyed_often:60", 2, (), marks=LONG),
        ("subgroup_without_a_rank", 3, ()),
        ("groups_of_one_name", 3, ()),
    ],
)
def test_survivors_go_on(scenario, size, dead):
    with Forked(pg_faults, scenario, size) as ranks:
        ranks.start().check(*dead)


@pytest.mark.parametrize(
    "kind",
    [
        "reduce of root",
        "reduce of victim",
        "gather of root",
        "gather of victim",
        "scatter of root",
        "scatter of victim",
        "broadcast of root",
        "broadcast of victim",
        "reduce_scatter",
        "all_gather_into_tensor",
        "all_to_all_single",
    ],
)
def test_death_in_an_operation_leaves_whole_results(kind):
    with Forked(pg_faults, f"dies_in_an_operation:{kind}", 3) as ranks:
        ranks.start().check(2)


def test_monitored_barrier_names_the_late():
    with Forked(pg_faults, "monitored_barrier_names_the_late", 3) as ranks:
        ranks.start().expect("late", 0, 2)
        ranks.send("go", 1)
        ranks.check()


def test_monitored_barrier_works_after_a_late_rank():
    with Forked(pg_faults, "monitored_barrier_after_a_late_one", 2) as ranks:
        ranks.start().expect("late", 0)
        ranks.send("go")
        ranks.check()


def test_messages_that_are_given_up_take_no_later_ones():
    with Forked(pg_faults, "messages_that_are_given_up", 2) as ranks:
        ranks.start().check()


def test_operations_with_a_lost_root_report_it():
    with Forked(pg_faults, "roots_that_are_lost", 3) as ranks:
        ranks.start().check(1)


@pytest.mark.parametrize(("way", "size"), [("message", 2), ("collective", 2), ("behind", 3)])
def test_group_is_closed_while_a_peer_is_stopped(way, size):
    with Forked(pg_faults, f"closes_while_a_peer_is_stopped:{way}", size) as ranks:
        ranks.start().expect("ready")
        ranks.signal(1, signal.SIGSTOP)
        ranks.send("go", 0)
        ranks.expect("closed", 0)
        ranks.signal(1, signal.SIGKILL)
        if size > 2:
            ranks.send("end", 2)
        ranks.check(1)


def test_messages_to_and_from_the_dead_end():
    with Forked(pg_faults, "messages_to_the_dead_end", 3) as ranks:
        ranks.start().expect("ready")
        ranks.send("die", 2)
        ranks.check(2)


@LONG
def test_death_while_the_group_is_made_is_an_error():
    with Forked(pg_faults, "dies_while_the_group_is_made", 3) as ranks:
        ranks.start().expect("ready")
        ranks.signal(2, signal.SIGKILL)
        ranks.check(2)


def test_group_is_given_up_after_its_timeout():
    with Forked(pg_faults, "group_without_a_rank", 3) as ranks:
        ranks.start(0, 1).check()


def test_monitored_barrier_outlives_its_lowest_rank():
    with Forked(pg_faults, "monitored_barrier_without_its_lowest_rank", 4) as ranks:
        ranks.start().expect("ready", 2, 3)
        assert not ranks.ranks[2][1].poll(1), "rank 2 has not waited for rank 3"
        ranks.send("call", 3)
        ranks.expect("passed", 2, 3)
        ranks.expect("named", 2)
        ranks.send("end", 0, 2, 3)
        ranks.check(1)


def test_activation_waits_for_a_rank_that_joins_later():
    with Forked(pg_faults, "activated_before_it_joins", 3) as ranks:
        ranks.start(0, 1).expect("ready", 0, 1)
        ranks.start(2).expect("added")
        ranks.send("remove")
        ranks.expect("removed", 0)
        ranks.send("end")
        ranks.check()


def test_death_between_join_and_activation_leaves_the_group():
    with Forked(pg_faults, "dies_between_join_and_activation", 3) as ranks:
        ranks.start(0, 1).expect("ready", 0, 1)
        ranks.start(2).expect("ready", 2)
        ranks.expect("waits", 0, 1)
        ranks.signal(2, signal.SIGKILL)
        ranks.send("dead", 0, 1)
        ranks.check(2)


def test_short_stop_under_load_expels_nobody():
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with Forked(pg_faults, "stopped_rank", 3) as ranks:
            ranks.start().expect("ready")
            ranks.signal(1, signal.SIGSTOP)
            ranks.send(False)
            # The time of silence is what is tested.
            time.sleep(0.8 * HEARTBEAT_S)
            ranks.signal(1, signal.SIGCONT)
            ranks.check()
    finally:
        for process in load:
            process.kill()
            process.wait()


def _ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=30)


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2."""
    names = [f"mc-{os.getpid()}-{host}" for host in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and network namespaces: run as root: {error}")
    try:
        cable = ["type", "veth", "peer", "name", "cable", "netns", names[1]]
        _ip("link", "add", "cable", "netns", names[0], *cable)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "delete", name)


def _cut_off(names):
    """Send all packets between the hosts to an address that nobody has."""
    for number, name in enumerate(names, 1):
        nobody = ["lladdr", "02:00:00:00:00:99", "dev", "cable", "nud", "permanent"]
        _ip("-n", name, "neigh", "replace", f"10.77.0.{3 - number}", *nobody)


def test_host_that_vanishes_is_removed_by_its_silence(two_hosts):
    processes = []
    try:
        for rank in range(3):
            words = ["ip", "netns", "exec", two_hosts[rank // 2], sys.executable, str(RANKS)]
            process = subprocess.Popen(
                [*words, "vanished_host", str(rank), "3", "29400"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        for process in processes:
            assert process.stdout.readline() == "lost\n", process.communicate()[1]
        _cut_off(two_hosts)
        for process in processes[:2]:
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@LONG
def test_long_silence_removes_a_rank_which_comes_back():
    with Forked(pg_faults, "stopped_rank", 3) as ranks:
        ranks.start().expect("ready")
        ranks.signal(1, signal.SIGSTOP)
        begin = time.monotonic()
        ranks.send(True)
        ranks.expect("lost", 0, 2)
        assert time.monotonic() - begin > 0.8 * HEARTBEAT_S
        ranks.signal(1, signal.SIGCONT)
        ranks.check()


@pytest.mark.parametrize(
    "kills",
    [3, pytest.param(200, marks=LONG)],
)
@pytest.mark.timeout(1500)
def test_random_kills_leave_whole_results(kills):
    command = [sys.executable, KILLS, "--ranks", "4", "--kills", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


TRAIN = """
import torch, torch.distributed as dist
import mooncake.pg
dist.init_process_group("mooncake-cpu")
# The other rank may have left the group when the operation has ended.
size = dist.get_world_size()
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor[0] == size == 2
dist.destroy_process_group()
"""


def test_torchrun_starts_the_ranks(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--nproc-per-node", "2", str(program)],
        check=True,
        timeout=LIMIT_S,
        env=environment,
    )
