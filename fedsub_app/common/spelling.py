"""Pairs ``key=value`` as a user types them, and suggestions for unknown names; needs no torch."""

import difflib
import tomllib
from collections.abc import Collection, Iterable
from datetime import date, time

from fedsub_app.common.errors import UserError

Value = str | int | float | bool  # of a key, in TOML


def near(word: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return ``"did you mean …?"`` with the most similar known word, ``otherwise`` where none is similar."""
    lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=cutoff)
    return f"did you mean {lower[found[0]]}?" if found else otherwise


def one_of(word: str, known: Collection[str], *others: str) -> str:
    """Return what is allowed in the place of a wrong word: ``"fedavg, fedprox; did you mean fedavg?"``."""
    return "; ".join(filter(None, [", ".join(known), *others, near(word, known)]))


def parse_pairs(pairs: Iterable[str]) -> dict[str, Value]:
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
