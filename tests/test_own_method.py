"""Methods from outside: of a user's file and of an installed package; the same numbers as in the register."""

import json
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import pairs
from flwr.app import Array, ArrayRecord
from flwr.cli.build import build_fab_from_disk
from helpers import ends_as_if_never_stopped, fedsub, forget, install_method, rounds
from optuna.distributions import IntDistribution

import fedsub as library
import fedsub_app
from fedsub_app.cli.listing import about_method
from fedsub_app.cli.main import main
from fedsub_app.common.errors import UserError
from fedsub_app.common.own_code import named_code
from fedsub_app.deployment.flower import PROJECT, bundle
from fedsub_app.runs import node
from fedsub_app.runs.config import check, resolve
from fedsub_app.runs.directory import open_run
from fedsub_app.runs.loop import prepare
from fedsub_app.runs.methods import BUILT_IN, METHODS, Method
from fedsub_app.runs.node import settings_from
from fedsub_app.runs.plan import plan
from fedsub_app.settings import MethodSettings
from fedsub_app.studies.trials import read_space
from strategies.measurement import Measurement

Run = Callable[..., tuple[Any, Path]]
FILE = f"{PROJECT}/examples/own-method/fedavgm.py"
OURS = f"{FILE}:FedAvgM"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for name in METHODS.keys() - BUILT_IN:
        forget(name)


