"""Target and drafter in torch, for training; `numba_ddtree/demo/model.py` runs what is trained here.

Parameters have the names under which the numpy model reads them, and products are ``x @ weight``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from numba_ddtree.demo.config import NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, ModelConfig


class Linear(nn.Module):
    """``x @ weight``, without a bias."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * (scale * inputs**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return x @ self.weight


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Over the last axis."""
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.epsilon)


class SwiGLU(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, width: int, inner: int, out_scale: float) -> None:
        super().__init__()
        self.gate = Linear(width, inner)
        self.up = Linear(width, inner)
        self.down = Linear(inner, width, out_scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def rotary_angles(positions: Tensor, width: int, theta: float) -> Tensor:
    """Return the angles of rotary embedding, [..., width / 2], for positions [...]."""
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    return positions[..., None].float() * theta**-exponents


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + width / 2) of the last axis."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class LatentCache(NamedTuple):
    """What a layer keeps of each token while text is generated."""

    latent: Tensor  # [B, S, kv_lora_rank]
    rotary: Tensor  # [B, S, qk_rope_head_dim]


class LatentAttention(nn.Module):
    """MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1), without a low rank for the queries."""

    def __init__(self, config: ModelConfig, out_scale: float) -> None:
        super().__init__()
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.config = config
        self.query = Linear(config.hidden_size, heads * (nope + rope))
        self.key_value = Linear(config.hidden_size, config.kv_lora_rank + rope)
        self.latent_norm = Norm(config.kv_lora_rank, config.norm_epsilon)
        scale = config.kv_lora_rank**-0.5
        self.key_up = nn.Parameter(torch.randn(heads, nope, config.kv_lora_rank) * scale)
        self.value_up = nn.Parameter(torch.randn(heads, config.kv_lora_rank, config.v_head_dim) * scale)
        self.out = Linear(heads * config.v_head_dim, config.hidden_size, out_scale)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = self.config
        widths = (c.qk_nope_head_dim, c.qk_rope_head_dim)
        q_nope, q_pe = self.query(x).unflatten(-1, (c.num_heads, -1)).split(widths, dim=-1)  # [B, T, H, .]
        latent, rotary = self.key_value(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        angles = rotary_angles(positions, c.qk_rope_head_dim, c.rope_theta)  # [T, rope / 2]
        return q_nope, rotate(q_pe, angles[:, None]), self.latent_norm(latent), rotate(rotary, angles)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention within [B, T, hidden], keys and values expanded."""
        q_nope, q_pe, latent, rotary = self._project(x, torch.arange(x.shape[1], device=x.device))
        key_nope = torch.einsum("btc,hnc->bhtn", latent, self.key_up.to(x.dtype))
        value = torch.einsum("btc,hcv->bhtv", latent, self.value_up.to(x.dtype))
        query = torch.cat((q_nope, q_pe), dim=-1).transpose(1, 2)  # [B, H, T, nope + rope]
        key = torch.cat((key_nope, rotary[:, None].expand(-1, key_nope.shape[1], -1, -1)), dim=-1)
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.config.sm_scale
        )
        return self.out(out.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, cache: LatentCache, start: int) -> Tensor:
        """Attend from [B, T, hidden] at `start` on, in absorbed form; write the new rows to the cache."""
        end = start + x.shape[1]
        positions = torch.arange(start, end, device=x.device)
        q_nope, q_pe, cache.latent[:, start:end], cache.rotary[:, start:end] = self._project(x, positions)
        latent, rotary = cache.latent[:, :end], cache.rotary[:, :end]
        absorbed = torch.einsum("bthn,hnc->bthc", q_nope, self.key_up.to(x.dtype))
        scores = torch.einsum("bthc,bsc->bths", absorbed, latent) + torch.einsum(
            "bthr,bsr->bths", q_pe, rotary
        )
        visible = torch.arange(end, device=x.device) <= positions[:, None]  # [T, S]
        scores = (scores.float() * self.config.sm_scale).masked_fill(~visible[:, None], -torch.inf)
        mixed = torch.einsum("bths,bsc->bthc", scores.softmax(-1).to(x.dtype), latent)
        return self.out(torch.einsum("bthc,hcv->bthv", mixed, self.value_up.to(x.dtype)).flatten(2))


