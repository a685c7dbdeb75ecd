"""The command line, run as its users run it: each call is a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from numba_ddtree import environment, run
from numba_ddtree.bundle import read_bundle, write_bundle
from numba_ddtree.cases import ATTENTION_CASES, AttentionCase
from numba_ddtree.check_results import CheckResult, OnResult, OnStart
from numba_ddtree.command import (
    EXIT_CLOSED_PIPE,
    end_when_interrupted,
    raise_dropped_interruption,
    raise_when_interrupted,
)
from numba_ddtree.environment import Choice, Device
from numba_ddtree.errors import BackendError
from numba_ddtree.reporting import Reporter
from numba_ddtree.round_bundle import reference_results, round_tensors

TIMEOUT_SECONDS = 240
KEYS = {"name", "passed", "max_abs", "max_rel", "us", "case"}
SIMULATOR_ROUND = AttentionCase(heads=1, prefix=3, budget=4, latent=8, rope=4)
HAS_DEVICE = bool(environment.find_devices()[0])
without_device = pytest.mark.skipif(HAS_DEVICE, reason="there is a CUDA device")


def environment_variables(**changes: str) -> dict[str, str]:
    """Return this process's environment without what would choose a backend."""
    kept = {name: value for name, value in os.environ.items() if name != environment.SIMULATOR_VARIABLE}
    return kept | changes


def call(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "numba_ddtree.run", *arguments],
        env=environment_variables(**changes),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def write_round(path: Path, case: AttentionCase) -> str:
    inputs = case.inputs()
    write_bundle(path, round_tensors(inputs, reference_results(inputs)))
    return str(path)


@pytest.fixture
def round_path(tmp_path: Path) -> str:
    return write_round(tmp_path / "round.kdtr", SIMULATOR_ROUND)


