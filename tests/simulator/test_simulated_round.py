"""Whole rounds in Numba's simulator."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_checks import assert_same_arrays, numba_library
from ml_dtypes import bfloat16
from round_checks import RoundCase, RoundChecker, check_rounds, make_case

from numba_ddtree import ArgumentError
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.refs import round_state as reference
from numba_ddtree.round import DDTreeRound
from numba_ddtree.tree_accept import accept_tree

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="the simulator is off"),
    pytest.mark.usefixtures("poisoned_allocations"),
]


@pytest.mark.parametrize("paging", ["contiguous", "kv_indptr"])
def test_each_stage_of_a_round_is_its_reference(rng: np.random.Generator, paging: str) -> None:
    case = make_case(rng, paging=paging, sampled=False, B=3, V=12, L=3, budget=5, target_dtype=bfloat16)
    check_rounds(numba_library(), rng, case, rounds=3)


def test_requests_come_and_go(rng: np.random.Generator) -> None:
    checker = RoundChecker(numba_library(), RoundCase(B=5, L=2, V=8, budget=3))
    state = reference.StateArrays(*(array.copy_to_host() for array in checker.round.state.arrays().values()))
    starts = [
        {"requests": [3, 7, 1, -1, 3], "root_tokens": [1, 2, 3, 4, 5]},
        {"requests": [0], "root_tokens": [6]},
        {"requests": [], "root_tokens": []},
        {"root_tokens": [7, 8]},
    ]
    for start in starts:
        given = {name: np.array(value, np.int32) for name, value in start.items()}
        given["prefix_lengths"] = given["root_tokens"] + 10
        reference.start_requests(state, **given)
        checker.round.start(**{name: cuda.to_device(array) for name, array in given.items()})
        got = {name: array.copy_to_host() for name, array in checker.round.state.arrays().items()}
        assert_same_arrays(got, state._asdict())


def test_requests_with_nothing_left_are_passed_by(rng: np.random.Generator) -> None:
    planned = DDTreeRound.plan(2, 2, 8, 3, library="numba")
    planned.start([1, 2], [3, 4], remaining=[0, 1])
    planned.draft(cuda.to_device(rng.normal(size=(2, 2, 8)).astype(np.float32)))
    assert planned.tree.num_nodes.copy_to_host().tolist() == [0, 4]


def test_a_launch_sequence_runs_when_it_is_told(rng: np.random.Generator) -> None:
    from numba_ddtree.launch import LaunchSequence
    from numba_ddtree.tree_build import build_tree

    library = numba_library()
    log_probs = library.put(np.log(np.full((1, 2, 2), 0.5, np.float32)))
    ids = library.put(np.array([[[1, 2], [3, 4]]], np.int32))
    sequence = LaunchSequence()
    tree = build_tree(log_probs, ids, 3, stream=sequence)
    result = accept_tree(tree, library.put(np.array([[1, 3, 0, 9]], np.int32)), stream=sequence)
    assert [launch.name for launch in sequence.launches] == ["build_tree_kernel_32", "accept_tree_kernel"]
    sequence.launch()
    assert library.get(result.tokens).tolist() == [[1, 3, 9]]
    other = library.put(np.array([[[5, 2], [3, 4]]], np.int32))
    for launch, place in sequence.places_of(ids):
        launch.replace(place, other)
    sequence.launch()
    assert library.get(result.tokens).tolist() == [[1, -1, -1]]


def test_host_arrays_are_refused_by_a_planned_round() -> None:
    planned = DDTreeRound.plan(2, 2, 8, 3, library="numba")
    with pytest.raises(ArgumentError, match=r"^logits: got host arrays; expected arrays on CUDA device 0"):
        planned.draft(np.zeros((2, 2, 8), np.float32))


def test_sequences_of_other_grids_do_not_mix(rng: np.random.Generator) -> None:
    from numba_ddtree.launch import LaunchSequence
    from numba_ddtree.tree_build import build_tree

    sequences, trees = [], []
    for batch in (3, 1):
        sequences.append(LaunchSequence())
        log_probs = cuda.to_device(np.log(np.full((batch, 1, 2), 0.5, np.float32)))
        ids = cuda.to_device(np.zeros((batch, 1, 2), np.int32))
        trees.append(build_tree(log_probs, ids, 2, stream=sequences[-1]))
    for sequence in sequences:
        sequence.launch()
    assert [tree.num_nodes.copy_to_host().tolist() for tree in trees] == [[3, 3, 3], [3]]
