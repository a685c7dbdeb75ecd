"""Tiles in registers on a device, each intrinsic alone, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import SIMULATED
from intrinsic_checks import (
    LANES,
    NUMBERS,
    assert_near_exp2,
    chunks_of,
    fragments,
    make_tile_load,
    make_tile_store,
    matrix_of,
    run,
    run_step,
    small_integers,
)
from numpy.typing import NDArray

if SIMULATED:
    pytest.skip("Numba's simulator has no tiles", allow_module_level=True)

from numba_ddtree.cuda_target import cuda, device_function, int64, uint32, uint64
from numba_ddtree.device import tile as tiles
from numba_ddtree.device.ptx import address_of, shared_address_of
from numba_ddtree.device.tile import CHUNK_BYTES, PIECE_BYTES, left_address, right_address, unit_address

pytestmark = pytest.mark.gpu

ROWS = np.arange(LANES) // 4  # of the lanes' parts: the upper one of every 16 rows
NOTHING = np.zeros((LANES, 1), np.float32)


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    return rng.standard_normal((rows, columns), np.float32)


def by_lane(rows: NDArray[Any]) -> NDArray[Any]:
    """Numbers of 16 m rows as lanes have them [32, 2 m]: of rows g, g + 8, g + 16 and so on."""
    return np.ascontiguousarray(rows[ROWS[:, None] + 8 * np.arange(len(rows) // 8)])


@device_function
def fill(s_words, words):  # type: ignore[no-untyped-def]
    """Copy words to shared memory, by a warp."""
    for place in range(uint32(cuda.threadIdx.x), uint32(words.shape[0]), uint32(LANES)):
        s_words[place] = words[place]
    cuda.syncwarp()


def words_of(*parts: NDArray[Any]) -> NDArray[np.uint32]:
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint32) for part in parts])


def every_other_unit(unit: int, count: int) -> NDArray[np.int64]:
    """Numbers of `count` columns: 8 of every 16, from a unit of 8 on."""
    return (8 * unit + 16 * np.arange(count // 8)[:, None] + np.arange(8)).reshape(-1)


# Shared memory.


def test_units_of_eight_rows_lie_in_different_banks() -> None:
    def kernel(found):  # type: ignore[no-untyped-def]
        for row in range(uint32(64)):
            unit = uint32(cuda.threadIdx.x)
            found[row, unit] = unit_address(uint32(4096), row, unit)

    (found,) = run(kernel, np.zeros((64, 8), np.uint32), threads=8)
    row, unit = np.indices((64, 8))
    np.testing.assert_array_equal(found, 4096 + 128 * row + 16 * (unit ^ (row % 8)))
    for column in (found % 128).reshape(8, 8, 8).transpose(0, 2, 1).reshape(-1, 8):
        assert len(set(column)) == 8


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("chunks", "columns", "left_rows", "unit"),
    [(1, 16, 64, 0), (2, 32, 32, 1), (3, 32, 16, 0), (9, 32, 16, 1)],
)
def test_row_product(
    rng: np.random.Generator, number: str, chunks: int, columns: int, left_rows: int, unit: int
) -> None:
    left = small_integers(rng, (16, 64 * chunks), number)
    right = small_integers(rng, (64, 64 * chunks), number)
    before = rng.integers(-99, 99, (2, 16, columns)).astype(np.float32)
    product = tiles.make_row_product(number, chunks, columns, 128 * left_rows)
    load, store = make_tile_load(columns), make_tile_store(columns)
    right_at = chunks * 128 * left_rows + unit * 8 * 128

    def kernel(words, totals):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(0, uint32, alignment=1024)
        fill(s_words, words)
        base, lane = shared_address_of(s_words), uint32(cuda.threadIdx.x)
        own = left_address(base, lane)
        other = right_address(uint32(base + uint32(right_at)), lane)
        store(totals, lane, product(load(totals, lane), own, other))

    words = words_of(chunks_of(left, left_rows), chunks_of(right))
    totals = np.concatenate([fragments(before[0]), fragments(before[1])], axis=1)
    _, got = run(kernel, words, totals, shared_bytes=words.nbytes)
    right = right[every_other_unit(unit, columns)]
    steps = np.arange(64 * chunks) // 16 % 2
    for parity, part in enumerate(np.split(got, 2, axis=1)):
        terms = steps == parity
        added = left[:, terms].astype(np.float32) @ right[:, terms].astype(np.float32).T
        np.testing.assert_array_equal(matrix_of(part, 16), before[parity] + added)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("rows", [16, 32])
def test_column_product(rng: np.random.Generator, number: str, rows: int) -> None:
    left, right = small_integers(rng, (rows, 64), number), small_integers(rng, (64, 128), number)
    before = rng.integers(-99, 99, (rows, 128)).astype(np.float32)
    product = tiles.make_column_product(number, rows // 16, 2)
    count = rows * 128 // LANES
    load, store = make_tile_load(count), make_tile_store(count)

    def kernel(words, totals):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(0, uint32, alignment=1024)
        fill(s_words, words)
        base, lane = shared_address_of(s_words), uint32(cuda.threadIdx.x)
        own = left_address(base, lane)
        other = left_address(uint32(base + uint32(CHUNK_BYTES)), lane)
        total = load(totals, lane)
        for step in range(uint32(4)):
            further = uint32(other + uint32(step) * uint32(PIECE_BYTES))
            total = product(total, uint32(own ^ uint32(uint32(step) << uint32(5))), further)
        store(totals, lane, total)

    words = words_of(chunks_of(left), chunks_of(right))
    _, got = run(kernel, words, fragments(before), shared_bytes=words.nbytes)
    added = left.astype(np.float32) @ right.astype(np.float32)
    np.testing.assert_array_equal(matrix_of(got, rows), before + added)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("first", [0, 4, 12])
@pytest.mark.parametrize("unit", [0, 3])
def test_column_product_of_some_units(rng: np.random.Generator, number: str, first: int, unit: int) -> None:
    left, right = small_integers(rng, (32, 16), number), small_integers(rng, (16, 128), number)
    before = rng.integers(-99, 99, (32, 128)).astype(np.float32)
    product = tiles.make_column_product(number, 2, 2, pairs=1, first=first)
    load, store = make_tile_load(128), make_tile_store(128)

    def kernel(words, totals):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(0, uint32, alignment=1024)
        fill(s_words, words)
        base, lane = shared_address_of(s_words), uint32(cuda.threadIdx.x)
        own_unit = uint32(uint32(unit) + uint32(uint32(lane >> uint32(4)) << uint32(2)))
        other = unit_address(uint32(base + uint32(CHUNK_BYTES)), uint32(lane & uint32(15)), own_unit)
        store(totals, lane, product(load(totals, lane), left_address(base, lane), other))

    padded = np.zeros((32, 64), left.dtype)
    padded[:, :16] = left
    words = words_of(chunks_of(padded), chunks_of(right))
    _, got = run(kernel, words, fragments(before), shared_bytes=words.nbytes)
    columns = np.concatenate([8 * place + np.arange(8) for place in (unit, unit + 4, unit + 8, unit + 12)])
    want = before.copy()
    want[:, 8 * first : 8 * first + 32] += left.astype(np.float32) @ right[:, columns].astype(np.float32)
    np.testing.assert_array_equal(matrix_of(got, 32), want)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("row", "unit"), [(0, 0), (16, 1), (48, 1)])
def test_row_store(rng: np.random.Generator, number: str, row: int, unit: int) -> None:
    matrix = random_matrix(rng, 16, 32)
    store, load = tiles.make_row_store(f"{number}x2"), make_tile_load(16)

    def kernel(tile, words):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(0, uint32, alignment=1024)
        fill(s_words, words)
        lane = uint32(cuda.threadIdx.x)
        own = uint32(uint32(row) + uint32(lane >> uint32(2)))
        target = unit_address(shared_address_of(s_words), own, uint32(unit))
        store(uint32(target + uint32(uint32(lane & uint32(3)) << uint32(2))), load(tile, lane))
        cuda.syncwarp()
        for place in range(lane, uint32(words.shape[0]), uint32(LANES)):
            words[place] = s_words[place]

    before = rng.standard_normal((64, 64)).astype(NUMBERS[number])
    want = before.copy()
    want[row : row + 16, every_other_unit(unit, 32)] = matrix.astype(NUMBERS[number])
    _, got = run(kernel, fragments(matrix), words_of(chunks_of(before)), shared_bytes=CHUNK_BYTES)
    np.testing.assert_array_equal(got, words_of(chunks_of(want)))


# Global memory.


@pytest.mark.parametrize("distance", [8, 32])
@pytest.mark.parametrize("number", ["f32", *NUMBERS])
def test_row_stores(rng: np.random.Generator, distance: int, number: str) -> None:
    matrix = random_matrix(rng, 32, 128)
    matrix[3, :8] = 65519.99, 65520, -0.0, 1e-30, -1e-45, np.inf, -np.inf, 3e38
    dtype = NUMBERS.get(number, np.float32)
    size, load = np.dtype(dtype).itemsize, make_tile_load(128)
    part_0, part_1, part_2, part_3 = (tiles.make_row_part(row, 16) for row in range(4))
    store = tiles.make_row_float_store(distance)
    if number in NUMBERS:
        store = tiles.make_row_word_store(f"{number}x2", distance)

    def kernel(tile, out):  # type: ignore[no-untyped-def]
        lane = uint32(cuda.threadIdx.x)
        row = int64(lane >> uint32(2))
        columns = int64(out.shape[1])
        first = uint64(address_of(out) + uint64((row * columns + int64(2 * (lane & uint32(3)))) * size))
        whole = load(tile, lane)
        store(first, part_0(whole))
        store(uint64(first + uint64(8 * columns * size)), part_1(whole))
        store(uint64(first + uint64(16 * columns * size)), part_2(whole))
        store(uint64(first + uint64(24 * columns * size)), part_3(whole))

    before = np.full((32, 16 * distance), 7, dtype).view(f"u{size}")
    got = run(kernel, fragments(matrix), before)[1].view(dtype)
    want = np.full((32, 16, distance), 7, dtype)
    with np.errstate(over="ignore"):
        want[:, :, :8] = matrix.reshape(32, 16, 8).astype(dtype)
    if number in NUMBERS:
        want[want == 0] = 0
    np.testing.assert_array_equal(got.view(np.uint8), want.reshape(32, -1).view(np.uint8))


# Registers.


def test_zeros() -> None:
    zeros = tiles.make_zeros(12)

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return zeros()

    assert not run_step(step, NOTHING, NOTHING, 12).any()


@pytest.mark.parametrize("rows", [16, 32])
def test_scale_rows(rng: np.random.Generator, rows: int) -> None:
    matrix, factors = random_matrix(rng, rows, 24), random_matrix(rng, rows, 1)
    count = rows // 8
    load = make_tile_load(count)
    scale_rows = tiles.scale_rows
    own, other = make_tile_load(rows * 24 // LANES), make_tile_store(rows * 24 // LANES)

    def kernel(tile, factors):  # type: ignore[no-untyped-def]
        lane = uint32(cuda.threadIdx.x)
        other(tile, lane, scale_rows(own(tile, lane), load(factors, lane)))

    got, _ = run(kernel, fragments(matrix), by_lane(factors[:, 0]))
    np.testing.assert_array_equal(matrix_of(got, rows), matrix * factors)


def test_scale_tile(rng: np.random.Generator) -> None:
    matrix, factor = random_matrix(rng, 16, 32), random_matrix(rng, 1, 1)
    scale_tile = tiles.scale_tile

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return scale_tile(tile, numbers[0])

    got = run_step(step, fragments(matrix), np.tile(factor, (LANES, 1)), 16)
    np.testing.assert_array_equal(matrix_of(got, 16), matrix * factor)


def test_add_halves(rng: np.random.Generator) -> None:
    matrices = random_matrix(rng, 16, 16), random_matrix(rng, 16, 16)
    add_halves = tiles.add_halves

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return add_halves(tile)

    got = run_step(step, np.concatenate([fragments(each) for each in matrices], axis=1), NOTHING, 8)
    np.testing.assert_array_equal(matrix_of(got, 16), matrices[0] + matrices[1])


def test_without_negative_zeros(rng: np.random.Generator) -> None:
    matrix = random_matrix(rng, 16, 16)
    matrix[::3] = -0.0
    matrix[1, :3] = 0.0, -1e-45, np.inf
    positive = tiles.without_negative_zeros

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return positive(tile)

    got = matrix_of(run_step(step, fragments(matrix), NOTHING, 8), 16)
    np.testing.assert_array_equal(got.view(np.uint32), np.where(matrix == 0, 0, matrix).view(np.uint32))


@pytest.mark.parametrize("columns", [8, 32, 64])
def test_row_maxima(rng: np.random.Generator, columns: int) -> None:
    matrix = random_matrix(rng, 16, columns)
    matrix[2] = -np.inf
    row_maxima = tiles.row_maxima

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return row_maxima(tile)

    got = run_step(step, fragments(matrix), NOTHING, 2)
    np.testing.assert_array_equal(got, lane_parts(matrix).max(axis=-1))


@pytest.mark.parametrize("columns", [8, 32, 64])
def test_row_sums_are_from_the_left(rng: np.random.Generator, columns: int) -> None:
    matrix = random_matrix(rng, 16, columns)
    row_sums = tiles.row_sums

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return row_sums(tile)

    parts = lane_parts(matrix)
    want = parts[..., 0]
    for element in range(1, parts.shape[-1]):
        want = want + parts[..., element]
    assert want.dtype == np.float32
    np.testing.assert_array_equal(run_step(step, fragments(matrix), NOTHING, 2), want)


def lane_parts(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Elements [32, 2, columns / 4] that lanes have of rows g and g + 8, from the left."""
    pairs = fragments(matrix).reshape(LANES, -1, 2, 2)
    return pairs.transpose(0, 2, 1, 3).reshape(LANES, 2, -1)


