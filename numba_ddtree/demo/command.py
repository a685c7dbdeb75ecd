"""The command `decode`: real text, decoded token by token, with a chain and with draft trees."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from numba_ddtree.bundle import atomic_file
from numba_ddtree.command import one_line, raise_dropped_interruption
from numba_ddtree.demo.array_module import array_module
from numba_ddtree.demo.comparison import Difference, first_difference
from numba_ddtree.demo.decoders import (
    PLAIN,
    Decoded,
    Decoder,
    DecodeSettings,
    Decoding,
    Round,
    chain_decoder,
    check_prompts,
    tree_decoder,
)
from numba_ddtree.demo.lane_decoding import LaneDecoding, LaneTimes, load_models
from numba_ddtree.demo.model import DemoModel, load_model
from numba_ddtree.demo.repetition import repetition
from numba_ddtree.demo.stage_times import STAGES
from numba_ddtree.demo.text import Prompt, given_prompts, readable, shipped_prompts, token_bytes
from numba_ddtree.demo.trace import Trace
from numba_ddtree.device_group import DeviceGroup
from numba_ddtree.errors import ArgumentError, BundleError
from numba_ddtree.reporting import PipeConsole
from numba_ddtree.tree import AcceptResult, DraftTree

DRAWN_BUDGET = 64
"""The largest tree that can be read in a figure."""

MIN_WIDTH = 80
"""Columns that the tables need; a narrower terminal breaks their lines."""


Begin: TypeAlias = Callable[[Decoder], Decoding | LaneDecoding]
"""Begins to decode all prompts with a decoder."""


@dataclass
class Outcome:
    """What was decoded, all of it or up to an interruption."""

    prompts: list[Prompt]
    settings: DecodeSettings
    dtype: str
    results: list[Decoded] = field(default_factory=list)
    interrupted: bool = False
    error: str | None = None  # what ended decoding, if something failed

    def differences(self, result: int) -> list[Difference | None]:
        """Compare a finished result with the plain one, prompt by prompt."""
        plain, other = self.results[0], self.results[result]
        return [first_difference(plain, other, prompt) for prompt in range(len(self.prompts))]

    @property
    def is_complete(self) -> bool:
        """Whether nothing ended decoding before its time."""
        return not self.interrupted and self.error is None

    @property
    def is_lossless(self) -> bool:
        """Whether all finished decoders wrote the same."""
        return not any(
            difference
            for place, result in enumerate(self.results)
            if result.is_finished
            for difference in self.differences(place)
        )


def run_decode(options: argparse.Namespace, backend: Literal["numpy", "cuda"]) -> Outcome:
    """Decode as the command line's options say, and show it.

    Raises
    ------
    ArgumentError
        An option out of range, a prompt that is empty or too long, or a file that cannot be written.
    BackendError
        The GPU backend without cupy.
    ImportError
        A figure without matplotlib.
    OSError
        A prompt's file cannot be read, or another written after all.
    """
    _check_outputs(options.trace, options.plot)
    prompts = given_prompts(options.prompt, options.prompt_file) or shipped_prompts(options.prompts)
    device = options.device if options.devices is None else options.devices[0]
    model = load_model(array_module(backend, device), options.dtype)
    settings = DecodeSettings(options.max_new_tokens, options.temperature, options.seed)
    _check_settings(model, prompts, settings)
    decoders = [PLAIN, chain_decoder(model.config.draft_length), *map(tree_decoder, options.budget)]
    trace = Trace(model.module, settings.stop_tokens) if options.trace is not None else None
    drawn = _DrawnRound(min(options.budget))
    outcome = Outcome(prompts, settings, model.dtype)
    # Whoever read one output may have left, and a decoder may fail after others: what can be given is given.
    with _Screen(to_stderr=options.json) as screen, ExitStack() as outputs:
        begin = _beginning(options, model, prompts, settings, outputs)
        if options.plot is not None:
            outputs.callback(_plot, outcome, drawn, options.plot)
        if trace is not None:
            outputs.callback(_write_trace, outcome, trace, options.trace)
        if options.json:
            outputs.callback(_print_json, outcome, backend)
        outputs.callback(screen.show, outcome)
        _decode_all(begin, decoders, outcome, screen, trace, drawn, is_compiled=backend == "cuda")
    return outcome


def _beginning(
    options: argparse.Namespace,
    model: DemoModel,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    held: ExitStack,
) -> Begin:
    """Return what begins to decode all prompts with a decoder: on the model's device, or on lanes."""
    tokens = [prompt.tokens for prompt in prompts]
    if options.devices is None:
        return lambda decoder: Decoding.begin(model, decoder, tokens, settings)
    on_host = model.module.backend == "numpy"
    group = held.enter_context(DeviceGroup([None if on_host else device for device in options.devices]))
    models = load_models(model, group)
    return lambda decoder: LaneDecoding.begin(models, group, decoder, tokens, settings)


