"""Rounds over lanes against rounds of one lane, on the host, in the simulator and on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_checks import Library, assert_same_arrays, await_copies
from numpy.typing import NDArray

from numba_ddtree import DDTreeRound, DeviceGroup, KVCaches, RoundLanes
from numba_ddtree.round import DDTreeRound as Round

LAYERS, ROWS, WIDTH = 2, 96, 8


class LaneChecker:
    """A batch on several lanes beside the same batch on one, each with caches of its own.

    Parameters
    ----------
    library : Library
        Whose arrays both have.
    devices : DeviceGroup
    sizes : tuple of int
        B, L, V and the budget.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        library: Library,
        devices: DeviceGroup,
        sizes: tuple[int, int, int, int],
        places: Sequence[int] | None = None,
    ) -> None:
        B, _, V, budget = sizes
        self.library, self.devices, self.sizes = library, devices, sizes
        options: dict[str, dict[str, Any]] = {
            "draft_topk": {"temperature": rng.uniform(0.5, 2, B).astype(np.float32)},
            "build_tree": {"chain_seed": True},
            "choose_tokens": {
                "temperature": rng.choice([0, 0.7, 1.5], B).astype(np.float32),
                "seed": rng.integers(0, 2**63, B),
            },
            "accept_tree": {"stop_token_ids": rng.integers(-1, V, (B, 2)).astype(np.int32)},
        }
        budgets = rng.integers(0, budget + 1, B).astype(np.int32)
        where: dict[str, Any] = {"backend": "numpy"}
        if not library.on_host:
            where = {"library": library.name, "device_id": devices.home.device_id}
        with devices.home:
            self.one_cache = library.put(np.zeros((LAYERS, B, ROWS, WIDTH), np.float32))
            self.one = DDTreeRound.plan(
                *sizes,
                budgets=library.put(budgets),
                caches=KVCaches.plan(self.one_cache),
                options={
                    stage: {k: library.put(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
                    for stage, given in options.items()
                },
                **where,
            )
        sizes_of = places or [-(-B // len(devices))] * len(devices)
        self.caches = [self._put(i, np.zeros((LAYERS, n, ROWS, WIDTH), "f4")) for i, n in enumerate(sizes_of)]
        self.many = RoundLanes.plan(
            devices,
            *sizes,
            budgets=budgets,
            caches=[KVCaches.plan(cache) for cache in self.caches],
            options=options,
            places=places,
            library=None if library.on_host else library.name,
        )
        self.targets: list[Any] = []
        self.drafts: list[Any] = []

    def _put(self, lane: int, array: NDArray[Any]) -> Any:
        with self.devices.lanes[lane]:
            return self.library.put(array)

    def start(self, rng: np.random.Generator, requests: Sequence[int] | None, count: int) -> None:
        """Begin requests on both."""
        V = self.sizes[2]
        given = {
            "root_tokens": rng.integers(0, V, count).astype(np.int32),
            "prefix_lengths": rng.integers(0, ROWS // 2, count).astype(np.int32),
            "remaining": rng.choice([0, 1, 5, 30], count, p=[0.1, 0.1, 0.2, 0.6]).astype(np.int32),
        }
        if requests is not None:
            given["requests"] = np.array(requests, np.int32)
        self.one.start(**given)
        self.many.start(**given)
        self.fill_caches(rng)

    def fill_caches(self, rng: np.random.Generator) -> None:
        """Give each request the same rows on both."""
        self.devices.synchronize()
        content = rng.normal(size=(LAYERS, self.sizes[0], ROWS, WIDTH)).astype(np.float32)
        self.write(self.one_cache, content)
        for lane, cache in enumerate(self.caches):
            with self.devices.lanes[lane]:
                self.write(cache, self.spread(content.swapaxes(0, 1), lane).swapaxes(0, 1))

    def write(self, array: Any, content: NDArray[Any]) -> None:
        """Replace an array's content, in place."""
        content = np.ascontiguousarray(content)
        if self.library.name == "numba":
            array.copy_to_device(content)
            await_copies()
        elif self.library.name == "torch":
            import torch

            array.copy_(torch.from_numpy(content))
            torch.cuda.synchronize(array.device)
        else:
            array[...] = content

    def spread(self, rows: NDArray[Any], lane: int) -> NDArray[Any]:
        """Return requests' rows by a lane's places; what is no one's is NaN."""
        of_lane = np.full((len(self.many._places.owners[lane]), *rows.shape[1:]), np.nan, rows.dtype)
        here = np.flatnonzero(self.many.lane_of == lane)
        of_lane[self.many.place_of[here]] = rows[here]
        return of_lane

    def logits(self, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw logits of the drafter and the target; the latter often agrees."""
        B, L, V, budget = self.sizes
        draft = rng.normal(size=(B, L, V)).astype(np.float32) * 2
        target = rng.normal(size=(B, budget + 1, V)).astype(np.float32)
        favourite = draft.argmax(-1)  # [B, L]
        for slot in range(budget + 1):
            rows = rng.random(B) < 0.8
            target[rows, slot, favourite[rows, slot % L]] += 9
        return draft, target

    def run_one(self, draft: NDArray[Any], target: NDArray[Any]) -> None:
        """Run a round of the batch on one lane."""
        with self.devices.home:
            self.one.draft(self.library.put(draft))
            self.one.accept(self.library.put(target))

    def run_many(self, draft: NDArray[Any], target: NDArray[Any], *, captured: bool) -> None:
        """Run the same on all lanes."""
        lanes = range(len(self.devices))
        drafts, targets = ([self.spread(rows, lane) for lane in lanes] for rows in (draft, target))
        if not captured:
            self.many.draft([self._put(i, rows) for i, rows in enumerate(drafts)])
            self.many.accept([self._put(i, rows) for i, rows in enumerate(targets)])
        elif not self.drafts:
            self.drafts = [self._put(i, rows) for i, rows in enumerate(drafts)]
            self.targets = [self._put(i, rows) for i, rows in enumerate(targets)]
            self.many.capture(self.drafts, self.targets)
            self.many.run()
        else:
            self.devices.synchronize()
            for i, (buffer, rows) in enumerate(
                zip(self.drafts + self.targets, drafts + targets, strict=True)
            ):
                with self.devices.lanes[i % len(self.devices)]:
                    self.write(buffer, rows)
            self.many.run()

    def check(self) -> None:
        """Compare trees, results, states and caches, to the bit."""
        gathered = self.many.gather()
        self.devices.synchronize()
        get = self.library.get
        assert_same_arrays(
            {name: get(array) for name, array in gathered.arrays().items()},
            {name: get(array) for name, array in self.one.result.arrays().items()},
        )
        lanes, places = self.many.lane_of, self.many.place_of
        takes_part = get(self.one.tree.num_nodes) > 0
        for arrays, want in (
            ([planned.tree.arrays() for planned in self.many.rounds], self.one.tree.arrays()),
            ([planned.state.arrays() for planned in self.many.rounds], self.one.state.arrays()),
            ([candidates_of(planned) for planned in self.many.rounds], candidates_of(self.one)),
        ):
            for name in want:
                of_lanes = [get(of_lane[name]) for of_lane in arrays]
                for request in np.flatnonzero(takes_part):
                    got = of_lanes[lanes[request]][places[request]]
                    np.testing.assert_array_equal(got, get(want[name])[request], err_msg=name)
        caches = [get(cache) for cache in self.caches]
        for request, rows in enumerate(np.moveaxis(get(self.one_cache), 1, 0)):
            np.testing.assert_array_equal(caches[lanes[request]][:, places[request]], rows)


def candidates_of(planned: Round) -> dict[str, Any]:
    return planned.candidates._asdict()


def check_lanes(
    rng: np.random.Generator,
    library: Library,
    devices: DeviceGroup,
    sizes: tuple[int, int, int, int],
    *,
    captured: bool,
    places: Sequence[int] | None = None,
    rounds: int = 3,
    starts: int = 6,
) -> None:
    """Run batches whose requests come and go."""
    checker = LaneChecker(rng, library, devices, sizes, places)
    B = sizes[0]
    begins: list[tuple[list[int] | None, int]] = [(None, B), ([B - 1, 0], 2), (None, max(B - 2, 1))]
    begins += [([0], 1), ([], 0), (None, 0)]
    for requests, count in begins[:starts]:
        checker.start(rng, requests, count)
        for _ in range(rounds):
            logits = checker.logits(rng)
            checker.run_one(*logits)
            checker.run_many(*logits, captured=captured)
            checker.check()
