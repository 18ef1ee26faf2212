"""`mooncake.ep.Buffer` against a model in numpy, with ranks that die or stop."""

from __future__ import annotations

import os
import random
import signal
import time

import ep_ranks
import pytest
from pg_forked import LIMIT_S, Forked

from mooncake.ep import Buffer

IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


def _kill_the_last(scenario, size, *started):
    """Run a scenario whose last rank dies once the named ranks, or all of them, are ready."""
    with Forked(ep_ranks, scenario, size) as ranks:
        ranks.start().expect("ready", *started)
        ranks.signal(size - 1, signal.SIGKILL)
        ranks.ranks[size - 1][0].join()
        ranks.send("dead", *range(size - 1))
        ranks.check(size - 1)


@pytest.mark.parametrize(
    ("scenario", "size"),
    [
        ("all_modes_match", 3),
        ("upstream_wheel_check", 2),
        ("rounds_of_two_buffers_overlap", 3),
        ("combine_takes_the_buffer_of_its_handle", 2),
        ("tags_of_a_round_left_out_come_again", 2),
        ("wrong_arguments_are_refused", 1),
    ],
)
def test_ranks_exchange_rows(scenario, size):
    with Forked(ep_ranks, scenario, size) as ranks:
        ranks.start().check()


def test_size_hint_is_that_of_upstream():
    assert Buffer.get_ep_buffer_size_hint(128, 7168, 8, 288) == 2_118_652_416


@pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1")
def test_upstream_wheel_check_passes_in_full_size():
    with Forked(ep_ranks, "upstream_wheel_check_of_full_size", 2) as ranks:
        ranks.start().check()


def test_rank_that_dies_before_dispatch_is_masked():
    _kill_the_last("all_modes_match_without_a_dead_rank", 3, 2)


@pytest.mark.parametrize(
    "scenario",
    ["old_rows_are_not_summed", "dies_while_others_combine", "buffer_is_made_across_a_death"],
)
def test_death_between_calls_leaves_the_others(scenario):
    _kill_the_last(scenario, 3)


def test_sums_have_all_rows_of_a_killed_rank_or_none():
    with Forked(ep_ranks, "rounds_across_a_kill", 3) as ranks:
        ranks.start().expect("ready")
        # Not a wait for something: the moment of death is what varies.
        delay_s = random.random() * 0.2
        print(f"killed after {delay_s:.3f} s")
        time.sleep(delay_s)
        ranks.signal(2, signal.SIGKILL)
        ranks.check(2)


def test_stopped_rank_is_masked_and_comes_back():
    with Forked(ep_ranks, "stopped_rank_is_masked_and_comes_back", 3) as ranks:
        ranks.start().expect("ready")
        ranks.signal(2, signal.SIGSTOP)
        ranks.send("go")
        ranks.expect("masked", 0, 1)
        ranks.signal(2, signal.SIGCONT)
        ranks.check()
