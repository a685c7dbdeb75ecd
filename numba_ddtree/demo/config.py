"""Sizes and vocabulary of the demo model, as its weights' file records them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

START_TOKEN, MASK_TOKEN = 256, 257
"""Token ids after the 256 bytes: the first token of every text, and a position that is to be drafted."""

NUM_INPUT_TOKENS = 258
NUM_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of target and drafter, named as in DeepSeek V3 where it has them.

    Attributes
    ----------
    hidden_size, num_layers, num_heads, ffn_size : int
        Of the target.
    kv_lora_rank, qk_rope_head_dim : int
        Widths of a latent cache row's two parts.
    qk_nope_head_dim, v_head_dim : int
        A head's width before the up-projections are absorbed.
    draft_layers, draft_heads, draft_head_dim, draft_ffn_size : int
        Of the drafter, whose hidden size is the target's.
    block_size : int
        Positions that the drafter sees at once: the last token, and ``block_size - 1`` masks.
    max_length : int
        The most tokens of a text, with the start token.
    """

    hidden_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    ffn_size: int = 640
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 64
    v_head_dim: int = 64
    draft_layers: int = 2
    draft_heads: int = 4
    draft_head_dim: int = 64
    draft_ffn_size: int = 512
    block_size: int = 16
    max_length: int = 1024
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    @property
    def draft_length(self) -> int:
        """L, the positions that the drafter predicts in one pass."""
        return self.block_size - 1

    @property
    def sm_scale(self) -> float:
        """The factor of the target's attention scores."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    @property
    def feature_size(self) -> int:
        """Width of what the drafter reads of the target: the residual stream after every layer."""
        return self.num_layers * self.hidden_size

    def to_json(self) -> str:
        """Return the sizes as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Read what `to_json` wrote; fields of other versions are ignored."""
        stored: Mapping[str, float] = json.loads(text)
        return cls(**{f.name: stored[f.name] for f in fields(cls) if f.name in stored})  # type: ignore[arg-type]
