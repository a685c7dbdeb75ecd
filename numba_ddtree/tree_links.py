"""Trees made by other builders: from parents, or from a boolean ancestor mask.

The rest of a `DraftTree` (depths, positions, child links, ancestor bits) follows from the parents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    Placement,
    StreamLike,
    at,
    check_array,
    check_count,
    check_flag,
    check_indices,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import cuda, int32
from numba_ddtree.device.bits import clear_ancestor_bits, write_ancestor_bits
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import tree_links as reference
from numba_ddtree.status import TreeStatus
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import (
    TREE_DTYPES,
    Array,
    DraftTree,
    arrays_of,
    check_parents,
    check_tree,
    deepest,
    tree_shapes,
)

MAX_SLOTS = 1025
NOT_A_TREE = -2
VISIBILITY_RULE = (
    "that each node sees itself, what its parent (the latest earlier slot that it sees) sees, "
    "and nothing else"
)

THREADS = block_threads(256)
BAD_SIZE, BAD_PARENT, TOO_DEEP = range(3)
FAULTS = 3


def tree_links_kernel(  # type: ignore[no-untyped-def]
    given_parents,  # int32 [B, N]; may be the same memory as parents
    given_token_ids,  # int32 [B, N]
    given_num_nodes,  # int32 [B], or empty: N
    prefix_lengths,  # int32 [B], or empty: 0
    max_depth,  # int32
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
    request = cuda.blockIdx.x
    thread = cuda.threadIdx.x
    slots = given_parents.shape[1]
    s_words = cuda.shared.array(0, int32)
    s_parent = s_words[:slots]
    s_last_seen = s_words[slots : 2 * slots]
    s_next_sibling = s_words[2 * slots : 3 * slots]
    s_fault = s_words[3 * slots : 3 * slots + FAULTS]  # a word for each check, since checks overlap in time

    clear_ancestor_bits(ancestor_bits, request, THREADS)
    count = given_num_nodes[request] if given_num_nodes.shape[0] > 0 else int32(slots)
    prefix = prefix_lengths[request] if prefix_lengths.shape[0] > 0 else int32(0)
    if thread == 0:
        s_fault[BAD_SIZE] = count < 0 or count > slots or (prefix < 0 and count != 0)
        s_fault[BAD_PARENT] = 0
        s_fault[TOO_DEEP] = 0
    cuda.syncthreads()
    if s_fault[BAD_SIZE] != 0:
        count = int32(1)
    for slot in range(thread, slots, THREADS):
        parent = given_parents[request, slot] if slot < count else int32(-1)
        s_parent[slot] = parent
        s_last_seen[slot] = -1
        if slot < count and (parent != -1 if slot == 0 else parent < 0 or parent >= slot):
            s_fault[BAD_PARENT] = 1
    cuda.syncthreads()
    is_invalid = s_fault[BAD_SIZE] != 0 or s_fault[BAD_PARENT] != 0
    if not is_invalid:
        for slot in range(thread, count, THREADS):
            depth = 0
            ancestor = s_parent[slot]
            while ancestor >= 0:
                depth += 1
                ancestor = s_parent[ancestor]
            if depth > max_depth:
                s_fault[TOO_DEEP] = 1
            depths[request, slot] = depth
    cuda.syncthreads()
    is_invalid = is_invalid or s_fault[TOO_DEEP] != 0
    code = int32(TreeStatus.OK) if count > 0 else int32(TreeStatus.FINISHED)
    if is_invalid:
        count = int32(1)
        code = int32(TreeStatus.INVALID)
    if thread == 0:
        if is_invalid:
            s_parent[0] = -1
            depths[request, 0] = 0
        num_nodes[request] = count
        status[request] = code
        # Backwards, each node finds the sibling after it; what is seen last is the first child.
        for slot in range(count - 1, 0, -1):
            parent = s_parent[slot]
            s_next_sibling[slot] = s_last_seen[parent]
            s_last_seen[parent] = slot
    cuda.syncthreads()
    base = max(prefix, int32(0))
    for slot in range(thread, slots, THREADS):
        used = slot < count
        if not used:
            depths[request, slot] = 0
        token_ids[request, slot] = given_token_ids[request, slot] if used else int32(0)
        parents[request, slot] = s_parent[slot] if used else int32(-1)
        positions[request, slot] = base + depths[request, slot]
        first_child[request, slot] = s_last_seen[slot] if used else int32(-1)
        next_sibling[request, slot] = s_next_sibling[slot] if used and slot > 0 else int32(-1)
    write_ancestor_bits(ancestor_bits, request, s_parent, count, THREADS)


def visibility_parents_kernel(  # type: ignore[no-untyped-def]
    visibility,  # bool [B, N, N]
    given_num_nodes,  # int32 [B], or empty: N
    parents,  # int32 [B, N]: -2 in slot 0 where the mask is not that of a tree
):
    request = cuda.blockIdx.x
    thread = cuda.threadIdx.x
    slots = visibility.shape[1]
    count = given_num_nodes[request] if given_num_nodes.shape[0] > 0 else int32(slots)
    count = min(max(count, int32(0)), int32(slots))
    for slot in range(thread, slots, THREADS):
        parents[request, slot] = -1
    cuda.syncthreads()
    for node in range(thread, count, THREADS):
        parent = node - 1
        while parent >= 0 and not visibility[request, node, parent]:
            parent -= 1
        for other in range(count):
            implied = other == node or (parent >= 0 and visibility[request, parent, other])
            if bool(visibility[request, node, other]) != implied:
                parents[request, 0] = NOT_A_TREE
        if node > 0:
            parents[request, node] = parent


def expand_bits_kernel(ancestor_bits, visibility):  # type: ignore[no-untyped-def]
    # uint32 [B, N, words] to bool [B, N, N]; a block for each request and node
    slots = visibility.shape[1]
    request = cuda.blockIdx.x // slots
    node = cuda.blockIdx.x % slots
    for other in range(cuda.threadIdx.x, slots, THREADS):
        word = ancestor_bits[request, node, other >> 5]
        visibility[request, node, other] = ((word >> (other & 31)) & 1) != 0


_TREE = ", ".join(["int32[:, ::1]"] * 6 + ["uint32[:, :, ::1]"] + ["int32[::1]"] * 2)
TREE_LINKS = Kernel(
    tree_links_kernel,
    (f"void(int32[:, ::1], int32[:, ::1], int32[::1], int32[::1], int32, {_TREE})",),
    THREADS,
)
VISIBILITY_PARENTS = Kernel(
    visibility_parents_kernel, ("void(boolean[:, :, ::1], int32[::1], int32[:, ::1])",), THREADS
)
EXPAND_BITS = Kernel(expand_bits_kernel, ("void(uint32[:, :, ::1], boolean[:, :, ::1])",), THREADS)


def tree_from_parents(
    parents: Array,
    token_ids: Array,
    *,
    num_nodes: Array | None = None,
    prefix_lengths: Array | None = None,
    max_depth: int | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> DraftTree:
    """Make a `DraftTree` of parents and tokens that another builder gave. Deterministic.

    Parameters
    ----------
    parents : int32 [B, N]
        -1 in slot 0, the root; an earlier slot in every other slot in use. N is at most 1025.
    token_ids : int32 [B, N]
        Slot 0 holds the root's token.
    num_nodes : int32 [B], optional
        Slots in use, with the root; N by default. 0 is a request that takes no part.
    prefix_lengths : int32 [B], optional
        Keys in the cache before the root; 0 by default.
    max_depth : int, optional
        The tree's `max_depth`; by default the largest depth for host arrays and N - 1 for device
        arrays. A deeper tree is an error on the host and ends in the status ``INVALID`` on a device.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays as those of host arrays are; synchronises.

    Returns
    -------
    DraftTree
        Numpy arrays for host arrays, after synchronising; otherwise arrays of the same library, with
        no synchronisation. A request whose values are bad is its root alone, with status
        ``INVALID``.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; for host arrays, and with `validate`,
        also parents that are no tree, a depth above `max_depth`, a number or length out of range.
    BackendError
        No device for the CUDA backend.
    """
    check_flag("validate", validate)
    placement, views = gather(
        parents=parents, token_ids=token_ids, num_nodes=num_nodes, prefix_lengths=prefix_lengths
    )
    views["parents"] = check_indices("parents", views["parents"], B=None, N=None)
    batch, slots = views["parents"].shape
    return _from_parents(placement, _checked(views, batch, slots), max_depth, stream, backend, validate)


def tree_from_visibility(
    visibility: Array,
    token_ids: Array,
    *,
    num_nodes: Array | None = None,
    prefix_lengths: Array | None = None,
    max_depth: int | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> DraftTree:
    """Make a `DraftTree` of a boolean ancestor mask, the form in which others hold a tree.

    Parameters
    ----------
    visibility : bool [B, N, N]
        ``visibility[b, i, j]``: node i sees node j, which is so where j is i or an ancestor of i,
        and nowhere else. An ancestor's slot is an earlier one. Rows and columns of slots not in use
        are not read.
    token_ids, num_nodes, prefix_lengths, max_depth, stream, backend, validate
        As for `tree_from_parents`.

    Returns
    -------
    DraftTree
        As from `tree_from_parents`.

    Raises
    ------
    ArgumentError
        As `tree_from_parents`, and for a mask that is not that of a tree.
    BackendError
        No device for the CUDA backend.
    """
    check_flag("validate", validate)
    placement, views = gather(
        visibility=visibility, token_ids=token_ids, num_nodes=num_nodes, prefix_lengths=prefix_lengths
    )
    mask = views.pop("visibility")
    check_array("visibility", mask, (np.bool_,), B=None, N=None, N_=None)
    batch, slots, _ = mask.shape
    check_array("visibility", mask, (np.bool_,), B=batch, N=slots, N_=slots)
    views = _checked(views, batch, slots)
    use_reference(backend, placement, stream)
    if placement.on_host or validate:
        given = _host_inputs({"num_nodes": views["num_nodes"]}, batch, slots)
        parents = reference.parents_from_visibility(to_host("visibility", mask), *given)
        for index in first_where(parents == NOT_A_TREE):
            raise ArgumentError(at("visibility", index[:1]), "a mask that is no tree's", VISIBILITY_RULE)
    if not placement.on_host:
        parents = _launch_visibility(placement, mask, views["num_nodes"], stream)
    return _from_parents(placement, {"parents": parents} | views, max_depth, stream, backend, validate)


def tree_to_visibility(tree: DraftTree, *, stream: StreamLike = None) -> Array:
    """Expand a tree's ancestor bits to a boolean mask. Deterministic.

    Parameters
    ----------
    tree : DraftTree
        B requests of N slots.
    stream
        Stream to launch on; by default the current one of the arrays' library.

    Returns
    -------
    visibility : bool [B, N, N]
        ``visibility[b, i, j]``: node i sees node j. Of the tree's library; synchronises for numpy
        arrays only.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype or layout of the tree's arrays.
    """
    placement, views = gather(**arrays_of("tree", tree, DraftTree))
    check_tree(views, max_depth=tree.max_depth, values=False)
    bits = views["ancestor_bits"]
    batch, slots = views["parents"].shape
    if placement.on_host:
        return reference.visibility_from_bits(bits)
    with Transfer(placement, stream) as transfer:
        mask = transfer.output("visibility", (batch, slots, slots), np.bool_)
        transfer.launch(EXPAND_BITS, batch * slots, bits, mask)
        return transfer.results()["visibility"]


def _checked(views: dict[str, Any], batch: int, slots: int) -> dict[str, Any]:
    """Check the shapes and dtypes of everything beside the parents or the mask."""
    if slots > MAX_SLOTS:
        raise ArgumentError("token_ids", f"N = {slots}", f"at most {MAX_SLOTS} slots")
    views["token_ids"] = check_indices("token_ids", views["token_ids"], B=batch, N=slots)
    for name in ("num_nodes", "prefix_lengths"):
        if views[name] is not None:
            views[name] = check_indices(name, views[name], B=batch)
    return views


def _host_inputs(views: dict[str, Any], batch: int, slots: int) -> list[NDArray[Any]]:
    """Host copies of the views, with defaults filled in."""
    defaults = {"num_nodes": slots, "prefix_lengths": 0}
    return [
        np.full(batch, defaults[name], np.int32) if view is None else to_host(name, view)
        for name, view in views.items()
    ]


def _from_parents(
    placement: Placement,
    views: dict[str, Any],
    max_depth: int | None,
    stream: StreamLike,
    backend: str | None,
    validate: bool,
) -> DraftTree:
    batch, slots = views["token_ids"].shape
    if max_depth is not None:
        max_depth = check_count("max_depth", max_depth, 0, slots - 1)
    runs_reference = use_reference(backend, placement, stream)
    if placement.on_host or validate:
        parents, token_ids, num_nodes, prefix_lengths = _host_inputs(views, batch, slots)
        check_parents("parents", parents, num_nodes)
        longest = np.iinfo(np.int32).max - slots
        for index in first_where((prefix_lengths < 0) | (prefix_lengths > longest)):
            expected = f"a length from 0 to {longest}"
            raise ArgumentError(at("prefix_lengths", index), prefix_lengths[index], expected)
        used = np.arange(slots) < num_nodes[:, None]
        for index in first_where(used & (token_ids < 0)):
            raise ArgumentError(at("token_ids", index), token_ids[index], "a token id, not negative")
        depth = deepest(parents, num_nodes)
        if max_depth is not None and depth > max_depth:
            limit = f"a depth of at most max_depth = {max_depth}"
            raise ArgumentError("parents", f"a tree of depth {depth}", limit)
        if max_depth is None and placement.on_host:
            max_depth = depth
    depth_limit = slots - 1 if max_depth is None else max_depth
    if runs_reference:
        arrays = reference.links_from_parents(parents, token_ids, num_nodes, prefix_lengths, depth_limit)
        return DraftTree(**arrays._asdict(), max_depth=depth_limit)
    with Transfer(placement, stream) as transfer:
        outputs = transfer.outputs(tree_shapes(batch, slots), TREE_DTYPES)
        transfer.launch(
            TREE_LINKS,
            batch,
            *(transfer.input(view) for view in views.values()),
            np.int32(depth_limit),
            *outputs,
            shared_bytes=4 * (3 * slots + FAULTS),
        )
        return DraftTree(**transfer.results(), max_depth=depth_limit)


def _launch_visibility(placement: Placement, mask: Any, num_nodes: Any, stream: StreamLike) -> Any:
    with Transfer(placement, stream) as transfer:
        parents = transfer.output("parents", mask.shape[:2], np.int32)
        transfer.launch(VISIBILITY_PARENTS, mask.shape[0], mask, transfer.input(num_nodes), parents)
        return parents