def test_a_sweeps_range_has_the_type_of_the_methods_key(tmp_path: Path) -> None:
    file, text = tmp_path / "ours.py", Path(FILE).read_text()
    file.write_text(text.replace("beta: Fraction = 0.9", "beta: int = 3"))
    _, space = read_space([f"method={file}:FedAvgM,fedavg", "fedavgm.beta=1..9"])
    assert space["fedavgm.beta"] == IntDistribution(1, 9)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with the entry points ``hsu``, the method of the example, and others that are none."""
    points = install_method(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(sys.modules, "hsu", None)  # so that the test takes out what it imports
    monkeypatch.delitem(sys.modules, "hsu")
    return str(points)


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_files_method_is_the_registered_one_bit_for_bit(run_local: Run, tmp_path: Path) -> None:
    """In this process and on two workers."""
    fedsub_app.register("fedavgm", named_code("method", OURS, Method))
    _, inside = run_local("inside", method="fedavgm", fedavgm__beta=0.5)
    forget("fedavgm")
    _, outside = run_local("outside", method=OURS, fedavgm__beta=0.5)
    keys = json.loads((outside / "settings.json").read_text())["settings"]
    assert (keys["method"], keys["fedavgm.beta"]) == (OURS, 0.5)
    done = fedsub(tmp_path, "run", *pairs(keys | {"run-dir": tmp_path / "two"}), "--workers", "2")
    assert done.code == 0, done.err
    assert model(inside) == model(outside) == model(tmp_path / "two")
    assert rounds(inside) == rounds(outside) == rounds(tmp_path / "two")


def test_the_examples_method_without_momentum_is_fedavg_bit_for_bit(run_local: Run) -> None:
    _, fedavg = run_local("fedavg")
    _, without = run_local("without", method=OURS, fedavgm__beta=0.0)
    assert model(fedavg) == model(without)


def test_the_examples_momentum_by_hand() -> None:
    """Changes of 1 and -2 a round: w = 1, then 1 - 2 + 1/2 = -0.5."""
    settings = resolve({"method": OURS, "fedavgm.beta": 0.5, "model": "feature-mlp"})
    strategy = METHODS[OURS].strategy(settings, torch.nn.Linear(1, 1, bias=False))

    class Mean:
        def __init__(self, value: float) -> None:
            self.value = value

        def result(self, server_lr: float) -> dict[str, torch.Tensor]:
            return {"weight": torch.tensor([[self.value]])}

    strategy.current = {"weight": torch.zeros(1, 1)}
    strategy.commit(strategy.merge(Mean(1.0), []), [])  # type: ignore[arg-type]
    strategy.commit(strategy.merge(Mean(-1.0), []), [])  # type: ignore[arg-type]
    assert float(strategy.current["weight"]) == -0.5


def test_a_run_of_a_files_method_is_resumed(run_local: Run, tmp_path: Path) -> None:
    keys = {"method": OURS, "num_rounds": 4, "keep_checkpoints": 0}
    ends_as_if_never_stopped(run_local, tmp_path, keys)


def test_a_run_of_a_changed_file_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(FILE).read_text())
    settings = resolve({"method": f"{file}:FedAvgM", "run-dir": str(tmp_path / "run")})
    open_run(settings).close()
    file.write_text(file.read_text().replace("0.9", "0.8"))
    assert resolve({"method": f"{file}:FedAvgM"}).flat()["fedavgm.beta"] == 0.8  # the file of now
    with pytest.raises(UserError, match=r"^method = '.*mine.py:FedAvgM': the file has changed since the run in"):
        open_run(settings.model_copy(update={"resume": True}))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"method": f"{FILE}.gone.py:FedAvgM"}, r"^method = '.*gone.py': No such file or directory$"),
        ({"method": f"{FILE}:FedAvgN"}, r"^method = '.*': no Method 'FedAvgN' in .*fedavgm.py; allowed: FedAvgM$"),
        ({"method": f"{FILE}:FedAvgMServer"}, r"^method = .*: no Method 'FedAvgMServer' in .*; allowed: FedAvgM$"),
        ({"method": "no_such_package:Foo"}, r"^method = .*No module named 'no_such_package'"),
        ({"method": "TAKEN:FedAvg"}, r"^method = '.*taken.py:FedAvg': 'fedavg' is the name of a method of fedsub$"),
        ({"method": "TAKEN:_"}, r"^method = '.*taken.py:_': '-' must be lower-case letters and digits"),
        ({"method": "TAKEN:broken"}, r"^method = '.*taken.py:broken': no Method 'broken' in .*; allowed: FedAvg, _$"),
        ({"method": OURS, "fedavgm.bet": 1.0}, r"^fedavgm.bet = 1.0: unknown key; did you mean fedavgm.beta\?$"),
        ({"method": OURS, "fedavgm.beta": 2.0}, r"^fedavgm.beta = 2.0: must be less than or equal to 1$"),
        ({"method": OURS, "fedpart.order": "deep"}, r"^fedpart.order = 'deep': does nothing with method = "),
        ({"method": "hsu"}, "^method = 'hsu': allowed are fedavg, "),
    ],
)
def test_what_is_no_method_is_one_line(keys: dict[str, Any], line: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken.py"
    taken.write_text("from fedsub import Method\nFedAvg = _ = Method('')\nbroken = 3\n")
    with pytest.raises(UserError, match=line):
        resolve(keys | {"method": keys["method"].replace("TAKEN", str(taken))})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"strategy": library.Client}, "strategy = Client: must be a class derived from SubnetStrategy"),
        ({"client": library.SubnetStrategy}, "client = SubnetStrategy: must be a class derived from Client"),
        ({"client": "base:time"}, "client = <module 'time' .*>: must be a class derived from Client"),
        (
            {"client": "mine:Foo"},
            "client = 'mine:Foo': ModuleNotFoundError: No module named 'client_apps.mine'; give the class itself",
        ),
        ({"settings": library.MethodSettings()}, r"settings = MethodSettings\(\): must be a class derived from .*"),
    ],
)
def test_a_method_of_other_classes_is_one_line(keys: dict[str, Any], said: str) -> None:
    """A client and a strategy that are exchanged, an instance, and a place that holds no class."""
    with pytest.raises(UserError, match=f"^Method: {said}$"):
        _ = Method("", **keys).client


@pytest.mark.parametrize(
    ("kind", "default", "said"),
    [
        (float | None, None, "None: must be one text, number, true or false"),
        (list, [1], r"\[1\]: must be one text, number, true or false"),
        (float, float("inf"), "inf: must be a finite number"),
    ],
)
def test_a_default_that_no_setting_can_have_is_refused(kind: Any, default: Any, said: str) -> None:
    """Else every node would refuse the run's settings in round 1."""
    found = type(
        "Mine", (MethodSettings,), {"__annotations__": {"step": kind}, "__module__": __name__, "step": default}
    )
    fedsub_app.register("mine", Method("a test's", found))
    with pytest.raises(UserError, match=f"^mine.step = {said}$"):
        resolve({"method": "mine"})


