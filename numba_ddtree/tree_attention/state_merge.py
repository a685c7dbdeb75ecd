"""`merge_states`: attention over two sets of keys becomes attention over both.

A block merges one row. Outputs are read and written as words of 32 bits, each one float32 or two 16-bit
numbers, so that one kernel serves every choice of dtypes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from numba_ddtree.arrays import (
    FLOAT_DTYPES,
    DeviceView,
    StreamLike,
    check_array,
    copy_to_outputs,
    gather,
)
from numba_ddtree.cuda_target import cuda, device_function, float32, int32, int64, uint32
from numba_ddtree.device.floats import (
    bfloat16_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
    float_bits,
    float_of_bits,
)
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import state_merge as reference
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array
from numba_ddtree.tree_attention.calls import checked_dtype

THREADS = block_threads(128)
MAX_ROWS = 2**31 - 1  # blocks of a grid
FLOAT32, FLOAT16, BFLOAT16 = range(3)  # forms of numbers; places in FLOAT_DTYPES
BASES = {math.e: 1.0, 2: math.log(2)}  # natural log of each base


@device_function
def load_pair(words, row, pairs, pair, form):  # type: ignore[no-untyped-def]
    """Load numbers 2 * pair and 2 * pair + 1 of a row, as float32."""
    place = int64(row) * int64(pairs) + int64(pair)
    if form == FLOAT32:
        return float_of_bits(words[2 * place]), float_of_bits(words[2 * place + 1])
    word = words[place]
    low, high = uint32(word & uint32(0xFFFF)), uint32(word >> uint32(16))
    if form == BFLOAT16:
        return bfloat16_to_float32(low), bfloat16_to_float32(high)
    return float16_to_float32(np.uint16(low)), float16_to_float32(np.uint16(high))


@device_function
def store_pair(words, row, pairs, pair, form, first, second):  # type: ignore[no-untyped-def]
    """Store numbers 2 * pair and 2 * pair + 1 of a row, rounded to nearest."""
    place = int64(row) * int64(pairs) + int64(pair)
    if form == FLOAT32:
        words[2 * place] = float_bits(first)
        words[2 * place + 1] = float_bits(second)
    elif form == BFLOAT16:
        low, high = float32_to_bfloat16(first), float32_to_bfloat16(second)
        words[place] = uint32(uint32(low) | uint32(uint32(high) << uint32(16)))
    else:
        low, high = float32_to_float16(first), float32_to_float16(second)
        words[place] = uint32(uint32(low) | uint32(uint32(high) << uint32(16)))


@device_function
def natural_log_of(lse, factor):  # type: ignore[no-untyped-def]
    """Log-sum-exp (float32) as a natural log, with -inf for an empty row."""
    return float32(-np.inf) if lse == float32(np.inf) else float32(lse * factor)


@device_function
def mean_of(a, share_a, b, share_b):  # type: ignore[no-untyped-def]
    """Weighted mean (float32) of two numbers, of which one without weight may be anything."""
    part_a = float32(a * share_a) if share_a != float32(0) else float32(0)
    part_b = float32(b * share_b) if share_b != float32(0) else float32(0)
    return float32(part_a + part_b)


def merge_states_kernel(  # type: ignore[no-untyped-def]
    out_a,  # uint32, words of [rows, D]
    lse_a,  # float32 [rows]
    out_b,  # uint32, words of [rows, D]
    lse_b,  # float32 [rows]
    form_a,  # int32
    form_b,  # int32
    log_base_a,  # float32: natural log of the base of lse_a
    log_base_b,  # float32
    pairs,  # int32: D / 2
    form,  # int32
    out,  # uint32, words of [rows, D]
    lse,  # float32 [rows]
):
    row = cuda.blockIdx.x
    log_a = natural_log_of(lse_a[row], log_base_a)
    log_b = natural_log_of(lse_b[row], log_base_b)
    cuda.syncthreads()  # lse may be one of the two
    is_empty_a, is_empty_b = log_a == float32(-np.inf), log_b == float32(-np.inf)
    largest = log_a if log_a > log_b or log_a != log_a else log_b
    base = float32(0) if is_empty_a and is_empty_b else largest
    weight_a = float32(math.exp(float32(log_a - base)))
    weight_b = float32(math.exp(float32(log_b - base)))
    total = float32(weight_a + weight_b)
    divisor = float32(1) if total == float32(0) else total
    share_a, share_b = float32(weight_a / divisor), float32(weight_b / divisor)
    for pair in range(int32(cuda.threadIdx.x), pairs, int32(THREADS)):
        a0, a1 = load_pair(out_a, row, pairs, pair, form_a)
        b0, b1 = load_pair(out_b, row, pairs, pair, form_b)
        first, second = mean_of(a0, share_a, b0, share_b), mean_of(a1, share_a, b1, share_b)
        store_pair(out, row, pairs, pair, form, first, second)
    if cuda.threadIdx.x == 0:
        is_empty = is_empty_a and is_empty_b
        lse[row] = float32(-np.inf) if is_empty else float32(base + float32(math.log(total)))


MERGE_STATES = Kernel(
    merge_states_kernel,
    (
        "void(uint32[::1], float32[::1], uint32[::1], float32[::1], int32, int32, float32, float32, int32, "
        "int32, uint32[::1], float32[::1])",
    ),
    THREADS,
    blocks_per_processor=8,
)


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    lse_base_a: float = math.e,
    lse_base_b: float = math.e,
    out: Array | None = None,
    lse: Array | None = None,
    out_dtype: DTypeLike | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Merge what queries got of two sets of keys into what they get of both.

    With other kernels' attention over the prefix, and `tree_tail_attention` over the tree's own rows, this
    makes `verify_attention`. With weights ``w = exp(lse)``::

        out = (w_a * out_a + w_b * out_b) / (w_a + w_b)
        lse = log(w_a + w_b)

    in float32, relative to the larger lse. Deterministic. (Cascade attention, FlashInfer, arXiv 2501.01005,
    section 2.2.)

    Parameters
    ----------
    out_a, out_b : float32, float16 or bfloat16 [..., D]
        Their dtypes may differ. D is even, and a device array C-contiguous from a multiple of 4 bytes on.
    lse_a, lse_b : float32 [...]
        Log-sum-exps. -inf, or +inf as FlashMLA writes it, for a row that saw no key: its `out` is not taken
        and may be anything. FlashMLA's are [B, H, N], to be transposed to the order of rows in `out`.
    lse_base_a, lse_base_b : float
        Base of each logarithm: ``math.e`` (this package, FlashMLA), or 2 (FlashInfer), whose lse is log2 of
        the same sum, ``ln 2`` times which is the natural log.
    out : [..., D], optional
        Where to write the output: any of the three dtypes. It may be `out_a` or `out_b`.
    lse : float32 [...], optional
        Where to write the log-sum-exp. It may be `lse_a` or `lse_b`.
    out_dtype : dtype, optional
        Of the output; by default that of `out`, or else of `out_a`.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference in float64, on host arrays.

    Returns
    -------
    out : [..., D]
        Zeros where both rows are empty; where one is, exactly the other. A NaN in either lse gives NaN.
    lse : float32 [...]
        Natural log, whatever the bases of the two; for base 2, divide by ``ln 2``. -inf where both are
        empty. Both are numpy arrays for host arrays, after synchronising; otherwise arrays of the same
        library, with no synchronisation.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; a base that is neither e nor 2.
    BackendError
        No device for the CUDA backend.
    """
    placement, views = gather(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    _check_shapes(views)
    log_bases = [_log_base("lse_base_a", lse_base_a), _log_base("lse_base_b", lse_base_b)]
    dtype = _output_dtype(views["out_a"].dtype, out_dtype, out)
    shape = tuple(views["out_a"].shape)
    if use_reference(backend, placement, stream):
        exact = reference.merge_states(*views.values(), lse_base_a, lse_base_b)
        computed = {"out": exact[0].astype(dtype), "lse": exact[1].astype(np.float32)}
        outputs = {name: array for name, array in (("out", out), ("lse", lse)) if array is not None}
        copy_to_outputs({name: computed[name] for name in outputs}, outputs)
        return outputs.get("out", computed["out"]), outputs.get("lse", computed["lse"])
    with Transfer(placement, stream) as transfer:
        on_device = {name: transfer.input(view) for name, view in views.items()}
        merged = transfer.output("out", shape, dtype.type, out)
        merged_lse = transfer.output("lse", shape[:-1], np.float32, lse)
        transfer.launch(
            MERGE_STATES,
            math.prod(shape[:-1]),
            _words("out_a", on_device["out_a"]),
            _flat(on_device["lse_a"]),
            _words("out_b", on_device["out_b"]),
            _flat(on_device["lse_b"]),
            *(np.int32(_form(views[name].dtype)) for name in ("out_a", "out_b")),
            *map(np.float32, log_bases),
            np.int32(shape[-1] // 2),
            np.int32(_form(dtype)),
            _words("out", merged),
            _flat(merged_lse),
        )
        results = transfer.results()
        return results["out"], results["lse"]


def _check_shapes(views: dict[str, Any]) -> None:
    if views["out_a"] is None or len(views["out_a"].shape) == 0:
        got = None if views["out_a"] is None else "a single number"
        raise ArgumentError("out_a", got, "an array [..., D]")
    shape = tuple(views["out_a"].shape)
    rows: dict[str, int | None] = {f"d{axis}": size for axis, size in enumerate(shape[:-1])}
    check_array("out_a", views["out_a"], FLOAT_DTYPES, **rows, D=None)
    if shape[-1] % 2 != 0:
        raise ArgumentError("out_a", f"D = {shape[-1]}", "an even D")
    if math.prod(shape[:-1]) > MAX_ROWS:
        raise ArgumentError("out_a", f"{math.prod(shape[:-1])} rows", f"at most {MAX_ROWS}")
    check_array("out_b", views["out_b"], FLOAT_DTYPES, **rows, D=shape[-1])
    for name in ("lse_a", "lse_b"):
        check_array(name, views[name], (np.float32,), **rows)


def _log_base(name: str, base: Any) -> float:
    if not isinstance(base, int | float) or base not in BASES:
        raise ArgumentError(name, repr(base), "math.e or 2")
    return BASES[base]


def _output_dtype(dtype: np.dtype[Any], out_dtype: DTypeLike | None, out: Array | None) -> np.dtype[Any]:
    if out_dtype is not None:
        return checked_dtype("out_dtype", out_dtype, FLOAT_DTYPES)
    if out is not None:
        _, views = gather(out=out)
        return checked_dtype("out", views["out"].dtype, FLOAT_DTYPES)
    return dtype


def _form(dtype: np.dtype[Any]) -> int:
    return next(form for form, each in enumerate(FLOAT_DTYPES) if dtype == each)


def _words(name: str, view: Any) -> Any:
    """View an array as words of 32 bits."""
    if not isinstance(view, DeviceView):
        return view.reshape(-1).view(np.uint32)
    if view.pointer % 4 != 0:
        raise ArgumentError(
            name, f"an address {view.pointer % 4} bytes past a multiple of 4", "a multiple of 4"
        )
    count = math.prod(view.shape) * view.dtype.itemsize // 4
    return replace(view, shape=(count,), strides=(4,), dtype=np.dtype(np.uint32))


def _flat(view: Any) -> Any:
    if not isinstance(view, DeviceView):
        return view.reshape(-1)
    return replace(view, shape=(math.prod(view.shape),), strides=(view.dtype.itemsize,))
