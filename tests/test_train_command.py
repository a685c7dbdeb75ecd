"""The command line of the demo model's training, which is told what is wrong before anything is trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# tools/ is not part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import train_demo_model


def test_without_torch_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    folder = tmp_path / "model"
    assert train_demo_model.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train_demo_model.py: training needs torch (")
    assert error.endswith("; install it with the extra train: pip install 'numba_ddtree[train]'\n")
    assert error.count("\n") == 1
    assert not folder.exists()


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from tools.train_demo_model import main; main(['-h'])"
    root = Path(__file__).resolve().parent.parent
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "FOLDER" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: FOLDER"),
        (
            ["x", "--seed", "-1"],
            "argument --seed: got '-1'; expected a whole number from 0 to 9223372036854775804",
        ),
        (["x", "--seed", "two"], "argument --seed: got 'two'; expected a whole number"),
        (["x", "--seed", str(2**63 - 3)], "argument --seed: got '9223372036854775805'; expected"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        train_demo_model.main(arguments)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train_demo_model.py: {message}")
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert train_demo_model.main([__file__, "--tiny"]) == 2
    expected = f"FOLDER: got {__file__} (File exists); expected a folder, or a new one's name"
    assert capsys.readouterr().err == f"train_demo_model.py: {expected}\n"
