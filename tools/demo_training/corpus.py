"""The text: source of Python's standard library as found on this machine."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.errors import ArgumentError

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}
_HELD_OUT_SHARE = 16
_TRIES = 1000  # for each prompt


@dataclass(frozen=True)
class Corpus:
    """Texts by the name of their module."""

    texts: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Length of all texts together."""
        return sum(map(len, self.texts.values()))

    def joined(self) -> NDArray[np.uint8]:
        """Return the texts one after the other, in order of their names."""
        return np.frombuffer(b"".join(self.texts[name] for name in sorted(self.texts)), np.uint8)


def standard_library() -> tuple[Corpus, Corpus]:
    """Return the modules to train on and the held-out modules.

    A module is held out if the SHA-256 of its name, such as ``json/decoder.py``, says so: about one
    in sixteen, the same ones on every machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = {}, {}
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(module.parts):
            chosen = held_out if is_held_out(module.as_posix()) else training
            chosen[module.as_posix()] = path.read_bytes()
    return Corpus(training), Corpus(held_out)


def is_held_out(module: str) -> bool:
    """Tell whether a module is kept from training."""
    return hashlib.sha256(module.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def line_starts(text: NDArray[np.uint8], room: int) -> NDArray[np.int64]:
    """Return where lines start that have `room` bytes from there to the end of the text."""
    starts = np.flatnonzero(text == ord("\n")) + 1
    return np.concatenate(([0], starts[starts + room <= len(text)])).astype(np.int64)


def sample_prompts(
    corpus: Corpus, count: int, length: int, continuation: int, seed: int, training: Corpus
) -> list[dict[str, str]]:
    """Choose different prompts of ASCII code, each with the text that really follows.

    A held-out module may be a copy of one that is not, as those of `encodings` are of one another: no text is
    chosen twice, nor one that stands in a module to train on.

    Parameters
    ----------
    corpus : Corpus
    count : int
    length, continuation : int
        Bytes of a prompt, and of what follows it.
    seed : int
    training : Corpus

    Raises
    ------
    ArgumentError
        There are hardly so many.
    """
    random = np.random.default_rng(seed)
    prompts: dict[bytes, dict[str, str]] = {}
    names = sorted(name for name, text in corpus.texts.items() if len(text) >= 4 * (length + continuation))
    for _ in range(_TRIES * count if names else 0):
        name = names[random.integers(len(names))]
        text = corpus.texts[name]
        starts = line_starts(np.frombuffer(text, np.uint8), length + continuation)
        start = int(random.choice(starts))
        chosen = text[start : start + length + continuation]
        prompt = chosen[:length]
        if b"def " not in prompt or not chosen.isascii() or prompt in prompts:
            continue
        if not any(prompt in other for other in training.texts.values()):
            parts = {"prompt": prompt.decode(), "continuation": chosen[length:].decode()}
            prompts[prompt] = {"module": name, **parts}
            if len(prompts) == count:
                return list(prompts.values())
    raise ArgumentError("corpus", f"{len(prompts)} different prompts", f"at least {count}")
