"""Rounds in KDTR bundles: the inputs of one round and, if known, what should come of them.

=======================  ==========================  ==================================================
tensor                   dtype, shape                meaning
=======================  ==========================  ==================================================
``draft_log_probs``      float32 [B, L, K]           as for `numba_ddtree.build_tree`
``draft_token_ids``      int32 or int64 [B, L, K]
``budgets``              int32 [B]
``root_tokens``          int32 [B]
``prefix_lengths``       int32 [B]                   for attention too
``target_tokens``        int32 or int64 [B, N]       as for `numba_ddtree.accept_tree`; gives N
``q_nope``               float32 [B, N, H, D_CKV]    as for `numba_ddtree.verify_attention`
``q_pe``                 float32 [B, N, H, D_KPE]
``ckv_cache``            float32 [B, S, D_CKV]
``kpe_cache``            float32 [B, S, D_KPE]
``sm_scale``             float64 []
``stop_token_ids``       int32 [S]                   as for `numba_ddtree.accept_tree`; may be missing
``remaining``            int32 [B]                   likewise
``expected/<array>``                                 what the round should give: the arrays of
                                                     `DraftTree`, then ``out`` and ``lse`` (float32 or
                                                     float64), then the arrays of `AcceptResult`
=======================  ==========================  ==================================================

The five tensors of attention may be missing together; the round is then building and accepting. So may the
expected arrays of a stage (tree, attention, accept), and among those of accept ``tokens`` and
``finish_reason``, which older bundles lack. Tensors of other names are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.bundle import read_bundle
from numba_ddtree.cases import AttentionInputs, DraftInputs, RoundInputs, reference_tree
from numba_ddtree.errors import BundleError
from numba_ddtree.refs.tree_accept import accept_tree
from numba_ddtree.refs.tree_attention import tree_attention
from numba_ddtree.refs.tree_links import TreeArrays

__all__ = [
    "STAGES",
    "RoundBundle",
    "read_round",
    "reference_attention",
    "reference_results",
    "reference_walk",
    "round_tensors",
]

_EXPECTED = "expected/"
_FLOATS = ("float32", "float64")
_TOKENS = ("int32", "int64")

Layout: TypeAlias = Mapping[str, tuple[tuple[str, ...], str]]
"""Dtypes and dimensions of tensors by name."""

_DRAFT_LAYOUT: Layout = {
    "draft_log_probs": (("float32",), "B L K"),
    "draft_token_ids": (_TOKENS, "B L K"),
    "budgets": (("int32",), "B"),
    "root_tokens": (("int32",), "B"),
    "prefix_lengths": (("int32",), "B"),
    "target_tokens": (_TOKENS, "B N"),
}
_ATTENTION_LAYOUT: Layout = {
    "q_nope": (("float32",), "B N H D_CKV"),
    "q_pe": (("float32",), "B N H D_KPE"),
    "ckv_cache": (("float32",), "B S D_CKV"),
    "kpe_cache": (("float32",), "B S D_KPE"),
    "sm_scale": (("float64",), ""),
}
_ENDINGS_LAYOUT: Layout = {"stop_token_ids": (("int32",), "S"), "remaining": (("int32",), "B")}
_TREE_LAYOUT: Layout = dict.fromkeys(TreeArrays._fields, (("int32",), "B N")) | {
    "ancestor_bits": (("uint32",), "B N words"),
    "num_nodes": (("int32",), "B"),
    "status": (("int32",), "B"),
}
_ACCEPT_LAYOUT: Layout = {
    "accepted_indices": (("int32",), "B L+1"),
    "accept_length": (("int32",), "B"),
    "bonus_token": (("int32",), "B"),
    "tokens": (("int32",), "B L+1"),
    "finish_reason": (("int32",), "B"),
}
_MAY_BE_MISSING = ("tokens", "finish_reason")
STAGES: dict[str, Layout] = {
    "build_tree": _TREE_LAYOUT,
    "verify_attention": {"out": (_FLOATS, "B N H D_CKV"), "lse": (_FLOATS, "B N H")},
    "accept_tree": _ACCEPT_LAYOUT,
}
"""The arrays that each stage of a round gives: their dtypes and dimensions, by name."""


@dataclass(frozen=True, eq=False)
class RoundBundle:
    """A round from a file.

    Attributes
    ----------
    inputs : RoundInputs
    expected : dict of str to dict of str to numpy.ndarray
        For each stage of `STAGES` whose results the file holds, its arrays by name.
    """

    inputs: RoundInputs
    expected: dict[str, dict[str, NDArray[Any]]]


def read_round(path: str | os.PathLike[str]) -> RoundBundle:
    """Read and check a round.

    Parameters
    ----------
    path : path-like
        A KDTR file.

    Returns
    -------
    RoundBundle
        Shapes and dtypes fit each other; the values are checked by whoever uses them.

    Raises
    ------
    BundleError
        Not a KDTR file, or a tensor is missing, of another dtype or shape.
    OSError
        The file cannot be read.
    """
    tensors = read_bundle(path).tensors
    try:
        return _checked_round(tensors)
    except BundleError as error:
        raise BundleError(f"{os.fspath(path)}: {error}") from None


def round_tensors(inputs: RoundInputs, expected: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Name a round's arrays as a bundle holds them.

    Parameters
    ----------
    inputs : RoundInputs
    expected : mapping
        As in `RoundBundle`.

    Returns
    -------
    dict of str to array
        The tensors for `numba_ddtree.write_bundle`.
    """
    tensors = {name: getattr(inputs.draft, name) for name in _DRAFT_LAYOUT if name != "target_tokens"}
    tensors["target_tokens"] = inputs.target_tokens
    if inputs.attention is not None:
        tensors |= {field.name: getattr(inputs.attention, field.name) for field in fields(AttentionInputs)}
    tensors |= inputs.endings
    for arrays in expected.values():
        tensors |= {f"{_EXPECTED}{name}": array for name, array in arrays.items()}
    return tensors


