"""Every bad argument of every public function is refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import numba_ddtree
from inputs import make_attention
from numba_ddtree import (
    AcceptResult,
    ArgumentError,
    BackendError,
    BundleError,
    DDTreeError,
    DraftTree,
)
from numba_ddtree.devices import find_device_fault
from numba_ddtree.tree import TREE_DTYPES, tree_shapes

NAN = float("nan")


class OnDevice:
    """Says by DLPack that it lives on a device; has no memory to look at."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def draft() -> dict[str, Any]:
    """Good arguments of `build_tree`: B = 2, L = 3, K = 4."""
    rng = np.random.default_rng(0)
    return {
        "draft_log_probs": -np.sort(rng.random((2, 3, 4)), axis=-1).astype(np.float32),
        "draft_token_ids": rng.integers(0, 99, (2, 3, 4)).astype(np.int32),
        "budget": 5,
        "backend": "numpy",
    }


def with_element(name: str, index: tuple[int, ...], value: Any) -> dict[str, Any]:
    """Arguments of `build_tree` with one element of one array replaced."""
    arrays = draft()
    arrays |= {"root_tokens": np.zeros(2, int), "prefix_lengths": np.zeros(2, int)}
    if name == "draft_token_ids":
        arrays[name] = arrays[name].astype(np.int64)
    arrays[name][index] = value
    return arrays


def small_tree() -> DraftTree:
    """Build a tree of B = 2 requests, N = 6 slots."""
    return numba_ddtree.build_tree(**draft())


def acceptance() -> dict[str, Any]:
    return {"tree": small_tree(), "target_tokens": np.zeros((2, 6), np.int32), "backend": "numpy"}


