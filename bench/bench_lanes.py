"""Rounds and attention over lanes: host time, overlap, and what gathering costs.

On one device all cases are of two lanes of it; where there are more devices, also of lanes on each. Every
round compacts nothing, as no caches are planned; the target agrees with the drafter's best token throughout.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import pytest

from numba_ddtree.device_group import DeviceGroup
from numba_ddtree.devices import find_device_fault
from numba_ddtree.head_lanes import HeadLanes
from numba_ddtree.round_lanes import RoundLanes

DEPTH, VOCABULARY, WIDTH, BUDGET = 15, 163840, 64, 64
BATCHES = (8, 32, 128)
TOKEN = 7
ROUNDS, REPEATS, HOST_CALLS = 20, 7, 50
HEADS, PREFIX, NODES, PAGE_SIZE = 64, 8192, 65, 64
LATENT, ROPE = 512, 64
TIMING = (
    "device time from the first round's begin to the last one's end, on one stream that all lanes follow and "
    "that follows all lanes, of 20 rounds, by the round, median of 7; host_us: by round and lane, results "
    "gathered on the first lane's stream, without waiting, median of 50; lanes one after the other: the sum "
    "of the times that each takes alone"
)

DEVICE_FAULT = find_device_fault()
pytestmark = pytest.mark.skipif(DEVICE_FAULT is not None, reason=f"no CUDA device: {DEVICE_FAULT}")


def device_lists() -> list[tuple[int, ...]]:
    """Two lanes of one device; a lane on each of 2, 4 and 8 devices, as far as there are."""
    if DEVICE_FAULT is not None:
        return [(0, 0)]
    from numba_ddtree.cuda_target import cuda

    found = len(cuda.gpus)
    return [(0, 0), *(tuple(range(count)) for count in (2, 4, 8) if count <= found)]


DEVICES = device_lists()


@pytest.fixture(autouse=True)
def say_how(recorder):
    recorder.timing("lanes", TIMING)


def case_of(work: str, devices: tuple[int, ...], **sizes: int) -> dict[str, int | str]:
    return {"work": work, **sizes, "lanes": len(devices), "devices": ",".join(map(str, devices))}


class Clock:
    """Times what lanes do between two events of one stream of the first lane's device."""

    def __init__(self, group: DeviceGroup) -> None:
        from cuda.core import Device, EventOptions

        self.group = group
        with group.home:
            device = Device(group.home.device_id)
            self.stream = device.create_stream()
            self.events = [device.create_event(EventOptions(timing_enabled=True)) for _ in range(2)]

    def us(self, call) -> float:
        """Return the median device time of a call, which is given the stream."""
        times = []
        for _ in range(REPEATS + 1):
            with self.group.home:
                self.stream.record(self.events[0])
            for _ in range(ROUNDS):
                call(self.stream)
            with self.group.home:
                self.stream.record(self.events[1])
                self.events[1].sync()
            times.append(1000 * float(self.events[1] - self.events[0]) / ROUNDS)
        return median(times[1:])

    def host_us(self, call) -> float:
        """Return the median host time of a call for each lane, of the lanes' own streams, nothing queued."""
        times = []
        for _ in range(HOST_CALLS):
            self.group.synchronize()
            started = time.perf_counter()
            call(None)
            times.append(1e6 * (time.perf_counter() - started) / len(self.group))
        self.group.synchronize()
        return median(times)


def plan_rounds(torch, group: DeviceGroup, draft, target) -> RoundLanes:
    """Capture rounds of a batch whose logits are given, in neighbouring parts for the lanes."""
    batch = len(draft)
    rounds = RoundLanes.plan(
        group, batch, DEPTH, VOCABULARY, BUDGET, k=WIDTH, target_dtype="bfloat16", library="torch"
    )
    rounds.start(np.full(batch, TOKEN, np.int32), np.zeros(batch, np.int32))
    parts = [
        [
            part.to(f"cuda:{lane.device_id}")
            for part, lane in zip(logits.chunk(len(group)), group, strict=True)
        ]
        for logits in (draft, target)
    ]
    torch.cuda.synchronize()
    rounds.capture(*parts)
    return rounds


def round_with_results(rounds: RoundLanes):
    def call(stream) -> None:
        rounds.run(after=stream)
        rounds.gather(stream=stream)

    return call


