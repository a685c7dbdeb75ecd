"""`decode` on the command line: texts, tables, JSON, traces, figures, and wrong use."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from numba_ddtree import ArgumentError, run
from numba_ddtree.bundle import read_bundle
from numba_ddtree.command import EXIT_CLOSED_PIPE
from numba_ddtree.demo.array_module import array_module
from numba_ddtree.demo.command import mean_repetition
from numba_ddtree.demo.decoders import PLAIN, Decoded, Decoding, Round
from numba_ddtree.demo.latent_attention import DTYPES
from numba_ddtree.demo.stage_times import STAGES, StageTimes
from numba_ddtree.demo.text import readable, shipped_prompts, token_bytes
from numba_ddtree.environment import find_devices
from numba_ddtree.round_bundle import read_round, reference_results
from numba_ddtree.status import FinishReason
from numba_ddtree.tree import AcceptResult

HAS_DEVICE = bool(find_devices()[0])
PROMPT = "def main():\n    "
with_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="there is no matplotlib")


def decode(*arguments: str) -> int:
    try:
        return run.main(["decode", "--backend", "numpy", *arguments])
    except SystemExit as caught:
        return int(str(caught.code))


def decode_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert decode("--json", *arguments) == 0
    decoded = json.loads(capsys.readouterr().out)
    assert isinstance(decoded, dict)
    return decoded


def test_texts_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode("--prompt", PROMPT, "--budget", "4,16", "--max-new-tokens", "24") == 0
    output = capsys.readouterr().out
    assert PROMPT in output
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines()}
    assert {"plain", "chain", "tree 4", "tree 16"} <= set(rows)
    assert "target passes" in output
    for stage in ("draft", "build", "verify", "accept"):
        assert stage in output
        assert f"{stage}: {STAGES[stage]}" in output
    assert output.count(" yes") == 4


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    decoded = decode_json(capsys, "--prompts", "2", "--budget", "16", "--max-new-tokens", "20", "--seed", "4")
    assert [decoder["name"] for decoder in decoded["decoders"]] == ["plain", "chain", "tree 16"]
    assert [decoder["tokens"] for decoder in decoded["decoders"]] == [40] * 3
    assert decoded["decoders"][0]["target_passes"] == 40
    for decoder in decoded["decoders"]:
        seconds = dict(decoder["seconds"])
        del seconds["prompt"]
        assert decoder["tokens_per_second"] == pytest.approx(40 / sum(seconds.values()))
    assert set(seconds) == {"draft", "build", "verify", "accept"}
    for prompt, shipped in zip(decoded["prompts"], shipped_prompts(2), strict=True):
        assert prompt["prompt"] == shipped.text.decode()
        texts = [entry["tokens"] for entry in prompt["decoders"]]
        assert texts[0] == texts[1] == texts[2]
        assert [entry["identical"] for entry in prompt["decoders"]] == [True] * 3
        assert bytes(texts[0]).decode(errors="backslashreplace") == prompt["decoders"][0]["text"]
        assert all(sum(entry["accept_lengths"]) == 20 for entry in prompt["decoders"])


def test_bfloat16_reaches_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--prompts", "2", "--budget", "16", "--max-new-tokens", "20")
    rounded = decode_json(capsys, *arguments, "--dtype", "bfloat16")
    plain = decode_json(capsys, *arguments)
    assert (rounded["dtype"], plain["dtype"]) == ("bfloat16", "float32")
    for prompt in rounded["prompts"]:
        assert [entry["identical"] for entry in prompt["decoders"]] == [True] * 3
    assert DTYPES == run.DTYPES


def test_repetition_is_a_mean_over_the_texts() -> None:
    texts = [[7] * 33, list(range(40))]
    times = StageTimes(array_module("numpy"))
    decoded = Decoded(PLAIN, texts, [[], []], [[], []], [FinishReason.LENGTH] * 2, times)
    assert mean_repetition(decoded) == 0.25


def test_prompts_come_from_options_files_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt.py"
    path.write_bytes(b"import \xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"class A")))
    arguments = ("--prompt", "def ", "--prompt-file", str(path), "--prompt-file", "-", "--budget", "2")
    decoded = decode_json(capsys, *arguments, "--max-new-tokens", "4")
    assert [prompt["prompt"] for prompt in decoded["prompts"]] == ["def ", "import \\xff", "class A"]
    assert [prompt["name"] for prompt in decoded["prompts"]] == ["--prompt", str(path), "standard input"]


def test_a_trace_is_a_round_that_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "rounds.kdtr")
    decoded = decode_json(
        capsys, "--prompts", "4", "--budget", "4,32", "--max-new-tokens", "19", "--trace", path
    )
    tensors = read_bundle(path).tensors
    drafted = decoded["decoders"][1:]
    passes = np.bincount(tensors["trace/decoder"])
    assert passes.tolist() == [decoder["target_passes"] for decoder in drafted]
    assert read_bundle(path).metadata["decoders"] == ["chain", "tree 4", "tree 32"]
    # What each prompt was given, put together, is its text.
    for index, prompt in enumerate(decoded["prompts"]):
        for place, entry in enumerate(prompt["decoders"][1:]):
            rows = (tensors["trace/decoder"] == place) & (tensors["trace/prompt"] == index)
            tokens = tensors["expected/tokens"][rows]
            assert tokens[tokens >= 0].tolist() == entry["tokens"]
            assert tensors["trace/round"][rows].tolist() == list(range(len(entry["accept_lengths"])))
    assert run.main(["round", path, "--backend", "numpy"]) == 0
    bundle = read_round(path)
    for stage, arrays in reference_results(bundle.inputs).items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(bundle.expected[stage][name], array, err_msg=name)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_figure_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"acceptance.{suffix}"
    assert decode("--prompt", PROMPT, "--budget", "1,8", "--max-new-tokens", "12", "--plot", str(path)) == 0
    assert path.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")
    assert list(tmp_path.iterdir()) == [path]


BUDGETS = "expected different whole numbers from 1 to 1024, with commas between"
NO_FOLDER, WRITABLE = "No such file or directory)", "expected a file that can be written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt: got an empty prompt"),
        (["--prompt-file", "missing.py"], "No such file or directory: 'missing.py'"),
        (["--prompt-file", "."], "Is a directory"),
        (["--prompt", "x" * 1000], "--prompt: got 1001 tokens; expected 1 to 896"),
        (["--budget", "0"], f"argument --budget: got '0'; {BUDGETS}"),
        (["--budget", "-1"], f"argument --budget: got '-1'; {BUDGETS}"),
        (["--budget", "1025"], f"argument --budget: got '1025'; {BUDGETS}"),
        (["--budget", "4,4"], f"argument --budget: got '4,4'; {BUDGETS}"),
        (["--budget", "4,"], f"argument --budget: got '4,'; {BUDGETS}"),
        (["--budget", "4,x,2"], f"argument --budget: got '4,x,2'; {BUDGETS}"),
        (["--budget", "many"], f"argument --budget: got 'many'; {BUDGETS}"),
        (["--budget", "9" * 5000], BUDGETS),
        (
            ["--devices", "0,-1"],
            "argument --devices: got '0,-1'; expected whole numbers from 0 on, with commas",
        ),
        (["--max-new-tokens", "0"], ": --max-new-tokens: got 0; expected"),
        (["--max-new-tokens", "1024"], ": --max-new-tokens: got 1024; expected"),
        (["--temperature", "-1"], ": --temperature: got -1"),
        (["--temperature", "nan"], "argument --temperature: got 'nan'; expected a finite number"),
        (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["--temperature", "warm"], "argument --temperature: got 'warm'; expected a finite number"),
        (["--prompts", "0"], "--prompts: got 0; expected a number from 1 to 64"),
        (["--prompts", "65"], "--prompts: got 65"),
        pytest.param(
            ["--plot", "figure.pdf"],
            ": --plot: got 'figure.pdf'; expected a file name that ends in .svg or .png",
            marks=with_matplotlib,
        ),
        (
            ["--trace", "no/such/folder.kdtr"],
            f": --trace: got 'no/such/folder.kdtr' ({NO_FOLDER}; {WRITABLE}",
        ),
        pytest.param(
            ["--plot", "no/such/folder.svg"],
            f": --plot: got 'no/such/folder.svg' ({NO_FOLDER}; {WRITABLE}",
            marks=with_matplotlib,
        ),
        (["--trace", "."], ": --trace: got '.' (not a regular file); expected a file or nothing there"),
        (["--trace", ""], ": --trace: got '' (not a regular file); expected a file or nothing there"),
        pytest.param(
            ["--plot", "figure.svg/"], ": --plot: got 'figure.svg/' (not a regular", marks=with_matplotlib
        ),
        pytest.param(
            ["--trace", "./both.svg", "--plot", "both.svg"],
            "--trace: got ./both.svg; expected another file",
            marks=with_matplotlib,
        ),
        (["--prompt", "a", "--prompt", ""], "--prompt 2: got an empty prompt"),
        (["--prompt-file", "/dev/zero"], "/dev/zero: got more than 1048576 bytes"),
        (["--prompt-file", "/dev/null"], "/dev/null: got an empty prompt"),
        (["--seed", str(2**63)], ": --seed: got 9223372036854775808"),
        (["--backend", "simulator"], "would take hours"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert decode(*arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nothing_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoding began")

    monkeypatch.setattr(Decoding, "begin", fail)


@pytest.mark.usefixtures("nothing_decodes")
@pytest.mark.parametrize("option", ["--trace=no/rounds.kdtr", "--plot=no/figure.svg"])
def test_files_that_cannot_be_written_are_found_first(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert decode("--prompt", PROMPT, option) == 2


@pytest.mark.usefixtures("nothing_decodes")
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numba_ddtree.plot", raising=False)
        patch.setitem(sys.modules, "matplotlib", None)
        assert decode("--plot", "figure.svg") == 2
    assert "numba_ddtree[plot]" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert decode("--prompt-file", "-") == 2
    assert "standard input: got nothing" in capsys.readouterr().err


def test_prompts_before_and_after_the_command_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backend", "numpy", "--json", "--budget", "1", "--max-new-tokens", "1"]
    assert run.main([*options, "--prompt", "a", "decode", "--prompt", "b"]) == 0
    decoded = json.loads(capsys.readouterr().out)
    assert [prompt["prompt"] for prompt in decoded["prompts"]] == ["a", "b"]
    assert [prompt["name"] for prompt in decoded["prompts"]] == ["--prompt 1", "--prompt 2"]


def test_seed_and_temperature_reach_the_draws(capsys: pytest.CaptureFixture[str]) -> None:
    def text(*arguments: str) -> object:
        short = ("--prompt", PROMPT, "--budget", "4", "--max-new-tokens", "16")
        return decode_json(capsys, *short, *arguments)["prompts"][0]["decoders"][0]["text"]

    greedy, first, second = text(), text("--temperature", "1"), text("--temperature", "1", "--seed", "1")
    assert len({greedy, first, second}) == 3
    assert text("--temperature", "1", "--seed", "1") == second


@pytest.fixture
def faulty_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees write another third token than the target says."""
    advance = Decoding._advance

    def faulty_advance(self: Decoding, host: AcceptResult) -> None:
        advance(self, host)
        tokens = self.decoded.tokens[0]
        if self.decoder.width > 1 and len(tokens) > 2:
            tokens[2] = 0

    monkeypatch.setattr(Decoding, "_advance", faulty_advance)


