"""Clusters of blocks: where numbers lie that are exchanged, and how many blocks a launch has."""

from __future__ import annotations

import numpy as np
import pytest

from numba_ddtree.device.clusters import FOURS_ROW_BYTES, unit_of_four
from numba_ddtree.tree_attention import hopper

UNIT_BYTES = 16
BANK_UNITS = 8  # of 128 bytes, which eight lanes write or read at once where none meet
PIECES, QUADS, ROWS = range(8), range(4), range(64)


def banks(places: list[tuple[int, int, int]]) -> list[int]:
    """Units of 128 bytes in which fours lie, each given by its piece, quad and row."""
    addresses = [FOURS_ROW_BYTES * row + UNIT_BYTES * unit_of_four(*place[:2], row) for *place, row in places]
    return sorted(address // UNIT_BYTES % BANK_UNITS for address in addresses)


@pytest.mark.parametrize("row", ROWS)
def test_each_four_of_a_row_has_a_unit_of_its_own(row: int) -> None:
    units = [unit_of_four(piece, quad, row) for piece in PIECES for quad in QUADS]
    assert sorted(units) == list(range(FOURS_ROW_BYTES // UNIT_BYTES))


@pytest.mark.parametrize("row", ROWS[:-1])
def test_lanes_that_write_a_piece_of_two_rows_meet_in_no_bank(row: int) -> None:
    for piece in PIECES:
        places = [(piece, quad, each) for each in (row, row + 1) for quad in QUADS]
        assert banks(places) == list(range(BANK_UNITS)), f"piece {piece}"


@pytest.mark.parametrize("row", ROWS)
def test_lanes_that_read_the_pieces_of_a_row_meet_in_no_bank(row: int) -> None:
    for quad in QUADS:
        places = [(piece, quad, row) for piece in PIECES]
        assert banks(places) == list(range(BANK_UNITS)), f"quad {quad}"


def test_units_are_exchanged_by_each_number_alone() -> None:
    """As the kernel finds them: a lane's share once, then a piece's; and a four's next to the first one's."""
    for piece, quad, row in np.ndindex(8, 4, 64):
        unit = unit_of_four(piece, quad, row)
        assert unit == unit_of_four(piece, 0, 0) ^ unit_of_four(0, quad, row)
        assert unit == unit_of_four(piece, 0, row) ^ quad
        assert unit_of_four(piece, quad, row + 8) == unit
        assert unit_of_four(piece, quad, row + 4) == unit


@pytest.mark.parametrize(
    ("multiprocessors", "expected"), [(132, 132), (131, 130), (114, 114), (2, 2), (3, 2), (78, 78), (79, 78)]
)
def test_launches_have_whole_clusters(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, expected: int
) -> None:
    monkeypatch.setattr(hopper, "multiprocessors", lambda: multiprocessors)
    assert hopper.workers() == expected
    for kernel in hopper.KERNELS.values():
        assert expected % kernel.cluster_blocks == 0