def parents_given() -> dict[str, Any]:
    parents = np.array([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    return {"parents": parents, "token_ids": np.zeros((2, 4), int), "backend": "numpy"}


def visibility_given() -> dict[str, Any]:
    mask = np.tril(np.ones((2, 4, 4), bool))
    return {"visibility": mask, "token_ids": np.zeros((2, 4), int), "backend": "numpy"}


def attention() -> dict[str, Any]:
    """Good arguments of `verify_attention`: B = 2, N = 6, H = 2, D_CKV = 16, D_KPE = 8, S = 14."""
    given = make_attention(np.random.default_rng(0), prefixes=[5, 2], N=6)
    return {
        "q_nope": given.q_nope,
        "q_pe": given.q_pe,
        "ckv_cache": np.nan_to_num(given.ckv_cache),
        "kpe_cache": np.nan_to_num(given.kpe_cache),
        "tree": small_tree(),
        "sm_scale": 0.2,
        "prefix_lengths": given.prefix_lengths,
        "backend": "numpy",
    }


def refuses(function: Callable[..., Any], arguments: dict[str, Any], argument: str) -> ArgumentError:
    """Call, and return the error, which must name the argument and say what is and should be."""
    with pytest.raises(ArgumentError) as caught:
        function(**arguments)
    error = caught.value
    assert error.argument == argument
    assert isinstance(error, ValueError)
    assert error.expected
    assert str(error).startswith(f"{argument}: got ")
    assert "; expected " in str(error)
    return error


LOG_PROBS, IDS = draft()["draft_log_probs"], draft()["draft_token_ids"]


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"draft_log_probs": None}, "draft_log_probs"),
        ({"draft_log_probs": 3.0}, "draft_log_probs"),
        ({"draft_log_probs": "text"}, "draft_log_probs"),
        ({"draft_log_probs": object()}, "draft_log_probs"),
        ({"draft_log_probs": [[[1.0], [2.0, 3.0]]]}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS[0]}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS[None]}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS[:, :0], "draft_token_ids": IDS[:, :0]}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS[..., :0], "draft_token_ids": IDS[..., :0]}, "draft_log_probs"),
        ({"draft_log_probs": np.zeros((2, 65, 4), np.float32)}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS.astype(np.float64)}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS.astype(np.float16)}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS.astype(">f4")}, "draft_log_probs"),
        ({"draft_log_probs": LOG_PROBS.astype(complex)}, "draft_log_probs"),
        ({"draft_token_ids": None}, "draft_token_ids"),
        ({"draft_token_ids": IDS[:1]}, "draft_token_ids"),
        ({"draft_token_ids": IDS[:, :2]}, "draft_token_ids"),
        ({"draft_token_ids": IDS[..., :2]}, "draft_token_ids"),
        ({"draft_token_ids": IDS.astype(np.float32)}, "draft_token_ids"),
        ({"draft_token_ids": IDS.astype(np.uint32)}, "draft_token_ids"),
        ({"draft_token_ids": IDS.astype(">i4")}, "draft_token_ids"),
        ({"draft_token_ids": OnDevice()}, "draft_token_ids"),
        ({"budget": -1}, "budget"),
        ({"budget": 1025}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": np.True_}, "budget"),
        ({"budget": 2.0}, "budget"),
        ({"budget": NAN}, "budget"),
        ({"budget": None}, "budget"),
        ({"budget": "5"}, "budget"),
        ({"budget": np.array(5)}, "budget"),
        ({"budget": [5]}, "budget"),
        ({"budget": [5.0, 5.0]}, "budget"),
        ({"budget": [[5, 5]]}, "budget"),
        ({"budget": [5, -1]}, "budget[1]"),
        ({"budget": [1025, 5]}, "budget[0]"),
        ({"budget": [2**31, 5]}, "budget[0]"),
        ({"budget": OnDevice()}, "budget"),
        ({"budget": 5, "max_budget": 4}, "budget"),
        ({"budget": [4, 5], "max_budget": 4}, "budget[1]"),
        ({"max_budget": 1025}, "max_budget"),
        ({"max_budget": -1}, "max_budget"),
        ({"max_budget": 7.0}, "max_budget"),
        ({"max_budget": True}, "max_budget"),
        ({"root_tokens": [1]}, "root_tokens"),
        ({"root_tokens": 1}, "root_tokens"),
        ({"root_tokens": [1.0, 2.0]}, "root_tokens"),
        ({"root_tokens": [True, False]}, "root_tokens"),
        ({"root_tokens": [1, -1]}, "root_tokens[1]"),
        ({"root_tokens": [2**31, 1]}, "root_tokens[0]"),
        ({"prefix_lengths": [1, 2, 3]}, "prefix_lengths"),
        ({"prefix_lengths": [0.0, NAN]}, "prefix_lengths"),
        ({"prefix_lengths": [1, -1]}, "prefix_lengths[1]"),
        ({"prefix_lengths": [2**31 - 1, 0]}, "prefix_lengths[0]"),
        ({"prefix_lengths": OnDevice()}, "prefix_lengths"),
        ({"backend": "gpu"}, "backend"),
        ({"backend": 1}, "backend"),
        ({"backend": ["numpy"]}, "backend"),
        (with_element("draft_log_probs", (1, 2, 3), NAN), "draft_log_probs[1, 2, 3]"),
        (with_element("draft_log_probs", (0, 1, 2), 1.0), "draft_log_probs[0, 1, 2]"),
        (with_element("draft_log_probs", (0, 1, 0), np.inf), "draft_log_probs[0, 1, 0]"),
        (with_element("draft_log_probs", (1, 0), -np.inf), "draft_log_probs[1, 0, 0]"),
        (with_element("draft_token_ids", (1, 2, 3), -1), "draft_token_ids[1, 2, 3]"),
        (with_element("draft_token_ids", (0, 0, 1), 2**31), "draft_token_ids[0, 0, 1]"),
    ],
)
def test_build_tree(changed: dict[str, Any], argument: str) -> None:
    refuses(numba_ddtree.build_tree, draft() | changed, argument)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda tree: replace(tree, token_ids=tree.token_ids[:, :-1]), "out.token_ids"),
        (lambda tree: replace(tree, parents=tree.parents.astype(np.int64)), "out.parents"),
        (lambda tree: replace(tree, ancestor_bits=tree.ancestor_bits.view(np.int32)), "out.ancestor_bits"),
        (lambda tree: replace(tree, ancestor_bits=tree.ancestor_bits[..., 0]), "out.ancestor_bits"),
        (lambda tree: replace(tree, num_nodes=tree.num_nodes[:1]), "out.num_nodes"),
        (lambda tree: replace(tree, status=[0, 0]), "out.status"),
        (lambda tree: replace(tree, depths=None), "out.depths"),
        (lambda tree: replace(tree, depths=OnDevice()), "out.depths"),
        (lambda tree: replace(tree, positions=tree.positions.astype(">i4")), "out.positions"),
        (lambda tree: tree.token_ids, "out"),
        (lambda tree: 3, "out"),
    ],
)
def test_out_of_build_tree(change: Callable[[DraftTree], Any], argument: str) -> None:
    out = small_tree()
    for array in out.arrays().values():
        array[...] = 7
    refuses(numba_ddtree.build_tree, draft() | {"out": change(out)}, argument)
    assert all((array == 7).all() for array in out.arrays().values())


