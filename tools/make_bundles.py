"""Write the reference bundles: the inputs of named rounds and the numpy references' results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from numba_ddtree.bundle import write_bundle
from numba_ddtree.cases import ACCEPT_CASES, ATTENTION_CASES, TREE_CASES, AttentionCase, TreeCase
from numba_ddtree.command import OneLineParser, run_command, whole_number
from numba_ddtree.errors import DDTreeError
from numba_ddtree.round_bundle import reference_results, round_tensors

_EPILOG = """\
There is a bundle for every tree, acceptance and attention case of numba_ddtree/cases.py, and for every
attention case in the size that Numba's CUDA simulator can run. numba_ddtree/round_bundle.py lists the
tensors; `numba-ddtree round` runs a bundle. Equal seeds give equal bytes, with the same numpy and machine.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; by default that of the process.

    Returns
    -------
    int
        The exit code: 0, or 2 for wrong usage or a folder that cannot be written.
    """
    return run_command("make_bundles", lambda: _make(_parser().parse_args(arguments)), (DDTreeError, OSError))


def _make(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    for case in _cases(options.names):
        path = options.out / f"{case.name}.kdtr"
        _write(path, case, options.seed)
        print(f"{path}  {path.stat().st_size:,} bytes  {case.size}")
    return 0


def _all_cases() -> dict[str, TreeCase | AttentionCase]:
    trees: dict[str, TreeCase | AttentionCase] = {case.name: case for case in (*TREE_CASES, *ACCEPT_CASES)}
    simulated = [case.shrunk() for case in ATTENTION_CASES]
    return trees | {case.name: case for case in (*ATTENTION_CASES, *simulated)}


def _cases(names: Sequence[str]) -> list[TreeCase | AttentionCase]:
    cases = _all_cases()
    return [cases[name] for name in names] if names else list(cases.values())


def _write(path: Path, case: TreeCase | AttentionCase, seed: int) -> None:
    inputs = case.inputs(seed)
    tensors = round_tensors(inputs, reference_results(inputs))
    write_bundle(path, tensors, {"case": case.name, "size": inputs.size, "seed": seed})


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="make_bundles.py",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", type=_case_name, metavar="CASE", help="only these cases (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bundles"), metavar="DIR", help="the folder (default: bundles)"
    )
    parser.add_argument(
        "--seed", type=whole_number(), default=0, metavar="N", help="seed of the inputs (default: 0)"
    )
    return parser


def _case_name(text: str) -> str:
    if text not in _all_cases():
        raise argparse.ArgumentTypeError(f"no case {text!r}; there are {', '.join(_all_cases())}")
    return text


if __name__ == "__main__":
    sys.exit(main())