@pytest.mark.parametrize(
    ("base", "name", "hook"),
    [
        (library.SubnetStrategy, "contributions", "contribution"),
        (library.SubnetStrategy, "mrege", "merge"),
        (library.SubnetStrategy, "setUp", "setup"),
        (library.SubnetStrategy, "remember", "remembers"),
        (library.Client, "fitt", "fit"),
        (METHODS["ist"].strategy, "unit_of", "units_of"),
    ],
)
def test_a_misspelled_hook_is_warned_of(base: type, name: str, hook: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also in a base of the user's own; a class of that name alone would be FedAvg without a message."""
    theirs = type("Theirs", (base,), {name: ()})
    key = "client" if base is library.Client else "strategy"
    for found in (theirs, type("Mine", (theirs,), {})):
        caplog.clear()
        Method("", **{key: found})
        said = f"Theirs.{name}: not a hook; did you mean {hook}? A helper's name may begin with '_'"
        assert [record.message for record in caplog.records] == [said]
    caplog.clear()
    Method("", **{key: type("Mine", (base,), {f"_{name}": (), "helper": (), "momentum": 0.9})})
    assert not caplog.records


def test_a_misspelled_hook_of_a_measurement_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Second(Measurement):
        def contributions(self, update: Any) -> Any:
            return ()

    class Twice(library.SubnetStrategy):
        def setup(self) -> None:
            self.measurement = Second(self)

    fedsub_app.register("twice", Method("a test's", strategy=Twice))
    prepare(resolve({"method": "twice", "dataset": "digits", "model": "feature-mlp"}))
    own = resolve({"method": "twice", "dataset": "own", "model": "own"})
    library.Twice().build(own, ArrayRecord({"w": Array(np.ones(3, np.float32))}))
    said = "Second.contributions: not a hook; did you mean contribution? A helper's name may begin with '_'"
    assert [record.message for record in caplog.records] == [said, said]


def test_no_method_of_ours_misspells_a_hook(caplog: pytest.LogCaptureFixture) -> None:
    """A class at its place in the register is checked as a user's is; one derived from it may override all it has."""
    for method in METHODS.values():
        bases = method.strategy, method.client
        Method("", method.settings, *(type("Mine", (of,), {n: 0 for n in dir(of) if n[0] != "_"}) for of in bases))
    assert not caplog.records


def test_two_files_of_one_name_and_a_file_that_fails(tmp_path: Path) -> None:
    resolve({"method": OURS})
    other = tmp_path / "other.py"
    other.write_text(Path(FILE).read_text().replace("0.9", "0.8"))
    with pytest.raises(UserError, match=r"other.py:FedAvgM': 'fedavgm' is the name of '.*fedavgm.py:FedAvgM' already$"):
        resolve({"method": f"{other}:FedAvgM"})
    other.write_text(Path(FILE).read_text().replace("0.9", "3.0").replace("FedAvgM", "Other"))
    with pytest.raises(UserError, match=r"^other.beta = 3.0: must be less than or equal to 1$"):
        resolve({"method": f"{other}:Other"})
    other.write_text("1 / 0")
    with pytest.raises(UserError, match=r"^method = '.*other.py:Foo': ZeroDivisionError: division by zero$"):
        resolve({"method": f"{other}:Foo"})


def test_an_installed_packages_method(package: str, run_local: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """It has its entry point's name, in the commands and as a strategy of the library too; our own names stay ours."""
    _, file = run_local("file", method=OURS, fedavgm__beta=0.5)
    _, installed = run_local("installed", method="hsu", hsu__beta=0.5)
    assert model(file) == model(installed)
    forget("hsu")
    assert main(["list", "methods"]) == 0
    assert "| hsu | Hsu, Qi, Brown 2019 |" in " ".join(capsys.readouterr().out.split())
    assert library.Hsu(beta=0.5).keys["hsu.beta"] == 0.5
    assert METHODS["fedavg"].title == "FedAvg"
    assert resolve({"method": "fedavg", "lr": 0.1}).method == "fedavg"


def test_the_page_draws_what_a_files_method_reports(run_local: Run, tmp_path: Path) -> None:
    """Also in a process that has not run it."""
    text = (
        Path(FILE).read_text().replace(" for name in self.velocity}})", " for name in self.velocity}}, {'mine': 1.5})")
    )
    drawn = 'reports = {"mine": Reported("My own number", "mine")}'
    text = text.replace('    remembers = ("velocity",)', f'    remembers = ("velocity",)\n    {drawn}')
    (tmp_path / "ours.py").write_text(f"from fedsub_app.common.reported import Reported\n{text}")
    _, run = run_local("run", method=f"{tmp_path}/ours.py:FedAvgM")
    forget(f"{tmp_path}/ours.py:FedAvgM")
    assert main(["report", str(run), "--html", "--out", str(tmp_path / "page")]) == 0
    assert "My own number" in (tmp_path / "page/report.html").read_text()


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("hsu:FedAvgMServer", "^method = 'hsu': hsu:FedAvgMServer is <class .*>, must be a fedsub.Method$"),
        ("hsu:Gone", "^method = 'hsu': hsu:Gone: AttributeError: .*no attribute 'Gone'$"),
        ("not_there:Foo", "^method = 'hsu': not_there:Foo: ModuleNotFoundError: No module named 'not_there'$"),
    ],
)
def test_an_entry_point_that_is_no_method_is_one_line(package: str, place: str, line: str) -> None:
    Path(package).write_text(f"[fedsub.methods]\nhsu = {place}\n")
    with pytest.raises(UserError, match=line):
        resolve({"method": "hsu"})