def reference_results(inputs: RoundInputs) -> dict[str, dict[str, NDArray[Any]]]:
    """Run a round by the numpy references, attention in float64.

    Parameters
    ----------
    inputs : RoundInputs

    Returns
    -------
    dict of str to dict of str to numpy.ndarray
        The arrays of each stage by name.
    """
    tree = reference_tree(inputs.draft)._asdict()
    results: dict[str, dict[str, NDArray[Any]]] = {"build_tree": tree}
    if inputs.attention is not None:
        results["verify_attention"] = reference_attention(inputs, tree)
    return results | {"accept_tree": reference_walk(inputs, tree)}


def reference_attention(
    inputs: RoundInputs, tree: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[np.float64]]:
    """Return ``out`` and ``lse`` by the numpy reference in float64.

    Parameters
    ----------
    inputs : RoundInputs
        A round with attention.
    tree : mapping of str to numpy.ndarray
        The arrays of `DraftTree`.
    """
    attention = inputs.required_attention
    out, lse = tree_attention(
        attention.q_nope,
        attention.q_pe,
        attention.ckv_cache,
        attention.kpe_cache,
        tree["ancestor_bits"],
        tree["num_nodes"],
        inputs.draft.prefix_lengths,
        attention.sm_scale,
        np.float64,
    )
    return {"out": out, "lse": lse}


def reference_walk(inputs: RoundInputs, tree: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of `AcceptResult` by the numpy reference, for the arrays of a tree."""
    arrays = (tree[name] for name in ("token_ids", "parents", "num_nodes"))
    walk: dict[str, NDArray[Any]] = accept_tree(
        *arrays, inputs.target_tokens, inputs.draft.max_depth, **inputs.endings
    )._asdict()
    return walk


def _checked_round(tensors: Mapping[str, NDArray[Any]]) -> RoundBundle:
    sizes: dict[str, int] = {}
    _check_layout(tensors, _DRAFT_LAYOUT, sizes)
    attention = None
    if any(name in tensors for name in _ATTENTION_LAYOUT):
        _check_layout(tensors, _ATTENTION_LAYOUT, sizes)
        arrays: dict[str, Any] = {name: tensors[name] for name in _ATTENTION_LAYOUT}
        attention = AttentionInputs(**{**arrays, "sm_scale": float(arrays["sm_scale"])})
    endings = {name: layout for name, layout in _ENDINGS_LAYOUT.items() if name in tensors}
    _check_layout(tensors, endings, sizes)
    sizes["words"] = -(-sizes["N"] // 32)
    sizes["L+1"] = sizes["L"] + 1
    draft = {name: tensors[name] for name in _DRAFT_LAYOUT if name != "target_tokens"}
    inputs = RoundInputs(
        DraftInputs(**draft, max_budget=sizes["N"] - 1),
        tensors["target_tokens"],
        attention,
        {name: tensors[name] for name in endings},
    )
    return RoundBundle(inputs, _checked_expected(tensors, sizes, attention is not None))


def _checked_expected(
    tensors: Mapping[str, NDArray[Any]], sizes: dict[str, int], has_attention: bool
) -> dict[str, dict[str, NDArray[Any]]]:
    expected = {}
    for stage, layout in STAGES.items():
        held = [name for name in layout if f"{_EXPECTED}{name}" in tensors or name not in _MAY_BE_MISSING]
        named = {f"{_EXPECTED}{name}": layout[name] for name in held}
        if not any(name in tensors for name in named):
            continue
        if stage == "verify_attention" and not has_attention:
            raise BundleError(f"{_listed(named)}: expected results without their inputs, q_nope and so on")
        _check_layout(tensors, named, sizes)
        expected[stage] = {name: tensors[f"{_EXPECTED}{name}"] for name in held}
    return expected


def _check_layout(
    tensors: Mapping[str, NDArray[Any]],
    layout: Layout,
    sizes: dict[str, int],
) -> None:
    """Check tensors against their dtypes and dimensions; enter sizes that are seen for the first time."""
    missing = [name for name in layout if name not in tensors]
    if missing:
        raise BundleError(f"no tensor {_listed(missing)}; a round has {_listed(layout)}")
    for name, (dtypes, dimensions) in layout.items():
        labels, tensor = dimensions.split(), tensors[name]
        fits = tensor.dtype.name in dtypes and tensor.ndim == len(labels)
        if fits:
            found = dict(zip(labels, tensor.shape, strict=True))
            fits = all(size > 0 and size == sizes.get(label, size) for label, size in found.items())
        if not fits:
            known = ", ".join(f"{label} = {sizes[label]}" for label in labels if label in sizes)
            raise BundleError(
                f"tensor {name!r}: {tensor.dtype.name} of shape {list(tensor.shape)}; "
                f"expected {' or '.join(dtypes)} [{', '.join(labels)}]" + (f" with {known}" if known else "")
            )
        sizes |= found


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)
