"""The checks: they pass, and they can fail."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_ddtree import checks, round_checks, stages
from numba_ddtree.bundle import read_bundle, write_bundle
from numba_ddtree.cases import ATTENTION_CASES, TREE_CASES, AttentionCase, reference_tree
from numba_ddtree.check_results import Check, CheckResult, Comparison, compare_arrays, run_all
from numba_ddtree.checks import planned_checks, run_checks
from numba_ddtree.errors import ArgumentError, BackendError, BundleError
from numba_ddtree.golden import load_golden_trees
from numba_ddtree.refs import tree_build as reference_build
from numba_ddtree.round_bundle import read_round, reference_results, round_tensors
from numba_ddtree.round_checks import run_round
from numba_ddtree.stages import Stages, Timed

SMALL_ROUND = ATTENTION_CASES[3].shrunk()


@pytest.fixture
def round_path(tmp_path: Path) -> Path:
    inputs = SMALL_ROUND.inputs()
    path = tmp_path / "round.kdtr"
    write_bundle(path, round_tensors(inputs, reference_results(inputs)))
    return path


def edited(path: Path, **changes: Any) -> Path:
    """Replace tensors of a bundle (None removes one); ``__`` in a name stands for ``/``."""
    tensors = dict(read_bundle(path, map_payloads=False).tensors)
    for name, tensor in changes.items():
        tensors[name.replace("__", "/")] = tensor
    write_bundle(path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    return path


def skewed(method: Callable[..., Timed], array: str) -> Callable[..., Timed]:
    """Make a stage give one wrong element."""

    def wrong(*arguments: Any, **options: Any) -> Timed:
        timed = method(*arguments, **options)
        copy = timed.arrays[array].copy()
        copy.flat[0] += 1
        return replace(timed, arrays=timed.arrays | {array: copy})

    return wrong


class TestNumpyChecks:
    def test_all_pass_and_are_reported(self) -> None:
        shown: list[CheckResult] = []
        started: list[tuple[str, int, int]] = []
        results = run_checks("numpy", 1, 0, shown.append, lambda *start: started.append(start))
        assert shown == results
        assert [result.name for result in results if not result.passed] == []
        assert started == [(result.name, i, len(results)) for i, result in enumerate(results)]
        assert all(result.us > 0 and result.case for result in results)
        names = [result.name for result in results]
        assert names[:3] == ["build_tree/golden", "tree_links/golden", "accept_tree/golden"]
        assert names[-1] == "verify_attention/formula"

    @pytest.mark.parametrize(
        ("stage", "array", "check"),
        [
            ("build_tree", "parents", "build_tree/golden"),
            ("links_from_parents", "first_child", "tree_links/golden"),
            ("links_from_visibility", "ancestor_bits", "tree_links/golden"),
            ("accept_tree", "bonus_token", "accept_tree/golden"),
            ("verify_attention", "out", "verify_attention/h8_p0_b8"),
            ("verify_attention", "lse", "verify_attention/h8_p1_b64"),
        ],
    )
    def test_a_wrong_result_fails(
        self, monkeypatch: pytest.MonkeyPatch, stage: str, array: str, check: str
    ) -> None:
        monkeypatch.setattr(Stages, stage, skewed(getattr(Stages, stage), array))
        (planned,) = (planned for planned in planned_checks("numpy", 0) if planned.name == check)
        (result,) = run_all([planned], None, None, fatal=BackendError)
        assert not result.passed
        assert result.max_abs >= 0.5
        assert array in result.fault

    def test_a_wrong_reference_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def breadth_first(log_probs: Any, budget: int) -> list[tuple[int, int, int]]:
            return [(0, 1, rank) for rank in range(min(budget, log_probs.shape[1]))]

        monkeypatch.setattr(reference_build, "best_first", breadth_first)
        (result,) = run_all(planned_checks("numpy", 0)[:1], None, None, fatal=BackendError)
        assert not result.passed

    def test_a_wrong_formula_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def blind(inputs: Any, tree: Any) -> dict[str, Any]:
            results = reference_results(inputs)["verify_attention"]
            return results | {"lse": results["lse"] + 1e-9}

        monkeypatch.setattr(checks, "reference_attention", blind)
        (result,) = run_all(planned_checks("numpy", 0)[-1:], None, None, fatal=BackendError)
        assert not result.passed


class TestPlan:
    def test_kernels_meet_every_case(self) -> None:
        names = [check.name for check in planned_checks("cuda", 0)]
        assert len(set(names)) == len(names)
        assert {f"build_tree/{case.name}" for case in TREE_CASES} <= set(names)
        assert {f"verify_attention/{case.name}" for case in ATTENTION_CASES} <= set(names)

    def test_the_simulator_gets_small_cases_and_says_so(self) -> None:
        planned = {check.name: check.case for check in planned_checks("simulator", 0)}
        assert planned["build_tree/realistic_b24"] == "B=1 L=15 K=25 budget=24"
        assert planned["verify_attention/h2_p40_b9"] == "B=1 N=10 H=2 prefix=40 D=16+8"


class TestRunAll:
    def test_an_exception_is_a_failure_and_the_rest_still_runs(self) -> None:
        def fails() -> tuple[Comparison, float]:
            raise IndexError("out of\nbounds")

        broken, fine = Check("a", "", fails), Check("b", "", lambda: (Comparison(), 1.0))
        first, second = run_all([broken, fine], None, None, fatal=BackendError)
        assert (first.passed, second.passed) == (False, True)
        assert first.fault == "IndexError: out of bounds"
        members = first.as_json()
        assert members == {
            "name": "a",
            "passed": False,
            "max_abs": None,
            "max_rel": None,
            "us": None,
            "case": "",
        }
        json.dumps(members, allow_nan=False)

    def test_fatal_errors_end_it(self) -> None:
        def fails() -> tuple[Comparison, float]:
            raise BackendError("no device")

        with pytest.raises(BackendError):
            run_all([Check("a", "", fails)], None, None, fatal=BackendError)


class TestCompareArrays:
    @pytest.mark.parametrize("dtype", [np.int32, np.float32])
    def test_equal(self, dtype: type[np.generic]) -> None:
        array = np.array([1, 2], dtype)
        assert compare_arrays({"a": array}, {"a": array}) == Comparison()

    def test_tolerance_is_for_floats(self) -> None:
        floats = compare_arrays({"a": np.float32([1.5])}, {"a": np.float64([1.0])}, 0.5)
        assert floats == Comparison(0.5, 0.5)
        integers = compare_arrays({"a": np.int32([2])}, {"a": np.int32([1])}, 5.0)
        assert integers.fault == "a[0]: got 2; expected 1"

    @pytest.mark.parametrize(
        ("got", "expected"),
        [
            (np.zeros(2, np.int32), np.zeros(3, np.int32)),
            (np.zeros(2, np.int64), np.zeros(2, np.int32)),
            (np.array([np.nan]), np.array([0.0])),
            (np.array([np.inf]), np.array([-np.inf])),
            (np.array([1.0]), np.array([-np.inf])),
        ],
    )
    def test_infinitely_wrong(self, got: Any, expected: Any) -> None:
        comparison = compare_arrays({"a": got}, {"a": expected}, 1e9)
        assert comparison.max_abs == math.inf
        assert comparison.fault

    def test_equal_infinities_and_nothing(self) -> None:
        infinite = np.array([-np.inf, 1.0])
        assert not compare_arrays({"a": infinite}, {"a": infinite}).fault
        assert not compare_arrays({"a": np.zeros((0, 3))}, {"a": np.zeros((0, 3))}).fault

    def test_difference_from_zero(self) -> None:
        assert compare_arrays({"a": np.int32([1])}, {"a": np.int32([0])}).max_rel == math.inf


class TestGoldenArrays:
    def test_links_of_a_small_tree(self) -> None:
        golden = replace(
            load_golden_trees()["gumbel_L4_V1000_B7"],
            token_ids=np.array([5, 6, 7], np.int32),
            depths=np.array([1, 1, 2], np.int32),
            parents=np.array([-1, 0, 0, 1], np.int32),
            ancestor_bits=np.array([[1], [3], [5], [11]], np.uint32),
        )
        arrays = checks.golden_arrays(golden, 5)
        assert arrays["first_child"].tolist() == [[1, 3, -1, -1, -1]]
        assert arrays["next_sibling"].tolist() == [[-1, 2, -1, -1, -1]]
        assert arrays["token_ids"].tolist() == [[0, 5, 6, 7, 0]]
        assert arrays["status"].tolist() == [3]


class TestRounds:
    def test_stored_results_are_reproduced(self, round_path: Path) -> None:
        results = run_round(read_round(round_path), "numpy")
        assert [result.name for result in results] == [
            "build_tree/stored",
            "verify_attention/stored",
            "accept_tree/stored",
        ]
        assert all(result.passed for result in results)

    @pytest.mark.parametrize(
        ("tensor", "stage"),
        [
            ("expected__parents", "build_tree"),
            ("expected__out", "verify_attention"),
            ("expected__accept_length", "accept_tree"),
        ],
    )
    def test_a_wrong_stored_array_fails(self, round_path: Path, tensor: str, stage: str) -> None:
        array = read_bundle(round_path, map_payloads=False).tensors[tensor.replace("__", "/")].copy()
        array.flat[-1] += 1
        results = run_round(read_round(edited(round_path, **{tensor: array})), "numpy")
        assert [result.name for result in results if not result.passed] == [f"{stage}/stored"]

    @pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
    def test_unit_scale_widens_no_bound(self, case: AttentionCase) -> None:
        inputs = case.inputs()
        nodes = reference_tree(inputs.draft).num_nodes
        rows = inputs.draft.prefix_lengths + nodes
        scales = round_checks._scales(inputs.required_attention, rows, nodes)
        assert scales == {"out": 1.0, "lse": 1.0}

    def test_bounds_follow_the_magnitude_of_what_is_read(self, tmp_path: Path) -> None:
        # 20 times the queries make scores, and the ulp of lse, 20 times as large.
        inputs = ATTENTION_CASES[0].shrunk().inputs()
        attention = inputs.required_attention
        attention = replace(attention, q_nope=20 * attention.q_nope, q_pe=20 * attention.q_pe)
        # A row that no node reads must not count.
        attention.ckv_cache[:, -1] = 1e30
        inputs = replace(inputs, attention=attention)
        path = tmp_path / "large.kdtr"
        write_bundle(path, round_tensors(inputs, reference_results(inputs)))
        assert all(result.passed for result in run_round(read_round(path), "numpy"))
        for name in ("out", "lse"):
            array = read_bundle(path, map_payloads=False).tensors[f"expected/{name}"].copy()
            array.flat[0] += 1e-3
            results = run_round(read_round(edited(path, **{f"expected__{name}": array})), "numpy")
            assert [result.name for result in results if not result.passed] == ["verify_attention/stored"]
            write_bundle(path, round_tensors(inputs, reference_results(inputs)))

    def test_attention_may_be_missing(self, tmp_path: Path) -> None:
        inputs = TREE_CASES[1].inputs()
        path = tmp_path / "tree.kdtr"
        write_bundle(path, round_tensors(inputs, reference_results(inputs)))
        assert all(result.passed for result in run_round(read_round(path), "numpy"))

    def test_references_are_not_compared_with_themselves(self, tmp_path: Path) -> None:
        path = tmp_path / "tree.kdtr"
        write_bundle(path, round_tensors(TREE_CASES[1].inputs(), {}))
        with pytest.raises(BundleError, match="no expected arrays"):
            run_round(read_round(path), "numpy")

    def test_bad_values_are_not_failures(self, round_path: Path) -> None:
        bundle = read_round(edited(round_path, prefix_lengths=np.array([10**6], np.int32)))
        with pytest.raises(ArgumentError, match="prefix_lengths"):
            run_round(bundle, "numpy")

    def test_bundles_of_before_the_emitted_tokens_are_read(self, round_path: Path) -> None:
        path = edited(round_path, expected__tokens=None, expected__finish_reason=None)
        bundle = read_round(path)
        assert list(bundle.expected["accept_tree"]) == ["accepted_indices", "accept_length", "bonus_token"]
        assert all(result.passed for result in run_round(bundle, "numpy"))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"expected__tokens": np.zeros((1, 2), np.int32)}, r"'expected/tokens': .*\[B, L\+1\]"),
            ({"draft_log_probs": None}, "no tensor draft_log_probs; a round has"),
            ({"q_pe": None, "sm_scale": None}, "no tensor q_pe, sm_scale; a round has q_nope"),
            ({"expected__depths": None}, "no tensor expected/depths"),
            ({"budgets": np.zeros(1)}, r"'budgets': float64 of shape \[1\]; expected int32 \[B\] with B = 1"),
            ({"budgets": np.zeros(2, np.int32)}, r"'budgets': int32 of shape \[2\]; expected int32 \[B\]"),
            ({"q_pe": np.zeros((1, 9, 2), np.float32)}, r"'q_pe': .*expected float32 \[B, N, H, D_KPE\]"),
            ({"expected__lse": np.zeros((1, 9, 2))}, "with B = 1, N = 9, H = 1"),
            ({"expected__ancestor_bits": np.zeros((1, 9, 2), np.uint32)}, "words = 1"),
            ({"target_tokens": np.zeros((1, 0), np.int32)}, r"expected int32 or int64 \[B, N\]"),
            (
                dict.fromkeys(("q_nope", "q_pe", "ckv_cache", "kpe_cache", "sm_scale")),
                "expected results without their inputs",
            ),
        ],
    )
    def test_bad_bundles(self, round_path: Path, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(BundleError, match=message) as caught:
            read_round(edited(round_path, **changes))
        assert "round.kdtr" in str(caught.value)

    def test_kernels_would_also_be_compared_with_the_references(
        self, round_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The references stand in for the kernels, which this process cannot run.
        class ReferencesAsKernels(Stages):
            def __init__(self, backend: stages.Backend) -> None:
                super().__init__("numpy")
                self.backend = backend

            def _placed(self, array: Any) -> Any:
                return array

            def _fetched(self, array: Any) -> Any:
                return array

        monkeypatch.setattr(round_checks, "Stages", ReferencesAsKernels)
        results = run_round(read_round(round_path), "simulator")
        assert len(results) == 6
        assert sum(result.name.endswith("/reference") for result in results) == 3
        # Held to the kernels' tighter bound, which the float32 reference meets at this size.
        assert all(result.passed for result in results)


@pytest.mark.gpu
def test_every_check_passes_on_the_device() -> None:
    results = run_checks("cuda")
    assert [(result.name, result.fault) for result in results if not result.passed] == []


class TestKernelChecks:
    @pytest.mark.parametrize(
        ("stage", "array", "check"),
        [
            ("draft_topk", "token_ids", lambda stages: checks._check_topk(stages, (1, 2, 50), 4, 0)),
            ("draft_topk", "log_probs", lambda stages: checks._check_topk(stages, (1, 2, 50), 4, 0)),
            ("choose_tokens", "tokens", lambda stages: checks._check_choose(stages, (1, 2, 50), 0.8, 0)),
            ("compact_kv", "cache", lambda stages: checks._check_compact(stages, 0)),
        ],
    )
    def test_one_wrong_element_is_a_fault(
        self, stage: str, array: str, check: Callable[[Stages], tuple[Comparison, float]]
    ) -> None:
        stages = Stages("numpy")
        assert not check(stages)[0].fault
        setattr(stages, stage, skewed(getattr(stages, stage), array))
        assert check(stages)[0].fault.startswith(array)
