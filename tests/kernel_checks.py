"""Kernels against references, for whichever arrays they are given: on a device or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike, NDArray

import numba_ddtree
from inputs import AttentionInputs, CompactInputs, build, link
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.kv_compact import compact_kv
from numba_ddtree.refs import kv_compact as compact_reference
from numba_ddtree.refs import tree_accept as accept_reference
from numba_ddtree.refs import tree_attention as attention_reference
from numba_ddtree.tree import TREE_DTYPES, AcceptResult, DraftTree, tree_shapes

POISON = 0xA5
MARGIN = 64  # elements kept on each side of a guarded array


@dataclass(frozen=True)
class Library:
    """How to make and read one library's arrays."""

    name: str
    put: Callable[[NDArray[Any]], Any]
    get: Callable[[Any], NDArray[Any]]
    takes_out: bool = True

    @property
    def on_host(self) -> bool:
        """Whether values are checked before the launch."""
        return self.name == "numpy"

    def put_all(self, **arrays: NDArray[Any] | None) -> dict[str, Any]:
        """Copy the arrays that are given."""
        return {name: self.put(array) for name, array in arrays.items() if array is not None}

    def put_tree(self, tree: DraftTree) -> DraftTree:
        """Copy a host tree."""
        return DraftTree(**self.put_all(**tree.arrays()), max_depth=tree.max_depth)

    def get_tree(self, tree: DraftTree) -> DraftTree:
        """Copy a tree to the host."""
        return DraftTree(**{k: self.get(v) for k, v in tree.arrays().items()}, max_depth=tree.max_depth)


def await_copies() -> None:
    """Wait for copies of Numba's to the device, for the sake of streams that do not wait for the default one.

    The driver returns when it has read the host's memory, which may be before the device's has been written.
    """
    from numba_ddtree.cuda_target import SIMULATED, cuda

    if not SIMULATED:
        cuda.default_stream().synchronize()


def numpy_library() -> Library:
    """Host arrays, which the public functions copy to the device."""
    return Library("numpy", np.array, np.array)


def numba_library() -> Library:
    """Numba's own device arrays; in the simulator, its imitation of them.

    Arrays of bfloat16, which Numba's own cannot be, are torch's.
    """
    from numba_ddtree.cuda_target import SIMULATED, cuda

    def put(array: NDArray[Any]) -> Any:
        if not SIMULATED and array.dtype == bfloat16:
            pytest.importorskip("torch")
            return torch_put(array)
        copied = cuda.to_device(array)
        await_copies()
        return copied

    def get(array: Any) -> NDArray[Any]:
        return array.copy_to_host() if hasattr(array, "copy_to_host") else torch_get(array)

    return Library("numba", put, get)


# torch neither takes nor gives numpy's form of bfloat16; its bits it does.
def torch_put(array: NDArray[Any]) -> Any:
    """Copy a host array to a tensor on the device."""
    import torch

    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).cuda().view(torch.bfloat16)
    return torch.from_numpy(array.copy()).cuda()


def torch_get(tensor: Any) -> NDArray[Any]:
    """Copy a tensor to the host."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(bfloat16)
    return tensor.cpu().numpy()


class Guarded:
    """An array inside a larger one, all of it poisoned but for the content that is given."""

    def __init__(
        self,
        library: Library,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        content: NDArray[Any] | None = None,
    ) -> None:
        size = int(np.prod(shape))
        bytes_of_all = np.full((size + 2 * MARGIN) * np.dtype(dtype).itemsize, POISON, np.uint8)
        host = bytes_of_all.view(dtype)
        if content is not None:
            host[MARGIN : MARGIN + size] = content.reshape(-1)
        self._library = library
        self._buffer = library.put(host)
        self.array = self._buffer[MARGIN : MARGIN + size].reshape(shape)

    def check(self) -> None:
        """Check that nothing was written beside the array."""
        content = self._library.get(self._buffer)
        for side in (content[:MARGIN], content[-MARGIN:]):
            assert (np.ascontiguousarray(side).view(np.uint8) == POISON).all()


def guarded_tree(library: Library, B: int, N: int, max_depth: int) -> tuple[DraftTree | None, list[Guarded]]:
    """Make a poisoned tree to write into, or None for a library whose arrays cannot be written."""
    if not library.takes_out:
        return None, []
    guards = {name: Guarded(library, shape, TREE_DTYPES[name]) for name, shape in tree_shapes(B, N).items()}
    arrays = {name: guard.array for name, guard in guards.items()}
    return DraftTree(**arrays, max_depth=max_depth), list(guards.values())


def assert_same_arrays(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Check equality to the bit, NaN to NaN, and dtypes."""
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def assert_same_tree(got: DraftTree, want: DraftTree) -> None:
    """Check that every array of two host trees is the same."""
    assert got.max_depth == want.max_depth
    assert_same_arrays(got.arrays(), want.arrays())


