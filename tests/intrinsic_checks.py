"""Intrinsics run alone: a kernel's arrays there and back, tiles in registers, and chunks in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

LANES = 32
NUMBERS = {"bf16": bfloat16, "f16": np.float16}  # PTX's names of 16-bit numbers


def run(
    function: Any, *arrays: NDArray[Any], threads: int = LANES, shared_bytes: int = 0
) -> list[NDArray[Any]]:
    """Run a kernel, one block, on copies of arrays; return these as it leaves them."""
    from numba_ddtree.arrays import device_view
    from numba_ddtree.cuda_target import cuda
    from numba_ddtree.launch import Kernel

    copies = [cuda.to_device(array) for array in arrays]
    views = [device_view("array", copy) for copy in copies]
    Kernel(function, (), threads).prepare(1, *views, shared_bytes=shared_bytes).launch(None)
    return [copy.copy_to_host() for copy in copies]


def run_step(step: Any, tile: NDArray[np.float32], numbers: NDArray[Any], count: int) -> NDArray[Any]:
    """Give each lane its part of a tile [32, elements] and of numbers [32, n], and a step both.

    Returns
    -------
    float32 [32, count]
        The tile, or tuple, that the step returns in each lane.
    """
    from numba_ddtree.cuda_target import cuda, uint32

    load, store = make_tile_load(tile.shape[1]), make_tile_store(count)

    def kernel(tiles, numbers, results):  # type: ignore[no-untyped-def]
        lane = uint32(cuda.threadIdx.x)
        store(results, lane, step(load(tiles, lane), numbers[lane]))

    poisoned = np.full((LANES, count), np.nan, np.float32)
    return run(kernel, np.ascontiguousarray(tile), numbers, poisoned)[2]


def make_tile_load(count: int) -> Any:
    """Make the load of a tuple from a row, of so many elements, of an array."""
    from llvmlite import ir
    from numba.core import types

    from numba_ddtree.device.ptx import LONG, array_of, intrinsic

    @intrinsic
    def load(typing_context: Any, array: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            first = builder.mul(args[1], ir.Constant(LONG, count))
            places = [builder.add(first, ir.Constant(LONG, index)) for index in range(count)]
            return array_of(builder, [builder.load(builder.gep(data, [place])) for place in places])

        return types.UniTuple(array.dtype, count)(array, types.int64), generate

    return load


def make_tile_store(count: int) -> Any:
    """Make the store of a tuple to a row of an array."""
    from llvmlite import ir
    from numba.core import types

    from numba_ddtree.device.ptx import LONG, elements_of, intrinsic

    @intrinsic
    def store(typing_context: Any, array: Any, row: Any, tile: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            first = builder.mul(args[1], ir.Constant(LONG, count))
            for index, element in enumerate(elements_of(builder, args[2])):
                builder.store(element, builder.gep(data, [builder.add(first, ir.Constant(LONG, index))]))
            return context.get_dummy_value()

        return types.void(array, types.int64, types.UniTuple(array.dtype, count)), generate

    return store


def fragments(matrix: NDArray[Any]) -> NDArray[Any]:
    """Cut an accumulator [16 m, 8 n] into lanes' parts [32, 4 m n], as `numba_ddtree.device.tile` says."""
    rows, columns = np.array(places(*matrix.shape))
    return np.ascontiguousarray(matrix[rows, columns])


def matrix_of(parts: NDArray[Any], rows: int) -> NDArray[Any]:
    """Put lanes' parts [32, elements] of an accumulator of so many rows together."""
    matrix = np.zeros((rows, LANES * parts.shape[1] // rows), parts.dtype)
    matrix[places(*matrix.shape)] = parts
    return matrix


def places(rows: int, columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns, each [32, elements], of the elements that lanes have of an accumulator."""
    group, inside = np.divmod(np.arange(LANES), 4)
    found = [
        (16 * row + group + 8 * below, 8 * column + 2 * inside + side)
        for row in range(rows // 16)
        for column in range(columns // 8)
        for below in (0, 1)
        for side in (0, 1)
    ]
    return np.stack([row for row, _ in found], 1), np.stack([column for _, column in found], 1)


def chunks_of(matrix: NDArray[Any], chunk_rows: int = 64) -> NDArray[np.uint16]:
    """Lay a matrix of 16-bit numbers [up to `chunk_rows`, 64 n] out in swizzled chunks; the rest is NaN.

    Returns
    -------
    uint16 [n, chunk_rows, 64]
        The bits: of row r, unit u of 8 numbers is at place ``u ^ (r % 8)``.
    """
    rows, columns = matrix.shape
    laid = np.full((columns // 64, chunk_rows, 8, 8), 0xFFFF, np.uint16)
    for chunk in range(columns // 64):
        for row in range(rows):
            units = matrix[row, 64 * chunk : 64 * (chunk + 1)].reshape(8, 8).view(np.uint16)
            laid[chunk, row, np.arange(8) ^ (row % 8)] = units
    return laid.reshape(columns // 64, chunk_rows, 64)


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], number: str) -> NDArray[Any]:
    """Draw numbers of which products and sums are exact in float32."""
    return rng.integers(-8, 9, shape).astype(NUMBERS[number])


def assert_near_exp2(got: NDArray[np.float32], exponents: NDArray[Any]) -> None:
    """Check powers of 2 that are normal: 2 units in the last place from the correctly rounded ones."""
    want = np.exp2(exponents.astype(np.float64))
    assert (np.abs(got - want) <= 2.5 * np.spacing(want.astype(np.float32)).astype(np.float64)).all()
