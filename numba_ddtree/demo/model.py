"""The demo model in numpy's array language: a small MLA decoder and its block-diffusion drafter.

The target is what DeepSeek V3 and Kimi K2 are, small: Multi-head Latent Attention (DeepSeek-V2, arXiv
2405.04434, section 2.1) in absorbed form, with RMSNorm and SwiGLU. Its cache has one latent row of 512 + 64
numbers a token and layer, and all attention goes through `numba_ddtree.demo.latent_attention`, in float32 or
in bfloat16. The drafter is DFlash's: in one pass it predicts a block of positions, of which it sees the first
token and masks, from the target's hidden features of the text before.

Dimensions: B requests, N nodes, D hidden size, H heads, S rows of a cache, L drafted positions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from numba_ddtree import DraftTree
from numba_ddtree.demo.array_module import ArrayModule
from numba_ddtree.demo.config import MASK_TOKEN, ModelConfig
from numba_ddtree.demo.latent_attention import DTYPES, LatentCache, new_latent_cache
from numba_ddtree.errors import ArgumentError
from numba_ddtree.tree import Array

WEIGHTS = "demo_model.safetensors"


class DraftCache(NamedTuple):
    """The drafter's cache: keys and values made of the target's features."""

    keys: Array  # float32 [layers, B, H, S, head_dim]
    values: Array  # float32 [layers, B, H, S, head_dim]


@dataclass(frozen=True)
class DemoModel:
    """Target and drafter with their weights.

    Attributes
    ----------
    config : ModelConfig
    module : ArrayModule
        numpy or cupy: where the weights are, and everything is computed.
    weights : mapping of str to float32 array
        As `tools/train_demo_model.py` names them; products are ``x @ weight``.
    rotary : float32 [2, max_length + block_size, qk_rope_head_dim / 2]
        Cosines and sines of the target's rotary angles.
    draft_rotary : float32 [2, max_length + block_size, draft_head_dim / 2]
        The drafter's.
    dtype : {"float32", "bfloat16"}
        Of what the target's attention reads: queries and cache. All else is float32.
    """

    config: ModelConfig
    module: ArrayModule
    weights: Mapping[str, Array]
    rotary: Array
    draft_rotary: Array
    dtype: str = DTYPES[0]

    def new_cache(self, batch: int, rows: int, slots: int) -> LatentCache:
        """Return the target's cache for B texts of up to `rows` tokens, trees of up to `slots` included."""
        return new_latent_cache(self.config, self.module, self.dtype, batch, rows, slots)

    def new_draft_cache(self, batch: int, rows: int) -> DraftCache:
        """Return the drafter's cache for `batch` texts of up to `rows` tokens."""
        c, xp = self.config, self.module.xp
        shape = c.draft_layers, batch, c.draft_heads, rows, c.draft_head_dim
        return DraftCache(xp.zeros(shape, np.float32), xp.zeros(shape, np.float32))

    def forward(
        self, tree: DraftTree, prefix_lengths: Array, cache: LatentCache, max_prefix_length: int
    ) -> tuple[Array, Array]:
        """Run the target over the nodes of draft trees; write their rows to the cache.

        Parameters
        ----------
        tree : DraftTree
            Its tokens and positions are the target's input, [B, N].
        prefix_lengths : int32 [B]
            P, tokens in the cache; node i goes to row P + i.
        cache : LatentCache
        max_prefix_length : int
            A bound on the prefix lengths, known on the host.

        Returns
        -------
        logits : float32 [B, N, V]
            Of the token after each node.
        features : float32 [B, N, layers * D]
            The residual stream after every layer, which the drafter reads.
        """
        x = self._embed(tree.token_ids)  # [B, N, D]
        features = []
        for layer in range(self.config.num_layers):
            name = f"target.layers.{layer}"
            normed = self._norm(f"{name}.attention_norm", x)
            x = x + self._latent_attention(layer, normed, tree, prefix_lengths, cache, max_prefix_length)
            x = x + self._feed_forward(f"{name}.ffn", self._norm(f"{name}.ffn_norm", x))
            features.append(x)
        logits = self._linear("target.head", self._norm("target.norm", x))
        return logits, self.module.xp.concatenate(features, axis=-1)

    def read_features(self, features: Array, first: Array, cache: DraftCache) -> None:
        """Let the drafter see tokens: project their features to the keys and values of its layers.

        Parameters
        ----------
        features : float32 [B, T, layers * D]
        first : int32 [B]
            Position of each request's first token. Rows beyond what a request has are overwritten later,
            and no draft looks at them before.
        cache : DraftCache
        """
        xp = self.module.xp
        context = self._norm("drafter.context_norm", self._linear("drafter.fuse", features))  # [B, T, D]
        positions = first[:, None] + xp.arange(context.shape[1], dtype=np.int32)  # [B, T]
        rows = xp.arange(len(context))[:, None], slice(None), positions
        for layer in range(self.config.draft_layers):
            keys, values = self._draft_keys_values(layer, context, positions)  # [B, H, T, d]
            cache.keys[layer][rows] = keys.transpose(0, 2, 1, 3)  # indexed as [B, T, H, d]
            cache.values[layer][rows] = values.transpose(0, 2, 1, 3)

    def draft(self, last_tokens: Array, prefix_lengths: Array, cache: DraftCache, length: int) -> Array:
        """Predict the L positions after the last token, each by itself.

        Parameters
        ----------
        last_tokens : int32 [B]
            The token at position `prefix_lengths`, which the target has not seen yet.
        prefix_lengths : int32 [B]
            Tokens in the drafter's cache.
        cache : DraftCache
        length : int
            A bound on the prefix lengths, known on the host.

        Returns
        -------
        float32 [B, L, V]
        """
        xp, size = self.module.xp, self.config.block_size
        block = xp.full((len(last_tokens), size), MASK_TOKEN, np.int32)
        block[:, 0] = last_tokens
        positions = prefix_lengths[:, None] + xp.arange(size, dtype=np.int32)  # [B, block]
        is_text = xp.arange(length) < prefix_lengths[:, None]  # [B, S]
        sees = xp.concatenate((is_text, xp.ones(block.shape, bool)), axis=1)[
            :, None, None
        ]  # [B, 1, 1, S + block]
        x = self._embed(block)  # [B, block, D]
        for layer in range(self.config.draft_layers):
            context = cache.keys[layer][:, :, :length], cache.values[layer][:, :, :length]
            x = self._draft_layer(layer, x, positions, context, sees)
        return self._linear("target.head", self._norm("drafter.norm", x[:, 1:]))

    def _latent_attention(
        self,
        layer: int,
        x: Array,
        tree: DraftTree,
        prefix_lengths: Array,
        cache: LatentCache,
        max_prefix_length: int,
    ) -> Array:
        c = self.config
        name = f"target.layers.{layer}.attention"
        batch, nodes, _ = x.shape
        query = self._linear(f"{name}.query", x).reshape(
            batch, nodes, c.num_heads, -1
        )  # [B, N, H, nope + rope]
        q_pe = self._rotate(query[..., c.qk_nope_head_dim :], self.rotary[:, tree.positions][:, :, :, None])
        latent = self._linear(f"{name}.key_value", x)  # [B, N, kv_lora_rank + rope]
        ckv = self._norm(f"{name}.latent_norm", latent[..., : c.kv_lora_rank])
        kpe = self._rotate(latent[..., c.kv_lora_rank :], self.rotary[:, tree.positions])
        cache.write(layer, prefix_lengths, ckv, kpe)
        # The up-projection of the keys moves to the queries, and that of the values behind the sum.
        q_nope = self._by_head(query[..., : c.qk_nope_head_dim], f"{name}.key_up")  # [B, N, H, kv_lora_rank]
        mixed = cache.attend(
            layer, q_nope, q_pe, tree, c.sm_scale, prefix_lengths, max_prefix_length
        )  # [B, N, H, kv_lora_rank]
        values = self._by_head(mixed, f"{name}.value_up").reshape(batch, nodes, -1)  # [B, N, H * v_head_dim]
        return self._linear(f"{name}.out", values)

    def _draft_layer(
        self, layer: int, x: Array, positions: Array, context: tuple[Array, Array], sees: Array
    ) -> Array:
        """Let a block attend to the text and, both ways, to itself."""
        c, xp = self.config, self.module.xp
        name = f"drafter.layers.{layer}"
        normed = self._norm(f"{name}.attention_norm", x)
        query = self._rotate(self._draft_heads(f"{name}.query", normed), self._draft_angles(positions))
        own = self._draft_keys_values(layer, normed, positions)
        keys, values = (xp.concatenate(parts, axis=2) for parts in zip(context, own, strict=True))
        scores = xp.matmul(query, keys.swapaxes(2, 3)) * np.float32(
            c.draft_head_dim**-0.5
        )  # [B, H, block, S + block]
        scores = xp.where(sees, scores, np.float32(-np.inf))
        scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = xp.matmul(scores / scores.sum(axis=-1, keepdims=True), values)  # [B, H, block, d]
        joined = mixed.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        x = x + self._linear(f"{name}.out", joined)
        return x + self._feed_forward(f"{name}.ffn", self._norm(f"{name}.ffn_norm", x))

    def _draft_keys_values(self, layer: int, x: Array, positions: Array) -> tuple[Array, Array]:
        """Keys and values, [B, H, T, d], of [B, T, D]: of the target's features, or of the block itself."""
        name = f"drafter.layers.{layer}"
        keys = self._rotate(self._draft_heads(f"{name}.key", x), self._draft_angles(positions))
        return keys, self._draft_heads(f"{name}.value", x)

    def _draft_heads(self, name: str, x: Array) -> Array:
        heads = self._linear(name, x).reshape(*x.shape[:2], self.config.draft_heads, -1)
        return heads.transpose(0, 2, 1, 3)  # [B, H, T, d]

    def _draft_angles(self, positions: Array) -> Array:
        return self.draft_rotary[:, positions][:, :, None]  # [2, B, 1, T, d / 2]

    def _embed(self, token_ids: Array) -> Array:
        return self.weights["target.embedding"][token_ids]

    def _linear(self, name: str, x: Array) -> Array:
        weight = self.weights[f"{name}.weight"]
        rows = self.module.product(x.reshape(-1, x.shape[-1]), weight)
        return rows.reshape(*x.shape[:-1], weight.shape[1])

    def _by_head(self, x: Array, name: str) -> Array:
        """Multiply each head of [B, N, H, inputs] by its own matrix, [H, inputs, outputs]."""
        batch, nodes, heads, inputs = x.shape
        by_head = x.reshape(batch * nodes, heads, inputs).swapaxes(0, 1)  # [H, B * N, inputs]
        out = self.module.product(by_head, self.weights[name]).swapaxes(0, 1)  # [B * N, H, outputs]
        return self.module.xp.ascontiguousarray(out).reshape(batch, nodes, heads, -1)

    def _norm(self, name: str, x: Array) -> Array:
        """RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        scale = self.module.xp.sqrt(mean_square + np.float32(self.config.norm_epsilon))
        return x / scale * self.weights[f"{name}.weight"]

    def _feed_forward(self, name: str, x: Array) -> Array:
        """SwiGLU (Shazeer, arXiv 2002.05202)."""
        gate = self._linear(f"{name}.gate", x)
        silu = gate / (1 + self.module.xp.exp(-gate))
        return self._linear(f"{name}.down", silu * self._linear(f"{name}.up", x))

    def _rotate(self, x: Array, angles: Array) -> Array:
        """Rotary embedding (Su et al., arXiv 2104.09864) of pairs (i, i + width / 2)."""
        cos, sin = angles
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return self.module.xp.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)


def load_model(module: ArrayModule, dtype: str = DTYPES[0]) -> DemoModel:
    """Load the model that comes with the package, to where it is to run."""
    with as_file(files("numba_ddtree.data") / WEIGHTS) as path:
        return read_model(path, module, dtype)


def read_model(path: str | os.PathLike[str], module: ArrayModule, dtype: str = DTYPES[0]) -> DemoModel:
    """Read a model that `tools/train_demo_model.py` wrote: bfloat16 in the file, float32 in memory.

    Raises
    ------
    ArgumentError
        The file holds something else, or not all of it; a dtype that is none of `DTYPES`.
    OSError
        It cannot be read.
    """
    weights = {}
    try:
        with safe_open(path, framework="numpy") as stored:
            config = ModelConfig.from_json((stored.metadata() or {})["config"])
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                weights[name] = module.xp.asarray(stored.get_tensor(name).astype(np.float32))
    except (SafetensorError, KeyError) as error:
        expected = "a whole file that tools/train_demo_model.py wrote"
        raise ArgumentError(os.fspath(path), f"a damaged file ({error})", expected) from error
    return make_model(config, module, weights, dtype)


def make_model(
    config: ModelConfig, module: ArrayModule, weights: Mapping[str, Array], dtype: str = DTYPES[0]
) -> DemoModel:
    """Make a model of weights that are already where it is to run.

    In bfloat16 all products have one number of rows, so that what is rounded does not depend on how many
    nodes are scored at once: a last bit of float32 would often be one of bfloat16 too.
    """
    if dtype not in DTYPES:
        raise ArgumentError("dtype", repr(dtype), " or ".join(map(repr, DTYPES)))
    if dtype != DTYPES[0]:
        module = module.with_row_blocks()
    rotary, draft_rotary = (
        module.xp.asarray(rotary_table(config, width))
        for width in (config.qk_rope_head_dim, config.draft_head_dim)
    )
    module.synchronize()  # the model may run on another stream
    return DemoModel(config, module, weights, rotary, draft_rotary, dtype)


def rotary_table(config: ModelConfig, width: int) -> NDArray[np.float32]:
    """Cosines and sines of all positions, float32 [2, positions, width / 2], of angles in float64."""
    positions = np.arange(config.max_length + config.block_size)[:, None]
    angles = positions * config.rope_theta ** -(np.arange(0, width, 2) / width)
    return np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)


def chain_chunks(
    token_ids: NDArray[np.int32], lengths: NDArray[np.int32], size: int, module: ArrayModule
) -> Iterator[tuple[DraftTree, NDArray[np.int32]]]:
    """Cut texts into chains, trees without branches, as which the target reads prompts.

    Parameters
    ----------
    token_ids : int32 [B, T]
        Texts, padded at their ends.
    lengths : int32 [B]
    size : int
        Nodes a chain.
    module : ArrayModule

    Yields
    ------
    tree : DraftTree
        Requests whose text has ended have no nodes.
    first : int32 [B], on the host
        Position of each chain's first token.
    """
    batch, longest = token_ids.shape
    parents = np.broadcast_to(np.arange(-1, size - 1, dtype=np.int32), (batch, size))
    for start in range(0, longest, size):
        tokens = np.zeros((batch, size), np.int32)
        part = token_ids[:, start : start + size]
        tokens[:, : part.shape[1]] = part
        first = np.minimum(start, lengths).astype(np.int32)
        counts = np.clip(lengths - start, 0, size).astype(np.int32)
        put = module.xp.asarray
        tree = DraftTree.from_parents(
            put(np.ascontiguousarray(parents)),
            put(tokens),
            num_nodes=put(counts),
            prefix_lengths=put(first),
            max_depth=size - 1,
            backend=module.backend,
        )
        yield tree, first
