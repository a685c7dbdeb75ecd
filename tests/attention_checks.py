"""Tree attention in 16 bits over any cache: inputs, an exact judge, and decoding a node's sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from kernel_checks import Guarded, Library
from ml_dtypes import bfloat16
from numpy.typing import NDArray

import numba_ddtree
from inputs import link, make_parents
from numba_ddtree import DraftTree, TreeAttention, tree_attention_workspace_bytes
from numba_ddtree.refs import kv_compact as pages_reference
from numba_ddtree.refs import tree_attention as reference
from numba_ddtree.refs.tree_links import visibility_from_bits
from numba_ddtree.tree_attention.splits import SLOT_BYTES

LATENT, ROPE = 512, 64
FROBENIUS_TOLERANCE = 2.5e-3
"""Of outputs, relative.

Probabilities are rounded to bfloat16, by up to 2^-9 of each, before they are multiplied with values, and
outputs again; the root of the mean square of either is below 1.2e-3.
"""
COSINE_TOLERANCE = 5e-6  # above half the square of the relative error
LSE_TOLERANCE = 1e-5  # relative and absolute: scores are sums of 576 products in float32
NO_PAGE = 2147480000
PAGE_SIZES = (None, 1, 2, 3, 7, 16, 47, 64, 100, 128)  # None: contiguous
FORMS = ("block_table", "kv_indptr")
SCHEDULE_TAKES = (
    "ckv_cache",
    "kpe_cache",
    "tree",
    "prefix_lengths",
    "block_table",
    "kv_indptr",
    "kv_indices",
)


@dataclass(frozen=True, eq=False)
class CacheInputs:
    """Arguments of tree attention on the host; queries and cache are fused, of which calls take slices."""

    queries: NDArray[Any]  # [B, N, H, latent + rope]
    cache: NDArray[Any]  # [pages, page_size, latent + rope] or [B, S, latent + rope]
    tree: DraftTree
    prefix_lengths: NDArray[np.int32]
    paging: dict[str, NDArray[np.int32]]
    latent: int = LATENT
    sm_scale: float = (LATENT // 4 + ROPE) ** -0.5

    @property
    def flat_cache(self) -> NDArray[Any]:
        """All rows of the cache, [rows, latent + rope]."""
        return self.cache.reshape(-1, self.cache.shape[-1])

    @property
    def page_table(self) -> Any:
        """Rows of pages, as the reference takes them; None for a contiguous cache."""
        if "kv_indptr" in self.paging:
            return pages_reference.page_lists(**self.paging)
        return self.paging.get("block_table")

    @property
    def page_size(self) -> int | None:
        """Rows of a page; None for a contiguous cache."""
        return self.cache.shape[1] if self.paging else None

    def places(self, request: int) -> NDArray[np.int64]:
        """Where in `flat_cache` the keys of a request lie, int64 [P + n]."""
        keys = np.arange(int(self.prefix_lengths[request]) + int(self.tree.num_nodes[request]))
        blocks, rows = np.divmod(keys, self.cache.shape[1])
        table = self.page_table
        pages = np.full(len(keys), request) if table is None else table[request][blocks].astype(np.int64)
        return pages * self.cache.shape[1] + rows

    def path(self, request: int, node: int) -> list[int]:
        """Slots of a node and its ancestors, root first, by the parents."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.tree.parents[request, node])
        return path[::-1]


