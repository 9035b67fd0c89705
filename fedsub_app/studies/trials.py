"""The trials of a sweep: their settings, their runs, and their files on disk."""

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.files import read_json, write_json
from fedsub_app.common.score import Score
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import derive
from fedsub_app.config import applicable_keys, defaults
from fedsub_app.studies.job import Job
from fedsub_app.studies.search_space import Range, Space, draw, each_value, propose


@dataclass(frozen=True)
class Search:
    """The settings that are tried.

    Parameters
    ----------
    fixed : keys that all trials share.
    method : ``"grid"``, ``"random"`` or ``"optuna"``.
    trials : how many settings to try, ``None`` for all points of a space without ranges.
    """

    experiment: str
    fixed: Mapping[str, Value]
    space: Space
    method: str
    trials: int | None = None

    @property
    def seed(self) -> int:
        """Seed of the first run of a trial, on which the search depends as well."""
        return int(self.fixed.get("seed", defaults()["seed"]))

    @property
    def count(self) -> int:
        """Number of trials."""
        return self.trials if self.method == "optuna" and self.trials else len(self.plan)

    def overrides(self, keys: Mapping[str, Value]) -> dict[str, Value]:
        """Return the single keys of a trial without those of methods that it does not run."""
        experiment = {"experiment": self.experiment} if self.experiment else {}
        return applicable_keys({**experiment, **self.fixed, **keys})

    @cached_property
    def plan(self) -> list[dict[str, Value]]:
        """Searched keys of each trial of a grid or of random search."""
        lists = {key: values for key, values in self.space.items() if not isinstance(values, Range)}
        if len(lists) < len(self.space):  # a trial does not depend on how many there are
            return [draw(self.space, derive(self.seed, "sweep", number)) for number in range(self.trials or 0)]
        points = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
        # One trial is enough for points that differ in keys of methods that they do not run.
        grid = list({json.dumps(self.overrides(keys), sort_keys=True): keys for keys in points}.values())
        if self.method == "random":
            import numpy as np

            grid = [grid[index] for index in np.random.default_rng(derive(self.seed, "sweep")).permutation(len(grid))]
        return grid[: self.trials]

    def examples(self) -> list[dict[str, Value]]:
        """Return searched keys in which every value occurs that is known before the first trial ends."""
        return each_value(self.space) + ([] if self.method == "optuna" else self.plan)

    def describe(self, metric: str) -> dict[str, Any]:
        """Return the identity of a sweep by ``metric``; the number of trials does not belong to it."""
        space = {key: str(values) if isinstance(values, Range) else list(values) for key, values in self.space.items()}
        return {
            "experiment": self.experiment,
            "set": dict(self.fixed),
            "space": space,
            "search": self.method,
            "decides": metric if self.method == "optuna" else "",
        }


@dataclass(frozen=True)
class Trial:
    """Values of the searched keys, and the runs with them, one for each seed."""

    number: int
    keys: Mapping[str, Value]
    jobs: tuple[Job, ...]

    @property
    def label(self) -> str:
        """The searched keys in one line."""
        return _label(self.keys)

    @property
    def score(self) -> Score:
        """The score of its runs' task."""
        return self.jobs[0].settings.score

    def values(self, metric: str) -> list[float]:
        """Return the final metric of every run; empty unless all runs are complete."""
        values = [(job.summary() or {}).get(f"final-{metric}-{self.score.name}") for job in self.jobs]
        return [] if None in values else [float(value) for value in values if value is not None]


@dataclass(frozen=True)
class Sweep:
    """A search whose trials are written to a folder and ranked by a metric.

    Parameters
    ----------
    metric : a kind of score at the end of a run, such as ``"personal-validation"``.
    seeds : runs of a trial.
    out : folder of the trials and their runs.
    """

    search: Search
    metric: str
    seeds: int
    out: Path

    def claim(self) -> None:
        """Write the identity of the sweep into its folder.

        Raises
        ------
        UserError
            The folder belongs to another sweep.
        """
        path, about = self.out / "sweep.json", self.search.describe(self.metric)
        if not path.exists():
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(path, about)
            return
        other = read_json(path)
        for key, value in about.items():
            if other.get(key) != value:
                raise UserError(f"--out {self.out}: has another sweep, with {key} = {shown(other.get(key))}")

    def trial(self, number: int) -> Trial:
        """Return a trial; a new one is written first."""
        path = self._path(number)
        if not path.exists():
            write_json(path, {"number": number, "keys": self._new_keys(number)})
        keys = read_json(path)["keys"]
        jobs = []
        for seed in range(self.search.seed, self.search.seed + self.seeds):
            folder = (self.out / f"{path.stem}-seed{seed}").resolve()
            name = f"trial {number}  {_label(keys)}" + f"  seed {seed}" * (self.seeds > 1)
            jobs.append(Job(name, self.search.overrides(keys) | {"seed": seed, "run-dir": str(folder)}, folder))
        return Trial(number, keys, tuple(jobs))

    def started(self) -> list[Trial]:
        """Return the trials that are written."""
        numbers = itertools.takewhile(lambda number: self._path(number).exists(), range(self.search.count))
        return [self.trial(number) for number in numbers]

    def jobs(self) -> Iterator[Job]:
        """Yield the runs that are not complete, trial by trial."""
        for number in range(self.search.count):
            yield from (job for job in self.trial(number).jobs if job.summary() is None)

    def _path(self, number: int) -> Path:
        return self.out / f"trial-{number:03d}.json"

    def _new_keys(self, number: int) -> dict[str, Value]:
        if self.search.method != "optuna":
            return self.search.plan[number]
        results = [(trial.keys, trial.values(self.metric)) for trial in self.started()]
        ended = [(keys, statistics.fmean(values)) for keys, values in results if values]
        high_is_good = self.trial(0).score.high_is_good if number else True
        return propose(self.search.space, derive(self.search.seed, "sweep", number), ended, high_is_good)


def _label(keys: Mapping[str, Value]) -> str:
    return "  ".join(f"{key}={value}" for key, value in keys.items())
