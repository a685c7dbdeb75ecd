"""Results on the terminal: a line each as they come, and a progress bar on stderr."""

from __future__ import annotations

import math
from types import TracebackType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from numba_ddtree.check_results import CheckResult

__all__ = ["Reporter"]


class PipeConsole(Console):
    """A console whose closed pipe is an exception."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave a closed pipe to the caller; by default this would end the process."""
        raise BrokenPipeError


class Reporter:
    """Shows checks on the terminal and keeps their results.

    Parameters
    ----------
    results_to_stderr : bool
        Leave stdout to something else.

    Attributes
    ----------
    results : list of CheckResult
        What was shown so far.
    """

    def __init__(self, *, results_to_stderr: bool) -> None:
        self.results: list[CheckResult] = []
        self._console = PipeConsole(stderr=results_to_stderr, highlight=False)
        console = self._console if results_to_stderr else PipeConsole(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        # A bar that is redrawn is of no use in a log.
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=None)

    @property
    def failed(self) -> int:
        """How many of the results are failures."""
        return sum(not result.passed for result in self.results)

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, name: str, number: int, total: int) -> None:
        """Show which check runs now."""
        self._progress.update(self._task, completed=number, total=total, description=name)

    def show(self, result: CheckResult) -> None:
        """Print a result's line, and below it the fault if there is one."""
        self.results.append(result)
        verdict = Text("passed", "green") if result.passed else Text("FAILED", "bold red")
        figures = f"abs {result.max_abs:<8.2g} rel {result.max_rel:<8.2g} {_duration(result.us):>9}"
        self._print(Text.assemble(f"{result.name:<34} ", verdict, f"  {figures}  {result.case}"))
        if result.fault:
            self._print(Text(f"    {result.fault}"))

    def summarise(self, *, interrupted: bool) -> None:
        """Print the last line: how many passed and failed."""
        ending = ", interrupted" if interrupted else ""
        self._print(Text(f"{len(self.results) - self.failed} passed, {self.failed} failed{ending}"))

    def _print(self, line: Text) -> None:
        """Print a line in place of the bar, which comes back below it."""
        is_shown = self._progress.live.is_started
        self._progress.stop()
        # Soft wrapping leaves long lines whole, for whatever reads them from a pipe.
        self._console.print(line, soft_wrap=True)
        if is_shown:
            self._progress.start()


def _duration(us: float) -> str:
    if math.isnan(us):
        return "-"
    if us < 1e3:
        return f"{us:.1f} us"
    return f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.1f} s"