def test_results_do_not_share_memory() -> None:
    out, result = small_tree(), numba_ddtree.accept_tree(**acceptance())
    for array in (*out.arrays().values(), *result.arrays().values()):
        array[...] = 7
    both = np.full((2, 7), 7, np.int32)
    for wrong, argument in (
        (replace(out, depths=out.parents), "out.depths"),
        (replace(out, token_ids=both[:, 1:], positions=both[:, :6]), "out.positions"),
        (replace(out, parents=as_strided(both, (2, 6), (0, 4))), "out.parents"),
        (replace(out, status=out.num_nodes), "out.status"),
    ):
        refuses(numba_ddtree.build_tree, draft() | {"out": wrong}, argument)
    shared = replace(result, tokens=result.accepted_indices)
    refuses(numba_ddtree.accept_tree, acceptance() | {"out": shared}, "out.tokens")
    for array in (*out.arrays().values(), *result.arrays().values(), both):
        assert (array == 7).all()


def test_parts_of_one_array_are_outputs() -> None:
    out, rows = small_tree(), np.zeros((2, 5, 6), np.int32)
    names = "token_ids", "parents", "depths", "positions", "first_child"
    apart = replace(out, **{name: rows[:, place] for place, name in enumerate(names)})
    numba_ddtree.build_tree(**(draft() | {"out": apart}))
    for name in names:
        np.testing.assert_array_equal(getattr(apart, name), getattr(out, name))


@pytest.mark.parametrize("wrong", [1, None, "yes", np.ones(2, bool), [True]])
def test_validate_is_yes_or_no(wrong: Any) -> None:
    for function, given in (
        (numba_ddtree.build_tree, draft()),
        (numba_ddtree.accept_tree, acceptance()),
        (DraftTree.from_parents, parents_given()),
        (DraftTree.from_visibility, visibility_given()),
        (numba_ddtree.verify_attention, attention()),
        (numba_ddtree.tree_tail_attention, attention()),
        (numba_ddtree.draft_topk, {"logits": np.zeros((1, 1, 3), np.float32), "k": 1, "backend": "numpy"}),
        (numba_ddtree.choose_tokens, {"logits": np.zeros((1, 1, 3), np.float32), "backend": "numpy"}),
    ):
        refuses(function, given | {"validate": wrong}, "validate")


def test_masks_are_not_ignored() -> None:
    given = draft()
    masked = np.ma.masked_array(given["draft_token_ids"], given["draft_token_ids"] == 0)
    refuses(numba_ddtree.build_tree, given | {"draft_token_ids": masked}, "draft_token_ids")
    refuses(
        numba_ddtree.build_tree, given | {"root_tokens": np.ma.masked_array([1, 2], [0, 1])}, "root_tokens"
    )


def test_what_is_no_array_is_not_copied_to_the_host() -> None:
    for wrong in (replace(small_tree(), parents=None), replace(small_tree(), parents=object())):
        refuses(wrong.to_host, {}, "parents")


