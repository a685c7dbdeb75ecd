"""Tree attention over several lanes, each with some of the heads and all of the latent cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_ddtree.arrays import (
    HOST,
    Placement,
    StreamLike,
    check_count,
    check_output,
    device_view,
    gather,
    placement_of,
)
from numba_ddtree.device_group import DeviceGroup, of_each_lane
from numba_ddtree.devices import launch_stream, stream_handle
from numba_ddtree.errors import ArgumentError
from numba_ddtree.lane_copies import LaneCopy, Rectangle
from numba_ddtree.lane_split import split_heads
from numba_ddtree.lanes import DeviceLane, Lane
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array, DraftTree
from numba_ddtree.tree_attention import TreeAttention


class HeadLanes:
    """`TreeAttention` with its heads split over the lanes of a `DeviceGroup`; `plan` makes it.

    As tensor parallel ranks have it: a head's queries are on one lane, which has the whole latent cache and
    the tree, since all heads share them. Kimi K2's 64 heads on 8 lanes are 8 each. A head's results are
    those of one lane with all of them, to the bit.

    Attributes
    ----------
    devices : DeviceGroup
    heads : tuple of slice
        The heads of each lane, in order.
    attentions : tuple of TreeAttention
        Of each lane.
    """

    def __init__(self, devices: DeviceGroup, attentions: Sequence[TreeAttention]) -> None:
        self.devices = devices
        self.attentions = tuple(attentions)
        self.heads = tuple(split_heads(sum(each.num_heads for each in attentions), len(devices)))
        self._copies: dict[tuple[int, int, str, int, int], LaneCopy] = {}
        self._unread: list[LaneCopy] = []  # whose sources are not to be written yet
        self._gathered: Any = None  # results that are still to be copied, which are to live so long

    @classmethod
    def plan(
        cls,
        devices: DeviceGroup,
        max_batch: int,
        num_slots: int,
        num_heads: int,
        *,
        max_prefix_length: int,
        **options: Any,
    ) -> HeadLanes:
        """Plan a `TreeAttention` of its heads on each lane; synchronises.

        Parameters
        ----------
        devices : DeviceGroup
            Open for as long as the plan is used.
        max_batch, num_slots, max_prefix_length, **options
            As for `TreeAttention.plan`, of every lane.
        num_heads : int
            H, of all lanes together: at least one for each.

        Returns
        -------
        HeadLanes

        Raises
        ------
        ArgumentError, BackendError, LaneError
            As from `TreeAttention.plan`, with the lane's name.
        """
        for name in ("device_id", "backend", "workspace"):
            if name in options:
                raise ArgumentError(name, repr(options[name]), "nothing, since each lane has its own")
        attentions = []
        for lane, heads in zip(devices, split_heads(num_heads, len(devices)), strict=True):
            with lane:
                planned = TreeAttention.plan(
                    max_batch,
                    num_slots,
                    heads.stop - heads.start,
                    max_prefix_length=max_prefix_length,
                    device_id=lane.device_id,
                    backend="numpy" if lane.device_id is None else None,
                    **options,
                )
                attentions.append(planned)
        return cls(devices, attentions)

    def run(
        self,
        q_nope: Sequence[Array],
        q_pe: Sequence[Array],
        ckv_cache: Sequence[Array],
        kpe_cache: Sequence[Array],
        tree: Sequence[DraftTree],
        *,
        sm_scale: float,
        **options: Sequence[Array] | None,
    ) -> tuple[tuple[Array, Array], ...]:
        """Attend on every lane, on its stream; the host does not wait.

        Parameters
        ----------
        q_nope, q_pe : sequences of arrays [B, N, heads, D]
            The queries of each lane's heads, on its device; ready on its stream, as everything else.
        ckv_cache, kpe_cache, tree : sequences
            The same of each lane's device; lanes of one device may share theirs.
        sm_scale : float
        **options : sequences of arrays
            Further arrays of `TreeAttention.run` for each lane: `prefix_lengths`, page tables, and `out` and
            `lse`, with which nothing is allocated.

        Returns
        -------
        tuple of (out, lse)
            Of each lane: [B, N, heads, D_CKV] and float32 [B, N, heads].

        Raises
        ------
        ArgumentError
            As from `TreeAttention.run`, with the lane's name.
        """
        given = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache, "tree": tree}
        given |= {name: value for name, value in options.items() if value is not None}
        lists = {name: of_each_lane(name, value, self.devices) for name, value in given.items()}
        for copy in self._unread:
            copy.release()
        self._unread.clear()
        results = []
        for lane, attention in zip(self.devices, self.attentions, strict=True):
            own = {name: values[lane.index] for name, values in lists.items()}
            with lane:
                results.append(attention.run(**own, sm_scale=sm_scale, stream=lane.stream))
        return tuple(results)

    def gather(
        self,
        results: Sequence[tuple[Array, Array]],
        *,
        to: int = 0,
        out: Array | None = None,
        lse: Array | None = None,
        stream: StreamLike = None,
    ) -> tuple[Array, Array]:
        """Put the heads of all lanes together on one lane's device.

        Parameters
        ----------
        results : sequence of (out, lse)
            What `run` gave. The next `run` may write to the same arrays.
        to : int
            The lane.
        out : [B, N, H, D_CKV], optional
        lse : float32 [B, N, H], optional
            Where to write, on that lane's device; allocated by default.
        stream
            Of that device: what it does next sees the results. By default that lane's own.

        Returns
        -------
        out, lse
            Of the library of the first lane's results.

        Notes
        -----
        Copies go from device to device, or through pinned memory where the devices are not linked
        (`DeviceGroup.copies`); events order them, and the host does not wait.
        """
        check_count("to", to, 0, len(self.devices) - 1)
        parts = self._checked_parts(of_each_lane("results", results, self.devices))
        target = self.devices.lanes[to]
        shape = (*parts[0][0].shape[:2], self.heads[-1].stop, parts[0][0].shape[3])
        with target:
            if not isinstance(target, DeviceLane):
                return (
                    _joined(target, "out", [part for part, _ in parts], out),
                    _joined(target, "lse", [part for _, part in parts], lse),
                )
            own = target.stream if stream is None else launch_stream(stream_handle(stream, HOST))
            library = placement_of("out", parts[0][0]).library
            with Transfer(Placement(library, target.device_id), own) as transfer:
                dtype = device_view("out", parts[0][0]).dtype.type
                views = {
                    "out": transfer.output("out", shape, dtype, out),
                    "lse": transfer.output("lse", shape[:3], np.float32, lse),
                }
                gathered = transfer.results()
        for lane, part in zip(self.devices, parts, strict=True):
            for (name, view), array in zip(views.items(), part, strict=True):
                self._copy(lane, target, name, device_view(name, array), view, own)
        self._gathered = parts
        return gathered["out"], gathered["lse"]

    def _checked_parts(self, parts: Sequence[tuple[Array, Array]]) -> Sequence[tuple[Array, Array]]:
        """Check that every lane's results are where the lane is, and of its heads."""
        for lane, heads, attention, own in zip(self.devices, self.heads, self.attentions, parts, strict=True):
            if not isinstance(own, list | tuple) or len(own) != 2:
                raise ArgumentError(f"results[{lane.index}]", type(own).__name__, "out and lse")
            batch, slots, _, latent = parts[0][0].shape
            shape = batch, slots, heads.stop - heads.start, latent
            with lane:
                placement, views = gather(out=own[0], lse=own[1])
                if placement.device_id != lane.device_id:
                    raise ArgumentError("out", placement, str(attention.placement))
                check_output("out", views["out"], shape, attention.out_dtype.type)
                check_output("lse", views["lse"], shape[:3], np.float32)
        return parts

    def _copy(self, lane: Lane, target: DeviceLane, name: str, part: Any, whole: Any, stream: Any) -> None:
        """Copy a lane's heads to their place among all."""
        if not isinstance(lane, DeviceLane):
            raise ArgumentError("results", f"of {lane}", "of lanes on devices")
        rows = part.shape[0] * part.shape[1]
        width, pitch = (view.shape[2] * _row_bytes(view) for view in (part, whole))
        key = lane.index, target.index, name, width, rows
        if key not in self._copies:
            mode = self.devices.copy_mode(lane, target) or "direct"
            self._copies[key] = LaneCopy(lane, target, mode, width, rows)
        begin = whole.pointer + self.heads[lane.index].start * _row_bytes(whole)
        self._copies[key].run(Rectangle(part.pointer, width), Rectangle(begin, pitch), stream)
        self._unread.append(self._copies[key])


def _row_bytes(view: Any) -> int:
    """Bytes of one head."""
    return int(np.prod(view.shape[3:], dtype=np.int64)) * int(view.dtype.itemsize)


def _joined(lane: Lane, name: str, parts: Sequence[Array], out: Array | None) -> Array:
    """Put heads together that are on the host, or in the simulator."""
    hosts = [part.copy_to_host() if hasattr(part, "copy_to_host") else part for part in parts]
    joined = np.concatenate(hosts, axis=2)
    if out is None:
        return lane.put(joined)
    if tuple(out.shape) != joined.shape or out.dtype != joined.dtype:
        got = f"{out.dtype} of shape {tuple(out.shape)}"
        raise ArgumentError(f"out, {name}", got, f"{joined.dtype} of shape {joined.shape}")
    out[...] = joined
    return out
