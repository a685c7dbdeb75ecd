"""Emulates what the Hopper kernel is made of, so that its own code runs on the host: a Python thread a lane.

`hopper_module` replaces, in this process, intrinsics and Numba's target by emulations on host memory: global
addresses are the process's own, shared memory is an array, barriers count, tensor copies are made by another
thread, and products wait for all lanes of a warpgroup. The process should do nothing else. With
`options.is_late`, products read shared memory as late as they may, and copies come after a random time:
buffers that are reused too early then show.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import random
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from ml_dtypes import bfloat16

from numba_ddtree import cuda_target
from numba_ddtree.device.clusters import FOURS_ROW_BYTES, unit_of_four

TIMEOUT = 60.0
SHARED_BASE = 1024
SHARED_BYTES = 227 * 1024
WARPGROUP = 128
BOX_BYTES = 64 * 128
MAPS: dict[int, np.ndarray[Any, Any]] = {}
"""By the address that a kernel is given for it: an array [pages, page_size, width]."""
options = types.SimpleNamespace(is_late=False, threads=384)
local = threading.local()
np.seterr(all="ignore")


class StoppedError(Exception):
    """Another lane has failed."""


class Meeting:
    """Lanes that all have to come before any goes on."""

    def __init__(self, lanes: int) -> None:
        self.barrier = threading.Barrier(lanes)
        self.values: list[Any] = [None] * lanes
        self.result: Any = None

    def exchange(self, lane: int, value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
        self.values[lane] = value
        try:
            if self.barrier.wait(TIMEOUT) == 0:
                self.result = combine(self.values)
            self.barrier.wait(TIMEOUT)
            result = self.result
            self.barrier.wait(TIMEOUT)
        except threading.BrokenBarrierError as error:
            raise StoppedError from error
        return result


class Barrier:
    """An mbarrier: arrivals and bytes that its phase waits for."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = 0
        self.phase = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier was made for"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals


class Block:
    """A block of threads and its shared memory, which begins as NaN."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.memory = np.full(SHARED_BYTES, 0xFF, np.uint8)
        self.changed = threading.Condition()
        self.barriers: dict[int, Barrier] = {}
        self.named = {name: [0, 0] for name in range(16)}  # arrivals, generation
        self.warps = [Meeting(32) for _ in range(options.threads // 32)]
        self.warpgroups = [Meeting(WARPGROUP) for _ in range(options.threads // WARPGROUP)]
        self.all = Meeting(options.threads)
        self.copies: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.faults: list[str] = []
        self.cluster = [self]
        self.cluster_arrivals = 0

    def fail(self, fault: str) -> None:
        with self.changed:
            self.faults.append(fault)
            self.changed.notify_all()
        for meeting in (*self.warps, *self.warpgroups, self.all):
            meeting.barrier.abort()

    def wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait, with `changed` held."""
        end = time.monotonic() + TIMEOUT
        while not is_over():
            self.changed.wait(1.0)
            if self.faults:
                raise StoppedError
            if time.monotonic() > end:
                raise TimeoutError(f"thread {local.thread} waits for {what}")


def block() -> Block:
    found: Block = local.block
    return found