def test_out_that_cannot_be_written() -> None:
    out = small_tree()
    out.status.flags.writeable = False
    out.token_ids[...] = 77
    refuses(numba_ddtree.build_tree, draft() | {"out": out}, "out.status")
    assert (out.token_ids == 77).all()


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"target_tokens": None}, "target_tokens"),
        ({"target_tokens": np.zeros((2, 5), np.int32)}, "target_tokens"),
        ({"target_tokens": np.zeros((1, 6), np.int32)}, "target_tokens"),
        ({"target_tokens": np.zeros(6, np.int32)}, "target_tokens"),
        ({"target_tokens": np.zeros((2, 6), np.float32)}, "target_tokens"),
        ({"target_tokens": np.zeros((2, 6), np.int16)}, "target_tokens"),
        ({"target_tokens": np.zeros((2, 6), ">i4")}, "target_tokens"),
        ({"target_tokens": np.zeros((2, 6), bool)}, "target_tokens"),
        ({"target_tokens": np.full((2, 6), 2**31)}, "target_tokens[0, 0]"),
        ({"tree": None}, "tree"),
        ({"tree": np.zeros((2, 6), np.int32)}, "tree"),
        ({"backend": "torch"}, "backend"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"stop_token_ids": np.zeros((3, 1), np.int32)}, "stop_token_ids"),
        ({"stop_token_ids": np.zeros((2, 1, 1), np.int32)}, "stop_token_ids"),
        ({"stop_token_ids": OnDevice()}, "stop_token_ids"),
        ({"remaining": 3}, "remaining"),
        ({"remaining": [3]}, "remaining"),
        ({"remaining": [3, 2**31]}, "remaining[1]"),
        ({"remaining": [1.0, NAN]}, "remaining"),
        ({"remaining": [True, False]}, "remaining"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"ignore_eos": [1, 0]}, "ignore_eos"),
        ({"ignore_eos": [True]}, "ignore_eos"),
        ({"finished": True}, "finished"),
        ({"finished": [True]}, "finished"),
        ({"finished": [0.0, 1.0]}, "finished"),
        ({"finished": [0, 2**31]}, "finished[1]"),
        ({"out": AcceptResult(*np.zeros((5, 2), np.int32))}, "out.accepted_indices"),
        ({"out": np.zeros(3)}, "out"),
    ],
)
def test_accept_tree(changed: dict[str, Any], argument: str) -> None:
    refuses(numba_ddtree.accept_tree, acceptance() | changed, argument)


def test_accept_tree_refuses_a_mix_of_places() -> None:
    with pytest.raises(ArgumentError, match="an array on CUDA device 0"):
        numba_ddtree.accept_tree(small_tree(), OnDevice(), backend="numpy")


def broken_trees() -> list[tuple[DraftTree, str]]:
    tree = small_tree()
    later, rootless, two_roots = tree.parents.copy(), tree.parents.copy(), tree.parents.copy()
    later[1, 3], rootless[0, 0], two_roots[1, 2] = 3, 0, -1
    return [
        (replace(tree, parents=later), "tree.parents[1, 3]"),
        (replace(tree, parents=rootless), "tree.parents[0, 0]"),
        (replace(tree, parents=two_roots), "tree.parents[1, 2]"),
        (replace(tree, parents=tree.parents[0]), "tree.parents"),
        (replace(tree, parents=None), "tree.parents"),
        (replace(tree, token_ids=tree.token_ids[:, :3]), "tree.token_ids"),
        (replace(tree, token_ids=tree.token_ids.astype(np.int64)), "tree.token_ids"),
        (replace(tree, ancestor_bits=tree.ancestor_bits.astype(np.int32)), "tree.ancestor_bits"),
        (replace(tree, status=tree.status[:1]), "tree.status"),
        (replace(tree, max_depth=-1), "tree.max_depth"),
        (replace(tree, max_depth=2.0), "tree.max_depth"),
        (replace(tree, max_depth=None), "tree.max_depth"),
        # Deeper than it says, which sizes the results and the kernels' memory.
        (replace(tree, max_depth=int(tree.depths.max()) - 1), "tree.max_depth"),
    ]


@pytest.mark.parametrize(("tree", "argument"), broken_trees())
@pytest.mark.parametrize("operation", ["accept", "attention"])
def test_trees(tree: DraftTree, argument: str, operation: str) -> None:
    if operation == "accept":
        refuses(numba_ddtree.accept_tree, acceptance() | {"tree": tree}, argument)
    else:
        refuses(numba_ddtree.verify_attention, attention() | {"tree": tree}, argument)


