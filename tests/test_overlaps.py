"""Arrays that share memory are found, whatever their layouts, and others are not."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from numba_ddtree import ArgumentError
from numba_ddtree.arrays import DeviceView, c_strides
from numba_ddtree.overlaps import check_apart, overlaps_itself


def part_of(rng: np.random.Generator, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array's slice by random bounds and steps, sometimes transposed or backwards."""
    begins = [rng.integers(0, size) for size in array.shape]
    ends = [rng.integers(begin + 1, size + 1) for begin, size in zip(begins, array.shape, strict=True)]
    part = array[tuple(map(slice, begins, ends, rng.choice([1, 1, 2, 3], array.ndim)))]
    part = part.T if rng.random() < 0.3 else part
    return part[::-1] if rng.random() < 0.3 else part


def share(views: dict[str, Any], **options: bool) -> bool:
    with suppress(ArgumentError):
        check_apart(views, **options)
        return False
    with pytest.raises(ArgumentError, match=r"^b: got the memory of a; expected memory of its own$"):
        check_apart(views, **options)
    return True


def test_overlaps_are_those_that_numpy_finds(rng: np.random.Generator) -> None:
    found = 0
    for _ in range(3000):
        array = np.zeros(rng.integers(1, 7, 3), rng.choice(["i1", "f4"]))
        a, b = part_of(rng, array), part_of(rng, array)
        want = np.shares_memory(a, b)
        assert share({"a": a, "b": b}) == want, (array.shape, a.shape, a.strides, b.shape, b.strides)
        assert not overlaps_itself(a)
        found += want
    assert 300 < found < 2700


def test_contiguous_arrays_are_compared_by_their_bytes() -> None:
    array = np.zeros(24, np.float32)
    for b, want in ((array[11:20], True), (array[12:], False), (array[12:12], False), (array[:1], True)):
        assert share({"a": array[:12], "b": b}, are_contiguous=True) == want


def test_addresses_on_a_device_are_not_read() -> None:
    def view(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceView:
        return DeviceView(address, shape, strides, np.dtype(np.float16), 0, None)

    fused = 64 * 1152, 1152, 2
    parts = {f"ckv{i}": view((i + 1) << 40, (4000, 64, 512), fused) for i in range(3)}
    parts |= {f"kpe{i}": view(((i + 1) << 40) + 1024, (4000, 64, 64), fused) for i in range(3)}
    check_apart(parts)
    with pytest.raises(ArgumentError, match=r"^late: got the memory of kpe1; expected memory of its own$"):
        check_apart(parts | {"late": view((2 << 40) + 1150, (1,), c_strides((1,), 2))})


def test_elements_that_share_memory() -> None:
    row = np.zeros(40, np.float32)
    for strides, want in (
        ((0, 4), True),
        ((8, 4), True),
        ((12, 4), False),
        ((4, 12), True),
        ((4, 16), False),
    ):
        assert overlaps_itself(as_strided(row, (4, 3), strides)) == want
    assert not overlaps_itself(as_strided(row, (1, 3), (0, 4)))
    assert not overlaps_itself(as_strided(row, (0, 3), (0, 0)))