@pytest.mark.parametrize("unit", [0, 1])
def test_keep_columns(rng: np.random.Generator, unit: int) -> None:
    matrix = random_matrix(rng, 16, 32)
    is_kept = rng.integers(0, 2, (16, 64)).astype(np.bool_)
    is_kept[0], is_kept[1] = False, True
    bits = np.packbits(is_kept, axis=1, bitorder="little").view(np.uint64)[:, 0]
    keep_columns = tiles.keep_columns

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return keep_columns(tile, uint64(numbers[0]), uint64(numbers[1]))

    firsts = (8 * unit + 2 * (np.arange(LANES) % 4)).astype(np.uint64)
    got = run_step(step, fragments(matrix), (by_lane(bits) >> firsts[:, None]).view(np.int64), 16)
    own = is_kept[:, every_other_unit(unit, 32)]
    np.testing.assert_array_equal(matrix_of(got, 16), np.where(own, matrix, -np.inf))


def test_exp2_below(rng: np.random.Generator) -> None:
    matrix = random_matrix(rng, 16, 32) * np.float32(20)
    maxima = matrix.max(axis=1)
    matrix[5, ::2] = -np.inf
    matrix[6], maxima[6] = -np.inf, 0
    exp2_below = tiles.exp2_below

    @device_function
    def step(tile, numbers):  # type: ignore[no-untyped-def]
        return exp2_below(tile, (numbers[0], numbers[1]))

    got = matrix_of(run_step(step, fragments(matrix), by_lane(maxima), 16), 16)
    exponents = (matrix - maxima[:, None]).astype(np.float64)
    is_normal = exponents > -126
    assert_near_exp2(got[is_normal], exponents[is_normal])
    assert (got[~is_normal] <= 2.0**-126).all()
    assert (got[exponents == 0] == 1).all()
    assert (got[np.isinf(matrix)] == 0).all()


