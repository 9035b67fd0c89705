"""The space of a sweep: values and ranges of settings from the command line, as Optuna's distributions."""

import re
from collections.abc import Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.config import defaults, is_list

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(:log)?")
SWEEP_KEYS = ("experiment", "run-dir", "resume")  # keys that the sweep sets itself

Values = CategoricalDistribution | FloatDistribution | IntDistribution
Space = dict[str, Values]


def read_space(pairs: Sequence[str]) -> tuple[dict[str, Value], Space]:
    """Return the keys that have one value, and those to search: ``lr=0.1``; ``lr=0.01,0.1``, ``lr=0.01..0.1:log``.

    A comma belongs to the value of keys that are lists themselves; several such values are a TOML array.
    """
    fixed: dict[str, Value] = {}
    space: Space = {}
    for pair in pairs:
        ((key, value),) = parse_pairs([pair]).items()
        text = pair.partition("=")[2].strip()
        if key in SWEEP_KEYS:
            raise UserError(f"-s {key}: a sweep sets it itself; allowed are the other keys")
        if key == "seed" and ("," in text or ".." in text):
            raise UserError(f"seed = {text}: must be one number, that of the first run; --seeds N runs N of them")
        if match := RANGE.fullmatch(text):
            space[key] = _range(f"{key} = {text}", defaults().get(key, 0.0), *match.groups())
            continue
        parsed: Any = value
        values: Sequence[Any] = parsed if isinstance(parsed, list) else [parsed]  # a TOML list
        if value == text and "," in text and not is_list(key):  # text that is in no quotes
            values = [parse_pairs([f"{key}={word}"])[key] for word in text.split(",") if word.strip()]
        values = list(dict.fromkeys(values)) if all(isinstance(each, str | int | float) for each in values) else [value]
        if len(values) > 1:
            space[key] = CategoricalDistribution(values)
        else:
            fixed[key] = values[0]
    if not space:
        raise UserError("nothing to search: give a key several values, -s lr=0.01,0.1, or a range, -s lr=0.01..0.1:log")
    return fixed, space


def _range(pair: str, default: Value, first: str, last: str, log: str | None) -> FloatDistribution | IntDistribution:
    """``default``: of the key; that of an unknown key, which is refused with the first trial, is any number."""
    low, high = float(first), float(last)
    if isinstance(default, bool | str):
        raise UserError(f"{pair}: only a number has a range; values to try stand with commas")
    if not low < high:
        raise UserError(f"{pair}: the first number must be below the second")
    if log and low <= 0:
        raise UserError(f"{pair}: must be above 0 on a logarithmic scale")
    if not isinstance(default, int):
        return FloatDistribution(low, high, log=bool(log))
    if not (low.is_integer() and high.is_integer()):
        raise UserError(f"{pair}: must be from one integer to another")
    return IntDistribution(int(low), int(high), log=bool(log))


def as_written(values: Values) -> Any:
    """Return the values of a list, or a range as it is written on the command line."""
    if isinstance(values, CategoricalDistribution):
        return list(values.choices)
    return f"{values.low:g}..{values.high:g}" + ":log" * values.log


def values_of(values: Values) -> list[Any]:
    """Return the values of a list, or both ends of a range."""
    return list(values.choices) if isinstance(values, CategoricalDistribution) else [values.low, values.high]
