"""Tree-masked MLA attention: every node attends to the prefix, to its ancestors and to itself."""

from numba_ddtree.tree_attention.plan import TreeAttention, tree_attention_workspace_bytes
from numba_ddtree.tree_attention.state_merge import merge_states
from numba_ddtree.tree_attention.tail import tree_tail_attention
from numba_ddtree.tree_attention.verify import verify_attention

__all__ = [
    "TreeAttention",
    "merge_states",
    "tree_attention_workspace_bytes",
    "tree_tail_attention",
    "verify_attention",
]