@pytest.mark.parametrize("number", NUMBERS)
def test_pack(rng: np.random.Generator, number: str) -> None:
    pairs = rng.standard_normal((LANES, 2), np.float32)
    # Halfway between neighbours, of either kind, and beyond the largest float16.
    pairs[:5] = [
        (1 + 2.0**-8, 1 + 3 * 2.0**-8),
        (1 + 2.0**-11, 1 + 3 * 2.0**-11),
        (70000, -0.0),
        (-7e4, np.inf),
        (-1e-45, -1e-39),  # of bfloat16, the first rounds to nothing and the other to less than a normal one
    ]
    pack = tiles.make_pack(f"{number}x2")

    def kernel(pairs, words):  # type: ignore[no-untyped-def]
        lane = uint32(cuda.threadIdx.x)
        words[lane] = pack(pairs[lane, 0], pairs[lane, 1])

    _, got = run(kernel, pairs, np.zeros(LANES, np.uint32))
    with np.errstate(over="ignore"):
        want = pairs.astype(NUMBERS[number])
    want[want == 0] = 0  # without the sign
    np.testing.assert_array_equal(got, want.view(np.uint32)[:, 0])


def test_the_layout_of_fragments_is_a_permutation(rng: np.random.Generator) -> None:
    matrix = random_matrix(rng, 32, 24)
    np.testing.assert_array_equal(matrix_of(fragments(matrix), 32), matrix)
