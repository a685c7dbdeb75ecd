"""Tree-masked MLA attention: every node attends to the prefix, to its ancestors and to itself."""

from numba_ddtree.tree_attention.verify import verify_attention

__all__ = ["verify_attention"]
