"""Results of a lane's places, put where the caller's requests have theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from numba_ddtree.arrays import DeviceView, device_view
from numba_ddtree.cuda_target import cuda, uint32
from numba_ddtree.device_group import DeviceGroup
from numba_ddtree.errors import BackendError
from numba_ddtree.lane_copies import LaneCopy, Part, Rectangle
from numba_ddtree.lanes import DeviceLane, Lane
from numba_ddtree.launch import AnyLaunch, Kernel, block_threads
from numba_ddtree.tree import AcceptResult, Array

THREADS = block_threads(64)


def gather_results_kernel(  # type: ignore[no-untyped-def]
    owners,  # int32 [places]: the request whose place it is, or -1
    accepted_indices,  # int32 [places, L + 1], and so on as AcceptResult
    accept_length,
    bonus_token,
    tokens,
    finish_reason,
    all_accepted_indices,  # int32 [B, L + 1], and so on
    all_accept_length,
    all_bonus_token,
    all_tokens,
    all_finish_reason,
):
    place = uint32(cuda.blockIdx.x)
    request = owners[place]
    if request < 0:
        return
    for column in range(uint32(cuda.threadIdx.x), uint32(tokens.shape[1]), uint32(THREADS)):
        all_accepted_indices[request, column] = accepted_indices[place, column]
        all_tokens[request, column] = tokens[place, column]
    if cuda.threadIdx.x == 0:
        all_accept_length[request] = accept_length[place]
        all_bonus_token[request] = bonus_token[place]
        all_finish_reason[request] = finish_reason[place]


_RESULT = ", ".join(["int32[:, ::1]", "int32[::1]", "int32[::1]", "int32[:, ::1]", "int32[::1]"])
GATHER_RESULTS = Kernel(gather_results_kernel, (f"void(int32[::1], {_RESULT}, {_RESULT})",), THREADS)


class ResultGatherer:
    """Brings one lane's results to the first lane's device, and there into the caller's order.

    Parameters
    ----------
    devices : DeviceGroup
    lane : Lane
    result : AcceptResult
        Of the lane's places, all arrays parts of one allocation.
    owners : int32 [places]
        On the first lane's device: the request whose place it is, or -1.
    gathered : AcceptResult
        Of all requests, on the first lane's device.
    """

    def __init__(
        self,
        devices: DeviceGroup,
        lane: Lane,
        result: AcceptResult,
        owners: Array,
        gathered: AcceptResult,
    ) -> None:
        self._home, self._lane = devices.home, lane
        self._arrays = owners, result.arrays(), gathered.arrays()
        self._launch: AnyLaunch | None = None
        self._copy: LaneCopy | None = None
        if devices.on_host:
            return
        with self._home:
            views = {name: device_view(name, array) for name, array in result.arrays().items()}
            if (mode := devices.copy_mode(lane, self._home)) is not None:
                views = self._staged(views, mode)
            self._launch = GATHER_RESULTS.prepare(
                len(owners),
                device_view("owners", owners),
                *views.values(),
                *(device_view(name, array) for name, array in gathered.arrays().items()),
            )

    def run(self, stream: Any, event: Any) -> None:
        """Gather the lane's results.

        Parameters
        ----------
        stream : cuda.core.Stream
            Of the first lane's device, which is current.
        event
            Of the results.
        """
        if self._launch is None:
            owners, result, gathered = self._arrays
            is_owned = owners >= 0
            for name, array in result.items():
                gathered[name][owners[is_owned]] = array[is_owned]
            return
        if self._copy is not None:
            self._copy.run(stream)
        elif stream is not self._lane.stream:
            stream.wait(event)
        self._launch.launch(stream)

    def _staged(self, views: Mapping[str, DeviceView], mode: str) -> dict[str, DeviceView]:
        """Plan to copy the results to the first lane's device, and return them as they are there."""
        if not (isinstance(self._home, DeviceLane) and isinstance(self._lane, DeviceLane)):
            raise BackendError(f"{self._lane} has no memory to copy from")
        begin = min(view.pointer for view in views.values())
        nbytes = max(view.pointer + _nbytes(view) for view in views.values()) - begin
        staging = self._home.allocate(nbytes)
        part = Part(Rectangle(begin, nbytes), Rectangle(staging.pointer, nbytes), nbytes, 1)
        self._copy = LaneCopy(self._lane, self._home, mode, [part])
        return {
            name: replace(
                view,
                pointer=staging.pointer + view.pointer - begin,
                device_id=staging.device_id,
                owner=staging,
            )
            for name, view in views.items()
        }


def _nbytes(view: DeviceView) -> int:
    return int(np.prod(view.shape)) * view.dtype.itemsize
