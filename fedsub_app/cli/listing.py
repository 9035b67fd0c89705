"""``fedsub list`` and ``fedsub cp``: names that settings can have, the settings, and an experiment of one's own."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument

from fedsub_app.cli.arguments import complete_experiments
from fedsub_app.common.conf_files import experiments, tables
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.spelling import near
from fedsub_app.common.text import markdown, show


class Kind(StrEnum):
    METHODS = "methods"
    DATASETS = "datasets"
    MODELS = "models"
    EXPERIMENTS = "experiments"
    TABLES = "tables"
    SETTINGS = "settings"


def list_names(
    what: Annotated[Kind | None, Argument(help="default: all but the settings")] = None,
) -> None:
    """List methods, datasets, models, experiments, tables or settings."""
    texts = []
    for kind in [what] if what else list(Kind)[:-1]:
        header = ("key", "default", "allowed", "meaning") if kind is Kind.SETTINGS else (kind[:-1], "about")
        rows = [[name, *columns] for name, columns in _entries(kind).items()]
        texts.append(f"## {kind.capitalize()}\n\n{markdown(header, rows)}")
    show("\n\n".join(texts))


def _entries(kind: Kind) -> dict[str, list[str]]:
    """Return the names of a kind, each with its cells; these packages are loaded without torch, but on demand."""
    match kind:
        case Kind.METHODS:
            from fedsub_app.config import register_installed
            from fedsub_app.methods import METHODS

            register_installed()
            return {name: [method.description] for name, method in METHODS.items()}
        case Kind.MODELS:
            from fedsub_app.models import model_names

            return {name: [about] for name, about in model_names().items()}
        case Kind.SETTINGS:
            from fedsub_app.config import describe

            return {key: [*cells] for key, cells in describe().items()}
        case Kind.DATASETS:
            from fedsub_app.data import dataset_names

            return {name: [about] for name, about in dataset_names().items()}
    files = experiments() if kind is Kind.EXPERIMENTS else tables()
    return {name: [path.read_text().partition("\n")[0].removeprefix("#").strip()] for name, path in files.items()}


def copy(
    name: Annotated[str, Argument(help="an experiment or a table", autocompletion=complete_experiments)],
    target: Annotated[Path, Argument(metavar="FILE", help="a new file, my.toml")],
) -> None:
    """Copy an experiment or a table to a file that you can change and run."""
    files = experiments() | tables()
    if name not in files:
        raise UserError(
            f"cp {name}: {near(name, files, '`fedsub list experiments` and `fedsub list tables` show the names')}"
        )
    if target.suffix != ".toml":
        raise UserError(f"cp {name} {target}: the file's name must end in .toml")
    if target.exists():
        raise UserError(f"{target}: there already")
    # An experiment that extends its neighbour names it in full, so that it is found from anywhere.
    paper = files[name].parent.name
    text = re.sub(r'(?m)^extends = "([^"/]+)"', rf'extends = "{paper}/\1"', files[name].read_text())
    write_atomic(target, text.encode())
    print(f"fedsub {'run' if name in experiments() else 'reproduce'} {target}")