def in_warp(value: Any) -> Any:
    return block().warps[local.thread // 32].exchange(local.thread % 32, value)


class Target:
    """What kernels use of `numba.cuda`."""

    threadIdx = types.SimpleNamespace()  # noqa: N815
    blockIdx = types.SimpleNamespace()  # noqa: N815
    shared = types.SimpleNamespace(array=lambda *args, **options: None)

    def shfl_sync(self, mask: int, value: Any, source: Any) -> Any:
        return in_warp(value)[int(source)]

    def shfl_xor_sync(self, mask: int, value: Any, distance: int) -> Any:
        return in_warp(value)[local.thread % 32 ^ distance]

    def any_sync(self, mask: int, predicate: Any) -> bool:
        return any(in_warp(bool(predicate)))

    def syncwarp(self) -> None:
        in_warp(None)

    def syncthreads(self) -> None:
        block().all.exchange(local.thread, None)

    def popc(self, word: Any) -> int:
        return (int(word) & 0xFFFFFFFF).bit_count()

    def ffs(self, word: Any) -> int:
        bits = int(word) & 0xFFFFFFFF
        return (bits & -bits).bit_length()


class _ThreadIndex:
    @property
    def x(self) -> np.uint32:
        return np.uint32(local.thread)


class _BlockIndex:
    @property
    def x(self) -> np.uint32:
        return np.uint32(block().index)


def wrapping(kind: type[np.integer[Any]]) -> Callable[[Any], Any]:
    """Make the conversion to an integer type as machines do it."""
    bits = 8 * np.dtype(kind).itemsize

    def convert(value: Any) -> Any:
        unsigned = int(value) & ((1 << bits) - 1)
        is_negative = np.dtype(kind).kind == "i" and unsigned >> (bits - 1)
        return kind(unsigned - (1 << bits) if is_negative else unsigned)

    return convert


def shared_view(address: Any, kind: Any) -> np.ndarray[Any, Any]:
    start = int(address) - SHARED_BASE
    return block().memory[start : start + np.dtype(kind).itemsize].view(kind)


def store(address: Any, value: Any, kind: Any) -> None:
    shared_view(address, kind)[0] = value


def global_bytes(address: Any, size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(ctypes.string_at(int(address), size), np.uint8)


def write_global(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


# Barriers.


def start_barrier(address: Any, arrivals: Any) -> None:
    block().barriers[int(address)] = Barrier(int(arrivals))


def arrive(address: Any) -> None:
    change_barrier(block(), address, 1, 0)


def arrive_and_expect(address: Any, size: Any) -> None:
    change_barrier(block(), address, 1, int(size))


def change_barrier(owner: Block, address: Any, arrivals: int, size: int) -> None:
    with owner.changed:
        barrier = owner.barriers[int(address)]
        barrier.pending -= arrivals
        barrier.bytes += size
        barrier.settle()
        owner.changed.notify_all()


def wait_for(address: Any, parity: Any) -> None:
    owner = block()
    barrier = owner.barriers[int(address)]
    with owner.changed:
        owner.wait_until(
            lambda: barrier.phase & 1 != int(parity), f"barrier {int(address)}, parity {int(parity)}"
        )


def wait_if(address: Any, parity: Any, is_wanted: Any) -> None:
    if int(is_wanted):
        wait_for(address, parity)


def make_handover(name: int, threads: int) -> tuple[Callable[[], None], Callable[[], None]]:
    def arrive_at(owner: Block) -> int:
        state = owner.named[name]
        generation = state[1]
        state[0] += 1
        if state[0] == threads:
            owner.named[name] = [0, generation + 1]
            owner.changed.notify_all()
        return generation

    def announce() -> None:
        owner = block()
        with owner.changed:
            arrive_at(owner)

    def await_announced() -> None:
        owner = block()
        with owner.changed:
            generation = arrive_at(owner)
            owner.wait_until(lambda: owner.named[name][1] != generation, f"named barrier {name}")

    return announce, await_announced


# Clusters: addresses of another block's memory have its number, from 1 on, in the upper bits.

CLUSTER_BIT = 24


def arrive_at_cluster() -> None:
    for other in block().cluster:
        with other.changed:
            other.cluster_arrivals += 1
            other.changed.notify_all()


def wait_for_cluster() -> None:
    owner = block()
    with owner.changed:
        owner.wait_until(
            lambda: owner.cluster_arrivals == len(owner.cluster) * options.threads, "the cluster's threads"
        )


def peer_address(address: Any, number: Any) -> Any:
    return np.uint32(int(address) + (int(number) + 1 << CLUSTER_BIT))


def of_peer(address: Any) -> tuple[Block, int]:
    number, place = divmod(int(address), 1 << CLUSTER_BIT)
    return block().cluster[number - 1], place


def arrive_at_peer(barrier: Any) -> None:
    owner, place = of_peer(barrier)
    change_barrier(owner, place, 1, 0)


def send_four(address: Any, barrier: Any, values: Any) -> None:
    owner, place = of_peer(address)
    content = np.array(values, np.float32).view(np.uint8)

    def run() -> None:
        owner.memory[place - SHARED_BASE : place - SHARED_BASE + 16] = content
        change_barrier(owner, of_barrier, 0, -16)

    _, of_barrier = of_peer(barrier)
    block().copies.put(run)


def fours_of_rows(address: Any, numbers: Any) -> Iterator[tuple[int, Any]]:
    for piece, eight in enumerate(numbers.reshape(-1, 8)):
        for row in range(2):
            place = int(address) ^ 16 * unit_of_four(piece, 0, 0)
            yield place + row * 8 * FOURS_ROW_BYTES, eight[[2 * row, 2 * row + 1, 2 * row + 4, 2 * row + 5]]


def make_rows_send(first: int, count: int) -> Callable[..., None]:
    def send_rows(address: Any, barrier: Any, tile: Any) -> None:
        for place, four in fours_of_rows(address, tile[first : first + count]):
            send_four(place, barrier, four)

    return send_rows


def make_rows_keep(first: int, count: int) -> Callable[..., None]:
    def keep_rows(address: Any, tile: Any) -> None:
        for place, four in fours_of_rows(address, tile[first : first + count]):
            for index, number in enumerate(four):
                store(place + 4 * index, number, np.float32)

    return keep_rows


def load_four_floats(address: Any) -> list[Any]:
    return [shared_view(int(address) + 4 * index, np.float32)[0] for index in range(4)]


# Copies.


def unit_address(chunk: Any, row: Any, unit: Any) -> Any:
    return np.uint32(int(chunk) + int(row) * 128 + ((int(row) & 7) ^ int(unit)) * 16)


def copy_async(shared: Any, source: Any, size: Any) -> None:
    content = np.zeros(16, np.uint8)
    if int(size):
        content[: int(size)] = global_bytes(source, int(size))
    start = int(shared) - SHARED_BASE
    block().memory[start : start + 16] = content


def copy_box(shared: Any, tensor_map: Any, barrier: Any, column: Any, row: Any, page: Any) -> None:
    owner = block()
    first, before = max(0, int(row)), max(0, -int(row))
    box = MAPS[int(tensor_map)][int(page), first : int(row) + 64, int(column) : int(column) + 64]
    whole = np.zeros((64, 64), np.uint16)
    whole[before : before + box.shape[0]] = box.view(np.uint16)
    units = whole.view(np.uint8).reshape(64, 8, 16)

    def run() -> None:
        for line in range(64):
            for unit in range(8):
                start = int(unit_address(shared, line, unit)) - SHARED_BASE
                owner.memory[start : start + 16] = units[line, unit]
        change_barrier(owner, barrier, 0, -BOX_BYTES)

    owner.copies.put(run)


# Products.

LANES = np.arange(WARPGROUP)


class Pending:
    """A tile with products under way."""

    def __init__(self, tile: Any, steps: list[tuple[Any, ...]]) -> None:
        self.tile = tile
        self.steps = steps


def fragment(columns: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows and columns [threads, elements] of an accumulator."""
    index = np.arange(columns // 2)
    column = 8 * (index // 4)[None] + 2 * (LANES % 4)[:, None] + (index % 2)[None]
    row = 16 * (LANES // 32)[:, None] + (LANES % 32 // 4)[:, None] + 8 * (index % 4 // 2)[None]
    return row, column


def operand(addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers at addresses of shared memory, swizzled by 128 bytes."""
    place = (addresses ^ ((addresses >> 7 & 7) << 4)) - SHARED_BASE
    memory = block().memory
    bits = memory[place].astype(np.uint16) | memory[place + 1].astype(np.uint16) << 8
    return bits.view(bfloat16).astype(np.float32)


def left_in_registers(words: list[Any]) -> np.ndarray[Any, Any]:
    """Gather a left operand [64, 16] from each thread's four words."""
    left = np.zeros((64, 16), np.float32)
    for thread in range(WARPGROUP):
        pairs = np.array(words[thread], np.uint32).view(np.uint16).view(bfloat16).reshape(4, 2)
        row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
        for index, (down, right) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            left[row + down, column + right : column + right + 2] = pairs[index]
    return left


def run_products(tiles: list[Pending]) -> list[np.ndarray[Any, Any]]:
    """Run a warpgroup's products, step by step."""
    columns = 2 * len(tiles[0].tile)
    row, column = fragment(columns)
    total = np.zeros((64, columns), np.float32)
    total[row, column] = np.stack([tile.tile for tile in tiles])
    rows, terms, across = np.arange(64), np.arange(16), np.arange(columns)
    for number, step in enumerate(tiles[0].steps):
        places, in_registers, by_columns, left, right, is_continued = step
        if not is_continued:
            total[:] = 0
        for first, second in places:
            if in_registers:
                a = left_in_registers([tile.steps[number][3][first : first + 4] for tile in tiles])
            else:
                a = operand(16 * (left + first) + rows[:, None] * 128 + terms[None] * 2)
            start = 16 * (right + second)
            if by_columns:
                total += a @ operand(
                    start + (across // 64 * BOX_BYTES + across % 64 * 2)[None] + terms[:, None] * 128
                )
            else:
                total += a @ operand(start + across[:, None] * 128 + terms[None] * 2).T
    return [total[row[thread], column[thread]] for thread in range(WARPGROUP)]


def finished(tile: Any) -> Any:
    if not isinstance(tile, Pending):
        return tile
    if not tile.steps:
        return tile.tile
    meeting = block().warpgroups[local.thread // WARPGROUP]
    return meeting.exchange(local.thread % WARPGROUP, tile, run_products)[local.thread % WARPGROUP]


def finished_but_last(tile: Any) -> Any:
    """Run all steps but the last: each is a group of its own."""
    if not isinstance(tile, Pending) or len(tile.steps) < 2:
        return tile
    return Pending(finished(Pending(tile.tile, tile.steps[:-1])), tile.steps[-1:])


def make_product(
    number: str,
    columns: int,
    steps: Any,
    *,
    has_left_in_registers: bool = False,
    has_right_by_columns: bool = False,
) -> Callable[..., Any]:
    def product(total: Any, left: Any, right: Any, is_continued: Any) -> Any:
        step = (steps, has_left_in_registers, has_right_by_columns, left, right, int(is_continued))
        before = total if isinstance(total, Pending) else Pending(total, [])
        pending = Pending(before.tile, [*before.steps, step])
        return pending if options.is_late else Pending(finished(pending), [])

    return product


# Tiles.


def by_rows(tile: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pairs = tile.reshape(-1, 2, 2)
    return pairs[:, 0].ravel(), pairs[:, 1].ravel()


def spread(pair: Any, count: int) -> np.ndarray[Any, Any]:
    return np.tile(np.array([pair[0], pair[0], pair[1], pair[1]], np.float32), count // 4)


def scale_rows(tile: Any, factors: Any) -> Any:
    return tile * spread(factors, len(tile))


def row_sums(tile: Any) -> tuple[Any, ...]:
    return tuple(np.add.accumulate(row)[-1] for row in by_rows(tile))


def row_maxima(tile: Any) -> tuple[Any, ...]:
    return tuple(np.float32(np.fmax.reduce(row)) for row in by_rows(tile))


def exp2_of_scores(tile: Any, scale: Any, origins: Any) -> Any:
    exponents = tile.astype(np.float64) * np.float64(scale) - spread(origins, len(tile))
    return np.exp2(exponents.astype(np.float32)).astype(np.float32)


def keep_columns(tile: Any, upper: Any, lower: Any) -> Any:
    bits = [(int((upper, lower)[i % 4 // 2]) >> (i // 4 * 8 + i % 2)) & 1 for i in range(len(tile))]
    return np.where(bits, tile, np.float32(-np.inf))


def make_pack_tile(number: str) -> Callable[[Any], Any]:
    return lambda tile: list(tile.astype(bfloat16).view(np.uint32))


def make_pack(number: str) -> Callable[[Any, Any], Any]:
    return lambda *pair: without_negative_zeros(np.array(pair, np.float32).astype(bfloat16)).view(np.uint32)[
        0
    ]


def store_words_in_chunk(address: Any, words: Any) -> None:
    for index, word in enumerate(words):
        store((int(address) ^ index // 2 * 16) + index % 2 * 1024, word, np.uint32)


def load_left_words(upper: Any, lower: Any) -> list[Any]:
    places = [
        (row, 32 * step + 16 * side) for step in range(4) for side in range(2) for row in (upper, lower)
    ]
    return [global_bytes(int(row) + offset, 4).view(np.uint32)[0] for row, offset in places]


def make_word_sums(number: str) -> Callable[[Any], Any]:
    return lambda words: row_sums(np.array(words, np.uint32).view(bfloat16).astype(np.float32))


def without_negative_zeros(numbers: Any) -> Any:
    return np.where(numbers == 0, numbers.dtype.type(0), numbers)


def make_output_words(number: str, first: int, columns: int) -> Callable[[Any, Any], Any]:
    def output_words(tile: Any, factors: Any) -> Any:
        scaled = scale_rows(tile[first // 2 : (first + columns) // 2], factors)
        return list(without_negative_zeros(scaled.astype(bfloat16)).view(np.uint32))

    return output_words


def store_chunk_rows(chunk: Any, address: Any, wanted: Any) -> None:
    for step in range(4):
        if int(wanted) > 4 * step:
            start = (int(chunk) ^ step % 2 * 64) + 512 * step - SHARED_BASE
            write_global(int(address) + 4096 * step, block().memory[start : start + 16].tobytes())


def make_group_rows_store(group_bytes: int) -> Callable[[Any, Any], None]:
    def store_group_rows(address: Any, tile: Any) -> None:
        for row, numbers in enumerate(by_rows(tile)):
            for group in range(len(numbers) // 2):
                values = numbers[2 * group : 2 * group + 2]
                write_global(int(address) + 8 * 32 * row + group_bytes * group, values.tobytes())

    return store_group_rows


def make_rows_store(
    number: str, read_slot: int, write_slot: int, write_out: int, group_bytes: int
) -> Callable[..., None]:
    def stage_columns(stage: int, tile: Any) -> None:
        lane = local.thread % 32
        group = lane // 4
        in_warp(None)
        for piece, four in enumerate(tile.reshape(4, 4)):
            place = (stage + group * 128 + group % 4 * 32 + lane % 4 * 8) ^ piece * 32
            for element, number in enumerate(four):
                store(place + element % 2 * 4 + element // 2 * 1024, number, np.float32)
        in_warp(None)

    def write_row(
        step: int, row: int, stage: int, outcomes: int, slot: int, out: int, in_floats: int
    ) -> None:
        lane = local.thread % 32
        group, unit = lane // 8, lane % 8
        place = stage + group * 128 + (unit ^ 2 * group) * 16 + 128 * row - SHARED_BASE
        numbers = block().memory[place : place + 16].view(np.float32)
        kept, added, factor = (
            shared_view(outcomes + 16 * row + 4 * word, np.float32)[0] for word in range(3)
        )
        to_do = int(shared_view(outcomes + 16 * row + 12, np.int32)[0])
        in_slot = slot + 32 * row + 4 * group_bytes * step
        held = global_bytes(in_slot, 16).view(np.float32) if to_do & read_slot else np.zeros(4, np.float32)
        result = (added * numbers + kept * held) * factor + np.float32(0)
        if to_do & write_slot:
            write_global(in_slot, result.tobytes())
        if to_do & write_out and in_floats:
            write_global(out + 2048 * row + 128 * step, result.tobytes())
        elif to_do & write_out:
            rounded = without_negative_zeros(result.astype(bfloat16))
            write_global(out + 1024 * row + 64 * step, rounded.tobytes())

    def store_rows(stage: Any, tile: Any, outcomes: Any, slot: Any, out: Any, in_floats: Any) -> None:
        for step, columns in enumerate(tile.reshape(-1, 16)):
            stage_columns(int(stage), columns)
            for row in range(0, 16, 4):
                write_row(step, row, int(stage), int(outcomes), int(slot), int(out), int(in_floats))

    return store_rows


def store_pair(out: Any, place: Any, first: Any, second: Any, form: Any) -> None:
    """Write two neighbours of an output of float32, form 0, or of bfloat16."""
    dtype = np.float32 if int(form) == 0 else bfloat16
    pair = np.array([first, second], np.float32).astype(dtype)
    write_global(int(out) + int(place) * pair.itemsize, pair.tobytes())


def nothing(*args: Any) -> None:
    """Stand for what needs no emulation."""


BASE = np.uint32(SHARED_BASE)
FLOAT = np.float32
EMULATIONS: dict[str, dict[str, Any]] = {
    "mbarriers": {
        "start_barrier": start_barrier,
        "publish_barriers": nothing,
        "arrive": arrive,
        "arrive_and_expect": arrive_and_expect,
        "arrive_after_copies": arrive,
        "wait_for": wait_for,
        "wait_for_copies_if": wait_if,
        "fence_async_proxy": nothing,
        "make_handover": make_handover,
        "make_register_limit": lambda change, count: nothing,
        "fresh_shared_address_of": lambda array: BASE,
        "fresh_lane": lambda: np.uint32(local.thread % 32),
        "fresh_word": lambda word: word,
        "load_shared_word": lambda address: shared_view(address, np.int32)[0],
        "load_shared_float": lambda address: shared_view(address, np.float32)[0],
        "store_shared_float": lambda address, value: store(address, value, np.float32),
    },
    "ptx": {
        "fresh_thread": lambda: np.uint32(local.thread),
        "shared_address_of": lambda array: BASE,
        "store_shared_word": lambda address, word: store(address, word, np.uint32),
        "store_four_words": lambda address, *words: write_global(
            int(address), np.array(words, np.uint32).tobytes()
        ),
        "store_float_pair": lambda address, *pair: write_global(
            int(address), np.array(pair, np.float32).tobytes()
        ),
        "copy_async": copy_async,
        "address_of": lambda array: np.uint64(array.ctypes.data),
        "exp2": lambda value: FLOAT(np.exp2(FLOAT(value))),
        "log2": lambda value: FLOAT(np.log2(FLOAT(value))),
        "quick_reciprocal": lambda value: FLOAT(1) / FLOAT(value),
        "sum_of": lambda left, right: FLOAT(FLOAT(left) + FLOAT(right)),
        "product_of": lambda left, right: FLOAT(FLOAT(left) * FLOAT(right)),
        "multiply_add": lambda a, b, c: FLOAT(np.float64(a) * np.float64(b) + np.float64(c)),
        "larger_of": lambda left, right: FLOAT(np.fmax(left, right)),
    },
    "clusters": {
        "arrive_at_cluster": arrive_at_cluster,
        "wait_for_cluster": wait_for_cluster,
        "peer_address": peer_address,
        "arrive_at_peer": arrive_at_peer,
        "wait_for_peer": wait_for,
        "send_four": send_four,
        "make_rows_send": make_rows_send,
        "make_rows_keep": make_rows_keep,
        "load_four_floats": load_four_floats,
        "FOURS_ROW_BYTES": FOURS_ROW_BYTES,
    },
    "grid_meeting": {"meet_all_blocks": nothing},
    "tensor_copies": {"acquire_map": nothing, "copy_box": copy_box},
    "tile": {
        "unit_address": unit_address,
        "make_pack": make_pack,
        "row_maxima": row_maxima,
        "row_sums": row_sums,
        "scale_rows": scale_rows,
    },
    "wgmma": {
        "open_products": nothing,
        "close_products": nothing,
        "wait_for_all_but_last": finished_but_last,
        "wait_for_all_products": finished,
        "make_undefined": lambda count: lambda: np.full(count, np.nan, np.float32),
        "make_product": make_product,
        "make_output_words": make_output_words,
        "make_pack_tile": make_pack_tile,
        "make_word_sums": make_word_sums,
        "make_rows_store": make_rows_store,
        "store_chunk_rows": store_chunk_rows,
        "make_group_rows_store": make_group_rows_store,
        "store_words_in_chunk": store_words_in_chunk,
        "load_left_words": load_left_words,
        "keep_columns": keep_columns,
        "exp2_of_scores": exp2_of_scores,
        "row_descriptor": lambda chunk: int(chunk) >> 4,
        "column_descriptor": lambda chunk: int(chunk) >> 4,
    },
}


class Emulated(types.ModuleType):
    """A module of intrinsics, of which those that nothing here calls may be asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: nothing


def natural_log_sum(maximum: Any, total: Any) -> Any:
    return FLOAT((FLOAT(maximum) + FLOAT(np.log2(FLOAT(total)))) * FLOAT(math.log(2)))


@contextmanager
def emulated(emulations: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Emulate Numba's target, and modules of `numba_ddtree.device`, for kernels that are imported within."""
    # As they are in the simulator, and with Numba's own target.
    import numba_ddtree.device as device
    import numba_ddtree.device.memory
    import numba_ddtree.launch  # noqa: F401
    from numba_ddtree.device import tile, warp

    Target.threadIdx, Target.blockIdx = _ThreadIndex(), _BlockIndex()  # type: ignore[assignment]
    target: Any = cuda_target
    target.cuda = Target()
    target.device_function = target.device_routine = lambda function: function
    target.float32 = FLOAT
    for kind in (np.uint32, np.uint64, np.int32, np.int64):
        setattr(target, kind.__name__, wrapping(kind))
    changed: Any = warp
    changed.warp_max = lambda value: np.uint32(max(map(int, in_warp(value))))
    changed.warp_sum = lambda value: np.int32(sum(map(int, in_warp(value))))
    changed.warp_ballot = lambda is_set: np.uint32(sum(bool(b) << i for i, b in enumerate(in_warp(is_set))))
    changed.warp_broadcast = lambda value, lane: in_warp(value)[int(lane)]
    changed.warp_running_sum = lambda value: np.int32(sum(map(int, in_warp(value)[: local.thread % 32 + 1])))
    constants = {name: value for name, value in vars(tile).items() if isinstance(value, int)}
    for name, functions in emulations.items():
        module = Emulated(f"numba_ddtree.device.{name}")
        vars(module).update(functions | (constants if name == "tile" else {}))
        sys.modules[module.__name__] = module
        setattr(device, name, module)
    target.SIMULATED = False
    yield
    target.SIMULATED = True


def hopper_modules() -> tuple[Any, Any]:
    """Import the modules of the kernel, and of that which finds first items, emulated all the way down."""
    with emulated(EMULATIONS):
        from numba_ddtree.tree_attention import hopper, hopper_first_items
    replace_outputs()
    return hopper, hopper_first_items


def replace_outputs() -> None:
    """Let what writes outputs write to host memory."""
    from numba_ddtree.tree_attention import hopper_pairs, row_outcomes, split_merge, unused_rows

    changed: Any = row_outcomes
    changed.natural_log_sum = natural_log_sum
    changed = hopper_pairs
    changed.natural_log_sum = natural_log_sum
    changed = unused_rows
    changed.store_pair = store_pair
    changed = split_merge
    changed.natural_log_sum = natural_log_sum
    changed.store_pair = store_pair


def run_block(kernel: Callable[..., None], index: int, arguments: tuple[Any, ...]) -> None:
    """Run one block of threads to its end; see `run_cluster`."""
    run_cluster(kernel, [index], arguments)


def run_cluster(kernel: Callable[..., None], indices: list[int], arguments: tuple[Any, ...]) -> None:
    """Run blocks of threads that reach each other's memory, all at once, to their end.

    Raises
    ------
    AssertionError
        A thread failed or waited too long, or a named barrier was left half full.
    """
    owners = [Block(index) for index in indices]

    def copy(owner: Block) -> None:
        while (run := owner.copies.get()) is not None:
            if options.is_late:
                time.sleep(random.random() * 0.01)
            run()

    def work(owner: Block, thread: int) -> None:
        local.thread, local.block = thread, owner
        try:
            kernel(*arguments)
        except StoppedError:
            pass
        except BaseException:
            for each in owners:
                each.fail(traceback.format_exc())

    threading.stack_size(512 * 1024)
    copiers = [threading.Thread(target=copy, args=(owner,), daemon=True) for owner in owners]
    threads = [
        threading.Thread(target=work, args=(owner, thread), daemon=True)
        for owner in owners
        for thread in range(options.threads)
    ]
    for owner in owners:
        owner.cluster = owners
    for each in (*copiers, *threads):
        each.start()
    for each in threads:
        each.join()
    for owner in owners:
        owner.copies.put(None)
        assert not owner.faults, "\n".join(owner.faults[:4])
        assert all(arrivals == 0 for arrivals, _ in owner.named.values()), owner.named