def _check_settings(model: DemoModel, prompts: Sequence[Prompt], settings: DecodeSettings) -> None:
    """Check prompts and settings, which errors call by the names of the command line's options."""
    try:
        check_prompts(model, [prompt.tokens for prompt in prompts], settings, [p.name for p in prompts])
    except ArgumentError as error:
        if error.argument not in {field.name for field in fields(DecodeSettings)}:
            raise
        option = f"--{error.argument.replace('_', '-')}"
        raise ArgumentError(option, error.got, error.expected) from None


def _check_outputs(trace: str | None, plot: str | None) -> None:
    """Find now, and not after minutes of decoding, that a file cannot be written."""
    if plot is not None:
        from numba_ddtree.plot import check_plot_path

        try:
            check_plot_path(plot)
        except ArgumentError as error:
            raise ArgumentError("--plot", repr(plot), error.expected) from None
    if trace is not None and plot is not None and os.path.realpath(trace) == os.path.realpath(plot):
        raise ArgumentError("--trace", trace, "another file than that of --plot")
    for option, path in (("--trace", trace), ("--plot", plot)):
        if path is not None:
            _check_writable(option, path)


class _UnwrittenError(Exception):
    """Leaves a file unwritten."""


def _check_writable(option: str, path: str) -> None:
    try:
        with atomic_file(path):
            raise _UnwrittenError
    except _UnwrittenError:
        pass
    except BundleError:
        raise ArgumentError(option, f"{path!r} (not a regular file)", "a file or nothing there") from None
    except OSError as error:
        raise ArgumentError(option, f"{path!r} ({error.strerror})", "a file that can be written") from None


def _decode_all(
    begin: Begin,
    decoders: Sequence[Decoder],
    outcome: Outcome,
    screen: _Screen,
    trace: Trace | None,
    drawn: _DrawnRound,
    *,
    is_compiled: bool,
) -> None:
    """Run the decoders one after the other; an interruption leaves what was reached."""
    try:
        if is_compiled:
            _compile_kernels(begin, decoders)
        for decoder in decoders:
            screen.start(decoder, len(outcome.prompts) * outcome.settings.max_new_tokens)
            decoding = begin(decoder)
            outcome.results.append(decoding.decoded)
            while not decoding.is_done:
                this_round = decoding.run_round()
                screen.advance(decoding.decoded.num_tokens)
                drawn.offer(this_round)
                if trace is not None:
                    trace.add(this_round)
                raise_dropped_interruption()
    except KeyboardInterrupt:
        outcome.interrupted = True
    except Exception as error:
        outcome.error = one_line(error) or type(error).__name__
        raise


def _compile_kernels(begin: Begin, decoders: Sequence[Decoder]) -> None:
    """Run a round of each decoder, so that no decoder's time has the compiler's in it."""
    for decoder in decoders:
        begin(decoder).run_round()