@pytest.mark.parametrize("count", [-1, 7, 2**31 - 1])
def test_numbers_of_nodes_of_trees(count: int) -> None:
    tree = small_tree()
    tree.num_nodes[1] = count
    for function, given in (
        (numba_ddtree.accept_tree, acceptance()),
        (numba_ddtree.verify_attention, attention()),
    ):
        with pytest.raises(
            ArgumentError, match=rf"num_nodes\[1\]: got {count}; expected a number from 0 to N = 6"
        ):
            function(**(given | {"tree": tree}))


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"parents": None}, "parents"),
        ({"parents": [-1, 0, 0, 1]}, "parents"),
        ({"parents": np.zeros((2, 0), int)}, "parents"),
        ({"parents": np.zeros((2, 4))}, "parents"),
        ({"parents": [[-1, 0, 0, 2**31], [-1, 0, 0, 0]]}, "parents[0, 3]"),
        ({"parents": [[0, 0, 0, 0], [-1, 0, 0, 0]]}, "parents[0, 0]"),
        ({"parents": [[-1, 0, 0, 0], [-1, 1, 0, 0]]}, "parents[1, 1]"),
        ({"parents": [[-1, 0, 3, 0], [-1, 0, 0, 0]]}, "parents[0, 2]"),
        ({"parents": [[-1, 0, 0, -1], [-1, 0, 0, 0]]}, "parents[0, 3]"),
        ({"parents": OnDevice()}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": np.zeros((2, 3), int)}, "token_ids"),
        ({"token_ids": np.zeros((2, 4))}, "token_ids"),
        ({"token_ids": np.full((2, 4), 2**31)}, "token_ids[0, 0]"),
        ({"num_nodes": [4]}, "num_nodes"),
        ({"num_nodes": 4}, "num_nodes"),
        ({"num_nodes": [4.0, 4.0]}, "num_nodes"),
        ({"num_nodes": [4, 5]}, "num_nodes[1]"),
        ({"num_nodes": [-1, 4]}, "num_nodes[0]"),
        ({"prefix_lengths": [4]}, "prefix_lengths"),
        ({"prefix_lengths": [0, -1]}, "prefix_lengths[1]"),
        ({"prefix_lengths": [2**31 - 1, 0]}, "prefix_lengths[0]"),
        ({"max_depth": 2}, "parents"),
        ({"max_depth": -1}, "max_depth"),
        ({"max_depth": 4}, "max_depth"),
        ({"max_depth": 3.0}, "max_depth"),
        ({"max_depth": True}, "max_depth"),
        ({"backend": "cpu"}, "backend"),
        ({"parents": np.zeros((1, 1026), int), "token_ids": np.zeros((1, 1026), int)}, "token_ids"),
    ],
)
def test_from_parents(changed: dict[str, Any], argument: str) -> None:
    refuses(DraftTree.from_parents, parents_given() | changed, argument)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"visibility": None}, "visibility"),
        ({"visibility": np.ones((2, 4, 5), bool)}, "visibility"),
        ({"visibility": np.ones((4, 4), bool)}, "visibility"),
        ({"visibility": np.ones((2, 4, 4), np.uint8)}, "visibility"),
        ({"visibility": np.ones((2, 4, 4), np.float32)}, "visibility"),
        ({"visibility": np.zeros((2, 4, 4), bool)}, "visibility[0]"),
        ({"visibility": np.ones((2, 4, 4), bool)}, "visibility[0]"),
        # 0 for visible is another convention.
        ({"visibility": ~np.tril(np.ones((2, 4, 4), bool))}, "visibility[0]"),
        ({"token_ids": np.zeros((2, 3), int)}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"num_nodes": [4, 5]}, "num_nodes[1]"),
        ({"max_depth": 2}, "parents"),
        ({"prefix_lengths": [-2, 0]}, "prefix_lengths[0]"),
        ({"backend": "cpu"}, "backend"),
    ],
)
def test_from_visibility(changed: dict[str, Any], argument: str) -> None:
    refuses(DraftTree.from_visibility, visibility_given() | changed, argument)


def test_to_visibility() -> None:
    tree = small_tree()
    for wrong in (tree.ancestor_bits[:1], tree.ancestor_bits.view(np.int32), tree.ancestor_bits[..., 0]):
        refuses(replace(tree, ancestor_bits=wrong).to_visibility, {}, "tree.ancestor_bits")


