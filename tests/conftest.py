"""What several tests share.

With ``-n`` the process that hands the tests out reads this file too, and runs none: what takes long to import stands
where it is used.
"""

import atexit
import gc
import inspect
import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from helpers import Brightness

    from fedsub_app.common.section import Value
    from fedsub_app.common.tensors import Json

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script: runs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The suite runs on the CPU: no process of it sees a GPU, and device = "auto" is "cpu"; but with ``-m gpu``."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    gc.disable()  # imports and parameters stay
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)  # as in every run; several tests at a time would wait for each other's threads
    # Property tests draw the same cases in every run; `pytest --hypothesis-profile=search` draws new ones.
    settings.register_profile("search", deadline=None)
    settings.register_profile("same", deadline=None, derandomize=True)
    settings.load_profile("same")


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, among what tests make, and at the exit everywhere: extensions name leaks."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


# A test whose code names one of these starts a run or a process; so does one whose fixtures' code or helpers' does.
STARTERS = {
    "run_experiment", "main", "subprocess", "get_context", "deployed", "new_method", "NotebookClient", "run_job",
    "LocalGrid", "load_config",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start a run or a process: ``pytest -m "not run"`` leaves them out."""
    known: dict[tuple[Any, ...], bool] = {}  # a test has many parameters
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        functions = (item.obj, *(definitions[-1].func for definitions in fixtures))  # type: ignore[attr-defined]
        if functions not in known:
            known[functions] = bool(_names([*functions]) & STARTERS)
        if known[functions]:
            item.add_marker("run")


def _names(objects: list[Any]) -> set[str]:
    """Return the names in the code of the functions of tests/ among ``objects``, and of those that they name."""
    names, seen = set[str](), set[FunctionType]()
    for thing in objects:
        if not callable(thing):  # a module such as fedsub looks its attributes up among all installed packages
            continue
        function = inspect.unwrap(getattr(getattr(thing, "hypothesis", thing), "inner_test", thing))
        if isinstance(function, FunctionType) and function not in seen and _is_of_tests(function):
            seen.add(function)
            new = _names_in(function.__code__)
            names |= new
            objects += [function.__globals__.get(name) for name in new]
    return names


def _names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _is_of_tests(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(str(Path(__file__).parent))


# Small enough that a run takes a second: digits, a small network, three rounds.
SMALL: "dict[str, Value]" = {
    "weighting": "uniform",  # of fedavg, with which many methods are compared, as of these methods
    "model": "feature-mlp",
    "method": "fedavg",
    "num-rounds": 3,
    "lr": 0.05,
    "batch-size": 64,
}


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """A run of a test waits some twenty times for the disk; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr("fedsub_app.common.files.flush", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _draws_are_not_those_of_other_tests() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _runs_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSUB_RUNS", str(tmp_path / "runs"))


@pytest.fixture(autouse=True)
def _methods_of_files_are_forgotten() -> Iterator[None]:
    from helpers import METHODS, forget

    yield
    for name in [name for name in METHODS if ":" in name]:
        forget(name)


@pytest.fixture(autouse=True)
def _log_of_this_test_only() -> Iterator[None]:
    """The command logs to the stdout of now, which is closed when the test is over."""
    log = logging.getLogger("fedsub")
    handlers, propagate = log.handlers[:], log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and an empty cache."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("FEDSUB_DATA", str(folder))
    monkeypatch.setenv("FEDSUB_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def brightness(monkeypatch: pytest.MonkeyPatch) -> "type[Brightness]":
    """Networks that take no time in the place of the backbones, whose features are then kept in groups of four."""
    from helpers import Brightness

    from fedsub_app.data import features

    sizes = {"resnet101": 2048, "densenet121": 1024}
    monkeypatch.setattr(features.Backbone, "build", lambda self: Brightness(sizes[self.name]))
    monkeypatch.setattr(features, "GROUP", 4)
    Brightness.seen = 0
    return Brightness


def run_small(folder: Path, grid: Any = None, **keys: "Value") -> "Json":
    """Run with ``SMALL`` and the given keys, but those of methods that do not run; ``grid``: the local engine's."""
    from fedsub_app.client_app import app
    from fedsub_app.federation.local_grid import LocalGrid
    from fedsub_app.runs.config import applicable_keys
    from fedsub_app.runs.loop import run_experiment
    from fedsub_app.runs.recorded import settings_of

    overrides = SMALL | {name.replace("__", ".").replace("_", "-"): value for name, value in keys.items()}
    overrides = applicable_keys(overrides) | {"run-dir": str(folder)}
    return run_experiment((grid or LocalGrid)(app, overrides), settings_of(overrides))


@pytest.fixture
def run_local(tmp_path: Path) -> "Callable[..., tuple[Json, Path]]":
    """Run with :func:`run_small` in a folder of the test's own; returns the summary and the run directory."""

    def run(folder: str = "run", grid: Any = None, **keys: "Value") -> "tuple[Json, Path]":
        return run_small(tmp_path / folder, grid, **keys), tmp_path / folder

    return run


@pytest.fixture
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the networks tanh for ReLU and the average for the maximum, so that rounding can flip neither.

    For a run in float32 against its reference in float64, in this process: one flip more or less moves a weight by as
    much as a step, and which inputs are that close to an edge is up to the processor's kernels.
    """
    from torch.nn import ReLU
    from torch.nn.functional import avg_pool2d, tanh

    from fedsub_app.models.networks import MaxPool

    for layer, forward in ((ReLU, lambda self, x: tanh(x)), (MaxPool, lambda self, x: avg_pool2d(x, 2))):
        forward.__module__ = layer.__module__  # still a library's layer, whose units are known
        monkeypatch.setattr(layer, "forward", forward)


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the directory of a run with :func:`run_small`, made once for all tests that name the same keys.

    No test may change it.
    """

    @cache
    def run(**keys: "Value") -> Path:
        folder = tmp_path_factory.mktemp("shared") / "run"
        run_small(folder, **keys)
        return folder

    return run
