"""Finished and running runs, read from their directories, and groups of runs over seeds."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from fedsub_app.common.errors import UserError, escaped
from fedsub_app.common.files import read_json
from fedsub_app.common.section import Value
from fedsub_app.data.settings import DataSettings, PartitionSettings
from fedsub_app.reports.curves import COSTS, Group, RunData, curves
from fedsub_app.reports.pictures import draw_partition, figure_of_curves, write_picture
from fedsub_app.runs.recorded import OWN_CODE, resume_command
from fedsub_app.runs.rounds import ROUNDS, read_rounds
from fedsub_app.settings import LOCATION_KEYS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

NOT_COMPARED = (*LOCATION_KEYS, "seed")


class Record(RunData):
    """A run's directory, its network, table and pictures."""

    @property
    def _alone(self) -> list[Group]:
        return [Group(str(self.settings["method"]), (self,))]

    def model(self) -> "nn.Module":
        """Return the network with the final global model, in evaluation mode; the run's data must be here."""
        from fedsub_app.runs.checkpoint import global_network
        from fedsub_app.runs.directory import settings_in
        from fedsub_app.training.problem import Problem

        return global_network(self.folder, Problem.of(settings_in(self.folder)))

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row a round: the numbers of rounds.jsonl and the costs so far."""
        import pandas as pd

        plain = [{k: v for k, v in line.items() if not isinstance(v, dict | list)} for line in self.lines]
        return pd.DataFrame(plain, columns=None if plain else ["round"]).set_index("round")

    def plot(self) -> "Figure":
        return figure_of_curves(self._alone)

    def _repr_png_(self) -> bytes | None:
        picture = BytesIO()
        if curves(self._alone):
            self.plot().savefig(picture, format="png", dpi=90)
        return picture.getvalue() or None

    def draw(self) -> None:
        """Draw the partition and, where anything was evaluated, the learning curves into the run's directory."""
        if self.partition:  # there is none where the clients' data are their nodes' own
            draw_partition(self.partition["counts"], self.folder / "partition.png")
        if curves(self._alone):
            write_picture(self.plot(), self.folder / "curve.png")


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
    record = Record(folder, provenance, lines)
    there = {line["round"] for line in lines} | {*record.summary.get("missing-rounds", ())}
    if lacking := {*range(1, record.summary.get("rounds", 0) + 1)} - there:
        counted = f"lacks round {min(lacking)}, which summary.json counts"
        raise UserError(f"{folder / ROUNDS}: {counted}; `{resume_command(folder)}` goes on without it")
    return record


def compared(record: RunData) -> dict[str, Value]:
    """Return the settings without locations and the seed; a user's file with the digest of its text."""
    code = record.provenance.get(OWN_CODE, {})
    kept = {key: value for key, value in record.settings.items() if key not in NOT_COMPARED}
    return {key: f"{value} ({code[key][:6]})" if key in code else value for key, value in kept.items()}


def differing_keys(records: Sequence[RunData]) -> list[str]:
    """Return the keys that the runs set differently, without locations and the seed.

    A key that the version of a run did not have is different; one of a method is of that method's runs alone.
    """
    every, values_of = [compared(record) for record in records], {}
    for key in dict.fromkeys(key for settings in every for key in settings):
        values_of[key] = {repr(settings.get(key)) for settings in every if key in settings or "." not in key}
    return [key for key, values in values_of.items() if len(values) > 1]


def unlike(groups: Sequence[Group]) -> list[str]:
    """Return the keys of data and partition in which groups differ: their scores are of other problems."""
    fields = DataSettings.model_fields | PartitionSettings.model_fields
    return [key for key in differing_keys([group.records[0] for group in groups]) if key.replace("-", "_") in fields]


def grouped(folders: Sequence[Path]) -> list[Group]:
    """Return the runs of some directories, those that differ in the seed alone together.

    A group's label is its method, with the settings in which it differs from others of that method. A second run of
    the same settings and seed, which is no further seed, is in a second group, ``(2)``.
    """
    by_settings: dict[tuple[str, int], list[Record]] = {}
    seen: Counter[tuple[str, object]] = Counter()
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        record = read_run(folder)
        text = json.dumps(compared(record), sort_keys=True)
        seen[text, record.settings["seed"]] += 1
        by_settings.setdefault((text, seen[text, record.settings["seed"]]), []).append(record)

    def kind(record: Record) -> tuple[str, str]:
        return str(record.settings.get("dataset", "")), str(record.settings["method"])

    groups = []
    for (_, time), records in by_settings.items():
        section, method = kind(records[0])
        alike = [others[0] for others in by_settings.values() if kind(others[0]) == (section, method)]
        words = [f"{key}={compared(records[0]).get(key, '–')}" for key in differing_keys(alike)]
        words += [f"({time})"] if time > 1 else []
        by_seed = tuple(sorted(records, key=lambda record: record.settings["seed"]))
        groups.append(Group(" ".join([method, *words]), by_seed, section))
    return groups


def named_runs(records: Sequence[RunData]) -> list[tuple[str, RunData]]:
    """Return runs with their names: method and seed or, where two have the same, the folder."""
    names = [f"{record.settings['method']}, seed {record.settings['seed']}" for record in records]
    if len(set(names)) < len(names):
        whole = [record.folder.resolve() for record in records]
        names = [os.path.relpath(folder, os.path.commonpath(whole)) for folder in whole]
    return list(zip(map(escaped, names), records, strict=True))


if __name__ == "__main__":  # the process that a run leaves behind
    import sys

    read_run(Path(sys.argv[1])).draw()
