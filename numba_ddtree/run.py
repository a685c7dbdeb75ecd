"""The command line: decode text, check the kernels, run a round from a file, describe the environment.

Nothing is imported up here that imports Numba, since the simulator has to be chosen before that, or that
takes long, since ``--help`` should not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from numba_ddtree.command import (
    EXIT_INTERRUPTED,
    OneLineParser,
    end_when_interrupted,
    raise_dropped_interruption,
    raise_when_interrupted,
    real_number,
    run_command,
    whole_number,
    whole_numbers,
)
from numba_ddtree.errors import BackendError, DDTreeError

if TYPE_CHECKING:
    from typing import Literal

    from numba_ddtree.check_results import CheckResult, OnResult, OnStart
    from numba_ddtree.reporting import Reporter
    from numba_ddtree.round_bundle import RoundBundle
    from numba_ddtree.stages import Backend

__all__ = ["main"]

PROGRAM = "numba-ddtree"
BACKENDS = ("auto", "cuda", "simulator", "numpy")
SIMULATED_ROUND_SECONDS = 60
MAX_BUDGET = 1024  # that of `build_tree`, which this file is not to import
DTYPES = ("float32", "bfloat16")  # those of `numba_ddtree.demo.latent_attention`, likewise

EXIT_FAILED = 1

Runner: TypeAlias = "Callable[[OnResult, OnStart], list[CheckResult]]"

_DESCRIPTION = """\
Draft trees for speculative decoding with MLA models, as Numba CUDA kernels.

Without a command, `decode` runs: a small language model with MLA continues Python source three ways, token
by token, with a drafted chain and with draft trees, and the outputs are compared. Without a CUDA device it
runs on numpy, in less than a minute.
"""

_EPILOG = """\
examples:
  numba-ddtree
  numba-ddtree --prompt 'def main():' --budget 4,16,64 --max-new-tokens 256
  numba-ddtree decode --prompt-file - --temperature 0.8 --seed 3 --json < prompt.py
  numba-ddtree decode --devices 0,1 --prompts 16
  numba-ddtree decode --trace rounds.kdtr --plot acceptance.svg && numba-ddtree round rounds.kdtr
  numba-ddtree check --backend numpy --json | jq '.[] | select(.passed | not)'
  numba-ddtree round bundles/h64_p512_b8.kdtr --backend cuda --device 1
  numba-ddtree env

