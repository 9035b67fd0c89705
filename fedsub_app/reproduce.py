"""A paper's table with one command: its experiments over seeds, on the local engine, several at a time.

A table is a file of settings and methods (:mod:`fedsub_app.tables`). Every run has its directory, so a stopped
reproduction goes on where it was; when a run is finished its clients' states, which for personal models are gigabytes,
are dropped.
"""

import contextlib
import csv
import logging
import os
import platform
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from threading import Thread

import torch

from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.files import read_json
from fedsub_app.common.machine import cores
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.config import is_file, own_keys, resolve
from fedsub_app.runs.cost_to_accuracy import ABOUT, COLUMNS, Cost, costs_to_accuracy
from fedsub_app.runs.cost_to_accuracy import cells as reached_cells
from fedsub_app.runs.directory import read_rounds, runs_folder
from fedsub_app.runs.html import write_html
from fedsub_app.runs.records import Group, read_run
from fedsub_app.runs.report import human_seconds, markdown, summary_text
from fedsub_app.settings import Settings
from fedsub_app.tables import Row, Table, read_table

LOOK_SECONDS = 2.0
SAY_SECONDS = 30.0


@dataclass(frozen=True)
class Job:
    """One run of a row with one seed."""

    row: Row
    seed: int
    folder: Path

    @cached_property
    def overrides(self) -> dict[str, Value]:
        """Single keys of the run."""
        return dict(self.row.overrides) | {"seed": self.seed, "run-dir": str(self.folder)}

    @cached_property
    def settings(self) -> Settings:
        """Resolved settings of the run."""
        return resolve(self.overrides)

    def summary(self) -> Json | None:
        """Return the summary if the run is complete and of these settings."""
        with contextlib.suppress(UserError):
            recorded, summary = (read_json(self.folder / name) for name in ("settings.json", "summary.json"))
            if recorded.get("digest") == self.settings.digest() and summary.get("status") == "completed":
                return summary
        return None

    def rounds_done(self) -> int:
        """Return how many rounds are on disk."""
        return max((line["round"] for line in read_rounds(self.folder)), default=0)


