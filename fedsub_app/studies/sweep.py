"""A sweep: one experiment with many settings, compared on validation data; grid, random search or Optuna's.

Every trial is in an Optuna study (``sweep.journal``) before it starts and is a run, or one for each seed, in a
directory of its own. The same command goes on where a sweep was stopped: finished trials are kept, begun ones continue
from their last checkpoint. A grid and random search have the same trials each time; Optuna's proposals depend on the
trials that have ended by then, so that they are the same with one worker.
"""

import hashlib
import json
import math
import shlex
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.score import ON_TEST_DATA
from fedsub_app.common.text import markdown
from fedsub_app.reports.compare import summary_table
from fedsub_app.reports.curves import Group
from fedsub_app.reports.export import csv_text
from fedsub_app.reports.records import read_run
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import folder_name, runs_folder
from fedsub_app.settings import Settings
from fedsub_app.studies.batch import facts, gpus_of, run_all, say
from fedsub_app.studies.trials import Search, Space, Sweep, Trial, as_written, label, read_space, text_of


def sweep(
    experiment: str,
    pairs: Sequence[str],
    trials: int | None,
    method: str | None,
    metric: str | None,
    seeds: int,
    workers: int | None,
    slurm: Sequence[str],
    out: Path | None,
) -> int:
    """Run or continue a sweep, write its tables, pictures, page and best settings; returns the exit code."""
    fixed, space = read_space(pairs, experiment)
    search = Search(experiment, fixed, space, _search_method(space, method, trials), trials)
    examples = [search.overrides(keys) for keys in search.examples()]
    if unused := [key for key in (*fixed, *space) if all(key not in keys for keys in examples)]:
        raise UserError(f"{unused[0]}: does nothing with the method of any trial")
    settings = [resolve(keys) for keys in examples]
    chosen_metric = metric_of(settings[0], metric)
    for each in settings:  # a trial without this score would be run for nothing
        metric_of(each, chosen_metric)
    planned = Sweep(search, chosen_metric, settings[0].score, seeds, out or _folder(search, chosen_metric))
    done = sum(job.summary() is not None for trial in planned.started() for job in trial.jobs)
    chosen_by = metric_in_words(chosen_metric, settings[0].score.name)
    say(f"{search.count} trials in {planned.out}, chosen by {chosen_by}")
    failures = run_all(planned.jobs(), seeds * search.count - done, workers, gpus_of(settings), slurm)
    planned.tell()
    for job, reason in failures:
        print(f"failed: {' '.join(job.name.split())}: {reason}", file=sys.stderr)
    any_result = write_results(planned, _command(planned, pairs, metric))
    return 0 if any_result and not failures else 1


def metric_of(settings: Settings, metric: str | None) -> str:
    """Return the score that ranks the trials; ``None`` chooses the first one of validation data."""
    client_kinds = [kind for kind in settings.evaluations if kind != "global"]
    if metric is None:
        if not settings.validation_fraction:
            why = f"a sweep compares on validation data; --metric {settings.evaluations[0]} would compare on test data"
            raise UserError(f"validation-fraction = 0.0: must be above 0, {why}")
        if not client_kinds:
            raise UserError("evaluate = 'global': must name global-local or personal, which have validation scores")
        return f"{client_kinds[0]}-validation"
    allowed = [*settings.evaluations, *(f"{kind}-validation" for kind in client_kinds if settings.validation_fraction)]
    if metric not in allowed:
        raise UserError(f"--metric {metric!r}: allowed with these settings are {', '.join(allowed)}")
    return metric


def _search_method(space: Space, method: str | None, trials: int | None) -> str:
    ranges = [key for key, values in space.items() if not isinstance(values, CategoricalDistribution)]
    method = method or ("random" if ranges or trials else "grid")
    if method == "grid" and ranges:
        given = f"{ranges[0]} = {as_written(space[ranges[0]])}"
        raise UserError(f"{given}: a range has no grid; --search random or optuna, or values")
    if trials is None and (ranges or method == "optuna"):
        raise UserError("--trials: how many settings to try must be said, with a range and with Optuna")
    return method


def _folder(search: Search, metric: str) -> Path:
    text = json.dumps(search.describe(metric), sort_keys=True)
    name = folder_name((search.experiment or "sweep").removesuffix(".toml"))
    return runs_folder() / "sweeps" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _command(planned: Sweep, pairs: Sequence[str], metric: str | None) -> str:
    search = planned.search
    words = ["fedsub", "sweep", *([shlex.quote(search.experiment)] if search.experiment else [])]
    words += [word for pair in pairs for word in ("-s", shlex.quote(" ".join(pair.splitlines())))]
    words += ["--search", search.method, "--trials", str(search.count)]
    words += ["--metric", metric] if metric else []
    return " ".join([*words, *(["--seeds", str(planned.seeds)] if planned.seeds > 1 else [])])


