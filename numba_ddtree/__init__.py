"""Speculative decoding with Diffusion Draft Trees for models with Multi-head Latent Attention.

The public names load on first use, so that importing the package neither imports Numba nor touches
a device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba_ddtree.bundle import Bundle, read_bundle, write_bundle
    from numba_ddtree.device_group import DeviceGroup
    from numba_ddtree.draft_candidates import DraftCandidates, draft_topk, draft_topk_workspace_shape
    from numba_ddtree.draw import draw_tree
    from numba_ddtree.errors import ArgumentError, BackendError, BundleError, DDTreeError, LaneError
    from numba_ddtree.head_lanes import HeadLanes
    from numba_ddtree.kv_caches import KVCaches
    from numba_ddtree.kv_compact import compact_kv
    from numba_ddtree.launch import LaunchSequence, warmup
    from numba_ddtree.round import DDTreeRound
    from numba_ddtree.round_lanes import RoundLanes
    from numba_ddtree.round_state import RoundState
    from numba_ddtree.status import FinishReason, TreeStatus
    from numba_ddtree.token_choice import choose_tokens
    from numba_ddtree.tree import AcceptResult, DraftTree
    from numba_ddtree.tree_accept import accept_tree
    from numba_ddtree.tree_attention import (
        TreeAttention,
        merge_states,
        tree_attention_workspace_bytes,
        tree_tail_attention,
        verify_attention,
    )
    from numba_ddtree.tree_build import build_tree

__version__ = "0.1.0"

_HOMES = {
    "AcceptResult": "tree",
    "ArgumentError": "errors",
    "BackendError": "errors",
    "Bundle": "bundle",
    "BundleError": "errors",
    "DDTreeError": "errors",
    "DDTreeRound": "round",
    "DeviceGroup": "device_group",
    "DraftCandidates": "draft_candidates",
    "DraftTree": "tree",
    "FinishReason": "status",
    "HeadLanes": "head_lanes",
    "KVCaches": "kv_caches",
    "LaneError": "errors",
    "LaunchSequence": "launch",
    "RoundLanes": "round_lanes",
    "RoundState": "round_state",
    "TreeAttention": "tree_attention",
    "TreeStatus": "status",
    "accept_tree": "tree_accept",
    "build_tree": "tree_build",
    "choose_tokens": "token_choice",
    "compact_kv": "kv_compact",
    "draft_topk": "draft_candidates",
    "draft_topk_workspace_shape": "draft_candidates",
    "draw_tree": "draw",
    "merge_states": "tree_attention",
    "read_bundle": "bundle",
    "tree_attention_workspace_bytes": "tree_attention",
    "tree_tail_attention": "tree_attention",
    "verify_attention": "tree_attention",
    "warmup": "launch",
    "write_bundle": "bundle",
}

__all__ = [
    "AcceptResult",
    "ArgumentError",
    "BackendError",
    "Bundle",
    "BundleError",
    "DDTreeError",
    "DDTreeRound",
    "DeviceGroup",
    "DraftCandidates",
    "DraftTree",
    "FinishReason",
    "HeadLanes",
    "KVCaches",
    "LaneError",
    "LaunchSequence",
    "RoundLanes",
    "RoundState",
    "TreeAttention",
    "TreeStatus",
    "accept_tree",
    "build_tree",
    "choose_tokens",
    "compact_kv",
    "draft_topk",
    "draft_topk_workspace_shape",
    "draw_tree",
    "merge_states",
    "read_bundle",
    "tree_attention_workspace_bytes",
    "tree_tail_attention",
    "verify_attention",
    "warmup",
    "write_bundle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