def make_inputs(
    rng: np.random.Generator,
    prefixes: Sequence[int],
    *,
    N: int,
    H: int,
    num_nodes: Sequence[int] | None = None,
    dtype: Any = bfloat16,
    page_size: int | None = None,
    form: str = "block_table",
    magnitude: float = 1.0,
    latent: int = LATENT,
    rope: int = ROPE,
) -> CacheInputs:
    """Make random inputs; cache rows that no node in use sees are NaN, and page numbers past them absurd."""
    B, width = len(prefixes), latent + rope
    lengths = np.array(prefixes, np.int32)
    counts = np.full(B, N, np.int32) if num_nodes is None else np.array(num_nodes, np.int32)
    kinds = rng.choice(["random", "recent", "chain", "star"], B)
    parents = np.stack([make_parents(rng, str(kind), N) for kind in kinds])
    tree = link(parents, rng.integers(0, 9, (B, N)).astype(np.int32), counts, lengths)
    queries = (magnitude * rng.standard_normal((B, N, H, width), np.float32)).astype(dtype)
    inputs = CacheInputs(queries, np.zeros((B, 0, width), dtype), tree, lengths, {}, latent)
    rows = [rng.standard_normal((p + n, width), np.float32) for p, n in zip(lengths, counts, strict=True)]
    return with_rows(rng, inputs, [each.astype(dtype) for each in rows], page_size, form)


def rising(rng: np.random.Generator, inputs: CacheInputs, bits: float) -> CacheInputs:
    """Let all scores rise with a key's position, so that weights do by 2^`bits` in 64 keys."""
    direction = rng.standard_normal(LATENT)
    direction *= 20 / np.linalg.norm(direction)
    queries, cache = inputs.queries.astype(np.float32) * 0.3, inputs.cache.astype(np.float32) * 0.5
    queries[..., :LATENT] += direction
    rows = cache.reshape(-1, cache.shape[-1])
    for request in range(len(inputs.prefix_lengths)):
        places = inputs.places(request)
        rises = (
            bits * np.arange(len(places)) / (64 * inputs.sm_scale * np.log2(np.e) * (direction @ direction))
        )
        rows[places, :LATENT] += rises[:, None] * direction
    dtype = inputs.queries.dtype
    return replace(inputs, queries=queries.astype(dtype), cache=cache.astype(dtype))


def chains(inputs: CacheInputs) -> CacheInputs:
    """Make every tree a chain, whose path crosses as many blocks as it can."""
    tree = inputs.tree
    parents = np.tile(np.arange(-1, tree.num_slots - 1, dtype=np.int32), (tree.batch_size, 1))
    return replace(inputs, tree=link(parents, tree.token_ids, tree.num_nodes, inputs.prefix_lengths))


def with_rows(
    rng: np.random.Generator,
    inputs: CacheInputs,
    rows: Sequence[NDArray[Any]],
    page_size: int | None,
    form: str = "block_table",
) -> CacheInputs:
    """Put each request's rows [P + n, latent + rope] into a cache: contiguous, or of pages in any order."""
    lengths = np.array([len(each) for each in rows])
    width, dtype = inputs.queries.shape[-1], inputs.queries.dtype
    if page_size is None:
        cache = np.full(
            (len(rows), int(lengths.max(initial=0)) + int(rng.integers(0, 70)), width), np.nan, dtype
        )
        for request, each in enumerate(rows):
            cache[request, : len(each)] = each
        return replace(inputs, cache=cache, paging={})
    needs = -(-lengths // page_size)
    cache = np.full((int(needs.sum()) + 2, page_size, width), np.nan, dtype)
    pages = rng.permutation(len(cache))[: needs.sum()].astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(needs)]).astype(np.int32)
    table = np.full((len(rows), int(needs.max(initial=0)) + int(rng.integers(1, 3))), NO_PAGE, np.int32)
    for request, each in enumerate(rows):
        own = pages[starts[request] : starts[request + 1]]
        table[request, : len(own)] = own
        for block, page in enumerate(own):
            part = each[block * page_size : (block + 1) * page_size]
            cache[page, : len(part)] = part
    paging = {"block_table": table}
    if form == "kv_indptr":
        # Pages beyond a request's need, as an engine that reserves some has them.
        spare = [np.append(table[b, : needs[b]], np.full(b % 2, NO_PAGE, np.int32)) for b in range(len(rows))]
        sizes = np.cumsum([0, *map(len, spare)])
        paging = {"kv_indptr": sizes.astype(np.int32), "kv_indices": np.concatenate(spare).astype(np.int32)}
    return replace(inputs, cache=cache, paging=paging)


