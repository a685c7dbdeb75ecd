"""Whether decoders wrote the same, and where they first did not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba_ddtree.demo.decoders import Decoded


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a text departs from the plain decoder's.

    Attributes
    ----------
    place : int
        Counted in new tokens.
    plain, other : int or None
        The tokens; None past the end of a text.
    margin : float or None
        How far the target's best token was above the second there, in logits, when it decoded token by
        token; see `Decoded.margins`. In float32 a margin of the size of rounding errors (about 1e-4) is a tie
        that another order of summation breaks the other way; a larger one is a fault, as is a text that ends
        elsewhere, which has none. In bfloat16 on a GPU any difference is a fault.
    """

    place: int
    plain: int | None
    other: int | None
    margin: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {"place": self.place, "plain": self.plain, "other": self.other, "margin": self.margin}

    def __str__(self) -> str:
        tokens = f"{self.plain} in plain decoding, {self.other} here"
        margin = "" if self.margin is None else f"; the target's margin was {self.margin:.2g}"
        return f"token {self.place} differs: {tokens}{margin}"


def first_difference(plain: Decoded, other: Decoded, prompt: int) -> Difference | None:
    """Compare one prompt's continuations by two decoders; None if they are the same."""
    expected, got = plain.tokens[prompt], other.tokens[prompt]
    if expected == got:
        return None
    shorter = min(len(expected), len(got))
    place = next((i for i in range(shorter) if expected[i] != got[i]), shorter)

    def token(tokens: list[int]) -> int | None:
        return tokens[place] if place < len(tokens) else None

    margins = plain.margins[prompt]
    return Difference(place, token(expected), token(got), margins[place] if place < len(margins) else None)
