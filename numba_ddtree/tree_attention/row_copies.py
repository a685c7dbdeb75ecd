"""Copies of rows of queries and keys to chunks in shared memory, by ``cp.async``."""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, device_routine, int64, uint32, uint64
from numba_ddtree.device.tile import CHUNK_BYTES, unit_address
from numba_ddtree.tree_attention.key_rows import ABSENT
from numba_ddtree.tree_attention.work import LATENT

if not SIMULATED:
    from numba_ddtree.device.ptx import copy_async

LATENT_CHUNKS = LATENT // 64
CHUNKS = LATENT_CHUNKS + 1  # the last of the rotary part


@device_routine
def load_chunks(place, latent, unit, first, count, distance, size):  # type: ignore[no-untyped-def]
    """Begin to copy one unit of each of `count` latent chunks, `distance` bytes apart from `place` on.

    `latent` is the address of the row's latent part, of whose chunks `first` is the first; of the unit's
    bytes, `size` are read and the others zeros.
    """
    source = uint64(latent + uint64(unit << uint32(4)) + uint64(uint32(first) * uint32(128)))
    for chunk in range(uint32(count)):
        part = uint64(source + uint64(uint32(chunk) * uint32(128)))
        copy_async(uint32(place + uint32(chunk) * uint32(distance)), part, size)


@device_routine
def load_row(buffer, row, unit, latent, rotary):  # type: ignore[no-untyped-def]
    """Begin to copy one unit of each chunk of a row; zeros for a row that is `ABSENT`.

    The addresses of a row that is there are those of its two parts.
    """
    load_row_apart(buffer, row, unit, latent, rotary, CHUNK_BYTES)


@device_routine
def load_row_apart(buffer, row, unit, latent, rotary, distance):  # type: ignore[no-untyped-def]
    """Begin to copy one unit of each chunk of a row to chunks that are `distance` bytes apart."""
    size = uint32(0) if latent == ABSENT else uint32(16)
    place = unit_address(buffer, row, unit)
    load_chunks(place, latent, unit, 0, LATENT_CHUNKS, distance, size)
    last = uint32(place + uint32(LATENT_CHUNKS) * uint32(distance))
    copy_async(last, uint64(rotary + uint64(unit << uint32(4))), size)


@device_routine
def load_queries(thread, height, buffer, queries, first, count):  # type: ignore[no-untyped-def]
    """Begin to copy `height` rows, row `first` of all and those after it; zeros from row `count` on.

    By four threads a row, to chunks of so many rows.
    """
    unit = uint32(thread & uint32(7))
    for step in range(uint32(2)):
        row = uint32(uint32(thread >> uint32(3)) + uint32(step) * uint32(uint32(height) // uint32(2)))
        latent, rotary = ABSENT, ABSENT
        if row < count:
            latent = uint64(queries.q_nope + uint64(int64(first + int64(row)) * queries.nope_stride))
            rotary = uint64(queries.q_pe + uint64(int64(first + int64(row)) * queries.pe_stride))
        load_row_apart(buffer, row, unit, latent, rotary, uint32(uint32(height) * uint32(128)))