def check_build(
    library: Library,
    log_probs: NDArray[np.float32],
    token_ids: NDArray[Any],
    budget: int | NDArray[np.int32],
    *,
    root_tokens: NDArray[np.int32] | None = None,
    prefix_lengths: NDArray[np.int32] | None = None,
    max_budget: int | None = None,
    **options: Any,
) -> DraftTree:
    """Build into poisoned arrays; the tree must be the reference's. Returns it, on the host."""
    if max_budget is None:
        max_budget = int(np.max(budget, initial=0))
    want = build(log_probs, token_ids, budget, root_tokens, prefix_lengths, max_budget)
    out, guards = guarded_tree(library, *want.parents.shape, want.max_depth)
    given = library.put_all(
        draft_log_probs=log_probs,
        draft_token_ids=token_ids,
        root_tokens=root_tokens,
        prefix_lengths=prefix_lengths,
    )
    budgets = library.put(budget) if isinstance(budget, np.ndarray) else budget
    tree = numba_ddtree.build_tree(budget=budgets, max_budget=max_budget, out=out, **given, **options)
    if out is not None:
        assert all(tree.arrays()[name] is array for name, array in out.arrays().items())
    got = library.get_tree(tree)
    for guard in guards:
        guard.check()
    assert_same_tree(got, want)
    assert_same_arrays(
        {name: library.get(array) for name, array in given.items() if name.startswith("draft")},
        {"draft_log_probs": log_probs, "draft_token_ids": token_ids},
    )
    return got


def check_accept(
    library: Library,
    tree: DraftTree,
    target_tokens: NDArray[Any],
    endings: dict[str, Any] | None = None,
    **options: Any,
) -> AcceptResult:
    """Accept into poisoned arrays; the walk must be the reference's.

    `tree` is a host tree, and `endings` holds numpy arrays, as `inputs.make_endings` makes them.
    """
    endings = endings or {}
    want = AcceptResult(
        *accept_reference.accept_tree(
            tree.token_ids, tree.parents, tree.num_nodes, target_tokens, tree.max_depth, **endings
        )
    )
    guards = {name: Guarded(library, array.shape, np.int32) for name, array in want.arrays().items()}
    out = AcceptResult(**{name: guard.array for name, guard in guards.items()}) if library.takes_out else None
    given = {k: library.put(v) if isinstance(v, np.ndarray) else v for k, v in endings.items()}
    result = numba_ddtree.accept_tree(
        library.put_tree(tree), library.put(target_tokens), out=out, **given, **options
    )
    got = AcceptResult(**{name: library.get(array) for name, array in result.arrays().items()})
    for guard in guards.values():
        guard.check()
    assert_same_arrays(got.arrays(), want.arrays())
    return got


def check_compaction(
    library: Library, given: CompactInputs, *, planned: bool = False, **options: Any
) -> list[NDArray[Any]]:
    """Compact caches between canaries, all in one call; every byte must be the reference's."""
    pages = given.arrays.get("block_table")
    if "kv_indptr" in given.arrays:
        pages = compact_reference.page_lists(given.arrays["kv_indptr"], given.arrays["kv_indices"])
    path = [given.arrays[name] for name in ("prefix_lengths", "accepted_indices", "accept_length")]
    want = [cache.copy() for cache in given.caches]
    for cache in want:
        for layer in cache if cache.ndim == 4 else [cache]:
            compact_reference.compact_kv(layer, *path, pages)
    guards = [Guarded(library, cache.shape, cache.dtype, cache) for cache in given.caches]
    caches = [guard.array for guard in guards]
    compact_kv(KVCaches.plan(caches) if planned else caches, **library.put_all(**given.arrays), **options)
    got = [library.get(cache) for cache in caches]
    for guard in guards:
        guard.check()
    for place, (result, wanted) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(
            result.view(np.uint8), wanted.view(np.uint8), err_msg=f"cache {place}", strict=True
        )
    return got


