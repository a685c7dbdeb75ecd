"""Attention with its heads over lanes against attention of all heads on one lane."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_checks import Library
from numpy.typing import DTypeLike, NDArray

from inputs import make_attention
from numba_ddtree import DeviceGroup, HeadLanes
from numba_ddtree.tree_attention import TreeAttention

HEADS = 7


def check_heads(
    rng: np.random.Generator,
    library: Library,
    devices: DeviceGroup,
    dtype: DTypeLike,
    *,
    latent: int = 16,
    rope: int = 8,
    heads: int = HEADS,
    to: int = 0,
    rounds: int = 2,
) -> None:
    """Run twice, on other inputs, and compare shards and what is gathered with one lane.

    To the bit, bar the references in float32: numpy's products of matrices round by their shapes.
    """
    # Sums of 57 terms at most, of scale 1, in two orders.
    rounding = 1e-5 if library.on_host and dtype == np.float32 else 0.0
    plan: dict[str, Any] = {"max_prefix_length": 40, "dtype": dtype}
    many = HeadLanes.plan(devices, 3, 9, heads, **plan)
    where = {"backend": "numpy"} if library.on_host else {"device_id": devices.home.device_id}
    one = TreeAttention.plan(3, 9, heads, **plan, **where)
    shape = (3, 9, heads)
    outs = put(devices, to, library, np.zeros((*shape, latent), dtype))
    sums = put(devices, to, library, np.zeros(shape, np.float32))
    for _ in range(rounds):
        given = make_attention(rng, prefixes=[0, 17, 40], N=9, H=heads, latent=latent, rope=rope)
        arrays = {
            name: getattr(given, name).astype(dtype) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
        }
        of_lanes: dict[str, list[Any]] = {name: [] for name in (*arrays, "tree", "prefix_lengths")}
        for lane, part in zip(devices, many.heads, strict=True):
            with lane:
                for name, array in arrays.items():
                    own = array[:, :, part] if name.startswith("q_") else array
                    of_lanes[name].append(library.put(np.ascontiguousarray(own)))
                of_lanes["tree"].append(library.put_tree(given.tree))
                of_lanes["prefix_lengths"].append(library.put(given.prefix_lengths))
        devices.synchronize()
        results = many.run(**of_lanes, sm_scale=given.sm_scale)
        check_replay(many, of_lanes, given.sm_scale, results, library)
        gathered = many.gather(results, to=to, out=outs, lse=sums)
        fresh = many.gather(results, to=to)
        devices.synchronize()
        with devices.home:
            on_home = {name: library.put(array) for name, array in arrays.items()}
            want = one.run(
                **on_home,
                tree=library.put_tree(given.tree),
                sm_scale=given.sm_scale,
                prefix_lengths=library.put(given.prefix_lengths),
            )
        for place, name in enumerate(("out", "lse")):
            expected = library.get(want[place])
            for lane, part in zip(devices, many.heads, strict=True):
                shard = library.get(results[lane.index][place])
                assert_close(shard, expected[:, :, part], rounding)
            shards = np.concatenate([library.get(result[place]) for result in results], axis=2)
            np.testing.assert_array_equal(library.get(gathered[place]), shards, err_msg=name)
            np.testing.assert_array_equal(library.get(fresh[place]), shards, err_msg=name)


def check_replay(
    many: HeadLanes, of_lanes: dict[str, list[Any]], sm_scale: float, results: Any, library: Library
) -> None:
    """Compare what a captured run writes, over poison, with what was run."""
    many.devices.synchronize()
    hosts = [[library.get(array) for array in result] for result in results]
    outs, sums = (
        [put(many.devices, i, library, host[n] * 0 + 7) for i, host in enumerate(hosts)] for n in (0, 1)
    )
    many.capture(**of_lanes, sm_scale=sm_scale, out=outs, lse=sums)
    many.devices.synchronize()
    many.replay()
    many.devices.synchronize()
    for i, (out, lse) in enumerate(hosts):
        np.testing.assert_array_equal(library.get(outs[i]), out)
        np.testing.assert_array_equal(library.get(sums[i]), lse)


def assert_close(got: NDArray[Any], want: NDArray[Any], rounding: float) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=rounding)


def put(devices: DeviceGroup, lane: int, library: Library, array: NDArray[Any]) -> Any:
    with devices.lanes[lane]:
        return library.put(array)
