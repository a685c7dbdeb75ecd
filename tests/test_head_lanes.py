"""Heads over lanes: each lane's heads are those of attention with all, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from head_checks import check_heads
from kernel_checks import numpy_library
from libraries import torch_library
from ml_dtypes import bfloat16

from inputs import make_attention
from numba_ddtree import ArgumentError, DeviceGroup, HeadLanes


@pytest.fixture
def two() -> Iterator[DeviceGroup]:
    with DeviceGroup([None, None]) as group:
        yield group


def plan(devices: DeviceGroup, **changes: Any) -> HeadLanes:
    given = {"max_batch": 1, "num_slots": 3, "num_heads": 3, "max_prefix_length": 5, "dtype": np.float32}
    return HeadLanes.plan(devices, **(given | changes))


def arguments(rng: np.random.Generator, heads: HeadLanes) -> dict[str, Any]:
    """Make one request's arguments for each lane."""
    given = make_attention(rng, prefixes=[5], N=3, H=3)
    lanes = len(heads.heads)
    return {
        "q_nope": [np.ascontiguousarray(given.q_nope[:, :, part]) for part in heads.heads],
        "q_pe": [np.ascontiguousarray(given.q_pe[:, :, part]) for part in heads.heads],
        "ckv_cache": [given.ckv_cache] * lanes,
        "kpe_cache": [given.kpe_cache] * lanes,
        "tree": [given.tree] * lanes,
        "prefix_lengths": [given.prefix_lengths] * lanes,
        "sm_scale": given.sm_scale,
    }


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_heads_over_lanes(rng: np.random.Generator, lanes: int, dtype: Any) -> None:
    with DeviceGroup([None] * lanes) as devices:
        check_heads(rng, numpy_library(), devices, dtype, to=lanes - 1)


def test_the_heads_of_each_lane(two: DeviceGroup) -> None:
    heads = plan(two)
    assert heads.heads == (slice(0, 2), slice(2, 3))
    assert [each.num_heads for each in heads.attentions] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 1}, r"^num_heads: got 1; expected a number from 2"),
        ({"num_slots": 0}, r"^lane 0 \(host\), num_slots: got 0"),
        ({"device_id": 0}, r"^device_id: got 0; expected nothing, since each lane has its own"),
    ],
)
def test_what_cannot_be_planned_is_refused(two: DeviceGroup, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(two, **changes)


def test_a_wrong_array_names_its_lane(rng: np.random.Generator, two: DeviceGroup) -> None:
    heads = plan(two)
    given = arguments(rng, heads)
    with pytest.raises(ArgumentError, match=r"^q_nope: got ndarray; expected a list or tuple"):
        heads.run(**(given | {"q_nope": given["q_nope"][0]}))
    with pytest.raises(ArgumentError, match=r"^lane 1 \(host\), q_nope: got H = 2; expected 1, as planned"):
        heads.run(**(given | {"q_nope": given["q_nope"][:1] * 2, "q_pe": given["q_pe"][:1] * 2}))


def test_what_cannot_be_gathered_is_refused(rng: np.random.Generator, two: DeviceGroup) -> None:
    heads = plan(two)
    results = heads.run(**arguments(rng, heads))
    with pytest.raises(ArgumentError, match=r"^to: got 2"):
        heads.gather(results, to=2)
    with pytest.raises(
        ArgumentError, match=r"^results: got 1; expected a list or tuple with one for each of 2"
    ):
        heads.gather(results[:1])
    with pytest.raises(ArgumentError, match=r"^lane 0 \(host\), results\[0\]\[0\]: .*H = 2"):
        heads.gather(results[::-1])
    with pytest.raises(ArgumentError, match=r"^results\[1\]: got ndarray; expected out and lse"):
        heads.gather([results[0], results[1][0]])
    with pytest.raises(ArgumentError, match=r"^lane 0 \(host\), out: got float64 of shape"):
        heads.gather(results, out=np.zeros((1, 3, 3, 16)))
    with pytest.raises(ArgumentError, match=r"^lane 0 \(host\), out: got list; expected a numpy array"):
        heads.gather(results, out=np.zeros((1, 3, 3, 16), np.float32).tolist())


@pytest.mark.parametrize(
    ("lane", "wrong", "message"),
    [
        (
            0,
            (0, np.zeros((1, 3, 2))),
            r"results\[0\]\[0\]: got float64 of shape \(1, 3, 2\); expected float32",
        ),
        (0, (0, [[[[1.0]]]]), r"results\[0\]\[0\]: got float64 of shape \(1, 1, 1, 1\); expected float32"),
        (0, (0, None), r"results\[0\]\[0\]: got None; expected an array"),
        (1, (0, np.zeros((1, 2, 1, 16), np.float32)), r"results\[1\]\[0\]: got .* \[B = 1, N = 3, H = 1"),
        (1, (1, np.zeros((1, 3, 2), np.float32)), r"results\[1\]\[1\]: got .* \[B = 1, N = 3, H = 1\]"),
        (1, (1, np.zeros((1, 3, 1))), r"results\[1\]\[1\]: got float64"),
    ],
)
def test_what_is_wrong_of_the_results_is_named(
    rng: np.random.Generator, two: DeviceGroup, lane: int, wrong: tuple[int, Any], message: str
) -> None:
    heads = plan(two)
    results = [list(each) for each in heads.run(**arguments(rng, heads))]
    results[lane][wrong[0]] = wrong[1]
    with pytest.raises(ArgumentError, match=rf"^lane {lane} \(host\), {message}"):
        heads.gather(results)


def test_lanes_of_the_host_take_no_stream(rng: np.random.Generator, two: DeviceGroup) -> None:
    heads = plan(two)
    results = heads.run(**arguments(rng, heads))
    gatherer = heads.plan_gather(results)
    calls: list[Any] = [
        lambda stream: heads.gather(results, stream=stream),
        lambda stream: heads.plan_gather(results, stream=stream),
        lambda stream: gatherer.run(stream=stream),
        lambda stream: heads.replay(after=stream),
        two.fork,
        two.join,
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=r"^stream: got int; expected None"):
            call(7)


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [None, "direct", "host"])
@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_heads_over_lanes_of_one_device(
    rng: np.random.Generator, copies: str | None, lanes: int, dtype: Any
) -> None:
    library = torch_library()
    with DeviceGroup([0] * lanes, copies=copies) as devices:
        check_heads(rng, library, devices, dtype, latent=512, rope=64, to=lanes - 1, rounds=4)


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [None, "direct", "host"])
def test_heads_over_two_devices(rng: np.random.Generator, copies: str | None) -> None:
    from numba_ddtree.cuda_target import cuda

    library = torch_library()
    if len(cuda.gpus) < 2:
        pytest.skip("one device only")
    with DeviceGroup([0, 1, 0], copies=copies) as devices:
        for to in range(3):
            check_heads(rng, library, devices, bfloat16, latent=512, rope=64, to=to, rounds=4)
