"""The code of both kernels of `mma.sync`, run on the host by emulated threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EMULATION = Path(__file__).with_name("emulated_tensor_cores.py")
CASES = ("one block", "prefix alone", "splits", "ragged", "tail", "shared groups", "folded")
ALONE = ("alone", "alone across blocks", "alone after common groups")


def run_case(case: str) -> None:
    # In a process of its own, whose modules are replaced.
    done = subprocess.run(
        [sys.executable, str(EMULATION), case], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{case} is right" in done.stdout


@pytest.mark.parametrize("case", CASES)
def test_both_kernels_agree_with_the_reference_and_each_other(case: str) -> None:
    run_case(case)


@pytest.mark.parametrize("case", ALONE)
def test_nodes_have_the_bits_of_their_sequences_alone(case: str) -> None:
    run_case(case)


def test_each_row_meets_its_own_keys_in_order() -> None:
    run_case("blocks")
