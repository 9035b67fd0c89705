"""A sweep: one experiment with many settings, compared on validation data; grid, random search or Optuna's.

Every trial is in an Optuna study (``sweep.journal``) before it starts and is a run, or one for each seed, in a
directory of its own. The same command goes on where a sweep was stopped: finished trials are kept, begun ones continue
from their last checkpoint. A grid and random search have the same trials each time; Optuna's proposals depend on the
trials that have ended by then, so that they are the same with one worker.
"""

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from optuna.distributions import CategoricalDistribution

from fedsub_app.common.errors import UserError
from fedsub_app.config import resolve
from fedsub_app.runs.directory import runs_folder
from fedsub_app.settings import Settings
from fedsub_app.studies.batch import gpus_of, run_all
from fedsub_app.studies.search_space import Space, as_written, read_space
from fedsub_app.studies.sweep_results import metric_in_words, write_results
from fedsub_app.studies.trials import Search, Sweep


def sweep(
    experiment: str,
    pairs: Sequence[str],
    *,
    trials: int | None = None,
    method: str | None = None,
    metric: str | None = None,
    seeds: int = 1,
    workers: int | None = None,
    slurm: Sequence[str] = (),
    out: Path | None = None,
) -> int:
    """Run or continue a sweep; write its tables, picture, page and best settings; returns the exit code.

    The arguments are the command's options; ``pairs``: see :func:`~fedsub_app.studies.search_space.read_space`.
    """
    fixed, space = read_space(pairs)
    search = Search(experiment, fixed, space, _search_method(space, method, trials), trials)
    settings = [resolve(search.overrides(keys)) for keys in search.examples()]
    chosen_metric = metric_of(settings[0], metric)
    planned = Sweep(search, chosen_metric, settings[0].score, seeds, out or _folder(search, chosen_metric))
    done = sum(job.summary() is not None for trial in planned.started() for job in trial.jobs)
    chosen_by = metric_in_words(chosen_metric, settings[0].score.name)
    print(f"{search.count} trials in {planned.out}, chosen by {chosen_by}", flush=True)
    failures = run_all(planned.jobs(), seeds * search.count - done, workers, gpus_of(settings), slurm)
    planned.tell()
    for job, reason in failures:
        print(f"failed: {' '.join(job.name.split())}: {reason}", file=sys.stderr)
    write_results(planned, _command(planned, pairs, metric))
    return 1 if failures else 0


def metric_of(settings: Settings, metric: str | None) -> str:
    """Return the score that ranks the trials; ``None`` chooses the first one of validation data."""
    client_kinds = [kind for kind in settings.evaluations if kind != "global"]
    if metric is None:
        if not settings.validation_fraction:
            raise UserError(
                "validation-fraction = 0.0: must be above 0, a sweep compares on validation data; "
                f"--metric {settings.evaluations[0]} would compare on test data"
            )
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
        raise UserError(
            f"{ranges[0]} = {as_written(space[ranges[0]])}: a range has no grid; --search random or optuna, or values"
        )
    if trials is None and (ranges or method == "optuna"):
        raise UserError("--trials: how many settings to try must be said, with a range and with Optuna")
    return method


def _folder(search: Search, metric: str) -> Path:
    text = json.dumps(search.describe(metric), sort_keys=True)
    name = (search.experiment or "sweep").removesuffix(".toml").strip("/").replace("/", "-")
    return runs_folder() / "sweeps" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _command(planned: Sweep, pairs: Sequence[str], metric: str | None) -> str:
    search = planned.search
    words = ["fedsub", "sweep", *([search.experiment] if search.experiment else [])]
    words += [word for pair in pairs for word in ("-s", shlex.quote(pair))]
    words += ["--search", search.method, "--trials", str(search.count)]
    words += ["--metric", metric] if metric else []
    return " ".join([*words, *(["--seeds", str(planned.seeds)] if planned.seeds > 1 else [])])