def write_results(sweep: Sweep, command: str) -> bool:
    """Write ``sweep.md``, ``sweep.csv`` and, with a result, ``best.toml``, ``sweep.png``; print the table.

    Returns whether any trial has a result, the metric of all its runs.
    """

    def rank(trial: Trial) -> tuple[bool, float]:
        values = trial.values(sweep.metric)
        return not values, statistics.fmean(values) * (-1 if sweep.score.high_is_good else 1) if values else 0.0

    ranked = sorted(sweep.started(), key=rank)
    best = ranked[0] if ranked[0].values(sweep.metric) else None
    by = metric_in_words(sweep.metric, sweep.score.name)
    verdict = _verdict(best, sweep) if best else f"No trial has a result, {by}."
    keys = list(sweep.search.space)
    title = f"Sweep: {', '.join(keys)}" + (f" of {sweep.search.experiment}" if sweep.search.experiment else "")
    runs = {t.number: [job.folder for job in t.jobs if job.begun()] for t in ranked}
    begun = [trial for trial in ranked if runs[trial.number]]
    groups = [Group(label(trial.keys), tuple(map(read_run, runs[trial.number]))) for trial in begun]
    columns, cells_of = summary_table(groups)
    rows = []
    for trial, (_, cells) in zip(begun, cells_of, strict=True):
        rows.append([str(trial.number), *(text_of(trial.keys[key]) for key in keys), *(cell.text for cell in cells)])
    header = ["trial", *keys, *columns]
    table = markdown(header, rows)
    seeds = range(sweep.search.seed, sweep.search.seed + sweep.seeds)
    chosen = by + (f", mean of {sweep.seeds} seeds" * (sweep.seeds > 1))
    about = {"chosen by": chosen, **facts(f"`{command}`", seeds, [job for trial in ranked for job in trial.jobs])}
    above = (f"- {key}: {value}" for key, value in about.items())
    files = {
        "sweep.md": "\n".join([f"# {title}", "", *above, "", table, "", verdict, ""]),
        "sweep.csv": csv_text(header, rows),
    }
    if best:
        files["best.toml"] = _toml(sweep.search, best, f"{verdict} {command}")
    for name, text in files.items():
        write_atomic(sweep.out / name, text.encode())
    pictures = [_draw(sweep, sweep.out / "sweep.png")] if best else []
    print(f"\n{table}\n\n{verdict}\n", *(sweep.out / name for name in files), *pictures, sep="\n")
    return best is not None


def metric_in_words(metric: str, score: str) -> str:
    """Return a metric as a sentence has it, with a warning where it is of test data."""
    if metric in ON_TEST_DATA:
        return f"{metric} TEST {score} at the end (so the best one's is too good: it was chosen by it)"
    return f"{metric.replace('-validation', ' validation')} {score} at the end"


def _verdict(best: Trial, sweep: Sweep) -> str:
    """Return the best trial's scores, of the data that ranked it and of the test data."""
    score, metric = sweep.score, sweep.metric
    words = [f"{score.text(statistics.fmean(best.values(metric)))} by {metric_in_words(metric, score.name)}"]
    for kind in ON_TEST_DATA:
        if kind != metric and (values := best.values(kind)):
            words.append(f"{score.text(statistics.fmean(values))} {kind} test {score.name}")
    keys = ", ".join(f"{key} = {text_of(value)}" for key, value in best.keys.items())
    return f"Best: trial {best.number} ({keys}): {'; '.join(words)}."


def _toml(search: Search, best: Trial, comment: str) -> str:
    keys, lines = search.overrides(best.keys), [f"# {comment}"]
    keys |= METHODS[best.jobs[0].settings.method].preset  # an experiment that it extends may have other values
    if base := str(keys.pop("experiment", "")):
        keys = {"extends": str(Path(base).resolve()) if base.endswith(".toml") else base, **keys}
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _draw(sweep: Sweep, picture: Path) -> Path:
    """Draw the metric against each searched key, as Optuna does, into a file; returns it."""
    from optuna.visualization.matplotlib import plot_slice

    def mean(frozen: FrozenTrial) -> float:  # the study's own values may be of another metric or fewer seeds
        return statistics.fmean(sweep.trial(frozen.number).values(sweep.metric) or [math.nan])

    with warnings.catch_warnings(action="ignore"):  # of its interface
        panels = plot_slice(sweep.study, target=mean, target_name=sweep.score.titled(sweep.metric))
        getattr(panels, "flat", [panels])[0].get_figure().savefig(picture, dpi=120)
    return picture
