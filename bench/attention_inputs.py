"""Inputs of tree attention for benchmarks, in torch's bfloat16 tensors, and others' kernels on the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attention_shapes import LATENT, OFFSETS, PAGE_SIZE, ROPE, TREE_DEPTH, Shape
from numba_ddtree import DraftTree, TreeAttention

SM_SCALE = (128 + ROPE) ** -0.5
ROW = LATENT + ROPE


class Pool:
    """Memory of random numbers that inputs of all shapes share, since making them takes longer than a call.

    Parameters
    ----------
    torch : module
    device : str
    """

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device
        self._generator = torch.Generator(device).manual_seed(0)
        self._buffers: dict[str, Any] = {}

    def tensor(self, name: str, *shape: int) -> Any:
        """Return bfloat16 numbers of unit normal distribution; those of one name share their memory."""
        size = int(np.prod(shape))
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers.pop(name, None)
            buffer = self.torch.empty(size, dtype=self.torch.bfloat16, device=self.device)
            self._buffers[name] = buffer.normal_(generator=self._generator)
        return self._buffers[name][:size].view(shape)


@lru_cache(maxsize=8)
def tree_parents(nodes: int) -> NDArray[np.int32]:
    """Return the parents of a random tree, int32 [N], no deeper than `TREE_DEPTH`."""
    rng = np.random.default_rng(nodes)
    parents, depths = np.full(nodes, -1, np.int32), np.zeros(nodes, np.int32)
    for node in range(1, nodes):
        open_nodes = np.flatnonzero(depths[:node] < TREE_DEPTH)
        parents[node] = rng.choice(open_nodes[-32:])  # of late ones, so that the tree is deep
        depths[node] = depths[parents[node]] + 1
    return parents


def tree_visibility(nodes: int) -> NDArray[np.bool_]:
    """Return what each node of the random tree sees of it, bool [N, N]: itself and its ancestors."""
    visible = np.eye(nodes, dtype=bool)
    for node, parent in enumerate(tree_parents(nodes)[1:], start=1):
        visible[node] |= visible[parent]
    return visible


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one call attends with: a fused, paged cache whose pages lie anywhere.

    Attributes
    ----------
    torch : module
    shape : Shape
    offset : int
        Keys of prefix beside the shape's.
    queries : bfloat16 [B, N, H, 576]
    cache : bfloat16 [pages, 64, 576]
    block_table : int32 [B, pages a request]
    tree : DraftTree
    lengths : int32 [B]
        Of the prefixes.
    out, lse : bfloat16 [B, N, H, 512], float32 [B, N, H]
    """

    torch: Any
    shape: Shape
    offset: int
    queries: Any
    cache: Any
    block_table: Any
    tree: DraftTree
    lengths: Any
    out: Any
    lse: Any

    @classmethod
    def make(cls, pool: Pool, shape: Shape, offset: int = OFFSETS[0], backend: str | None = None) -> Inputs:
        """Make a shape's inputs of what is in the pool; `backend` is that of the tree's links."""
        torch, device = pool.torch, pool.device
        pages = shape.batch * shape.table_pages
        rows = shape.batch, shape.nodes, shape.heads
        parents = torch.from_numpy(np.tile(tree_parents(shape.nodes), (shape.batch, 1))).to(device)
        lengths = torch.full((shape.batch,), shape.prefix + offset, dtype=torch.int32, device=device)
        tree = DraftTree.from_parents(
            parents,
            torch.zeros_like(parents),
            prefix_lengths=lengths,
            max_depth=shape.max_depth,
            backend=backend,
        )
        generator = torch.Generator(device).manual_seed(pages)  # one table for all of a shape's inputs
        table = torch.randperm(pages, device=device, generator=generator).to(torch.int32)
        return cls(
            torch,
            shape,
            offset,
            pool.tensor("queries", *rows, ROW),
            pool.tensor("cache", pages, PAGE_SIZE, ROW),
            table.view(shape.batch, shape.table_pages),
            tree,
            lengths,
            torch.empty(*rows, LATENT, dtype=torch.bfloat16, device=device),
            torch.empty(*rows, device=device),
        )

    @property
    def keys(self) -> int:
        """P + N."""
        return self.shape.prefix + self.offset + self.shape.nodes

    @cached_property
    def contiguous_keys(self) -> Any:
        """The cache without pages, [B, P + N, 576]."""
        rows = self.cache[self.block_table.long()].view(self.shape.batch, -1, ROW)
        return rows[:, : self.keys].contiguous()

    @cached_property
    def hidden(self) -> Any:
        """Bool [N * H, N]: the tree's keys that a query row does not see."""
        rows = np.repeat(~tree_visibility(self.shape.nodes), self.shape.heads, axis=0)
        return self.torch.from_numpy(rows).to(self.cache.device)

    def planned(self, plan: TreeAttention) -> Callable[[], Any]:
        """Return a run of a plan on these, on torch's current stream; it returns the output and `lse`.

        Schedules it, as a model's first layer would for all: FlashMLA, too, finds its splits only once. The
        run of the plan that was made last is the one that the schedule is of.
        """
        queries = self.queries[..., :LATENT], self.queries[..., LATENT:]
        caches = self.cache[..., :LATENT], self.cache[..., LATENT:]
        where = {"prefix_lengths": self.lengths, "block_table": self.block_table}
        plan.schedule(*caches, self.tree, **where)
        return lambda: plan.run(
            *queries,
            *caches,
            self.tree,
            sm_scale=SM_SCALE,
            out=self.out,
            lse=self.lse,
            is_scheduled=True,
            **where,
        )

    def packed_matmuls(self) -> Callable[[], Any]:
        """Return what torch does by two batched products and a softmax, on a contiguous cache, with the mask.

        The call returns the output, [B, N * H, 512].
        """
        torch, hidden, keys = self.torch, self.hidden, self.contiguous_keys
        queries = self.queries.view(self.shape.batch, -1, ROW)
        nothing = queries.new_zeros(1, 1, 1)

        def call() -> Any:
            scores = torch.baddbmm(nothing, queries, keys.mT, beta=0, alpha=SM_SCALE)  # [B, N * H, P + N]
            scores[..., -self.shape.nodes :].masked_fill_(hidden, float("-inf"))
            return torch.bmm(torch.softmax(scores, -1), keys[..., :LATENT])

        return call

    def scaled_dot_product(self) -> Callable[[], Any]:
        """Return torch's own attention, of all heads as rows of one, on a contiguous cache, with the mask.

        The call returns the output, [B, 1, N * H, 512].
        """
        torch, keys = self.torch, self.contiguous_keys[:, None]
        queries = self.queries.view(self.shape.batch, 1, -1, ROW)
        mask = torch.ones(queries.shape[2], self.keys, dtype=torch.bool, device=keys.device)
        mask[:, -self.shape.nodes :] = ~self.hidden
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(queries, keys, keys[..., :LATENT], attn_mask=mask, scale=SM_SCALE)

    def flash_mla(self, module: Any) -> Callable[[], Any]:
        """Return FlashMLA on the same pages; it has no mask, and attends from all nodes to all keys."""
        return self._flash_mla(module, self.lengths + self.shape.nodes)

    def flash_mla_and_tail(self, module: Any) -> Callable[[], Any]:
        """Return the right answer by FlashMLA: torch attends to the tree's keys, with the mask, and merges.

        FlashMLA has the prefix alone, which must not be empty. Where the tree's keys lie is found out
        before. The call returns the output, [B, N, H, 512].
        """
        torch, hidden, rows = self.torch, self.hidden, self.tree_rows
        attend = self._flash_mla(module, self.lengths)
        flat = self.cache.view(-1, ROW)
        queries = self.queries.view(self.shape.batch, -1, ROW)
        nothing = queries.new_zeros(1, 1, 1)

        def call() -> Any:
            out, lse = attend()  # [B, N, H, 512], [B, H, N]
            lse = lse.mT[..., None]  # [B, N, H, 1]
            keys = flat[rows]  # [B, N, 576]
            scores = torch.baddbmm(nothing, queries, keys.mT, beta=0, alpha=SM_SCALE)  # [B, N * H, N]
            scores = scores.float().masked_fill_(hidden, float("-inf"))
            tail_lse = torch.logsumexp(scores, -1)
            tail = torch.bmm((scores - tail_lse[..., None]).exp().to(keys.dtype), keys[..., :LATENT])
            tail, tail_lse = tail.view_as(out), tail_lse.view_as(lse)
            both = torch.logaddexp(lse, tail_lse)
            return ((lse - both).exp() * out + (tail_lse - both).exp() * tail).to(out.dtype)

        return call

    def flash_attention_3(self, module: Any) -> Callable[[], Any]:
        """Return FlashAttention-3 on the same pages, rotary parts apart; like FlashMLA it has no mask.

        The call returns the output, [B, N, H, 512].
        """
        cache, ends = self.cache[:, :, None], self.lengths + self.shape.nodes
        return lambda: module.flash_attn_with_kvcache(
            q=self.queries[..., LATENT:],
            k_cache=cache[..., LATENT:],
            v_cache=cache[..., :LATENT],
            qv=self.queries[..., :LATENT],
            page_table=self.block_table,
            cache_seqlens=ends,
            softmax_scale=SM_SCALE,
            causal=False,
        )

    @cached_property
    def tree_rows(self) -> Any:
        """Int64 [B, N]: rows of all pages' that the tree's keys are in."""
        places = self.lengths[:, None] + self.torch.arange(self.shape.nodes, device=self.lengths.device)
        pages = self.block_table.long().gather(1, places // PAGE_SIZE)
        return pages * PAGE_SIZE + places % PAGE_SIZE

    def _flash_mla(self, module: Any, ends: Any) -> Callable[[], Any]:
        """Return FlashMLA on the same pages, of so many keys a request; it returns the output and `lse`."""
        metadata, _ = module.get_mla_metadata()
        cache = self.cache[:, :, None]
        return lambda: module.flash_mla_with_kvcache(
            self.queries,
            cache,
            self.block_table,
            ends,
            LATENT,
            metadata,
            None,
            softmax_scale=SM_SCALE,
            causal=False,
            use_legacy=True,
        )
