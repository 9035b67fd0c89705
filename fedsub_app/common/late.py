"""Packages and modules that are imported when a name is asked for: names and settings are there without torch."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def late(package: str, *modules: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose public names are those of its modules, tried in this order."""

    def get(name: str) -> Any:
        for module in () if name.startswith("_") else modules:
            home = import_module(f"{package}.{module}")
            if hasattr(home, name):
                return getattr(home, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


class Late:
    """A module, imported when one of its names is asked for."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)
