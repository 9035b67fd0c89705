"""`fedsub new-method` in a copy of the project: what it writes passes at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedsub_app.cli.new_method import new_method
from fedsub_app.common.errors import UserError
from fedsub_app.deployment import flower
from fedsub_app.deployment.flower import PROJECT


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this one."""
    target = tmp_path_factory.mktemp("copy") / "project"
    target.mkdir()
    for name in ("fedsub", "fedsub_app", "strategies", "client_apps", "conf", "tests", "examples"):
        shutil.copytree(PROJECT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PROJECT / name, target / name)
    return target


def in_copy(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(project), "FEDSUB_RUNS": str(project / "runs")}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_it_writes_passes_at_once(project: Path) -> None:
    """Its own test, that Flower is told of its keys, those that hold of every method, and the linter."""
    done = in_copy(project, "fedsub_app.cli", "new-method", "Fed-FOO")
    assert done.returncode == 0, done.stderr
    assert f"{project / 'strategies/fed_foo.py'}\n" in done.stdout
    assert "class FedFOOSettings(MethodSettings):" in (project / "strategies/fed_foo.py").read_text()
    new = ["strategies/fed_foo.py", "client_apps/fed_foo.py", "tests/test_fed_foo.py", "fedsub_app/runs/methods.py"]
    for arguments in (("check", *new), ("format", "--check", *new)):
        linted = in_copy(project, "ruff", *arguments)
        assert linted.returncode == 0, linted.stdout
    chosen = "fed_foo or fed-foo or test_flower_is_told_every_key"
    pages = ["tests/test_fed_foo.py", "tests/test_methods.py", "tests/test_config.py"]
    tested = in_copy(project, "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *pages)
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert int(tested.stdout.split(" passed")[0].split()[-1]) >= 3 + 1 + 3
    assert "fed-foo.step" in in_copy(project, "fedsub_app.cli", "list", "settings").stdout


def test_make_need_not_install_anew(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of pyproject.toml, by which make decides, stays: no dependency has changed."""
    monkeypatch.setattr(flower, "PROJECT", project)
    pyproject = project / "pyproject.toml"
    os.utime(pyproject, ns=(10**18, 10**18))
    new_method("FedTime")
    assert "[tool.flwr.app.config.fedtime]" in pyproject.read_text()
    assert pyproject.stat().st_mtime_ns == 10**18


def test_classes_keep_the_capitals_of_the_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "PROJECT", project)
    new_method("FedBAR")
    for package, classes in (("strategies", ("FedBARSettings", "FedBAR")), ("client_apps", ("FedBARClient",))):
        text = (project / package / "fedbar.py").read_text()
        assert all(f"class {name}(" in text for name in classes)
    register = (project / "fedsub_app/runs/methods.py").read_text()
    assert (
        '"fedbar": Method("authors and year", "fedbar:FedBARSettings", "fedbar:FedBAR", "fedbar:FedBARClient"),'
        in register
    )


def test_long_names_are_registered_as_the_formatter_would(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an indented line, and an argument a line."""
    monkeypatch.setattr(flower, "PROJECT", project)
    for name in ("LotteryFL", "FedAdaptive"):
        new_method(name)
    done = in_copy(project, "ruff", "format", "--check", "fedsub_app/runs/methods.py", "tests/helpers.py")
    assert done.returncode == 0, done.stdout


def test_names_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "PROJECT", tmp_path)
    for name in ("Fed Foo", "Fed_Foo", "", "../x", "1st"):
        with pytest.raises(UserError, match=r"must be lower-case letters and digits, in words joined by '-'"):
            new_method(name)
    with pytest.raises(UserError, match="method 'fedavg': there is one of that name"):
        new_method("fedavg")
    with pytest.raises(UserError, match=f"{tmp_path}: not a checkout of fedsub, which a method is added to"):
        new_method("fedfoo")
    shutil.copytree(PROJECT / "examples/new-method", tmp_path / "examples/new-method")
    there = {*tmp_path.rglob("*")}
    for path in ("tests/helpers.py", "strategies/fedfoo.py"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("")
    for name, word in (("Lambda", "lambda"), ("None", "None")):
        with pytest.raises(UserError, match=f"method '{name.lower()}': {word} is a word of Python"):
            new_method(name)
    with pytest.raises(UserError, match=r"strategies/fedfoo\.py: there already"):
        new_method("fedfoo")
    new = {path.name for path in {*tmp_path.rglob("*")} - there if path.is_file()}
    assert new == {"fedfoo.py", "helpers.py"}
