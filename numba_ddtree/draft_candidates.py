"""The best candidates of each position and their log-probs, in one pass over the draft's logits.

Each row of logits is cut into tiles, and each block takes the same number of neighbouring tiles, which
are a piece of one row, or of two or more; a whole row, or one of its equal parts, where these are nearly
as many as blocks run at once, or where the caller says how many parts a row has. Of each piece it finds
the best candidates, and sums what is not among them (`device/candidate_scan.py`). A second kernel merges a
row's pieces, sorts, and turns logits into log-probs (`device/candidate_merge.py`).

The sum of the exponentials is exact enough for log-probs near 0 to be right: the best candidate's own
is left out of the sum s, so that its log-prob is -log1p(s). Those that leave at a time are summed as
integers, since they do so in no certain order, and everything else in a fixed one. That order is a row's own
where its number of parts is given: quads then begin with the row, whatever its address, and not at multiples
of their size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    FLOAT_DTYPES,
    DeviceView,
    Placement,
    StreamLike,
    at,
    check_array,
    check_count,
    check_flag,
    check_scalar,
    copy_to_outputs,
    first_where,
    gather,
    members_of,
    to_host,
)
from numba_ddtree.device.candidate_merge import merge_pieces_kernel
from numba_ddtree.device.candidate_scan import (
    FIRST_TILES,
    STRIDE,
    first_maxima_of,
    scan_bytes_of,
    scan_logits_kernel,
    strides_of,
)
from numba_ddtree.device.candidates import (
    HEADER,
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    THREADS,
    TILE,
    shared_bytes_of,
)
from numba_ddtree.devices import (
    device_context,
    multiprocessors,
    shared_memory_of_processor,
    use_reference,
)
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel
from numba_ddtree.refs import draft_candidates as reference
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array

MAX_K = 1024
MAX_VOCABULARY = 2**18
BLOCKS_PER_PROCESSOR = 4
ALIGNED_SHARE = 0.9  # of the blocks that run at once, from which on whole rows for each are better
# The threshold rises when this part of the wanted number has entered beyond it, at least so many. With 1,
# four blocks have room on a multiprocessor of 228 KB, whatever is wanted; were it less, the merge would have
# none for two pieces at once, and might find too few keys in them.
GROWTH = 1
LEAST_GROWTH = 96
RESERVED_SHARED_BYTES = 1024  # that the driver takes of each block's shared memory
PIECE_SHARE = 16  # a piece has at least so many numbers for each one that is kept of it


class DraftCandidates(NamedTuple):
    """The best candidates of each position, best first: what `build_tree` takes.

    Attributes
    ----------
    log_probs : float32 [B, L, k]
        Natural logs of their probabilities.
    token_ids : int32 [B, L, k]
    """

    log_probs: Array
    token_ids: Array


_LOGITS = ("float32", "float16", "uint16")
_GIVEN = {False: ("int32", "int32", "int32"), True: ("float32", "uint32", "float32")}
SCAN_LOGITS = Kernel(
    scan_logits_kernel,
    tuple(
        f"void({logits}[:, :, ::1], {temperatures}[::1], {bitmask}[::1], {bias}[::1], "
        f"float32, int32, {misalignment}, int32, int32, int32, int32, int32, int64[:, ::1])"
        for misalignment in ("int32", "boolean")
        for logits in _LOGITS
        for temperatures, bitmask, bias in _GIVEN.values()
    ),
    THREADS,
    BLOCKS_PER_PROCESSOR,
)
MERGE_PIECES = Kernel(
    merge_pieces_kernel,
    tuple(
        f"void(int64[:, ::1], {temperatures}[::1], float32, int32, int32, int32, int32, "
        "float32[:, :, ::1], int32[:, :, ::1])"
        for temperatures in ("int32", "float32")
    ),
    THREADS,
)


class Plan(NamedTuple):
    """How the rows are cut; see the kernels' arguments of the same names."""

    blocks: int
    row_tiles: int
    wanted: int
    growth: int


