"""The results of a sweep: a ranked table, a picture, a page, and the best settings as an experiment's file."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedsub_app.common.files import write_atomic
from fedsub_app.common.text import markdown
from fedsub_app.reports.export import csv_text
from fedsub_app.reports.html import write_html
from fedsub_app.reports.pictures import draw_sweep, svg
from fedsub_app.reports.records import Group, read_run, summary_table
from fedsub_app.studies.batch import facts
from fedsub_app.studies.trials import Search, Sweep, Trial, text_of

TEST = ("global", "global-local", "personal")


class Result(NamedTuple):
    """A trial and its final metric in each run; no values unless all runs are complete."""

    trial: Trial
    values: list[float]

    @property
    def mean(self) -> float:
        """Mean of the values, of which there must be one."""
        return statistics.fmean(self.values)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts results, the best first; those without values last."""
        sign = -1 if self.trial.score.high_is_good else 1
        return not self.values, sign * self.mean if self.values else 0.0


def write_results(sweep: Sweep, command: str) -> None:
    """Write ``sweep.md``, ``sweep.csv`` and, of a sweep with a complete trial, ``best.toml``, ``sweep.png``,
    ``report.html``; print the table and the files.
    """
    results = [Result(trial, trial.values(sweep.metric)) for trial in sweep.started()]
    ranked = sorted(results, key=lambda result: result.rank)
    best = ranked[0].trial if ranked[0].values else None
    verdict = _verdict(best, sweep.metric) if best else "No trial has a result."
    keys = list(sweep.search.space)
    title = f"Sweep: {', '.join(keys)}" + (f" of {sweep.search.experiment}" if sweep.search.experiment else "")
    runs = {trial: [job.folder for job in trial.jobs if (job.folder / "settings.json").exists()] for trial, _ in ranked}
    groups = {trial: Group(trial.label, tuple(map(read_run, begun))) for trial, begun in runs.items() if begun}
    columns, rows_of = summary_table(list(groups.values()))
    header, rows = ["trial", *keys, *columns], []
    for trial, (_, cells) in zip(groups, rows_of, strict=True):
        values = [text_of(trial.keys.get(key, "")) for key in keys]
        rows.append([str(trial.number), *values, *(cell.text for cell in cells)])
    table = markdown(header, rows)
    above = (f"- {key}: {value}" for key, value in _facts(sweep, [r.trial for r in results], command).items())
    files = {
        "sweep.md": "\n".join([f"# {title}", "", *above, "", table, "", verdict, ""]),
        "sweep.csv": csv_text(header, rows),
    }
    if best:
        files["best.toml"] = _toml(sweep.search, best, f"{verdict} {command}")
    for name, text in files.items():
        write_atomic(sweep.out / name, text.encode())
    paths = [sweep.out / name for name in files]
    if best:
        paths += _draw(sweep, results, list(groups.values()), title, command, verdict)
    print(f"\n{table}\n\n{verdict}\n", *paths, sep="\n")


def metric_in_words(metric: str, score: str) -> str:
    """Return a metric as a sentence has it, with a warning where it is of test data."""
    if metric in TEST:
        return f"{metric} TEST {score} at the end (so the best one's is too high: it was chosen by it)"
    return f"{metric.replace('-validation', ' validation')} {score} at the end"


def _facts(sweep: Sweep, trials: Sequence[Trial], command: str) -> dict[str, str]:
    seeds = range(sweep.search.seed, sweep.search.seed + sweep.seeds)
    mean = f", mean of {sweep.seeds} seeds" if sweep.seeds > 1 else ""
    chosen = metric_in_words(sweep.metric, sweep.score.name) + mean
    return {"chosen by": chosen, **facts(f"`{command}`", seeds, [job for trial in trials for job in trial.jobs])}


def _verdict(best: Trial, metric: str) -> str:
    """Return the best trial's scores, of the data that ranked it and of the test data."""
    score = best.score
    words = [f"{score.text(statistics.fmean(best.values(metric)))} by {metric_in_words(metric, score.name)}"]
    for kind in TEST:
        if kind != metric and (values := best.values(kind)):
            words.append(f"{score.text(statistics.fmean(values))} {kind} test {score.name}")
    keys = ", ".join(f"{key} = {text_of(value)}" for key, value in best.keys.items())
    return f"Best: trial {best.number} ({keys}): {'; '.join(words)}."


def _toml(search: Search, best: Trial, comment: str) -> str:
    """Return the best settings as an experiment's file."""
    keys = {key: value for key, value in search.overrides(best.keys).items() if key != "experiment"}
    lines = [f"# {comment}"]
    if search.experiment:
        base = str(Path(search.experiment).resolve()) if search.experiment.endswith(".toml") else search.experiment
        lines.append(f"extends = {json.dumps(base)}")
    lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items() if "." not in key]
    for method in dict.fromkeys(key.partition(".")[0] for key in keys if "." in key):
        lines += ["", f"[{method}]"]
        lines += [f"{key.partition('.')[2]} = {json.dumps(keys[key])}" for key in keys if key.startswith(f"{method}.")]
    return "\n".join(lines) + "\n"


def _draw(
    sweep: Sweep, results: Sequence[Result], groups: Sequence[Group], title: str, command: str, verdict: str
) -> list[Path]:
    """Write the picture of the search, and the page of its runs."""
    space = sweep.search.space
    points: list[tuple[Mapping[str, object], float]] = [(r.trial.keys, r.mean) for r in results if r.values]
    logarithmic = {key for key, values in space.items() if getattr(values, "log", False)}
    grid = sweep.search.method == "grid"
    drawing = draw_sweep(points, list(space), results[0].trial.score, sweep.metric, logarithmic, grid=grid)
    picture, page = sweep.out / "sweep.png", sweep.out / "report.html"
    drawing.savefig(picture, dpi=120)
    write_html(groups, page, title, command, verdict, {"The search": svg(drawing, title)})
    return [picture, page]
