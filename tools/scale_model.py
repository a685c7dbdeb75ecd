"""Predict rounds over 1 to 8 devices from measured costs, and compare with what was measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.table import Table

# bench/ and tools/ are not part of the package, and a script finds no more than its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.results_schema import Results, load_results
from numba_ddtree.command import (
    OneLineParser,
    real_number,
    run_command,
    whole_number,
    whole_numbers,
)
from numba_ddtree.errors import ArgumentError, DDTreeError
from numba_ddtree.reporting import PipeConsole
from numba_ddtree.run import MAX_BUDGET
from tools.scaling.costs import MEASURED_BUDGET, Costs, costs_of
from tools.scaling.prediction import LaneComparison, Workload, apart_us, overlapped_us, predict, simulate

_FOLDER = Path(__file__).resolve().parent.parent / "bench" / "results"
_WIDTH = 110
_TOLERANCE = 0.15  # the closed form leaves out what the split of requests that end together evens out
_EXIT_APART = 1

# So that the simulation's lengths fit int32, and what is asked for ends.
MAX_BATCH, MAX_TOKENS, MAX_DEVICES, MAX_HEADS, MAX_LAYERS = 2**20, 2**24, 2**10, 2**16, 2**16

ACCEPT_LENGTHS = {1: 1.81, 4: 3.26, 16: 4.53, 64: 5.26, 256: 5.88}
"""Mean tokens of a round by budget: the demo model's, from the table in the README."""

_EPILOG = """\
exit codes: 0 the simulation agrees with the closed form within 15 %; 1 it does not; 2 wrong usage, or results
that are missing or malformed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return run_command("scale_model.py", lambda: _run(_parse(arguments)), (DDTreeError, OSError))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="scale_model.py",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, tokens = parser.add_argument, whole_number(1, MAX_TOKENS)
    add("--results", type=Path, default=_FOLDER, help="the folder of results (default: bench/results)")
    for name, most, default in (
        ("--batch", MAX_BATCH, (8, 32, 128)),
        ("--budget", MAX_BUDGET, (16, 64, 256)),
        ("--devices", MAX_DEVICES, (1, 2, 4, 8)),
    ):
        text = f"(default: {','.join(map(str, default))})"
        add(name, type=whole_numbers(1, most), default=default, metavar="N,N,...", help=text)
    add("--heads-over-devices", action="store_true", help="split heads, and not requests")
    add("--prefix", type=tokens, default=4096, help="mean length of the prompts (default: 4096)")
    add("--new-tokens", type=tokens, default=512, help="tokens that a request writes (default: 512)")
    add("--heads", type=whole_number(1, MAX_HEADS), default=64, help="of the target (default: 64)")
    add(
        "--layers",
        type=whole_number(0, MAX_LAYERS),
        default=61,
        help="of the target; 0 leaves attention out (default: 61)",
    )
    add("--accept-length", type=real_number(1), help="tokens of a round and request (default: by the budget)")
    add("--model-us", type=real_number(0), default=0.0, help="the models' time a round, without attention")
    add("--seed", type=whole_number(), default=0, help="of the simulation (default: 0)")
    add("--json", action="store_true", help="JSON on stdout")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    if not options.results.is_dir():
        raise ArgumentError("--results", repr(str(options.results)), "a folder of results")
    results = load_results(options.results)
    costs = costs_of(results)
    rows = list(_rows(costs, options))
    lanes = compare_lanes(costs, results["lanes"])
    if options.json:
        comparisons = [asdict(each) | {"error": each.error} for each in lanes]
        assumed = _assumptions(costs, options)
        print(json.dumps({"assumptions": assumed, "rows": rows, "two_lanes": comparisons}, indent=1))
    else:
        _show(costs, options, rows, lanes)
    return _EXIT_APART if any(abs(row["difference"]) > _TOLERANCE for row in rows) else 0


def _rows(costs: Costs, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    _check_accept_length(options.accept_length, costs, options.budget)
    rng = np.random.default_rng(options.seed)
    for batch in options.batch:
        for budget in options.budget:
            for devices in options.devices:
                work = Workload(
                    batch,
                    budget,
                    options.prefix,
                    options.new_tokens,
                    options.heads,
                    options.layers,
                    options.accept_length or accept_length(budget),
                    options.model_us,
                    options.heads_over_devices,
                )
                closed, simulated = predict(costs, work, devices), simulate(costs, work, devices, rng)
                yield {
                    "batch": batch,
                    "budget": budget,
                    "devices": devices,
                    "round_us": closed.round_us,
                    "tokens_per_second": closed.tokens_per_second,
                    "simulated_round_us": simulated.round_us,
                    "simulated_tokens_per_second": simulated.tokens_per_second,
                    "difference": closed.round_us / simulated.round_us - 1,
                }


def _check_accept_length(given: float | None, costs: Costs, budgets: Sequence[int]) -> None:
    """Check that the tokens of a round are no more than its drafts and one."""
    for budget in budgets:
        most = min(costs.draft_length, budget) + 1
        if given is not None and given > most:
            expected = f"at most {most}, the root and the deepest path of a tree of {budget} nodes"
            raise ArgumentError("--accept-length", given, f"{expected}, L = {costs.draft_length}")


def accept_length(budget: int) -> float:
    """Return the demo model's tokens of a round, between measured budgets by the logarithm of the budget."""
    known = np.log(list(ACCEPT_LENGTHS))
    return float(np.interp(np.log(max(budget, 1)), known, list(ACCEPT_LENGTHS.values())))


