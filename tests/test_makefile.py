"""The Makefile before anything is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedsub_app.deployment.flower import PROJECT


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_another_python_is_told_which_are_wanted(tmp_path: Path) -> None:
    shutil.copy(PROJECT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").touch()
    text, count = re.subn(
        r'requires-python = ">=3\.\d+,<3\.\d+"',
        'requires-python = ">=3.98,<3.100"',
        (PROJECT / "pyproject.toml").read_text(),
    )
    assert count == 1
    (tmp_path / "pyproject.toml").write_text(text)
    command = ["make", "setup", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    have = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert first == f"Python {have}: fedsub runs on 3.98 to 3.99; name one: make PYTHON=python3.99"
    assert len(rest) == 1  # make's own
    assert not (tmp_path / ".venv").exists()
