"""The examples: a Flower quickstart and the same app with fedsub, on each engine; and the wheel that they install."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from federations import NAME, deployed
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy
from helpers import PATIENCE
from test_engines import flower, own_flower  # noqa: F401  (a fixture)

import fedsub
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.deployment.flower import flwr as command
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.library.keywords import title
from fedsub_app.runs.methods import METHODS

PLAIN, OURS = PROJECT / "examples/quickstart", PROJECT / "examples/quickstart-fedsub"
CONFIG = {"num-server-rounds": 1, "learning-rate": 0.2, "local-epochs": 2}


@pytest.fixture
def app(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The server and client modules of the example in the folder that the test names."""
    monkeypatch.syspath_prepend(request.param)
    yield tuple(importlib.import_module(f"quickstart.{name}") for name in ("server_app", "client_app"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def run(app: Any, **config: Any) -> None:
    """Run the example's ServerApp and ClientApp in this process, on two nodes."""
    server, client = app
    grid = LocalGrid(client.app, {}, 2)
    for context in grid.contexts.values():
        context.run_config = CONFIG | config
    server.app(grid, Context(1, 1, {}, RecordDict(), CONFIG | config))


def difference() -> list[str]:
    """The lines of a unified diff between the examples."""
    command = ["diff", "-U1", "-r", "-x", "__pycache__", "examples/quickstart", "examples/quickstart-fedsub"]
    found = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True).stdout.splitlines()
    return [line.partition("\t")[0] for line in found if not line.startswith("diff ")]


def test_twelve_lines_are_new_and_the_page_shows_them() -> None:
    added = [line for line in difference() if line.startswith("+") and not line.startswith("+++") and line != "+"]
    assert len(added) <= 12
    assert "\n".join(difference()) in (PROJECT / "docs/own-app.md").read_text()


def results(kind: type[Strategy], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return a list that gets each strategy of this class that is started, and its result."""
    found: list[tuple[Any, Any]] = []
    start = kind.start
    monkeypatch.setattr(kind, "start", lambda self, *args, **named: found.append((self, start(self, *args, **named))))
    return found


@pytest.mark.parametrize("app", [PLAIN], indirect=True)
def test_the_quickstart_is_a_flower_app(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(FedAvg, monkeypatch)
    run(app)
    assert 0 <= found[0][1].evaluate_metrics_clientapp[1]["eval_acc"] <= 1


@pytest.mark.parametrize("app", [OURS], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_it_runs_each_method(method: str, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = results(getattr(fedsub, title(method)), monkeypatch)
    run(app, method=title(method), **({"learning-rate": 0.02} if method == "pfedme" else {}))  # lr lambda < 1
    ((strategy, found),) = started
    assert strategy.connected.phase.dropped == []
    assert list(found.arrays) == list(ArrayRecord(app[1].Net().state_dict()))
    assert found.evaluate_metrics_clientapp[1]["personal-loss"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("folder", [PLAIN, OURS])
def test_flwr_run(folder: Path, flower: dict[str, str]) -> None:  # noqa: F811
    """On Flower's simulation."""
    said = flwr_run(folder, Path(sys.executable), flower | {"PYTHONPATH": str(PROJECT)})
    assert ("eval_acc" if folder is PLAIN else "personal-accuracy") in said


@pytest.mark.slow
def test_on_supernodes(tmp_path: Path) -> None:
    """On a federation of two real nodes."""
    with deployed(tmp_path, "--nodes", "2", PYTHONPATH=str(PROJECT)) as here:
        assert "personal-accuracy" in flwr_run(OURS, Path(sys.executable), here.variables, NAME)


def flwr_run(folder: Path, python: Path, variables: dict[str, str], connection: str = "local-simulation") -> str:
    """Run an app of one round, which completes by what `flwr list` tells; returns its log."""
    flwr = str(python.parent / "flwr")
    variables = variables | {"PATH": f"{python.parent}{os.pathsep}{variables['PATH']}"}

    def told(*arguments: str) -> Any:
        words = [flwr, *arguments, "--format", "json"]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
        assert "{" in done.stdout, done.stderr
        return json.loads(done.stdout[done.stdout.index("{") :])

    patient = [str(python), *command("list", connection)[1:]]  # Flower's own gives a SuperLink 15 s to start
    subprocess.run(patient, env=variables, timeout=PATIENCE, cwd=folder, capture_output=True)
    began = told("run", str(folder), connection, "-c", "num-server-rounds=1")
    assert began["success"], began
    number = began["run-id"]
    log = [flwr, "log", str(number), connection, "--stream"]  # until the run has ended
    said = subprocess.run(log, env=variables, timeout=PATIENCE, capture_output=True, text=True, cwd=folder)
    (listed,) = told("list", connection, "--run-id", str(number))["runs"]
    assert listed["status"] == "finished:completed", listed
    return said.stdout + said.stderr


@pytest.fixture(scope="module", params=["this environment", "the registry"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of an empty environment that has the wheel, and its dependencies of this one or of the registry."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder), str(PROJECT)]
    subprocess.run(build, check=True, timeout=PATIENCE)
    (wheel,) = folder.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {"fedsub/py.typed", "fedsub_app/py.typed", "fedsub_app/conf/quickstart/digits.toml"} <= set(files)
    names = {name.partition("/")[0] for name in files}
    assert names == {"fedsub", "fedsub_app", wheel.name.rpartition("-py3")[0] + ".dist-info"}
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", str(wheel)]
    if request.param == "the registry":
        install[-1] += "[run]"
        subprocess.run([*install, *torch_for_cpus()], check=True, timeout=3600)
        yield python
        shutil.rmtree(folder)  # gigabytes
        return
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    for entry in (e for name in ("flwr", "ray") for e in distribution(name).entry_points):
        script = python.parent / entry.name
        script.write_text(
            f"#!{python}\nimport sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
        )
        script.chmod(0o755)
    subprocess.run([*install, "--no-deps"], check=True, timeout=PATIENCE)
    yield python


def torch_for_cpus() -> list[str]:
    """The build without CUDA, where the configured index has one: a third of the size."""
    look = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    offered = subprocess.run(look, capture_output=True, text=True, timeout=PATIENCE).stdout
    return [f"torch=={found[0]}" for found in [re.search(r"[\d.]+\+cpu", offered)] if found]


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    """No common name is taken; the command, an own network and the example's ServerApp run."""
    code = """
import importlib.util, fedsub, sys
assert not importlib.util.find_spec("strategies") and not importlib.util.find_spec("client_apps")
assert "torch" not in sys.modules
print(fedsub.FedSelect(alpha=0.3).keys["fedselect.alpha"], fedsub.SubnetStrategy.__module__)
"""
    clean = {"PATH": str(installed.parent), "HOME": str(tmp_path), "FEDSUB_RUNS": str(tmp_path / "runs")}

    def called(program: str, *arguments: str) -> str:
        command = [str(installed.parent / program), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert called("python", "-c", code) == "0.3 fedsub_app.strategies.base\n"
    called("fedsub", "run", "quickstart/digits", "-s", "num-rounds=1", "--workers", "1")
    command = [str(installed.parent / "fedsub"), "run", "--engine", "local-simulation"]
    refused = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.stderr.startswith("error: --engine local-simulation: needs a checkout of fedsub")
    example = f"""
import sys; sys.path.insert(0, {str(OURS)!r})
from flwr.app import Context, RecordDict
from fedsub_app.federation.local_grid import LocalGrid
from quickstart import client_app, server_app
server_app.app(LocalGrid(client_app.app, {{}}, 2), Context(1, 1, {{}}, RecordDict(), {CONFIG | {"method": "FedPart"}}))
"""
    called("python", "-c", example)


@pytest.mark.slow
def test_flwr_run_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The example, where neither it nor fedsub is of this checkout."""
    app = Path(shutil.copytree(OURS, tmp_path / "quickstart"))
    (tmp_path / "flwr").mkdir()
    base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with own_flower(tmp_path / "flwr", str(installed), base) as variables:
        del variables["FEDSUB_RUNS"]
        assert "personal-accuracy" in flwr_run(app, installed, variables)
