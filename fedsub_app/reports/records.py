"""Finished and running runs, read from their directories, and groups of runs over seeds."""

import json
import os
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedsub_app.common.errors import UserError, escaped
from fedsub_app.common.files import read_json
from fedsub_app.common.score import KINDS, Score, kind_of
from fedsub_app.common.section import Json, Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.config import base_keys, defaults
from fedsub_app.methods import METHODS
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import LOCATION_KEYS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

# Costs of a run up to a round: the sum of these keys of its lines, over the unit.
COSTS = {
    "MB by formula": (("formula-bytes-down", "formula-bytes-up"), 1e6),
    "GFLOPs": (("flops",), 1e9),
    "seconds in rounds": (("seconds",), 1),
    "device seconds": (("device-seconds",), 1),
}
OPTIONAL = "device seconds"  # of runs with devices; elsewhere it is 0 and left out
NOT_COMPARED = (*LOCATION_KEYS, "seed")


@dataclass(frozen=True)
class Record:
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
        return [
            {"round": line["round"], **drop}
            for line in self.lines
            for drop in (*line.get("dropped", ()), *line.get("not-evaluated", ()))
        ]

    @property
    def measured(self) -> Json:
        """The last evaluation of the clients: client -> its numbers."""
        return next((line["evaluated"] for line in reversed(self.lines) if line.get("evaluated")), {})

    def model(self) -> "nn.Module":
        """Return the network with the final global model, in evaluation mode; the run's data must be here."""
        from fedsub_app.problem import Problem
        from fedsub_app.runs.checkpoint import global_network
        from fedsub_app.runs.recorded import settings_of

        return global_network(self.folder, Problem.of(settings_of({"run-dir": str(self.folder), "resume": True})))

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row a round: the numbers of rounds.jsonl and the costs so far."""
        import pandas as pd

        plain = [{k: v for k, v in line.items() if not isinstance(v, dict | list)} for line in self.lines]
        return pd.DataFrame(plain).set_index("round")

    def plot(self) -> "Figure":
        from fedsub_app.reports.pictures import figure_of_curves

        return figure_of_curves([Group(str(self.settings["method"]), (self,))])

    def _repr_png_(self) -> bytes | None:
        picture = BytesIO()
        if kinds_of([self]):
            self.plot().savefig(picture, format="png", dpi=90)
        return picture.getvalue() or None

    @property
    def command(self) -> str:
        """The command that repeats the run: its experiment and the keys that differ from it."""
        settings = self.settings
        experiment = str(settings.get("experiment") or "")
        try:
            before = base_keys(experiment, str(settings["method"]))
        except UserError:  # an experiment that is no longer there, or a method of another program
            method = str(settings["method"])
            experiment, before = "", base_keys("", method) if method in METHODS else defaults()
        words = ["fedsub", "run", *([experiment] if experiment else [])]
        for key, value in settings.items():
            if key not in LOCATION_KEYS and before.get(key) != value:
                words += ["-s", shlex.quote(f"{key}={as_argument(key, value)}")]
        return " ".join(words)


def as_argument(key: str, value: Value) -> str:
    """Return the text from which ``parse_pairs`` reads this value."""
    if isinstance(value, str) and parse_pairs([f"{key}={value}"]) == {key: value}:
        return value
    return json.dumps(value)


def read_run(folder: Path) -> Record:
    """Return the record of the run in a directory; :class:`UserError` where it is none, or a file is damaged."""
    path = folder / "settings.json"
    if not path.is_file():
        raise UserError(f"{folder}: not the directory of a run (no readable settings.json)")
    provenance = read_json(path)
    settings = provenance.get("settings")
    if not isinstance(settings, dict) or not {"method", "seed"} <= settings.keys():
        raise UserError(f"{path}: not a run's settings")
    lines = read_rounds(folder)
    for cost, (keys, unit) in COSTS.items():
        total = 0.0
        for line in lines:
            total += sum(line.get(key) or 0 for key in keys) / unit
            line[cost] = total
    return Record(folder, provenance, lines)


def costs_of(records: Iterable[Record]) -> list[str]:
    """Return the costs that any of some runs has (``COSTS``)."""
    spent = any(record.lines[-1].get(OPTIONAL) for record in records if record.lines)
    return [cost for cost in COSTS if cost != OPTIONAL or spent]


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed, under one label.

    Runs of different sections (data sets, settings of a table) are not drawn into one picture.
    """

    label: str
    records: tuple[Record, ...]
    section: str = ""

    def last(self, key: str) -> list[float]:
        """Return the last measured value of ``key`` of each run that has any."""
        measured = ([line[key] for line in record.lines if key in line] for record in self.records)
        return [values[-1] for values in measured if values]

    def cost(self, cost: str) -> list[float]:
        return [record.lines[-1].get(cost, 0.0) for record in self.records if record.lines]


