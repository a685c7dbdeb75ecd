"""Checked calls of tree attention, run by the numpy reference or by a kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike

from numba_ddtree.arrays import Placement, StreamLike, copy_to_outputs, device_view, flat, gather
from numba_ddtree.cuda_target import cuda
from numba_ddtree.errors import ArgumentError
from numba_ddtree.refs import tree_attention as reference
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array
from numba_ddtree.tree_attention.arguments import (
    QUERIES_AND_CACHES,
    TREE,
    Arguments,
    check_contiguous,
)
from numba_ddtree.tree_attention.kernels import FLOAT32, launcher_of
from numba_ddtree.tree_attention.layouts import key_rows, query_rows
from numba_ddtree.tree_attention.shared_scores import launch_shared_scores
from numba_ddtree.tree_attention.splits import SplitSizes
from numba_ddtree.tree_attention.work import SplitPlan, Work

INPUT_DTYPES = (np.float16, bfloat16, np.float32)
NO_MEMORY = (1, 1)  # shape of what stands for partial results where there are none


def checked_dtype(name: str, dtype: DTypeLike, allowed: tuple[type[np.generic], ...]) -> np.dtype[Any]:
    """Return one of the allowed dtypes, named as numpy or torch does."""
    expected = " or ".join(np.dtype(each).name for each in allowed)
    try:
        found = np.dtype(str(dtype).removeprefix("torch.") if "torch" in str(dtype) else dtype)
    except TypeError as error:
        raise ArgumentError(name, repr(dtype), expected) from error
    if not any(found == each for each in allowed):
        raise ArgumentError(name, found, expected)
    return found


def output_dtype(dtype: np.dtype[Any], out_dtype: DTypeLike | None, out: Array | None) -> np.dtype[Any]:
    """Return the dtype of the output: as asked for, or that of `out`, or that of the queries."""
    if out_dtype is not None:
        allowed = tuple({dtype.type: None, np.float32: None})
        return checked_dtype("out_dtype", out_dtype, allowed)
    if out is not None and dtype != FLOAT32:
        _, views = gather(out=out)
        return FLOAT32 if views["out"].dtype == FLOAT32 else dtype
    return dtype


def run_reference(
    given: Arguments,
    pages: Any,
    out_dtype: np.dtype[Any],
    out: Array | None,
    lse: Array | None,
    *,
    sees_prefix: bool = True,
) -> tuple[Array, Array]:
    """Run the reference on host arrays: in float32 for float32, otherwise in float64, rounded at the end.

    What rounds to -0 is 0, as kernels write it.
    """
    out_exact, lse_exact = reference.tree_attention(
        *(given.views[name] for name in (*QUERIES_AND_CACHES, *TREE)),
        given.prefix_lengths_on_host(),
        given.sm_scale,
        np.float32 if given.dtype == FLOAT32 else np.float64,
        pages,
        sees_prefix,
    )
    computed = {
        "out": out_exact.astype(out_dtype, copy=False) + out_dtype.type(0),
        "lse": lse_exact.astype(np.float32, copy=False),
    }
    outputs = {name: array for name, array in (("out", out), ("lse", lse)) if array is not None}
    copy_to_outputs({name: computed[name] for name in outputs}, outputs)
    return outputs.get("out", computed["out"]), outputs.get("lse", computed["lse"])


def run_shared_scores(
    given: Arguments,
    prefix_capacity: int,
    out: Array | None,
    lse: Array | None,
    stream: StreamLike,
    *,
    sees_prefix: bool = True,
) -> tuple[Array, Array]:
    """Run the plain float32 kernel.

    Raises
    ------
    ArgumentError
        A paged cache, or a device array that is not C-contiguous.
    """
    if given.is_paged:
        expected = "a contiguous cache, since float32 has no kernel for pages; float16 and bfloat16 have"
        raise ArgumentError("ckv_cache", "a paged cache of float32", expected)
    if not given.placement.on_host:
        check_contiguous(given.views)
    return launch_shared_scores(
        given.placement,
        {name: given.views[name] for name in (*QUERIES_AND_CACHES, *TREE, "prefix_lengths")},
        prefix_capacity,
        given.max_path,
        given.sm_scale,
        out,
        lse,
        stream,
        sees_prefix=sees_prefix,
    )


def run_tensor_cores(
    given: Arguments,
    kernel: str,
    sizes: SplitSizes,
    out_dtype: np.dtype[Any],
    out: Array | None,
    lse: Array | None,
    stream: StreamLike,
    *,
    sees_prefix: bool = True,
    memory: dict[str, Any] | None = None,
    first_items: Any = None,
) -> tuple[Array, Array]:
    """Run a kernel of tensor cores; `memory` has a plan's arrays for partial results, if there is one.

    And `first_items` those that were found before.

    Raises
    ------
    ArgumentError
        A device array whose rows lie as no kernel reads them.
    """
    with Transfer(given.placement, stream) as transfer:
        work = make_work(given, transfer, out_dtype, out, lse, sees_prefix)
        splits = split_plan(sizes, given.placement, transfer, memory, first_items)
        launcher_of(kernel)(transfer, work, splits)
        results = transfer.results()
        return results["out"], results["lse"]


def make_work(
    given: Arguments,
    transfer: Transfer,
    out_dtype: np.dtype[Any],
    out: Array | None,
    lse: Array | None,
    sees_prefix: bool,
) -> Work:
    """Bring arguments to the device, and describe where they are."""
    block_table = given.views["block_table"]
    page_ids = given.views["kv_indices"] if block_table is None else flat(block_table)
    on_device = {name: transfer.input(given.views[name]) for name in (*QUERIES_AND_CACHES, *TREE)}
    return Work(
        dtype=given.dtype,
        batch=given.batch,
        slots=given.slots,
        heads=given.heads,
        q_nope=query_rows("q_nope", on_device["q_nope"]),
        q_pe=query_rows("q_pe", on_device["q_pe"]),
        keys=key_rows(
            on_device["ckv_cache"],
            on_device["kpe_cache"],
            transfer.input(page_ids),
            transfer.input(given.views["kv_indptr"]),
            0 if block_table is None else int(block_table.shape[1]),
        ),
        ancestor_bits=on_device["ancestor_bits"],
        num_nodes=on_device["num_nodes"],
        prefix_lengths=transfer.input(given.views["prefix_lengths"]),
        max_path=given.max_path,
        sm_scale=given.sm_scale,
        sees_prefix=sees_prefix,
        out=transfer.output("out", given.out_shape, out_dtype.type, out),
        lse=transfer.output("lse", given.out_shape[:3], np.float32, lse),
    )


def split_plan(
    sizes: SplitSizes,
    placement: Placement,
    transfer: Transfer,
    memory: dict[str, Any] | None,
    first_items: Any = None,
) -> SplitPlan:
    """Return sizes with memory: a plan's, or what this call allocates."""
    fields = sizes.fields()["splits"]
    if memory is None:
        memory = {name: transfer.scratch(field.shape, field.dtype) for name, field in fields.items()}
    nothing, no_rows, no_word = (None, None, None) if memory else _nothing(placement.device_id)
    return SplitPlan(
        split_blocks=sizes.split_blocks,
        max_splits=sizes.max_splits,
        rest_tiles=sizes.rest_tiles,
        partials=memory.get("partials", nothing),
        partial_sums=memory.get("partial_sums", nothing),
        first_rows=memory.get("first_rows", no_rows),
        num_rest=memory.get("num_rest", no_word),
        first_items=transfer.input(first_items),
    )


@lru_cache(maxsize=64)
def _nothing(device_id: int | None) -> Any:
    """Return arrays for kernels that have no partial results; nothing is read from them."""
    return (
        device_view("nothing", cuda.device_array(NO_MEMORY, np.float32)),
        device_view("nothing", cuda.device_array(1, np.int64)),
        device_view("nothing", cuda.device_array(1, np.int32)),
    )