class TargetLayer(nn.Module):
    """Attention and feed-forward part, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        out_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = Norm(config.hidden_size, config.norm_epsilon)
        self.attention = LatentAttention(config, out_scale)
        self.ffn_norm = Norm(config.hidden_size, config.norm_epsilon)
        self.ffn = SwiGLU(config.hidden_size, config.ffn_size, out_scale)

    def forward(self, x: Tensor, cache: LatentCache | None = None, start: int = 0) -> Tensor:
        """[B, T, hidden] to the same."""
        normed = self.attention_norm(x)
        x = x + (self.attention(normed) if cache is None else self.attention.step(normed, cache, start))
        return x + self.ffn(self.ffn_norm(x))


class Target(nn.Module):
    """The language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(NUM_INPUT_TOKENS, config.hidden_size))
        self.layers = nn.ModuleList(TargetLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_epsilon)
        self.head = Linear(config.hidden_size, NUM_OUTPUT_TOKENS)

    def forward(
        self, tokens: Tensor, caches: list[LatentCache] | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, 256] and features [B, T, feature_size] of tokens [B, T]."""
        x = functional.embedding(tokens, self.embedding)
        features = []
        for index, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[index], start)
            features.append(x)
        return self.head(self.norm(x)), torch.cat(features, dim=-1)

    def new_caches(self, batch: int, length: int, dtype: torch.dtype) -> list[LatentCache]:
        """Return an empty cache a layer."""
        c, device = self.config, self.embedding.device
        return [
            LatentCache(
                torch.zeros(batch, length, c.kv_lora_rank, dtype=dtype, device=device),
                torch.zeros(batch, length, c.qk_rope_head_dim, dtype=dtype, device=device),
            )
            for _ in range(c.num_layers)
        ]


class DraftLayer(nn.Module):
    """A layer of the drafter: its block attends to the target's features and to itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.draft_heads * config.draft_head_dim
        out_scale = (2 * config.draft_layers) ** -0.5
        self.config = config
        self.attention_norm = Norm(width, config.norm_epsilon)
        self.query = Linear(width, inner)
        self.key = Linear(width, inner)
        self.value = Linear(width, inner)
        self.out = Linear(inner, width, out_scale)
        self.ffn_norm = Norm(width, config.norm_epsilon)
        self.ffn = SwiGLU(width, config.draft_ffn_size, out_scale)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.draft_heads, -1)).transpose(1, 2)  # [B, H, T, D]

    def forward(
        self, x: Tensor, context: Tensor, angles: Tensor, context_angles: Tensor, mask: Tensor
    ) -> Tensor:
        """Blocks [B, Q, hidden] over context [B, T, hidden]; mask [B, 1, Q, T + Q], true where seen."""
        normed = self.attention_norm(x)
        query = rotate(self._heads(self.query(normed)), angles)
        keys = rotate(self._heads(self.key(context)), context_angles)
        block_keys = rotate(self._heads(self.key(normed)), angles)
        values = (self._heads(self.value(context)), self._heads(self.value(normed)))
        out = functional.scaled_dot_product_attention(
            query, torch.cat((keys, block_keys), dim=2), torch.cat(values, dim=2), attn_mask=mask
        )
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Drafter(nn.Module):
    """Block diffusion in one step (DFlash): a block of masks, given the target's features of the text."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fuse = Linear(config.feature_size, config.hidden_size)
        self.context_norm = Norm(config.hidden_size, config.norm_epsilon)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.draft_layers))
        self.norm = Norm(config.hidden_size, config.norm_epsilon)

    def forward(self, target: Target, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Return logits [B, A, block, 256] of blocks of input tokens.

        Parameters
        ----------
        target : Target
            Lends its embedding and its head.
        features : [B, T, feature_size]
        blocks : int64 [B, A, block]
        anchors : int64 [B, A]
            Position of each block's first token; the block sees the features before it.
        """
        batch, count, size = blocks.shape
        length, device = features.shape[1], features.device
        context = self.context_norm(self.fuse(features))
        offsets = torch.arange(size, device=device)
        positions = (anchors[..., None] + offsets).flatten(1)  # [B, Q]
        width, theta = self.config.draft_head_dim, self.config.rope_theta
        angles = rotary_angles(positions, width, theta)[:, None]  # [B, 1, Q, D / 2]
        context_positions = torch.arange(length, device=device)
        context_angles = rotary_angles(context_positions, width, theta)
        owner = torch.arange(count, device=device).repeat_interleave(size)  # [Q]
        before = context_positions < anchors.repeat_interleave(size, dim=1)[..., None]  # [B, Q, T]
        within = (owner[:, None] == owner).expand(batch, -1, -1)  # [B, Q, Q]
        mask = torch.cat((before, within), dim=-1)[:, None]
        x = functional.embedding(blocks.flatten(1), target.embedding)
        for layer in self.layers:
            x = layer(x, context, angles, context_angles, mask)
        return target.head(self.norm(x)).unflatten(1, (count, size))
