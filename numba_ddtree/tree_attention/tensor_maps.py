"""Tensor maps of the caches, by which the copy engine of Hopper finds blocks of keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver

from numba_ddtree.errors import BackendError
from numba_ddtree.tree_attention.work import KEY_BLOCK, LATENT, ROPE, KeyRows, RowSpan, Work

MAP_BYTES = 128
BOX_COLUMNS = 64
STRIDE_LIMIT = 2**40  # bytes: of a map's strides, which are less


def takes_boxes(keys: KeyRows) -> bool:
    """Whether each block of keys lies in one page, so that boxes of the cache are blocks, and maps reach."""
    if keys.num_pages == 0 or keys.page_size == 0:
        return False
    if max(keys.ckv_page_stride, keys.kpe_page_stride, keys.ckv.stride, keys.kpe.stride) >= STRIDE_LIMIT:
        return False
    return keys.page_table.shape[0] == 0 or keys.page_size % KEY_BLOCK == 0


def key_maps(work: Work, device_id: int) -> int:
    """Return the device address of the maps of a call's latent and rotary rows, one after the other.

    They depend on where the cache lies alone, and stay on the device for good, since captured graphs and the
    launches that plans keep go on using them: 256 bytes, which the driver rounds up, for each address, shape
    and strides ever seen, those of host arrays' copies among them. The first call for a cache copies them
    there and waits for that.

    Raises
    ------
    BackendError
        The driver refused a map.
    """
    keys = work.keys
    number = {"bfloat16": "BFLOAT16", "float16": "FLOAT16"}[work.dtype.name]
    return _maps_of(
        device_id,
        number,
        keys.num_pages,
        keys.page_size,
        # Without owners, which would live for as long as the maps.
        (replace(keys.ckv, owner=None), keys.ckv_page_stride, LATENT),
        (replace(keys.kpe, owner=None), keys.kpe_page_stride, ROPE),
    )


@cache
def _maps_of(
    device_id: int, number: str, pages: int, page_size: int, *parts: tuple[RowSpan, int, int]
) -> int:
    maps = b"".join(
        _encoded(number, rows, page_stride, width, page_size, pages) for rows, page_stride, width in parts
    )
    with _uncaptured():
        address = int(_checked(driver.cuMemAlloc(len(maps))))
        stream = _checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _checked(
            driver.cuMemcpyHtoDAsync(address, np.frombuffer(maps, np.uint8).ctypes.data, len(maps), stream)
        )
        _checked(driver.cuStreamSynchronize(stream))
        _checked(driver.cuStreamDestroy(stream))
    return address


def _encoded(number: str, rows: RowSpan, page_stride: int, width: int, page_size: int, pages: int) -> bytes:
    """Return a map of [pages, page_size, width], whose boxes are blocks of 64 columns."""
    tensor_map = _checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{number}"),
            3,
            rows.pointer,
            [driver.cuuint64_t(size) for size in (width, page_size, pages)],
            [driver.cuuint64_t(stride) for stride in (rows.stride, page_stride)],
            [driver.cuuint32_t(size) for size in (BOX_COLUMNS, KEY_BLOCK, 1)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    words = np.array([int(word) for word in tensor_map.opaque], np.uint64)
    return words.tobytes()


@contextmanager
def _uncaptured() -> Iterator[None]:
    """Allow this thread what would break a capture that is under way on another stream."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        _checked(driver.cuThreadExchangeStreamCaptureMode(before))


def _checked(answer: tuple[Any, ...]) -> Any:
    fault, *values = answer
    if fault:
        raise BackendError(f"tensor maps of the cache: the driver answers {fault.name}")
    return values[0] if values else None
