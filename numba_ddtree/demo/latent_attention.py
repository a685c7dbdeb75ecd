"""The target's latent cache, and its attention: in float32, or in bfloat16 by a `TreeAttention` plan.

In bfloat16 queries and cache rows are rounded, and outputs are float32. On a GPU the plan's kernel then gives
a node the bits that decoding its sequence alone gives; the plan's bound on prefixes, and with it the length
of splits, is the model's, the same for every decoder. The cache holds bits, which any array module can index.

Dimensions: B requests, N nodes, H heads, S rows of a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from numba_ddtree import DraftTree, TreeAttention, verify_attention
from numba_ddtree.demo.array_module import ArrayModule
from numba_ddtree.demo.config import ModelConfig
from numba_ddtree.tree import Array

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, eq=False)
class PlannedAttention:
    """Attention in bfloat16 that allocates nothing a call: a plan, and memory for its results.

    Attributes
    ----------
    plan : TreeAttention
    out : float32 [B * N * H * kv_lora_rank]
        For the most nodes; written anew by each call.
    lse : float32 [B * N * H]
    """

    plan: TreeAttention
    out: Array
    lse: Array


@dataclass(frozen=True, eq=False)
class LatentCache:
    """The target's cache: what its layers keep of each token, and how they attend to it.

    Attributes
    ----------
    ckv : float32, or the bits of bfloat16, uint16 [layers, B, S, kv_lora_rank]
    kpe : of the same dtype [layers, B, S, qk_rope_head_dim]
    module : ArrayModule
        Where they are.
    planned : PlannedAttention or None
        None for float32.
    """

    ckv: Array
    kpe: Array
    module: ArrayModule
    planned: PlannedAttention | None

    @property
    def arrays(self) -> list[Array]:
        """What is to be compacted."""
        return [self.ckv, self.kpe]

    def write(self, layer: int, prefix_lengths: Array, ckv: Array, kpe: Array) -> None:
        """Put the rows of N nodes, float32 [B, N, D], behind the prefixes of a layer."""
        xp = self.module.xp
        batch, nodes, _ = ckv.shape
        rows = xp.arange(batch)[:, None], prefix_lengths[:, None] + xp.arange(nodes, dtype=np.int32)
        if self.planned is not None:
            ckv, kpe = map(self.module.bfloat16_bits, (ckv, kpe))
        self.ckv[layer][rows], self.kpe[layer][rows] = ckv, kpe

    def attend(
        self,
        layer: int,
        q_nope: Array,
        q_pe: Array,
        tree: DraftTree,
        sm_scale: float,
        prefix_lengths: Array,
        max_prefix_length: int,
    ) -> Array:
        """Attend from each node to the prefix, its ancestors and itself.

        Parameters
        ----------
        layer : int
        q_nope : float32 [B, N, H, kv_lora_rank]
        q_pe : float32 [B, N, H, qk_rope_head_dim]
        tree : DraftTree
        sm_scale : float
        prefix_lengths : int32 [B]
        max_prefix_length : int
            A bound on them; in bfloat16 the model's own is used.

        Returns
        -------
        float32 [B, N, H, kv_lora_rank]
            In bfloat16, memory that the next call writes anew.
        """
        keys = self.ckv[layer], self.kpe[layer]
        q_pe = self.module.xp.ascontiguousarray(q_pe)
        if self.planned is None:
            mixed, _ = verify_attention(
                q_nope,
                q_pe,
                *keys,
                tree,
                sm_scale=sm_scale,
                prefix_lengths=prefix_lengths,
                max_prefix_length=max_prefix_length,
                backend=self.module.backend,
            )
            return mixed
        module, planned = self.module, self.planned
        rows = q_nope.shape[:3]
        count = int(np.prod(rows))
        mixed, _ = planned.plan.run(
            module.as_bfloat16(module.bfloat16_bits(q_nope)),
            module.as_bfloat16(module.bfloat16_bits(q_pe)),
            module.as_bfloat16(keys[0]),
            module.as_bfloat16(keys[1]),
            tree,
            sm_scale=sm_scale,
            prefix_lengths=prefix_lengths,
            out=planned.out[: count * q_nope.shape[3]].reshape(q_nope.shape),
            lse=planned.lse[:count].reshape(rows),
            stream=module.stream,
        )
        return mixed


def new_latent_cache(
    config: ModelConfig, module: ArrayModule, dtype: str, batch: int, rows: int, slots: int
) -> LatentCache:
    """Make a cache for B texts of up to `rows` tokens, with attention from up to `slots` nodes at once.

    Parameters
    ----------
    config : ModelConfig
    module : ArrayModule
    dtype : {"float32", "bfloat16"}
    batch, rows, slots : int

    Raises
    ------
    ArgumentError
        bfloat16 on a device that has no kernel for it.
    """
    planned = None if dtype == DTYPES[0] else _plan(config, module, batch, slots)
    stored = np.float32 if planned is None else np.uint16
    shape = config.num_layers, batch, rows
    return LatentCache(
        module.xp.zeros((*shape, config.kv_lora_rank), stored),
        module.xp.zeros((*shape, config.qk_rope_head_dim), stored),
        module,
        planned,
    )


def _plan(config: ModelConfig, module: ArrayModule, batch: int, slots: int) -> PlannedAttention:
    plan = TreeAttention.plan(
        batch,
        slots,
        config.num_heads,
        max_prefix_length=config.max_length,
        dtype=bfloat16,
        out_dtype=np.float32,
        device_id=module.device_id,
        backend=module.backend,
    )
    rows = batch * slots * config.num_heads
    return PlannedAttention(
        plan,
        module.xp.empty(rows * config.kv_lora_rank, np.float32),
        module.xp.empty(rows, np.float32),
    )