def check_links(
    library: Library,
    parents: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    *,
    num_nodes: NDArray[np.int32] | None = None,
    prefix_lengths: NDArray[np.int32] | None = None,
    max_depth: int | None = None,
    **options: Any,
) -> DraftTree:
    """Make a tree of parents; it must be the reference's, statuses included."""
    want = link(parents, token_ids, num_nodes, prefix_lengths, max_depth)
    if library.on_host and max_depth is None:
        want = replace(want, max_depth=int(want.depths.max(initial=0)))
    given = library.put_all(
        parents=parents, token_ids=token_ids, num_nodes=num_nodes, prefix_lengths=prefix_lengths
    )
    got = DraftTree.from_parents(**given, max_depth=max_depth, **options)
    host = library.get_tree(got)
    assert_same_tree(host, want)
    return host


def attend(library: Library, given: AttentionInputs, **options: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Run `verify_attention` into poisoned arrays; results on the host."""
    guards = {
        "out": Guarded(library, given.q_nope.shape, np.float32),
        "lse": Guarded(library, given.q_nope.shape[:3], np.float32),
    }
    arrays = library.put_all(
        q_nope=given.q_nope,
        q_pe=given.q_pe,
        ckv_cache=given.ckv_cache,
        kpe_cache=given.kpe_cache,
        prefix_lengths=given.prefix_lengths,
    )
    results = {name: guard.array for name, guard in guards.items()} if library.takes_out else {}
    arrays |= {"tree": library.put_tree(given.tree), "sm_scale": given.sm_scale}
    out, lse = numba_ddtree.verify_attention(**(arrays | results | options))
    host = library.get(out), library.get(lse)
    for guard in guards.values():
        guard.check()
    assert host[0].dtype == host[1].dtype == np.float32
    return host


def attention_in_float64(given: AttentionInputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the reference's output and log-sum-exp in double precision."""
    out, lse = attention_reference.tree_attention(
        given.q_nope,
        given.q_pe,
        given.ckv_cache,
        given.kpe_cache,
        given.tree.ancestor_bits,
        given.tree.num_nodes,
        given.prefix_lengths,
        given.sm_scale,
    )
    return out.astype(np.float64), lse.astype(np.float64)


def check_attention(
    library: Library, given: AttentionInputs, *, atol: float = 1e-5, **options: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check that output and log-sum-exp are the float64 reference's to `atol`; padding slots are exact."""
    out, lse = attend(library, given, **options)
    want_out, want_lse = attention_in_float64(given)
    padding = np.arange(given.tree.num_slots) >= given.tree.num_nodes[:, None]
    assert (out[padding] == 0).all()
    assert (lse[padding] == -np.inf).all()
    np.testing.assert_allclose(out, want_out, rtol=0, atol=atol)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=atol)
    return out, lse


def malformed_parents(rng: np.random.Generator, B: int, N: int) -> NDArray[np.int32]:
    """Parents that are no tree: cycles, self-loops, later slots, numbers far out of range."""
    parents = rng.integers(0, N, (B, N)).astype(np.int32)
    wild = np.array([-1, -2, N, N + 1, 2**31 - 1, -(2**31)], np.int32)
    return np.where(rng.random((B, N)) < 0.3, rng.choice(wild, (B, N)), parents).astype(np.int32)


def check_malformed_accept(library: Library, rng: np.random.Generator, B: int, N: int) -> None:
    """Check that a device tree that is none ends the walk within bounds and leaves its neighbours alone."""
    tokens = rng.integers(0, 3, (B, N)).astype(np.int32)
    good = np.tile(np.arange(-1, N - 1, dtype=np.int32), (B, 1))
    tree = link(good, tokens)
    is_bad = np.arange(B) % 2 == 1
    parents = np.where(is_bad[:, None], malformed_parents(rng, B, N), good).astype(np.int32)
    counts = np.where(is_bad, rng.choice([-5, 1, N, N + 7, 2**31 - 1], B), N).astype(np.int32)
    broken = replace(tree, parents=parents, num_nodes=counts)
    target = rng.integers(0, 3, (B, N)).astype(np.int32)
    got = numba_ddtree.accept_tree(library.put_tree(broken), library.put(target))
    indices, lengths = library.get(got.accepted_indices), library.get(got.accept_length)
    want = accept_reference.accept_tree(tokens, good, tree.num_nodes, target, tree.max_depth)
    np.testing.assert_array_equal(indices[~is_bad], want.accepted_indices[~is_bad])
    np.testing.assert_array_equal(library.get(got.bonus_token)[~is_bad], want.bonus_token[~is_bad])
    for request in np.flatnonzero(is_bad):
        path = indices[request, : lengths[request]]
        assert (np.diff(path) > 0).all()
        assert ((path >= 0) & (path < N)).all()
        assert (indices[request, lengths[request] :] == -1).all()


def bad_links(
    rng: np.random.Generator, N: int, *, B: int = 8
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Parents, counts and prefix lengths of which every odd request has one fault."""
    parents = np.tile(np.arange(-1, N - 1, dtype=np.int32), (B, 1))
    counts = np.full(B, N, np.int32)
    prefixes = rng.integers(0, 50, B).astype(np.int32)
    faults: list[Callable[[int], None]] = [
        lambda b: parents.__setitem__((b, N - 1), N - 1),
        lambda b: parents.__setitem__((b, 0), 0),
        lambda b: counts.__setitem__(b, N + 1),
        lambda b: prefixes.__setitem__(b, -1),
        lambda b: parents.__setitem__((b, 1), -1),
        lambda b: counts.__setitem__(b, -1),
        lambda b: parents.__setitem__(b, malformed_parents(rng, 1, N)[0]),
    ]
    for request in range(1, B, 2):
        faults[request // 2 % len(faults)](request)
    return parents, counts, prefixes


def bad_masks(rng: np.random.Generator, N: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks, the first of a chain and the rest with one wrong element each, and which are wrong."""
    good = np.tril(np.ones((N, N), bool))
    wrong = [good]
    for row, column in ((N - 1, 0), (N - 1, N - 1), (0, 0), (0, N - 1), (1, N - 1)):
        mask = good.copy()
        mask[row, column] ^= True
        wrong.append(mask)
    noise = rng.random((N, N)) < 0.5
    noise[1, 0] = noise[0, 1] = True
    wrong.append(noise)
    return np.stack(wrong), np.arange(len(wrong)) > 0


def check_bad_masks(library: Library, rng: np.random.Generator, N: int) -> None:
    """Check that masks of no tree end in the root alone, status INVALID, and only they."""
    masks, is_bad = bad_masks(rng, N)
    tokens = rng.integers(0, 9, masks.shape[:2]).astype(np.int32)
    got = library.get_tree(DraftTree.from_visibility(library.put(masks), library.put(tokens)))
    parents = np.tile(np.arange(-1, N - 1, dtype=np.int32), (len(masks), 1))
    parents[is_bad, 0] = -2
    assert_same_tree(got, link(parents, tokens))


def bad_draft(
    rng: np.random.Generator, L: int, K: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Log-probs, token ids, budgets and prefix lengths of which every odd request has one fault."""
    B = 20
    log_probs = -np.sort(rng.exponential(size=(B, L, K)), axis=-1).astype(np.float32)
    token_ids = rng.integers(0, 1000, (B, L, K))
    budgets = np.full(B, 5, np.int32)
    prefixes = rng.integers(0, 50, B).astype(np.int32)
    log_probs[1, L - 1, K - 1] = np.nan
    log_probs[3, 0, 0] = np.nan
    log_probs[5, L - 1, :2] = log_probs[5, L - 1, 1::-1]
    log_probs[7, 0, 0] = np.inf
    log_probs[9, 0] = -np.inf
    token_ids[11] = -1
    token_ids[13] = 2**31
    budgets[15] = -1
    budgets[17] = 6
    prefixes[19] = -1
    return log_probs, token_ids, budgets, prefixes
