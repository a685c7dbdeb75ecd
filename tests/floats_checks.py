"""The conversions of `numba_ddtree.device.floats` against numpy's and ml_dtypes'."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_checks import Library
from ml_dtypes import bfloat16
from numpy.typing import NDArray


def make_kernels() -> tuple[Any, Any]:
    """Kernels that widen 16-bit patterns, and that narrow float32; an element a thread."""
    from numba_ddtree.cuda_target import cuda
    from numba_ddtree.device.floats import (
        bfloat16_to_float32,
        float16_to_float32,
        float32_to_bfloat16,
        float32_to_float16,
        float_bits,
        float_of_bits,
    )

    @cuda.jit
    def widen_kernel(bits, of_bfloat16, of_float16):  # type: ignore[no-untyped-def]
        place = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if place < bits.shape[0]:
            of_bfloat16[place] = bfloat16_to_float32(bits[place])
            of_float16[place] = float16_to_float32(bits[place])

    @cuda.jit
    def narrow_kernel(values, as_bfloat16, as_float16, same):  # type: ignore[no-untyped-def]
        place = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if place < values.shape[0]:
            as_bfloat16[place] = float32_to_bfloat16(values[place])
            as_float16[place] = float32_to_float16(values[place])
            same[place] = float_of_bits(float_bits(values[place]))

    return widen_kernel, narrow_kernel


def check_widening(library: Library, patterns: NDArray[np.uint16], blocks: int) -> None:
    """Check that each pattern becomes the float32 of the same value, NaN to NaN, sign of zero kept."""
    kernel, _ = make_kernels()
    results = [library.put(np.full(len(patterns), 7, np.float32)) for _ in range(2)]
    kernel[blocks, 32](library.put(patterns), *results)
    for result, dtype in zip(results, (bfloat16, np.float16), strict=True):
        assert_same_floats(library.get(result), patterns.view(dtype).astype(np.float32))


def check_narrowing(library: Library, values: NDArray[np.float32], blocks: int) -> None:
    """Check that each float32 becomes the nearest 16-bit number, ties to even."""
    _, kernel = make_kernels()
    as_bits = [library.put(np.full(len(values), 7, np.uint16)) for _ in range(2)]
    same = library.put(np.zeros(len(values), np.float32))
    kernel[blocks, 32](library.put(values), *as_bits, same)
    for bits, dtype in zip(as_bits, (bfloat16, np.float16), strict=True):
        with np.errstate(over="ignore", invalid="ignore"):  # overflow, and NaN that signal
            want = values.astype(dtype)
        assert_same_floats(library.get(bits).view(dtype).astype(np.float32), want.astype(np.float32))
    assert_same_floats(library.get(same), values)


def assert_same_floats(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    """Check equality and the sign of zeros; one NaN is as good as another."""
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def float_edges() -> NDArray[np.float32]:
    """Values on, and one ulp beside, the points where rounding to 16 bits changes its mind."""
    patterns = np.array([0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x477F, 0x7F7E, 0x7F7F], np.uint32)
    halves = ((patterns[:, None] << 16) | np.array([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    between = np.array([65503, 65504, 65519.99, 65520, 2**-24, 2**-25, 2**-26, 1 + 2**-11, 1 + 3 * 2**-11])
    values = np.concatenate([halves.view(np.float32), between.astype(np.float32), [np.inf, np.nan]])
    return np.concatenate([values, -values]).astype(np.float32)