def test_help_and_plan_of_a_files_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", OURS]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("FedAvg with momentum on the server", "fedavgm.beta", "Fraction of the last round's change"):
        assert words in said
    check({"method": OURS})
    assert f"fedsub run quickstart/digits method={OURS}" in about_method(OURS)
    text = plan(resolve({"method": OURS, "fedavgm.beta": 0.5, "partition": "iid"}))
    assert f"method = '{OURS}'" in text
    assert "fedavgm.beta = 0.5" in text


def test_the_bundle_holds_the_file_and_the_keys() -> None:
    with (
        bundle(resolve({"method": OURS, "fedavgm.beta": 0.5})) as project,
        zipfile.ZipFile(BytesIO(build_fab_from_disk(project))) as fab,
    ):
        keys = tomllib.loads(fab.read("pyproject.toml").decode())["tool"]["flwr"]["app"]["config"]
        held = [fab.read(name) for name in fab.namelist() if name.startswith("fedsub_app/bundle/")]
    assert (keys["fedavgm"], keys["fedpart"]["order"]) == ({"beta": 0.5}, "shallow")
    assert held == [Path(FILE).read_bytes()]


def test_a_node_does_not_run_a_file_that_its_bundle_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "simulated", lambda: False)
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    experiment = tmp_path / "mine.toml"
    experiment.write_text(f"method = '{file}:Foo'\n")
    with pytest.raises(UserError, match=r"^method = .* a node runs code of the run's bundle or of known packages"):
        settings_from(json.dumps({"method": f"{file}:Foo"}))
    settings_from(json.dumps({"experiment": str(experiment)}))
    for key in ("no_such_module:Foo.x", f"{tmp_path}/mine:Foo.x"):
        with pytest.raises(UserError, match="unknown key"):
            settings_from(json.dumps({key: 1}))
    assert not (tmp_path / "ran").exists()
