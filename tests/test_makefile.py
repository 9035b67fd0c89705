"""The Makefile before anything is installed."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

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


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_a_method_of_a_file_is_tested_by_what_holds_of_every_method() -> None:
    for name, own in (("/tmp/mine.py:Foo", True), ("fed-foo", False)):
        command = ["make", "--dry-run", "--no-print-directory", "test-method", f"M={name}"]
        line = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        assert f'FEDSUB_TEST_METHOD="{name}"' in line
        assert ("tests/test_methods.py" in line) is own


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """install.py, on a Linux machine without uv and without configured indices."""
    spec = spec_from_file_location("install", PROJECT / "install.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(PROJECT)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    monkeypatch.setattr(module, "answer", lambda _: "")
    return module


def test_torch_is_for_cpus_where_there_is_no_driver(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, named, build in ((False, "", "cpu"), (True, "", "cuda"), (False, "cuda", "cuda"), (True, "cpu", "cpu")):
        monkeypatch.setattr(install, "has_driver", lambda driver=driver: driver)
        monkeypatch.setenv("TORCH", named)
        assert install.build_of_torch() == build
    monkeypatch.setenv("TORCH", "rocm")
    with pytest.raises(SystemExit, match="TORCH=rocm: must be cpu or cuda"):
        install.build_of_torch()


def test_the_cpu_build_is_that_of_the_tested_version(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = re.search(r"(?m)^torch==(\S+)", (PROJECT / "constraints.txt").read_text())
    assert tested
    for offered, expected in ((f"torch ({tested[1]}+cpu)", True), (f"{tested[1]}, 2.0.0+cpu", False), ("", False)):
        monkeypatch.setattr(install, "answer", lambda _, offered=offered: offered)
        assert install.has_cpu_build() is expected


def test_uv_comes_first_unless_pip_is_configured(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """And pip after it, should it fail; the index of CPU builds comes on top of pip's own."""
    (pip,) = install.commands(".[dev]", "cpu")
    assert pip[1:4] == ["-m", "pip", "--disable-pip-version-check"]
    assert pip[-4:] == ["-e", ".[dev]", "--extra-index-url", install.CPU_INDEX]
    assert install.CPU_INDEX not in install.commands(".", "cuda")[0]
    assert "--no-compile" in pip
    assert "--no-compile" not in install.commands(".[node]", "cpu")[0]  # its service may not write beside the packages
    monkeypatch.setattr(install.shutil, "which", lambda _: "/bin/uv")
    uv, pip = install.commands(".", "cpu")
    assert uv[:3] == ["/bin/uv", "pip", "install"]
    assert "--torch-backend=cpu" in uv
    monkeypatch.setattr(install, "answer", lambda _: "global.index-url='https://pip.example.org/simple'")
    assert install.commands(".", "cpu") == [pip]


def test_the_lock_has_the_tested_versions_of_the_public_index() -> None:
    """And no host of the machine that wrote it."""
    text = (PROJECT / "uv.lock").read_text()
    assert set(re.findall(r"\w+://[^/\"]+", text)) == {"https://pypi.org", "https://files.pythonhosted.org"}
    locked = {(package["name"], package.get("version")) for package in tomllib.loads(text)["package"]}
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["run"]]
    tested = dict(line.lower().split("==") for line in (PROJECT / "constraints.txt").read_text().split())
    for name in {re.split(r"[\[<>=]", text)[0] for text in named} - {"fedsub"}:
        assert (name, tested.get(name) or tested[name.replace("-", "_")]) in locked
