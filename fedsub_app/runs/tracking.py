"""Experiment trackers: every round goes to TensorBoard, MLflow or Weights & Biases as well.

rounds.jsonl remains the record. A tracker gets the numbers of every line, the settings as parameters and the run's
folder as its name. When a run is opened, the tracker names the last round that it has: a resumed run continues there,
without duplicate points, and rounds that the tracker has missed are logged later.

A tracker's own environment variables set its place. Without them TensorBoard's events lie in the run directory, so that
``tensorboard --logdir runs`` shows all runs, and MLflow's in ``mlflow.db`` beside it.
"""

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from fedsub_app.common.errors import UserError, one_line, printable
from fedsub_app.common.section import Json, Value

log = logging.getLogger("fedsub")
Name = Literal["none", "tensorboard", "mlflow", "wandb"]
PROJECT = "fedsub"  # MLflow's experiment, the project of Weights & Biases
LAST = "round"  # a number of every round, logged last


class TensorBoard:
    """Event files in the run directory; ``last``, of every tracker: the last round that it has, -1 without one."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        rounds = events.Scalars(LAST) if LAST in events.scalars.Keys() else []
        self.last = max((event.step for event in rounds), default=-1)
        self._writer = SummaryWriter(str(folder))
        if self.last < 0:
            for summary in hparams(dict(settings), {}):
                self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]

    def log_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, server_round)
        self._writer.flush()
        self.last = server_round

    def end(self, completed: bool) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run of the experiment ``fedsub``; it has the run's id as the tag ``fedsub.run-id``."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}"
        self._client = MlflowClient(place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if self._client.get_experiment_by_name(name) is None:
            artifacts = (folder.parent / "mlflow-artifacts").as_uri() if place.startswith("sqlite:") else None
            with suppress(MlflowException):  # another run has made it meanwhile
                self._client.create_experiment(name, artifacts)
        experiment = self._client.get_experiment_by_name(name)
        assert experiment, f"{place}: the experiment {name} cannot be made"
        earlier = self._client.search_runs([experiment.experiment_id], f"tags.`fedsub.run-id` = '{run_id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self.last = max((metric.step for metric in self._client.get_metric_history(self._id, LAST)), default=-1)
            return
        self.last = -1
        tags = {"fedsub.run-id": run_id, "fedsub.folder": str(folder)}
        run = self._client.create_run(experiment.experiment_id, tags=tags, run_name=_name(folder))
        self._id = run.info.run_id
        params = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # MLflow's limit
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write a metric for each number, in one batch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(key, value, now, server_round) for key, value in numbers.items()])
        self.last = server_round

    def end(self, completed: bool) -> None:
        """Set the status with which the run has ended."""
        self._client.set_terminated(self._id, "FINISHED" if completed else "FAILED")


class Wandb:
    """A run of Weights & Biases; a file in the run directory has its last round, which it cannot return offline."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=_name(folder),
            config=dict(settings),
            resume="allow",
            id=run_id,
            dir=str(folder),
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self._file = folder / ".wandb-told"
        self.last = int(self._file.read_text()) if self._file.exists() else -1

    def log_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers as a step."""
        self._wandb.log(dict(numbers), step=server_round)
        self.last = server_round
        self._file.write_text(str(server_round))

    def end(self, completed: bool) -> None:
        """End the run."""
        self._wandb.finish()


Tracker = TensorBoard | MLflow | Wandb
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb}


def check_tracker(name: Name) -> None:
    """Refuse a tracker whose package is missing.

    Raises
    ------
    UserError
        The package is missing; the message has the command that installs it.
    """
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"track = {name!r}: needs its package; `pip install -e '.[{name}]'` in the checkout")


class Tracking:
    """Logs the rounds of a run to a tracker; where the tracker fails, the run continues without it.

    Parameters
    ----------
    folder : the run directory.
    settings : all keys in TOML spelling.

    Raises
    ------
    UserError
        The tracker cannot be opened.
    """

    def __init__(self, name: Name, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        self._name = name
        try:
            self._tracker = TRACKERS[name](folder, run_id, settings) if name != "none" else None
        except Exception as error:  # whatever a tracker raises: no server, no key, a full disk
            raise UserError(f"track = {name!r}: {printable(one_line(error))}") from None

    def follow(self, lines: Sequence[Json]) -> None:
        """Log the new rounds; ``lines``: the lines of rounds.jsonl so far."""
        for line in lines:
            if self._tracker and line["round"] > self._tracker.last:
                self._try("log_round", line["round"], numbers_of(line))

    def end(self, completed: bool) -> None:
        """End the tracker's run."""
        if self._tracker:
            self._try("end", completed)

    def _try(self, verb: str, *arguments: object) -> None:
        try:
            getattr(self._tracker, verb)(*arguments)
        except Exception as error:
            self._tracker = None
            message = "track = %r: %s; the run goes on without it, rounds.jsonl has every round"
            log.warning(message, self._name, printable(one_line(error)))


def numbers_of(line: Json) -> dict[str, float]:
    """Return the numbers of a round's line, with the number of dropped replies; the round itself comes last."""
    numbers = {
        key: float(value)
        for key, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    numbers["dropped"] = float(len(line.get("dropped", ())))
    numbers[LAST] = numbers.pop(LAST)
    return numbers


def _name(folder: Path) -> str:
    """Return a run's name in a tracker: its folder's name, for a seed of a table after the row's folder."""
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("seed") else folder.name