exit codes: 0 all passed; 1 a check failed, or a decoder's text differs; 2 wrong usage, a bad file, or no such
device; 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        The exit code, as ``--help`` lists them.
    """
    return run_command(PROGRAM, lambda: _run(_parse(arguments)), (DDTreeError, ImportError, OSError))


def _run(options: argparse.Namespace) -> int:
    if options.command == "env":
        return _run_env(options)
    if options.command == "round":
        return _run_round(options)
    if options.command == "check":
        return _run_check(options)
    return _run_decode(options)


def _run_decode(options: argparse.Namespace) -> int:
    backend = _decode_backend(options)
    for device in options.devices or (options.device,):
        _check_device(backend, device)
    from numba_ddtree.demo.command import run_decode

    raise_when_interrupted()
    outcome = run_decode(options, backend)
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return 0 if outcome.is_lossless else EXIT_FAILED


def _decode_backend(options: argparse.Namespace) -> Literal["cuda", "numpy"]:
    """Settle where the demo model runs; the simulator would take hours."""
    if options.backend == "simulator":
        raise BackendError("decoding in Numba's simulator would take hours; use --backend numpy")
    if options.backend != "auto":
        return "cuda" if options.backend == "cuda" else "numpy"
    from numba_ddtree.environment import choose_backend

    backend, reason = choose_backend()
    if backend == "cuda" and find_spec("cupy") is not None:
        return "cuda"
    if backend == "cuda":
        reason = "a CUDA device was found, but not cupy, which the extra `cupy` installs"
    print(f"{PROGRAM}: decoding on numpy ({reason})", file=sys.stderr)
    return "numpy"


def _run_check(options: argparse.Namespace) -> int:
    backend = _chosen_backend(options)

    def run(on_result: OnResult, on_start: OnStart) -> list[CheckResult]:
        from numba_ddtree.checks import run_checks

        return run_checks(backend, options.seed, options.device, on_result, on_start)

    return _report(options, run)


def _run_round(options: argparse.Namespace) -> int:
    from numba_ddtree.round_bundle import read_round

    bundle = read_round(options.bundle)
    backend = _chosen_backend(options, bundle)

    def run(on_result: OnResult, on_start: OnStart) -> list[CheckResult]:
        from numba_ddtree.round_checks import run_round

        return run_round(bundle, backend, options.device, on_result, on_start)

    return _report(options, run)


def _run_env(options: argparse.Namespace) -> int:
    from numba_ddtree.environment import collect_environment

    environment = collect_environment()
    if options.json:
        print(json.dumps(environment.as_json(), indent=2))
        return 0
    lines = environment.lines()
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        print(f"{label:{width}}  {value}")
    return 0


def _report(options: argparse.Namespace, run: Runner) -> int:
    """Show results as they come, or all as JSON at the end; return the exit code."""
    from numba_ddtree.reporting import Reporter

    raise_when_interrupted()
    reporter = Reporter(results_to_stderr=options.json)
    code = 0

    def show(result: CheckResult) -> None:
        reporter.show(result)
        raise_dropped_interruption()

    try:
        with reporter:
            run(show, reporter.start)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception:
        if options.json and reporter.results:  # what was reached is not lost with what failed
            _print_json(reporter)
        raise
    if options.json:
        _print_json(reporter)
    reporter.summarise(interrupted=code == EXIT_INTERRUPTED)
    return code or (EXIT_FAILED if reporter.failed else 0)


def _print_json(reporter: Reporter) -> None:
    print(json.dumps([result.as_json() for result in reporter.results], indent=2), flush=True)


def _chosen_backend(options: argparse.Namespace, bundle: RoundBundle | None = None) -> Backend:
    """Settle the backend and the device, before anything imports Numba."""
    backend: Backend = options.backend
    notice = None
    if options.backend == "auto":
        backend, notice = _automatic_backend(bundle)
    _check_device(backend, options.device)
    if notice is not None:
        print(f"{PROGRAM}: {notice}", file=sys.stderr)
    if backend != "numpy":
        _choose_simulator(backend == "simulator")
    return backend


def _automatic_backend(bundle: RoundBundle | None) -> tuple[Backend, str | None]:
    """Choose a device, or else the simulator, or else, for a large round, the references; say why."""
    from numba_ddtree.environment import choose_backend

    backend, reason = choose_backend()
    if backend == "cuda":
        return backend, None
    if bundle is None:
        return backend, f"running the kernels in Numba's CUDA simulator on small inputs ({reason})"
    seconds = bundle.inputs.simulator_seconds
    if seconds < SIMULATED_ROUND_SECONDS:
        return backend, f"running the kernels in Numba's CUDA simulator ({reason})"
    return "numpy", f"running the numpy references; the simulator would need some {seconds:.0f} s ({reason})"


def _check_device(backend: Backend, device: int) -> None:
    if backend == "cuda":
        from numba_ddtree.environment import find_devices

        devices, fault = find_devices()
        if fault is not None:
            raise BackendError(f"no CUDA device: {fault}")
        if device >= len(devices):
            raise BackendError(f"no CUDA device {device}: there are {len(devices)}, counted from 0")
    elif device != 0:
        raise BackendError(f"no CUDA device {device}: the {backend} backend uses none")


def _choose_simulator(wanted: bool) -> None:
    """Choose between Numba's CUDA target and its simulator, which only its first import can."""
    from numba_ddtree.environment import SIMULATOR_VARIABLE

    os.environ[SIMULATOR_VARIABLE] = "1" if wanted else "0"
    from numba_ddtree.cuda_target import SIMULATED

    if wanted != SIMULATED:
        raise BackendError("Numba was imported before the backend was chosen; start a new process")