def _plan(
    rows: int, vocabulary: int, k: int, has_aligned_rows: bool, pieces_per_row: int | None = None
) -> Plan:
    wanted, growth = _kept(k)
    if pieces_per_row is not None:
        row_tiles = -(-vocabulary // TILE)
        return Plan(rows * min(pieces_per_row, row_tiles), row_tiles, wanted, growth)
    row_tiles = -(-(vocabulary + (0 if has_aligned_rows else 3)) // TILE)
    blocks = min(_blocks_together(wanted, growth), -(-rows * row_tiles // _least_tiles(wanted)))
    # A piece costs its block time that it does not read in, and rows have fewer pieces where cuts meet.
    aligned = blocks // max(rows, 1) * rows
    return Plan(aligned if aligned >= ALIGNED_SHARE * blocks else blocks, row_tiles, wanted, growth)


def _kept(k: int) -> tuple[int, int]:
    """Return how many candidates of each piece are kept, and how many enter before the threshold rises."""
    # Of one candidate there is no telling how far below it the rest of the row is, of two there is.
    wanted = max(k, 2)
    growth = max(LEAST_GROWTH, int(GROWTH * wanted))
    growth += (wanted + growth) % 2  # an even number of keys, so that quads are at multiples of their size
    return wanted, growth


def _least_tiles(wanted: int) -> int:
    """Tiles that a piece has at least, unless the caller says how many pieces there are."""
    return max(2 * STRIDE, PIECE_SHARE * wanted // TILE)


def _blocks_together(wanted: int, growth: int) -> int:
    """Blocks of the scan that the current device runs at once."""
    shared_bytes = scan_bytes_of(wanted, growth) + RESERVED_SHARED_BYTES
    of_processor = max(1, min(BLOCKS_PER_PROCESSOR, shared_memory_of_processor() // shared_bytes))
    return multiprocessors() * of_processor


def best_pieces_per_row(batch: int, depth: int, vocabulary: int, k: int, device_id: int | None = None) -> int:
    """Choose `pieces_per_row` of `draft_topk` for logits [batch, depth, vocabulary], which rounds use.

    Of the numbers whose pieces are worth a block, the one that is expected to take the least time, the
    smallest of several: a block takes its piece's tiles, and those of the first look, and blocks run in as
    many turns as the device needs for all.

    Parameters
    ----------
    batch, depth, vocabulary, k : int
    device_id : int, optional
        The logits' device, whose multiprocessors count; by default the current one.
    """
    _check_sizes(batch, depth, vocabulary, k)
    wanted, growth = _kept(k)
    with device_context(device_id):
        together = _blocks_together(wanted, growth)
    row_tiles = -(-vocabulary // TILE)

    def cost(pieces: int) -> int:
        turns = -(-batch * depth * pieces // together)
        return turns * (-(-row_tiles // pieces) + FIRST_TILES)

    return min(range(1, max(1, row_tiles // _least_tiles(wanted)) + 1), key=cost)


def draft_topk_workspace_shape(
    batch: int,
    depth: int,
    vocabulary: int,
    k: int,
    device_id: int | None = None,
    *,
    pieces_per_row: int | None = None,
) -> tuple[int, int]:
    """Shape of the int64 workspace that `draft_topk` takes for logits [batch, depth, vocabulary].

    Parameters
    ----------
    batch, depth, vocabulary, k : int
    device_id : int, optional
        The logits' device, whose multiprocessors count; by default the current one.
    pieces_per_row : int, optional
        As it is given to `draft_topk`.
    """
    _check_sizes(batch, depth, vocabulary, k)
    pieces_per_row = _check_pieces(pieces_per_row)
    with device_context(device_id):
        plan = _plan(batch * depth, vocabulary, k, False, pieces_per_row)
    # A piece begins with a row or with a block.
    return max(0, batch * depth + plan.blocks - 1), HEADER + plan.wanted


def _check_sizes(batch: int, depth: int, vocabulary: int, k: int) -> None:
    check_count("batch", batch, 0, np.iinfo(np.int32).max)
    check_count("depth", depth, 1, np.iinfo(np.int32).max)
    check_count("vocabulary", vocabulary, 1, MAX_VOCABULARY)
    check_count("k", k, 1, min(vocabulary, MAX_K))


def _check_pieces(pieces_per_row: int | None) -> int | None:
    if pieces_per_row is None:
        return None
    return check_count("pieces_per_row", pieces_per_row, 1, np.iinfo(np.int32).max)


def draft_topk(
    logits: Array,
    k: int,
    *,
    temperature: float | Array = 1.0,
    token_bitmask: Array | None = None,
    bias: Array | None = None,
    pieces_per_row: int | None = None,
    workspace: Array | None = None,
    out: DraftCandidates | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> DraftCandidates:
    """Find the `k` best tokens of each position, sorted, and their log-probs.

    The log-probs are those of ``log_softmax((logits + bias) / temperature)`` over the allowed tokens,
    in float32, within 2 units in the last place of their value in real numbers; ``logits + bias`` is
    rounded to float32. Tokens are ordered by that sum, not by its quotient, so that a temperature makes
    no ties; of equal ones (0 and -0 among them) the smaller id comes first. Tokens forbidden or of
    logit -inf have log-prob -inf, and come last in order of their ids; a row of nothing else is -inf
    throughout, of which `build_tree` makes the status ``NO_CANDIDATE`` in the first row.

    A row that is no distribution, since it has NaN or +inf at an allowed token or its temperature is
    out of range, has log-prob NaN and ids 0 to k - 1: `build_tree` gives it the status ``NAN``. The
    other rows are untouched.

    Deterministic: the same call gives the same bits on the same kind of device. The same row in another
    batch, at another place or address, has the same ids, and with `pieces_per_row` the same bits; without
    it, log-probs that may differ in the last place.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 [B, L, V]
        V is at most 262144.
    k : int
        Candidates a position: 1 to 1024, at most V.
    temperature : float or float32 [B]
        1e-30 to 1e30; an array gives each request its own. Rounded to float32.
    token_bitmask : uint32 or int32 [B, L, ceil(V / 32)] or [B, ceil(V / 32)], optional
        Bit ``v % 32`` of word ``v // 32`` is set where token v is allowed, as in xgrammar; without L
        it holds for all positions of the request.
    bias : float32 [V], optional
        Added to the logits; -inf forbids a token.
    pieces_per_row : int, optional
        Into how many pieces each row is cut, at most one for each 1024 tokens; a row's bits then depend on
        it, on the row and on this number alone. By default rows are cut as is quickest for all together.
        Where V is no multiple of 4, or the logits' address none of four numbers', a given number has
        logits loaded one by one, which is slower. The reference has no pieces.
    workspace : int64 of shape `draft_topk_workspace_shape`, optional
        Memory on the device for the call's own use, of any content. Allocated by default. Calls that
        may run at the same time need one each. None with the numpy backend.
    out : DraftCandidates, optional
        Arrays of the right shapes to write into.
    stream
        Stream to launch on; by default the current one of the logits' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays as those of host arrays are; synchronises.

    Returns
    -------
    DraftCandidates
        Numpy arrays for host arrays, after synchronising; otherwise arrays of the same library, with no
        synchronisation.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; a number out of range; for host arrays, and
        with `validate`, also logits that are NaN or +inf where they are allowed, a bias that is, and
        temperatures out of range.
    BackendError
        No device for the CUDA backend.
    """
    check_flag("validate", validate)
    has_one_temperature = isinstance(temperature, int | float | np.integer | np.floating)
    placement, views = gather(
        logits=logits,
        temperature=None if has_one_temperature else temperature,
        token_bitmask=token_bitmask,
        bias=bias,
    )
    _check_shapes(views)
    k = check_count("k", k, 1, min(views["logits"].shape[2], MAX_K))
    pieces_per_row = _check_pieces(pieces_per_row)
    default = _check_temperature(temperature) if has_one_temperature else 1.0
    if out is not None and not isinstance(out, DraftCandidates):
        raise ArgumentError("out", type(out).__name__, "a numba_ddtree.DraftCandidates")
    runs_reference = use_reference(backend, placement, stream)
    if runs_reference and workspace is not None:
        expected = "None, since the numpy backend needs no workspace"
        raise ArgumentError("workspace", type(workspace).__name__, expected)
    if placement.on_host or validate:
        host: list[Any] = [None if view is None else to_host(name, view) for name, view in views.items()]
        _check_values(*host)
        if runs_reference:
            result = DraftCandidates(*reference.draft_topk(host[0], k, *_with_defaults(host, default)))
            if out is None:
                return result
            copy_to_outputs(*(members_of("out", each._asdict()) for each in (result, out)))
            return out
    return _launch(placement, views, k, default, pieces_per_row, workspace, out, stream)


def _check_shapes(views: dict[str, Any]) -> None:
    """Check every view's shape and dtype."""
    check_array("logits", views["logits"], FLOAT_DTYPES, B=None, L=None, V=None)
    batch, depth, vocabulary = views["logits"].shape
    if vocabulary > MAX_VOCABULARY:
        raise ArgumentError("logits", f"V = {vocabulary}", f"a vocabulary of at most {MAX_VOCABULARY}")
    if views["temperature"] is not None:
        check_array("temperature", views["temperature"], (np.float32,), B=batch)
    bitmask = views["token_bitmask"]
    if bitmask is not None:
        positions = {"L": depth} if len(bitmask.shape) == 3 else {}
        words = -(-vocabulary // 32)
        check_array("token_bitmask", bitmask, (np.uint32, np.int32), B=batch, **positions, words=words)
    if views["bias"] is not None:
        check_array("bias", views["bias"], (np.float32,), V=vocabulary)


def _check_temperature(temperature: Any) -> float:
    value = check_scalar("temperature", temperature)
    if not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
        raise ArgumentError("temperature", value, _TEMPERATURE_RANGE)
    return value


_TEMPERATURE_RANGE = f"a number from {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"


def _check_values(
    logits: NDArray[Any],
    temperatures: NDArray[np.float32] | None,
    bitmask: NDArray[Any] | None,
    bias: NDArray[np.float32] | None,
) -> None:
    """Raise for the first value that would make a row none."""
    if temperatures is not None:
        is_bad = ~((temperatures >= LOWEST_TEMPERATURE) & (temperatures <= HIGHEST_TEMPERATURE))
        for index in first_where(is_bad):
            raise ArgumentError(at("temperature", index), temperatures[index], _TEMPERATURE_RANGE)
    is_allowed = True if bitmask is None else reference.allowed_tokens(bitmask, logits.shape)
    named: list[tuple[str, NDArray[Any], NDArray[np.bool_]]] = [
        ("logits", logits, ~(logits < np.inf) & is_allowed)
    ]
    if bias is not None:
        named.append(("bias", bias, ~(bias < np.inf)))
    for name, array, is_bad in named:
        for index in first_where(is_bad):
            raise ArgumentError(at(name, index), array[index], "a number or -inf, not NaN and not +inf")


def _with_defaults(host: list[Any], temperature: float) -> list[Any]:
    """Return the reference's last arguments."""
    logits, temperatures, bitmask, bias = host
    if temperatures is None:
        temperatures = np.full(logits.shape[0], temperature, np.float32)
    return [temperatures, bitmask, bias]


def _flat_words(bitmask: Any) -> Any:
    """View a mask's words as uint32, in one row."""
    if isinstance(bitmask, DeviceView):
        return replace(bitmask, shape=(math.prod(bitmask.shape),), strides=(4,), dtype=np.dtype(np.uint32))
    return bitmask.view(np.uint32).reshape(-1)


def _misalignment(logits: Any) -> int:
    """Numbers from the last multiple of a quad's size to the first logit."""
    if not isinstance(logits, DeviceView):  # in the simulator
        return 0
    return logits.pointer // logits.dtype.itemsize % 4


def _launch(
    placement: Placement,
    views: dict[str, Any],
    k: int,
    default_temperature: float,
    pieces_per_row: int | None,
    workspace: Array | None,
    out: DraftCandidates | None,
    stream: StreamLike,
) -> DraftCandidates:
    batch, depth, vocabulary = views["logits"].shape
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(DraftCandidates._fields, (batch, depth, k))
    bitmask = views["token_bitmask"]
    with Transfer(placement, stream) as transfer:
        log_probs, token_ids = transfer.outputs(shapes, {"log_probs": np.float32, "token_ids": np.int32}, out)
        given = transfer.input(views["logits"])
        temperatures = transfer.input(views["temperature"])
        misalignment = _misalignment(given)
        has_aligned_rows = misalignment == 0 and vocabulary % 4 == 0
        begins_with_row = pieces_per_row is not None and not has_aligned_rows
        plan = _plan(batch * depth, vocabulary, k, has_aligned_rows, pieces_per_row)
        shape = draft_topk_workspace_shape(batch, depth, vocabulary, k, pieces_per_row=pieces_per_row)
        pieces = _workspace(transfer, shape, workspace)
        transfer.launch(
            SCAN_LOGITS,
            plan.blocks,
            given,
            temperatures,
            transfer.input(None if bitmask is None else _flat_words(bitmask)),
            transfer.input(views["bias"]),
            np.float32(default_temperature),
            np.int32(depth if bitmask is not None and len(bitmask.shape) == 2 else 1),
            np.bool_(True) if begins_with_row else np.int32(misalignment),
            *map(np.int32, (plan.row_tiles, plan.wanted, plan.growth)),
            np.int32(first_maxima_of(plan.wanted, plan.growth)),
            np.int32(strides_of(plan.wanted)),
            pieces,
            shared_bytes=scan_bytes_of(plan.wanted, plan.growth),
        )
        transfer.launch(
            MERGE_PIECES,
            batch * depth,
            pieces,
            temperatures,
            np.float32(default_temperature),
            *map(np.int32, plan),
            log_probs,
            token_ids,
            shared_bytes=shared_bytes_of(plan.wanted, plan.growth),
        )
        return DraftCandidates(**transfer.results())


def _workspace(transfer: Transfer, shape: tuple[int, int], workspace: Array | None) -> Any:
    """Return the caller's workspace as the kernels' argument, or a new one."""
    if workspace is None:
        return transfer.scratch(shape, np.int64)
    placement, views = gather(workspace=workspace)
    if placement.on_host:
        raise ArgumentError("workspace", "an array on the host", "an array on the device")
    check_array("workspace", views["workspace"], (np.int64,), pieces=shape[0], words=shape[1])
    return views["workspace"]