class TestHelp:
    def test_help_is_quick_and_complete(self) -> None:
        started = time.perf_counter()
        result = call("--help")
        seconds = time.perf_counter() - started
        assert result.returncode == 0
        assert result.stderr == ""
        for word in (
            "decode",
            "check",
            "round",
            "env",
            "--json",
            "--seed",
            "--device",
            "--backend",
            "exit codes",
        ):
            assert word in result.stdout
        assert seconds < 0.5 or min(_help_seconds() for _ in range(3)) < 0.5

    @pytest.mark.parametrize("command", ["decode", "check", "round", "env"])
    def test_help_of_a_command(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            run.main([command, "--help"])
        assert caught.value.code == 0
        assert "--json" in capsys.readouterr().out


def _help_seconds() -> float:
    started = time.perf_counter()
    call("--help")
    return time.perf_counter() - started


class TestBadUse:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--nope"], "numba-ddtree: unrecognized arguments: --nope"),
            (["frob"], "invalid choice: 'frob'"),
            (["check", "--backend", "gpu"], "invalid choice: 'gpu'"),
            (["--seed", "-1"], "argument --seed: got '-1'; expected a whole number from 0 on"),
            (["check", "--seed", "two"], "argument --seed: got 'two'; expected a whole number from 0 on"),
            (["check", "--device", "-1"], "argument --device"),
            (["env", "--backend", "numpy"], "unrecognized arguments: --backend numpy"),
            (["round"], "the following arguments are required: BUNDLE.kdtr"),
            (["round", "missing.kdtr"], "No such file or directory: 'missing.kdtr'"),
            (["round", __file__], "expected b'KDTR'"),
            (["--backend", "numpy", "--device", "3"], "no CUDA device 3: the numpy backend uses none"),
            (["check", "--backend", "simulator", "--device", "3"], "no CUDA device 3"),
            (["--backend", "simulator"], "decoding in Numba's simulator would take hours"),
            (["--budget", "4", "check"], "--budget is an option of decode, not of check"),
        ],
    )
    def test_one_line_and_exit_code_2(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        try:
            code: object = run.main(arguments)
        except SystemExit as caught:
            code = caught.code
        output = capsys.readouterr()
        assert code == 2
        assert output.out == ""
        assert message in output.err
        assert output.err.count("\n") == 1

    @without_device
    @pytest.mark.parametrize(
        "arguments", [["--backend", "cuda"], ["--backend", "cuda", "check"], ["--device", "99", "check"]]
    )
    def test_no_device(self, arguments: list[str]) -> None:
        result = call(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.startswith("numba-ddtree: no CUDA device")
        assert result.stderr.count("\n") == 1

    def test_no_such_device(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        devices = [Device("H200", "9.0", 1, 1)] * 2
        monkeypatch.setattr(environment, "find_devices", lambda: (devices, None))
        assert run.main(["--device", "2", "--backend", "cuda"]) == 2
        assert capsys.readouterr().err == "numba-ddtree: no CUDA device 2: there are 2, counted from 0\n"

    def test_misshapen_bundle(self, round_path: str, capsys: pytest.CaptureFixture[str]) -> None:
        tensors = read_bundle(round_path, map_payloads=False).tensors
        write_bundle(round_path, {**tensors, "q_pe": np.zeros((1, 2, 3), np.float32)})
        assert run.main(["round", round_path]) == 2
        assert "tensor 'q_pe': float32 of shape [1, 2, 3]" in capsys.readouterr().err

    def test_the_simulator_comes_too_late(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(environment.SIMULATOR_VARIABLE, "0")  # so that it is put back afterwards
        monkeypatch.setattr("numba_ddtree.cuda_target.SIMULATED", False)
        assert run.main(["check", "--backend", "simulator"]) == 2
        assert "start a new process" in capsys.readouterr().err


class TestCheck:
    def test_numpy_json(self) -> None:
        result = call("--seed", "3", "check", "--backend", "numpy", "--json")
        assert result.returncode == 0
        results = json.loads(result.stdout)
        assert all(set(entry) == KEYS and entry["passed"] for entry in results)
        assert result.stderr.splitlines()[-1] == f"{len(results)} passed, 0 failed"

    def test_json_keeps_what_was_reached_before_a_failure(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def failing(
            _backend: str, _seed: int, _device: int, on_result: OnResult, _on_start: OnStart
        ) -> list[CheckResult]:
            on_result(CheckResult("a/b", True, 0.0, 0.0, 1.0, "B=1"))
            raise BackendError("the device is lost")

        monkeypatch.setattr("numba_ddtree.checks.run_checks", failing)
        assert run.main(["check", "--backend", "numpy", "--json"]) == 2
        output, errors = capsys.readouterr()
        assert [entry["name"] for entry in json.loads(output)] == ["a/b"]
        assert errors.splitlines()[-1] == "numba-ddtree: the device is lost"

    def test_options_before_and_after(self) -> None:
        options = run._parser().parse_args(["--seed", "3", "--json", "check", "--backend", "numpy"])
        assert (options.seed, options.json, options.backend, options.device) == (3, True, "numpy", 0)
        options = run._parser().parse_args(["--seed", "3", "check", "--seed", "4"])
        assert (options.command, options.seed) == ("check", 4)
        assert run._parse([]).command == "decode"
        assert run._parse(["--budget", "4,16", "decode"]).budget == (4, 16)

    def test_simulator(self) -> None:
        """What `auto` is without a device: the real kernels, in less than a minute."""
        result = call("check", "--json", CUDA_VISIBLE_DEVICES="")
        results = json.loads(result.stdout)
        assert [entry["name"] for entry in results if not entry["passed"]] == []
        assert result.returncode == 0
        notice, *lines, summary = result.stderr.splitlines()
        assert "in Numba's CUDA simulator on small inputs (no CUDA device:" in notice
        assert len(lines) == len(results) >= 30
        assert summary == f"{len(results)} passed, 0 failed"
        assert {entry["name"].partition("/")[0] for entry in results} == {
            "build_tree",
            "tree_links",
            "accept_tree",
            "draft_topk",
            "choose_tokens",
            "compact_kv",
            "verify_attention",
        }

    def test_interrupt_prints_what_was_reached(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "numba_ddtree.run", "check", "--backend", "simulator"],
            env=environment_variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background jobs ignore interruptions, and so would what these tests start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert first.startswith("build_tree/golden")
        assert rest.splitlines()[-1].endswith(" passed, 0 failed, interrupted")
        assert "Traceback" not in errors

    def test_an_interruption_that_is_dropped_comes_later(self) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            end_when_interrupted("name")
            raise_when_interrupted()
            raise_dropped_interruption()
            with contextlib.suppress(KeyboardInterrupt):  # as a weak reference's callback drops it
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                raise_dropped_interruption()
        finally:
            signal.signal(signal.SIGINT, before)

    @pytest.mark.parametrize(
        "arguments",
        [["check", "--backend", "numpy"], ["env"], ["--help"], ["decode", "--help"]],
    )
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_closed_pipe(self, arguments: list[str], unbuffered: str) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        result = subprocess.run(
            [sys.executable, "-m", "numba_ddtree.run", *arguments],
            env=environment_variables() | {"PYTHONUNBUFFERED": unbuffered},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        os.close(writer)
        assert result.returncode == EXIT_CLOSED_PIPE
        assert result.stderr == ""


class TestRound:
    def test_numpy(self, round_path: str) -> None:
        result = call("round", round_path, "--backend", "numpy")
        assert result.returncode == 0
        lines = result.stdout.splitlines()
        assert [line.split()[:2] for line in lines[:-1]] == [
            ["build_tree/stored", "passed"],
            ["verify_attention/stored", "passed"],
            ["accept_tree/stored", "passed"],
        ]
        assert lines[0].endswith("B=1 L=15 K=64 budget=4 H=1 prefix=3 D=8+4")
        assert lines[-1] == "3 passed, 0 failed"

    def test_simulator_and_a_corrupted_array(self, round_path: str) -> None:
        tensors = read_bundle(round_path, map_payloads=False).tensors
        bonus = tensors["expected/bonus_token"] + np.int32(1)
        write_bundle(round_path, {**tensors, "expected/bonus_token": bonus})
        result = call("round", round_path, "--backend", "simulator")
        assert result.returncode == 1
        assert result.stdout.splitlines()[-1] == "5 passed, 1 failed"
        assert "accept_tree/stored                 FAILED" in result.stdout
        assert f"bonus_token[0]: got {bonus[0] - 1}; expected {bonus[0]}" in result.stdout

    def test_too_large_for_the_simulator(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        choice = Choice("simulator", "no CUDA device: none here")
        monkeypatch.setattr(environment, "choose_backend", lambda: choice)
        path = write_round(tmp_path / "large.kdtr", ATTENTION_CASES[0])
        assert run.main(["round", path]) == 0
        output = capsys.readouterr()
        assert "running the numpy references; the simulator would need some" in output.err
        assert output.out.splitlines()[-1] == "3 passed, 0 failed"


class TestReporter:
    def test_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Reporter(results_to_stderr=False) as reporter:
            reporter.start("a", 0, 2)
            reporter.show(CheckResult("a/b", True, 0.0, 0.0, 12.34, "B=1 " + "x" * 200))
            reporter.show(CheckResult("c/[d]", False, float("inf"), 1.5, float("nan"), "B=2", "x[0]: wrong"))
        reporter.summarise(interrupted=False)
        first, second, fault, last = capsys.readouterr().out.splitlines()
        assert first.split()[:2] == ["a/b", "passed"]
        assert first.endswith("x" * 200)
        assert "12.3 us" in first
        assert second.split()[:4] == ["c/[d]", "FAILED", "abs", "inf"]
        assert fault.strip() == "x[0]: wrong"
        assert last == "1 passed, 1 failed"