class _DrawnRound:
    """The round to draw: of the trees that can be read, the first with the longest accepted path."""

    def __init__(self, smallest_budget: int) -> None:
        self._most_nodes = max(smallest_budget, DRAWN_BUDGET)
        self._longest = 0
        self.tree: DraftTree | None = None
        self.accepted: AcceptResult | None = None

    def offer(self, this_round: Round) -> None:
        """Keep the round if it is better than what there is."""
        budget = this_round.decoder.budget
        longest = int(this_round.emitted.max())
        is_tree = this_round.decoder.width > 1 or budget == 1
        if not is_tree or budget > self._most_nodes or longest <= self._longest:
            return
        self._longest = longest
        request = int(this_round.emitted.argmax())
        tree, accepted = this_round.tree.to_host(), this_round.result.to_host()
        rows = slice(request, request + 1)
        self.tree = replace(tree, **{name: array[rows] for name, array in tree.arrays().items()})
        self.accepted = replace(accepted, **{name: array[rows] for name, array in accepted.arrays().items()})


def _print_json(outcome: Outcome, backend: str) -> None:
    if outcome.results or outcome.error is None:
        print(json.dumps(as_json(outcome, backend), indent=2), flush=True)


def _write_trace(outcome: Outcome, trace: Trace, path: str) -> None:
    if outcome.is_complete or not trace.is_empty:
        trace.write(path)


def _plot(outcome: Outcome, drawn: _DrawnRound, path: str) -> None:
    """Draw the outcome, if it is all there."""
    if not outcome.is_complete:
        return
    from numba_ddtree.plot import plot_decode

    chain, *trees = outcome.results[1:]
    acceptance = {result.decoder.budget: result.mean_accept_length for result in trees}
    if drawn.tree is None or drawn.accepted is None:
        raise ArgumentError("--plot", "no round of a tree decoder", "one to draw")
    plot_decode(acceptance, chain.mean_accept_length, drawn.tree, drawn.accepted, token_bytes, path)


class _Screen:
    """Progress, texts and the table; with JSON on stdout, all of it on stderr."""

    def __init__(self, to_stderr: bool) -> None:
        self._console = PipeConsole(stderr=to_stderr, highlight=False)
        self._console.width = max(self._console.width, MIN_WIDTH)
        bar = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=bar, transient=True, disable=not bar.is_terminal)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, decoder: Decoder, total: int) -> None:
        """Begin a decoder's bar."""
        self._progress.update(self._task, completed=0, total=total, description=decoder.name)

    def advance(self, tokens: int) -> None:
        """Show how many tokens there are."""
        self._progress.update(self._task, completed=tokens)

    def show(self, outcome: Outcome) -> None:
        """Print the texts, the table and what differs."""
        self._progress.stop()
        if not outcome.results:
            if outcome.interrupted:
                self._console.print("interrupted before the first token")
            return
        self._show_texts(outcome)
        for table in (_results_table(outcome), _times_table(outcome)):
            self._console.print(table)
        held = "; ".join(f"{stage}: {what}" for stage, what in STAGES.items())
        self._console.print(f"({held})", soft_wrap=True)
        for place, result in enumerate(outcome.results):
            if not result.is_finished:
                continue
            for prompt, difference in zip(outcome.prompts, outcome.differences(place), strict=True):
                if difference is not None:
                    self._print(Text(f"{result.decoder.name}, {self._shown(prompt.name)}: {difference}"))
        if not outcome.is_complete:
            last = outcome.results[-1]
            what = "interrupted" if outcome.interrupted else "failed"
            where = "after" if last.is_finished else "in"
            self._console.print(f"{what} {where} decoder {last.decoder.name!r}")

    def _show_texts(self, outcome: Outcome) -> None:
        """Print each prompt and its continuation by plain decoding."""
        line = "-" if self._console.options.ascii_only else "─"
        for prompt, tokens in zip(outcome.prompts, outcome.results[0].tokens, strict=True):
            self._console.rule(Text(self._shown(prompt.name)), characters=line, align="left")
            text = Text(self._shown(readable(prompt.text)), "dim")
            self._print(text.append(self._shown(readable(bytes(tokens))), "not dim bold"))
        self._console.rule(characters=line)

    def _print(self, text: Text) -> None:
        """Print long lines whole: a line break would be one of the text's."""
        self._console.print(text, soft_wrap=True)

    def _shown(self, text: str) -> str:
        """Escape what the output's encoding lacks."""
        encoding = self._console.encoding
        return text.encode(encoding, errors="backslashreplace").decode(encoding)


