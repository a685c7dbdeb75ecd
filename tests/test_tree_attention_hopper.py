"""The Hopper kernel's code, run on the host by emulated threads; tests of tensor cores run it on a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EMULATION = Path(__file__).with_name("emulated_hopper.py")
CASES = (
    "packing",
    "one block",
    "gathered prefix",
    "gathered prefixes",
    "prefix alone",
    "pages of two blocks",
    "shared groups",
    "splits",
    "many splits",
    "late",
    "late pairs",
    "late splits",
    "ragged",
    "float32",
    "folded",
    "folded in float32",
    "tail",
    "negative scale",
    "bands",
    "bands of paths",
    "late bands",
    "bands side by side",
    "foretold",
    "foretold, and looked for late",
    "foretold, and gathered",
    "foretold wrongly, and gathered",
    "foretold bands",
    "foretold whole",
    "foretold wrongly",
    "foretold wrongly, and late",
    "foretold what is not there",
    "foretold, and the only ones",
    "foretold of fewer requests",
    "foretold of more requests",
    "foretold wrongly, of fewer nodes",
    "foretold of shorter paths",
    "foretold without the last of 33",
    "foretold wrongly, with the prefix",
    "foretold wrongly to who has none",
    "paired",
    "paired, late and in float32",
    "paired with paths",
    "foretold, and paired",
    "foretold wrongly, and paired",
    "by slot",
    "by slot, and gathered",
    "by slot and late",
    "by slot in bands",
    "by slot, foretold",
    "by slot, foretold wrongly",
    "by slot, paired",
    "by slot, and wrong",
    "by slot, contiguous",
    "by slot in one pair",
    "by slot in one pair, foretold",
    "by slot in one pair, paired",
    "slots seen",
    "slots behind",
    "nodes of rows",
    "too deep",
    "rising",
    "alone",
)


@pytest.mark.parametrize("case", CASES)
def test_emulated_threads_agree_with_the_reference(case: str) -> None:
    # In a process of its own, whose modules are replaced.
    done = subprocess.run(
        [sys.executable, str(EMULATION), case], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{case} is right" in done.stdout
