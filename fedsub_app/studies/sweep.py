"""A sweep: one experiment with many settings, compared on validation data; grid, random search or Optuna's.

Every trial is written (``trial-007.json``) before it starts and is a run, or one for each seed, in a directory of its
own. The same command goes on where a sweep was stopped: finished trials are kept, begun ones continue from their last
checkpoint. A grid and random search have the same trials each time; what Optuna proposes depends on the trials that
have ended by then, so that with one worker it is the same each time.
"""

import hashlib
import importlib.util
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.files import read_json, write_atomic, write_json
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import derive
from fedsub_app.common.text import markdown
from fedsub_app.config import defaults, own_keys, resolve
from fedsub_app.reports.html import write_html
from fedsub_app.reports.pictures import draw_sweep, svg
from fedsub_app.reports.records import Group, csv_text, deviation, read_run
from fedsub_app.runs.directory import runs_folder
from fedsub_app.settings import Settings
from fedsub_app.studies.batch import commits, gpus_of, machine, run_all
from fedsub_app.studies.job import Job
from fedsub_app.studies.search_space import Range, Space, draw, each_value, propose, read_space

COSTS = {
    "MB": (("formula-bytes-down", "formula-bytes-up"), 1e6),
    "GFLOPs": (("flops",), 1e9),
    "minutes": (("seconds",), 60),
}
TEST = ("global", "global-local", "personal")


def metric_of(settings: Settings, wanted: str | None) -> str:
    """Return the accuracy that decides, ``personal-validation`` for example.

    Raises
    ------
    UserError
        It is not measured; without ``wanted``, no validation accuracy is.
    """
    own = [kind for kind in settings.evaluations if kind != "global"]
    if wanted is None:
        if not settings.validation_fraction:
            raise UserError(
                "validation-fraction = 0.0: must be above 0, a sweep compares on validation data; "
                f"--metric {settings.evaluations[0]} would compare on test data"
            )
        if not own:
            raise UserError("evaluate = 'global': must name global-local or personal, which have validation accuracies")
        return f"{own[0]}-validation"
    allowed = [*settings.evaluations, *(f"{kind}-validation" for kind in own if settings.validation_fraction)]
    if wanted not in allowed:
        raise UserError(f"--metric {wanted!r}: allowed with these settings are {', '.join(allowed)}")
    return wanted


@dataclass(frozen=True)
class Trial:
    """Values of the searched keys, and the runs with them, one for each seed."""

    number: int
    keys: Mapping[str, Value]
    jobs: tuple[Job, ...]

    @property
    def label(self) -> str:
        """The values as a line says them."""
        return "  ".join(f"{key}={value}" for key, value in self.keys.items())

    def values(self, metric: str) -> list[float]:
        """Return the metric at the end of every run, percent; empty while one has not ended, or has failed."""
        found = [(job.summary() or {}).get(f"final-{metric}-accuracy") for job in self.jobs]
        return [] if None in found else [float(value) for value in found if value is not None]


@dataclass(frozen=True)
class Sweep:
    """What is searched, how, and where it is written."""

    experiment: str
    fixed: Mapping[str, Value]
    space: Space
    search: str
    metric: str
    seeds: int
    trials: int
    out: Path

    @property
    def seed(self) -> int:
        """Seed of the first run of a trial, on which the search depends as well."""
        return int(self.fixed.get("seed", defaults()["seed"]))

    def overrides(self, keys: Mapping[str, Value]) -> dict[str, Value]:
        """Return the single keys of a trial; those of methods that it does not run are left out."""
        named = {"experiment": self.experiment} if self.experiment else {}
        return own_keys({**named, **self.fixed, **keys})

    @cached_property
    def plan(self) -> list[dict[str, Value]]:
        """The trials of a grid or of random search."""
        lists = {key: values for key, values in self.space.items() if not isinstance(values, Range)}
        if len(lists) == len(self.space):
            grid = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
            # Of methods that do not have a searched key, one trial is enough.
            once = {json.dumps(self.overrides(keys), sort_keys=True): keys for keys in grid}
            grid = list(once.values())
            if self.search == "random":
                import numpy as np

                order = np.random.default_rng(derive(self.seed, "sweep")).permutation(len(grid))
                grid = [grid[index] for index in order]
            return grid[: self.trials]
        # A trial is the same however many there are.
        return [draw(self.space, derive(self.seed, "sweep", number)) for number in range(self.trials)]

    def _next(self, number: int) -> dict[str, Value]:
        """Return the searched keys of a trial that is new."""
        if self.search != "optuna":
            return self.plan[number]
        results = [(trial.keys, trial.values(self.metric)) for trial in self.begun()]
        ended = [(keys, statistics.fmean(values)) for keys, values in results if values]
        return propose(self.space, derive(self.seed, "sweep", number), ended)

    def trial(self, number: int) -> Trial:
        """Return a trial, which is written where it is new."""
        path = self.out / f"trial-{number:03d}.json"
        if not path.exists():
            write_json(path, {"number": number, "keys": self._next(number)})
        keys = read_json(path)["keys"]
        label = "  ".join(f"{key}={value}" for key, value in keys.items())
        jobs = []
        for seed in range(self.seed, self.seed + self.seeds):
            folder = (self.out / f"{path.stem}-seed{seed}").resolve()
            name = f"trial {number}  {label}" + f"  seed {seed}" * (self.seeds > 1)
            jobs.append(Job(name, self.overrides(keys) | {"seed": seed, "run-dir": str(folder)}, folder))
        return Trial(number, keys, tuple(jobs))

    def begun(self) -> list[Trial]:
        """Return the trials that are written."""
        numbers = itertools.takewhile(lambda n: (self.out / f"trial-{n:03d}.json").exists(), range(self.trials))
        return [self.trial(number) for number in numbers]

    def jobs(self) -> Iterator[Job]:
        """Yield the runs that are not complete, trial by trial."""
        for number in range(self.trials):
            yield from (job for job in self.trial(number).jobs if job.summary() is None)

    def describe(self) -> dict[str, Any]:
        """Return what makes this sweep another one than others: not how many trials it has."""
        space = {key: str(values) if isinstance(values, Range) else list(values) for key, values in self.space.items()}
        decides = self.metric if self.search == "optuna" else ""
        return {
            "experiment": self.experiment,
            "set": dict(self.fixed),
            "space": space,
            "search": self.search,
            "decides": decides,
        }


