"""The model card: what was trained, on what, and how well it does."""

from __future__ import annotations

from dataclasses import dataclass

from numba_ddtree.demo.config import ModelConfig
from tools.demo_training.schedule import Schedule
from tools.demo_training.settings import Settings

_HEAD = """\
# Demo model: Python source, byte by byte

A small decoder with Multi-head Latent Attention and a block-diffusion drafter for it, trained for
`python -m numba_ddtree.run` to have a real model to decode. Its vocabulary is the 256 bytes, a start token
and a mask. It writes text that looks like Python; it is of no use beyond that.
"""
_LICENSE = """\
Repetition is the share of windows of 32 bytes that stood in the same text before.

The text is under the Python Software Foundation License Version 2, (c) Python Software Foundation;
`demo_prompts.json` has excerpts of held-out modules.
"""
_CURVES = """\
## Loss curves

Bits a byte, mean since the line before. The drafter's is a mean over the positions of a block, weighted as in
training.

| target, step | loss | loops, step | loss | drafter, step | loss |
|---|---|---|---|---|---|
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
    parts = [
        _HEAD,
        _table("of the model", _description(facts, model, settings)),
        _table("on held-out modules", _measurements(facts, settings)),
        _LICENSE,
        _CURVES + _curves([schedule.curve for schedule in schedules]),
    ]
    return "\n".join(parts)


def _description(facts: Facts, model: ModelConfig, settings: Settings) -> dict[str, str]:
    heads = f"{model.num_heads} heads of {model.qk_nope_head_dim} + {model.qk_rope_head_dim}"
    target = f"{model.num_layers} layers, width {model.hidden_size}, {heads}, latent {model.kv_lora_rank}"
    drafter = f"{model.draft_layers} layers, {model.draft_heads} heads of {model.draft_head_dim}"
    loops = f"{settings.loop_rounds * settings.loop_steps} steps of unlikelihood (arXiv 1908.04319)"
    blocks = f"{settings.draft_batch} x {settings.draft_blocks} blocks"
    written = f"{settings.generated} texts that the target wrote in {facts.writing_seconds:.0f} s"
    return {
        "data": f"source of Python {facts.python}'s standard library without test packages: "
        f"{facts.modules} modules, {facts.data_bytes} bytes",
        "held out": f"{facts.held_out_modules} modules, {facts.held_out_bytes} bytes, "
        "chosen by a hash of the module's name",
        "target": f"{target}, SwiGLU {model.ffn_size}; {facts.target_parameters} parameters",
        "drafter": f"{drafter}, SwiGLU {model.draft_ffn_size}, block of {model.block_size}; "
        f"{facts.drafter_parameters} parameters, embedding and head are the target's",
        "longest text": f"{model.max_length} tokens",
        "weights": f"bfloat16, {facts.file_bytes} bytes",
        "target's training": f"{settings.steps} steps of {settings.batch} windows, then {loops} on its own "
        f"loops; {facts.target_seconds:.0f} s",
        "drafter's training": f"{settings.draft_steps} steps of {blocks}, on {written}; "
        f"{facts.drafter_seconds:.0f} s",
        "device": f"{facts.device}, torch {facts.torch}, seed {facts.seed}",
    }


def _measurements(facts: Facts, settings: Settings) -> dict[str, str]:
    return {
        "bits a byte": f"{facts.bits:.3f} (before the unlikelihood steps: {facts.bits_before_loops:.3f})",
        f"repetition of greedy text ({settings.new_tokens} bytes)": f"{facts.repetition:.3f} (before: "
        f"{facts.repetition_before_loops:.3f}; the modules' own text: {facts.repetition_real:.3f})",
        "mean accept length of a chain, greedy, estimated while training": f"{facts.chain:.2f}",
    }


def _table(heading: str, rows: dict[str, str]) -> str:
    lines = [f"| {heading} | |", "|---|---|", *(f"| {label} | {text} |" for label, text in rows.items())]
    return "\n".join(lines) + "\n"


def _curves(columns: list[list[tuple[int, float]]]) -> str:
    rows = range(max(map(len, columns)))
    return "".join(f"| {' | '.join(_cell(curve, row) for curve in columns)} |\n" for row in rows)


def _cell(curve: list[tuple[int, float]], row: int) -> str:
    if row >= len(curve):
        return " | "
    step, loss = curve[row]
    return f"{step} | {loss:.3f}"
