"""A round of speculative decoding without the model: planned once, then nothing but launches.

Everything that a round needs is allocated by `DDTreeRound.plan`, and every launch is prepared there. What
changes from round to round is in memory: logits, lengths, which requests take part, and whatever options
are arrays. `DDTreeRound.draft` and `DDTreeRound.accept` can therefore be captured in CUDA graphs and
replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from numba_ddtree.arrays import (
    DeviceView,
    Placement,
    StreamLike,
    c_strides,
    check_array,
    device_view,
    gather,
)
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import device_context, stream_handle
from numba_ddtree.draft_candidates import DraftCandidates, draft_topk
from numba_ddtree.errors import ArgumentError
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.kv_compact import compact_kv
from numba_ddtree.launch import AnyLaunch, LaunchSequence
from numba_ddtree.refs.round_state import is_active
from numba_ddtree.round_plan import RoundPlan
from numba_ddtree.round_state import RoundState, advance, pass_by, start_requests
from numba_ddtree.token_choice import choose_tokens
from numba_ddtree.tree import AcceptResult, Array, DraftTree
from numba_ddtree.tree_accept import accept_tree
from numba_ddtree.tree_build import build_tree
from numba_ddtree.workspace import allocate, workspace_bytes

if TYPE_CHECKING:
    from numba_ddtree.device_group import DeviceGroup
    from numba_ddtree.round_lanes import RoundLanes

WIDEST_LOAD = 16  # bytes; how logits are loaded depends on their address modulo this


class DDTreeRound:
    """One round of a batch, all in planned memory; `plan` makes one.

    A round is: the drafter writes its logits; `draft` makes trees of them; the target model scores the
    trees' nodes; `accept` walks down the trees, compacts the caches and moves each request on. Both
    methods launch kernels and do nothing else: they neither allocate nor synchronise, all shapes are
    fixed, and lengths are the device's. They can be captured in CUDA graphs, together or with the models,
    and each replay is a round on what is then in memory.

    ====================================================  ==========================  ===================
    arrays                                                written by                  read by
    ====================================================  ==========================  ===================
    `state`: int32 [B]                                    `start`, `accept`           `draft`, `accept`
    `candidates`: float32 and int32 [B, L, k]             `draft`                     `draft`
    `tree`: int32 [B, N] and [B], uint32 [B, N, words]    `draft`                     target, `accept`
    `target_tokens`: int32 [B, N]                         `accept`                    `accept`
    `result`: int32 [B, L + 1] and [B]                    `accept`                    the caller
    caches                                                target, `accept`            target
    ====================================================  ==========================  ===================

    N is ``budget + 1``. `RoundState`, `DraftCandidates`, `DraftTree` and `AcceptResult` describe each array.
    All but the caches are parts of one allocation; the caller may write to `state` between rounds.

    A request that takes no part, since it is finished or its place in the batch is empty, has a tree of no
    nodes and the status ``FINISHED``, and a result of length 0; its caches and its state are not touched.
    Its logits may be anything; its candidates have no meaning.

    Attributes
    ----------
    planned : RoundPlan
    state : RoundState
    candidates : DraftCandidates
    tree : DraftTree
    target_tokens : int32 [B, N]
    result : AcceptResult
    """

    def __init__(self, planned: RoundPlan | None = None) -> None:
        if not isinstance(planned, RoundPlan):
            raise ArgumentError("planned", planned, "a plan: DDTreeRound.plan(...) makes a round")
        self.planned = planned
        self._memory, arrays = allocate(planned.fields(), planned.placement)
        self.state = RoundState(**arrays["state"])
        self.candidates = DraftCandidates(**arrays["candidates"])
        self.tree = DraftTree(**arrays["tree"], max_depth=planned.draft_length)
        self.target_tokens = arrays["target"]["tokens"]
        self.result = AcceptResult(**arrays["result"])
        self._workspace = arrays.get("draft_topk", {})
        self._draft = _Stage("logits", planned, self._launch_draft)
        self._accept = _Stage("target_logits", planned, self._launch_accept)
        with device_context(planned.placement.device_id):
            none = np.zeros(0, np.int32)
            self.start(none, none)
            pass_by(self.state, self.tree, planned.placement, None)
            if not planned.placement.on_host:
                cuda.synchronize()  # later calls may be on other streams
                self._draft.prepare(self._memory)
                self._accept.prepare(self._memory)

    @classmethod
    def plan(
        cls,
        max_batch: int,
        draft_length: int,
        vocabulary: int,
        budget: int,
        *,
        k: int | None = None,
        draft_dtype: DTypeLike = np.float32,
        target_dtype: DTypeLike = np.float32,
        budgets: Array | None = None,
        caches: KVCaches | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        library: str | None = None,
        device_id: int | None = None,
        backend: str | None = None,
    ) -> DDTreeRound:
        """Allocate all that rounds need, compile their kernels and prepare their launches; synchronises.

        No request takes part before `start`.

        Parameters
        ----------
        max_batch : int
            B, the requests of every round. Empty places take no part, but their draft logits are read.
        draft_length : int
            L, at most 64.
        vocabulary : int
            V, at most 262144.
        budget : int
            Nodes of a tree beside its root, at most 1024.
        k : int, optional
            Candidates a position, at most 1024 and V; by default as many as the budget can use.
        draft_dtype, target_dtype : float32, float16 or bfloat16
            Of the logits; torch's dtypes will do.
        budgets : int32 [B], optional
            Each request's own budget, read at every round; `budget` for all by default.
        caches : KVCaches, optional
            The target's caches, from `KVCaches.plan`, which `accept` compacts.
        options : dict of dicts, optional
            Further arguments of the stages, by function and parameter, such as
            ``{"build_tree": {"chain_seed": True}, "choose_tokens": {"temperature": temperatures}}``.
            The functions are `draft_topk`, `build_tree`, `choose_tokens`, `accept_tree` and `compact_kv`.
            Numbers are fixed by the plan. Arrays are kept and read at every round, so that a caller changes
            them in place: temperatures, seeds, request ids, masks, stop tokens, page tables.
            ``pieces_per_row`` of `draft_topk` is by default `best_pieces_per_row` of the plan's sizes, so
            that a request's bits depend on B, not on its place; None has rows cut as is quickest.
        library : {"torch", "cupy", "numba"}, optional
            Whose arrays the round's are; by default those of the caches, or numba's.
        device_id : int, optional
            By default the caches' device, or the current one.
        backend : {None, "cuda", "numpy"}
            ``"numpy"`` plans host arrays and runs the references, which check values and options at each
            round.

        Returns
        -------
        DDTreeRound

        Raises
        ------
        ArgumentError
            A number out of range, an option that no stage takes, or one that its stage refuses.
        BackendError
            No device for the CUDA backend.
        """
        return cls(
            RoundPlan.checked(
                max_batch,
                draft_length,
                vocabulary,
                budget,
                k=k,
                draft_dtype=draft_dtype,
                target_dtype=target_dtype,
                budgets=budgets,
                caches=caches,
                options=options or {},
                library=library,
                device_id=device_id,
                backend=backend,
            )
        )

    @classmethod
    def plan_lanes(cls, devices: DeviceGroup, *sizes: int, **options: Any) -> RoundLanes:
        """Plan the rounds of one batch over several lanes: `RoundLanes.plan`, with its arguments."""
        from numba_ddtree.round_lanes import RoundLanes

        return RoundLanes.plan(devices, *sizes, **options)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the plan allocated, in one piece."""
        return workspace_bytes(self.planned.fields())

    def start(
        self,
        root_tokens: Array,
        prefix_lengths: Array,
        *,
        remaining: Array | None = None,
        requests: Array | None = None,
        stream: StreamLike = None,
    ) -> None:
        """Put requests into the batch.

        Parameters
        ----------
        root_tokens : int32 [n]
            The last token of each, of which the cache holds no row; n is at most B.
        prefix_lengths : int32 [n]
            Rows in the cache before it.
        remaining : int32 [n], optional
            Tokens that each may emit; without a limit by default.
        requests : int32 [n], optional
            Their places in the batch, 0 to B - 1; the others stay as they are, and the last of several for
            one place counts. By default the first n places, and no other takes part any more.
        stream
            Stream to launch on; by default the current one of the arrays' library.

        Raises
        ------
        ArgumentError
            Wrong shape, dtype or device of an array; for host arrays also values out of range. On a device
            a place that is none is left out.

        Notes
        -----
        Host arrays are copied to the device. For device arrays nothing is copied, and nothing synchronises.
        """
        start_requests(
            self.state,
            self.planned.placement,
            root_tokens,
            prefix_lengths,
            remaining=remaining,
            requests=requests,
            stream=stream,
        )

    def draft(self, logits: Array, *, stream: StreamLike = None) -> DraftTree:
        """Make a round's trees.

        Parameters
        ----------
        logits : [B, L, V] of the planned dtype
            The drafter's.
        stream
            Stream to launch on; by default the current one of the logits' library.

        Returns
        -------
        DraftTree
            `tree`, whose arrays the next round writes again. Deterministic, as the stages are.

        Raises
        ------
        ArgumentError
            Logits of another shape, dtype, device or layout than planned; with the numpy backend also what
            the stages find wrong in values.

        Notes
        -----
        Neither allocates nor synchronises on a device.
        """
        placement, view = self._draft.checked(logits)
        if placement.on_host:
            # The logits of requests that take no part may be anything, which the reference refuses.
            active = is_active(self.state.on_host())[:, None, None]
            view = np.where(active, view, view.dtype.type(0))
        self._draft.run(view, placement, stream)
        return self.tree

    def accept(self, target_logits: Array, *, stream: StreamLike = None) -> AcceptResult:
        """Walk down the trees of the last `draft`, compact the caches, and move each request on.

        Once a round: afterwards `state` is that of the next.

        Parameters
        ----------
        target_logits : [B, N, V] of the planned dtype
            The target's, after each node.
        stream
            Stream to launch on; by default the current one of the logits' library.

        Returns
        -------
        AcceptResult
            `result`, whose arrays the next round writes again.

        Raises
        ------
        ArgumentError
            As for `draft`.

        Notes
        -----
        Neither allocates nor synchronises on a device.
        """
        placement, view = self._accept.checked(target_logits)
        self._accept.run(view, placement, stream)
        return self.result

    def _launch_draft(self, logits: Any, **where: Any) -> None:
        plan, state = self.planned, self.state
        draft_topk(
            logits, plan.k, out=self.candidates, **self._workspace, **plan.options["draft_topk"], **where
        )
        build_tree(
            self.candidates.log_probs,
            self.candidates.token_ids,
            plan.budget if plan.budgets is None else plan.budgets,
            max_budget=plan.budget,
            root_tokens=state.root_tokens,
            prefix_lengths=state.prefix_lengths,
            out=self.tree,
            **plan.options["build_tree"],
            **where,
        )
        pass_by(state, self.tree, plan.placement, where.get("stream"))

    def _launch_accept(self, target_logits: Any, **where: Any) -> None:
        plan, state, result = self.planned, self.state, self.result
        choose_tokens(
            target_logits,
            positions=self.tree.positions,
            num_nodes=self.tree.num_nodes,
            out=self.target_tokens,
            **plan.options["choose_tokens"],
            **where,
        )
        accept_tree(
            self.tree,
            self.target_tokens,
            remaining=state.remaining,
            finished=state.finish_reason,
            out=result,
            **plan.options["accept_tree"],
            **where,
        )
        if plan.caches is not None:
            compact_kv(
                plan.caches,
                state.prefix_lengths,
                result.accepted_indices,
                result.accept_length,
                **plan.options["compact_kv"],
                **where,
            )
        advance(state, result, plan.placement, where.get("stream"))


