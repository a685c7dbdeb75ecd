"""What the command line and the tools share: wrong usage and faults in one line each, and how they end."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_BAD_USE, EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 2, 130, 141


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong on stderr, and exit with code 2."""
        self.exit(EXIT_BAD_USE, f"{self.prog}: {message} (see --help)\n")


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


def _leave_closed_pipe() -> int:
    """Give the reader's absence an exit code, and Python nothing left to flush into the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CLOSED_PIPE


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; a file's name in it may hold line breaks."""
    return " ".join(str(error).split())