def _results_table(outcome: Outcome) -> Table:
    table = _new_table("target passes", "accept length", "tokens/s", "repetition", "identical")
    for place, result in enumerate(outcome.results):
        table.add_row(
            result.decoder.name,
            str(result.num_passes),
            f"{result.mean_accept_length:.2f}",
            f"{tokens_per_second(result):.0f}",
            f"{mean_repetition(result):.3f}",
            _identical(outcome, place),
        )
    return table


def _times_table(outcome: Outcome) -> Table:
    table = _new_table(*STAGES, title="milliseconds a round of the batch")
    for result in outcome.results:
        parts = [(result.decoder.name, result.times.seconds, max(map(len, result.accept_lengths)))]
        if isinstance(result.times, LaneTimes):
            parts = [
                (f"{result.decoder.name}, {lane.name}", lane.seconds, lane.rounds)
                for lane in result.times.lanes
            ]
        for name, seconds, rounds in parts:
            each = (1e3 * seconds.get(stage, 0.0) / max(rounds, 1) for stage in STAGES)
            table.add_row(name, *(f"{value:.2f}" for value in each))
    return table


def _new_table(*headings: str, title: str | None = None) -> Table:
    table = Table("decoder", box=None, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _identical(outcome: Outcome, place: int) -> str:
    if not outcome.results[place].is_finished:
        return "unfinished"
    same = sum(difference is None for difference in outcome.differences(place))
    return "yes" if same == len(outcome.prompts) else f"{same} of {len(outcome.prompts)}"


def tokens_per_second(result: Decoded) -> float:
    """Tokens of the whole batch by the seconds of its rounds, without reading the prompts."""
    return result.num_tokens / result.times.decoding if result.num_tokens else 0.0


def mean_repetition(result: Decoded) -> float:
    """Mean over the texts; see `numba_ddtree.demo.repetition`."""
    return sum(repetition(bytes(tokens)) for tokens in result.tokens) / len(result.tokens)


def as_json(outcome: Outcome, backend: str) -> dict[str, Any]:
    """Return everything as JSON's types."""
    settings = outcome.settings
    return {
        "backend": backend,
        "dtype": outcome.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "interrupted": outcome.interrupted,
        "error": outcome.error,
        "decoders": [
            {
                "name": result.decoder.name,
                "budget": result.decoder.budget,
                "target_passes": result.num_passes,
                "mean_accept_length": result.mean_accept_length,
                "tokens": result.num_tokens,
                "tokens_per_second": tokens_per_second(result),
                "seconds": result.times.seconds,
                "repetition": mean_repetition(result),
                "finished": result.is_finished,
            }
            | ({"lanes": result.times.as_json()} if isinstance(result.times, LaneTimes) else {})
            for result in outcome.results
        ],
        "prompts": [
            {
                "name": prompt.name,
                "prompt": prompt.text.decode(errors="backslashreplace"),
                "decoders": [_continuation(outcome, place, index) for place in range(len(outcome.results))],
            }
            for index, prompt in enumerate(outcome.prompts)
        ],
    }


def _continuation(outcome: Outcome, place: int, prompt: int) -> dict[str, Any]:
    result = outcome.results[place]
    tokens = result.tokens[prompt]
    is_finished = result.is_finished
    difference = first_difference(outcome.results[0], result, prompt) if is_finished else None
    return {
        "name": result.decoder.name,
        "text": bytes(tokens).decode(errors="backslashreplace"),
        "tokens": tokens,
        "accept_lengths": result.accept_lengths[prompt],
        "finish_reason": result.finish_reasons[prompt].name.lower(),
        "identical": difference is None if is_finished else None,
        "first_difference": difference.as_json() if difference else None,
    }
