"""The command line tool for KDTR bundles."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_ddtree.bundle import read_bundle, write_bundle
from numba_ddtree.command import EXIT_CLOSED_PIPE

REPOSITORY = Path(__file__).parent.parent
TOOL = REPOSITORY / "tools" / "kdtr.py"

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "case/x": np.arange(6, dtype=np.int16).reshape(2, 3),
    "file": np.array(1.5),
    "[red]half[/red]": np.zeros((0, 4), np.uint16),
}


def load_main() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location("kdtr", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[list[str]], int] = module.main
    return main


main = load_main()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "in.kdtr"
    write_bundle(path, TENSORS, {"source": "a test"}, bfloat16=["[red]half[/red]"])
    return path


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run the tool on what it has to refuse; return its message."""
    try:
        code: object = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


class TestList:
    def test_table(self, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list", str(bundle)]) == 0
        output = capsys.readouterr().out
        for expected in ("case/x", "int16", "(2, 3)", "[red]half[/red]", "bfloat16", "()", '"a test"'):
            assert expected in output
        assert "3 tensors, 20 bytes" in output

    def test_json(self, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list", str(bundle), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "metadata": {"source": "a test"},
            "tensors": [
                {"name": "case/x", "dtype": "int16", "shape": [2, 3], "bytes": 12},
                {"name": "file", "dtype": "float64", "shape": [], "bytes": 8},
                {"name": "[red]half[/red]", "dtype": "bfloat16", "shape": [0, 4], "bytes": 0},
            ],
        }

    def test_any_terminal_will_do(self, bundle: Path) -> None:
        """ASCII alone, and 20 columns."""
        write_bundle(bundle, {"größe/猫": np.zeros(3), "x" * 70: np.zeros((1, 2, 3, 4, 5))})
        environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
        result = subprocess.run([sys.executable, TOOL, "list", bundle], env=environment, capture_output=True)
        assert (result.returncode, result.stderr) == (0, b"")
        assert b"\\xf6" in result.stdout
        assert b"\\u732b" in result.stdout

    def test_closed_pipe(self, bundle: Path) -> None:
        for options in ([], ["--json"]):
            reader, writer = os.pipe()
            os.close(reader)
            command = [sys.executable, TOOL, "list", bundle, *options]
            result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
            os.close(writer)
            assert (result.returncode, result.stderr) == (EXIT_CLOSED_PIPE, b"")

    def test_missing_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "No such file" in failure(capsys, "list", tmp_path / "missing")

    def test_malformed_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "two\nlines.kdtr"
        path.write_bytes(b"PK\3\4")
        assert "wrong magic" in failure(capsys, "list", path)


class TestExtract:
    def test_all(self, bundle: Path, tmp_path: Path) -> None:
        output = tmp_path / "out.npz"
        assert main(["extract", str(bundle), str(output)]) == 0
        with np.load(output, allow_pickle=False) as arrays:
            assert arrays.files == list(TENSORS)
            for name, tensor in TENSORS.items():
                assert arrays[name].dtype == tensor.dtype
                np.testing.assert_array_equal(arrays[name], tensor)

    def test_some(self, bundle: Path, tmp_path: Path) -> None:
        output = tmp_path / "out.npz"
        arguments = ["extract", str(bundle), str(output), "--name", "file", "case/x", "--name", "file"]
        assert main(arguments) == 0
        with np.load(output, allow_pickle=False) as arrays:
            assert arrays.files == ["file", "case/x"]

    def test_same_bundle_gives_the_same_bytes(self, bundle: Path, tmp_path: Path) -> None:
        outputs = [tmp_path / "1.npz", tmp_path / "2.npz"]
        for output in outputs:
            assert main(["extract", str(bundle), str(output)]) == 0
        assert outputs[0].read_bytes() == outputs[1].read_bytes()

    def test_unknown_name(self, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = tmp_path / "out.npz"
        assert "no tensor 'y'" in failure(capsys, "extract", bundle, output, "--name", "file", "y")
        assert not output.exists()

    def test_names_that_an_npz_confuses(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_bundle(tmp_path / "in.kdtr", {"x": 1, "x.npy": 2})
        message = failure(capsys, "extract", tmp_path / "in.kdtr", tmp_path / "out.npz")
        assert "cannot tell tensors 'x' and 'x.npy' apart" in message

    def test_failure_keeps_the_old_output(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "in.kdtr").write_bytes(b"KDTR")
        (tmp_path / "out.npz").write_bytes(b"old")
        assert "truncated" in failure(capsys, "extract", tmp_path / "in.kdtr", tmp_path / "out.npz")
        assert (tmp_path / "out.npz").read_bytes() == b"old"

    def test_missing_folder(self, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "No such file" in failure(capsys, "extract", bundle, tmp_path / "missing" / "out.npz")


class TestPack:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_arrays_and_metadata(self, tmp_path: Path, save: Callable[..., None]) -> None:
        save(tmp_path / "in.npz", b=np.arange(3), a=np.array(2.5, np.float16))
        arguments = ["pack", str(tmp_path / "in.npz"), str(tmp_path / "out.kdtr"), "--metadata", '{"k": [1]}']
        assert main(arguments) == 0
        packed = read_bundle(tmp_path / "out.kdtr")
        assert list(packed.tensors) == ["b", "a"]
        assert packed.tensors["b"].tolist() == [0, 1, 2]
        assert packed.tensors["a"].dtype == np.float16
        assert packed.metadata == {"k": [1]}

    def test_extract_then_pack_gives_the_same_bundle(self, bundle: Path, tmp_path: Path) -> None:
        arrays, again = tmp_path / "x.npz", tmp_path / "again.kdtr"
        assert main(["extract", str(bundle), str(arrays)]) == 0
        arguments = ["--metadata", '{"source": "a test"}', "--bfloat16", "[red]half[/red]"]
        assert main(["pack", str(arrays), str(again), *arguments]) == 0
        assert again.read_bytes() == bundle.read_bytes()

    def test_objects_are_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        np.savez(tmp_path / "in.npz", x=np.array([None]))
        assert "pickle" in failure(capsys, "pack", tmp_path / "in.npz", tmp_path / "out.kdtr")

    def test_unsupported_dtype(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        np.savez(tmp_path / "in.npz", x=np.zeros(1, np.complex64))
        message = failure(capsys, "pack", tmp_path / "in.npz", tmp_path / "out.kdtr")
        assert "dtype complex64 is not supported" in message

    def test_truncated_npz(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        np.savez(tmp_path / "in.npz", x=np.arange(100))
        content = (tmp_path / "in.npz").read_bytes()
        (tmp_path / "in.npz").write_bytes(content[:-30])
        assert "not a readable .npz" in failure(capsys, "pack", tmp_path / "in.npz", tmp_path / "out.kdtr")

    def test_every_damaged_byte_of_an_npz(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """An archive has bytes that matter to nobody; the others must be reported in one line."""
        np.savez_compressed(tmp_path / "in.npz", x=np.arange(10))
        content = (tmp_path / "in.npz").read_bytes()
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 0xFF
            (tmp_path / "damaged.npz").write_bytes(damaged)
            code = main(["pack", str(tmp_path / "damaged.npz"), str(tmp_path / "out.kdtr")])
            assert code in (0, 2)
            assert capsys.readouterr().err.count("\n") == (1 if code else 0)

    def test_same_name_twice(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        np.savez(tmp_path / "in.npz", x=np.arange(3))
        with zipfile.ZipFile(tmp_path / "in.npz", "a") as archive:
            archive.writestr("x", archive.read("x.npy"))
        assert "the same name" in failure(capsys, "pack", tmp_path / "in.npz", tmp_path / "out.kdtr")

    @pytest.mark.parametrize("metadata", ["{", "[1]", "null", '{"k": NaN}'])
    def test_bad_metadata(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], metadata: str) -> None:
        np.savez(tmp_path / "in.npz", x=np.arange(3))
        message = failure(capsys, "pack", tmp_path / "in.npz", tmp_path / "out.kdtr", "--metadata", metadata)
        assert "metadata" in message
        assert not (tmp_path / "out.kdtr").exists()


class TestCommandLine:
    @pytest.mark.parametrize(
        "arguments", [[], ["unknown"], ["list"], ["list", "x", "--unknown"], ["pack", "x"]]
    )
    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        assert "see --help" in failure(capsys, *arguments)

    @pytest.mark.parametrize("arguments", [[], ["list"], ["extract"], ["pack"]])
    def test_help(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--help"])
        assert stop.value.code == 0
        assert "usage: kdtr.py" in capsys.readouterr().out

    def test_as_a_script(self, bundle: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        run = subprocess.run(
            [sys.executable, TOOL, "list", bundle, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert len(json.loads(run.stdout)["tensors"]) == 3
