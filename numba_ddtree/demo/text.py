"""Text and tokens of the demo model, and the prompts that it is given."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import BinaryIO

from numba_ddtree.demo.config import START_TOKEN
from numba_ddtree.errors import ArgumentError

PROMPTS = "demo_prompts.json"
STANDARD_INPUT = "-"
MOST_BYTES = 1 << 20
"""Of a file that is read: far more than a model takes, and an end to a device that has none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue.

    Attributes
    ----------
    name : str
        Where it comes from, fit for a terminal.
    text : bytes
    """

    name: str
    text: bytes

    @property
    def tokens(self) -> list[int]:
        """The start token and the bytes."""
        return [START_TOKEN, *self.text]


def shipped_prompts(count: int | None = None) -> list[Prompt]:
    """Return the first `count` prompts from modules that the model was not trained on; by default all."""
    stored = json.loads((files("numba_ddtree.data") / PROMPTS).read_text())
    prompts = [Prompt(entry["module"], entry["prompt"].encode()) for entry in stored]
    if count is not None and not 1 <= count <= len(prompts):
        raise ArgumentError("--prompts", count, f"a number from 1 to {len(prompts)}")
    return prompts[:count]


def given_prompts(texts: Sequence[str], paths: Sequence[str]) -> list[Prompt]:
    """Make prompts of texts and of the contents of files, as they are; a path of ``-`` is standard input.

    Raises
    ------
    ArgumentError
        An empty prompt, a file that is far too long, or standard input that is closed.
    OSError
        A file cannot be read.
    """
    prompts = [
        Prompt(f"--prompt {number}" if len(texts) > 1 else "--prompt", os.fsencode(text))
        for number, text in enumerate(texts, start=1)
    ]
    prompts += map(_read_prompt, paths)
    for prompt in prompts:
        if not prompt.text:
            raise ArgumentError(prompt.name, "an empty prompt", "text")
    return prompts


def _read_prompt(path: str) -> Prompt:
    if path != STANDARD_INPUT:
        with open(path, "rb") as file:
            return _read_open(readable(os.fsencode(path)), file)
    if sys.stdin is None:
        raise ArgumentError("standard input", "nothing: it is closed", "a prompt")
    return _read_open("standard input", sys.stdin.buffer)


def _read_open(name: str, file: BinaryIO) -> Prompt:
    text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ArgumentError(name, f"more than {MOST_BYTES} bytes", "a prompt that the model has room for")
    return Prompt(name, text)


def token_bytes(token: int) -> bytes:
    """Return the byte that a token stands for; none for the start token and the mask."""
    return bytes([token]) if token < START_TOKEN else b""


def readable(text: bytes) -> str:
    """Decode UTF-8 for a terminal: what is no character, or controls a terminal, is escaped."""
    decoded = text.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in decoded)
