"""Arguments of several commands: an experiment, ``key=value`` behind it, ``-s``, and the words that complete them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.common.conf_files import experiments
from fedsub_app.common.errors import UserError


# Completions: typer leaves out those that do not begin as the word does.
def complete_methods() -> list[str]:
    from fedsub_app.runs.methods import METHODS, installed

    return list(dict.fromkeys([*METHODS, *installed().names]))


def complete_keys(incomplete: str) -> list[str]:
    from fedsub_app.runs.config import defaults  # on demand: pydantic is half of the start

    if incomplete.startswith("method="):
        return [f"method={name}" for name in complete_methods()]
    return [f"{key}=" for key in defaults()]


def complete_experiments(incomplete: str) -> list[str]:
    return [*experiments(), *complete_keys(incomplete)]


Words = Annotated[
    list[str] | None,
    Argument(
        metavar="[EXPERIMENT] [KEY=VALUE]...",
        help="conf/<experiment>.toml or the path of a TOML file, and settings on top of it",
        autocompletion=complete_experiments,
        show_default=False,
    ),
]
Pairs = Annotated[
    list[str] | None,
    Option("-s", "--set", metavar="KEY=VALUE", help="a setting, as KEY=VALUE alone", autocompletion=complete_keys),
]
Workers = Annotated[
    int | None, Option(metavar="N", min=1, max=1000, help="runs at a time (default: as many as GPUs, else cores)")
]

Slurm = Annotated[
    list[str] | None,
    Option(
        metavar="KEY=VALUE",
        help="make each run a job of a Slurm cluster, e.g. slurm_partition=gpu (keys of submitit); may be repeated",
    ),
]


def split(words: Iterable[str] | None, pairs: Iterable[str] | None = None) -> tuple[str, list[str]]:
    """Return the one word that is no ``key=value``, "" without one, and the pairs, those of ``-s`` last."""
    names = [word for word in words or () if "=" not in word or (word.endswith(".toml") and Path(word).is_file())]
    if len(names) > 1:
        raise UserError(f"{names[1]!r}: expected key=value behind {names[0]}")
    if "" in names:  # a shell's variable without a value
        raise UserError("experiment = '': must be a name of `fedsub list`, a TOML file or left out")
    return (names or [""])[0], [*(word for word in words or () if word not in names), *(pairs or ())]
