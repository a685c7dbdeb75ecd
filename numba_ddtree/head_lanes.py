"""Tree attention over several lanes, each with some of the heads and all of the latent cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from numba_ddtree.arrays import (
    Placement,
    StreamLike,
    at,
    check_array,
    check_count,
    check_output,
    device_view,
    gather,
    host_output,
    placement_of,
)
from numba_ddtree.device_group import DeviceGroup, as_core_stream, of_each_lane
from numba_ddtree.errors import ArgumentError
from numba_ddtree.lane_copies import LaneCopy, Part, Rectangle, UnreadCopies
from numba_ddtree.lane_split import split_heads
from numba_ddtree.lanes import DeviceLane, Lane
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array, DraftTree
from numba_ddtree.tree_attention import TreeAttention


class HeadLanes:
    """`TreeAttention` with its heads split over the lanes of a `DeviceGroup`; `plan` makes it.

    As tensor parallel ranks have it: a head's queries are on one lane, which has the whole latent cache and
    the tree, since all heads share them. Kimi K2's 64 heads on 8 lanes are 8 each. A head's results are
    those of one lane with all of them, to the bit, on devices of one kind.

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
        self._unread = UnreadCopies()
        self._kept: HeadGather | None = None

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
        self._unread.release()
        calls = self._calls(q_nope, q_pe, ckv_cache, kpe_cache, tree, sm_scale, options)
        results = []
        for lane, call in zip(self.devices, calls, strict=True):
            with lane:
                results.append(call(lane.stream))
        return tuple(results)

    def capture(
        self,
        q_nope: Sequence[Array],
        q_pe: Sequence[Array],
        ckv_cache: Sequence[Array],
        kpe_cache: Sequence[Array],
        tree: Sequence[DraftTree],
        *,
        sm_scale: float,
        out: Sequence[Array],
        lse: Sequence[Array],
        name: str = "attention",
        **options: Sequence[Array] | None,
    ) -> None:
        """Capture a run as one graph on each lane, for `replay`: the host's share of a run is larger.

        Parameters
        ----------
        q_nope, q_pe, ckv_cache, kpe_cache, tree, sm_scale, out, lse, **options
            As for `run`; every replay reads and writes the same arrays.
        name : str
            Of the graphs; one for each layer, say.

        Raises
        ------
        ArgumentError
            As from `run`.
        """
        given = options | {"out": out, "lse": lse}
        calls = self._calls(q_nope, q_pe, ckv_cache, kpe_cache, tree, sm_scale, given)
        for lane, call in zip(self.devices, calls, strict=True):
            lane.capture(name, call)

    def replay(self, name: str = "attention", *, after: StreamLike = None) -> None:
        """Launch a captured run on every lane; the host does not wait.

        Parameters
        ----------
        name : str
            As for `capture`.
        after
            A stream of the first lane's device: the run comes after what it has to do. By default it comes
            after the lanes' own work alone.
        """
        self._unread.release()
        events = [] if after is None else [self.devices.mark(after)]
        self.devices.launch(name, after=[events] * len(self.devices))

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
        self._unread.forget_done()
        gatherer = self.plan_gather(results, to=to, out=out, lse=lse, stream=stream)
        self._kept = gatherer  # with what it copies, until the next
        return gatherer.run(stream=stream)

    def plan_gather(
        self,
        results: Sequence[tuple[Array, Array]],
        *,
        to: int = 0,
        out: Array | None = None,
        lse: Array | None = None,
        stream: StreamLike = None,
    ) -> HeadGather:
        """Prepare `gather`, to be run whenever the same results were written anew.

        The parameters and errors are those of `gather`.
        """
        check_count("to", to, 0, len(self.devices) - 1)
        self.devices.check_stream(stream)
        parts = self._checked_parts(of_each_lane("results", results, self.devices))
        return HeadGather(self, parts, self.devices.lanes[to], out, lse, stream)

    def _calls(
        self,
        q_nope: Sequence[Array],
        q_pe: Sequence[Array],
        ckv_cache: Sequence[Array],
        kpe_cache: Sequence[Array],
        tree: Sequence[DraftTree],
        sm_scale: float,
        options: Mapping[str, Sequence[Array] | None],
    ) -> list[Callable[[StreamLike], tuple[Array, Array]]]:
        """Return each lane's run, but for its stream."""
        given = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache, "tree": tree}
        given |= {name: value for name, value in options.items() if value is not None}
        lists = {name: of_each_lane(name, value, self.devices) for name, value in given.items()}

        def call_of(lane: int, attention: TreeAttention) -> Callable[[StreamLike], tuple[Array, Array]]:
            own = {name: values[lane] for name, values in lists.items()}
            return lambda stream: attention.run(**own, sm_scale=sm_scale, stream=stream)

        return [call_of(lane, attention) for lane, attention in enumerate(self.attentions)]

    def _checked_parts(self, parts: Sequence[tuple[Array, Array]]) -> Sequence[tuple[Array, Array]]:
        """Check that every lane's results are where the lane is, and of its heads."""
        rows: dict[str, int | None] = {"B": None, "N": None}
        latent: int | None = None
        checked = []
        for lane, heads, attention, own in zip(self.devices, self.heads, self.attentions, parts, strict=True):
            name = f"results[{lane.index}]"
            if not isinstance(own, list | tuple) or len(own) != 2:
                raise ArgumentError(name, type(own).__name__, "out and lse")
            count = heads.stop - heads.start
            with lane:
                placement, views = gather(**{at(name, (place,)): array for place, array in enumerate(own)})
                if placement.device_id != lane.device_id:
                    raise ArgumentError(name, placement, str(attention.placement))
                (out_name, out), (lse_name, lse) = views.items()
                check_array(out_name, out, (attention.out_dtype.type,), **rows, H=count, D_CKV=latent)
                rows, latent = dict(zip(rows, out.shape, strict=False)), out.shape[3]
                check_array(lse_name, lse, (np.float32,), **rows, H=count)
            checked.append((out, lse) if placement.on_host else own)
        return checked