def sweep(
    experiment: str,
    pairs: Sequence[str],
    *,
    trials: int | None = None,
    search: str | None = None,
    metric: str | None = None,
    seeds: int = 1,
    workers: int | None = None,
    out: Path | None = None,
) -> int:
    """Run a sweep or go on with it; write its tables, picture, page and best settings; returns the exit code.

    Raises
    ------
    UserError
        Bad input, before the first run.
    """
    fixed, space = read_space(pairs)
    ranges = [key for key, values in space.items() if isinstance(values, Range)]
    search = search or ("random" if ranges or trials else "grid")
    if search == "grid" and ranges:
        raise UserError(f"{ranges[0]} = {space[ranges[0]]}: a range has no grid; --search random or optuna, or values")
    if trials is None and (ranges or search == "optuna"):
        raise UserError("--trials: how many settings to try must be said, with a range and with Optuna")
    if search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise UserError("--search optuna: needs the package optuna; `pip install -e '.[sweep]'` in the checkout")
    made = Sweep(experiment, fixed, space, search, "", seeds, trials or sys.maxsize, Path())
    tried = each_value(space) if search == "optuna" else [*each_value(space), *made.plan]
    settings = [resolve(made.overrides(keys)) for keys in tried]  # bad input is reported before the first run starts
    chosen_by = metric_of(settings[0], metric)
    count = trials if search == "optuna" and trials else len(made.plan)
    made = Sweep(experiment, fixed, space, search, chosen_by, seeds, count, Path())
    made = Sweep(experiment, fixed, space, search, chosen_by, seeds, count, out or _folder(made))
    _claim(made)
    command = _command(made, pairs, metric)
    print(f"{count} trials in {made.out}, chosen by {_said(chosen_by)}", flush=True)
    if search == "optuna":
        left = made.seeds * count - sum(job.summary() is not None for trial in made.begun() for job in trial.jobs)
        failures = run_all(made.jobs(), workers, gpus_of(settings), left)
    else:
        failures = run_all(list(made.jobs()), workers, gpus_of(settings))
    for job, reason in failures:
        print(f"failed: {' '.join(job.name.split())}: {reason}", file=sys.stderr)
    _write(made, command)
    return 1 if failures else 0


def _folder(made: Sweep) -> Path:
    """Return where a sweep is written: the same folder for the same sweep."""
    text = json.dumps(made.describe(), sort_keys=True)
    name = (made.experiment or "sweep").removesuffix(".toml").strip("/").replace("/", "-")
    return runs_folder() / "sweeps" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _claim(made: Sweep) -> None:
    """Write what the sweep is into its folder, or compare it with what is there."""
    path = made.out / "sweep.json"
    about = made.describe()
    if path.exists():
        there = read_json(path)
        for key, value in about.items():
            if there.get(key) != value:
                raise UserError(f"--out {made.out}: has another sweep, with {key} = {shown(there.get(key))}")
    else:
        made.out.mkdir(parents=True, exist_ok=True)
        write_json(path, about)


def _command(made: Sweep, pairs: Sequence[str], metric: str | None) -> str:
    words = ["fedsub", "sweep", *([made.experiment] if made.experiment else [])]
    words += [word for pair in pairs for word in ("-s", shlex.quote(pair))]
    words += ["--search", made.search, "--trials", str(made.trials)]
    words += ["--metric", metric] if metric else []
    return " ".join([*words, *(["--seeds", str(made.seeds)] if made.seeds > 1 else [])])


