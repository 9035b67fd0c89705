"""Files that a run on Flower takes along: absolute paths of data, copies of own code."""

import json
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from fedsub_app.common.errors import UserError
from fedsub_app.common.own_code import bundled
from fedsub_app.common.section import Value
from fedsub_app.config import TABLE
from fedsub_app.data.settings import SOURCES
from fedsub_app.deployment.flower import PROJECT
from fedsub_app.methods import BUILT_IN
from fedsub_app.problem import own_code
from fedsub_app.settings import Settings


def local_paths(settings: Settings) -> dict[str, Value]:
    """Return the settings that name files of the working directory, with absolute paths."""
    paths: dict[str, Value] = {}
    for key in ("dataset", "model", "tokenizer"):
        kind, _, name = str(getattr(settings, key)).partition(":")
        if kind in (*SOURCES, "transformers") and name and not Path(name).is_absolute() and any(Path().glob(name)):
            paths[key] = f"{kind}:{Path(name).absolute()}"
    return paths


@contextmanager
def bundle(settings: Settings) -> Iterator[Path]:
    """Yield the folder of which Flower makes a run's bundle: the checkout, or a copy of it with the user's files."""
    own = {key: text for key, text in own_code(settings.flat()).items() if text.rpartition(":")[0].endswith(".py")}
    if not own and settings.method in BUILT_IN:
        yield PROJECT
        return
    included = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["fab-include"]
    with TemporaryDirectory(prefix="fedsub-") as folder:
        files = {path: path.relative_to(PROJECT) for pattern in included for path in PROJECT.glob(pattern)}
        for path, name in files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, Path(folder) / name)
        if settings.method not in BUILT_IN:  # Flower refuses keys that are not there
            lines = [f"{key} = {json.dumps(value)}" for key, value in settings.options.toml().items()]
            with (Path(folder) / "pyproject.toml").open("a") as file:
                file.write("\n".join(["", f"[{TABLE}.{settings.section}]", *lines, ""]))
        for key, text in own.items():
            copy = Path(folder) / bundled(text).relative_to(PROJECT)
            copy.parent.mkdir(exist_ok=True)
            try:
                shutil.copyfile(text.rpartition(":")[0], copy)
            except OSError as error:
                raise UserError(f"{key} = {text!r}: {error.strerror or error}") from error
        yield Path(folder)
