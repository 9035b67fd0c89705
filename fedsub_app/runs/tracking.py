"""Experiment trackers: every round goes to TensorBoard, MLflow or Weights & Biases as well.

rounds.jsonl remains the record. A tracker gets the numbers of every line, the settings as parameters and the run's
folder as its name. It knows the last round that it has (of TensorBoard a file in the run directory does): a resumed run
continues there, without duplicate points, and rounds that the tracker has missed are logged later.

A tracker's own environment variables set its place. Without them TensorBoard's events lie in the run directory, so that
``tensorboard --logdir runs`` shows all runs, and MLflow's in ``mlflow.db`` beside it.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from fedsub_app.common.errors import UserError, one_line, printable
from fedsub_app.common.files import write_atomic
from fedsub_app.common.section import Json, Value

log = logging.getLogger("fedsub")
Name = Literal["none", "tensorboard", "mlflow", "wandb"]
PROJECT = "fedsub"  # MLflow's experiment, the project of Weights & Biases
LAST = "round"  # a number of every round, logged last


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._file = folder / ".tensorboard-told"
        told = self._file.read_bytes() if self._file.exists() and any(folder.glob("events.out.tfevents.*")) else b""
        self.last = int(told) if told.isdigit() else -1  # a power cut may have torn the file
        self._writer = SummaryWriter(str(folder))
        for summary in hparams(dict(settings), {}) if self.last < 0 else ():
            self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]

    def log_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, server_round)
        self._writer.flush()
        write_atomic(self._file, str(server_round).encode(), wait=False)

    def end(self, completed: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of the experiment ``fedsub``; it has the run's id as the tag ``fedsub.run-id``."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}"
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with FileLock(folder.parent / ".mlflow.lock", mode=0o600):  # runs that begin together make the database once
            self._mlflow.set_tracking_uri(place)
            experiment = self._mlflow.set_experiment(named).experiment_id
        self._client = self._mlflow.MlflowClient()
        earlier = self._client.search_runs([experiment], f"tags.`fedsub.run-id` = '{run_id}'")
        tags = {"fedsub.run-id": run_id, "fedsub.folder": str(folder)}
        run = earlier[0] if earlier else self._client.create_run(experiment, tags=tags, run_name=_name(folder))
        self._id, self.last = run.info.run_id, int(run.data.metrics.get(LAST, -1))
        self._client.update_run(self._id, status="RUNNING")
        if not earlier:
            self._mlflow.log_params(dict(settings), run_id=self._id)

    def log_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=server_round, run_id=self._id)

    def end(self, completed: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if completed else "FAILED")


class Wandb:
    """A run of Weights & Biases; offline a resumed run begins a file of its own, which gets all rounds."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        wandb: Any = importlib.import_module("wandb")
        # Not "default", which would return an earlier run of this process that has not ended.
        quiet = wandb.Settings(console="off", silent=True, reinit="create_new")
        about = {"id": run_id, "name": _name(folder), "config": dict(settings), "dir": str(folder)}
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(project=project, resume="allow", settings=quiet, **about)
        self.last = self._run.starting_step - 1

    def log_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=server_round, commit=True)

    def end(self, completed: bool) -> None:
        self._run.finish(exit_code=int(not completed))


TRACKERS: dict[str, type[TensorBoard | MLflow | Wandb]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb}


def check_tracker(name: Name) -> None:
    """Refuse a tracker whose package is missing."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"track = {name!r}: needs its package; `pip install -e '.[{name}]'` in the checkout")


class Tracking:
    """Logs the rounds of a run to a tracker; where the tracker fails, the run continues without it."""

    def __init__(self, name: Name, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        self._name = name
        try:
            self._tracker = TRACKERS[name](folder, run_id, settings) if name != "none" else None
        except Exception as error:  # whatever a tracker raises: no server, no key, a full disk
            raise UserError(f"track = {name!r}: {printable(one_line(error))}") from None

    def follow(self, lines: Sequence[Json]) -> None:
        """Log the new rounds; ``lines``: the lines of rounds.jsonl so far."""
        for line in lines:
            with self._optional():
                if self._tracker and line["round"] > self._tracker.last:
                    self._tracker.log_round(line["round"], numbers_of(line))
                    self._tracker.last = line["round"]

    def end(self, completed: bool) -> None:
        """End the tracker's run; a second call does nothing."""
        with self._optional():
            tracker, self._tracker = self._tracker, None
            if tracker:
                tracker.end(completed)

    @contextmanager
    def _optional(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            message = "track = %r: %s; the run goes on without it, rounds.jsonl has every round"
            log.warning(message, self._name, printable(one_line(error)))


def numbers_of(line: Json) -> dict[str, float]:
    """Return the numbers of a round's line, with the number of dropped replies; the round itself comes last."""
    numbers = {k: float(v) for k, v in line.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    numbers["dropped"] = float(len(line.get("dropped", ())))
    numbers[LAST] = numbers.pop(LAST)
    return numbers


def _name(folder: Path) -> str:
    """Return a run's name in a tracker: its folder's name, for a seed of a table after the row's folder."""
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("seed") else folder.name