def round_of(group: DeviceGroup, lanes):
    """Return a round of some lanes, between whatever comes before and after on a stream."""

    def call(stream) -> None:
        group.fork(stream)
        for lane in lanes:
            lane.launch("round")
            event = lane.done()
            with group.home:
                stream.wait(event)

    return call


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("batch", BATCHES)
def bench_requests(benchmark, recorder, torch, batch, devices):
    draft = torch.randn(batch, DEPTH, VOCABULARY, device="cuda:0")
    target = torch.randn(batch, BUDGET + 1, VOCABULARY, device="cuda:0", dtype=torch.bfloat16)
    draft[..., TOKEN] += 15
    target[..., TOKEN] += 20
    sizes = {"B": batch, "L": DEPTH, "V": VOCABULARY, "budget": BUDGET}
    benchmark.group = f"a round of {batch} requests over lanes"
    with DeviceGroup([0]) as one:
        clock, call = Clock(one), round_with_results(plan_rounds(torch, one, draft, target))
        one_us, one_host = clock.us(call), clock.host_us(call)
    case = case_of("round", (0,), **sizes)
    recorder.kernel("lanes", case, kernel="RoundLanes", us=one_us, host_us=one_host)
    with DeviceGroup(devices) as group:
        rounds = plan_rounds(torch, group, draft, target)
        clock, call = Clock(group), round_with_results(rounds)
        us, host = clock.us(call), clock.host_us(call)
        together = clock.us(round_of(group, group.lanes))
        alone = [clock.us(round_of(group, [lane])) for lane in group]
        assert rounds.gather().accept_length.tolist() == [DEPTH + 1] * batch
        case = case_of("round", devices, **sizes)
        recorder.kernel("lanes", case, kernel="RoundLanes", us=us, host_us=host)
        recorder.peer("lanes", case, "one lane of all requests", one_us)
        case = case_of("round, not gathered", devices, **sizes)
        recorder.kernel("lanes", case, kernel="RoundLanes", us=together)
        recorder.peer("lanes", case, "its lanes, one after the other", sum(alone))
        benchmark.extra_info.update(case, us=us, host_us=host, together_us=together, alone_us=alone)

        def call_and_wait() -> None:
            call(clock.stream)
            clock.stream.sync()

        benchmark.pedantic(call_and_wait, rounds=20, warmup_rounds=2)


def attention_arguments(torch, devices: tuple[int, ...], batch: int):
    """Make what each lane's heads attend with; every lane has all of the cache."""
    from numba_ddtree import DraftTree

    parents = torch.arange(-1, NODES - 1, dtype=torch.int32).clamp(max=DEPTH).repeat(batch, 1)
    pages = -(-(PREFIX + NODES) // PAGE_SIZE)
    lists: dict[str, list] = {}
    for device in devices:
        where = {"device": f"cuda:{device}", "dtype": torch.bfloat16}
        cache = torch.randn(batch * pages, PAGE_SIZE, LATENT + ROPE, **where)
        heads = HEADS // len(devices)
        table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
        with torch.cuda.device(device):
            lengths = torch.full((batch,), PREFIX, dtype=torch.int32, device=where["device"])
            tree = DraftTree.from_parents(
                parents.to(where["device"]),
                torch.zeros_like(parents).to(where["device"]),
                prefix_lengths=lengths,
                max_depth=DEPTH + 1,
            )
        given = {
            "q_nope": torch.randn(batch, NODES, heads, LATENT, **where),
            "q_pe": torch.randn(batch, NODES, heads, ROPE, **where),
            "ckv_cache": cache[..., :LATENT],
            "kpe_cache": cache[..., LATENT:],
            "tree": tree,
            "prefix_lengths": lengths,
            "block_table": table.to(where["device"]),
            "out": torch.empty(batch, NODES, heads, LATENT, **where),
            "lse": torch.empty(batch, NODES, heads, device=where["device"]),
        }
        for name, value in given.items():
            lists.setdefault(name, []).append(value)
        torch.cuda.synchronize(device)
    return lists


@pytest.mark.parametrize("devices", [(0,), *DEVICES])
@pytest.mark.parametrize("batch", [1, 8])
def bench_heads(benchmark, recorder, torch, batch, devices):
    given = attention_arguments(torch, devices, batch)
    sizes = {"B": batch, "H": HEADS, "N": NODES, "prefix": PREFIX}
    benchmark.group = f"attention of {HEADS} heads, {batch} requests, over lanes"
    with DeviceGroup(devices) as group:
        heads = HeadLanes.plan(
            group, batch, NODES, HEADS, max_prefix_length=PREFIX, max_depth=DEPTH + 1, page_size=PAGE_SIZE
        )
        clock = Clock(group)

        heads.capture(**given, sm_scale=(128 + ROPE) ** -0.5)

        def attend(stream) -> None:
            heads.replay(after=stream)
            if stream is not None:
                group.join(stream)

        attend(clock.stream)
        group.synchronize()
        out = torch.empty(batch, NODES, HEADS, LATENT, device="cuda:0", dtype=torch.bfloat16)
        lse = torch.empty(batch, NODES, HEADS, device="cuda:0")
        results = list(zip(given["out"], given["lse"], strict=True))
        gatherer = heads.plan_gather(results, out=out, lse=lse)

        def put_together(stream) -> None:
            gatherer.run(stream=stream)

        case = case_of("attention", devices, **sizes)
        us, host = clock.us(attend), clock.host_us(attend)
        recorder.kernel("lanes", case, kernel="HeadLanes", us=us, host_us=host)
        benchmark.extra_info.update(case, us=us, host_us=host)
        if len(devices) > 1:
            case = case_of("gathering heads", devices, **sizes)
            us, host = clock.us(put_together), clock.host_us(put_together)
            moved = out.nbytes + lse.nbytes
            recorder.kernel("lanes", case, kernel="HeadLanes", us=us, host_us=host, gbps=moved / us / 1e3)
            expected = torch.cat([result[0].to("cuda:0") for result in results], dim=2)
            torch.cuda.synchronize()
            assert torch.equal(out, expected)

        def attend_and_wait() -> None:
            attend(clock.stream)
            clock.stream.sync()

        benchmark.pedantic(attend_and_wait, rounds=5, warmup_rounds=1)
