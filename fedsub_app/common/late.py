"""Packages and modules that are imported on the first use of a name: names and settings load without torch."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Import within this block without garbage collection: 500 collections take 0.2 s and free nothing of torch's."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def alone(package: str, module: str) -> ModuleType:
    """Return a module of a package without running the package's own code, which may import much more."""
    if package in sys.modules or (spec := find_spec(package)) is None:
        return import_module(f"{package}.{module}")
    sys.modules[package] = module_from_spec(spec)
    try:
        return import_module(f"{package}.{module}")
    finally:
        del sys.modules[package]


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
    """A module that is imported on the first use of one of its names."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        with uncollected():
            return getattr(import_module(self._module), name)