@pytest.mark.usefixtures("faulty_trees")
def test_a_different_text_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--prompts", "2", "--budget", "4", "--max-new-tokens", "8")
    assert decode(*arguments) == 1
    output = capsys.readouterr().out
    assert "1 of 2" in output
    assert "tree 4, " in output
    assert ": token 2 differs: " in output
    assert decode("--json", *arguments) == 1
    prompts = json.loads(capsys.readouterr().out)["prompts"]
    identical = [[entry["identical"] for entry in prompt["decoders"]] for prompt in prompts]
    assert identical == [[True, True, False], [True, True, True]]
    difference = prompts[0]["decoders"][2]["first_difference"]
    assert difference["place"] == 2
    assert difference["plain"] == prompts[0]["decoders"][0]["tokens"][2]
    assert difference["other"] == 0
    assert difference["margin"] > 0


@with_matplotlib
@pytest.mark.parametrize("rounds", [0, 3, 20])
def test_an_interruption_prints_what_was_reached(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In plain decoding, before its first round or after some, and in the chain."""
    run_round, done = Decoding.run_round, []

    def interrupted_round(self: Decoding) -> Round:
        if len(done) == rounds:
            raise KeyboardInterrupt
        done.append(self)
        return run_round(self)

    monkeypatch.setattr(Decoding, "run_round", interrupted_round)
    trace, plot = tmp_path / "rounds.kdtr", tmp_path / "figure.svg"
    plot.write_text("as it was")
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "18", "--trace", str(trace), "--plot", str(plot))
    assert decode("--json", *arguments) == 130
    output, screen = capsys.readouterr()
    decoded = json.loads(output)
    assert decoded["interrupted"]
    reached = [
        (decoder["name"], decoder["target_passes"], decoder["finished"]) for decoder in decoded["decoders"]
    ]
    in_chain = rounds > 18
    assert reached == (
        [("plain", 18, True), ("chain", rounds - 18, False)] if in_chain else [("plain", rounds, False)]
    )
    assert decoded["prompts"][0]["decoders"][-1]["identical"] is None
    assert f"interrupted in decoder '{reached[-1][0]}'" in screen
    assert trace.exists() == in_chain
    assert plot.read_text() == "as it was"
    assert len(list(tmp_path.iterdir())) == 1 + trace.exists()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ArgumentError("x", 1, "2")])
def test_a_failure_leaves_what_was_reached(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_round = Decoding.run_round

    def failing_round(self: Decoding) -> Round:
        if self.decoder.budget == 4 and self.decoded.num_passes == 2:
            raise error
        return run_round(self)

    monkeypatch.setattr(Decoding, "run_round", failing_round)
    trace, plot = tmp_path / "rounds.kdtr", tmp_path / "figure.svg"
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "18", "--budget", "4", "--trace", str(trace))
    if find_spec("matplotlib") is not None:
        arguments += ("--plot", str(plot))
    if isinstance(error, ArgumentError):
        assert decode("--json", *arguments) == 2
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            decode("--json", *arguments)
    output, screen = capsys.readouterr()
    decoded = json.loads(output)
    assert decoded["error"] == str(error)
    assert not decoded["interrupted"]
    reached = [(decoder["name"], decoder["finished"]) for decoder in decoded["decoders"]]
    assert reached == [("plain", True), ("chain", True), ("tree 4", False)]
    assert "failed in decoder 'tree 4'" in screen
    assert read_bundle(trace).metadata["decoders"] == ["chain", "tree 4"]
    assert not plot.exists()


@pytest.mark.usefixtures("nothing_decodes")
def test_a_failure_at_once_is_all_there_is_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="decoding began"):
        decode("--json", "--prompt", PROMPT)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("delay", [0.1, 0.3, 0.6, 0.8, 1.0, 2.5])
def test_an_interruption_at_any_time_leaves_no_traceback(delay: float, options: list[str]) -> None:
    """While modules and the model are loaded, while prompts are read, between rounds."""
    program = "from numba_ddtree import run; print('ready', flush=True); run.run_program()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--backend", "numpy", "--max-new-tokens", "700", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Traceback" not in errors
    assert "interrupted" in output + errors
    assert process.returncode == 130
    if options and output:
        assert json.loads(output)["interrupted"]


def test_an_interruption_while_modules_are_loaded_is_not_lost(tmp_path: Path) -> None:
    """As it would be where a module that decoding needs drops every exception while it is loaded."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(
        "import signal, sys\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "sys.exit('lost')\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "numba_ddtree.run", "--backend", "numpy"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "numba-ddtree: interrupted\n")


