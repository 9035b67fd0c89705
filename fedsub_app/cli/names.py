"""Methods, networks and settings with their texts, kept in the cache: their classes take half a second to load."""

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fedsub_app.common.code import code_digest
from fedsub_app.common.files import write_atomic


@cache
def known() -> dict[str, Any]:
    """Return ``methods`` (name -> paper, about, preset), and ``datasets``, ``models``, ``settings`` (name -> text).

    The file is of this very code; where there is none it is written.
    """
    folder = Path(os.environ.get("FEDSUB_CACHE") or "~/.cache/fedsub").expanduser()
    path = folder / f"names-{code_digest()}.json"
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    content = _read()
    with suppress(OSError):  # a home that cannot be written
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("names-*.json"):
            old.unlink(missing_ok=True)
        write_atomic(path, json.dumps(content).encode())
    return content


def _read() -> dict[str, Any]:
    import inspect
    import sys

    from fedsub_app.config import describe
    from fedsub_app.data import dataset_names
    from fedsub_app.methods import METHODS
    from fedsub_app.models import model_names

    methods = {}
    for name, method in METHODS.items():
        about = inspect.getdoc(sys.modules[method.strategy.__module__]) or ""
        methods[name] = {"paper": method.description, "about": about, "preset": dict(method.preset)}
    datasets = dataset_names(str(Path(__file__).parent))  # a folder without data of the user
    return {"methods": methods, "datasets": datasets, "models": model_names(), "settings": describe()}
