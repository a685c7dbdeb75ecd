"""The requests of a round's batch: who takes part, and where each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from numba_ddtree.arrays import Placement, StreamLike, at, check_indices, device_view, first_where, gather
from numba_ddtree.cuda_target import cuda, int32, uint32
from numba_ddtree.devices import check_no_stream
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import round_state as reference
from numba_ddtree.refs.round_state import NO_LIMIT
from numba_ddtree.refs.tree_build import MAX_PREFIX
from numba_ddtree.status import FinishReason, TreeStatus
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import AcceptResult, Array, DraftTree

THREADS = block_threads(128)


def start_requests_kernel(  # type: ignore[no-untyped-def]
    new_root_tokens,  # int32 [n]
    new_prefix_lengths,  # int32 [n]
    new_remaining,  # int32 [n], or empty: no limit
    requests,  # int32 [n], or empty: the first n places, and no other takes part
    root_tokens,  # int32 [B], and so on as RoundState
    prefix_lengths,
    remaining,
    finish_reason,
):
    place = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    count = int32(new_root_tokens.shape[0])
    if place >= root_tokens.shape[0]:
        return
    source = place if place < count else int32(-1)
    if requests.shape[0] > 0:
        source = int32(-1)
        for index in range(count):
            if requests[index] == place:
                source = int32(index)
    if source >= 0:
        root_tokens[place] = new_root_tokens[source]
        prefix_lengths[place] = new_prefix_lengths[source]
        remaining[place] = new_remaining[source] if new_remaining.shape[0] > 0 else int32(NO_LIMIT)
        finish_reason[place] = int32(FinishReason.UNFINISHED)
    elif requests.shape[0] == 0:
        remaining[place] = 0
        finish_reason[place] = int32(FinishReason.INACTIVE)


def pass_by_kernel(  # type: ignore[no-untyped-def]
    prefix_lengths,  # int32 [B], and so on as RoundState
    remaining,
    finish_reason,
    token_ids,  # int32 [B, N], and so on as DraftTree
    parents,
    depths,
    positions,
    first_child,
    next_sibling,
    ancestor_bits,
    num_nodes,
    status,
):
    request = uint32(cuda.blockIdx.x)
    thread = uint32(cuda.threadIdx.x)
    if finish_reason[request] == int32(FinishReason.UNFINISHED) and remaining[request] > 0:
        return
    position = max(prefix_lengths[request], int32(0))
    for slot in range(thread, uint32(token_ids.shape[1]), uint32(THREADS)):
        token_ids[request, slot] = 0
        parents[request, slot] = -1
        depths[request, slot] = 0
        positions[request, slot] = position
        first_child[request, slot] = -1
        next_sibling[request, slot] = -1
        for word in range(uint32(ancestor_bits.shape[2])):
            ancestor_bits[request, slot, word] = 0
    if thread == 0:
        num_nodes[request] = 0
        status[request] = int32(TreeStatus.FINISHED)


def advance_kernel(  # type: ignore[no-untyped-def]
    accept_length,  # int32 [B]
    bonus_token,  # int32 [B]
    reason,  # int32 [B]
    root_tokens,  # int32 [B], and so on as RoundState
    prefix_lengths,
    remaining,
    finish_reason,
):
    request = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if request >= root_tokens.shape[0]:
        return
    length = accept_length[request]
    if length <= 0:
        return
    prefix_lengths[request] += length
    remaining[request] -= length
    finish_reason[request] = reason[request]
    if bonus_token[request] >= 0:
        root_tokens[request] = bonus_token[request]


_REQUESTS = "int32[::1]"
START_REQUESTS = Kernel(start_requests_kernel, (f"void({', '.join([_REQUESTS] * 8)})",), THREADS)
PASS_BY = Kernel(
    pass_by_kernel,
    (
        f"void({', '.join([_REQUESTS] * 3 + ['int32[:, ::1]'] * 6)}, uint32[:, :, ::1], "
        f"{_REQUESTS}, {_REQUESTS})",
    ),
    THREADS,
)
ADVANCE = Kernel(advance_kernel, (f"void({', '.join([_REQUESTS] * 7)})",), THREADS)


@dataclass(frozen=True, slots=True)
class RoundState:
    """What one round leaves to the next; int32 [B] each, written in place.

    A request takes part in a round if its `finish_reason` is 0 and its `remaining` above 0. Writing 0 to
    `remaining` therefore takes a request out.

    Attributes
    ----------
    root_tokens : int32 [B]
        The last token of each request, which is not in the cache yet.
    prefix_lengths : int32 [B]
        Keys in the cache, without the root's.
    remaining : int32 [B]
        Tokens that each request may still emit.
    finish_reason : int32 [B]
        `FinishReason` of the round that finished the request; 0 where it goes on, and ``INACTIVE`` where
        there is none.
    """

    root_tokens: Array
    prefix_lengths: Array
    remaining: Array
    finish_reason: Array

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, without copying."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def on_host(self) -> reference.StateArrays:
        """Return host arrays as the reference takes them."""
        return reference.StateArrays(**self.arrays())

    def views(self) -> list[Any]:
        """Return device arrays as kernels take them."""
        return _views(self.arrays())


def start_requests(
    state: RoundState,
    placement: Placement,
    root_tokens: Array,
    prefix_lengths: Array,
    *,
    remaining: Array | None,
    requests: Array | None,
    stream: StreamLike,
) -> None:
    """Put requests into the batch; `DDTreeRound.start` describes the parameters and errors."""
    batch = state.root_tokens.shape[0]
    given, views = checked_start(batch, placement, root_tokens, prefix_lengths, remaining, requests)
    if placement.on_host:
        check_no_stream(stream)
    if requests is not None and views["requests"].shape[0] == 0:
        return  # to the kernel, an empty array is one that was not given
    if placement.on_host:
        reference.start_requests(state.on_host(), **views)
        return
    with Transfer(placement if given.on_host else given, stream) as transfer:
        transfer.launch(
            START_REQUESTS,
            _blocks(batch),
            *(transfer.input(view) for view in views.values()),
            *state.views(),
        )


def checked_start(
    batch: int,
    placement: Placement,
    root_tokens: Array,
    prefix_lengths: Array,
    remaining: Array | None,
    requests: Array | None,
) -> tuple[Placement, dict[str, Any]]:
    """Check what `DDTreeRound.start` is given, and return where it is, and views of it."""
    given, views = gather(
        root_tokens=root_tokens, prefix_lengths=prefix_lengths, remaining=remaining, requests=requests
    )
    if not given.on_host and given.device_id != placement.device_id:
        expected = "host arrays" if placement.on_host else f"host arrays, or {placement}"
        raise ArgumentError("root_tokens", given, expected)
    views = _checked(views, batch)
    if given.on_host:
        _check_values(views, batch)
    return given, views


def pass_by(state: RoundState, tree: DraftTree, placement: Placement, stream: StreamLike) -> None:
    """Leave requests that take no part no node, whatever their tree is."""
    if placement.on_host:
        reference.pass_by(state.on_host(), **tree.arrays())
        return
    _, *of_state = state.views()
    with Transfer(placement, stream) as transfer:
        transfer.launch(PASS_BY, state.root_tokens.shape[0], *of_state, *_views(tree.arrays()))


def advance(state: RoundState, result: AcceptResult, placement: Placement, stream: StreamLike) -> None:
    """Move each request on by what a round emitted."""
    outcome = {name: getattr(result, name) for name in ("accept_length", "bonus_token", "finish_reason")}
    if placement.on_host:
        reference.advance(state.on_host(), **outcome)
        return
    with Transfer(placement, stream) as transfer:
        transfer.launch(ADVANCE, _blocks(state.root_tokens.shape[0]), *_views(outcome), *state.views())


def _blocks(threads: int) -> int:
    return -(-threads // THREADS)


def _views(arrays: Mapping[str, Array]) -> list[Any]:
    return [device_view(name, array) for name, array in arrays.items()]


def _checked(views: dict[str, Any], batch: int) -> dict[str, Any]:
    """Check every view's shape and dtype."""
    roots = check_indices("root_tokens", views["root_tokens"], B=None)
    (count,) = roots.shape
    if count > batch:
        raise ArgumentError("root_tokens", f"{count} requests", f"at most {batch}, as planned")
    check_indices("prefix_lengths", views["prefix_lengths"], n=count)
    return {
        name: None if view is None else check_indices(name, view, n=count) for name, view in views.items()
    }


def _check_values(views: dict[str, Any], batch: int) -> None:
    rules = {
        "root_tokens": (NO_LIMIT, "a token id, not negative"),
        "prefix_lengths": (MAX_PREFIX, f"a length from 0 to {MAX_PREFIX}"),
        "requests": (batch - 1, f"a place from 0 to {batch - 1}"),
    }
    for name, (highest, expected) in rules.items():
        if (array := views[name]) is not None:
            for index in first_where((array < 0) | (array > highest)):
                raise ArgumentError(at(name, index), array[index], expected)
