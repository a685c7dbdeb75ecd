"""The reference bundles: complete, the same each time, and such as `round` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from numba_ddtree.bundle import read_bundle
from numba_ddtree.cases import ACCEPT_CASES, ATTENTION_CASES, TREE_CASES
from numba_ddtree.round_bundle import STAGES, read_round
from numba_ddtree.round_checks import run_round
from tools import make_bundles

NAMES = ["chain_b15", "mixed_b128", "h8_p0_b8", "h2_p10_b8"]


def test_equal_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = tmp_path / "deep" / "a", tmp_path / "b", tmp_path / "c"
    for folder, seed in ((first, "0"), (second, "0"), (other, "1")):
        assert make_bundles.main([*NAMES, "--out", str(folder), "--seed", seed]) == 0
    written = sorted(path.name for path in first.iterdir())
    assert written == sorted(f"{name}.kdtr" for name in NAMES)
    for name in written:
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).read_bytes() != (other / name).read_bytes()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(NAMES)
    assert "chain_b15.kdtr" in lines[0]
    assert "budget=15" in lines[0]


def test_every_case_has_a_bundle() -> None:
    names = [case.name for case in make_bundles._cases([])]
    assert {case.name for case in (*TREE_CASES, *ACCEPT_CASES, *ATTENTION_CASES)} <= set(names)
    assert {case.shrunk().name for case in ATTENTION_CASES} <= set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["mixed_b128", "h2_p10_b8"])
def test_rounds_pass(tmp_path: Path, name: str) -> None:
    assert make_bundles.main([name, "--out", str(tmp_path), "--seed", "2"]) == 0
    path = tmp_path / f"{name}.kdtr"
    assert read_bundle(path).metadata["seed"] == 2
    bundle = read_round(path)
    has_attention = bundle.inputs.attention is not None
    assert set(bundle.expected) == {stage for stage in STAGES if has_attention or stage != "verify_attention"}
    assert all(result.passed for result in run_round(bundle, "numpy"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_case"], "no case 'no_such_case'; there are realistic_b1"),
        (["--seed", "x"], "argument --seed: got 'x'; expected a whole number from 0 on"),
        (["--out", __file__], "File exists"),
    ],
)
def test_bad_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = make_bundles.main(arguments)
    except SystemExit as caught:
        code = caught.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