def differing_keys(records: Sequence[Record]) -> list[str]:
    """Return the keys that the runs set differently, without locations and the seed."""
    values_of: dict[str, set[str]] = {}
    for record in records:
        for key, value in record.settings.items():
            values_of.setdefault(key, set()).add(repr(value))
    return [key for key, values in values_of.items() if key not in NOT_COMPARED and len(values) > 1]


def grouped(folders: Sequence[Path]) -> list[Group]:
    """Return the runs of some directories, those that differ in the seed alone together.

    A group's label is its method, with the settings in which it differs from others of that method.
    """
    by_settings: dict[str, list[Record]] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        record = read_run(folder)
        compared = {key: value for key, value in record.settings.items() if key not in NOT_COMPARED}
        by_settings.setdefault(json.dumps(compared, sort_keys=True), []).append(record)

    def kind(record: Record) -> tuple[str, str]:
        return str(record.settings.get("dataset", "")), str(record.settings["method"])

    groups = []
    for records in by_settings.values():
        section, method = kind(records[0])
        alike = [others[0] for others in by_settings.values() if kind(others[0]) == (section, method)]
        words = [f"{key}={records[0].settings.get(key, '–')}" for key in differing_keys(alike)]
        by_seed = tuple(sorted(records, key=lambda record: record.settings["seed"]))
        groups.append(Group(" ".join([method, *words]), by_seed, section))
    return groups


class Curve(NamedTuple):
    """A score against rounds and costs, over the seeds of a group.

    ``x``: ``round`` and ``COSTS`` -> the mean over the seeds at each point. ``low``, ``high``: mean ∓ one standard
    deviation, the mean itself where there is one seed.
    """

    label: str
    number: int
    x: Mapping[str, list[float]]
    mean: list[float]
    low: list[float]
    high: list[float]
    score: Score = Score()


Curves = dict[str, list[Curve]]
LOSS = Score("loss", False, "")


def curve(group: Group, key: str, label: str, number: int, score: Score) -> Curve | None:
    """Return the mean curve of ``key`` at the rounds that all runs of a group have measured; ``None`` without any."""
    measured = [{line["round"]: line for line in record.lines if line.get(key) is not None} for record in group.records]
    rounds = sorted(set.intersection(*(set(lines) for lines in measured)))
    if not rounds:
        return None
    points = [[lines[number] for lines in measured] for number in rounds]
    mean = [statistics.fmean(line[key] for line in lines) for lines in points]
    spread = [deviation([line[key] for line in lines]) for lines in points]
    x = {
        axis: [statistics.fmean(line.get(axis, 0) for line in lines) for lines in points] for axis in ("round", *COSTS)
    }
    low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
    return Curve(label, number, x, mean, low, high, score)


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def kinds_of(records: Iterable[Record]) -> dict[str, Score]:
    """Return the scores that any of some runs has measured, by the key of the line."""
    every = list(records)
    measured = {key for record in every for line in record.lines for key in line}
    return {key: record.score for record in every for key in record.score.keys if key in measured}


def losses_of(records: Iterable[Record]) -> dict[str, Score]:
    """Return the losses that any of some runs has measured, by the key of the line."""
    measured = {key for record in records for line in record.lines for key in line if line[key] is not None}
    return {key: LOSS for key in (*(f"{kind}-loss" for kind in KINDS), "train-loss") if key in measured}


def curves(groups: Sequence[Group], kinds: Callable[[Iterable[Record]], dict[str, Score]] = kinds_of) -> Curves:
    """Return what is drawn of some groups: the title of a row of pictures -> its curves.

    A row is a score of all groups of a section, a curve a group; where there is one group alone, its scores
    are the curves of one row. ``kinds``: :func:`losses_of` for the losses instead.
    """
    if len(groups) == 1:
        scores = kinds(groups[0].records)
        found = [curve(groups[0], key, kind_of(key), k, score) for k, (key, score) in enumerate(scores.items())]
        return {next(iter(scores.values())).name: [line for line in found if line]} if any(found) else {}
    rows: dict[str, list[Curve]] = {}
    several = len({group.section for group in groups}) > 1
    for section in dict.fromkeys(group.section for group in groups):
        numbered = [(number, group) for number, group in enumerate(groups) if group.section == section]
        for key, score in kinds([record for _, group in numbered for record in group.records]).items():
            title = f"{kind_of(key)} {score.name}" + f", {section}" * several
            lines = (curve(group, key, group.label, number, score) for number, group in numbered)
            rows[title] = [line for line in lines if line]
    return {title: lines for title, lines in rows.items() if lines}


def named_runs(records: Sequence[Record]) -> list[tuple[str, Record]]:
    """Return runs with their names: method and seed or, where two have the same, the folder."""
    names = [f"{record.settings['method']}, seed {record.settings['seed']}" for record in records]
    if len(set(names)) < len(names):
        whole = [record.folder.resolve() for record in records]
        names = [os.path.relpath(folder, os.path.commonpath(whole)) for folder in whole]
    return list(zip(map(escaped, names), records, strict=True))
