"""Planned rounds: each stage is its reference, nothing is allocated, and graphs replay them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from kernel_checks import Library, assert_same_arrays, numba_library, numpy_library
from libraries import cupy_library, side_stream, torch_library
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from round_checks import RoundCase, RoundChecker, check_rounds, make_case, spoil

from numba_ddtree import ArgumentError, BackendError, DraftTree
from numba_ddtree.arrays import HOST, Placement
from numba_ddtree.devices import find_device_fault
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.refs.round_state import StateArrays, start_requests
from numba_ddtree.round import DDTreeRound
from numba_ddtree.status import FinishReason, TreeStatus
from numba_ddtree.workspace import ALIGNMENT, Field, allocate, workspace_bytes

PAGINGS = ("", "contiguous", "block_table", "kv_indptr")
DTYPES = (np.float32, np.float16, bfloat16)


def plan(**changes: Any) -> DDTreeRound:
    """Plan a round of B = 2, L = 3, V = 8, N = 5 on the host."""
    given = {"max_batch": 2, "draft_length": 3, "vocabulary": 8, "budget": 4, "backend": "numpy"} | changes
    return DDTreeRound.plan(**given)


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("sampled", [False, True])
def test_each_stage_is_its_reference(rng: np.random.Generator, paging: str, sampled: bool) -> None:
    check_rounds(numpy_library(), rng, make_case(rng, paging=paging, sampled=sampled), rounds=4)


@pytest.mark.parametrize("draft_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_logits_of_every_dtype(rng: np.random.Generator, draft_dtype: Any, target_dtype: Any) -> None:
    case = RoundCase(draft_dtype=draft_dtype, target_dtype=target_dtype)
    check_rounds(numpy_library(), rng, case, rounds=2)


def test_a_request_is_decoded_to_its_end() -> None:
    # The target counts upwards; so does the drafter, but for its second position.
    V, prompt = 50, 7
    planned = DDTreeRound.plan(2, 3, V, 4, backend="numpy")
    planned.start([prompt], [prompt], remaining=[10])
    written: list[int] = []
    lengths = []
    while planned.state.finish_reason[0] == FinishReason.UNFINISHED:
        root = int(planned.state.root_tokens[0])
        logits = np.full((2, 3, V), -9.0, np.float32)
        for position in range(3):
            logits[0, position, root + 1 + position] = 5
        logits[0, 1, root + 2], logits[0, 1, 0] = 4.5, 5
        tree = planned.draft(logits)
        target = np.full((2, 5, V), -9.0, np.float32)
        target[0, np.arange(5), tree.token_ids[0] + 1] = 1
        result = planned.accept(target)
        length = int(result.accept_length[0])
        written += result.tokens[0, :length].tolist()
        lengths.append(length)
        assert planned.state.prefix_lengths.tolist() == [prompt + len(written), 0]
        assert planned.state.remaining.tolist() == [10 - len(written), 0]
        assert result.accept_length[1] == 0
    assert written == list(range(prompt + 1, prompt + 11))
    assert planned.state.finish_reason.tolist() == [FinishReason.LENGTH, FinishReason.INACTIVE]
    assert max(lengths) > 1
    planned.draft(logits)
    assert planned.tree.num_nodes.tolist() == [0, 0]
    assert planned.tree.status.tolist() == [TreeStatus.FINISHED] * 2


def test_an_accept_without_a_draft_passes_everyone_by() -> None:
    planned = plan()
    planned.start([1, 2], [3, 4])
    result = planned.accept(np.zeros((2, 5, 8), np.float32))
    assert result.accept_length.tolist() == [0, 0]
    assert planned.state.prefix_lengths.tolist() == [3, 4]


def test_a_request_is_taken_out_by_its_remaining_tokens() -> None:
    planned = plan()
    planned.start([1, 2], [3, 4])
    planned.state.remaining[1] = 0
    assert planned.draft(np.zeros((2, 3, 8), np.float32)).num_nodes.tolist() == [5, 0]


def test_a_request_is_taken_out_between_draft_and_accept() -> None:
    planned = plan()
    planned.start([1, 2], [3, 4])
    planned.draft(np.zeros((2, 3, 8), np.float32))
    planned.state.finish_reason[0] = FinishReason.INACTIVE
    result = planned.accept(np.zeros((2, 5, 8), np.float32))
    assert result.accept_length[0] == 0 < result.accept_length[1]
    assert planned.state.prefix_lengths[0] == 3


def test_requests_come_and_go() -> None:
    planned = plan(max_batch=4)
    want = StateArrays(*(np.array(array) for array in planned.state.arrays().values()))
    assert want.finish_reason.tolist() == [FinishReason.INACTIVE] * 4
    assert want.remaining.tolist() == [0] * 4
    for start in (
        {"requests": [3, 1], "root_tokens": [1, 2], "prefix_lengths": [5, 6], "remaining": [7, 8]},
        {"requests": [1, 1], "root_tokens": [3, 4], "prefix_lengths": [0, 2]},
        {"requests": [], "root_tokens": [], "prefix_lengths": []},
        {"root_tokens": [9], "prefix_lengths": [9], "remaining": [1]},
    ):
        given = {name: np.array(value, np.int32) for name, value in start.items()}
        start_requests(want, **given)
        planned.start(**given)
        assert_same_arrays(planned.state.arrays(), want._asdict())
    assert planned.state.remaining.tolist() == [1, 0, 0, 0]


def test_bad_logits_of_passed_requests_do_not_matter() -> None:
    planned = plan()
    planned.start([1], [0])
    logits, target = np.full((2, 3, 8), np.nan, np.float32), np.full((2, 5, 8), np.nan, np.float32)
    logits[0], target[0] = np.arange(8), 0
    planned.draft(logits)
    assert planned.tree.num_nodes.tolist() == [5, 0]
    assert planned.accept(target).accept_length.tolist() == [1, 0]
    assert np.isnan(logits[1]).all()  # the caller's array is its own


@pytest.mark.parametrize("sizes", [(1, 1, 1, 0), (3, 64, 5, 1024), (33, 15, 7, 64)])
def test_the_workspace_is_what_is_allocated(sizes: tuple[int, int, int, int]) -> None:
    planned = DDTreeRound.plan(*sizes, backend="numpy")
    arrays = [
        *planned.state.arrays().values(),
        *planned.candidates,
        *planned.tree.arrays().values(),
        planned.target_tokens,
        *planned.result.arrays().values(),
    ]
    memory = arrays[0].base
    while memory.base is not None:
        memory = memory.base
    assert memory.nbytes == planned.workspace_bytes
    addresses = sorted((array.ctypes.data, array.nbytes) for array in arrays)
    for (address, size), (following, _) in pairwise(addresses):
        assert address + size <= following
    assert addresses[0][0] == memory.ctypes.data
    last, size = addresses[-1]
    assert last + -(-size // ALIGNMENT) * ALIGNMENT == memory.ctypes.data + memory.nbytes


def test_workspaces_are_aligned() -> None:
    groups = {
        "a": {"x": Field((3,), np.int32), "none": Field((0, 4), np.int64)},
        "b": {"x": Field((1,), np.int8)},
    }
    memory, arrays = allocate(groups, HOST)
    assert workspace_bytes(groups) == memory.nbytes == 2 * ALIGNMENT
    assert arrays["b"]["x"].ctypes.data == memory.ctypes.data + ALIGNMENT
    assert arrays["a"]["none"].shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"max_batch": 0}, "max_batch"),
        ({"max_batch": 2.0}, "max_batch"),
        ({"max_batch": 2**20 + 1}, "max_batch"),
        ({"draft_length": 0}, "draft_length"),
        ({"draft_length": 65}, "draft_length"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"vocabulary": 2**18 + 1}, "vocabulary"),
        ({"budget": -1}, "budget"),
        ({"budget": 1025}, "budget"),
        ({"k": 0}, "k"),
        ({"k": 9}, "k"),
        ({"draft_dtype": np.float64}, "draft_dtype"),
        ({"draft_dtype": "text"}, "draft_dtype"),
        ({"target_dtype": np.int32}, "target_dtype"),
        ({"target_dtype": None}, "target_dtype"),
        ({"caches": np.zeros((2, 9, 4))}, "caches"),
        ({"library": "torch"}, "library"),
        ({"device_id": 0}, "device_id"),
        ({"backend": "gpu"}, "backend"),
        ({"backend": np.array(["numpy", "cuda"])}, "backend"),
        ({"library": np.array(["torch", "cupy"])}, "library"),
        ({"options": {"verify": {}}}, "options"),
        ({"options": {"build_tree": {"chain": True}}}, "options['build_tree']"),
        ({"options": {"build_tree": {"out": None}}}, "options['build_tree']"),
        ({"options": {"build_tree": {"budget": 3}}}, "options['build_tree']"),
        ({"options": {"choose_tokens": {"positions": None}}}, "options['choose_tokens']"),
        ({"options": {"accept_tree": {"remaining": None}}}, "options['accept_tree']"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plan(**changes)
    assert caught.value.argument == argument


@pytest.mark.parametrize("name", ["float16", "bfloat16", np.float16, bfloat16, np.dtype(bfloat16)])
def test_dtypes_have_many_names(name: Any) -> None:
    assert plan(draft_dtype=name).planned.draft_dtype in (np.float16, np.dtype(bfloat16))


def test_torch_names_dtypes_too() -> None:
    torch = pytest.importorskip("torch")
    planned = plan(draft_dtype=torch.bfloat16, target_dtype=torch.float32).planned
    assert planned.draft_dtype == bfloat16
    assert planned.target_dtype == np.float32


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (np.zeros((2, 4, 8), np.float32), "float32 of shape [B = 2, L = 3, V = 8]"),
        (np.zeros((1, 3, 8), np.float32), "float32 of shape [B = 2, L = 3, V = 8]"),
        (np.zeros((2, 3, 7), np.float32), "float32 of shape [B = 2, L = 3, V = 8]"),
        (np.zeros((2, 3, 8), np.float16), "float32 of shape [B = 2, L = 3, V = 8]"),
        (np.zeros((6, 8), np.float32), "float32 of shape [B = 2, L = 3, V = 8]"),
        ("text", "an array"),
    ],
)
def test_logits_are_as_planned(logits: Any, expected: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        plan().draft(logits)
    assert caught.value.argument == "logits"
    assert expected in caught.value.expected
    with pytest.raises(ArgumentError, match=r"^target_logits: .*N = 5"):
        plan().accept(np.zeros((2, 3, 8), np.float32))


class OnDevice:
    """Says by DLPack that it lives on a device; has no memory to look at."""

    dtype, shape, strides, pointer, device_id = np.dtype(np.float32), (2, 3, 8), (96, 32, 4), 0, 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_device_arrays_are_no_business_of_a_round_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba_ddtree.arrays.device_view", lambda name, array: array)
    with pytest.raises(ArgumentError, match=r"^logits: got arrays on CUDA device 0; expected host arrays"):
        plan().draft(OnDevice())
    with pytest.raises(ArgumentError, match=r"^root_tokens: got arrays on CUDA device 0"):
        plan().start(OnDevice(), OnDevice())


def test_a_round_is_planned_before_it_is_run() -> None:
    with pytest.raises(ArgumentError, match=r"^planned: got None; expected a plan: DDTreeRound\.plan"):
        DDTreeRound()


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"root_tokens": None}, "root_tokens"),
        ({"root_tokens": [1, 2, 3], "prefix_lengths": [1, 2, 3]}, "root_tokens"),
        ({"root_tokens": [[1, 2]]}, "root_tokens"),
        ({"root_tokens": [0.5, 1.5]}, "root_tokens"),
        ({"root_tokens": [-1, 0]}, "root_tokens[0]"),
        ({"prefix_lengths": None}, "prefix_lengths"),
        ({"prefix_lengths": [1]}, "prefix_lengths"),
        ({"prefix_lengths": [0, -1]}, "prefix_lengths[1]"),
        ({"prefix_lengths": [0, 2**31 - 1]}, "prefix_lengths[1]"),
        ({"remaining": [1]}, "remaining"),
        ({"requests": [0]}, "requests"),
        ({"requests": [0, 2]}, "requests[1]"),
        ({"requests": [-1, 0]}, "requests[0]"),
    ],
)
def test_what_cannot_start_is_refused(changes: dict[str, Any], argument: str) -> None:
    planned = plan()
    with pytest.raises(ArgumentError) as caught:
        planned.start(**({"root_tokens": [1, 2], "prefix_lengths": [3, 4]} | changes))
    assert caught.value.argument == argument
    assert planned.state.finish_reason.tolist() == [FinishReason.INACTIVE] * 2


def test_a_round_on_the_host_takes_no_stream() -> None:
    planned = plan()
    logits, target_logits = np.zeros((2, 3, 8), np.float32), np.zeros((2, 5, 8), np.float32)
    calls: list[Any] = [
        lambda stream: planned.start([1], [2], stream=stream),
        lambda stream: planned.draft(logits, stream=stream),
        lambda stream: planned.accept(target_logits, stream=stream),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=r"^stream: got int; expected None with the numpy backend"):
            call(7)
        assert planned.state.finish_reason.tolist() == [FinishReason.INACTIVE] * 2


def test_caches_live_where_the_round_does() -> None:
    caches = KVCaches.describe(np.zeros((2, 9, 4), np.float32))
    plan(caches=caches)
    with pytest.raises(ArgumentError, match=r"^caches: got arrays on CUDA device 0; expected host arrays"):
        plan(caches=replace(caches, placement=Placement("torch", 0)))


def test_without_a_device_a_plan_says_so() -> None:
    if find_device_fault() is None:
        pytest.skip("there is a device")
    with pytest.raises(BackendError):
        plan(backend=None)


# On a device.

DEVICE_LIBRARIES = [numba_library, torch_library, cupy_library]
Replay = Callable[[], None]


@contextmanager
def refusing_allocations() -> Iterator[None]:
    """Fail where anything allocates on the device, or waits for it."""
    from numba_ddtree.cuda_target import cuda

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an allocation or a wait")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("device_array", "to_device", "synchronize"):
            patch.setattr(cuda, name, refuse)
        yield


def torch_graph(call: Callable[[Any], None]) -> Replay:
    import torch

    gc.collect()  # of earlier tests' arrays, whose memory would be seen to go
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), refusing_allocations():
        before = torch.cuda.memory_allocated()  # the capture's own random state included
        call(None)
        assert torch.cuda.memory_allocated() == before

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def core_graph(call: Callable[[Any], None]) -> Replay:
    from cuda.core import Device

    from numba_ddtree.cuda_target import cuda

    cuda.synchronize()
    device = Device()
    device.set_current()
    stream = device.create_stream()
    builder = stream.create_graph_builder().begin_building()
    with refusing_allocations():
        call(stream)
    graph = builder.end_building().complete()

    def replay() -> None:
        graph.launch(stream)
        stream.sync()

    return replay


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", DEVICE_LIBRARIES)
@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("sampled", [False, True])
def test_each_stage_on_a_device_is_its_reference(
    rng: np.random.Generator, make_library: Callable[[], Library], paging: str, sampled: bool
) -> None:
    library = make_library()
    case = make_case(rng, paging=paging, sampled=sampled, B=9, V=200, budget=33, k=20)
    check_rounds(library, rng, case, rounds=4)


@pytest.mark.gpu
@pytest.mark.parametrize("draft_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_logits_of_every_dtype_on_a_device(
    rng: np.random.Generator, draft_dtype: Any, target_dtype: Any
) -> None:
    case = RoundCase(draft_dtype=draft_dtype, target_dtype=target_dtype, V=101)
    check_rounds(torch_library(), rng, case, rounds=2)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 1, 1, 0), (2, 64, 70, 1024), (33, 15, 1000, 64)])
def test_sizes_at_their_limits(rng: np.random.Generator, sizes: tuple[int, int, int, int]) -> None:
    B, L, V, budget = sizes
    checker = RoundChecker(torch_library(), RoundCase(B, L, V, budget))
    checker.start(rng, B)
    for _ in range(2):
        logits, target = checker.inputs(rng)
        put = checker.library.put(logits), checker.library.put(target)
        checker.check(logits, target, partial(run_round, checker.round, *put, None))


def run_round(planned: DDTreeRound, logits: Any, target_logits: Any, stream: Any) -> None:
    planned.draft(logits, stream=stream)
    planned.accept(target_logits, stream=stream)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make_library", "capture"),
    [(torch_library, torch_graph), (torch_library, core_graph), (numba_library, core_graph)],
)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_graph_replays_rounds_on_what_is_in_memory(
    rng: np.random.Generator,
    make_library: Callable[[], Library],
    capture: Callable[[Callable[[Any], None]], Replay],
    sampled: bool,
    together: bool,
) -> None:
    library = make_library()
    target_dtype = np.float16 if library.name == "numba" else bfloat16  # which numba has not
    case = make_case(
        rng, paging="block_table", sampled=sampled, B=9, V=200, budget=33, target_dtype=target_dtype
    )
    checker = RoundChecker(library, case)
    planned = checker.round
    buffers = [library.put(array) for array in checker.inputs(rng)]
    if together:
        replays = [capture(lambda stream: run_round(planned, *buffers, stream))]
    else:
        replays = [
            capture(lambda stream: planned.draft(buffers[0], stream=stream)),
            capture(lambda stream: planned.accept(buffers[1], stream=stream)),
        ]
    for count in (9, 1, 5, 0):
        checker.start(rng, count)
        for _ in range(3):
            change_options(rng, checker)
            inputs = checker.inputs(rng)
            spoil(rng, *inputs)
            for buffer, array in zip(buffers, inputs, strict=True):
                checker.write(buffer, array)

            def replay_all() -> None:
                synchronize()
                for replay in replays:
                    replay()

            checker.check(*inputs, replay_all)


def synchronize() -> None:
    from numba_ddtree.cuda_target import cuda

    cuda.synchronize()


def change_options(rng: np.random.Generator, checker: RoundChecker) -> None:
    """Change the options that are arrays, in place, for the references too."""
    case = checker.case
    changed: dict[str, dict[str, NDArray[Any]]] = {
        "draft_topk": {"temperature": rng.uniform(0.5, 2, case.B).astype(np.float32)},
        "accept_tree": {"ignore_eos": rng.random(case.B) < 0.3},
    }
    if "choose_tokens" in case.options:
        changed["choose_tokens"] = {
            "temperature": rng.choice([0, 0.5, 1.5], case.B).astype(np.float32),
            "seed": rng.integers(0, 2**63, case.B),
            "request_ids": rng.integers(0, 9, case.B),
        }
    for stage, options in changed.items():
        for name, array in options.items():
            case.options[stage][name] = array
            checker.write(checker.options[stage][name], array)


@pytest.mark.gpu
def test_rounds_neither_allocate_nor_wait(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    library = torch_library()
    case = make_case(rng, paging="contiguous", sampled=True, B=9, V=200, budget=33)
    checker = RoundChecker(library, case)
    checker.start(rng, 9)
    logits, target = (library.put(array) for array in checker.inputs(rng))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it is a prototype, it says
            torch.cuda.set_sync_debug_mode("error")
        with refusing_allocations():
            run_round(checker.round, logits, target, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_the_workspace_on_a_device_is_what_is_allocated() -> None:
    torch = pytest.importorskip("torch")
    torch_library()
    DDTreeRound.plan(4, 5, 100, 20, library="torch")
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    planned = DDTreeRound.plan(32, 15, 4000, 64, library="torch")
    # torch's own unit of allocation.
    assert torch.cuda.memory_allocated() - before == -(-planned.workspace_bytes // 512) * 512


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_logits_at_odd_addresses(rng: np.random.Generator, offset: int) -> None:
    library = torch_library()
    import torch

    for dtype in (np.float32, bfloat16):
        checker = RoundChecker(library, RoundCase(V=64, draft_dtype=dtype, target_dtype=dtype))
        checker.start(rng, 5)
        inputs = checker.inputs(rng)
        moved = []
        for array in inputs:
            whole = torch.zeros(array.size + 16, dtype=getattr(torch, np.dtype(dtype).name), device="cuda")
            part = whole[offset : offset + array.size].view(array.shape)
            part.copy_(library.put(array))
            moved.append(part)
        checker.check(*inputs, partial(run_round, checker.round, *moved, None))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_rounds_run_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    checker = RoundChecker(torch_library(), RoundCase(V=64))
    checker.start(rng, 5)
    logits, target = checker.inputs(rng)

    def run() -> None:
        with side_stream(form) as (torch, delayed_copy, options):
            on_device = torch.from_numpy(target).cuda()
            checker.round.draft(delayed_copy(torch.from_numpy(logits)), **options)
            checker.round.accept(on_device, **options)
        torch.cuda.synchronize()

    checker.check(logits, target, run)


@pytest.mark.gpu
def test_logits_are_not_kept_alive(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    torch_library()
    planned = DDTreeRound.plan(2, 3, 1000, 4, library="torch")
    before = torch.cuda.memory_allocated()
    planned.draft(torch.zeros(2, 3, 1000, device="cuda"))
    planned.accept(torch.zeros(2, 5, 1000, device="cuda"))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_rounds_of_two_devices(rng: np.random.Generator) -> None:
    from numba_ddtree.cuda_target import cuda

    torch = pytest.importorskip("torch")
    if len(cuda.gpus) < 2:
        pytest.skip("one device only")
    rounds = [DDTreeRound.plan(2, 3, 50, 6, library="torch", device_id=device) for device in (0, 1)]
    logits, target = rng.normal(size=(2, 3, 50)).astype("f4"), rng.normal(size=(2, 7, 50)).astype("f4")
    trees: list[DraftTree] = []
    for device, planned in enumerate(rounds):
        planned.start([1, 2], [3, 4])
        put = [torch.from_numpy(array).to(f"cuda:{device}") for array in (logits, target)]
        run_round(planned, *put, None)
        torch.cuda.synchronize(device)
        trees.append(planned.tree.to_host())
        with pytest.raises(ArgumentError, match=rf"^logits: .* expected arrays on CUDA device {device}"):
            planned.draft(put[0].to(f"cuda:{1 - device}"))
    assert_same_arrays(trees[0].arrays(), trees[1].arrays())


@pytest.mark.gpu
def test_options_are_checked_by_the_plan() -> None:
    library = numba_library()
    wrong = {"choose_tokens": {"temperature": library.put(np.zeros(3, np.float32))}}
    with pytest.raises(ArgumentError, match=r"^temperature: .*B = 2"):
        plan(backend=None, library="numba", options=wrong)
    with pytest.raises(ArgumentError, match=r"^temperature: got an array on the host"):
        plan(backend=None, options={"choose_tokens": {"temperature": np.zeros(2, np.float32)}})
    with pytest.raises(ArgumentError, match=r"^budget: .*B = 2"):
        plan(backend=None, budgets=library.put(np.zeros(3, np.int32)))
    assert plan(backend=None).state.remaining.copy_to_host().tolist() == [0, 0]
