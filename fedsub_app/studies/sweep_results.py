"""The results of a sweep: a ranked table, a picture, a page, and the best settings as an experiment's file."""

import json
import statistics
import warnings
from pathlib import Path

from fedsub_app.common.files import write_atomic
from fedsub_app.common.text import markdown
from fedsub_app.reports.compare import summary_table
from fedsub_app.reports.export import csv_text
from fedsub_app.reports.html import write_html
from fedsub_app.reports.pictures import svg
from fedsub_app.reports.records import Group, read_run
from fedsub_app.studies.batch import facts
from fedsub_app.studies.trials import Search, Sweep, Trial, label, text_of

TEST = ("global", "global-local", "personal")


def write_results(sweep: Sweep, command: str) -> None:
    """Write ``sweep.md``, ``sweep.csv`` and, of a sweep with a complete trial, ``best.toml``, ``sweep.png``,
    ``report.html``; print the table and the files.
    """

    def rank(trial: Trial) -> tuple[bool, float]:
        values = trial.values(sweep.metric)
        return not values, statistics.fmean(values) * (-1 if sweep.score.high_is_good else 1) if values else 0.0

    ranked = sorted(sweep.started(), key=rank)
    best = ranked[0] if ranked[0].values(sweep.metric) else None
    verdict = _verdict(best, sweep) if best else "No trial has a result."
    keys = list(sweep.search.space)
    title = f"Sweep: {', '.join(keys)}" + (f" of {sweep.search.experiment}" if sweep.search.experiment else "")
    runs = {t.number: [job.folder for job in t.jobs if (job.folder / "settings.json").exists()] for t in ranked}
    begun = [trial for trial in ranked if runs[trial.number]]
    groups = [Group(label(trial.keys), tuple(map(read_run, runs[trial.number]))) for trial in begun]
    columns, cells_of = summary_table(groups)
    rows = []
    for trial, (_, cells) in zip(begun, cells_of, strict=True):
        rows.append([str(trial.number), *(text_of(trial.keys[key]) for key in keys), *(cell.text for cell in cells)])
    header = ["trial", *keys, *columns]
    table = markdown(header, rows)
    seeds = range(sweep.search.seed, sweep.search.seed + sweep.seeds)
    chosen = metric_in_words(sweep.metric, sweep.score.name) + (f", mean of {sweep.seeds} seeds" * (sweep.seeds > 1))
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
    paths = [sweep.out / name for name in files]
    if best:
        paths.append(sweep.out / "sweep.png")
        drawing = _draw(sweep, paths[-1])
        paths += write_html(groups, sweep.out / "report.html", title, command, verdict, {"The search": drawing})[:1]
    print(f"\n{table}\n\n{verdict}\n", *paths, sep="\n")


def metric_in_words(metric: str, score: str) -> str:
    """Return a metric as a sentence has it, with a warning where it is of test data."""
    if metric in TEST:
        return f"{metric} TEST {score} at the end (so the best one's is too high: it was chosen by it)"
    return f"{metric.replace('-validation', ' validation')} {score} at the end"


def _verdict(best: Trial, sweep: Sweep) -> str:
    """Return the best trial's scores, of the data that ranked it and of the test data."""
    score, metric = sweep.score, sweep.metric
    words = [f"{score.text(statistics.fmean(best.values(metric)))} by {metric_in_words(metric, score.name)}"]
    for kind in TEST:
        if kind != metric and (values := best.values(kind)):
            words.append(f"{score.text(statistics.fmean(values))} {kind} test {score.name}")
    keys = ", ".join(f"{key} = {text_of(value)}" for key, value in best.keys.items())
    return f"Best: trial {best.number} ({keys}): {'; '.join(words)}."


def _toml(search: Search, best: Trial, comment: str) -> str:
    keys = search.overrides(best.keys)
    lines = [f"# {comment}"]
    if base := str(keys.pop("experiment", "")):
        lines.append(f"extends = {json.dumps(str(Path(base).resolve()) if base.endswith('.toml') else base)}")
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]) + "\n"


def _draw(sweep: Sweep, picture: Path) -> str:
    """Draw the metric against each searched key, as Optuna does, into a file; returns it as SVG."""
    from matplotlib import rc_context
    from optuna.visualization.matplotlib import plot_slice

    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings(action="ignore"):  # of its interface
        panels = plot_slice(sweep.study, target_name=sweep.score.titled(sweep.metric))
        drawing = getattr(panels, "flat", [panels])[0].get_figure()
        drawing.savefig(picture, dpi=120)
        return svg(drawing, "The search")