class HeadGather:
    """`HeadLanes.gather` of certain results to certain arrays; `HeadLanes.plan_gather` makes it.

    Attributes
    ----------
    out, lse
        Where the heads are put together.
    """

    def __init__(
        self,
        heads: HeadLanes,
        parts: Sequence[tuple[Array, Array]],
        target: Lane,
        out: Array | None,
        lse: Array | None,
        stream: StreamLike,
    ) -> None:
        self._heads, self._parts, self._target = heads, parts, target
        self._copies: list[LaneCopy] = []
        first = parts[0][0]
        shape = (*first.shape[:2], heads.heads[-1].stop, first.shape[3])
        if not isinstance(target, DeviceLane):
            dtype = heads.attentions[0].out_dtype
            self.out = _host_array(target, "out", out, shape, dtype)
            self.lse = _host_array(target, "lse", lse, shape[:3], np.dtype(np.float32))
            return
        placement = Placement(placement_of("out", first).library, target.device_id)
        with target, Transfer(placement, self._stream(stream)) as transfer:
            whole = [
                transfer.output("out", shape, device_view("out", first).dtype.type, out),
                transfer.output("lse", shape[:3], np.float32, lse),
            ]
            self.out, self.lse = transfer.results().values()
        for lane, own in zip(heads.devices, parts, strict=True):
            if isinstance(lane, DeviceLane):
                begin = heads.heads[lane.index].start
                rectangles = [_part(array, view, begin) for array, view in zip(own, whole, strict=True)]
                mode = heads.devices.copy_mode(lane, target) or "direct"
                self._copies.append(LaneCopy(lane, target, mode, rectangles))

    def run(self, *, stream: StreamLike = None) -> tuple[Array, Array]:
        """Copy what the lanes have written so far; neither allocates nor synchronises on a device.

        Parameters
        ----------
        stream
            As for `HeadLanes.gather`.

        Returns
        -------
        out, lse
        """
        target = self._stream(stream)
        for copy in self._copies:
            copy.run(target)
        self._heads._unread.add(self._copies, self)
        if not self._copies:
            for whole, parts in zip((self.out, self.lse), zip(*self._parts, strict=True), strict=True):
                whole[...] = np.concatenate([_on_host(part) for part in parts], axis=2)
        return self.out, self.lse

    def _stream(self, stream: StreamLike) -> Any:
        self._heads.devices.check_stream(stream)
        return self._target.stream if stream is None else as_core_stream(stream)


def _part(array: Array, whole: Any, begin: int) -> Part:
    """Return where a lane's heads are, and their place among all."""
    view = device_view("results", array)
    head = _row_bytes(view)
    width, pitch = view.shape[2] * head, whole.shape[2] * head
    target = Rectangle(whole.pointer + begin * head, pitch)
    return Part(Rectangle(view.pointer, width), target, width, view.shape[0] * view.shape[1])


def _host_array(
    lane: Lane, name: str, out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """Return an array for heads that are on the host, or in the simulator."""
    if out is None:
        return lane.put(np.zeros(shape, dtype))
    with lane:
        placement, views = gather(**{name: out})
        if placement.device_id != lane.device_id:
            raise ArgumentError(name, placement, f"an array where {lane} is")
        check_output(name, host_output(name, out) if placement.on_host else views[name], shape, dtype.type)
    return out


def _on_host(array: Array) -> Array:
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array


def _row_bytes(view: Any) -> int:
    """Bytes of one head."""
    return int(np.prod(view.shape[3:], dtype=np.int64)) * int(view.dtype.itemsize)
