"""Instructions as intrinsics on a device, each alone, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import SIMULATED
from intrinsic_checks import LANES, assert_near_exp2, run
from numpy.typing import NDArray

if SIMULATED:
    pytest.skip("Numba's simulator has no PTX", allow_module_level=True)

from numba_ddtree.cuda_target import cuda, uint32, uint64
from numba_ddtree.device import ptx

pytestmark = pytest.mark.gpu

DELAY_NS = 20_000
SMALLEST = 2.0**-126  # of normal float32


def apply(function: Any, *operands: NDArray[np.float32]) -> NDArray[np.float32]:
    """Apply a function of one, two or three float32 to arrays, element by element."""

    def of_one(results, a):  # type: ignore[no-untyped-def]
        for place in range(uint32(cuda.threadIdx.x), uint32(results.shape[0]), uint32(LANES)):
            results[place] = function(a[place])

    def of_two(results, a, b):  # type: ignore[no-untyped-def]
        for place in range(uint32(cuda.threadIdx.x), uint32(results.shape[0]), uint32(LANES)):
            results[place] = function(a[place], b[place])

    def of_three(results, a, b, c):  # type: ignore[no-untyped-def]
        for place in range(uint32(cuda.threadIdx.x), uint32(results.shape[0]), uint32(LANES)):
            results[place] = function(a[place], b[place], c[place])

    poisoned = np.full(len(operands[0]), 7, np.float32)
    return run((of_one, of_two, of_three)[len(operands) - 1], poisoned, *operands)[0]


def any_floats(rng: np.random.Generator, count: int = 4096) -> NDArray[np.float32]:
    """Draw patterns of any kind, and add the values that matter."""
    drawn = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    special = np.array([0, 1, 2, 1e-45, SMALLEST, np.inf, np.nan, 3.4e38], np.float32)
    return np.concatenate([np.where(np.isnan(drawn), np.float32(np.nan), drawn), special, -special])


# Addresses, threads, stores.


def test_addresses(rng: np.random.Generator) -> None:
    address_of, shared_address_of = ptx.address_of, ptx.shared_address_of

    def kernel(array, addresses, offsets):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(64, uint32)
        s_bytes = cuda.shared.array(0, np.uint8)
        if cuda.threadIdx.x == 0:
            addresses[0], addresses[1] = address_of(array), address_of(array[5:])
            offsets[0] = uint32(shared_address_of(s_words[3:]) - shared_address_of(s_words))
            offsets[1] = uint32(shared_address_of(s_bytes[9:]) - shared_address_of(s_bytes))

    results = np.zeros(2, np.uint64), np.zeros(2, np.uint32)
    _, addresses, offsets = run(kernel, np.zeros(9, np.float64), *results, shared_bytes=64)
    assert addresses[0] % 8 == 0 < addresses[0]
    assert addresses[1] == addresses[0] + np.uint64(40)
    np.testing.assert_array_equal(offsets, [12, 9])


def test_fresh_thread() -> None:
    fresh_thread = ptx.fresh_thread

    def kernel(found):  # type: ignore[no-untyped-def]
        found[cuda.threadIdx.x] = fresh_thread()

    (found,) = run(kernel, np.full(96, 7777, np.uint32), threads=96)
    np.testing.assert_array_equal(found, np.arange(96))


def test_stores(rng: np.random.Generator) -> None:
    address_of, shared_address_of = ptx.address_of, ptx.shared_address_of
    store_word, store_shared_word = ptx.store_word, ptx.store_shared_word
    store_float_pair = ptx.store_float_pair

    def kernel(words, floats, direct, by_shared, pairs):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(64, uint32)
        lane = uint32(cuda.threadIdx.x)
        place = uint64(uint64(lane) * uint64(4))
        store_word(uint64(address_of(direct) + place), words[lane])
        store_shared_word(uint32(shared_address_of(s_words) + uint32(uint32(4) * lane)), words[lane])
        by_shared[lane] = s_words[lane]
        store_float_pair(uint64(address_of(pairs) + uint64(2) * place), floats[lane, 0], floats[lane, 1])

    words = rng.integers(0, 2**32, LANES, dtype=np.uint32)
    floats = rng.standard_normal((LANES, 2), np.float32)
    _, _, direct, by_shared, pairs = run(
        kernel, words, floats, np.zeros_like(words), np.zeros_like(words), np.zeros_like(floats)
    )
    np.testing.assert_array_equal(direct, words)
    np.testing.assert_array_equal(by_shared, words)
    np.testing.assert_array_equal(pairs, floats)


# Copies and barriers.


def test_copies_of_every_size(rng: np.random.Generator) -> None:
    address_of, shared_address_of = ptx.address_of, ptx.shared_address_of
    copy_async, close_copies, wait_for_copies = ptx.copy_async, ptx.close_copies, ptx.wait_for_copies

    def kernel(source, results):  # type: ignore[no-untyped-def]
        s_bytes = cuda.shared.array(17 * 16, np.uint8, alignment=16)
        size = uint32(cuda.threadIdx.x)
        if size < uint32(17):
            first = uint32(size << uint32(4))
            for place in range(uint32(16)):
                s_bytes[uint32(first + uint32(place))] = np.uint8(0xA5)
            target = uint32(shared_address_of(s_bytes) + first)
            copy_async(target, uint64(address_of(source) + uint64(first)), size)
            close_copies()
            wait_for_copies()
            for place in range(uint32(16)):
                results[size, place] = s_bytes[uint32(first + uint32(place))]

    source = rng.integers(1, 256, (17, 16)).astype(np.uint8)
    _, got = run(kernel, source, np.full((17, 16), 7, np.uint8))
    np.testing.assert_array_equal(got, np.where(np.arange(16) < np.arange(17)[:, None], source, 0))


def test_a_group_of_copies_may_be_under_way(rng: np.random.Generator) -> None:
    address_of, shared_address_of = ptx.address_of, ptx.shared_address_of
    copy_async, close_copies, wait_for_copies = ptx.copy_async, ptx.close_copies, ptx.wait_for_copies
    wait_for_all_but_one = ptx.wait_for_all_copies_but_one

    def kernel(source, first, second):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(256, uint32, alignment=16)
        lane = uint32(cuda.threadIdx.x)
        offset = uint32(lane << uint32(4))
        target = uint32(shared_address_of(s_words) + offset)
        copy_async(target, uint64(address_of(source) + uint64(offset)), uint32(16))
        close_copies()
        further = uint32(LANES * 16)
        address = uint64(address_of(source) + uint64(offset) + uint64(further))
        copy_async(uint32(target + further), address, uint32(16))
        close_copies()
        wait_for_all_but_one()
        for word in range(uint32(4)):
            first[lane, word] = s_words[uint32(uint32(4) * lane + uint32(word))]
        wait_for_copies()
        for word in range(uint32(4)):
            second[lane, word] = s_words[uint32(uint32(4 * LANES) + uint32(4) * lane + uint32(word))]

    source = rng.integers(0, 2**32, (2, LANES, 4), dtype=np.uint32)
    _, first, second = run(kernel, source, *np.zeros((2, LANES, 4), np.uint32))
    np.testing.assert_array_equal(first, source[0])
    np.testing.assert_array_equal(second, source[1])


def test_barriers_of_groups_and_arrivals() -> None:
    named_barrier, named_arrival = ptx.named_barrier, ptx.named_arrival

    def kernel(exchanged, received):  # type: ignore[no-untyped-def]
        s_words = cuda.shared.array(160, uint32)
        thread = uint32(cuda.threadIdx.x)
        s_words[thread] = uint32(0)
        cuda.syncthreads()
        # Two groups of two warps, each with a barrier; the first warp of each is late.
        group = uint32(thread >> uint32(6))
        if uint32(thread & uint32(63)) < uint32(32):
            cuda.nanosleep(DELAY_NS)
        s_words[thread] = uint32(thread + uint32(1))
        named_barrier(uint32(group + uint32(1)), uint32(64))
        exchanged[thread] = s_words[uint32(thread ^ uint32(32))]
        cuda.syncthreads()
        # The last three warps wait for the first, which does not wait for them.
        if thread < uint32(32):
            cuda.nanosleep(DELAY_NS)
            s_words[uint32(thread + uint32(128))] = uint32(thread + uint32(7))
            named_arrival(uint32(15), uint32(128))
        else:
            named_barrier(uint32(15), uint32(128))
        received[thread] = s_words[uint32(uint32(thread & uint32(31)) + uint32(128))]

    exchanged, received = run(kernel, *np.zeros((2, 128), np.uint32), threads=128)
    np.testing.assert_array_equal(exchanged, (np.arange(128) ^ 32) + 1)
    np.testing.assert_array_equal(received, np.arange(128) % 32 + 7)


# Arithmetic.


def test_exp2(rng: np.random.Generator) -> None:
    values = np.concatenate([rng.uniform(-125.9, 127.9, 4096), rng.uniform(-1, 1, 4096)]).astype(np.float32)
    assert_near_exp2(apply(ptx.exp2, values), values)
    whole = np.arange(-126, 128).astype(np.float32)
    assert_near_exp2(apply(ptx.exp2, whole), whole)
    special = np.array([-np.inf, np.inf, np.nan, 0, -0.0, -1e-45, -127, -150, 128], np.float32)
    want = np.array([0, np.inf, np.nan, 1, 1, 1, 0, 0, np.inf], np.float32)
    np.testing.assert_array_equal(apply(ptx.exp2, special), want)


def test_log2(rng: np.random.Generator) -> None:
    values = np.concatenate([np.exp2(rng.uniform(-126, 128, 4096)), rng.uniform(0.5, 2, 4096)])
    values = values.astype(np.float32)
    want = np.log2(values.astype(np.float64))
    bound = 2.0**-22 * np.where((values > 0.5) & (values < 2), 1, np.abs(want))
    assert (np.abs(apply(ptx.log2, values) - want) <= bound).all()
    special = np.array([0, -0.0, 1e-45, 1, np.inf, -1, np.nan], np.float32)
    np.testing.assert_array_equal(
        apply(ptx.log2, special), np.array([-np.inf, -np.inf, -np.inf, 0, np.inf, np.nan, np.nan], np.float32)
    )


def test_reciprocal_is_rounded_correctly(rng: np.random.Generator) -> None:
    values = any_floats(rng)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        want = np.float32(1) / values
    np.testing.assert_array_equal(apply(ptx.reciprocal, values), want)


def test_quick_reciprocal(rng: np.random.Generator) -> None:
    values = np.exp2(rng.uniform(-126, 125.9, 8192)).astype(np.float32)
    values *= rng.choice(np.array([-1, 1], np.float32), len(values))
    exact = 1 / values.astype(np.float64)
    units = np.abs(np.spacing(exact.astype(np.float32))).astype(np.float64)
    assert (np.abs(apply(ptx.quick_reciprocal, values) - exact) <= units).all()


def test_sums_and_products_are_rounded_each(rng: np.random.Generator) -> None:
    sum_of, product_of = ptx.sum_of, ptx.product_of
    a, b, c = rng.standard_normal((3, 4096), np.float32)
    np.testing.assert_array_equal(apply(sum_of, a, b), a + b)
    np.testing.assert_array_equal(apply(product_of, a, b), a * b)

    def kernel(results, a, b, c):  # type: ignore[no-untyped-def]
        for place in range(uint32(cuda.threadIdx.x), uint32(results.shape[0]), uint32(LANES)):
            results[place] = sum_of(product_of(a[place], b[place]), c[place])

    np.testing.assert_array_equal(run(kernel, np.zeros_like(a), a, b, c)[0], a * b + c)


def test_multiply_add_is_rounded_once(rng: np.random.Generator) -> None:
    a, b = rng.uniform(1, 2, (2, 4096)).astype(np.float32)
    c = (rng.uniform(1, 16, 4096) * rng.choice([-1, 1], 4096)).astype(np.float32)
    # Products have 48 bits, from 2^-46 on, and sums are below 2^5: float64 has them exactly.
    want = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (want != a * b + c).any()
    np.testing.assert_array_equal(apply(ptx.multiply_add, a, b, c), want)


def test_larger_of(rng: np.random.Generator) -> None:
    a, b = any_floats(rng), rng.permutation(any_floats(rng))
    np.testing.assert_array_equal(apply(ptx.larger_of, a, b), np.fmax(a, b))