QUERIES, CACHE = attention()["q_nope"], attention()["ckv_cache"]


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"q_nope": None}, "q_nope"),
        ({"q_nope": QUERIES[0]}, "q_nope"),
        ({"q_nope": QUERIES[:, :5]}, "q_nope"),
        ({"q_nope": QUERIES[:1]}, "q_nope"),
        ({"q_nope": QUERIES[:, :, :0]}, "q_nope"),
        ({"q_nope": QUERIES.astype(np.float64)}, "q_nope"),
        ({"q_nope": QUERIES.astype(np.float16)}, "q_pe"),
        ({"q_pe": None}, "q_pe"),
        ({"q_pe": np.zeros((2, 6, 3, 8), np.float32)}, "q_pe"),
        ({"q_pe": np.zeros((2, 6, 2, 0), np.float32)}, "q_pe"),
        ({"q_pe": np.zeros((2, 6, 2, 8), np.int32)}, "q_pe"),
        ({"ckv_cache": None}, "ckv_cache"),
        ({"ckv_cache": CACHE[..., :15]}, "ckv_cache"),
        ({"ckv_cache": CACHE[:1]}, "ckv_cache"),
        ({"ckv_cache": CACHE.astype(np.float64)}, "ckv_cache"),
        ({"ckv_cache": OnDevice()}, "ckv_cache"),
        ({"kpe_cache": None}, "kpe_cache"),
        ({"kpe_cache": np.zeros((2, 13, 8), np.float32)}, "kpe_cache"),
        ({"kpe_cache": np.zeros((2, 14, 9), np.float32)}, "kpe_cache"),
        ({"tree": None}, "tree"),
        ({"tree": np.ones((2, 6, 6), bool)}, "tree"),
        ({"sm_scale": NAN}, "sm_scale"),
        ({"sm_scale": np.inf}, "sm_scale"),
        ({"sm_scale": None}, "sm_scale"),
        ({"sm_scale": True}, "sm_scale"),
        ({"sm_scale": "0.2"}, "sm_scale"),
        ({"sm_scale": np.ones(2)}, "sm_scale"),
        ({"sm_scale": 1e39}, "sm_scale"),  # finite, but not in float32
        ({"prefix_lengths": [5]}, "prefix_lengths"),
        ({"prefix_lengths": [5.0, 2.0]}, "prefix_lengths"),
        ({"prefix_lengths": [-1, 2]}, "prefix_lengths[0]"),
        ({"prefix_lengths": [5, 9]}, "prefix_lengths[1]"),
        ({"prefix_lengths": [5, 2**31 - 1]}, "prefix_lengths[1]"),
        ({"max_prefix_length": 4}, "prefix_lengths"),
        ({"max_prefix_length": 15}, "max_prefix_length"),
        ({"max_prefix_length": -1}, "max_prefix_length"),
        ({"max_prefix_length": 5.0}, "max_prefix_length"),
        ({"backend": "flash"}, "backend"),
        ({"split_keys": 100}, "split_keys"),
        ({"split_keys": 0}, "split_keys"),
        ({"split_keys": 64.0}, "split_keys"),
        ({"split_keys": True}, "split_keys"),
        ({"split_keys": "quickest"}, "split_keys"),
        ({"split_keys": 2**30 + 64}, "split_keys"),
        ({"workspace_limit": 0}, "workspace_limit"),
        ({"workspace_limit": 1e9}, "workspace_limit"),
        ({"out": np.zeros((2, 6, 2, 15), np.float32)}, "out"),
        ({"out": np.zeros((2, 6, 2, 16), np.float64)}, "out"),
        ({"out": [1.0]}, "out"),
        ({"lse": np.zeros((2, 6), np.float32)}, "lse"),
        ({"lse": np.zeros((2, 6, 2), np.float64)}, "lse"),
    ],
)
def test_verify_attention(changed: dict[str, Any], argument: str) -> None:
    refuses(numba_ddtree.verify_attention, attention() | changed, argument)


