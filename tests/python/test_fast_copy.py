"""`mooncake._fast_copy`: many arrays are copied into memory, within its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake._fast_copy import concat_arrays_into

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
        (5, -1, []),
        (-1, 1, [0, 1, 2]),
        (2, 3, [0, 1, 2, 3, 4, 0]),
        (-7, -7, [0, 1, 2, 0, 1, 2, 3, 4, 0]),
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
    with pytest.raises(ValueError, match=r"destination buffer too small: .* bytes=9 size=8"):
        concat_arrays_into(ARRAYS, to.ctypes.data, 8)
    assert (to == 255).all()


def test_arrays_of_any_dtype_and_shape_are_copied():
    fixed = np.array([7], dtype=np.uint8)
    fixed.flags.writeable = False
    arrays = [np.array(1, np.int16), fixed, np.array(["a"]), np.array(["2020"], "M8[Y]")]
    to = np.zeros(15, dtype=np.uint8)
    assert concat_arrays_into(arrays, to.ctypes.data, 15) == 15
    assert to.tobytes() == b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize("array", [np.zeros((2, 3), order="F"), np.arange(6)[::2]])
def test_arrays_in_another_order_are_refused(array: np.ndarray):
    to = np.empty(64, dtype=np.uint8)
    with pytest.raises(ValueError, match="C-contiguous"):
        concat_arrays_into([array], to.ctypes.data, 64)


def test_address_that_is_not_mapped_is_refused():
    with pytest.raises(Exception, match="not"):
        concat_arrays_into(ARRAYS, 4096, 12)


def test_objects_are_refused():
    with pytest.raises(TypeError):
        concat_arrays_into([np.array([object()])], 0, 0)
    with pytest.raises(TypeError):
        concat_arrays_into([3], 0, 0)
    for arrays in (np.arange(3), (np.arange(3),), None):
        with pytest.raises(TypeError, match="must be a list"):
            concat_arrays_into(arrays, 0, 0)
    with pytest.raises(TypeError, match="positional"):
        concat_arrays_into(arrays=ARRAYS, dest_ptr=0, dest_size=0)