def random_inputs(rng: np.random.Generator, requests: int) -> tuple[CacheInputs, dict[str, Any]]:
    """Draw inputs of any small shape and layout, and options of a call."""
    heads = int(rng.choice([1, 2, 3, 8, 16, 17, 64, 127, 128]))
    slots = int(rng.choice([n for n in (1, 2, 3, 5, 9, 17, 33, 65, 129) if n * heads <= 2200]))
    near_blocks = rng.choice([0, 1, 62, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257], requests)
    lengths = np.where(rng.random(requests) < 0.5, near_blocks, rng.integers(0, 400, requests))
    lengths[rng.integers(requests)] = rng.integers(0, 1500)
    inputs = make_inputs(
        rng,
        lengths.tolist(),
        N=slots,
        H=heads,
        num_nodes=rng.integers(0, slots + 1, requests).tolist() if rng.random() < 0.5 else None,
        dtype=bfloat16 if rng.random() < 0.7 else np.float16,
        page_size=PAGE_SIZES[rng.integers(len(PAGE_SIZES))],
        form=str(rng.choice(FORMS)),
    )
    options: dict[str, Any] = {
        "split_keys": [None, 64, 128, 320, "fastest"][rng.integers(5)],
        "is_fused": bool(rng.integers(2)),
        "out_dtype": np.float32 if rng.random() < 0.3 else None,
    }
    return inputs, options


def arguments_of(library: Library, inputs: CacheInputs, *, is_fused: bool = True) -> dict[str, Any]:
    """Hand inputs to a library, as slices of fused arrays or each by itself."""
    given: dict[str, Any] = {}
    for whole, latent_name, rope_name in (
        (inputs.queries, "q_nope", "q_pe"),
        (inputs.cache, "ckv_cache", "kpe_cache"),
    ):
        if is_fused:
            array = library.put(whole)
            given[latent_name], given[rope_name] = array[..., : inputs.latent], array[..., inputs.latent :]
        else:
            given[latent_name] = library.put(np.ascontiguousarray(whole[..., : inputs.latent]))
            given[rope_name] = library.put(np.ascontiguousarray(whole[..., inputs.latent :]))
    given |= library.put_all(prefix_lengths=inputs.prefix_lengths, **inputs.paging)
    return given | {"tree": library.put_tree(inputs.tree), "sm_scale": inputs.sm_scale}


def keys_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return what `TreeAttention.schedule` takes of a run's arguments."""
    return {name: given[name] for name in SCHEDULE_TAKES if name in given}


def longest_prefix(inputs: CacheInputs) -> int:
    """Return what to plan for."""
    return int(inputs.prefix_lengths.max(initial=0))


