"""bench/ takes minutes to hours to run; what is tested is that its modules find what they import."""

import importlib
import json
import pkgutil

import pytest

import bench
from bench import networks
from fedsub_app.runs.methods import METHODS


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(bench.__path__)])
def test_a_module_is_imported(name: str) -> None:
    importlib.import_module(f"bench.{name}")


def test_the_page_has_the_table_of_networks() -> None:
    results = json.loads(networks.OUT.read_text())["networks"]
    assert networks.table(results) in (networks.PROJECT / "docs/own-network.md").read_text()
    assert all(found["methods"].keys() <= METHODS.keys() for found in results.values())
    assert len([name for name, found in results.items() if list(found["methods"].values()).count("") >= 21]) >= 13


@pytest.mark.run
def test_a_cell_of_the_table() -> None:
    assert networks.outcome("bench.networks:TwoLayers", "ist") == ""
    said = networks.outcome("torchvision:squeezenet1_1", "fedpac")
    assert said == "model = 'torchvision:squeezenet1_1': its head is no Linear layer, which fedpac combines"
