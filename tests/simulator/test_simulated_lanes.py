"""Requests and heads over lanes in Numba's simulator, where lanes take turns."""

from __future__ import annotations

import numpy as np
import pytest
from head_checks import check_heads
from kernel_checks import numba_library
from lane_checks import check_lanes

from numba_ddtree import ArgumentError, DDTreeRound, DeviceGroup, RoundLanes
from numba_ddtree.cuda_target import SIMULATED
from numba_ddtree.device.candidates import TILE

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="the simulator is off"),
    pytest.mark.usefixtures("poisoned_allocations"),
]


def test_lanes_give_what_one_gives(rng: np.random.Generator) -> None:
    with DeviceGroup([0, 0]) as devices:
        check_lanes(rng, numba_library(), devices, (3, 2, 8, 3), captured=True, rounds=1, starts=3)


def pieces_of(planned: DDTreeRound) -> int | None:
    pieces: int | None = planned.planned.options["draft_topk"]["pieces_per_row"]
    return pieces


def test_lanes_cut_rows_as_the_whole_batch_would() -> None:
    sizes = 1, 17 * TILE, 2
    # Of the simulator's device, which runs four blocks at once.
    assert [pieces_of(DDTreeRound.plan(batch, *sizes)) for batch in (1, 2, 3)] == [2, 2, 1]
    with DeviceGroup([0, 0]) as devices:
        rounds = RoundLanes.plan(devices, 3, *sizes).rounds
        assert [pieces_of(each) for each in rounds] == [1, 1]
        for pieces in (5, None):
            options = {"draft_topk": {"pieces_per_row": pieces}}
            rounds = RoundLanes.plan(devices, 3, *sizes, options=options).rounds
            assert [pieces_of(each) for each in rounds] == [pieces, pieces]
            assert pieces_of(DDTreeRound.plan(3, *sizes, options=options)) == pieces


def test_heads_over_lanes(rng: np.random.Generator) -> None:
    with DeviceGroup([0, 0]) as devices:
        check_heads(rng, numba_library(), devices, np.float32, latent=4, rope=4, heads=3, rounds=1)


def test_the_simulator_has_one_device() -> None:
    with pytest.raises(ArgumentError, match=r"^devices\[1\]: got 1; expected a CUDA device: there is 1"):
        DeviceGroup([0, 1])
