"""The files of conf/, experiments and tables, by their names; nothing here loads torch."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError


@cache
def conf_folder() -> Path:
    """Return the folder of experiments and tables: beside the packages, or in a wheel inside fedsub_app."""
    here = Path(__file__).resolve().parents[1]
    return here / "conf" if (here / "conf").exists() else here.parent / "conf"


def experiments() -> dict[str, Path]:
    """Return the experiments' files by name, ``<paper>/<experiment>``."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(conf_folder().glob("*/*.toml"))}


def tables() -> dict[str, Path]:
    """Return the tables' files by name, ``<paper>-<name>``."""
    return {f"{path.parent.parent.name}-{path.stem}": path for path in sorted(conf_folder().glob("*/tables/*.toml"))}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{conf_name(path)}: not valid TOML: {reason}") from None


def conf_name(path: Path) -> str:
    """Return a file's name in messages: ``conf/<paper>/<experiment>.toml``, or the path itself outside of conf/."""
    inside = path.is_relative_to(conf_folder())
    return f"conf/{path.relative_to(conf_folder()).as_posix()}" if inside else str(path)


def is_file(name: str) -> bool:
    """Say whether an experiment or a table is given as the path of a file, which ends in ``.toml``."""
    return name.endswith(".toml")


def experiment_file(experiment: str) -> Path:
    return Path(experiment) if is_file(experiment) else conf_folder() / f"{experiment}.toml"
