"""Copies from lane to lane come after what they copy, and before it is written again, on any streams."""

from __future__ import annotations

from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest

from numba_ddtree import DeviceGroup, RoundLanes, lane_copies, round_lanes
from numba_ddtree.lane_copies import LaneCopy, Part, Rectangle, UnreadCopies
from numba_ddtree.lanes import DeviceLane


class Event:
    """Knows what was before it when it was recorded last."""

    is_done = False

    def __init__(self) -> None:
        self.before: set[object] = set()


class Stream:
    """Knows what its next work comes after."""

    handle = 0

    def __init__(self) -> None:
        self.before: set[object] = set()

    def record(self, event: Event) -> None:
        event.before = set(self.before)

    def wait(self, event: Event) -> None:
        self.before |= event.before

    def work(self, what: object) -> object:
        self.before.add(what)
        return what


class MadeUpLane(DeviceLane):
    """A lane without a device."""

    def __init__(self, index: int) -> None:
        self.index, self.device_id, self.stream = index, 0, Stream()
        self.pinned: list[Any] = []

    def __enter__(self) -> MadeUpLane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def new_event(self) -> Event:
        return Event()

    def allocate_pinned(self, nbytes: int) -> Any:
        self.pinned.append(np.zeros(nbytes, np.uint8))
        return type("Buffer", (), {"handle": self.pinned[-1].ctypes.data})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return what was launched, in order."""
    launched: list[object] = []

    def launch(copies: list[Any], stream: Stream) -> None:
        launched.append(stream.work(object()))

    monkeypatch.setattr(lane_copies, "_launch", launch)
    return launched


@pytest.mark.parametrize("mode", ["direct", "host"])
def test_the_source_follows_every_stream_that_reads(reads: list[object], mode: str) -> None:
    source, target = MadeUpLane(0), MadeUpLane(1)
    copy = LaneCopy(source, target, mode, [Part(Rectangle(4096, 8), Rectangle(8192, 8), 8, 1)])
    streams = Stream(), Stream(), Stream()
    for stream in (*streams, streams[0]):
        written = source.stream.work(object())
        copy.run(stream)
        assert written in stream.before
    copy.release()
    assert set(reads) <= source.stream.before


def test_one_stream_does_not_wait_for_itself(reads: list[object]) -> None:
    source, target = MadeUpLane(0), MadeUpLane(1)
    copy = LaneCopy(source, target, "direct", [Part(Rectangle(4096, 8), Rectangle(8192, 8), 8, 1)])
    waited: list[Any] = []

    class Counting(Stream):
        def wait(self, event: Event) -> None:
            waited.append(event)
            super().wait(event)

    stream = Counting()
    for _ in range(3):
        copy.run(stream)
    assert len(waited) == len(reads) == 3


class Done(Event):
    is_done = True


def test_copies_are_kept_once_and_until_they_are_done(
    reads: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = MadeUpLane(0), MadeUpLane(1)
    parts = [Part(Rectangle(4096, 8), Rectangle(8192, 8), 8, 1)]
    waiting = LaneCopy(source, target, "direct", parts)
    monkeypatch.setattr(target, "new_event", Done)
    done = LaneCopy(source, target, "direct", parts)
    unread, stream = UnreadCopies(), Stream()
    for _ in range(3):
        for copy in (waiting, done):
            copy.run(stream)
            unread.add([copy], keep="its memory")
        assert len(unread) == 2
        unread.forget_done()
        assert len(unread) == 1
    unread.release()
    assert len(unread) == 0
    assert set(reads[::2]) <= source.stream.before


def test_rounds_follow_every_stream_that_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_lanes, "as_core_stream", lambda stream: stream)
    reads: list[object] = []

    class Gatherer:
        def run(self, stream: Stream, event: object) -> None:
            reads.append(stream.work(object()))

    with DeviceGroup([None, None]) as devices:
        rounds = RoundLanes.plan(devices, 4, 2, 8, 3)
    made_up: Any = SimpleNamespace(home=MadeUpLane(0), check_stream=lambda stream: None)
    rounds.devices, rounds._gathered = made_up, Event()
    gatherers: Any = [Gatherer(), Gatherer()]
    rounds._gatherers = gatherers
    for stream in (Stream(), Stream(), None, Stream()):
        rounds.gather(stream=stream)
    (event,) = rounds._unread
    assert len(reads) == 8
    assert set(reads) <= event.before
