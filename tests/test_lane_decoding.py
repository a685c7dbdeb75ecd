"""Decoding on lanes: each text is what one lane writes, whichever lane it is on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from numba_ddtree import ArgumentError, DeviceGroup, run
from numba_ddtree.bundle import read_bundle
from numba_ddtree.demo.array_module import array_module
from numba_ddtree.demo.comparison import first_difference
from numba_ddtree.demo.decoders import (
    PLAIN,
    Decoded,
    Decoder,
    DecodeSettings,
    chain_decoder,
    decode,
    tree_decoder,
)
from numba_ddtree.demo.lane_decoding import LaneDecoding, LaneTimes, load_models
from numba_ddtree.demo.model import DemoModel, load_model
from numba_ddtree.demo.text import shipped_prompts

TIE = 1e-4
"""A margin below which float32's rounding may break a tie the other way."""

DECODERS = (PLAIN, chain_decoder(15), tree_decoder(16))
SHORT = ("--prompts", "3", "--budget", "4", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return load_model(array_module("numpy"))


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths, one of them the start token alone."""
    lengths = [1, *np.linspace(2, 96, count - 1).astype(int)]
    return [prompt.tokens[:length] for prompt, length in zip(shipped_prompts(count), lengths, strict=True)]


def decode_on(
    models: list[DemoModel],
    devices: DeviceGroup,
    decoder: Decoder,
    texts: list[list[int]],
    settings: DecodeSettings,
) -> tuple[Decoded, list[int]]:
    """Decode to the end; also return how often each prompt took part."""
    decoding = LaneDecoding.begin(models, devices, decoder, texts, settings)
    rounds = [0] * len(texts)
    while not decoding.is_done:
        this_round = decoding.run_round()
        for request in this_round.requests[np.flatnonzero(this_round.emitted)].tolist():
            rounds[request] += 1
    return decoding.decoded, rounds


def check(one: Decoded, many: Decoded, rounds: list[int]) -> None:
    assert many.is_finished
    assert many.finish_reasons == one.finish_reasons
    assert rounds == list(map(len, many.accept_lengths))
    for prompt in range(len(one.tokens)):
        difference = first_difference(one, many, prompt)
        assert difference is None or (difference.margin or 1) < TIE, difference


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lanes_write_what_one_writes(model: DemoModel, lanes: int, temperature: float) -> None:
    settings, texts = DecodeSettings(max_new_tokens=10, temperature=temperature, seed=5), prompts(5)
    with DeviceGroup([None] * lanes) as devices:
        models = load_models(model, devices)
        assert all(each is model for each in models)
        plain = decode(model, PLAIN, texts, settings)
        for decoder in DECODERS:
            check(plain, *decode_on(models, devices, decoder, texts, settings))


def test_lanes_without_a_prompt_do_nothing(model: DemoModel) -> None:
    settings, texts = DecodeSettings(max_new_tokens=4), prompts(2)
    with DeviceGroup([None] * 4) as devices:
        decoded, rounds = decode_on([model] * 4, devices, PLAIN, texts, settings)
    check(decode(model, PLAIN, texts, settings), decoded, rounds)
    assert isinstance(decoded.times, LaneTimes)
    assert len(decoded.times.lanes) == 2


def test_prompts_are_split_by_length(model: DemoModel) -> None:
    settings, texts = DecodeSettings(max_new_tokens=4), [[256] * length for length in (9, 50, 8, 7)]
    with DeviceGroup([None] * 2) as devices:
        decoded, _ = decode_on([model] * 2, devices, PLAIN, texts, settings)
    times = decoded.times
    assert isinstance(times, LaneTimes)
    assert [lane.requests.tolist() for lane in times.lanes] == [[1, 3], [0, 2]]
    assert [lane.rounds for lane in times.lanes] == [4, 4]
    for lane in times.lanes:
        assert set(lane.seconds) == {"prompt", "draft", "build", "verify", "accept"}
    assert times.seconds["verify"] == pytest.approx(sum(lane.seconds["verify"] for lane in times.lanes))
    assert 0 < times.decoding == times.wall


def test_bad_prompts_are_named_as_all_are(model: DemoModel) -> None:
    with DeviceGroup([None] * 2) as devices:
        with pytest.raises(ArgumentError, match=r"^prompts\[2\]: "):
            LaneDecoding.begin([model] * 2, devices, PLAIN, [[1], [2], []], DecodeSettings(4))
        with pytest.raises(
            ArgumentError, match=r"^models: got 1; expected a list or tuple with one for each"
        ):
            LaneDecoding.begin([model], devices, PLAIN, [[1]], DecodeSettings(4))


def decode_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run.main(["decode", "--json", *SHORT, *arguments]) == 0
    decoded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return decoded


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    path = tmp_path / "trace.kdtr"
    one = decode_json(capsys, "--backend", "numpy")
    two = decode_json(capsys, "--backend", "numpy", "--devices", "0,0", "--trace", str(path))
    for prompt, other in zip(one["prompts"], two["prompts"], strict=True):
        assert [entry["tokens"] for entry in prompt["decoders"]] == [e["tokens"] for e in other["decoders"]]
    for decoder in two["decoders"]:
        assert [lane["name"] for lane in decoder["lanes"]] == ["lane 0 (host)", "lane 1 (host)"]
        assert sorted(place for lane in decoder["lanes"] for place in lane["prompts"]) == [0, 1, 2]
    assert "lanes" not in one["decoders"][0]
    tensors = read_bundle(path).tensors
    passes = np.bincount(tensors["trace/decoder"])
    assert passes.tolist() == [decoder["target_passes"] for decoder in two["decoders"][1:]]
    assert set(tensors["trace/prompt"].tolist()) == {0, 1, 2}
    assert run.main(["round", str(path), "--backend", "numpy"]) == 0


def test_the_table_has_each_lane(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["decode", "--backend", "numpy", "--devices", "0,0,0", *SHORT]) == 0
    out = capsys.readouterr().out
    for lane in range(3):
        assert f"plain, lane {lane} (host)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "numpy", "--devices", "0,1"], "no CUDA device 1: the numpy backend uses none"),
        (["--devices", "0,x"], "--devices"),
        (["--devices", "-1"], "--devices"),
        (["--devices", "0", "--device", "1"], "--device and --devices are two answers to one question"),
        (["--devices", "0", "check"], "--devices is an option of decode, not of check"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run.main(arguments)
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [(0, 0), (0, 1)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lanes_of_devices_write_what_one_writes(devices: tuple[int, ...], temperature: float) -> None:
    pytest.importorskip("cupy")
    from numba_ddtree.cuda_target import cuda

    if max(devices) >= len(cuda.gpus):
        pytest.skip("one device only")
    model = load_model(array_module("cuda", devices[0]))
    settings, texts = DecodeSettings(max_new_tokens=24, temperature=temperature, seed=5), prompts(5)
    plain = decode(model, PLAIN, texts, settings)
    with DeviceGroup(devices) as group:
        for decoder in DECODERS:
            decoded, rounds = decode_on(load_models(model, group), group, decoder, texts, settings)
            check(plain, decoded, rounds)
            assert decoded.tokens == decode(model, decoder, texts, settings).tokens
            assert isinstance(decoded.times, LaneTimes)
            assert all(lane.seconds["verify"] > 0 for lane in decoded.times.lanes)
