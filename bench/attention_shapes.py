"""Shapes of tree attention that are timed: a table of those that matter, and a grid of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

LATENT, ROPE = 512, 64
PAGE_SIZE = 64
TREE_DEPTH = 15
PLANNED_KEYS = 131072
"""Longest prefix that plans are made for, whatever is run: as an engine would, which does not know."""

OFFSETS = (0, 17, 63)
"""Added to a prefix, so that paths lie in one block of 64 keys, cross a block's end, or begin one."""

SPLITS: dict[str, int | str | None] = {"default": None, "fastest": "fastest", "one": 2**30}
"""How long splits are: as by default, as the device chooses, and without any."""

MOST_FLOPS = 1e13
"""Of the grid's shapes; 25 ms at 400 TFLOP/s."""


@dataclass(frozen=True)
class Shape:
    """One call.

    Attributes
    ----------
    batch, heads, nodes, prefix : int
        B, H, N and P.
    """

    batch: int
    heads: int
    nodes: int
    prefix: int

    def __str__(self) -> str:
        return f"b{self.batch}_h{self.heads}_n{self.nodes}_p{self.prefix}"

    @property
    def max_depth(self) -> int:
        """Of the tree."""
        return min(TREE_DEPTH, self.nodes - 1)

    @property
    def table_pages(self) -> int:
        """Pages a request, enough for all offsets."""
        return -(-(self.prefix + max(OFFSETS) + self.nodes) // PAGE_SIZE)

    @property
    def planned_prefix(self) -> int:
        """The bound on prefixes that the plan is made for."""
        return max(PLANNED_KEYS, self.prefix + max(OFFSETS))

    def flops(self, offset: int = 0) -> int:
        """Multiplications and additions of all queries with all keys, whether they are seen or not.

        So the peers can be counted likewise. A tree's own keys that are masked make little of it.
        """
        keys = self.prefix + offset + self.nodes
        return 2 * self.batch * self.nodes * self.heads * keys * (2 * LATENT + ROPE)

    @property
    def bytes(self) -> int:
        """Memory that queries, cache and two outputs take, in 16 bits a number."""
        rows = self.batch * self.nodes * self.heads
        keys = self.batch * self.table_pages * PAGE_SIZE
        return 2 * (rows * (LATENT + ROPE) + keys * (LATENT + ROPE) + 2 * rows * LATENT)

    def case(self, split: str) -> dict[str, int | str]:
        """Return what names its figures."""
        sizes: dict[str, int | str] = {"B": self.batch, "H": self.heads, "N": self.nodes}
        return sizes | {"prefix": self.prefix, "splits": split}


TABLE = (
    Shape(1, 64, 65, 2048),
    Shape(1, 64, 65, 8192),
    Shape(1, 64, 65, 32768),
    Shape(4, 64, 65, 8192),
    Shape(32, 64, 65, 2048),
    Shape(1, 64, 65, 131072),
    Shape(1, 8, 65, 32768),
    Shape(8, 8, 65, 8192),
    Shape(32, 64, 9, 8192),
    Shape(32, 64, 1, 8192),
    Shape(4, 64, 257, 8192),
    Shape(32, 16, 65, 2048),
)
"""Kimi K2's 64 heads, or its heads over 8 devices, at prefixes and batches that engines meet."""


def grid() -> Iterator[Shape]:
    """Yield every combination of sizes whose call is no longer than `MOST_FLOPS`."""
    for batch, nodes, heads, prefix in product(
        (1, 4, 32), (1, 17, 65, 257, 1025), (8, 16, 64, 128), (0, 2048, 8192, 32768, 131072)
    ):
        shape = Shape(batch, heads, nodes, prefix)
        if shape.flops() <= MOST_FLOPS:
            yield shape