def test_a_closed_pipe_leaves_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "rounds.kdtr"
    reader, writer = os.pipe()
    os.close(reader)
    command = ["--backend", "numpy", "--prompt", PROMPT, "--budget", "2", "--max-new-tokens", "3"]
    result = subprocess.run(
        [sys.executable, "-m", "numba_ddtree.run", *command, "--trace", str(trace)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert result.returncode == EXIT_CLOSED_PIPE
    assert result.stderr == ""
    assert read_round(trace).expected


def test_any_terminal_will_do(tmp_path: Path) -> None:
    """ASCII alone, 20 columns, a file's name that drives terminals, and lines longer than the screen."""
    path = tmp_path / "\x1b[31mred.py"
    path.write_text(f"é = '{'x' * 100}'\n")
    command = ["--backend", "numpy", "--prompt-file", path.name, "--budget", "2", "--max-new-tokens", "3"]
    result = subprocess.run(
        [sys.executable, "-m", "numba_ddtree.run", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "20"},
        capture_output=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"\n\\xe9 = '" + b"x" * 100 in result.stdout
    assert b"\\x1b[31mred.py" in result.stdout
    assert b"\x1b" not in result.stdout
    assert b"tokens/s" in result.stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"a\tb\n", "a\tb\n"),
        (b"\x1b[31m", "\\x1b[31m"),
        (b"\xff", "\\xff"),
        ("é猫".encode(), "é猫"),
        (b"\x00\r", "\\x00\\r"),
    ],
)
def test_texts_cannot_drive_a_terminal(text: bytes, shown: str) -> None:
    assert readable(text) == shown


def test_tokens_are_bytes() -> None:
    assert [token_bytes(token) for token in (0, 255, 256, 257)] == [b"\0", b"\xff", b"", b""]


@pytest.mark.gpu
def test_decoding_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    assert run.main(["--backend", "cuda", "--json", "--prompts", "2", "--max-new-tokens", "32"]) == 0
    decoded = json.loads(capsys.readouterr().out)
    assert decoded["backend"] == "cuda"
    assert all(entry["identical"] for prompt in decoded["prompts"] for entry in prompt["decoders"])
