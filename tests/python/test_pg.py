"""Process groups of `mooncake.pg`: real processes over the loopback device."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from forked_programs import Program, interpreter

from mooncake import pg
from mooncake._pg import context
from mooncake.errors import NotSupportedError

RANKS = Path(__file__).parent / "pg_ranks.py"
LIMIT_S = 100
IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"
LONG = pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1")
GUIDE = Path(__file__).parents[2] / "docs/guide/process-groups.md"
START, LOSE, REPLACE, TAKE_IN = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
# The guide's loop with the call that its text names, until the epoch says that a rank was taken in.
TAKES_IN = """
    if step % 10 == 9: take_in(step)
    if mooncake.pg.get_current_epoch(dist.group.WORLD) == {epoch}: break
first_step = step + 1
"""
ADD_UP = """
lowest, highest = torch.tensor([first_step]), torch.tensor([first_step])
dist.all_reduce(lowest, dist.ReduceOp.MIN)
dist.all_reduce(highest, dist.ReduceOp.MAX)
assert lowest == highest > 0
total = torch.ones(1)
dist.all_reduce(total)
assert total == {size}
dist.destroy_process_group()
"""


def member(epoch, size, options="(active)"):
    """Return the guide's program of a member that takes others in, without its pauses."""
    loop = LOSE.replace("Options(active)", f"Options{options}").replace(
        "range(600)", "range(10**9)"
    )
    loop = loop[: loop.index("    time.sleep")]
    assert f"Options{options}" in loop
    assert "range(10**9)" in loop
    return TAKE_IN + loop + TAKES_IN.format(epoch=epoch) + ADD_UP.format(size=size)


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server
    del server


class Ranks:
    """Processes of one scenario, ended with the block."""

    def __init__(self, scenario, size, port):
        self.arguments = (scenario, size, port)
        self.processes = {}

    def start(self, rank, *extra):
        scenario, size, port = self.arguments
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [RANKS, scenario, rank, size, port, *extra]
        self.processes[rank] = Program(command, environment)
        return self

    def check(self, rank, code=0):
        output, errors = self.processes[rank].communicate(timeout=LIMIT_S)
        assert self.processes[rank].returncode == code, f"rank {rank}: {output}\n{errors}"
        return errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.communicate(timeout=LIMIT_S)


class Snippets(Ranks):
    """Processes that run source text, with the environment that `torchrun` makes."""

    def __init__(self, port, size=4, launch=Program):
        super().__init__(None, size, port)
        self.launch = launch

    def start(self, rank, source):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.arguments[1]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.arguments[2]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",  # Torch 2.4 reads it.
        }
        self.processes[rank] = self.launch(["-c", source], environment)
        return self

    def kill(self, rank):
        """Kill the process that the guide's program names."""
        line = self.processes[rank].stdout.readline()
        assert line == f"rank {rank} is process {self.processes[rank].pid}\n"
        os.kill(int(line.split()[-1]), signal.SIGKILL)
        self.check(rank, -signal.SIGKILL)


@pytest.mark.parametrize("launch", [Program, interpreter])
def test_programs_of_tests_start_and_end_as_a_users(launch):
    source = """
import atexit, os, sys, threading
class Last:
    def __del__(self):
        print("last", flush=True)
atexit.register(print, "at exit", flush=True)
last = Last()
print(sys.argv, os.environ["GIVEN"], "PATH" in os.environ, threading.active_count(), __name__)
print("mooncake" in sys.modules, sys.path[:2], input(), flush=True)
raise ValueError("wrong")
"""
    given = {"GIVEN": "a value", "PYTHONPATH": "/a/folder"}
    program = launch(["-c", source, "one"], given)
    program.stdin.write("a line\n")
    output, errors = program.communicate(timeout=50)
    assert output.splitlines() == [
        "['-c', 'one'] a value False 1 __main__",
        "False ['', '/a/folder'] a line",
        "at exit",
        "last",
    ]
    assert errors.endswith("ValueError: wrong\n")
    assert program.returncode == 1


@pytest.mark.timeout(LIMIT_S + 20)
def test_guide_starts_four_ranks(store):
    with Snippets(store.port, launch=interpreter) as ranks:
        for rank in range(4):
            ranks.start(rank, START)
        for rank in range(4):
            ranks.check(rank)


