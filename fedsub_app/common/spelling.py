"""Names that a user types, keys, methods, experiments, and suggestions for those that are unknown; needs no torch."""

import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from datetime import date, time
from typing import TYPE_CHECKING

from fedsub_app.common.conf_files import conf_name, experiment_file, experiments
from fedsub_app.common.errors import UserError, printable, shown

if TYPE_CHECKING:  # pydantic takes its time
    from fedsub_app.common.section import Value


def near(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return ``"did you mean …?"`` with the most similar known word, ``otherwise`` where none is similar."""
    lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), lower, n=1)
    return f"did you mean {lower[found[0]]}?" if found else otherwise


def one_of(word: str, known: Collection[str], *others: str) -> str:
    """Return what is allowed in the place of a wrong word: ``"fedavg, fedprox; did you mean fedavg?"``."""
    return "; ".join(filter(None, [", ".join(known), *others, near(word, known)]))


def check_keys(values: "Mapping[str, Value]", known: Collection[str], source: str = "") -> None:
    """Raise :class:`UserError` for the first unknown key; ``source``: the file that it is in, `` in my.toml``."""
    for key, value in values.items():
        if key not in known:
            hint = near(key, known, "`fedsub list settings` shows the allowed keys")
            raise UserError(f"{printable(key, 80)} = {shown(value)}{source}: unknown key; {hint}")


def check_method(method: object, known: Collection[str]) -> None:
    if method not in known:
        raise UserError(f"method = {shown(method)}: allowed are {one_of(str(method), known)}")


def check_experiment(name: str, source: str = "experiment") -> None:
    """Raise :class:`UserError` for an experiment without a file; ``source``: the key that names it."""
    path = experiment_file(name)
    if not os.path.isfile(path):  # Path.is_file raises OSError where a name is longer than a file's can be
        hint = near(name, experiments())
        raise UserError(f"{source} = {shown(name)}: no {printable(conf_name(path))}{f'; {hint}' if hint else ''}")


def parse_pairs(pairs: Iterable[str]) -> "dict[str, Value]":
    """Turn ``["lr=0.1", "method=fedavg"]`` into values: TOML where it parses, else the text itself."""
    values: dict[str, Value] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise UserError(f"{pair!r}: expected key=value")
        try:
            parsed = tomllib.loads(f"value = {text}")
        except (ValueError, RecursionError):  # not TOML, a number of 5,000 digits, 5,000 brackets
            parsed = {}
        value = parsed["value"] if parsed.keys() == {"value"} else text.strip()
        values[key.strip()] = text.strip() if isinstance(value, date | time) else value  # a folder's name
    return values
