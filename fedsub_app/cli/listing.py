"""``fedsub list``: names that settings can have, and the settings themselves."""

import argparse
from pathlib import Path
from typing import Any

from fedsub_app.common.conf_files import experiments, tables
from fedsub_app.common.errors import UserError

KINDS = ("methods", "datasets", "models", "experiments", "tables", "settings")


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    names = commands.add_parser("list", help="methods, datasets, models, experiments, tables, settings")
    names.add_argument("what", nargs="?", choices=KINDS, help="default: all but the settings")
    names.add_argument("--toml", action="store_true", help="settings: as pyproject.toml has to name them to Flower")
    names.set_defaults(command=_list)


def _list(options: argparse.Namespace) -> int:
    if options.toml:
        if options.what != "settings":
            raise UserError("--toml: only of the settings, `fedsub list settings --toml`")
        from fedsub_app.config import as_toml

        print(as_toml(), end="")
        return 0
    for what in [options.what] if options.what else KINDS[:-1]:
        entries = _entries(what)
        print(f"{what}:")
        width = max(map(len, entries), default=0)
        for name, about in entries.items():
            print(f"  {name:<{width}}  {about}".rstrip().replace("\n", "\n" + " " * (width + 4)))
    return 0


def _entries(kind: str) -> dict[str, str]:
    """Return the names of a kind, each with its description."""
    match kind:
        case "methods":
            from fedsub_app.methods import METHODS

            return {name: method.description for name, method in METHODS.items()}
        case "datasets":
            from fedsub_app.data import dataset_names

            return dataset_names()
        case "models":
            from fedsub_app.models import model_names

            return model_names()
        case "settings":
            from fedsub_app.config import describe

            return describe()
    files = experiments() if kind == "experiments" else tables()
    return {name: _first_comment(path) for name, path in files.items()}


def _first_comment(path: Path) -> str:
    first = path.read_text().partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("#") else ""
