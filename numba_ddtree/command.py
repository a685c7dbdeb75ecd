"""What the command line and the tools share: wrong usage and faults, in one line each."""

from __future__ import annotations

import argparse
from typing import NoReturn

EXIT_BAD_USE = 2


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong on stderr, and exit with code 2."""
        self.exit(EXIT_BAD_USE, f"{self.prog}: {message} (see --help)\n")


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; a file's name in it may hold line breaks."""
    return " ".join(str(error).split())
