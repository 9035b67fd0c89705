"""The start: what names, settings and costs load, and what they do not."""

import gc
import subprocess
import sys

import pytest

from client_apps.base import Client
from fedsub_app.common.late import uncollected
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.models import model_names
from fedsub_app.models.networks import _CONV_NETS, _MLPS
from fedsub_app.runs.methods import METHODS
from fedsub_app.settings import MethodSettings
from strategies.base import SubnetStrategy

NAMES = """
from fedsub_app.runs.config import as_toml, describe, resolve
from fedsub_app.data import dataset_names
from fedsub_app.runs.methods import METHODS
from fedsub_app.models import model_names
from fedsub_app.deployment.engines import log_lines
from fedsub_app.reports import pictures
from fedsub_app.runs.recorded import settings_of
from fedsub_app.studies import tables
assert all((describe(), as_toml(), dataset_names(), model_names(), [m.description for m in METHODS.values()]))
resolve({"method": "fedselect"})
"""


def loaded(program: str) -> set[str]:
    """Return the modules that a program has loaded at its end."""
    command = [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_names_and_settings_need_neither_torch_nor_flower() -> None:
    assert not {"torch", "numpy", "flwr", "ray"} & loaded(NAMES)


def test_a_partition_of_flwr_datasets_does_not_load_its_pictures() -> None:
    """seaborn and scipy take 1.3 s. The package itself can be imported afterwards, with the same partitioners."""
    program = """
from fedsub_app.cli.main import main
assert main(["run", "quickstart/digits", "partition=dirichlet", "--dry-run"]) == 0
"""
    package = """
from flwr_datasets import FederatedDataset, partitioner
assert partitioner.ShardPartitioner is sys.modules["flwr_datasets.partitioner"].ShardPartitioner
assert FederatedDataset
"""
    assert not {"seaborn", "scipy"} & loaded(program)
    assert "seaborn" in loaded(program + package)


def test_the_places_of_the_methods_are_there() -> None:
    for about in METHODS.values():
        assert issubclass(about.settings, MethodSettings)
        assert issubclass(about.strategy, SubnetStrategy)
        assert issubclass(about.client, Client)


def test_every_network_has_a_description() -> None:
    assert {n for n in model_names() if not n.startswith("resnet18")} == {*_CONV_NETS, *_MLPS}


def test_flops_need_no_compiler() -> None:
    """torch._dynamo takes longer to import than a short run takes."""

    program = """
from fedsub_app.runs.config import resolve
from fedsub_app.training.problem import Problem
from fedsub_app.training.costs import forward_flops
problem = Problem.of(resolve({}))
assert forward_flops(problem, problem.network())
"""
    assert "torch._dynamo" not in loaded(program)


def test_imports_run_without_garbage_collection_and_it_returns_as_it_was() -> None:
    def failing() -> None:
        with uncollected():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        failing()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