def _said(metric: str) -> str:
    if metric in TEST:
        return f"{metric} TEST accuracy at the end (so the best one's is too high: it was chosen by it)"
    return f"{metric.replace('-validation', ' validation')} accuracy at the end"


def _write(made: Sweep, command: str) -> None:
    """Write the tables, the picture, the page and the best settings; print the table."""
    from fedsub_app.data import load_dataset

    trials = made.begun()
    jobs = [job for trial in trials for job in trial.jobs]
    found = {trial.number: trial.values(made.metric) for trial in trials}
    ranked = sorted(trials, key=lambda trial: -statistics.fmean(found[trial.number] or [-1.0]))
    keys = list(made.space)
    column = f"{made.metric} (%)"
    header = ["trial", *keys, column, *COSTS]
    rows = [_row(trial, keys, found[trial.number]) for trial in ranked]
    table = markdown(header, rows)
    notes = load_dataset(jobs[0].settings.data).notes
    facts = {
        "command": f"`{command}`",
        "chosen by": _said(made.metric) + (f", mean of {made.seeds} seeds" if made.seeds > 1 else ""),
        "commit": commits(jobs),
        "seeds": ", ".join(str(made.seed + number) for number in range(made.seeds)),
        "machine": machine(),
        "data": jobs[0].settings.dataset + (f" ({', '.join(notes)})" if notes else ""),
    }
    title = f"Sweep: {', '.join(keys)}" + (f" of {made.experiment}" if made.experiment else "")
    best = next((trial for trial in ranked if found[trial.number]), None)
    said = _best(best, made.metric) if best else "No trial has a result."
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), "", table, "", said, ""]
    files = {"sweep.md": "\n".join(lines), "sweep.csv": csv_text(header, rows)}
    if best:
        files["best.toml"] = _toml(made, best, f"{said} {command}")
    for name, text in files.items():
        write_atomic(made.out / name, text.encode())
    begun = [trial for trial in ranked if any((job.folder / "settings.json").exists() for job in trial.jobs)]
    groups = [
        Group(trial.label, tuple(read_run(job.folder) for job in trial.jobs if (job.folder / "settings.json").exists()))
        for trial in begun
    ]
    if best:
        points = [(trial.keys, statistics.fmean(found[trial.number])) for trial in trials if found[trial.number]]
        logs = {key for key, values in made.space.items() if isinstance(values, Range) and values.log}
        drawing = draw_sweep(points, keys, column, logs, grid=made.search == "grid")
        drawing.savefig(made.out / "sweep.png", dpi=120)
        files["sweep.png"] = ""
        write_html(groups, made.out / "report.html", title, command, said, {"The search": svg(drawing, title)})
        files["report.html"] = ""
    print(f"\n{table}\n\n{said}\n")
    for name in files:
        print(made.out / name)


def _row(trial: Trial, keys: Sequence[str], values: Sequence[float]) -> list[str]:
    cells = [str(trial.number), *(str(trial.keys.get(key, "")) for key in keys)]
    if not values:
        return [*cells, "no result", *("" for _ in COSTS)]
    accuracy = f"{statistics.fmean(values):.2f}" + (f" ± {deviation(values):.2f}" if len(values) > 1 else "")
    summaries = [summary for job in trial.jobs if (summary := job.summary())]
    costs = [
        f"{statistics.fmean(sum(summary[f'total-{count}'] for count in counts) / unit for summary in summaries):.2f}"
        for counts, unit in COSTS.values()
    ]
    return [*cells, accuracy, *costs]


def _best(trial: Trial, metric: str) -> str:
    """Return what the best trial came to, on the data that chose it and on the test data."""
    words = [f"{statistics.fmean(trial.values(metric)):.2f} % by {_said(metric)}"]
    for kind in TEST:
        if kind != metric and (values := trial.values(kind)):
            words.append(f"{statistics.fmean(values):.2f} % {kind} test accuracy")
    keys = ", ".join(f"{key} = {value}" for key, value in trial.keys.items())
    return f"Best: trial {trial.number} ({keys}): {'; '.join(words)}."


def _toml(made: Sweep, best: Trial, about: str) -> str:
    """Return the best settings as an experiment's file."""
    keys = {key: value for key, value in made.overrides(best.keys).items() if key != "experiment"}
    lines = [f"# {about}"]
    if made.experiment:
        base = str(Path(made.experiment).resolve()) if made.experiment.endswith(".toml") else made.experiment
        lines.append(f"extends = {json.dumps(base)}")
    lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items() if "." not in key]
    for method in dict.fromkeys(key.partition(".")[0] for key in keys if "." in key):
        lines += ["", f"[{method}]"]
        lines += [f"{key.partition('.')[2]} = {json.dumps(keys[key])}" for key in keys if key.startswith(f"{method}.")]
    return "\n".join(lines) + "\n"
