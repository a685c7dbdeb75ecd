"""The golden trees, by the name under which the tests know them."""

from numba_ddtree.golden import GOLDEN_TREES_PATH, GoldenTree, load_golden_trees

__all__ = ["GOLDEN_TREES_PATH", "GoldenTree", "load_golden_trees"]
