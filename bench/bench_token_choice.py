"""`choose_tokens` over whole vocabularies: the best token, a draw, and draws after top-k and top-p.

Compared with torch's own operations, and with the numpy reference on a few rows of the batch.
"""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

from numba_ddtree.token_choice import choose_tokens

BATCH, NODES, VOCABULARY = 32, 65, 163_840
REFERENCE_BATCH = 1
OPTIONS = {
    "best": {},
    "draw": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}
TORCH = {
    "best": "torch.argmax",
    "draw": "torch softmax, argmax of quotients by exponential noise",
    "top_k": "torch topk, then as draw",
    "top_p": "torch sort and cumsum, then as draw",
}

pytestmark = pytest.mark.parametrize("choice", OPTIONS)


def case_of(choice: str) -> dict[str, int | str]:
    return {"B": BATCH, "N": NODES, "V": VOCABULARY, "choice": choice}


def make_logits(batch: int) -> np.ndarray:
    """Logits of a request as those of a model are spread, a hundred of them far above the rest."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, NODES, VOCABULARY)).astype(np.float32) * 2
    high = rng.integers(0, VOCABULARY, (1, NODES, 100))
    np.put_along_axis(logits, high, rng.uniform(6, 16, high.shape).astype(np.float32), axis=-1)
    return np.tile(logits.astype(bfloat16), (batch, 1, 1))


def positions(batch: int) -> np.ndarray:
    return np.tile(np.arange(NODES, dtype=np.int32), (batch, 1))


@pytest.fixture(autouse=True)
def group(benchmark, choice):
    benchmark.group = f"choose_tokens {choice} B={BATCH} N={NODES} V={VOCABULARY} bfloat16"


def logits_on_device(torch):
    """Return `make_logits` as torch's, since Numba's arrays cannot hold bfloat16."""
    bits = torch.from_numpy(make_logits(1).view(np.int16)).cuda()
    return bits.view(torch.bfloat16).repeat(BATCH, 1, 1)


def bench_kernel(kernel_bench, torch, choice):
    logits, places = logits_on_device(torch), torch.from_numpy(positions(BATCH)).cuda()
    out = choose_tokens(logits)
    kernel_bench(
        "choose_tokens",
        case_of(choice),
        "choose_tokens",
        lambda stream: choose_tokens(logits, positions=places, out=out, stream=stream, **OPTIONS[choice]),
        bytes=BATCH * NODES * VOCABULARY * 2,
    )


def bench_reference(peer_bench, choice):
    logits, places = make_logits(REFERENCE_BATCH), positions(REFERENCE_BATCH)

    def call() -> None:
        choose_tokens(logits, positions=places, backend="numpy", **OPTIONS[choice])

    peer_bench("choose_tokens", case_of(choice), f"numpy reference, B={REFERENCE_BATCH}", call, rounds=1)


def bench_torch(torch_bench, torch, choice):
    logits = logits_on_device(torch)
    options = OPTIONS[choice]

    def call() -> None:
        if choice == "best":
            logits.argmax(-1)
        else:
            scaled = logits.float() / options["temperature"]
            if "top_k" in options:
                lowest = scaled.topk(options["top_k"]).values[..., -1:]
                scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
            if "top_p" in options:
                values, order = scaled.sort(descending=True)
                masses = values.softmax(-1)
                is_out = masses.cumsum(-1) - masses >= options["top_p"]
                scaled = torch.empty_like(scaled).scatter_(-1, order, values.masked_fill(is_out, -torch.inf))
            scaled.softmax(-1).div_(torch.empty_like(scaled).exponential_()).argmax(-1)

    torch_bench("choose_tokens", case_of(choice), TORCH[choice], call)
