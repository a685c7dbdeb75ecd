"""Runs tests/simulator in a process in which Numba's simulator is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "simulator"
TIMEOUT_SECONDS = 1800


@pytest.mark.skipif(
    os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"), reason="already in the simulator"
)
def test_kernels_in_the_simulator() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--durations=10", str(FOLDER)],
        cwd=FOLDER.parent.parent,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    print(result.stdout)
    assert result.returncode == 0, "tests in the simulator failed: see the output below"
    assert " skipped" not in result.stdout.splitlines()[-1]