def test_the_reference_refuses_a_workspace_that_kernels_could_not_work_in() -> None:
    given = attention() | {"max_prefix_length": 10**6, "workspace_limit": 10}
    given |= {name: given[name].astype(np.float16) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")}
    refuses(numba_ddtree.verify_attention, given, "workspace_limit")
    numba_ddtree.verify_attention(**(given | {"workspace_limit": 2**30}))


@pytest.mark.parametrize("attend", [numba_ddtree.verify_attention, numba_ddtree.tree_tail_attention])
def test_the_reference_has_the_limits_of_16_bits(attend: Callable[..., Any]) -> None:
    def given(slots: int, heads: int, dtype: Any) -> dict[str, Any]:
        queries, rows = np.zeros((1, slots, heads, 2), dtype), np.zeros((1, slots, 2), dtype)
        shapes = tree_shapes(1, slots)
        arrays: Any = {name: np.zeros(shape, TREE_DTYPES[name]) for name, shape in shapes.items()}
        tree = DraftTree(**arrays, max_depth=0)
        caches = {"ckv_cache": rows, "kpe_cache": rows}
        return {
            "q_nope": queries,
            "q_pe": queries,
            "tree": tree,
            "sm_scale": 1.0,
            "backend": "numpy",
        } | caches

    attend(**given(1025, 1, np.float16))
    attend(**given(1, 128, np.float16))
    refuses(attend, given(1026, 1, np.float16), "tree")
    refuses(attend, given(1, 129, np.float16), "q_nope")
    attend(**given(1026, 129, np.float32))


def test_outputs_of_attention_do_not_share_memory() -> None:
    memory = np.zeros(6 * 2 * 2 * 17, np.float32)
    out, lse = memory[: 2 * 6 * 2 * 16].reshape(2, 6, 2, 16), memory[-2 * 6 * 2 :].reshape(2, 6, 2)
    numba_ddtree.verify_attention(**(attention() | {"out": out, "lse": lse}))
    early = memory[1 : 1 + 2 * 6 * 2].reshape(2, 6, 2)
    refuses(numba_ddtree.verify_attention, attention() | {"out": out, "lse": early}, "lse")


def test_attention_writes_nothing_where_one_result_does_not_fit() -> None:
    out = np.full((2, 6, 2, 16), 7, np.float32)
    changed = {"out": out, "lse": np.zeros((2, 6, 3), np.float32)}
    refuses(numba_ddtree.verify_attention, attention() | changed, "lse")
    assert (out == 7).all()


def test_a_prefix_and_its_tree_may_fill_the_cache() -> None:
    numba_ddtree.verify_attention(**(attention() | {"prefix_lengths": [5, 8]}))


def test_the_good_arguments_are_good() -> None:
    numba_ddtree.build_tree(**draft())
    numba_ddtree.accept_tree(**acceptance())
    DraftTree.from_parents(**parents_given())
    DraftTree.from_visibility(**visibility_given())
    numba_ddtree.verify_attention(**attention())


def test_an_empty_batch_gives_empty_results() -> None:
    given = {name: value[:0] if isinstance(value, np.ndarray) else value for name, value in draft().items()}
    none = np.zeros(0, np.int32)
    extras: list[dict[str, Any]] = [
        {"budget": none},
        {},
        {"root_tokens": none, "prefix_lengths": none},
    ]
    for extra in extras:
        tree = numba_ddtree.build_tree(**(given | extra))
        slots = 1 if "budget" in extra else 6
        assert tree.parents.shape == (0, slots)
        assert tree.ancestor_bits.shape == (0, slots, 1)
        assert tree.to_visibility().shape == (0, slots, slots)
    result = numba_ddtree.accept_tree(tree, np.zeros((0, 6), np.int32), backend="numpy")
    assert result.accepted_indices.shape == (0, 4)
    assert result.accept_length.shape == result.bonus_token.shape == (0,)
    for make, empty in (
        (DraftTree.from_parents, np.zeros((0, 6), np.int32)),
        (DraftTree.from_visibility, np.zeros((0, 6, 6), bool)),
    ):
        assert make(empty, np.zeros((0, 6), np.int32), backend="numpy").parents.shape == (0, 6)
    attended = attention()
    for name, value in attended.items():
        if isinstance(value, np.ndarray):
            attended[name] = value[:0]
    out, lse = numba_ddtree.verify_attention(**(attended | {"tree": tree}))
    assert out.shape == (0, 6, 2, 16)
    assert lse.shape == (0, 6, 2)


@pytest.mark.skipif(find_device_fault() is None, reason="there is a device")
@pytest.mark.parametrize("backend", [None, "cuda"])
def test_without_a_device_the_error_says_what_to_do(backend: str | None) -> None:
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (numba_ddtree.build_tree, draft()),
        (numba_ddtree.accept_tree, acceptance()),
        (DraftTree.from_parents, parents_given()),
        (DraftTree.from_visibility, visibility_given()),
        (numba_ddtree.verify_attention, attention()),
    ]
    for function, arguments in calls:
        with pytest.raises(
            BackendError, match=r'^no CUDA device: .+; pass backend="numpy" .*CUDASIM'
        ) as caught:
            function(**(arguments | {"backend": backend}))
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, DDTreeError)


