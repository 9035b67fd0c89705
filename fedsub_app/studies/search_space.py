"""The space of a sweep: values and ranges of settings from the command line, and points of that space."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.config import defaults, is_list

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(:log)?")
SWEEP_KEYS = ("experiment", "run-dir", "resume")  # keys that the sweep sets itself


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; ``whole``: integers; ``log``: uniform in their logarithm."""

    low: float
    high: float
    log: bool
    whole: bool

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}" + ":log" * self.log

    def number(self, drawn: float) -> float | int:
        """Return a number of the range near one that was drawn: with four digits, or a whole one."""
        near = int(drawn) if self.whole else float(f"{drawn:.4g}")
        return type(near)(min(max(near, self.low), self.high))


Choices = tuple[Value, ...]
Space = dict[str, Choices | Range]


def read_space(pairs: Sequence[str]) -> tuple[dict[str, Value], Space]:
    """Return the keys that have one value, and those to search: ``lr=0.1``; ``lr=0.01,0.1``, ``lr=0.01..0.1:log``.

    A comma belongs to the value of keys that are lists themselves; several such values are a TOML array.

    Raises
    ------
    UserError
        A range is none or is of a key that is no number, or there is nothing to search.
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
            space[key] = _range(key, *match.groups())
            continue
        parsed: Any = value
        values: Sequence[Any] = parsed if isinstance(parsed, list) else [parsed]  # a TOML list
        if value == text and "," in text and not is_list(key):  # text that is in no quotes
            values = [parse_pairs([f"{key}={word}"])[key] for word in text.split(",") if word.strip()]
        values = list(dict.fromkeys(values)) if all(isinstance(each, str | int | float) for each in values) else [value]
        if len(values) > 1:
            space[key] = tuple(values)
        else:
            fixed[key] = values[0]
    if not space:
        raise UserError("nothing to search: give a key several values, -s lr=0.01,0.1, or a range, -s lr=0.01..0.1:log")
    return fixed, space


def _range(key: str, low: str, high: str, log: str | None) -> Range:
    default = defaults().get(key, 0.0)  # an unknown key is refused with the first trial
    if isinstance(default, bool | str):
        raise UserError(f"{key} = {low}..{high}: only a number has a range; values to try stand with commas")
    limits = Range(float(low), float(high), bool(log), isinstance(default, int))
    if not limits.low < limits.high:
        raise UserError(f"{key} = {limits}: the first number must be below the second")
    if log and limits.low <= 0:
        raise UserError(f"{key} = {limits}: must be above 0 on a logarithmic scale")
    if limits.whole and not (limits.low.is_integer() and limits.high.is_integer()):
        raise UserError(f"{key} = {limits}: must be from one integer to another")
    return limits


def each_value(space: Space) -> list[dict[str, Value]]:
    """Return trials in which each value of a list, and both ends of a range, are tried beside the first of the others.

    A key of a method that is itself searched is tried with that method.
    """
    ends = {
        key: [values.number(values.low), values.number(values.high)] if isinstance(values, Range) else values
        for key, values in space.items()
    }
    trials = []
    for key, values in ends.items():
        keys = {each: found[0] for each, found in ends.items()}
        if (method := key.partition(".")[0]) in ends.get("method", ()):
            keys["method"] = method
        trials += [keys | {key: value} for value in values]
    return trials


def draw(space: Space, seed: int) -> dict[str, Value]:
    """Return a random point."""
    from scipy.stats import loguniform, uniform
    from sklearn.model_selection import ParameterSampler

    spread: dict[str, Any] = {}
    for key, values in space.items():
        if not isinstance(values, Range):
            spread[key] = list(values)
        elif values.log:
            spread[key] = loguniform(values.low, values.high + values.whole)
        else:
            spread[key] = uniform(values.low, values.high + values.whole - values.low)
    (drawn,) = ParameterSampler(spread, 1, random_state=seed % 2**32)
    return _rounded(space, drawn)


def propose(
    space: Space, seed: int, ended: Iterable[tuple[Mapping[str, Value], float]], high_is_good: bool = True
) -> dict[str, Value]:
    """Return the point that Optuna's TPE proposes after those that have ended, each with its metric."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spread: dict[str, BaseDistribution] = {}
    for key, values in space.items():
        if not isinstance(values, Range):
            spread[key] = optuna.distributions.CategoricalDistribution(values)
        elif values.whole:
            spread[key] = optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.log)
        else:
            spread[key] = optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)
    direction: Literal["maximize", "minimize"] = "maximize" if high_is_good else "minimize"
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=seed % 2**32))
    for keys, value in ended:
        params = {key: keys[key] for key in spread}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=spread, value=value))
    return _rounded(space, study.ask(spread).params)


def _rounded(space: Space, point: Mapping[str, Any]) -> dict[str, Value]:
    return {
        key: values.number(point[key]) if isinstance(values, Range) else point[key] for key, values in space.items()
    }