def compute(
    library: Library,
    inputs: CacheInputs,
    *,
    is_fused: bool = True,
    is_planned: bool = False,
    out_dtype: Any = None,
    function: Any = numba_ddtree.verify_attention,
    **options: Any,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Run into poisoned arrays, by a plan or at once; results on the host."""
    dtype = inputs.queries.dtype if out_dtype is None else np.dtype(out_dtype)
    shape = (*inputs.queries.shape[:3], inputs.latent)
    guards = {"out": Guarded(library, shape, dtype), "lse": Guarded(library, shape[:3], np.float32)}
    given = arguments_of(library, inputs, is_fused=is_fused)
    if library.takes_out:
        given |= {name: guard.array for name, guard in guards.items()}
    elif out_dtype is not None:
        options["out_dtype"] = out_dtype
    if is_planned:
        function = plan_for(library, inputs, out_dtype=dtype, **options).run
        options = {}
    elif function is numba_ddtree.verify_attention:
        options.setdefault("max_prefix_length", longest_prefix(inputs))
    out, lse = function(**given, **options)
    host = library.get(out), library.get(lse)
    for guard in guards.values():
        guard.check()
    assert host[0].dtype == dtype
    assert host[1].dtype == np.float32
    return host


def plan_for(library: Library, inputs: CacheInputs, **options: Any) -> TreeAttention:
    """Plan for inputs, on the device or, for a library on the host, where runs copy to it."""
    batch, slots, heads, _ = inputs.queries.shape
    planned: dict[str, Any] = {
        "max_prefix_length": longest_prefix(inputs),
        "max_depth": min(inputs.tree.max_depth, slots - 1),
        "dtype": inputs.queries.dtype,
        "page_size": inputs.page_size,
        "library": library.name if library.name in ("torch", "cupy") else None,
    }
    return TreeAttention.plan(batch, slots, heads, **(planned | options))


def exact(
    inputs: CacheInputs, *, sees_prefix: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute attention in float64, on a device of torch's where there is one."""
    try:
        import torch
    except ModuleNotFoundError:
        return exact_in_numpy(inputs, sees_prefix=sees_prefix)
    if not torch.cuda.is_available():
        return exact_in_numpy(inputs, sees_prefix=sees_prefix)
    return exact_in_torch(inputs, "cuda", sees_prefix=sees_prefix)


def exact_in_numpy(
    inputs: CacheInputs, *, sees_prefix: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute attention by the reference."""
    out, lse = reference.tree_attention(
        inputs.queries[..., : inputs.latent],
        inputs.queries[..., inputs.latent :],
        inputs.cache[..., : inputs.latent],
        inputs.cache[..., inputs.latent :],
        inputs.tree.ancestor_bits,
        inputs.tree.num_nodes,
        inputs.prefix_lengths,
        inputs.sm_scale,
        page_table=inputs.page_table,
        sees_prefix=sees_prefix,
    )
    return out, lse


def exact_in_torch(
    inputs: CacheInputs, device: str, *, sees_prefix: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute attention by torch in float64, request by request, with a mask."""
    import torch

    batch, slots, heads, _ = inputs.queries.shape
    out = np.zeros((batch, slots, heads, inputs.latent))
    lse = np.full((batch, slots, heads), -np.inf)
    visibility = visibility_from_bits(inputs.tree.ancestor_bits)
    for request in range(batch):
        count, prefix = int(inputs.tree.num_nodes[request]), int(inputs.prefix_lengths[request])
        if count == 0:
            continue
        places = inputs.places(request)[0 if sees_prefix else prefix :]
        rows = torch.from_numpy(inputs.flat_cache[places].astype(np.float32)).to(device).double()
        queries = torch.from_numpy(inputs.queries[request, :count].astype(np.float32)).to(device).double()
        own = torch.from_numpy(visibility[request, :count, :count]).to(device)
        sees = torch.ones((count, len(places)), dtype=torch.bool, device=device)
        sees[:, len(places) - count :] = own
        scores = (queries.reshape(count * heads, -1) @ rows.T).reshape(count, heads, -1) * inputs.sm_scale
        scores = scores.masked_fill(~sees[:, None], -torch.inf)
        log_sums = torch.logsumexp(scores, dim=-1)
        probs = torch.exp(scores - log_sums[..., None])
        means = probs.reshape(count * heads, -1) @ rows[:, : inputs.latent]
        out[request, :count] = means.reshape(count, heads, -1).cpu().numpy()
        lse[request, :count] = log_sums.cpu().numpy()
    return out, lse


def assert_accurate(
    inputs: CacheInputs,
    out: NDArray[Any],
    lse: NDArray[np.float32],
    *,
    sees_prefix: bool = True,
    lse_allowance: NDArray[np.float64] | None = None,
) -> None:
    """Check each request's results against float64, and that padding slots are exact.

    `lse_allowance` [B, N, H] is what log-sums may be off beside `LSE_TOLERANCE`.
    """
    want_out, want_lse = exact(inputs, sees_prefix=sees_prefix)
    padding = np.arange(inputs.tree.num_slots) >= inputs.tree.num_nodes[:, None]
    assert (out[padding] == 0).all()
    assert (lse[padding] == -np.inf).all()
    assert not np.signbit(out[out == 0]).any(), "a negative zero"
    allowed = LSE_TOLERANCE + LSE_TOLERANCE * np.abs(want_lse[~padding])
    if lse_allowance is not None:
        allowed += lse_allowance[~padding]
    errors = np.abs(lse[~padding] - want_lse[~padding])
    assert (errors <= allowed).all(), f"log-sums are off by up to {(errors / allowed).max()} of what they may"
    for request, count in enumerate(inputs.tree.num_nodes.tolist()):
        got, want = out[request, :count].astype(np.float64).ravel(), want_out[request, :count].ravel()
        if count == 0 or not want.any():
            assert not got.any()
            continue
        size = np.linalg.norm(want)
        context = f"request {request}: {count} nodes, a prefix of {inputs.prefix_lengths[request]}"
        error = np.linalg.norm(got - want) / size
        assert error <= FROBENIUS_TOLERANCE, f"{context}: relative error {error:.2e}"
        cosine = 1 - got @ want / (np.linalg.norm(got) * size)
        assert cosine <= COSINE_TOLERANCE, f"{context}: cosine difference {cosine:.2e}"


def decoding_alone(
    rng: np.random.Generator, inputs: CacheInputs, page_size: int | None
) -> tuple[CacheInputs, NDArray[np.int64], NDArray[np.int64]]:
    """Make inputs in which every node is a request of its own, with its path in the cache, in random order.

    With pages of 1, they are rows of the same cache; otherwise the rows are copied to another.

    Returns
    -------
    alone : CacheInputs
        Of N = 1.
    requests, nodes : int64 [B of alone]
        Where each is from.
    """
    counts = inputs.tree.num_nodes.tolist()
    pairs = np.array([(b, n) for b, count in enumerate(counts) for n in range(count)]).reshape(-1, 2)
    requests, nodes = rng.permutation(pairs).T
    places = [inputs.places(request) for request in range(len(counts))]
    keys = []
    for request, node in zip(requests.tolist(), nodes.tolist(), strict=True):
        prefix = int(inputs.prefix_lengths[request])
        rows = [*range(prefix), *(prefix + slot for slot in inputs.path(request, node))]
        keys.append(places[request][rows])
    lengths = np.array([len(each) - 1 for each in keys], np.int32)
    roots = np.full((len(keys), 1), -1, np.int32)
    alone = CacheInputs(
        inputs.queries[requests, nodes][:, None],
        inputs.flat_cache[:, None],
        link(roots, np.zeros_like(roots), None, lengths, 0),
        lengths,
        {"block_table": padded(keys)},
        inputs.latent,
        inputs.sm_scale,
    )
    if page_size != 1:
        alone = with_rows(
            rng, alone, [inputs.flat_cache[each] for each in keys], page_size, str(rng.choice(FORMS))
        )
    return alone, requests, nodes


def padded(keys: Sequence[NDArray[np.int64]]) -> NDArray[np.int32]:
    """Make a page table of lists of pages."""
    table = np.full((len(keys), max(map(len, keys)) + 1), NO_PAGE, np.int32)
    for row, each in zip(table, keys, strict=True):
        row[: len(each)] = each
    return table


def shuffled(
    rng: np.random.Generator, inputs: CacheInputs, page_size: int | None
) -> tuple[CacheInputs, NDArray[np.int64], NDArray[np.int64]]:
    """Put requests, and the slots of each tree, in other orders, and everything into another cache.

    Returns
    -------
    moved : CacheInputs
    requests : int64 [B]
        Which request each of the moved was.
    order : int64 [B, N]
        Which slot each of the moved was, by the moved requests.
    """
    batch, slots = inputs.tree.parents.shape
    requests = rng.permutation(batch)
    orders, parents, rows = [], [], []
    for request in requests.tolist():
        count, prefix = int(inputs.tree.num_nodes[request]), int(inputs.prefix_lengths[request])
        order = _any_order(rng, inputs.tree.parents[request], count)
        place = np.argsort(order)
        old = inputs.tree.parents[request, order]
        parents.append(np.where(old >= 0, place[old], -1))
        orders.append(order)
        keys = inputs.places(request)
        rows.append(inputs.flat_cache[np.concatenate([keys[:prefix], keys[prefix + order[:count]]])])
    order = np.array(orders).reshape(batch, slots)
    tree = link(
        np.array(parents, np.int32).reshape(batch, slots),
        np.take_along_axis(inputs.tree.token_ids[requests], order, axis=1),
        inputs.tree.num_nodes[requests],
        inputs.prefix_lengths[requests],
    )
    moved = replace(
        inputs,
        queries=np.take_along_axis(inputs.queries[requests], order[..., None, None], axis=1),
        tree=tree,
        prefix_lengths=inputs.prefix_lengths[requests],
    )
    return with_rows(rng, moved, rows, page_size, str(rng.choice(FORMS))), requests, order


def _any_order(rng: np.random.Generator, parents: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Draw an order of the slots in use in which parents come first; the others stay."""
    keys = np.zeros(len(parents))
    for slot in range(1, count):
        keys[slot] = keys[parents[slot]] + rng.uniform(0.1, 1)
    return np.append(np.argsort(keys[:count]), np.arange(count, len(parents)))


def same_bits(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.bool_]:
    """Say for each row along the last axis whether all its bits are equal."""
    bits = np.dtype(f"u{got.dtype.itemsize}")
    same: NDArray[np.bool_] = (got.view(bits) == want.view(bits)).all(axis=-1)
    return same


def assert_nodes_equal_decoding(
    library: Library,
    rng: np.random.Generator,
    inputs: CacheInputs,
    *,
    page_size: int | None,
    other_page_size: int | None,
    max_prefix_length: int,
    **options: Any,
) -> None:
    """Check that each node's results are, to the bit, those of decoding it alone, and of a moved tree."""
    options |= {"max_prefix_length": max_prefix_length}
    out, lse = compute(library, inputs, **options)
    alone, requests, nodes = decoding_alone(rng, inputs, page_size)
    alone_out, alone_lse = compute(library, alone, **options)
    moved, from_requests, order = shuffled(rng, inputs, other_page_size)
    moved_out, moved_lse = compute(library, moved, **options)
    for name, got, by_decoding, by_moving in (
        ("out", out, alone_out, moved_out),
        ("lse", lse[..., None], alone_lse[..., None], moved_lse[..., None]),
    ):
        is_same = same_bits(got[requests, nodes], by_decoding[:, 0]).all(axis=-1)
        wrong = [
            f"node {n} of request {b}, prefix {inputs.prefix_lengths[b]}"
            for b, n in zip(requests[~is_same], nodes[~is_same], strict=True)
        ]
        assert not wrong, f"{name} differs from decoding alone: {wrong[:8]}"
        rows = from_requests[:, None], order
        assert same_bits(by_moving, got[rows]).all(), f"{name} differs in a moved tree"


def workspace_limits(batch: int, slots: int, heads: int, longest: int, split_keys: int) -> list[int]:
    """Return workspace limits with which none, some and all of a batch's tiles have slots."""
    sizes: dict[str, Any] = {"max_prefix_length": longest, "max_depth": slots - 1, "split_keys": split_keys}
    tiles = batch * -(-slots * heads // 64)
    folding = tiles * SLOT_BYTES
    tile_bytes = (
        tree_attention_workspace_bytes(1, 1, 64, **sizes) - SLOT_BYTES
    )  # what a tile takes beside a worker's slot, and a little more
    return [folding + count * tile_bytes for count in (0, 1, 2, 5, tiles - 1, tiles)]