def test_arguments_are_checked_before_the_device_is_looked_for() -> None:
    refuses(numba_ddtree.build_tree, draft() | {"backend": None, "budget": -1}, "budget")


def test_errors_are_the_packages_and_the_built_in_ones() -> None:
    error = ArgumentError("budget", -1, "a number from 0 to 1024")
    assert str(error) == "budget: got -1; expected a number from 0 to 1024"
    assert (error.argument, error.got, error.expected) == ("budget", -1, "a number from 0 to 1024")
    for kind, builtin in (
        (ArgumentError, ValueError),
        (BackendError, RuntimeError),
        (BundleError, ValueError),
    ):
        assert issubclass(kind, builtin)
        assert issubclass(kind, DDTreeError)


def test_bits_that_are_not_those_of_the_parents_are_refused() -> None:
    tree = numba_ddtree.DraftTree.from_parents([[-1, 0, 0, 1, 0]], [[0] * 5], num_nodes=[4], backend="numpy")
    queries, rows = np.zeros((1, 5, 1, 8), np.float32), np.zeros((1, 5, 8), np.float32)
    for node, bits in ((0, 0b10001), (2, 0b111), (3, 0b1001), (1, 0b1)):
        wrong = tree.ancestor_bits.copy()
        wrong[0, node, 0] = bits
        with pytest.raises(ArgumentError, match=r"^tree\.ancestor_bits\[0, \d\]: got bits that are not"):
            numba_ddtree.verify_attention(
                queries,
                queries,
                rows,
                rows,
                replace(tree, ancestor_bits=wrong),
                sm_scale=1.0,
                backend="numpy",
            )


def test_out_of_another_depth_is_refused() -> None:
    log_probs, ids = np.zeros((1, 3, 2), np.float32), np.zeros((1, 3, 2), np.int32)
    tree = numba_ddtree.build_tree(log_probs, ids, 4, backend="numpy")
    with pytest.raises(ArgumentError, match=r"^out\.max_depth: got 1; expected 3, as L is$"):
        numba_ddtree.build_tree(log_probs, ids, 4, out=replace(tree, max_depth=1), backend="numpy")


def test_a_bound_on_depths_beyond_any_tree_is_refused() -> None:
    tree = numba_ddtree.DraftTree.from_parents([[-1, 0]], [[1, 2]], backend="numpy")
    with pytest.raises(ArgumentError, match=r"^tree\.max_depth: got 65; expected a number from 0 to 64$"):
        numba_ddtree.accept_tree(replace(tree, max_depth=65), [[1, 2]], backend="numpy")


def test_negative_tokens_of_slots_in_use_are_refused() -> None:
    parents, tokens = [[-1, 0, 0]], [[1, -1, -1]]
    with pytest.raises(
        ArgumentError, match=r"^token_ids\[0, 1\]: got -1; expected a token id, not negative$"
    ):
        numba_ddtree.DraftTree.from_parents(parents, tokens, backend="numpy")
    tree = numba_ddtree.DraftTree.from_parents(parents, tokens, num_nodes=[1], backend="numpy")
    np.testing.assert_array_equal(tree.token_ids, [[1, 0, 0]])


@pytest.mark.parametrize("member", ["parents", "num_nodes", "ancestor_bits"])
def test_visibility_of_a_malformed_tree_is_refused(member: str) -> None:
    tree = numba_ddtree.DraftTree.from_parents([[-1, 0]], [[1, 2]], backend="numpy")
    for wrong in (None, np.zeros(3, np.int32)[:, None, None, None]):
        with pytest.raises(ArgumentError, match=rf"^tree\.{member}: "):
            replace(tree, **{member: wrong}).to_visibility()