@pytest.mark.timeout(LIMIT_S + 20)
def test_guide_goes_on_after_a_kill(store):
    with Snippets(store.port) as ranks:
        for rank in range(4):
            ranks.start(rank, LOSE)
        ranks.kill(2)
        sums = {}
        for rank in (0, 1, 3):
            output = ranks.processes[rank].stdout
            assert output.readline().startswith(f"rank {rank} is process ")
            line = output.readline()
            lost = re.fullmatch(r"step (\d+): lost \[2\], the sum is ([34])\n", line)
            assert lost, line
            # 4 if all had the data of the killed rank.
            assert sums.setdefault(lost[1], lost[2]) == lost[2]
        # The program goes on for a minute: the test ends the processes.


@pytest.mark.timeout(LIMIT_S + 20)
def test_guide_replaces_a_dead_rank(store):
    with Snippets(store.port) as ranks:
        for rank in range(4):
            ranks.start(rank, member(epoch=3, size=4))
        ranks.kill(2)
        ranks.start(2, REPLACE + ADD_UP.format(size=4))
        for rank in range(4):
            ranks.check(rank)


@pytest.mark.timeout(LIMIT_S + 20)
def test_guide_grows_a_group(store):
    with Snippets(store.port, 2) as ranks:
        for rank in range(2):
            ranks.start(rank, member(epoch=2, size=3, options="(active, False, 4)"))
        ranks.start(2, REPLACE + ADD_UP.format(size=3))
        for rank in range(3):
            ranks.check(rank)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    ("scenario", "size"),
    [
        ("reductions", 3),
        ("gathers", 3),
        ("exchanges", 3),
        ("tensors_of_all_kinds", 2),
        ("frameworks", 2),
        pytest.param("compiled_by_inductor", 2, marks=LONG),
        ("end_without_destroy", 2),
        ("again_on_the_same_store", 2),
        ("hosts_by_name", 3),
    ],
)
def test_ranks_pass(scenario, size, store):
    with Ranks(scenario, size, store.port) as ranks:
        for rank in range(size):
            ranks.start(rank)
        logs = [ranks.check(rank) for rank in range(size)]
    assert "has ended" not in "".join(logs), "a rank that has left is no loss"


@LONG
@pytest.mark.timeout(1000)
def test_ranks_always_end_well_without_destroy():
    for _ in range(20):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with Ranks("end_without_destroy", 2, store.port) as ranks:
            ranks.start(0).start(1)
            ranks.check(0)
            ranks.check(1)


@pytest.mark.timeout(LIMIT_S + 20)
def test_killed_rank_is_lost_once_and_replaced(store):
    size, victim = 3, 1
    with Ranks("lose_and_replace", size, store.port) as ranks:
        for rank in range(size):
            ranks.start(rank)
        ranks.check(victim, -signal.SIGKILL)
        assert ranks.processes[0].stdout.readline() == "lost\n"
        ranks.start(victim, "extension")
        logs = [ranks.check(rank) for rank in range(size)]
    for rank in (0, 2):
        lost = [line for line in logs[rank].splitlines() if "has lost ranks" in line]
        assert len(lost) == 1, logs[rank]
        for part in ("WARN", "group=0", f"rank={rank}", "epoch=2", "lost=[1]", "active=[0, 2]"):
            assert part in lost[0], lost
    assert "the process of a rank has ended rank=1" in logs[0]


@pytest.mark.timeout(LIMIT_S + 20)
def test_group_grows_and_takes_a_removed_rank_back(store):
    with Ranks("grow", 3, store.port) as ranks:
        ranks.start(0).start(1)
        assert ranks.processes[0].stdout.readline() == "lost\n"
        ranks.start(2, "extension")
        for rank in range(3):
            ranks.check(rank)


@pytest.mark.timeout(LIMIT_S + 20)
def test_death_of_rank_0_is_an_error_at_the_others(store):
    with Ranks("coordinator_dies", 3, store.port) as ranks:
        for rank in range(3):
            ranks.start(rank)
        ranks.check(0, -signal.SIGKILL)
        ranks.check(1)
        ranks.check(2)


