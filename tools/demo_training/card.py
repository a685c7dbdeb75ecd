"""The model card: what was trained, on what, and how well it does."""

from __future__ import annotations

from dataclasses import dataclass

from numba_ddtree.demo.config import ModelConfig
from tools.demo_training.schedule import Schedule
from tools.demo_training.settings import Settings

_CARD = """\
# Demo model: Python source, byte by byte

A small decoder with Multi-head Latent Attention and a block-diffusion drafter for it, trained for
`python -m numba_ddtree.run` to have a real model to decode. Its vocabulary is the 256 bytes, a start token
and a mask. It writes text that looks like Python; it is of no use beyond that.

| | |
|---|---|
| data | source of Python {facts.python}'s standard library without test packages: {facts.modules} modules, {facts.data_bytes} bytes |
| held out | {facts.held_out_modules} modules, {facts.held_out_bytes} bytes, chosen by a hash of the module's name |
| target | {model.num_layers} layers, width {model.hidden_size}, {model.num_heads} heads of {model.qk_nope_head_dim} + {model.qk_rope_head_dim}, latent {model.kv_lora_rank}, SwiGLU {model.ffn_size}; {facts.target_parameters} parameters |
| drafter | {model.draft_layers} layers, {model.draft_heads} heads of {model.draft_head_dim}, SwiGLU {model.draft_ffn_size}, block of {model.block_size}; {facts.drafter_parameters} parameters, embedding and head are the target's |
| longest text | {model.max_length} tokens |
| weights | bfloat16, {facts.file_bytes} bytes |
| target's training | {settings.steps} steps of {settings.batch} windows, then {loop_steps} steps of unlikelihood (arXiv 1908.04319) on its own loops; {facts.target_seconds:.0f} s |
| drafter's training | {settings.draft_steps} steps of {settings.draft_batch} x {settings.draft_blocks} blocks, on {settings.generated} texts that the target wrote; {facts.drafter_seconds:.0f} s, writing them {facts.writing_seconds:.0f} s |
| device | {facts.device}, torch {facts.torch}, seed {facts.seed} |

| on held-out modules | |
|---|---|
| bits a byte | {facts.bits:.3f} (before the unlikelihood steps: {facts.bits_before_loops:.3f}) |
| repetition of greedy text ({settings.new_tokens} bytes) | {facts.repetition:.3f} (before: {facts.repetition_before_loops:.3f}; the modules' own text: {facts.repetition_real:.3f}) |
| mean accept length of a chain, greedy, estimated while training | {facts.chain:.2f} |

Repetition is the share of windows of 32 bytes that stood in the same text before.

The text is under the Python Software Foundation License Version 2, (c) Python Software Foundation;
`demo_prompts.json` has excerpts of held-out modules.

## Loss curves

Bits a byte, mean since the line before. The drafter's is a mean over the {model.draft_length} positions of a block.

| target, step | loss | loops, step | loss | drafter, step | loss |
|---|---|---|---|---|---|
{curves}
"""


@dataclass(frozen=True)
class Facts:
    """What a training run found out."""

    python: str
    torch: str
    device: str
    seed: int
    modules: int
    data_bytes: int
    held_out_modules: int
    held_out_bytes: int
    target_parameters: int
    drafter_parameters: int
    file_bytes: int
    target_seconds: float
    writing_seconds: float
    drafter_seconds: float
    bits: float
    bits_before_loops: float
    repetition: float
    repetition_before_loops: float
    repetition_real: float
    chain: float


def model_card(facts: Facts, model: ModelConfig, settings: Settings, schedules: list[Schedule]) -> str:
    """Return the card in Markdown; schedules are those of target, loops and drafter."""
    columns = [schedule.curve for schedule in schedules]
    rows = max(map(len, columns))
    curves = "\n".join(
        "| " + " | ".join(_cell(curve, row) for curve in columns) + " |" for row in range(rows)
    )
    loop_steps = settings.loop_rounds * settings.loop_steps
    return _CARD.format(facts=facts, model=model, settings=settings, loop_steps=loop_steps, curves=curves)


def _cell(curve: list[tuple[int, float]], row: int) -> str:
    if row >= len(curve):
        return " | "
    step, loss = curve[row]
    return f"{step} | {loss:.3f}"
