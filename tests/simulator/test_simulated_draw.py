"""Drawings of trees on the device, which is the simulator's here."""

from __future__ import annotations

import numpy as np
from kernel_checks import numba_library

import numba_ddtree
from inputs import link, make_parent_batch, make_target_tokens
from numba_ddtree import AcceptResult
from numba_ddtree.draw import draw_tree


def test_a_device_tree_is_drawn_as_a_host_tree(rng: np.random.Generator) -> None:
    library = numba_library()
    tree = link(make_parent_batch(rng, 3, 20), rng.integers(0, 3, (3, 20)).astype(np.int32))
    result = numba_ddtree.accept_tree(tree, make_target_tokens(rng, tree, 1.0), backend="numpy")
    on_device = AcceptResult(**library.put_all(**result.arrays()))
    for request in range(3):
        want = draw_tree(tree, request=request, accepted=result)
        assert draw_tree(library.put_tree(tree), request=request, accepted=on_device) == want