@pytest.mark.timeout(LIMIT_S + 20)
def test_replacement_joins_subgroups_and_experts(store):
    with Ranks("replace_in_subgroups", 3, store.port) as ranks:
        for rank in range(3):
            ranks.start(rank)
        ranks.check(2, -signal.SIGKILL)
        assert ranks.processes[0].stdout.readline() == "lost\n"
        ranks.start(2, "extension")
        for rank in range(3):
            ranks.check(rank)


@LONG
@pytest.mark.timeout(600)
def test_benchmark_of_collectives_prints_its_rows():
    words = ["--ranks", "2", "3", "--sizes", "4", "--operations", "all_reduce_sum", "--kills", "1"]
    program = Path(__file__).parents[2] / "benches/programs/collectives.py"
    done = subprocess.run(
        [sys.executable, program, *words], check=True, capture_output=True, text=True, timeout=500
    )
    rows = [line.split()[:2] for line in done.stdout.splitlines()[1:]]
    names = ("all_reduce_sum", "reaction", "replacement")
    assert rows == [[name, ranks] for ranks in "23" for name in names]


def test_elastic_buffer_refuses_with_the_reason():
    from mooncake.mooncake_elastic_buffer import ElasticBuffer

    with pytest.raises(NotSupportedError, match="mooncake_ep_buffer"):
        ElasticBuffer(None)


def test_options_take_upstreams_forms():
    mirror = torch.zeros(4, dtype=torch.int32)
    forms = [
        pg.MooncakeBackendOptions(mirror),
        pg.MooncakeBackendOptions(mirror, True),
        pg.MooncakeBackendOptions(mirror, True, 4),
        pg.MooncakeBackendOptions(4),
        pg.MooncakeBackendOptions(numpy.int64(4)),
        pg.MooncakeBackendOptions(4, True),
        pg.MooncakeBackendOptions(4, False, True, False),
        pg.MooncakeBackendOptions(active_ranks=mirror, is_extension=False),
        pg.MooncakeBackendOptions(max_group_size=4, is_extension=True),
    ]
    assert all(isinstance(form, pg.MooncakeBackendOptions) for form in forms)


@pytest.mark.parametrize(
    ("arguments", "keywords", "text"),
    [
        ((), {}, "needs active_ranks or max_group_size"),
        ((65,), {}, "1 to 64"),
        ((True,), {}, "first argument"),
        ((), {"max_group_size": torch.tensor(4)}, "an int, not Tensor"),
        ((torch.zeros(2),), {}, "int32"),
        ((torch.zeros(2, dtype=torch.int32), False, 3), {}, "shorter"),
        ((4, False, False, True), {}, "needs auto_deactivate"),
        ((4,), {"size": 3}, "no option 'size'"),
        ((4,), {"max_group_size": 3}, "twice"),
    ],
)
def test_wrong_options_are_refused(arguments, keywords, text):
    with pytest.raises((TypeError, ValueError), match=text):
        pg.MooncakeBackendOptions(*arguments, **keywords)


def test_backends_are_registered_beside_those_of_torch():
    assert dist.Backend.backend_capability["mooncake"] == ["cpu", "cuda"]
    assert dist.Backend.backend_capability["mooncake-cpu"] == ["cpu"]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


def test_other_groups_and_works_are_refused():
    for call in (pg.get_active_ranks, pg.join_group, pg.get_current_epoch):
        with pytest.raises(TypeError, match="not a process group of mooncake"):
            call(object())


def test_outcomes_of_other_objects_are_refused():
    for call in (pg.get_local_success, pg.get_failed_ranks_hint):
        with pytest.raises(TypeError, match="not a work of a process group"):
            call(object())


def test_other_engines_are_refused():
    with pytest.raises(TypeError, match="not a TransferEngine"):
        pg.set_transfer_engine(object())


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        ("localhost", "localhost"),
        ("[::1]:9", "::1"),
        ("fe80::1", "fe80::1"),
    ],
)
def test_host_of_an_engine_is_its_name_without_port(name, host):
    assert context._host_of(name) == host


def test_host_name_without_address_is_named():
    assert context._address_of("::1", "set_host_ip") == "::1"
    with pytest.raises(ValueError, match="set_host_ip: the host name has no address"):
        context._address_of("a" * 64, "set_host_ip")


def test_package_does_not_import_torch():
    code = "import sys, mooncake; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
