"""`mooncake._fast_copy`: many arrays are copied into memory, within its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake._fast_copy import concat_arrays_into
from mooncake.errors import InvalidArgumentError

ARRAYS = [np.arange(length, dtype=np.uint8) for length in (3, 0, 5, 1)]


@pytest.mark.parametrize("threads", [-1, 1, 3, 100])
@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, -1, [0, 1, 2, 0, 1, 2, 3, 4, 0]),
        (0, None, [0, 1, 2, 0, 1, 2, 3, 4, 0]),
        (2, 1, [0, 1, 2, 3, 4]),
        (1, 1, []),
        (4, -1, []),
    ],
)
def test_arrays_are_copied_one_after_the_other(
    threads: int, start: int, count: int | None, expected: list[int]
):
    to = np.full(12, 255, dtype=np.uint8)
    copied = concat_arrays_into(ARRAYS, to.ctypes.data, to.nbytes, start, count, threads)
    assert copied == len(expected)
    assert to.tolist() == expected + [255] * (12 - len(expected))


def test_nothing_is_copied_that_does_not_fit():
    to = np.full(12, 255, dtype=np.uint8)
    with pytest.raises(InvalidArgumentError, match=r"larger than the destination .*bytes=9 .*8"):
        concat_arrays_into(ARRAYS, to.ctypes.data, 8)
    assert (to == 255).all()


@pytest.mark.parametrize(("start", "count"), [(5, -1), (-1, 1), (2, 3)])
def test_arrays_outside_of_the_list_are_refused(start: int, count: int):
    to = np.empty(12, dtype=np.uint8)
    with pytest.raises(InvalidArgumentError, match="outside of the list of arrays"):
        concat_arrays_into(ARRAYS, to.ctypes.data, 12, start, count)


def test_address_that_is_not_mapped_is_refused():
    with pytest.raises(Exception, match="not"):
        concat_arrays_into(ARRAYS, 4096, 12)


def test_objects_are_refused():
    with pytest.raises(TypeError):
        concat_arrays_into([np.array([object()])], 0, 0)
    with pytest.raises(TypeError):
        concat_arrays_into([3], 0, 0)
