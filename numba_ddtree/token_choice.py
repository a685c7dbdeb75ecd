"""The target's token at each node: the most probable one, or a draw by the Gumbel-max trick.

A block has a row of logits. The best token takes one pass over it (`numba_ddtree.device.best_token`), and so
does a draw (`numba_ddtree.device.row_draw`). Top-k and top-p first find the last token that stays, in several
passes (`numba_ddtree.device.row_cut`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    FLOAT_DTYPES,
    TOKEN_DTYPES,
    DeviceView,
    StreamLike,
    at,
    check_array,
    check_count,
    check_flag,
    check_indices,
    check_scalar,
    copy_to_outputs,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import cuda, device_routine, float32, int32, int64, uint32, uint64
from numba_ddtree.device.best_token import best_of_row, token_of_key
from numba_ddtree.device.floats import float_of_bits
from numba_ddtree.device.logit_keys import KEY_BITS, MAX_VOCABULARY, key_value, place_token, place_value
from numba_ddtree.device.logit_rows import THREADS, mask_row
from numba_ddtree.device.rounded import reciprocal32
from numba_ddtree.device.row_cut import BINS, SUMS, cut_of_row
from numba_ddtree.device.row_draw import draw_from_row
from numba_ddtree.device.rows import MINUS_INFINITY, NEIGHBOURS
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel
from numba_ddtree.refs import token_choice as reference
from numba_ddtree.refs.token_choice import MIN_TEMPERATURE, NO_TOKEN
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array

RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "temperature": (
        lambda t: (t == 0) | ((t >= MIN_TEMPERATURE) & (t < np.inf)),
        "0, or a number from 1e-30",
    ),
    "top_k": (lambda k: k >= 0, "a number, not negative"),
    "top_p": (lambda p: (p >= 0) & (p <= 1), "a number from 0 to 1"),
    "positions": (lambda positions: positions >= 0, "a position, not negative"),
}


@device_routine
def is_padding(num_nodes, request, node):  # type: ignore[no-untyped-def]
    return num_nodes.shape[0] > 0 and node >= num_nodes[request]


@device_routine
def long_of(words, request, batch, default):  # type: ignore[no-untyped-def]
    """Return an integer of a request, of 64 bits or 32, or the default where none were given."""
    if words.shape[0] == 0:
        return int64(default)
    if words.shape[0] == batch:
        return int64(words[request])
    return (int64(words[2 * request + 1]) << int64(32)) | (int64(words[2 * request]) & int64(0xFFFFFFFF))


@device_routine
def float_of(words, request, default):  # type: ignore[no-untyped-def]
    """Return a float32 of a request, or the default where none were given."""
    return float_of_bits(uint32(words[request])) if words.shape[0] > 0 else float32(default)


@device_routine
def is_temperature(value):  # type: ignore[no-untyped-def]
    return value == float32(0) or MIN_TEMPERATURE <= value < float32(np.inf)


def choose_best_kernel(  # type: ignore[no-untyped-def]
    logits,  # float32, float16 or bfloat16 [B, N, V]
    is_aligned,  # int32: rows are whole vectors of eight, at multiples of 16 bytes
    token_bitmask,  # int32 [B * W] or [B * N * W], W = ceil(V / 32); or empty, as for the next
    num_nodes,  # int32 [B]
    tokens,  # int32 [B, N]
):
    s_key = cuda.shared.array(1, uint64)
    row = cuda.blockIdx.x
    request, node = row // tokens.shape[1], row % tokens.shape[1]
    token = int32(NO_TOKEN)
    if not is_padding(num_nodes, request, node):
        start = int64(row) * int64(logits.shape[2])
        mask_start = mask_row(token_bitmask, logits.shape[2], row, request)
        token = token_of_key(best_of_row(logits, start, is_aligned, token_bitmask, mask_start, s_key))
    if cuda.threadIdx.x == 0:
        tokens[request, node] = token


def draw_tokens_kernel(  # type: ignore[no-untyped-def]
    logits,  # float32, float16 or bfloat16 [B, N, V]
    is_aligned,  # int32: rows are whole vectors of eight, at multiples of 16 bytes
    token_bitmask,  # int32 [B * W] or [B * N * W], W = ceil(V / 32); or empty, as for the next
    num_nodes,  # int32 [B]
    positions,  # int32 [B, N]
    request_ids,  # int32 [B], or words of int64 [B], or empty: the place in the batch
    seeds,  # int32: words of int64 [B], or empty: the default for all, as for the next
    temperatures,  # int32 [B]: bits of float32
    default_seed,  # int64
    default_temperature,  # float32
    tokens,  # int32 [B, N]
):
    s_key = cuda.shared.array(1, uint64)
    s_score = cuda.shared.array(1, int64)
    s_words = cuda.shared.array(3, uint32)
    row = cuda.blockIdx.x
    request, node = row // tokens.shape[1], row % tokens.shape[1]
    temperature = float_of(temperatures, request, default_temperature)
    token = int32(NO_TOKEN)
    if is_temperature(temperature) and not is_padding(num_nodes, request, node):
        start = int64(row) * int64(logits.shape[2])
        mask_start = mask_row(token_bitmask, logits.shape[2], row, request)
        if temperature == float32(0):
            token = token_of_key(best_of_row(logits, start, is_aligned, token_bitmask, mask_start, s_key))
        else:
            token = draw_from_row(
                logits,
                start,
                is_aligned,
                token_bitmask,
                mask_start,
                False,
                MINUS_INFINITY,
                uint32(0),
                temperature,
                long_of(seeds, request, -1, default_seed),
                long_of(request_ids, request, tokens.shape[0], request),
                positions[request, node],
                s_words,
                s_score,
            )
    if cuda.threadIdx.x == 0:
        tokens[request, node] = token


def filter_and_draw_kernel(  # type: ignore[no-untyped-def]
    logits,  # as for `draw_tokens_kernel`
    is_aligned,
    token_bitmask,
    num_nodes,
    positions,
    request_ids,
    seeds,
    temperatures,
    top_ks,  # int32 [B], or empty: the default for all, as for the next
    top_ps,  # int32 [B]: bits of float32
    default_seed,
    default_temperature,
    default_top_k,  # int32
    default_top_p,  # float32
    key_bits,  # int32: bits, from the top, in which the keys of logits of this type differ
    tokens,
):
    s_key = cuda.shared.array(1, uint64)
    s_score = cuda.shared.array(1, int64)
    s_words = cuda.shared.array(3, uint32)
    s_low = cuda.shared.array(BINS, uint32)
    s_high = cuda.shared.array(BINS, uint32)
    s_sums = cuda.shared.array(SUMS, int64)
    s_found = cuda.shared.array(4, int64)
    row = cuda.blockIdx.x
    request, node = row // tokens.shape[1], row % tokens.shape[1]
    temperature = float_of(temperatures, request, default_temperature)
    top_k = top_ks[request] if top_ks.shape[0] > 0 else default_top_k
    top_p = float_of(top_ps, request, default_top_p)
    is_valid = is_temperature(temperature) and top_k >= 0 and float32(0) <= top_p <= float32(1)
    token = int32(NO_TOKEN)
    if is_valid and not is_padding(num_nodes, request, node):
        start = int64(row) * int64(logits.shape[2])
        mask_start = mask_row(token_bitmask, logits.shape[2], row, request)
        best = best_of_row(logits, start, is_aligned, token_bitmask, mask_start, s_key)
        token = token_of_key(best)
        if temperature > float32(0) and token != NO_TOKEN:
            cut = cut_of_row(
                logits,
                start,
                is_aligned,
                token_bitmask,
                mask_start,
                key_bits,
                top_k,
                top_p,
                key_value(uint32(best >> uint64(32))),
                reciprocal32(temperature),
                s_low,
                s_high,
                s_sums,
                s_found,
            )
            token = draw_from_row(
                logits,
                start,
                is_aligned,
                token_bitmask,
                mask_start,
                True,
                place_value(cut, key_bits),
                place_token(cut),
                temperature,
                long_of(seeds, request, -1, default_seed),
                long_of(request_ids, request, tokens.shape[0], request),
                positions[request, node],
                s_words,
                s_score,
            )
    if cuda.threadIdx.x == 0:
        tokens[request, node] = token


def _signatures(rest: str) -> tuple[str, ...]:
    return tuple(
        f"void({logits}[:, :, ::1], int32, int32[::1], int32[::1], {rest}int32[:, ::1])"
        for logits in ("uint16", "float32", "float16")
    )


CHOOSE_BEST = Kernel(choose_best_kernel, _signatures(""), THREADS, blocks_per_processor=6)
_DRAW = "int32[:, ::1], int32[::1], int32[::1], int32[::1], "
DRAW_TOKENS = Kernel(
    draw_tokens_kernel, _signatures(_DRAW + "int64, float32, "), THREADS, blocks_per_processor=3
)
FILTER_AND_DRAW = Kernel(
    filter_and_draw_kernel,
    _signatures(_DRAW + "int32[::1], int32[::1], int64, float32, int32, float32, int32, "),
    THREADS,
    blocks_per_processor=3,
)


def choose_tokens(
    logits: Array,
    *,
    temperature: float | Array = 0.0,
    positions: Array | None = None,
    seed: int | Array = 0,
    request_ids: Array | None = None,
    top_k: int | Array = 0,
    top_p: float | Array = 1.0,
    token_bitmask: Array | None = None,
    num_nodes: Array | None = None,
    out: Array | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> Array:
    """Choose the target's token after each node: the most probable one, or a draw at a temperature.

    At temperature 0 the token of the largest logit, the smallest on ties. Above, the token of the largest
    ``logit / T + g``, with Gumbel noise g of its own for every token, which draws from the softmax of
    ``logits / T``. The noise comes from Philox 4x32-10 (Salmon et al., SC 2011), keyed by the seed and
    counted by request id, position and token, so that the token of a request at a position is the same
    whatever the node, the path to it, the tree, the batch and its order: decoding with a tree draws what
    decoding token by token draws. Deterministic, to the bit that of the reference in
    `numba_ddtree.refs.token_choice`, scores in float64.

    What may be drawn is first what the mask allows, of that the `top_k` largest logits, of those the
    fewest, best first, whose probabilities at the temperature reach `top_p`. Of equal logits the smaller
    tokens stay.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 [B, N, V]
        The target's logits after each node, V at most 262144. A row with a NaN among the tokens allowed
        gives -1. Fastest where V is a multiple of 8 and the first element at a multiple of 16 bytes.
    temperature : float or float32 [B]
        0, or 1e-30 and more; an array gives each request its own.
    positions : int32 [B, N]
        Position of each node in the sequence, as `DraftTree.positions`. A must unless `temperature` is the
        number 0.
    seed : int or int64 or uint64 [B]
        From 0 to 2^64 - 1; negative numbers of int64 stand for those from 2^63.
    request_ids : int32 or int64 [B], optional
        What tells requests of one seed apart; by default their places in the batch.
    top_k : int or int32 [B]
        0 is off.
    top_p : float or float32 [B]
        1 is off. The best token always stays. Probabilities are exponentials in float32, counted in
        units of 2^-40 of the best token's and summed exactly.
    token_bitmask : uint32 or int32 [B, ceil(V / 32)] or [B, N, ceil(V / 32)], optional
        Bit ``v % 32`` of word ``v // 32`` set: token v is allowed.
    num_nodes : int32 [B], optional
        Slots in use, as `DraftTree.num_nodes`; the logits of the others are not read.
    out : int32 [B, N], optional
        An array to write into.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays, bar the logits, as those of host arrays are; synchronises.

    Returns
    -------
    int32 [B, N]
        A numpy array for host arrays, after synchronising; otherwise an array of the same library, with no
        synchronisation. -1 in padding slots, where no token above -inf is allowed, where a logit is NaN,
        and for requests whose parameters, on a device, are out of range: `accept_tree` ends a walk there.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument, or a number out of range; for host arrays, and
        with `validate`, also values of arrays out of range.
    BackendError
        No device for the CUDA backend.
    """
    check_flag("validate", validate)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    for name, value in settings.items():
        if value is None:
            raise ArgumentError(name, None, "a number, or an array of one for each request")
    numbers = {name: _checked_number(name, value) for name, value in settings.items() if _is_number(value)}
    placement, views = gather(
        logits=logits,
        positions=positions,
        request_ids=request_ids,
        token_bitmask=token_bitmask,
        num_nodes=num_nodes,
        **{name: None if name in numbers else value for name, value in settings.items()},
    )
    views = _checked(views)
    is_greedy = numbers.get("temperature") == 0
    if views["positions"] is None and not is_greedy:
        raise ArgumentError("positions", None, "the nodes' positions, since tokens may be drawn")
    if placement.on_host or validate:
        _check_values(views)
    if use_reference(backend, placement, stream):
        tokens = reference.choose_tokens(*_reference_inputs(views, numbers))
        if out is None:
            return tokens
        copy_to_outputs({"out": tokens}, {"out": out})
        return out
    with Transfer(placement, stream) as transfer:
        tokens = transfer.output("out", views["logits"].shape[:2], np.int32, out)
        given = {name: transfer.input(_as_kernels_take(name, view)) for name, view in views.items()}
        _launch(transfer, given, numbers, is_greedy, tokens)
        return transfer.results()["out"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


def _checked_number(name: str, value: Any) -> int | float:
    """Check one of the numbers that stand for all requests."""
    if name == "seed":
        return check_count(name, value, 0, 2**64 - 1)
    if name == "top_k":
        return check_count(name, value, 0, np.iinfo(np.int32).max)
    number = check_scalar(name, value)
    is_valid, expected = RULES[name]
    # As the kernels see it, bar a number that would round to the 0 of the greedy choice.
    if not is_valid(np.float32(number)) or (name == "temperature" and np.float32(number) == 0 != number):
        raise ArgumentError(name, number, expected)
    return number


def _checked(views: dict[str, Any]) -> dict[str, Any]:
    """Check every view's shape and dtype; host arrays of other numbers are converted."""
    check_array("logits", views["logits"], FLOAT_DTYPES, B=None, N=None, V=None)
    batch, slots, vocabulary = views["logits"].shape
    if vocabulary > MAX_VOCABULARY:
        raise ArgumentError("logits", f"V = {vocabulary}", f"at most {MAX_VOCABULARY} tokens")
    given = {name: view for name, view in views.items() if view is not None}
    if "positions" in given:
        given["positions"] = check_indices("positions", given["positions"], B=batch, N=slots)
    for name in given.keys() & {"num_nodes", "top_k"}:
        given[name] = check_indices(name, given[name], B=batch)
    for name in given.keys() & {"temperature", "top_p"}:
        if isinstance(given[name], np.ndarray) and given[name].dtype.kind in "iuf":
            given[name] = _as_float32(name, given[name])
        check_array(name, given[name], (np.float32,), B=batch)
    if "seed" in given:
        check_array("seed", given["seed"], (np.int64, np.uint64), B=batch)
    if "request_ids" in given:
        check_array("request_ids", given["request_ids"], TOKEN_DTYPES, B=batch)
    if "token_bitmask" in given:
        rows = {"N": slots} if len(given["token_bitmask"].shape) == 3 else {}
        words = -(-vocabulary // 32)
        check_array(
            "token_bitmask", given["token_bitmask"], (np.uint32, np.int32), B=batch, **rows, words=words
        )
    return views | given


def _as_float32(name: str, array: NDArray[Any]) -> NDArray[np.float32]:
    """Round an array of the host's, bar temperatures that would round to the 0 of the greedy choice."""
    with np.errstate(over="ignore"):
        rounded = array.astype(np.float32, copy=False)
    if name == "temperature":
        for index in first_where((rounded == 0) & (array != 0)):
            raise ArgumentError(at(name, index), array[index], RULES[name][1])
    return rounded


def _check_values(views: dict[str, Any]) -> None:
    """Raise for the first value that would give -1 in place of a token."""
    rules = RULES | {
        "num_nodes": (
            lambda counts: (counts >= 0) & (counts <= views["logits"].shape[1]),
            f"a number from 0 to N = {views['logits'].shape[1]}",
        )
    }
    for name, (is_valid, expected) in rules.items():
        if views[name] is not None:
            array = to_host(name, views[name])
            for index in first_where(~is_valid(array)):
                raise ArgumentError(at(name, index), array[index], expected)


def _reference_inputs(views: dict[str, Any], numbers: dict[str, int | float]) -> tuple[Any, ...]:
    """Return the reference's arguments, with defaults filled in."""
    batch, slots, _ = views["logits"].shape

    def of_each(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.full(batch, numbers[name], dtype) if views[name] is None else views[name]

    def given_or(name: str, default: NDArray[Any]) -> NDArray[Any]:
        return default if views[name] is None else views[name]

    mask = views["token_bitmask"]
    return (
        views["logits"].astype(np.float32),
        given_or("positions", np.zeros((batch, slots), np.int32)),
        given_or("request_ids", np.arange(batch)),
        of_each("seed", np.uint64),
        of_each("temperature", np.float32),
        of_each("top_k", np.int32),
        of_each("top_p", np.float32),
        None if mask is None else np.ascontiguousarray(mask).view(np.uint32),
        given_or("num_nodes", np.full(batch, slots, np.int32)),
    )


def _as_kernels_take(name: str, view: Any) -> Any:
    """View what is given for each request, or may be absent, as words of int32 in one dimension.

    So one kernel takes 32 and 64 bits, signed and unsigned, and the empty array of int32 that stands for
    what is absent.
    """
    if view is None or name in ("logits", "positions"):
        return view
    if isinstance(view, DeviceView):
        words = math.prod(view.shape) * view.dtype.itemsize // 4
        return replace(view, shape=(words,), strides=(4,), dtype=np.dtype(np.int32))
    contiguous = np.ascontiguousarray(view) if isinstance(view, np.ndarray) else view
    return contiguous.reshape(-1).view(np.int32)


def _launch(
    transfer: Transfer,
    given: dict[str, Any],
    numbers: dict[str, int | float],
    is_greedy: bool,
    tokens: Any,
) -> None:
    logits = given["logits"]
    batch, slots, vocabulary = logits.shape
    is_aligned = vocabulary % NEIGHBOURS == 0 and getattr(logits, "pointer", 0) % 16 == 0
    common = (logits, np.int32(is_aligned), given["token_bitmask"], given["num_nodes"])
    if is_greedy:
        transfer.launch(CHOOSE_BEST, batch * slots, *common, tokens)
        return
    of_draw = [given[name] for name in ("positions", "request_ids", "seed", "temperature")]
    seed = np.uint64(numbers.get("seed", 0)).astype(np.int64)
    temperature = np.float32(numbers.get("temperature", 0))
    if numbers.get("top_k") == 0 and numbers.get("top_p") == 1:
        transfer.launch(DRAW_TOKENS, batch * slots, *common, *of_draw, seed, temperature, tokens)
        return
    transfer.launch(
        FILTER_AND_DRAW,
        batch * slots,
        *common,
        *of_draw,
        given["top_k"],
        given["top_p"],
        seed,
        temperature,
        np.int32(numbers.get("top_k", 0)),
        np.float32(numbers.get("top_p", 1)),
        np.int32(KEY_BITS[logits.dtype.name]),
        tokens,
    )