def reproduce(
    name: str,
    seeds: int | None,
    overrides: Mapping[str, Value],
    workers: int | None,
    out: Path | None,
    only: Sequence[str] = (),
) -> int:
    """Run a table's rows over its seeds; write ``<name>.md``, ``<name>.csv``, report.html; returns the exit code.

    ``name`` may be the path of a table's file, ``<name>.toml``. ``only`` names settings and methods: rows of these
    alone are run and written.
    """
    table, named = read_table(name), shlex.quote(name)
    name = Path(name).stem if is_file(name) else name
    rows = table.rows
    for word in only:
        if not any(word in (row.setting, row.label) for row in rows):
            known = dict.fromkeys([row.setting for row in rows] + [row.label for row in rows])
            raise UserError(f"--only {word!r}: allowed are {', '.join(map(repr, known))}")
    for names in ({row.setting for row in rows} & {*only}, {row.label for row in rows} & {*only}):
        rows = [row for row in rows if not names or names & {row.setting, row.label}]
    out = out or runs_folder() / "reproduce" / name
    numbers = range(seeds or table.seeds)
    rows = [Row(row.setting, row.label, own_keys({**row.overrides, **overrides}), row.paper) for row in rows]
    for key, value in overrides.items():
        if not any(key in row.overrides for row in rows):
            raise UserError(f"{key} = {shown(value)}: does nothing: no row of the table runs that method")
    jobs = [Job(row, seed, (out / row.slug / f"seed{seed}").resolve()) for seed in numbers for row in rows]
    for job in jobs:
        _ = job.settings  # bad input is reported before the first run starts
    failures = _run_all([job for job in jobs if job.summary() is None], workers or cores())
    machine = f"{platform.machine()}, {cores()} cores" + (", CUDA" if torch.cuda.is_available() else ", no GPU")
    facts = {
        "command": " ".join(["fedsub reproduce", named, *(f"-s {key}={value}" for key, value in overrides.items())])
        + "".join(f" --only {shlex.quote(word)}" for word in only),
        "commit": ", ".join(sorted({_recorded(job, "commit") for job in jobs})),
        "seeds": ", ".join(map(str, numbers)),
        "machine": f"{machine}; one run a core, one thread a run",
        "data": "; ".join(sorted({f"{job.settings.dataset}{_notes(job)}" for job in jobs})),
    }
    _write(out, name, table, facts, rows, jobs)
    if groups := _groups(rows, jobs):
        page, *_ = write_html(groups, out / "report.html", table.title, facts["command"], table.about)
        print(f"\n{summary_text(groups)}\n\n{page}")
    print(f"{out / name}.md")
    for job, reason in failures:
        print(f"failed: {job.row.label}, seed {job.seed}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _groups(rows: Sequence[Row], jobs: Sequence[Job]) -> list[Group]:
    """Return the runs of each row that have begun."""
    begun = {
        row.slug: [job for job in jobs if job.row is row and (job.folder / "settings.json").exists()] for row in rows
    }
    return [
        Group(row.label, tuple(read_run(job.folder) for job in begun[row.slug]), row.setting)
        for row in rows
        if begun[row.slug]
    ]


def _recorded(job: Job, key: str) -> str:
    """Return what the run's settings.json says of where it was made."""
    with contextlib.suppress(UserError):
        return str(read_json(job.folder / "settings.json").get(key, "unknown"))
    return "not run"


def _notes(job: Job) -> str:
    from fedsub_app.data import load_dataset

    notes = load_dataset(job.settings.data).notes
    return f" ({', '.join(notes)})" if notes else ""


def _run_all(jobs: list[Job], workers: int) -> list[tuple[Job, str]]:
    """Run the jobs, say what is done and how long is left; returns those that failed and why."""
    failures: list[tuple[Job, str]] = []
    if not jobs:
        return failures
    total = sum(job.settings.num_rounds for job in jobs)
    before = sum(job.rounds_done() for job in jobs)
    start = said = time.monotonic()
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), initializer=_end_with_parent) as pool:
        running = {pool.submit(run_job, job.overrides, job.folder): job for job in jobs}
        while running:
            done, _ = wait(running, timeout=LOOK_SECONDS)
            for future in done:
                job = running.pop(future)
                reason = future.exception() or future.result()
                if reason:
                    failures.append((job, str(reason)))
                print(
                    f"{'FAILED' if reason else 'done'}  {job.row.setting}  {job.row.label}  seed {job.seed}", flush=True
                )
            if running and time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                finished = sum(job.rounds_done() for job in jobs)
                rate = (finished - before) / (said - start)
                # A resumed run first goes back to its last checkpoint.
                left = human_seconds((total - finished) / rate) if rate > 0 else "unknown"
                print(f"{finished} of {total} rounds, {len(running)} runs to go, left {left}", flush=True)
    return failures


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, also if that was killed. Its runs can be resumed."""
    parent = parent_process()
    assert parent

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def run_job(overrides: Mapping[str, Value], folder: Path) -> str:
    """Run or continue one run in this process; returns why it failed, or nothing."""
    from fedsub_app.client_app import app
    from fedsub_app.federation.local_grid import LocalGrid
    from fedsub_app.runs.directory import RunFailed, settings_of
    from fedsub_app.server_app import run_and_report

    log = logging.getLogger("fedsub")
    keys = dict(overrides)
    try:
        if (folder / "settings.json").exists():
            with contextlib.suppress(UserError):
                recorded = read_json(folder / "settings.json")["settings"]
                # A longer run is begun anew: an extended one was evaluated at its first end, between two due rounds.
                keys["resume"] = settings_of(keys | {"resume": True}).num_rounds == recorded["num-rounds"]
        if not keys.get("resume") and folder.exists():
            shutil.rmtree(folder)  # of other settings: nothing in it belongs to this table
        folder.mkdir(parents=True, exist_ok=True)
        log.handlers[:] = [logging.FileHandler(folder.parent / f"{folder.name}.log")]
        log.setLevel(logging.INFO)
        log.propagate = False
        run_and_report(LocalGrid(app, keys), settings_of(keys))
        shutil.rmtree(folder / "clients", ignore_errors=True)
    except (UserError, RunFailed) as error:
        return str(error)
    return ""


HEADER = (
    "setting",
    "method",
    "rounds to target",
    "paper",
    "final accuracy (%)",
    "paper",
    "on validation data (%)",
    "epsilon",
    "MB down",
    "MB up",
    "GFLOPs",
    "minutes",
)


SPREADS = {"deviation": "mean ± standard deviation", "range": "median (minimum to maximum)"}
COSTS = (("formula-bytes-down", 1e6), ("formula-bytes-up", 1e6), ("flops", 1e9), ("seconds", 60))  # and their unit


def _cells(row: Row, jobs: list[Job], spread: str) -> list[str]:
    summaries = [job.summary() for job in jobs if job.row is row]
    good = [summary for summary in summaries if summary]
    if not good:
        unknown = [""] * (2 + len(COSTS))
        return [row.setting, row.label, "failed", row.paper.rounds, "failed", row.paper.final, *unknown]
    key = next(key for key in good[0] if key.startswith("final-"))
    final = _over_seeds([summary[key] for summary in good], spread)
    final += f" ({len(good)} of {len(summaries)} seeds)" * (len(good) < len(summaries))
    key = key.removesuffix("accuracy") + "validation-accuracy"
    validation = _over_seeds([summary[key] for summary in good], spread) if key in good[0] else ""
    epsilon = f"{max(summary['epsilon'] for summary in good):.3g}" if "epsilon" in good[0] else ""
    reached = [str(summary["rounds-to-target"] or "×") for summary in good if "rounds-to-target" in summary]
    costs = [f"{statistics.mean(summary[f'total-{cost}'] for summary in good) / unit:.1f}" for cost, unit in COSTS]
    reached_in = ", ".join(reached)
    return [row.setting, row.label, reached_in, row.paper.rounds, final, row.paper.final, validation, epsilon, *costs]


def _over_seeds(values: Sequence[float], spread: str) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    if spread == "range":
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


COST_HEADER = ("setting", "method", "threshold (%)", *COLUMNS[:3], "paper", *COLUMNS[3:], "paper")


def _cost_cells(rows: list[Row], jobs: list[Job]) -> list[list[str]]:
    """Return the rows of the costs to accuracy, compared among the finished runs of a setting and a seed."""
    found: dict[tuple[str, str], list[tuple[float, Cost]]] = {}
    for setting, seed in dict.fromkeys((job.row.setting, job.seed) for job in jobs):
        group = [job for job in jobs if (job.row.setting, job.seed) == (setting, seed) and job.summary()]
        if group:
            key = f"{group[0].settings.evaluations[0]}-accuracy"
            threshold, costs = costs_to_accuracy({job.row.label: read_rounds(job.folder) for job in group}, key)
            for label, cost in costs.items():
                found.setdefault((setting, label), []).append((threshold, cost))
    cells = []
    for row in rows:
        mine = found.get((row.setting, row.label), [])
        thresholds = ", ".join(f"{threshold:.2f}" for threshold, _ in mine) or "failed"
        best, rounds, gigabytes, published, gflops = reached_cells([cost for _, cost in mine])
        shown = [thresholds, best, rounds, gigabytes, row.paper.gigabytes, published, gflops, row.paper.gflops]
        cells.append([row.setting, row.label, *shown])
    return cells


def _write(out: Path, name: str, table: Table, facts: Mapping[str, str], rows: list[Row], jobs: list[Job]) -> None:
    spread = table.spread
    tables: dict[str, tuple[Sequence[str], list[list[str]]]] = {
        name: (HEADER, [_cells(row, jobs, spread) for row in rows])
    }
    lines = [f"# {table.title}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    lines += [
        f"Rounds to target: per seed, × = not reached. Accuracy at the end: {SPREADS[spread]} over seeds. MB by the",
        "papers' formula, GFLOPs (of the dense network, mask learning included) and minutes are per run.",
        "",
        _filled_columns(*tables[name]),
        "",
    ]
    if table.cost_to_accuracy:
        costs = tables[f"{name}-cost-to-accuracy"] = (COST_HEADER, _cost_cells(rows, jobs))
        lines += ["## Cost to accuracy", "", f"Per seed, among the methods of this table. {ABOUT}", ""]
        lines += [_filled_columns(*costs), ""]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text("\n".join(lines))
    for file_name, (header, content) in tables.items():
        with (out / f"{file_name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(content)


def _filled_columns(header: Sequence[str], cells: list[list[str]]) -> str:
    """Return a Markdown table of the columns in which any row has something."""
    used = [column for column in range(len(header)) if any(row[column] for row in cells)]
    return markdown([header[column] for column in used], [[row[column] for column in used] for row in cells])