class _Stage:
    """`draft` or `accept`: its launches, prepared once for each alignment of the logits."""

    def __init__(self, name: str, planned: RoundPlan, call: Callable[..., None]) -> None:
        self._name, self._placement, self._call = name, planned.placement, call
        is_draft = name == "logits"
        rows = {"L": planned.draft_length} if is_draft else {"N": planned.budget + 1}
        self._dims = {"B": planned.max_batch, **rows, "V": planned.vocabulary}
        self._dtype = planned.draft_dtype if is_draft else planned.target_dtype
        # By alignment: the launches, and where the logits are among their arguments.
        self._prepared: dict[int, tuple[LaunchSequence, list[tuple[AnyLaunch, int]]]] = {}

    def prepare(self, memory: Array) -> None:
        """Check options, compile, and prepare the launches; `memory` stands in for logits."""
        if SIMULATED:
            return
        view = device_view("memory", memory)
        shape = tuple(self._dims.values())
        strides = c_strides(shape, self._dtype.itemsize)
        self._sequence(DeviceView(view.pointer, shape, strides, self._dtype, view.device_id, None))

    def checked(self, logits: Array) -> tuple[Placement, Any]:
        """Return a view of a caller's logits, which have to be as planned, and where they live."""
        placement, views = gather(**{self._name: logits})
        if placement.device_id != self._placement.device_id:
            raise ArgumentError(self._name, placement, f"{self._placement}, as planned")
        check_array(self._name, views[self._name], (self._dtype.type,), **self._dims)
        return placement, views[self._name]

    def run(self, view: Any, placement: Placement, stream: StreamLike) -> None:
        """Run on checked logits."""
        if placement.on_host:
            self._call(view, stream=stream, backend="numpy")
        else:
            self._sequence(view).launch(stream_handle(stream, placement))

    def _sequence(self, view: Any) -> LaunchSequence:
        """Return the launches, for these logits, which they do not keep alive."""
        view = view if SIMULATED else replace(view, owner=None)
        alignment = 0 if SIMULATED else view.pointer % WIDEST_LOAD
        if alignment not in self._prepared:
            sequence = LaunchSequence()
            self._call(view, stream=sequence)
            self._prepared[alignment] = sequence, sequence.places_of(view)
        sequence, places = self._prepared[alignment]
        for launch, place in places:
            launch.replace(place, view)
        return sequence
