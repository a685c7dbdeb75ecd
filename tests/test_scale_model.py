"""The scale model: costs are fitted to results, and the closed form agrees with the simulation."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# bench/ and tools/ are not part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.results_schema import Results, Row
from tools import scale_model
from tools.scaling.costs import FLOPS_A_KEY, CostError, Costs, Line, costs_of
from tools.scaling.prediction import Workload, overlapped_us, predict, simulate

FIXED_US, REQUEST_US, HOST_US = 100.0, 9.0, 12.0
SIZES = {"L": 15, "V": 1000, "budget": 64}
ATTENTION = {"H": 64, "N": 65, "prefix": 8192}


def results_of(operation: str, rows: list[Row]) -> Results:
    return Results(
        operation=operation,
        device="Some device",
        driver="1",
        date=datetime.date(2026, 11, 30),
        commit="0123456789ab",
        timing="none",
        rows=rows,
    )


def lane_rows() -> list[Row]:
    """Make rounds and attention that are exactly linear, and two lanes that overlap less than predicted."""
    rows = []
    for batch in (8, 32, 128):
        us = FIXED_US + REQUEST_US * batch
        for lanes, devices in ((1, "0"), (2, "0,0")):
            case = {"work": "round", "B": batch, **SIZES, "lanes": lanes, "devices": devices}
            rows.append(Row(case=case, kernel="RoundLanes", us=us + 10 * (lanes - 1), host_us=HOST_US))
        case = {"work": "round, not gathered", "B": batch, **SIZES, "lanes": 2, "devices": "0,0"}
        alone = 2 * (FIXED_US + REQUEST_US * batch / 2)
        rows.append(Row(case=case, kernel="RoundLanes", us=us / 0.9, peer="alone", peer_us=alone))
        case = case | {"devices": "0,1"}
        rows.append(Row(case=case, kernel="RoundLanes", us=alone / 2, peer="alone", peer_us=alone))
    for batch in (1, 8):
        work = FLOPS_A_KEY * batch * (8192 + 65) * 64 * 65
        case = {"work": "attention", "B": batch, **ATTENTION, "lanes": 1, "devices": "0"}
        rows.append(Row(case=case, kernel="HeadLanes", us=20 + work / 500e6))
    return rows


def all_results() -> dict[str, Results]:
    build = [
        Row(case={"B": 32, "L": 15, "K": budget, "budget": budget}, kernel="build_tree", us=us)
        for budget, us in ((16, 10.0), (64, 40.0), (256, 130.0))
    ]
    return {"lanes": results_of("lanes", lane_rows()), "tree_build": results_of("tree_build", build)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, results in all_results().items():
        results.save(tmp_path / f"{name}.json")
    return tmp_path


def workload(**changes: Any) -> Workload:
    given: dict[str, Any] = {
        "batch": 32,
        "budget": 64,
        "prefix": 2000,
        "new_tokens": 200,
        "heads": 64,
        "layers": 3,
        "accept_length": 4.0,
        "model_us": 0.0,
        "by_head": False,
    }
    return Workload(**(given | changes))


def test_costs_are_those_of_the_results() -> None:
    costs = costs_of(all_results())
    for batch in (8, 20, 128):
        assert costs.round_us(batch, 64) == pytest.approx(FIXED_US + REQUEST_US * batch)
    assert costs.round.error < 1e-9
    assert costs.attention is not None
    assert costs.attention.fixed == pytest.approx(20)
    assert costs.attention.slope == pytest.approx(1 / 500e6)
    assert costs.lane_host_us == HOST_US
    assert [costs.build_us(budget) for budget in (0, 8, 16, 40, 256, 512)] == [0, 5, 10, 25, 130, 260]
    # Of another budget, the time of its build_tree and that of its logits.
    logits = REQUEST_US * (15 * 4 + 17 * 2) / (15 * 4 + 65 * 2)
    assert costs.round_us(8, 16) == pytest.approx(FIXED_US + 8 * logits + 10 - 40)
    assert costs.round_us(0, 64) == 0


@pytest.mark.parametrize(
    ("points", "fixed", "slope"),
    [
        ([(1, 3), (2, 5), (4, 9)], 1, 2),
        ([(5, 10)], 0, 2),
        ([(1, 1), (2, 4)], 0, None),
        ([(1, 5), (2, 4)], None, 0),
    ],
)
def test_a_line_is_never_falling_or_below_zero(
    points: list[tuple[float, float]], fixed: float | None, slope: float | None
) -> None:
    line = Line.fit(points)
    assert line.fixed >= 0
    assert line.slope >= 0
    assert fixed is None or line.fixed == pytest.approx(fixed)
    assert slope is None or line.slope == pytest.approx(slope)
    assert line.error == pytest.approx(max(abs(line.at(work) / us - 1) for work, us in points))


def test_what_is_not_measured_is_named() -> None:
    results = all_results()
    with pytest.raises(CostError, match=r"no lanes\.json"):
        costs_of({"tree_build": results["tree_build"]})
    with pytest.raises(CostError, match=r"tree_build\.json has no build_tree of budget 64"):
        costs_of({"lanes": results["lanes"]})
    one = results_of("lanes", lane_rows()[:1])
    with pytest.raises(CostError, match="two batches"):
        costs_of(results | {"lanes": one})


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("layers", [0, 3])
def test_the_simulation_agrees(rng: np.random.Generator, devices: int, by_head: bool, layers: int) -> None:
    costs, work = costs_of(all_results()), workload(by_head=by_head, layers=layers)
    closed, simulated = predict(costs, work, devices), simulate(costs, work, devices, rng)
    # The mean of 600 lengths is off by 2.4 % in standard deviation, the geometric's by less.
    assert closed.round_us == pytest.approx(simulated.round_us, rel=0.12)
    assert closed.tokens_per_second == pytest.approx(simulated.tokens_per_second, rel=0.15)


def test_more_devices_are_quicker_and_share_what_grows() -> None:
    costs = costs_of(all_results())
    times = [predict(costs, workload(layers=0), devices).round_us for devices in (1, 2, 4, 8)]
    assert times == pytest.approx([FIXED_US + REQUEST_US * 32 / devices for devices in (1, 2, 4, 8)])
    by_head = [predict(costs, workload(by_head=True), devices).round_us for devices in (1, 8)]
    keys = 32 * (2000 + 100 + 65)
    for us, heads in zip(by_head, (64, 8), strict=True):
        attention = 3 * (20 + FLOPS_A_KEY * keys * heads * 65 / 500e6)
        assert us == pytest.approx(FIXED_US + REQUEST_US * 32 + attention)


def test_tokens_are_counted() -> None:
    costs = costs_of(all_results())
    predicted = predict(costs, workload(layers=0, model_us=1000), 1)
    assert predicted.round_us == pytest.approx(1000 + FIXED_US + REQUEST_US * 32)
    assert predicted.tokens_per_second == pytest.approx(32 * 4 * 1e6 / predicted.round_us)


def test_two_lanes_are_compared_with_the_measurement() -> None:
    results = all_results()
    compared = scale_model.compare_lanes(costs_of(results), results["lanes"])
    assert [(each.devices, each.batch) for each in compared] == [
        (devices, batch) for batch in (8, 32, 128) for devices in ("0,0", "0,1")
    ]
    assert [each.error for each in compared] == pytest.approx([-0.1, 0] * 3)
    alone = [200 + REQUEST_US * each.batch for each in compared]
    assert [each.alone for each in compared] == pytest.approx(alone)


def test_a_slow_host_shows() -> None:
    from dataclasses import replace

    costs = replace(costs_of(all_results()), lane_host_us=500.0)
    assert overlapped_us(costs, 8, 64, 2) == 1000


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [
        "--results",
        str(folder),
        "--batch",
        "8,32",
        "--budget",
        "64",
        "--devices",
        "1,2",
        "--layers",
        "0",
    ]
    assert scale_model.main(short) == 0
    text = capsys.readouterr().out
    for part in (
        "Assumptions",
        "Some device",
        "100 µs",
        "one after the other",
        "-10.0",
        "attention is left out",
    ):
        assert part in text
    assert scale_model.main([*short, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["devices"]) for row in found["rows"]] == [(8, 1), (8, 2), (32, 1), (32, 2)]
    assert found["two_lanes"][0]["measured"] == pytest.approx((FIXED_US + 8 * REQUEST_US) / 0.9)
    assert any("2000" not in line and "accept" not in line for line in found["assumptions"])


def test_a_simulation_that_disagrees_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(costs: Costs, work: Workload, devices: int, rng: np.random.Generator) -> Any:
        closed = predict(costs, work, devices)
        return type(closed)(2 * closed.round_us, closed.tokens_per_second)

    monkeypatch.setattr(scale_model, "simulate", twice)
    assert scale_model.main(["--results", str(folder), "--batch", "8", "--devices", "1"]) == 1
    assert "-50.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--batch", "0"],
            "argument --batch: got '0'; expected whole numbers from 1 to 1048576, with commas",
        ),
        (["--batch", "-1"], "argument --batch: got '-1'; expected whole numbers from 1"),
        (["--batch", "8,,1"], "argument --batch: got '8,,1'; expected whole numbers"),
        (["--batch", str(2**64)], "argument --batch: got '18446744073709551616'; expected whole numbers"),
        (["--budget", "1025"], "argument --budget: got '1025'; expected whole numbers from 1 to 1024"),
        (["--devices", "two"], "argument --devices: got 'two'; expected whole numbers"),
        (["--prefix", "-1"], "argument --prefix: got '-1'; expected a whole number from 1 to 16777216"),
        (["--new-tokens", "0"], "argument --new-tokens: got '0'; expected a whole number from 1"),
        (["--heads", "1e3"], "argument --heads: got '1e3'; expected a whole number from 1"),
        (["--layers", "-3"], "argument --layers: got '-3'; expected a whole number from 0"),
        (["--accept-length", "0"], "argument --accept-length: got '0'; expected a finite number from 1 on"),
        (["--accept-length", "nan"], "argument --accept-length: got 'nan'; expected a finite number from 1"),
        (["--accept-length", "x"], "argument --accept-length: got 'x'; expected a finite number from 1"),
        (
            ["--accept-length", "5", "--budget", "64,3"],
            "--accept-length: got 5.0; expected at most 4, the root",
        ),
        (["--model-us", "-5"], "argument --model-us: got '-5'; expected a finite number from 0 on"),
        (["--model-us", "inf"], "argument --model-us: got 'inf'; expected a finite number from 0 on"),
        (["--seed", "-1"], "argument --seed: got '-1'; expected a whole number from 0 on"),
        (["--results", "nowhere"], "--results: got 'nowhere'; expected a folder of results"),
    ],
)
def test_wrong_use(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = scale_model.main(["--results", str(folder), *arguments])
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"scale_model.py: {message}")
    assert error.count("\n") == 1


def test_acceptance_by_budget() -> None:
    known = scale_model.ACCEPT_LENGTHS
    assert [scale_model.accept_length(budget) for budget in known] == pytest.approx(list(known.values()))
    assert known[16] < scale_model.accept_length(32) < known[64]
    assert scale_model.accept_length(1024) == known[256]
