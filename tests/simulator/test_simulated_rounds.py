"""A few requests of real decoding rounds, in Numba's simulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numba_ddtree.cases import DraftInputs, RoundInputs
from numba_ddtree.cuda_target import SIMULATED
from numba_ddtree.round_bundle import read_round
from numba_ddtree.stages import Stages

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the simulator is off")
ROUNDS = Path(__file__).parents[1] / "data" / "demo_rounds.kdtr"


def test_real_rounds(rng: np.random.Generator) -> None:
    bundle = read_round(ROUNDS)
    chosen = rng.choice(len(bundle.inputs.target_tokens), 4, replace=False)
    draft = bundle.inputs.draft
    names = ("draft_log_probs", "draft_token_ids", "budgets", "root_tokens", "prefix_lengths")
    rows = {name: getattr(draft, name)[chosen] for name in names}
    endings = {"remaining": bundle.inputs.endings["remaining"][chosen]}
    inputs = RoundInputs(
        DraftInputs(**rows, max_budget=draft.max_budget), bundle.inputs.target_tokens[chosen], None, endings
    )
    stages = Stages("simulator")
    tree = stages.build_tree(inputs.draft).arrays
    walk = stages.accept_tree(tree, inputs.target_tokens, inputs.draft.max_depth, endings).arrays
    for name, array in (bundle.expected["build_tree"] | bundle.expected["accept_tree"]).items():
        np.testing.assert_array_equal((tree | walk)[name], array[chosen], err_msg=name)
