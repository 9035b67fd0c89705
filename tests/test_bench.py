"""bench/ takes minutes to hours to run; what is tested is that its modules find what they import."""

import importlib
import pkgutil

import pytest

import bench


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(bench.__path__)])
def test_a_module_is_imported(name: str) -> None:
    importlib.import_module(f"bench.{name}")
