"""Importing the package is cheap and touches neither Numba nor a device."""

from __future__ import annotations

import subprocess
import sys

import pytest

import numba_ddtree

_IMPORT = """
import sys, time
started = time.perf_counter()
import numba_ddtree
seconds = time.perf_counter() - started
heavy = [name for name in ("numba", "cuda", "numpy", "torch") if name in sys.modules]
print(seconds, *heavy)
"""


def import_report() -> tuple[float, list[str]]:
    result = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    seconds, *heavy = result.stdout.split()
    return float(seconds), heavy


def test_import_is_light() -> None:
    reports = [import_report() for _ in range(3)]
    assert all(heavy == [] for _, heavy in reports)
    # The quickest of three, since a busy machine can delay any single one.
    assert min(seconds for seconds, _ in reports) < 0.5


@pytest.mark.parametrize("name", numba_ddtree.__all__)
def test_public_names_load(name: str) -> None:
    assert getattr(numba_ddtree, name) is not None
    assert name in dir(numba_ddtree)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = numba_ddtree.nonsense


def test_a_function_is_not_hidden_by_a_module_of_its_name() -> None:
    """Importing a submodule binds its name in the package, over a public name that is the same."""
    homes = set(numba_ddtree._HOMES.values())
    assert not homes & set(numba_ddtree.__all__)
