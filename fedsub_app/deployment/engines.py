"""The engines' common door: it starts a run, and draws its pictures and logs its summary at the end."""

import logging
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.late import uncollected
from fedsub_app.common.machine import cores
from fedsub_app.common.section import Json, Value
from fedsub_app.data.settings import DataSettings
from fedsub_app.reports.records import read_run
from fedsub_app.runs.recorded import RunFailed, settings_of
from fedsub_app.settings import Settings

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedsub_app.common.tasks import Task
    from fedsub_app.federation.workers import App
    from fedsub_app.training.problem import Model, Problem

log = logging.getLogger("fedsub")
# Keys that name what model= and data= replace.
REPLACED = {"model", "model-options", *DataSettings().toml()} - {"seed", "task", "metrics", "data-dir"}


def run_local(
    overrides: Mapping[str, Value],
    workers: int | None = 1,
    model: "Model | None" = None,
    data: object = None,
    wait: bool = False,
    task: "Task | str | None" = None,
) -> Json:
    """Run on the local engine as :func:`fedsub_app.run` does, with its arguments and errors; returns the summary.

    ``workers``: number of processes, at most one a client; 1: this process; None: one a core, or one a GPU on GPUs.
    ``wait``: draw the pictures here, before the end, instead of in a process that outlives this one by a second or two.
    """
    with uncollected():
        from fedsub_app.client_app import NodeApp
        from fedsub_app.common.device import check_defaults, pick_device, visible_gpus
        from fedsub_app.common.own_code import OWN
        from fedsub_app.common.tasks import registered
        from fedsub_app.federation.workers import local_grid
        from fedsub_app.runs.node import named
        from fedsub_app.training.problem import Problem

    check_defaults()
    if (model is None) != (data is None):
        raise UserError(f"{'model' if data is None else 'data'}=: model= and data= go together")
    if task:
        overrides = {**overrides, "task": registered(task)}
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UserError(f"workers = {workers!r}: must be an integer from 1 on, or None for one a core")
    if model:
        for key in overrides:
            if key in REPLACED:
                raise UserError(f"{key} = {overrides[key]!r}: not with model= and data=")
        overrides = {**overrides, "model": getattr(model, "__name__", OWN), "dataset": OWN}
    settings = settings_of(overrides)
    problem = Problem.own(model, data, settings, traced=True) if model else None
    app: App = NodeApp(partial(named, problem=problem), __name__) if problem else "fedsub_app.client_app"
    on_gpu = pick_device(settings.device).type == "cuda"
    if workers is None:
        workers = len(visible_gpus()) if on_gpu else cores()
    grid = local_grid(app, overrides, min(workers, settings.num_clients), fork=not on_gpu)
    try:
        return run_and_report(grid, settings, problem, wait)
    finally:
        grid.close()


def run_and_report(grid: "Grid", settings: Settings, problem: "Problem | None" = None, wait: bool = False) -> Json:
    """Run all rounds as :func:`run_experiment` does, draw the pictures, also of a failed run, log the summary."""
    with uncollected():
        from fedsub_app.runs.console import summary_table
        from fedsub_app.runs.loop import run_experiment

    try:
        summary = run_experiment(grid, settings, problem)
    except RunFailed as failure:
        _draw(failure.folder, wait)
        raise
    _draw(Path(summary["run-dir"]), wait)
    log.info("%s", summary_table(summary, settings.score))
    return summary


def _draw(folder: Path, wait: bool) -> None:
    """Draw a run's pictures, or start a process that does, for matplotlib takes a second; a failure is logged only."""
    if not find_spec("matplotlib"):
        log.warning("no pictures: needs the package matplotlib; `pip install 'fedsub[run]'`")
        return
    try:
        if wait:
            read_run(folder).draw()
            return
        subprocess.Popen(
            [sys.executable, "-m", "fedsub_app.reports.records", str(folder)],
            cwd=Path(__file__).resolve().parents[2],  # of the package, which may not be installed
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, UserError) as error:
        log.warning("no pictures: %s", one_line(error))


def log_lines(file: Path | None = None) -> None:
    """Log plain lines to a file, else to the current stdout, which Flower replaces to stream it."""
    log.handlers[:] = [logging.FileHandler(file) if file else logging.StreamHandler(sys.stdout)]
    logging.raiseExceptions = False  # where nobody reads the lines, as in `fedsub run | head`, the run goes on
    log.setLevel(logging.INFO)
    log.propagate = False
