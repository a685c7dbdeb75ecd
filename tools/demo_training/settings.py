"""How long and on how much the demo model is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from numba_ddtree.demo.config import ModelConfig


@dataclass(frozen=True)
class Settings:
    """Sizes of one training run.

    Attributes
    ----------
    model : ModelConfig
    batch, steps, learning_rate
        Of the target, on windows of ``model.max_length`` tokens.
    loop_rounds, loop_steps, loop_learning_rate
        Of making the target less fond of loops: texts are written anew each round.
    generated, prompt_lengths, new_tokens
        Texts that the target writes for the drafter to learn from; each prompt length gets its share.
    judged
        Texts a length of the prompt, by which repetition and acceptance are measured.
    held_out_windows
        How much of the held-out text the bits a byte are measured on; None is all of it.
    draft_batch, draft_blocks, draft_steps, draft_learning_rate
        Of the drafter: texts a step, and blocks in each.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 64
    steps: int = 2500
    learning_rate: float = 3e-3
    generated: int = 16384
    loop_rounds: int = 8
    loop_steps: int = 100
    loop_learning_rate: float = 3e-4
    prompt_lengths: tuple[int, ...] = (64, 128, 256, 640)
    new_tokens: int = 384
    judged: int = 128
    held_out_windows: int | None = None
    draft_batch: int = 64
    draft_blocks: int = 48
    draft_steps: int = 4000
    draft_learning_rate: float = 2e-3


TINY = Settings(
    model=ModelConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        ffn_size=64,
        qk_nope_head_dim=16,
        v_head_dim=16,
        draft_layers=1,
        draft_heads=2,
        draft_head_dim=16,
        draft_ffn_size=64,
        max_length=256,
    ),
    batch=8,
    steps=30,
    learning_rate=1e-2,
    loop_rounds=2,
    loop_steps=4,
    loop_learning_rate=1e-3,
    generated=16,
    prompt_lengths=(32, 64),
    new_tokens=64,
    judged=4,
    held_out_windows=64,
    draft_batch=8,
    draft_blocks=8,
    draft_steps=30,
    draft_learning_rate=1e-2,
)
"""Trains on a CPU in seconds; what comes out speaks no Python, but has every part."""