class _Append(argparse.Action):
    """Append to one list before and after the command, whose parser has a namespace of its own."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        self.const.append(values)
        setattr(namespace, self.dest, self.const)


def _parser() -> argparse.ArgumentParser:
    prompts: tuple[list[str], list[str]] = [], []
    parser = OneLineParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser, ("json", "seed", "device", "backend", *_DECODE_DEFAULTS), prompts)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    decode = commands.add_parser(
        "decode",
        help="continue text three ways with the demo model (the default)",
        description="Continue prompts token by token, with a drafted chain and with draft trees; show the "
        "text, the target's passes, acceptance and times, and whether the texts are the same. Without a "
        "prompt, excerpts of modules that the model was not trained on are continued.",
    )
    _add_options(decode, ("json", "seed", "device", "backend", *_DECODE_DEFAULTS), prompts)

    check = commands.add_parser(
        "check",
        help="compare every kernel with its reference",
        description="Compare every kernel with its numpy reference on named, seeded inputs; with --backend "
        "numpy, compare the references with trees that the original implementation gave.",
    )
    _add_options(check, ("json", "seed", "device", "backend"))

    round_parser = commands.add_parser(
        "round",
        help="run a round whose inputs are in a file",
        description="Build the trees, attend and accept on the inputs in a KDTR bundle; compare with the "
        "results that it holds and, for kernels, with the references. numba_ddtree/round_bundle.py lists the "
        "tensors; tools/make_bundles.py writes such bundles.",
    )
    round_parser.add_argument("bundle", type=Path, metavar="BUNDLE.kdtr", help="the file")
    _add_options(round_parser, ("json", "device", "backend"))

    env = commands.add_parser(
        "env",
        help="print what a bug report needs",
        description="Print versions, driver, devices, toolkit libraries and the backend that auto chooses.",
    )
    _add_options(env, ("json",))
    parser.set_defaults(json=False, seed=0, device=0, backend="auto")
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; `decode` is the command where none is named, and its options are no other's."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.command = options.command or "decode"
    given = vars(options)
    if options.command != "decode":
        for name in _DECODE_DEFAULTS:
            if name in given:
                parser.error(f"--{name.replace('_', '-')} is an option of decode, not of {options.command}")
    for name, default in _DECODE_DEFAULTS.items():
        given.setdefault(name, default)
    if options.devices is not None and options.device != 0:
        parser.error("--device and --devices are two answers to one question")
    return options


def _add_options(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    prompts: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> None:
    """Add options that may stand before and after the command; prompts and their files go to the lists.

    They have no default here: a default of the command's parser would undo what stood before it.
    """
    settings = {
        "json": {"action": "store_true", "help": "pure JSON on stdout, everything else on stderr"},
        "seed": {"type": whole_number(), "metavar": "N", "help": "seed of inputs and draws (default: 0)"},
        "device": {"type": whole_number(), "metavar": "N", "help": "the CUDA device (default: 0)"},
        "devices": {
            "type": whole_numbers(),
            "metavar": "N,N,...",
            "help": "decode on lanes that share the prompts and run at once, one for each device named; a "
            "device named twice has two",
        },
        "backend": {
            "choices": BACKENDS,
            "help": "what runs: the kernels on a device, the kernels in Numba's simulator, or the numpy "
            "references; auto (the default) takes a device, or else the simulator (decode: numpy)",
        },
        "prompt": {
            "action": _Append,
            "const": prompts[0],
            "metavar": "TEXT",
            "help": "a text to continue, --prompt=TEXT if it begins with a hyphen; may be repeated",
        },
        "prompt_file": {
            "action": _Append,
            "const": prompts[1],
            "metavar": "FILE",
            "help": "a file to continue, - for standard input; may be repeated",
        },
        "prompts": {
            "type": whole_number(),
            "metavar": "N",
            "help": "how many of the shipped prompts, if none is given (default: 4)",
        },
        "budget": {
            "type": whole_numbers(1, MAX_BUDGET, different=True),
            "metavar": "N,N,...",
            "help": "nodes of the draft trees, each decoded (default: 16,64,256)",
        },
        "max_new_tokens": {"type": whole_number(), "metavar": "N", "help": "bytes to write (default: 128)"},
        "temperature": {
            "type": real_number(),
            "metavar": "T",
            "help": "0 (the default): the best token; above: a draw, the same by every decoder of one seed",
        },
        "dtype": {
            "choices": DTYPES,
            "help": "of what the target's attention reads, queries and cache: float32 (the default), or "
            "bfloat16, on tensor cores",
        },
        "trace": {
            "metavar": "FILE.kdtr",
            "help": "write each round's drafts, tree, target tokens and accepted path, which `round` replays",
        },
        "plot": {
            "metavar": "FILE.svg|png",
            "help": "draw acceptance against budget, and one round's tree (needs the extra `plot`)",
        },
    }
    for name in names:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, default=argparse.SUPPRESS, **settings[name])  # type: ignore[arg-type]


_DECODE_DEFAULTS: dict[str, Any] = {
    "devices": None,
    "prompt": [],
    "prompt_file": [],
    "prompts": 4,
    "budget": (16, 64, 256),
    "max_new_tokens": 128,
    "temperature": 0.0,
    "dtype": DTYPES[0],
    "trace": None,
    "plot": None,
}


def run_program() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    end_when_interrupted(PROGRAM)
    code = main()
    if code == EXIT_INTERRUPTED:
        # Python would end itself by the signal instead if an interruption met it within `exec`, as imports
        # do, although it was handled.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run_program()
