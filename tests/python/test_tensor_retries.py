"""Reads of a tensor are repeated while what they find is being replaced, and no longer."""

from __future__ import annotations

import pytest

from mooncake._runtime import _native
from mooncake.errors import (
    DeadlineError,
    InvalidArgumentError,
    NotFoundError,
    NotReadyError,
    TransferFailedError,
)
from mooncake.tensor.retries import Failure, Retries
from mooncake.tensor.search import Unsettled
from mooncake.tensor.transfer import replaced

MISSING = _native.failure(-704, "shards of the tensor are missing", key="k")
MIXED = _native.failure(-703, "the stored shards are of different versions", key="k")
SHORTER = _native.failure(-600, "the range is outside of the object", key="k")


class Read:
    """One read that fails again and again."""

    def __init__(self):
        self.retries, self.passed, self.pauses = Retries(), 0.0, []

    def is_repeated(self, failure, *, after=0.0, has_time=True):
        """Return whether an attempt that failed is repeated; `after` is the time it took."""
        choice = self.retries.choose({0: failure})
        self.pauses.append(next(choice).seconds)
        self.passed += after
        with pytest.raises(StopIteration) as end:
            choice.send((self.passed, has_time))
        return end.value.value == [0]

    def end(self, *, has_time):
        """End the attempts with one after which nothing is repeated."""
        choice = self.retries.choose({})
        assert next(choice).seconds == 0
        with pytest.raises(StopIteration):
            choice.send((self.passed, has_time))


def missing(*versions):
    unsettled = Unsettled(MISSING, is_mixed=False)
    unsettled.state = versions
    return Failure.of_search(unsettled)


def mixed(*versions):
    unsettled = Unsettled(MIXED, is_mixed=True)
    unsettled.state = versions
    return Failure.of_search(unsettled)


def test_same_shards_of_ever_new_versions_are_looked_for():
    read = Read()
    assert all(read.is_repeated(missing(version, None)) for version in range(200))


def test_shards_that_nobody_replaces_are_missing_at_the_second_look():
    read = Read()
    assert read.is_repeated(missing(7, None))
    assert not read.is_repeated(missing(7, None))
    assert isinstance(read.retries.explained(0, MISSING), NotFoundError)
    assert read.pauses == [0, 0]


def test_object_that_nobody_replaces_is_damaged_at_the_second_look():
    read = Read()
    assert read.is_repeated(Failure.of_read(SHORTER, (7, 8)))
    assert read.is_repeated(Failure.of_read(SHORTER, (7, 9)))
    assert not read.is_repeated(Failure.of_read(SHORTER, (7, 9)))
    assert isinstance(read.retries.explained(0, SHORTER), InvalidArgumentError)


def test_attempt_without_a_search_proves_nothing():
    read = Read()
    assert read.is_repeated(Failure.of_read(replaced(b"k")))
    assert read.is_repeated(Failure.of_read(replaced(b"k")))


def test_other_failures_are_final():
    lost = _native.failure(-800, "the peer does not answer", key="k")
    assert not Read().is_repeated(Failure.of_read(lost, (7,)))


def test_writer_counts_as_dead_after_five_seconds_without_a_change():
    read = Read()
    assert read.is_repeated(mixed(7, 8))
    assert read.is_repeated(mixed(7, 8), after=4.9)
    assert read.is_repeated(mixed(8, 8), after=4.9)
    assert read.is_repeated(mixed(8, 8), after=4.9)
    assert not read.is_repeated(mixed(8, 8), after=0.2)
    assert all(pause > 0 for pause in read.pauses)


def test_read_that_is_always_too_late_ends():
    late = Failure.of_read(replaced(b"k"), (7,))
    read = Read()
    assert sum(iter(lambda: read.is_repeated(late), False)) < 10


def test_attempts_of_a_writer_in_a_loop_become_rarer():
    read = Read()
    for version in range(20):
        read.is_repeated(missing(version))
    assert read.pauses[0] == 0
    assert read.pauses[-1] == 0.05


@pytest.mark.parametrize("error", [MISSING, SHORTER])
def test_read_without_time_left_was_replaced(error):
    read = Read()
    assert not read.is_repeated(Failure.of_read(error, (7,)), has_time=False)
    explained = read.retries.explained(0, error)
    assert isinstance(explained, DeadlineError)
    assert explained.key == "k"


def test_read_of_two_versions_without_time_left_says_so():
    read = Read()
    assert not read.is_repeated(mixed(7, 8), has_time=False)
    assert isinstance(read.retries.explained(0, MIXED), NotReadyError)


def test_read_that_succeeds_at_last_has_its_result():
    read = Read()
    assert read.is_repeated(missing(7))
    read.end(has_time=False)
    assert read.retries.explained(0, "value") == "value"


@pytest.mark.parametrize("has_time", [True, False])
def test_last_attempt_that_is_cut_leaves_the_reason_before_it(has_time):
    read = Read()
    assert read.is_repeated(mixed(7, 8))
    lost = _native.failure(-800, "the deadline passed before the bytes were moved", key="k")
    read.end(has_time=has_time)
    told = NotReadyError if not has_time else TransferFailedError
    assert isinstance(read.retries.explained(0, lost), told)


def test_reason_is_not_replaced_by_a_deadline():
    read = Read()
    assert read.is_repeated(mixed(7, 8))
    late = Failure.of_read(replaced(b"k"), (8, 8))
    assert not read.is_repeated(late, has_time=False)
    assert isinstance(read.retries.explained(0, late.error), NotReadyError)


def test_first_attempt_without_failures_asks_for_no_time():
    with pytest.raises(StopIteration):
        next(Retries().choose({}))
