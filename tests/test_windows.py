"""What Windows lacks, taken away: no run of these tests was on Windows itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedsub_app.cli import main as cli
from fedsub_app.common.files import write_atomic
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.federation import workers

KEYS = ["-s", "model=feature-mlp", "-s", "method=fedavg", "-s", "num-rounds=1"]


def test_folders_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECTORY")
    write_atomic(tmp_path / "new/file", b"content")
    assert [path.read_bytes() for path in (tmp_path / "new").iterdir()] == [b"content"]


def test_processes_that_cannot_pass_files_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process, also where nobody says so."""
    monkeypatch.setattr(workers, "SEVERAL", False)
    monkeypatch.setattr(workers, "WorkerGrid", None)
    assert cli.main(["run", *KEYS, "-s", f"run-dir={tmp_path / 'run'}"]) == 0
    capsys.readouterr()
    assert cli.main(["run", *KEYS, "-s", f"run-dir={tmp_path / 'two'}", "--workers", "2"]) == 2
    said = "error: --workers 2: must be 1 on Windows, where processes cannot pass open files on\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "two").exists()


def test_no_federation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["federation", "status"]) == 2
    assert capsys.readouterr().err.startswith("error: fedsub federation: not on Windows: ")


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_programs_lie_in_scripts() -> None:
    command = ["make", "--dry-run", "run", "OS=Windows_NT"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert ".venv/Scripts/fedsub reproduce " in done.stdout
    assert ".venv/bin" not in done.stdout
