"""The ranks of a process group save and load a checkpoint together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mooncake

PROGRAM = Path(__file__).parent / "checkpoint_ranks.py"


@pytest.mark.timeout(180)
def test_ranks_save_and_load_together(store: mooncake.Store, tmp_path: Path) -> None:
    master, meeting = store.master_address, str(tmp_path / "meeting")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), "2", master, meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [each[1][-2000:] for each in ended]
    assert ended[0][0].splitlines() == [
        "shards_are_put_once_and_sharded_again",
        "ranks_have_keys_of_their_own",
        "contradictions_are_refused_at_all_ranks",
        "failure_of_one_rank_reaches_the_others",
        "failed_load_of_one_rank_reaches_the_others",
        "ranks_begin_again_together",
    ]
