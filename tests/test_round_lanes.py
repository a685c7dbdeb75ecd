"""Rounds over lanes: what one lane gives, to the bit, in the caller's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_checks import numpy_library
from lane_checks import LaneChecker, check_lanes

from numba_ddtree import ArgumentError, DeviceGroup, KVCaches, RoundLanes
from numba_ddtree.status import FinishReason


@pytest.fixture
def two() -> Iterator[DeviceGroup]:
    with DeviceGroup([None, None]) as group:
        yield group


def plan(devices: DeviceGroup, **changes: Any) -> RoundLanes:
    """Plan B = 4, L = 2, V = 8, N = 4."""
    given = {"max_batch": 4, "draft_length": 2, "vocabulary": 8, "budget": 3} | changes
    return RoundLanes.plan(devices, **given)


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("captured", [False, True])
def test_lanes_give_what_one_gives(rng: np.random.Generator, lanes: int, captured: bool) -> None:
    with DeviceGroup([None] * lanes) as devices:
        check_lanes(rng, numpy_library(), devices, (7, 3, 20, 6), captured=captured)


@pytest.mark.parametrize("places", [(7, 7), (1, 6), (4, 5)])
def test_lanes_of_any_size(rng: np.random.Generator, two: DeviceGroup, places: tuple[int, int]) -> None:
    check_lanes(rng, numpy_library(), two, (7, 3, 20, 6), captured=False, places=places)


def test_more_lanes_than_requests(rng: np.random.Generator) -> None:
    with DeviceGroup([None] * 4) as devices:
        check_lanes(rng, numpy_library(), devices, (2, 3, 20, 6), captured=True)


def test_requests_are_split_by_length(two: DeviceGroup) -> None:
    rounds = plan(two)
    rounds.start([1, 2, 3, 4], [900, 10, 20, 30])
    # The longest one alone on its lane, bar the place that has to be taken.
    assert rounds.lane_of.tolist() == [0, 0, 1, 1]
    assert rounds.place_of.tolist() == [0, 1, 0, 1]
    rounds = plan(two, places=[3, 3])
    rounds.start([1, 2, 3, 4], [900, 10, 20, 30])
    assert rounds.lane_of.tolist() == [0, 1, 1, 1]


def test_draws_are_keyed_by_request_not_by_place(rng: np.random.Generator, two: DeviceGroup) -> None:
    # Every request has the same logits, so that only the keys tell their draws apart.
    rounds = plan(two, vocabulary=64, options={"choose_tokens": {"temperature": 5.0, "seed": 3}})
    rounds.start([0] * 4, [7] * 4)
    logits, scores = np.zeros((2, 2, 64), np.float32), np.zeros((2, 4, 64), np.float32)
    rounds.draft([logits] * 2)
    rounds.accept([scores] * 2)
    assert len(set(rounds.gather().tokens[:, 0].tolist())) > 1


def test_nothing_started_gives_nothing(two: DeviceGroup) -> None:
    rounds = plan(two)
    rounds.draft([np.zeros((2, 2, 8), np.float32)] * 2)
    rounds.accept([np.zeros((2, 4, 8), np.float32)] * 2)
    assert rounds.gather().accept_length.tolist() == [0] * 4
    assert rounds.result.finish_reason.tolist() == [FinishReason.INACTIVE] * 4


def test_models_are_captured_with_the_round(two: DeviceGroup) -> None:
    rounds = plan(two)
    rounds.start([1, 2, 3, 4], [5, 6, 7, 8])
    logits = [np.zeros((2, 2, 8), np.float32) for _ in range(2)]
    scores = [np.zeros((2, 4, 8), np.float32) for _ in range(2)]
    calls: list[tuple[str, int]] = []

    def drafter(lane: int, stream: Any) -> None:
        calls.append(("drafter", lane))
        logits[lane][:] = 0
        logits[lane][..., 3] = 9

    def target(lane: int, stream: Any) -> None:
        calls.append(("target", lane))
        assert (rounds.rounds[lane].tree.token_ids[:, 1] == 3).all()
        scores[lane][..., 3] = 9

    rounds.capture(logits, scores, drafter=drafter, target=target)
    rounds.run()
    assert calls == [("drafter", 0), ("target", 0), ("drafter", 1), ("target", 1)]
    assert rounds.gather().tokens.tolist() == [[3, 3, 3]] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch": 0}, r"^max_batch: got 0"),
        ({"budget": 1025}, r"^budget: got 1025"),
        ({"draft_length": 65}, r"^draft_length: got 65"),
        ({"places": [4]}, r"^places: got 1; expected a list or tuple with one for each of 2 lanes"),
        ({"places": [4, 0]}, r"^places: .*at least 1 for each lane"),
        ({"places": [1, 2]}, r"^places: .*4 together"),
        ({"places": [2.5, 2]}, r"^places: "),
        ({"caches": np.zeros(3)}, r"^caches: got ndarray; expected a list or tuple"),
        ({"caches": [None]}, r"^caches: got 1"),
        ({"lane_options": [{}] * 3}, r"^lane_options: got 3"),
        ({"budgets": np.zeros(3, np.int32)}, r"^budgets: got shape \(3,\); expected a row for each of .* 4"),
        (
            {"options": {"choose_tokens": {"temperature": np.zeros(2, np.float32)}}},
            r"^options\['choose_tokens'\]\['temperature'\]: got shape \(2,\)",
        ),
        (
            {"options": {"compact_kv": {"block_table": np.zeros((4, 2), np.int32)}}},
            r"^options\['compact_kv'\]\['block_table'\]: .*in lane_options",
        ),
        ({"options": {"build_tree": {"chain": 1}}}, r"^lane 0 \(host\), options\['build_tree'\]"),
    ],
)
def test_what_cannot_be_planned_is_refused(two: DeviceGroup, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(two, **changes)


def test_only_a_group_has_lanes() -> None:
    with pytest.raises(ArgumentError, match=r"^devices: got list; expected a DeviceGroup"):
        plan([None, None])  # type: ignore[arg-type]


def test_lanes_of_the_host_take_no_stream(two: DeviceGroup) -> None:
    rounds = plan(two)
    for call in (lambda: rounds.gather(stream=7), lambda: rounds.run(after=7)):
        with pytest.raises(ArgumentError, match=r"^stream: got int; expected None"):
            call()


def test_logits_are_each_lanes_own(two: DeviceGroup) -> None:
    rounds = plan(two)
    logits = np.zeros((2, 2, 8), np.float32)
    with pytest.raises(ArgumentError, match=r"^logits: got ndarray; expected a list or tuple with one for"):
        rounds.draft(np.zeros((2, 2, 2, 8), np.float32))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^lane 1 \(host\), logits: .*B = 2, L = 2, V = 8"):
        rounds.draft([logits, logits[:1]])
    with pytest.raises(ArgumentError, match=r"^target_logits: got 1;"):
        rounds.accept([logits])
    with pytest.raises(
        ArgumentError, match=r"^name: got 'round'; expected what lane 0 \(host\) has captured"
    ):
        rounds.run()


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"root_tokens": [1, 2, 3, 4, 5], "prefix_lengths": [1] * 5}, "root_tokens"),
        ({"prefix_lengths": [1]}, "prefix_lengths"),
        ({"prefix_lengths": [1, -1]}, "prefix_lengths[1]"),
        ({"requests": [0, 4]}, "requests[1]"),
    ],
)
def test_what_cannot_start_is_refused(two: DeviceGroup, changes: dict[str, Any], argument: str) -> None:
    rounds = plan(two)
    before = rounds.lane_of.tolist()
    with pytest.raises(ArgumentError) as caught:
        rounds.start(**({"root_tokens": [1, 2], "prefix_lengths": [3, 4]} | changes))
    assert caught.value.argument == argument
    assert rounds.lane_of.tolist() == before


def test_the_last_of_several_starts_of_a_request_counts(two: DeviceGroup) -> None:
    rounds = plan(two)
    rounds.start([1, 2, 3], [4, 5, 6], requests=[2, 0, 2])
    lane, place = rounds.lane_of[2], rounds.place_of[2]
    state = rounds.rounds[lane].state
    assert (state.root_tokens[place], state.prefix_lengths[place]) == (3, 6)


def test_caches_live_with_their_lane(two: DeviceGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from numba_ddtree.arrays import Placement

    caches = KVCaches.describe(np.zeros((2, 9, 4), np.float32))
    elsewhere = replace(caches, placement=Placement("torch", 1))
    with pytest.raises(ArgumentError, match=r"^lane 1 \(host\), caches: got arrays on CUDA device 1"):
        plan(two, caches=[caches, elsewhere])


def test_a_checker_sees_a_wrong_lane(rng: np.random.Generator, two: DeviceGroup) -> None:
    checker = LaneChecker(rng, numpy_library(), two, (4, 3, 20, 6))
    checker.start(rng, None, 4)
    checker.one.start([1] * 4, [2] * 4)
    checker.many.start([1] * 4, [2] * 4)
    draft, target = checker.logits(rng)
    checker.run_one(draft, target)
    checker.run_many(draft[::-1], target[::-1], captured=False)
    with pytest.raises(AssertionError):
        checker.check()
