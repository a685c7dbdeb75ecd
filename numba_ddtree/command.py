"""What the command line and the tools share: wrong usage and faults in one line each, and how they end."""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

EXIT_BAD_USE, EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 2, 130, 141


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong on stderr, and exit with code 2."""
        self.exit(EXIT_BAD_USE, f"{self.prog}: {message} (see --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help or a version; a closed pipe is an error, which later versions of argparse pass over."""
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def whole_number(low: int = 0, high: int | None = None) -> Callable[[str], int]:
    """Make the type of an option that is a whole number from `low` to `high`, ends included."""
    expected = f"a whole number {_range_text(low, high)}"

    def parse(text: str) -> int:
        if (number := _number_within(text, low, high)) is None:
            raise _type_error(text, expected)
        return number

    return parse


def whole_numbers(
    low: int = 0, high: int | None = None, *, different: bool = False
) -> Callable[[str], tuple[int, ...]]:
    """Make the type of an option that is a list of such numbers, with commas between them."""
    expected = (
        f"{'different ' if different else ''}whole numbers {_range_text(low, high)}, with commas between"
    )

    def parse(text: str) -> tuple[int, ...]:
        numbers = [_number_within(each, low, high) for each in text.split(",")]
        found = tuple(number for number in numbers if number is not None)
        if len(found) < len(numbers) or (different and len(set(found)) < len(found)):
            raise _type_error(text, expected)
        return found

    return parse


def real_number(low: float = -math.inf) -> Callable[[str], float]:
    """Make the type of an option that is a finite number, `low` or above."""
    expected = "a finite number" + ("" if low == -math.inf else f" from {low:g} on")

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (low <= number and math.isfinite(number)):
            raise _type_error(text, expected)
        return number

    return parse


def _number_within(text: str, low: int, high: int | None) -> int | None:
    """Return a number within the range, or None; one of more digits than Python converts is in no range."""
    if not (text.isascii() and text.isdecimal()) or len(text) > sys.int_info.str_digits_check_threshold:
        return None
    number = int(text)
    return number if low <= number and (high is None or number <= high) else None


def _range_text(low: int, high: int | None) -> str:
    return f"from {low} on" if high is None else f"from {low} to {high}"


def _type_error(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"got {text!r}; expected {expected}")


def run_command(program: str, run: Callable[[], int], faults: tuple[type[Exception], ...]) -> int:
    """Run what a command does, on any terminal, and return its exit code.

    What the encoding of stdout lacks is escaped. A closed pipe ends the command without a word, an
    interruption and any of `faults` with one line on stderr that begins with the program's name.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a closed pipe can be handled
    except BrokenPipeError:
        return _leave_closed_pipe()
    except faults as error:
        print(f"{program}:", one_line(error), file=sys.stderr)
        return EXIT_BAD_USE
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


class _End:
    """What an interruption meets while modules are loaded."""

    def __init__(self, program: str) -> None:
        self._line = f"{program}: interrupted\n".encode()

    def __call__(self, *_: object) -> NoReturn:
        os.write(2, self._line)
        os._exit(EXIT_INTERRUPTED)


class _Raise:
    """What an interruption meets later: an exception, and a note, since what runs then may drop that."""

    def __init__(self) -> None:
        self.is_pending = False

    def __call__(self, *_: object) -> NoReturn:
        self.is_pending = True
        raise KeyboardInterrupt


def end_when_interrupted(program: str) -> None:
    """Let an interruption end the process at once, by what `run_command` would say and return.

    For as long as modules are loaded: code that runs then may drop any exception, a `KeyboardInterrupt` too.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _End(program))


def raise_when_interrupted() -> None:
    """Undo `end_when_interrupted`, since from now on there may be something to keep."""
    if isinstance(signal.getsignal(signal.SIGINT), _End):
        signal.signal(signal.SIGINT, _Raise())


def raise_dropped_interruption() -> None:
    """Raise the `KeyboardInterrupt` that came since `raise_when_interrupted` and was dropped, if one was.

    A callback of a weak reference, for instance, ends with a message instead of raising it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Raise) and handler.is_pending:
        raise KeyboardInterrupt


def _leave_closed_pipe() -> int:
    """Give the reader's absence an exit code, and Python nothing left to flush into the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CLOSED_PIPE


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; a file's name in it may hold line breaks."""
    return " ".join(str(error).split())
