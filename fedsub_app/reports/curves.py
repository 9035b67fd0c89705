"""The parts of runs that are drawn and compared: the content of their directories, groups over seeds, curves, costs."""

import json
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import read_json
from fedsub_app.common.score import KINDS, Score, kind_of
from fedsub_app.common.section import Json, Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.runs.config import base_keys, defaults
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import dropped
from fedsub_app.settings import LOCATION_KEYS

# Costs of a run up to a round: the sum of these keys of its lines, over the unit.
COSTS = {
    "MB by formula": (("formula-bytes-down", "formula-bytes-up"), 1e6),
    "GFLOPs": (("flops",), 1e9),
    "seconds in rounds": (("seconds",), 1),
    "device seconds": (("device-seconds",), 1),
}
OPTIONAL = "device seconds"  # of runs with devices; elsewhere it is 0 and left out


@dataclass(frozen=True)
class RunData:
    """The content of a run's directory, ``folder``.

    ``provenance``: the content of settings.json: settings, command, commit, versions, machine. ``lines``: those of
    rounds.jsonl, each with the costs of the run up to its round (``COSTS``).
    """

    folder: Path
    provenance: Json
    lines: list[Json]

    @property
    def settings(self) -> dict[str, Value]:
        """All keys of the run in TOML spelling, the method's own as ``method.key``."""
        return dict(self.provenance["settings"])

    @property
    def score(self) -> Score:
        """The score of the run's task; one whose settings.json names none is of a classification."""
        return Score(**self.provenance.get("score", {}))

    @cached_property
    def summary(self) -> Json:
        """The summary; empty for a run that has not ended."""
        return self._read("summary.json")

    @cached_property
    def partition(self) -> Json:
        """The content of partition.json; empty where there is none."""
        return self._read("partition.json")

    def _read(self, name: str) -> Json:
        return read_json(self.folder / name) if (self.folder / name).exists() else {}

    @property
    def status(self) -> str:
        """How the run ended: ``completed``, ``failed``, or in which round it is."""
        return str(self.summary.get("status") or f"in round {self.lines[-1]['round'] if self.lines else 0}")

    @property
    def dropped(self) -> list[Json]:
        """Refused and missing replies: round, client, reason."""
        return dropped(self.lines)

    @property
    def measured(self) -> Json:
        """The last evaluation of the clients: client -> its numbers."""
        return next((line["evaluated"] for line in reversed(self.lines) if line.get("evaluated")), {})

    @property
    def command(self) -> str:
        """The command that repeats the run: its experiment and the keys that differ from it."""
        settings = self.settings
        method, experiment = str(settings["method"]), str(settings.get("experiment") or "")
        try:
            before = base_keys(experiment, method)
        except UserError:  # an experiment that is no longer there, or a method of another program
            experiment, before = "", base_keys("", method) if method in METHODS else defaults()
        words = ["fedsub", "run", *([shlex.quote(experiment)] if experiment else [])]
        for key, value in settings.items():
            if key not in LOCATION_KEYS and before.get(key) != value:
                words += ["-s", shlex.quote(f"{key}={as_argument(key, value)}")]
        return " ".join(words)


def as_argument(key: str, value: Value) -> str:
    """Return the text from which ``parse_pairs`` reads this value."""
    if isinstance(value, str) and parse_pairs([f"{key}={value}"]) == {key: value}:
        return value
    return json.dumps(value)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, under one label; different sections are not drawn into one picture."""

    label: str
    records: tuple[RunData, ...]
    section: str = ""

    def last(self, key: str) -> list[float]:
        """Return the last measured value of ``key`` of each run that has any."""
        measured = ([line[key] for line in record.lines if key in line] for record in self.records)
        return [values[-1] for values in measured if values]

    def cost(self, cost: str) -> list[float]:
        return [record.lines[-1].get(cost, 0.0) for record in self.records if record.lines]


def named(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with their section in their label if there are several sections."""
    several = len({group.section for group in groups}) > 1
    return [replace(group, label=f"{group.section}: {group.label}") if several else group for group in groups]


class Curve(NamedTuple):
    """A score against rounds and costs, over the seeds of a group.

    ``x``: ``round`` and ``COSTS`` -> mean over the seeds at each point; ``low``, ``high``: mean ∓ a standard deviation.
    """

    label: str
    number: int
    x: Mapping[str, list[float]]
    mean: list[float]
    low: list[float]
    high: list[float]
    score: Score = Score()


LOSS = Score("loss", False, "")


def curve(group: Group, key: str, label: str, number: int, score: Score) -> Curve | None:
    """Return the mean curve of ``key`` at the rounds that all runs of a group with any have measured, or ``None``."""
    every = ({line["round"]: line for line in record.lines if key in line} for record in group.records)
    measured = [lines for lines in every if lines]  # one may have failed, or have just begun
    rounds = sorted(set.intersection(*map(set, measured))) if measured else []
    if not rounds:
        return None
    points = [[lines[number] for lines in measured] for number in rounds]
    mean = [statistics.fmean(line[key] for line in lines) for lines in points]
    spread = [deviation([line[key] for line in lines]) for lines in points]
    x = {of: [statistics.fmean(line.get(of, 0) for line in lines) for lines in points] for of in ("round", *COSTS)}
    low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
    return Curve(label, number, x, mean, low, high, score)


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def costs_of(groups: Sequence[Group]) -> list[str]:
    """Return the costs that any run of some groups has (``COSTS``)."""
    spent = any(line.get(OPTIONAL) for group in groups for record in group.records for line in record.lines[-1:])
    return [cost for cost in COSTS if cost != OPTIONAL or spent]


def kinds_of(groups: Sequence[Group]) -> dict[str, Score]:
    """Return the scores that any run of some groups has measured, by the key of the line."""
    records = [record for group in groups for record in group.records]
    measured = {key for record in records for line in record.lines for key in line}
    return {key: record.score for record in records for key in record.score.keys if key in measured}


def losses_of(groups: Sequence[Group]) -> dict[str, Score]:
    """Return the losses that any run of some groups has measured, by the key of the line."""
    measured = {key for group in groups for record in group.records for line in record.lines for key in line}
    return {key: LOSS for key in (*(f"{kind}-loss" for kind in KINDS), "train-loss") if key in measured}


def curves(
    groups: Sequence[Group], kinds: Callable[[Sequence[Group]], dict[str, Score]] = kinds_of
) -> dict[str, list[Curve]]:
    """Return what is drawn of some groups: the title of a row of pictures -> its curves.

    A row is a score of all groups of a section, a curve a group; where there is one group alone, its scores
    are the curves of one row. ``kinds``: :func:`losses_of` for the losses instead.
    """
    if len(groups) == 1:
        scores = kinds(groups)
        found = [curve(groups[0], key, kind_of(key), k, score) for k, (key, score) in enumerate(scores.items())]
        return {next(iter(scores.values())).name: [line for line in found if line]} if any(found) else {}
    rows: dict[str, list[Curve]] = {}
    several = len({group.section for group in groups}) > 1
    for section in dict.fromkeys(group.section for group in groups):
        numbered = [(number, group) for number, group in enumerate(groups) if group.section == section]
        for key, score in kinds([group for _, group in numbered]).items():
            title = f"{kind_of(key)} {score.name}" + f", {section}" * several
            lines = (curve(group, key, group.label, number, score) for number, group in numbered)
            rows[title] = [line for line in lines if line]
    return {title: lines for title, lines in rows.items() if lines}