def compare_lanes(costs: Costs, lanes: Results) -> list[LaneComparison]:
    """Compare the predictions for two lanes, on one device and on two, with the rounds that were measured."""
    predictions = {"0,0": overlapped_us, "0,1": apart_us}
    return [
        LaneComparison(
            str(row.case["devices"]),
            int(row.case["B"]),
            predictions[str(row.case["devices"])](costs, int(row.case["B"]), int(row.case["budget"]), 2),
            row.us,
            row.peer_us,
        )
        for row in lanes.rows
        if row.case["work"] == "round, not gathered" and row.case["devices"] in predictions and row.peer_us
    ]


def _assumptions(costs: Costs, options: argparse.Namespace) -> list[str]:
    split = "heads, each device with all requests" if options.heads_over_devices else "requests"
    assumed = [
        f"measured on one {costs.device}; every other device is its equal",
        f"over the devices are split: {split}",
        f"a round without models takes {costs.round.fixed:.0f} µs and the time to read its logits, float32 "
        f"and bfloat16, L = {costs.draft_length}, V = {costs.vocabulary}, at "
        f"{1e-3 / costs.round.slope:.0f} GB/s (off by {100 * costs.round.error:.1f} % at most where it was "
        f"measured); budgets other than {MEASURED_BUDGET} differ by the time of build_tree as well",
        f"the models take {options.model_us:g} µs a round beside attention, whatever the batch",
        f"requests begin with 0 to {2 * options.prefix} tokens and write {options.new_tokens}; tokens of a "
        "round are "
        + (
            "the demo model's for the budget" if options.accept_length is None else f"{options.accept_length}"
        ),
        "places that fall free are taken by whoever comes next, whatever the length",
        "all devices begin a round together, when the last has ended the one before",
        "what devices send each other is left out: results are a few hundred bytes a request, and heads stay "
        "where they are",
    ]
    if options.layers and costs.attention is not None:
        rate = 1e-6 / costs.attention.slope
        assumed.append(
            f"attention takes {costs.attention.fixed:.0f} µs a layer and the time of its operations at "
            f"{rate:.0f} TFLOP/s; {options.heads} heads, {options.layers} layers"
        )
    else:
        assumed.append("attention is left out")
    return assumed


def _show(
    costs: Costs,
    options: argparse.Namespace,
    rows: Sequence[dict[str, float]],
    lanes: Sequence[LaneComparison],
) -> None:
    console = PipeConsole(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print("Assumptions")
    for line in _assumptions(costs, options):
        console.print(f"- {line}", markup=False)
    table = _table(
        "Predicted and simulated", "batch", "budget", "devices", "round µs", "tokens/s", "simulated µs",
        "simulated tokens/s", "difference %",
    )  # fmt: skip
    for row in rows:
        figures = list(row.values())
        cells = [f"{value:.0f}" for value in figures[:-1]]
        table.add_row(*cells, f"{100 * row['difference']:+.1f}")
    console.print(table)
    table = _table(
        "Two lanes, µs a round", "devices", "batch", "predicted", "measured", "error %", "one after the other"
    )
    for each in lanes:
        times = (f"{value:.0f}" for value in (each.predicted, each.measured))
        table.add_row(each.devices, str(each.batch), *times, f"{100 * each.error:+.1f}", f"{each.alone:.0f}")
    console.print(table)


def _table(title: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


if __name__ == "__main__":
    sys.exit(main())
